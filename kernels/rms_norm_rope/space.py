"""The tuning spaces of RMSNorm and rotary embedding, and the grids that follow from a config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from ...datasets import KernelConfig, Problem
from ..config_limits import Knobs, KnobValues

#: Knobs and their values. A tile is ROWS tokens x HEADS heads; num_stages says nothing to a kernel without a loop,
#: so it is Triton's default.
FORWARD_SPACE: Mapping[str, Sequence[int]] = {
    "ROWS": [1, 2, 4, 8, 16],
    "HEADS": [1, 2, 4, 8, 16, 32],
    "num_warps": [1, 2, 4, 8],
    "num_stages": [3],
}
#: STEPS tiles a program, one after another: each program has a partial sum of the weights' gradients.
BACKWARD_SPACE: Mapping[str, Sequence[int]] = {
    "ROWS": [1, 2, 4, 8],
    "HEADS": [1, 2, 4, 8, 16],
    "STEPS": [1, 4, 16],
    "num_warps": [1, 2, 4, 8],
    "num_stages": [1, 2, 3],
}
SPACES = {"rms_norm_rope_fwd": FORWARD_SPACE, "rms_norm_rope_bwd": BACKWARD_SPACE}
VALUES = {family: KnobValues(family, space) for family, space in SPACES.items()}
#: Elements of one head that a thread may hold: beyond, the kernels spill (a backward tile holds five of this size).
MOST_ELEMENTS = {"rms_norm_rope_fwd": 64, "rms_norm_rope_bwd": 16}
#: Heads of 128 elements, which most models have, decide what is worth declaring: with less than this a thread, half
#: of a warp's lanes would load less than 16 bytes at a time.
_USUAL_HEAD, _LEAST_ELEMENTS = 128, 4
#: The largest head.
MOST_HEAD_DIM = 512


@lru_cache
def full_space(family: str) -> tuple[KernelConfig, ...]:
    """Every config of a family that is of use for heads of 128 elements."""
    return tuple(VALUES[family].grid(partial(_is_of_use, family)))


def _is_of_use(family: str, knobs: Mapping[str, int]) -> bool:
    held = elements_per_thread(knobs, _USUAL_HEAD)
    takes_one_step = knobs.get("STEPS") == 1  # where stages are all alike
    return _LEAST_ELEMENTS <= held <= MOST_ELEMENTS[family] and not (takes_one_step and knobs["num_stages"] > 1)


def elements_per_thread(config: Knobs, head_dim: int) -> float:
    """Elements of a tile, padding included, that one thread holds.

    >>> elements_per_thread(KernelConfig.of(ROWS=2, HEADS=4, num_warps=4), head_dim=96)
    8.0
    """
    return float(config["ROWS"] * config["HEADS"] * 2 * block_of(head_dim) / (32 * config["num_warps"]))


def block_of(head_dim: int) -> int:
    """The power of two that holds half a head."""
    return 1 << max(head_dim // 2 - 1, 0).bit_length()


def block_constants(head_dim: int) -> dict[str, int]:
    """The constants of a binary that follow from the head's size."""
    return {"HEAD_DIM": head_dim, "BLOCK": block_of(head_dim)}


def head_blocks(heads: int, config: Knobs) -> Any:
    """Tiles side by side that hold all heads of a token."""
    return -(-heads // config["HEADS"])


def forward_grid(tokens: int, q_heads: int, k_heads: int, config: Knobs) -> Any:
    """Programs of a forward launch."""
    blocks = head_blocks(q_heads, config) + head_blocks(k_heads, config)
    return blocks * -(-tokens // config["ROWS"])


def chunks_of(tokens: int, config: Knobs) -> Any:
    """Programs of a backward launch that share the tokens."""
    return -(-tokens // (config["ROWS"] * config["STEPS"]))


def backward_grid(tokens: int, q_heads: int, k_heads: int, config: Knobs) -> Any:
    """Programs of a backward launch."""
    return chunks_of(tokens, config) * (head_blocks(q_heads, config) + head_blocks(k_heads, config))


def wrong_tile(family: str, config: KernelConfig, problem: Problem) -> str | None:
    """The reason why registers cannot hold the config's tile, or None."""
    held, most = elements_per_thread(config, problem["head_dim"]), MOST_ELEMENTS[family]
    if held > most:
        return (
            f"ROWS x HEADS cannot be {config['ROWS']} x {config['HEADS']} with num_warps = {config.num_warps} and "
            f"heads of {problem['head_dim']}: a thread would hold {held:g} elements, and {most} at most fit"
        )
    return None
