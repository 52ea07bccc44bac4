"""The tuning spaces of RMSNorm and rotary embedding, the grid of a config, and features of its tile.

How many registers a program takes, and so how many programs an SM holds, depends on the size of a head, which
`BinaryFacts` do not distinguish. So it is estimated here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...datasets import DeviceSpec, KernelConfig, Problem
from ..config_limits import MOST_PROGRAMS, MOST_REGISTERS, MOST_THREADS, Knobs, KnobValues

#: Knobs and their values. A tile is ROWS tokens x HEADS heads. num_stages has no effect on a kernel without a loop, so
#: it is Triton's default.
FORWARD_SPACE: Mapping[str, Sequence[int]] = {
    "ROWS": [1, 2, 4, 8, 16],
    "HEADS": [1, 2, 4, 8, 16, 32],
    "num_warps": [1, 2, 4, 8],
    "num_stages": [3],
}
#: A program handles STEPS tiles one after another, and has one partial sum of the weights' gradients.
BACKWARD_SPACE: Mapping[str, Sequence[int]] = {
    "ROWS": [1, 2, 4, 8],
    "HEADS": [1, 2, 4, 8, 16],
    "STEPS": [1, 4, 16],
    "num_warps": [1, 2, 4, 8],
    "num_stages": [1, 2, 3],
}
SPACES = {"rms_norm_rope_fwd": FORWARD_SPACE, "rms_norm_rope_bwd": BACKWARD_SPACE}
VALUES = {family: KnobValues(family, space) for family, space in SPACES.items()}
#: The most elements of a tile per thread: with more, the kernels spill (a backward tile keeps five values per element).
MOST_ELEMENTS = {"rms_norm_rope_fwd": 64, "rms_norm_rope_bwd": 16}
#: The head size for which configs are declared, the most common one; and the fewest elements per thread for it: with
#: fewer, half of a warp's lanes would load less than 16 bytes at a time.
_USUAL_HEAD, _LEAST_ELEMENTS = 128, 4
#: The largest head_dim.
MOST_HEAD_DIM = 512


@lru_cache
def full_space(family: str) -> tuple[KernelConfig, ...]:
    """Return every config of a family that is useful for heads of 128 elements."""
    return tuple(VALUES[family].grid(partial(_is_of_use, family)))


def _is_of_use(family: str, knobs: Mapping[str, int]) -> bool:
    """Return whether a config is worth measuring: its tile has a useful size, and its num_stages has an effect."""
    held = elements_per_thread(knobs, _USUAL_HEAD)
    takes_one_step = knobs.get("STEPS") == 1  # then num_stages has no effect
    return _LEAST_ELEMENTS <= held <= MOST_ELEMENTS[family] and not (takes_one_step and knobs["num_stages"] > 1)


def elements_per_thread(config: Knobs, head_dim: int) -> float:
    """Return the elements of a tile, including padding, that one thread holds.

    >>> elements_per_thread(KernelConfig.of(ROWS=2, HEADS=4, num_warps=4), head_dim=96)
    8.0
    """
    return float(config["ROWS"] * config["HEADS"] * 2 * block_of(head_dim) / (32 * config["num_warps"]))


def block_of(head_dim: int) -> int:
    """Return the smallest power of two that is at least half a head."""
    return 1 << max(head_dim // 2 - 1, 0).bit_length()


def block_constants(head_dim: int) -> dict[str, int]:
    """Return the constexpr parameters that depend on the head's size."""
    return {"HEAD_DIM": head_dim, "BLOCK": block_of(head_dim)}


def head_blocks(heads: int, config: Knobs) -> Any:
    """Return the number of tiles that cover all heads of a token."""
    return -(-heads // config["HEADS"])


def forward_grid(tokens: int, q_heads: int, k_heads: int, config: Knobs) -> Any:
    """Return the number of programs of a forward launch: one for each tile of ROWS tokens and HEADS heads of q or k."""
    blocks = head_blocks(q_heads, config) + head_blocks(k_heads, config)
    return blocks * -(-tokens // config["ROWS"])


def chunks_of(tokens: int, config: Knobs) -> Any:
    """Return the number of chunks into which a backward launch divides the tokens.

    A program computes ROWS x STEPS tokens of some heads.
    """
    return -(-tokens // (config["ROWS"] * config["STEPS"]))


def backward_grid(tokens: int, q_heads: int, k_heads: int, config: Knobs) -> Any:
    """Return the number of programs of a backward launch: one for each chunk of tokens and tile of heads of q or k."""
    return chunks_of(tokens, config) * (head_blocks(q_heads, config) + head_blocks(k_heads, config))


def wrong_tile(family: str, config: KernelConfig, problem: Problem) -> str | None:
    """Return why the config's tile does not fit in registers, or None if it does."""
    held, most = elements_per_thread(config, problem["head_dim"]), MOST_ELEMENTS[family]
    if held > most:
        return (
            f"ROWS x HEADS must be smaller than {config['ROWS']} x {config['HEADS']} with num_warps = "
            f"{config.num_warps} and head_dim = {problem['head_dim']}: a thread would hold {held:g} elements, but at "
            f"most {most} fit"
        )
    return None


TILE_FEATURES = (
    "elements_per_thread",
    "tile_bytes",
    "head_use",  # shares of the tiles' heads and tokens that are not padding
    "token_use",
    "log_estimated_waves",
    "estimated_wave_fill",
    "in_flight_bytes_per_sm",
    "log_partial_bytes",
)
# Registers per element that a thread holds (backward x, its gradient, and two sums), and the other registers: medians
# over the binaries for heads of 128 elements on sm_90, by least squares.
_AN_ELEMENT = {"rms_norm_rope_fwd": 1.5, "rms_norm_rope_bwd": 6.0}
_OTHER_REGISTERS = 22


def tile_features(
    problem: Problem, device: DeviceSpec, knobs: Mapping[str, NDArray[np.int64]], programs: NDArray[np.float64]
) -> NDArray[np.float32]:
    """Return the features of tiles, (n_configs, len(TILE_FEATURES)), finite.

    Args:
        problem: The problem.
        device: The GPU.
        knobs: The values of each knob, (n_configs,).
        programs: The number of programs of each config, (n_configs,).
    """
    rows, heads, warps, stages = (knobs[name] for name in ("ROWS", "HEADS", "num_warps", "num_stages"))
    tokens, head_dim = max(problem["tokens"], 1), problem["head_dim"]
    q_heads, kv_heads = problem["q_heads"], problem["kv_heads"]
    threads = warps * device.warp_size
    elements = rows * heads * 2 * block_of(head_dim) / threads
    registers = np.minimum(_OTHER_REGISTERS + _AN_ELEMENT[problem.family] * elements, MOST_REGISTERS)
    by_threads = np.minimum(MOST_THREADS // threads, MOST_PROGRAMS)
    residency = np.maximum(np.minimum(device.registers_per_sm // (registers * threads), by_threads), 1)
    launched = np.maximum(programs, 1.0)
    waves = launched / (device.sm_count * residency)
    tile_bytes = elements * threads * problem.itemsize
    tile_rows = rows * knobs.get("STEPS", 1)
    columns = (
        elements,
        tile_bytes,
        (q_heads + kv_heads) / (heads * (head_blocks(q_heads, knobs) + head_blocks(kv_heads, knobs))),
        tokens / (-(-tokens // tile_rows) * tile_rows),
        np.log2(waves),
        waves / np.ceil(waves),
        residency * tile_bytes * np.maximum(stages - 1, 1),
        np.log2(launched * head_dim * 4),
    )
    return np.stack(columns, axis=1).astype(np.float32)
