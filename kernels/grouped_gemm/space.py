"""The tuning space of each variant, and what a config costs on a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import product
from typing import Any

from ...datasets import DeviceSpec, ForetuneError, KernelConfig, Problem
from ..config_limits import (
    ASYNC_PRODUCT_ARCHS,
    WITHOUT_CONSUMERS,
    Knobs,
    KnobValues,
    accumulator_registers,
    exchange_bytes,
    programs_that_fit,
    undecided,
    with_ranges,
    wrong_tile_of_consumers,
)
from .variants import DW, VARIANTS, Variant

#: What the tile map has room for; the kernels take no other BLOCK_M over rows.
BLOCKS_M = (16, 32, 64, 128, 256)
# Configs under this many bytes of loads in flight never hide the latency of memory.
_LEAST_BYTES_IN_FLIGHT = 32 * 1024
# The accumulator's registers per thread: past 128 of 255 the kernel spills, and compiling takes up to minutes.
_MOST_ACCUMULATOR_REGISTERS = 128
# Elements that a thread loads in one step: at 640 of them compiling took a minute and more, and 320 are the most in the
# space (Triton 3.9, 2026-11).
_MOST_LOADED_ELEMENTS = 512
# float32 products run without tensor cores, and each step of them is unrolled: a larger tile takes the compiler minutes
# or spills, and so do more products of one thread.
_MOST_FP32_TILE, _MOST_FP32_PRODUCTS = 64 * 64, 4096
# Tiles of CONSUMERS, (PINGPONG, BLOCK_M, BLOCK_N), and their stages: those of forward and dX, and those of dW.
_OVER_ROWS = {(1, 128, 128): (5,), (0, 128, 256): (4,)}
_OF_DW = {(1, 128, 128): (4, 5), (0, 128, 256): (4,), (0, 256, 128): (4,)}
# What CONSUMERS decide, beside that all goes through TMA.
_DECIDED = {"BLOCK_K": 64, "PROGRAMS_PER_SM": 1, "num_warps": 4}
# One SM of the largest kind (sm_90, sm_100), for which the space is laid out.
_SM_SMEM_BYTES, _SM_REGISTERS = 228 * 1024, 65536


def knobs_of(variant: Variant) -> tuple[str, ...]:
    """The knobs of a variant's configs. BLOCK_M x BLOCK_N is the output tile and BLOCK_K the contraction's step."""
    return (
        "BLOCK_M",
        "BLOCK_N",
        "BLOCK_K",
        "GROUP_M",  # M tiles side by side in the L2 order; a runtime argument
        "PROGRAMS_PER_SM",  # the persistent grid over the number of SMs; a runtime argument
        *variant.tma,
        # Groups of four warps that multiply while one more warp loads, 0: all warps do both; and whether these share a
        # tile, 0, or each has tiles of its own and multiplies while the other stores, 1.
        "CONSUMERS",
        "PINGPONG",
        "num_warps",
        "num_stages",
    )


@dataclass(frozen=True)
class Ranges:
    """The values that a space is made of.

    BLOCK_K = 32 and 256 are left out for the variants over rows: of 364 problems measured with them, 1 lost more than
    5 % without (H200, bf16, 2026-11). dW has shorter contractions and wants shorter steps.
    """

    block_m: tuple[int, ...] = BLOCKS_M
    block_n: tuple[int, ...] = (32, 64, 128, 256)
    block_k: tuple[int, ...] = (64, 128)
    num_warps: tuple[int, ...] = (4, 8)
    num_stages: tuple[int, ...] = (2, 3, 4, 5, 6)
    tma: tuple[int, ...] = (0, 1)
    consumers: tuple[int, ...] = (0, 2)

    @classmethod
    def of(cls, variant: Variant, **ranges: Sequence[int]) -> Ranges:
        """The variant's ranges with these values in place of its own.

        Raises `ForetuneError` naming a range or a value that cannot be.

        >>> from foretune.kernels.grouped_gemm.variants import DW
        >>> Ranges.of(DW, block_m=[64]).block_m, Ranges.of(DW, block_m=[64]).block_k
        ((64,), (32, 64))
        """
        return with_ranges(_DW_RANGES if variant is DW else cls(), ranges, _VALID)


#: A tile of dW is a piece of N x K, which is never small, and its contraction is a group's rows, which often are few.
_DW_RANGES = Ranges(block_m=(64, 128, 256), block_n=(64, 128, 256), block_k=(32, 64))

_UP_TO_512 = ("a power of two between 16 and 512", (16, 32, 64, 128, 256, 512))
_VALID: dict[str, tuple[str, Sequence[int]]] = {
    "block_m": ("a power of two between 16 and 256", BLOCKS_M),
    "block_n": _UP_TO_512,
    "block_k": _UP_TO_512,
    "num_warps": ("1, 2, 4, 8 or 16", (1, 2, 4, 8, 16)),
    "num_stages": ("between 1 and 8", range(1, 9)),
    "tma": ("0 or 1", (0, 1)),
    "consumers": ("0 or 2", (0, 2)),
    "pingpong": ("0 or 1", (0, 1)),
    "group_m": ("between 1 and 1024", range(1, 1025)),
    "programs_per_sm": ("between 0 and 64, 0 for a program a tile", range(65)),
}


@cache
def values_of(variant: Variant) -> KnobValues:
    """The values of a variant's knobs, past which a kernel would not compile, or not stay inside its tensors.

    >>> from foretune.kernels.grouped_gemm.variants import FORWARD
    >>> values_of(FORWARD).wrong(KernelConfig.of(**dict.fromkeys(knobs_of(FORWARD), 1) | {"BLOCK_M": 24}).to_json())
    'BLOCK_M cannot be 24: a power of two between 16 and 256'
    """
    names = {knob: "tma" if knob.startswith("TMA_") else knob.lower() for knob in knobs_of(variant)}
    return KnobValues.in_words(variant.name, {knob: _VALID[name] for knob, name in names.items()})


def wrong_tile(variant: Variant, config: KernelConfig, dtype: str) -> str | None:
    """The reason why the blocks of a config, whose knobs are all right one by one, do not go together, or None: what
    registers cannot hold, or a compiler takes minutes over.

    >>> from foretune.kernels.grouped_gemm.variants import DW
    >>> knobs = {"BLOCK_M": 256, "BLOCK_N": 128, "BLOCK_K": 64, "CONSUMERS": 0, "PINGPONG": 0, "num_warps": 4}
    >>> wrong_tile(DW, KernelConfig.of(**knobs), "bf16")
    'BLOCK_M x BLOCK_N cannot be 256 x 128 with num_warps = 4: at most 16384 elements, which registers hold'
    """
    knobs = config.to_json()
    if knobs["CONSUMERS"]:
        return _wrong_consumers(variant, knobs, dtype)
    if knobs["PINGPONG"]:
        return "PINGPONG cannot be 1 with CONSUMERS = 0: 0"
    m, n, k, threads = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"], 32 * config.num_warps
    if dtype == "fp32" and m * n > _MOST_FP32_TILE:
        return f"BLOCK_M x BLOCK_N cannot be {m} x {n} in fp32: at most {_MOST_FP32_TILE} elements"
    if accumulator_registers(m, n, config.num_warps) > _MOST_ACCUMULATOR_REGISTERS:
        return (
            f"BLOCK_M x BLOCK_N cannot be {m} x {n} with num_warps = {config.num_warps}: at most "
            f"{_MOST_ACCUMULATOR_REGISTERS * threads} elements, which registers hold"
        )
    most_k = _MOST_LOADED_ELEMENTS * threads // (m + n)
    if dtype == "fp32":
        most_k = min(most_k, _MOST_FP32_PRODUCTS * threads // (m * n))
    if k > most_k:
        return (
            f"BLOCK_K cannot be {k} in {dtype} with BLOCK_M x BLOCK_N = {m} x {n} and num_warps = {config.num_warps}: "
            f"at most {most_k}, or compiling takes minutes"
        )
    return None


def _wrong_consumers(variant: Variant, knobs: Mapping[str, Any], dtype: str) -> str | None:
    """The reason why CONSUMERS do not go with the other knobs or a dtype, or None."""
    if dtype == "fp32":
        return f"CONSUMERS cannot be {knobs['CONSUMERS']} in {dtype}: its kernel is of 16 bits; 0"
    if (wrong := undecided(knobs, _DECIDED | dict.fromkeys(variant.tma, 1))) is not None:
        return wrong
    tiles = [(m, n) for pingpong, m, n in _tiles_of(variant) if pingpong == knobs["PINGPONG"]]
    return wrong_tile_of_consumers(knobs, tiles)


def _tiles_of(variant: Variant) -> Mapping[tuple[int, int, int], tuple[int, ...]]:
    return _OF_DW if variant is DW else _OVER_ROWS


@lru_cache(maxsize=16)
def full_space(variant: Variant, r: Ranges) -> tuple[KernelConfig, ...]:
    """The whole grid less what can't be fast: spilling accumulators, idle warps, too little in flight, more than any SM
    holds; and the tiles of CONSUMERS."""
    names = knobs_of(variant)
    knobs = [*(_plain(variant, r) if 0 in r.consumers else ()), *(_specialized(variant, r) if 2 in r.consumers else ())]
    return tuple(KernelConfig.of(**dict(zip(names, values, strict=True))) for values in knobs)


def _plain(variant: Variant, r: Ranges) -> Iterator[tuple[int, ...]]:
    """The knobs' values of the configs whose warps all do the same."""
    for m, n, k, warps, stages in product(r.block_m, r.block_n, r.block_k, r.num_warps, r.num_stages):
        if (
            accumulator_registers(m, n, warps) > _MOST_ACCUMULATOR_REGISTERS
            or (warps == 8 and m * n < 128 * 128)
            or (stages - 1) * (m + n) * k * 2 < _LEAST_BYTES_IN_FLIGHT
        ):
            continue
        for tma in _tma_ways(variant, m, n, k, r.tma):
            smem = tile_smem_bytes(m, n, k, stages, warps, tma, 2, arch="sm_90")
            fits = programs_that_fit(smem, accumulator_registers(m, n, warps), warps, _SM_SMEM_BYTES, _SM_REGISTERS)
            # More than two never won by more than the noise. A band matters where a group has several M tiles.
            for programs, band in product(range(1, min(fits, 2) + 1), (1, 8) if m >= 64 else (1,)):
                yield m, n, k, band, programs, *tma, 0, 0, warps, stages


def _specialized(variant: Variant, r: Ranges) -> Iterator[tuple[int, ...]]:
    """The same of those with CONSUMERS."""
    k, warps = _DECIDED["BLOCK_K"], _DECIDED["num_warps"]
    for (pingpong, m, n), stages_of_tile in _tiles_of(variant).items():
        if m in r.block_m and n in r.block_n and k in r.block_k and 1 in r.tma and warps in r.num_warps:
            for stages, band in product(stages_of_tile, (1, 8)):
                if stages in r.num_stages:
                    yield m, n, k, band, 1, 1, 1, 1, 2, pingpong, warps, stages


def _tma_ways(variant: Variant, m: int, n: int, k: int, tma: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """Which of (left, right, out) go through TMA."""
    if 0 in tma:
        yield 0, 0, 0
    if 1 not in tma:
        return
    if variant is DW:
        # Without a TMA store dW spills, and its output always allows one. With x by pointer and dy by TMA no problem of
        # 56 won more than 1.6 % (H200, 2026-11).
        yield from ((1, 1, 1), (0, 1, 1))
        return
    yield 1, 1, 0
    if m >= 64:
        yield 1, 1, 1
    # Rows that are gathered, and weights by TMA all the same: worth it only where the tile is large.
    if m >= 64 and n >= 128 and k <= 64:
        yield 0, 1, 0


# A space has two or three configs of each such tile, and each is asked about a few times.
@lru_cache(maxsize=8192)
def tile_smem_bytes(
    block_m: int,
    block_n: int,
    block_k: int,
    stages: int,
    num_warps: int,
    tma: tuple[int, int, int],
    itemsize: int,
    *,
    arch: str,
) -> int:
    """Shared memory of one program: exactly what Triton 3.6 to 3.9 allot to 16-bit tiles on sm_90 and sm_100, a bound
    on other archs and for float32 (tests compare with binaries).

    The asynchronous products of sm_90 (wgmma) and sm_100 (tcgen05) read their operands from shared memory while
    the next stage loads, so they need every stage; all others copy them to registers first and need one less, and
    so do tiles of fewer than 64 rows everywhere. With TMA each stage has a barrier, and a tcgen05 product has one.
    The output has room of its own beside the stages, because the next tile's loads are in flight when it is stored.
    """
    product_is_async = block_m >= 64 and arch in ASYNC_PRODUCT_ARCHS and itemsize == 2
    # On AMD Triton 3.6 may keep one more of each operand, padded, than 3.9 does.
    buffers = stages if product_is_async or arch.startswith("gfx") else max(stages - 1, 1)
    barriers = 8 * buffers * max(tma[:2])
    if product_is_async and arch != "sm_90":
        barriers = (barriers + 15) // 16 * 16 + 16
    output = block_m * block_n * itemsize
    if itemsize == 4:
        # An operand that came by TMA is laid out anew for the product without tensor cores.
        operand = max(block_m, block_n) * block_k * itemsize * max(tma[:2])
        output = output + operand if tma[2] else max(output, operand)
    elif not tma[2]:
        output = min(output, exchange_bytes(block_m, block_n, num_warps, arch))
    return buffers * (block_m + block_n) * block_k * itemsize + output + barriers


def smem_bytes(variant: Variant, config: Knobs, itemsize: int, device: DeviceSpec) -> int:
    """Shared memory of one program on a device."""
    blocks = (config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"])
    if config["CONSUMERS"]:
        return _specialized_smem_bytes(config)
    tma = (config[variant.tma_left], config[variant.tma_right], config[variant.tma_out])
    needed = tile_smem_bytes(*blocks, config["num_stages"], config["num_warps"], tma, itemsize, arch=device.arch)
    # Ways of no config of the space: a bound.
    if variant is DW and blocks[0] < 64 and itemsize == 2 and tma[:2] == (1, 1):
        needed += 16 + 8 * max(config["num_stages"] - 1, 1)  # so small, dy and x have barriers of their own
    elif variant is not DW and tma[2] and tma[:2] != (1, 1):
        needed += 2048  # what TMA stores from is aligned, and may have an exchange beside it
    return needed


def _specialized_smem_bytes(config: Knobs) -> int:
    """Shared memory of a program with CONSUMERS, of 16-bit elements: that of the stages, of the 16 KiB that each group
    stores at a time, and of barriers and what Triton keeps for the warps to find (up to 88 bytes less)."""
    m, n, k, groups = (int(config[knob]) for knob in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "CONSUMERS"))
    return int(config["num_stages"]) * (2 * (m + n) * k + 16) + groups * 16 * 1024 + 240


def estimate_smem_bytes(config: KernelConfig, problem: Problem, device: DeviceSpec | None = None) -> int:
    """Shared memory of one program of a config, in bytes: what `supports` compares with the device's limit.

    `problem` says the variant (its family) and the dtype; `device` the architecture, an H200's if left out. Raises
    `ForetuneError` for a problem of another family.

    >>> problem = Problem.of("grouped_gemm_fwd", groups=8, rows=4096, n=2048, k=1024)
    >>> knobs = {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 64, "TMA_X": 1, "TMA_W": 1, "TMA_Y": 1}
    >>> estimate_smem_bytes(KernelConfig.of(**knobs, num_warps=8, num_stages=3), problem)
    213016
    """
    if problem.family not in VARIANTS:
        raise ForetuneError(f"the problem's family must be one of {', '.join(VARIANTS)} but is {problem.family}")
    device = device or DeviceSpec.named("h200")
    config = KernelConfig.of(**WITHOUT_CONSUMERS | config.to_json())
    return smem_bytes(VARIANTS[problem.family], config, problem.itemsize, device)
