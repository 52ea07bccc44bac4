"""The tuning spaces of RMSNorm with rotary embedding, their grids, and features of a config's tile.

The ranker sees these features in addition to the generic ones. A program's registers, and thus the number of programs
per SM, depend on the head size. `BinaryFacts` do not distinguish head sizes, so the registers are estimated here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...datasets import DeviceSpec, KernelConfig, Problem
from ..config_limits import MOST_PROGRAMS, MOST_REGISTERS, MOST_THREADS, Knobs, KnobValues

#: Knobs and their values. A tile is ROWS tokens x HEADS heads. The forward kernel has no loop, so num_stages has no
#: effect and is Triton's default.
FORWARD_SPACE: Mapping[str, Sequence[int]] = {
    "ROWS": [1, 2, 4, 8, 16],
    "HEADS": [1, 2, 4, 8, 16, 32],
    "num_warps": [1, 2, 4, 8],
    "num_stages": [3],
}
#: A backward program computes STEPS tiles in sequence, and one partial sum of the weights' gradients.
BACKWARD_SPACE: Mapping[str, Sequence[int]] = {
    "ROWS": [1, 2, 4, 8],
    "HEADS": [1, 2, 4, 8, 16],
    "STEPS": [1, 4, 16],
    "num_warps": [1, 2, 4, 8],
    "num_stages": [1, 2, 3],
}
SPACES = {"rms_norm_rope_fwd": FORWARD_SPACE, "rms_norm_rope_bwd": BACKWARD_SPACE}
VALUES = {family: KnobValues(family, space) for family, space in SPACES.items()}
#: Most elements of a tile per thread: with more, the kernels spill (the backward kernel holds five such tiles).
MOST_ELEMENTS = {"rms_norm_rope_fwd": 64, "rms_norm_rope_bwd": 16}
#: The head size of most models, for which the space is designed, and the least elements per thread: with fewer, half of
#: a warp's lanes would load less than 16 bytes at a time.
_USUAL_HEAD, _LEAST_ELEMENTS = 128, 4
#: The largest head size.
MOST_HEAD_DIM = 512


@lru_cache
def full_space(family: str) -> tuple[KernelConfig, ...]:
    """Return all configs of a family worth measuring, judged for heads of 128 elements."""
    return tuple(VALUES[family].grid(partial(_is_of_use, family)))


def _is_of_use(family: str, knobs: Mapping[str, int]) -> bool:
    """Return whether a config is worth measuring for heads of 128 elements."""
    held = elements_per_thread(knobs, _USUAL_HEAD)
    takes_one_step = knobs.get("STEPS") == 1  # then num_stages has no effect
    return _LEAST_ELEMENTS <= held <= MOST_ELEMENTS[family] and not (takes_one_step and knobs["num_stages"] > 1)


def elements_per_thread(config: Knobs, head_dim: int) -> float:
    """Return the elements of a tile that one thread holds, padding included.

    >>> elements_per_thread(KernelConfig.of(ROWS=2, HEADS=4, num_warps=4), head_dim=96)
    8.0
    """
    return float(config["ROWS"] * config["HEADS"] * 2 * block_of(head_dim) / (32 * config["num_warps"]))


def block_of(head_dim: int) -> int:
    """Return the smallest power of two that is at least half the head size."""
    return 1 << max(head_dim // 2 - 1, 0).bit_length()


def block_constants(head_dim: int) -> dict[str, int]:
    """Return the kernels' constants that depend on the head size."""
    return {"HEAD_DIM": head_dim, "BLOCK": block_of(head_dim)}


def head_blocks(heads: int, config: Knobs) -> Any:
    """Return the number of tiles that cover all heads of a token."""
    return -(-heads // config["HEADS"])


def forward_grid(tokens: int, q_heads: int, k_heads: int, config: Knobs) -> Any:
    """Return the number of programs of a forward launch."""
    blocks = head_blocks(q_heads, config) + head_blocks(k_heads, config)
    return blocks * -(-tokens // config["ROWS"])


def chunks_of(tokens: int, config: Knobs) -> Any:
    """Return the number of chunks into which a backward launch divides the tokens."""
    return -(-tokens // (config["ROWS"] * config["STEPS"]))


def backward_grid(tokens: int, q_heads: int, k_heads: int, config: Knobs) -> Any:
    """Return the number of programs of a backward launch."""
    return chunks_of(tokens, config) * (head_blocks(q_heads, config) + head_blocks(k_heads, config))


def wrong_tile(family: str, config: KernelConfig, problem: Problem) -> str | None:
    """Return why a config's tile does not fit into registers, or None."""
    held, most = elements_per_thread(config, problem["head_dim"]), MOST_ELEMENTS[family]
    if held > most:
        return (
            f"ROWS x HEADS cannot be {config['ROWS']} x {config['HEADS']} with num_warps = {config.num_warps} and "
            f"head_dim = {problem['head_dim']}: a thread would hold {held:g} elements, but at most {most} fit"
        )
    return None


TILE_FEATURES = (
    "elements_per_thread",
    "tile_bytes",
    "head_use",  # fractions of the tiles' heads and tokens that are not padding
    "token_use",
    "log_estimated_waves",
    "estimated_wave_fill",
    "in_flight_bytes_per_sm",
    "log_partial_bytes",
)
# Registers per element that a thread holds (backward these are x, its gradient and two sums), and other registers.
# Fitted by least squares to the medians of binaries for heads of 128 elements on sm_90.
_AN_ELEMENT = {"rms_norm_rope_fwd": 1.5, "rms_norm_rope_bwd": 6.0}
_OTHER_REGISTERS = 22


def tile_features(
    problem: Problem, device: DeviceSpec, knobs: Mapping[str, NDArray[np.int64]], programs: NDArray[np.float64]
) -> NDArray[np.float32]:
    """Return the features named in `TILE_FEATURES`, (n_configs, n_features), all finite.

    Args:
        problem: The problem.
        device: The GPU.
        knobs: Each knob's values over all configs, (n_configs,).
        programs: The grid size of each config, (n_configs,).
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
