"""The tuning space of dW in fp8, the rules for its knobs, and the shared memory that a config needs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product

from ...datasets import KernelConfig
from ..config_limits import Knobs, KnobValues, accumulator_registers, undecided
from .scales import SCALED

#: The knobs: BLOCK_M x BLOCK_N is the tile of N x K, and BLOCK_K the contraction's step, one block of the scales.
DW_KNOBS = (
    "BLOCK_M",
    "BLOCK_N",
    "BLOCK_K",
    "GROUP_M",  # M tiles that are adjacent in the L2 order; a runtime argument
    "PROGRAMS_PER_SM",  # the persistent grid divided by the number of SMs; a runtime argument
    "TMA",  # for the operands and the output
    "CONSUMERS",  # groups of four warps that multiply while one more warp loads; 0: all warps do both
    "IN_FLIGHT",  # products that each group of multiplying warps has in flight
    "num_warps",
    "num_stages",
)
# float32 accumulators per thread; each exists twice, because every step's product is a sum of its own.
_MOST_ACCUMULATORS = 64
# Tiles of the warp-specialized kernel, (BLOCK_M, IN_FLIGHT), with their values of num_stages: fewer do not hide
# latency, more do not fit.
_SPECIALIZED = {(128, 1): (4, 5, 6), (128, 2): (4, 5, 6), (256, 1): (3, 4)}
_SPECIALIZED_N = 128
_PLAIN = ((64, 64, 4), (64, 128, 4), (128, 128, 8))  # (BLOCK_M, BLOCK_N, num_warps)
_VALID: dict[str, tuple[str, tuple[int, ...] | range]] = {
    "BLOCK_M": ("64, 128 or 256", (64, 128, 256)),
    "BLOCK_N": ("64, 128 or 256", (64, 128, 256)),
    "BLOCK_K": (str(SCALED), (SCALED,)),
    "GROUP_M": ("between 1 and 1024", range(1, 1025)),
    "PROGRAMS_PER_SM": ("between 0 and 64, where 0 launches one program per tile", range(65)),
    "TMA": ("0 or 1", (0, 1)),
    "CONSUMERS": ("0 or 2", (0, 2)),
    "IN_FLIGHT": ("1 or 2", (1, 2)),
    "num_warps": ("4 or 8", (4, 8)),
    "num_stages": ("between 1 and 8", range(1, 9)),
}
DW_VALUES = KnobValues.in_words("scaled_grouped_gemm_dw", _VALID)


def wrong_dw_tile(config: KernelConfig) -> str | None:
    """Return why the knobs of a config, each valid alone, cannot be combined, or None if they can.

    >>> wrong_dw_tile(KernelConfig.of(BLOCK_M=256, BLOCK_N=128, CONSUMERS=0, IN_FLIGHT=1, num_warps=8))
    'BLOCK_M x BLOCK_N must be at most 16384 elements with CONSUMERS = 0 and num_warps = 8 but is 256 x 128'
    """
    m, n, warps = config["BLOCK_M"], config["BLOCK_N"], config.num_warps
    if not config["CONSUMERS"]:
        if config["IN_FLIGHT"] > 1:
            return f"IN_FLIGHT must be 1 with CONSUMERS = 0 but is {config['IN_FLIGHT']}"
        if accumulator_registers(m, n, warps) > _MOST_ACCUMULATORS:
            most = _MOST_ACCUMULATORS * 32 * warps
            given = f"CONSUMERS = 0 and num_warps = {warps}"
            return f"BLOCK_M x BLOCK_N must be at most {most} elements with {given} but is {m} x {n}"
        return None
    decided = {"BLOCK_N": _SPECIALIZED_N, "PROGRAMS_PER_SM": 1, "TMA": 1, "num_warps": 4}
    if (wrong := undecided(config.to_json(), decided)) is not None:
        return wrong
    if (m, config["IN_FLIGHT"]) not in _SPECIALIZED:
        able = ", ".join(f"{rows} and {flight}" for rows, flight in _SPECIALIZED)
        given = f"CONSUMERS = {config['CONSUMERS']} but are {m} and {config['IN_FLIGHT']}"
        return f"BLOCK_M and IN_FLIGHT must be {able} with {given}"
    if config.num_stages < 2:
        return f"num_stages must be at least 2 with CONSUMERS = {config['CONSUMERS']} but is {config.num_stages}"
    return None


@lru_cache(maxsize=1)
def full_dw_space() -> tuple[KernelConfig, ...]:
    """Return every config worth measuring."""
    return tuple(KernelConfig.of(**dict(zip(DW_KNOBS, knobs, strict=True))) for knobs in (*_specialized(), *_plain()))


def _specialized() -> Iterator[tuple[int, ...]]:
    """Yield the knob values of the configs with CONSUMERS."""
    for (m, flight), stages_of_tile in _SPECIALIZED.items():
        for stages, band in product(stages_of_tile, (1, 8)):
            yield m, _SPECIALIZED_N, SCALED, band, 1, 1, 2, flight, 4, stages


def _plain() -> Iterator[tuple[int, ...]]:
    """Yield the knob values of the configs without CONSUMERS."""
    for (m, n, warps), stages, tma in product(_PLAIN, (3, 4), (0, 1)):
        yield m, n, SCALED, 8, 1, tma, 0, 1, warps, stages


def dw_smem_bytes(config: Knobs, blockwise: bool) -> int:
    """Return the shared memory of one program, in bytes; at most 2 KiB too high on sm_90.

    It consists of the stages with their barriers, the output, and what Triton reserves to dispatch warps.
    """
    m, n, stages = (int(config[knob]) for knob in ("BLOCK_M", "BLOCK_N", "num_stages"))
    operands = (m + n) * SCALED
    if config["CONSUMERS"]:
        scales = 4 * (m + n) if blockwise else 0
        return stages * (operands + scales + 16) + 2 * 2 * 64 * 64 + 224
    scales = 4 * max(stages - 1, 1) * (m + n) if blockwise else 0
    output = 2 * m * n + 16 * (stages + 2) if config["TMA"] else 0
    return stages * operands + scales + output
