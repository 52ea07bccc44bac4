"""The kinds of scales; the tuning spaces of the scaled GEMMs and of dW, the rules for knobs, and shared memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import product
from typing import Any

from ...datasets import DeviceSpec, KernelConfig, Problem
from ..config_limits import (
    ASYNC_PRODUCT_ARCHS,
    SPECIALIZED_BYTES,
    Knobs,
    KnobValues,
    accumulator_registers,
    programs_that_fit,
    queue_bytes,
    spilled,
    with_ranges,
    wrong_consumers,
    wrong_tile_of_all_warps,
)
from ..grouped_gemm.space import BLOCKS_M

#: The dtype of both operands; the output is bf16.
DTYPE = "fp8e4m3"
#: N and K must be multiples of this: rows of 16 bytes, required by TMA and cuBLAS too, for operands and their
#: transposes.
STEP = 16
#: Elements along K, and rows of w, that share one blockwise scale.
SCALED = 128
#: Flags of a problem, at most one of them. Without a flag, there is one scale per tensor.
ROWWISE, BLOCKWISE = "rowwise", "blockwise"
FLAGS = (BLOCKWISE, ROWWISE)
TENSORWISE = "tensorwise"
GRANULARITIES = (TENSORWISE, ROWWISE, BLOCKWISE)


def granularity_of(problem: Problem) -> str:
    """Return the granularity of a problem's scales, one of `GRANULARITIES`.

    >>> granularity_of(Problem.of("scaled_gemm", dtype="fp8e4m3", flags=("rowwise",), m=16, n=16, k=16))
    'rowwise'
    """
    return problem.flags[0] if problem.flags else TENSORWISE


def flags_of(granularity: str) -> tuple[str, ...]:
    """Return the flags of a problem with scales of this granularity."""
    return () if granularity == TENSORWISE else (granularity,)


def scale_shapes(granularity: str, rows: int, n: int, k: int, groups: int | None = None) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the scales of x (rows, K) and of w (N, K), or (groups, N, K) with groups.

    The blockwise scales of x, (rows, blocks of K), are stored transposed, block by block, as cuBLAS and DeepGEMM
    require: `stride()` is (1, rows).

    >>> scale_shapes("blockwise", 64, 256, 1000)
    ((64, 8), (2, 8))
    >>> scale_shapes("rowwise", 64, 256, 1024, groups=4), scale_shapes("tensorwise", 64, 256, 1024)
    (((64, 1), (4, 256)), ((1,), (1,)))
    """
    blocks = (-(-n // SCALED), -(-k // SCALED))
    if granularity == BLOCKWISE:
        return (rows, blocks[1]), blocks if groups is None else (groups, *blocks)
    if granularity == ROWWISE:
        return (rows, 1), (n, 1) if groups is None else (groups, n)
    return (1,), (1,) if groups is None else (groups,)


def scale_bytes(granularity: str, rows: Any, n: Any, k: Any, groups: Any) -> Any:
    """Return the bytes of all float32 scales of a call with scales of this granularity; sizes may be arrays."""
    blocks_n, blocks_k = -(-n // SCALED), -(-k // SCALED)
    if granularity == BLOCKWISE:
        return 4 * blocks_k * (rows + groups * blocks_n)
    return 4 * (rows + groups * n) if granularity == ROWWISE else 4 * (1 + groups)


#: The knobs: BLOCK_M x BLOCK_N is the output tile, and BLOCK_K the contraction's step, which lies inside one block of
#: the scales.
KNOBS = (
    "BLOCK_M",
    "BLOCK_N",
    "BLOCK_K",
    "GROUP_M",  # M tiles that are adjacent in the L2 order; a runtime argument
    "SPLIT_K",  # parts that K is split into, 1 for none; a runtime argument if more than 1
    "PROGRAMS_PER_SM",  # the persistent grid divided by the number of SMs, 0: one program per tile; a runtime argument
    "SWAP_AB",  # compute the transposed tile
    "TMA_LOAD",  # both operands
    "TMA_STORE",
    "CONSUMERS",  # groups of four warps that multiply while one more warp loads; 0: all warps do both
    "num_warps",
    "num_stages",
)
# Bytes of loads in flight: with fewer, the latency of memory is never hidden.
_LEAST_BYTES_IN_FLIGHT = 24 * 1024
# float32 accumulators per thread. Each exists twice, because every step's product is a sum of its own: with 64 no
# kernel spills, with 128 some spill a little (42 of 255 registers), and with more, compilation takes minutes.
_MOST_ACCUMULATORS, _FREE_ACCUMULATORS = 128, 64
# Rows of a tensor core instruction on Hopper and Blackwell, and of each consumer group's part of a tile.
_INSTRUCTION_ROWS = 64
# Tiles of the warp-specialized kernel, (CONSUMERS, BLOCK_N), with their values of num_stages: fewer do not hide
# latency, more do not fit.
_SPECIALIZED = {
    (2, 64): (6, 8),
    (2, 128): (4, 5, 6),
    (2, 144): (5, 6),
    (2, 160): (5, 6),
    (2, 192): (4, 5),
    (3, 128): (3, 4),
}
# Tiles with SPLIT_K > 1, which is for products with few tiles.
_SPLIT_TILES = ((16, 64), (16, 128), (32, 64), (64, 32), (64, 64), (64, 128), (128, 64))


@dataclass(frozen=True)
class Ranges:
    """The values of each knob from which the config space is built."""

    block_m: tuple[int, ...] = (*BLOCKS_M, 192)
    block_n: tuple[int, ...] = (32, 64, 128, 144, 160, 192, 256)
    block_k: tuple[int, ...] = (128,)
    num_warps: tuple[int, ...] = (4, 8)
    num_stages: tuple[int, ...] = (3, 4, 6)  # with CONSUMERS = 0; others are in _SPECIALIZED
    programs_per_sm: tuple[int, ...] = (0, 1, 2)
    split_k: tuple[int, ...] = (1, 2, 4, 8)
    consumers: tuple[int, ...] = (0, 2, 3)

    @classmethod
    def of(cls, **ranges: Sequence[int]) -> Ranges:
        """Return the default ranges, with the given ones replaced.

        Args:
            **ranges: New values, by the name of a field.

        Raises:
            ForetuneError: A range does not exist or cannot have a value.

        >>> Ranges.of(block_m=[64]).block_m
        (64,)
        """
        return with_ranges(cls(), ranges, {knob.lower(): valid for knob, valid in _VALID.items()})


_SWITCH = ("0 or 1", (0, 1))
_VALID: dict[str, tuple[str, Sequence[int]]] = {
    "BLOCK_M": ("a power of two between 16 and 256, or 192", (*BLOCKS_M, 192)),
    "BLOCK_N": ("a power of two between 16 and 256, or 144, 160 or 192", (16, 32, 64, 128, 144, 160, 192, 256)),
    "BLOCK_K": ("32, 64 or 128", (32, 64, 128)),
    "GROUP_M": ("between 1 and 1024", range(1, 1025)),
    "SPLIT_K": ("between 1 and 64", range(1, 65)),
    "PROGRAMS_PER_SM": ("between 0 and 64, where 0 launches one program per tile", range(65)),
    "SWAP_AB": _SWITCH,
    "TMA_LOAD": _SWITCH,
    "TMA_STORE": _SWITCH,
    "CONSUMERS": ("0, 2 or 3", (0, 2, 3)),
    "num_warps": ("4 or 8", (4, 8)),
    "num_stages": ("between 1 and 8", range(1, 9)),
}


@cache
def values_of(family: str) -> KnobValues:
    """Return the valid values of each knob; its error messages name the given family.

    >>> values_of("scaled_gemm").wrong(KernelConfig.of(**dict.fromkeys(KNOBS, 1) | {"BLOCK_M": 24}).to_json())
    'BLOCK_M cannot be 24: a power of two between 16 and 256, or 192'
    """
    return KnobValues.in_words(family, _VALID)


def wrong_tile(config: KernelConfig) -> str | None:
    """Return why the knobs of a config, each valid alone, cannot be combined, or None if they can.

    >>> tile = {"BLOCK_M": 128, "BLOCK_N": 64, "SWAP_AB": 1, "TMA_STORE": 0, "CONSUMERS": 0, "SPLIT_K": 1}
    >>> wrong_tile(KernelConfig.of(**tile, num_warps=4))
    'SWAP_AB must be 0 with BLOCK_M = 128 but is 1: the rows of x fill an instruction already'
    """
    m, n, warps = config["BLOCK_M"], config["BLOCK_N"], config.num_warps
    if config["CONSUMERS"]:
        return _wrong_consumers(config)
    if (wrong := wrong_tile_of_all_warps(config)) is not None:
        return wrong
    if config["SPLIT_K"] > 1 and config["PROGRAMS_PER_SM"]:
        return f"PROGRAMS_PER_SM must be 0 with SPLIT_K = {config['SPLIT_K']} but is {config['PROGRAMS_PER_SM']}"
    if config["SPLIT_K"] > 1 and config["TMA_STORE"]:
        return f"TMA_STORE must be 0 with SPLIT_K = {config['SPLIT_K']}, which stores float32 sums, but is 1"
    if config["SWAP_AB"]:
        if m >= _INSTRUCTION_ROWS:
            return f"SWAP_AB must be 0 with BLOCK_M = {m} but is 1: the rows of x fill an instruction already"
        if n < _INSTRUCTION_ROWS:
            least = _INSTRUCTION_ROWS
            return f"SWAP_AB must be 0 with BLOCK_N = {n} but is 1: it needs BLOCK_N >= {least} to fill an instruction"
        if config["TMA_STORE"]:
            return "TMA_STORE must be 0 with SWAP_AB = 1, which stores the transposed tile, but is 1"
    return spilled(m, n, warps, _MOST_ACCUMULATORS)


def _wrong_consumers(config: KernelConfig) -> str | None:
    """Return why CONSUMERS > 0 cannot be combined with the other knobs, or None if it can."""
    consumers = config["CONSUMERS"]
    decided = {"BLOCK_M": _INSTRUCTION_ROWS * consumers, "BLOCK_K": SCALED, "SPLIT_K": 1, "PROGRAMS_PER_SM": 1}
    decided |= {"SWAP_AB": 0, "TMA_LOAD": 1, "TMA_STORE": 1, "num_warps": 4}
    tiles = [(columns,) for count, columns in _SPECIALIZED if count == consumers]
    return wrong_consumers(config.to_json(), decided, tiles, ("BLOCK_N",))


@lru_cache(maxsize=16)
def full_space(r: Ranges, grouped: bool) -> tuple[KernelConfig, ...]:
    """Return every config worth measuring: the grid without configs that cannot be fast.

    Configs are left out if their accumulators spill, warps idle, too few bytes are in flight, or they need more shared
    memory than an SM of sm_90 or sm_100 has. Only dense products have SPLIT_K > 1, BLOCK_M = 192, or GROUP_M = 1 with
    at least 64 rows (in grouped ones, bands end where a group ends).
    """
    space = [*_plain(r), *_split(r), *_specialized(r)]
    return tuple(c for c in space if not grouped or _is_for_groups(c))


def _is_for_groups(c: KernelConfig) -> bool:
    """Return whether a config is in the space of grouped products."""
    large = c["BLOCK_M"] >= _INSTRUCTION_ROWS
    return not (c["SPLIT_K"] > 1 or c["CONSUMERS"] == 3 or (large and c["GROUP_M"] == 1))


def _plain(r: Ranges) -> Iterator[KernelConfig]:
    """Yield the configs with CONSUMERS = 0 and SPLIT_K = 1 that combine the ranges `r`."""
    if 0 not in r.consumers or 1 not in r.split_k:
        return
    for m, n, k, warps, stages, programs in product(
        r.block_m, r.block_n, r.block_k, r.num_warps, r.num_stages, r.programs_per_sm
    ):
        if (
            m.bit_count() > 1
            or n.bit_count() > 1
            or accumulator_registers(m, n, warps) > (_FREE_ACCUMULATORS if warps < 8 else _MOST_ACCUMULATORS)
            or (warps == 8 and m * n < 64 * 128)
            or (warps == 8 and m < _INSTRUCTION_ROWS and n < 256)
            or (stages - 1) * (m + n) * k < _LEAST_BYTES_IN_FLIGHT
        ):
            continue
        for swap, load, store in _operand_choices(m, n):
            # Tiles that spill are tried only with TMA loads and one program per SM.
            if accumulator_registers(m, n, warps) > _FREE_ACCUMULATORS and not (load and programs == 1):
                continue
            knobs = dict(zip(KNOBS, (m, n, k, 1, 1, programs, swap, load, store, 0, warps, stages), strict=True))
            smem = smem_bytes(knobs, DeviceSpec.named("h200"), TENSORWISE)
            fits = programs_that_fit(smem, 2 * accumulator_registers(m, n, warps), warps, 228 * 1024, 65536)
            if programs > fits or smem > 227 * 1024:
                continue
            for band in (1, 8) if m >= _INSTRUCTION_ROWS else (1,):
                yield _config(m, n, k, band, 1, programs, swap, load, store, 0, warps, stages)


def _split(r: Ranges) -> Iterator[KernelConfig]:
    """Yield the configs with SPLIT_K > 1 that combine the ranges `r`."""
    if 0 not in r.consumers or 0 not in r.programs_per_sm or 4 not in r.num_warps:
        return
    for (m, n), k, stages, splits, load in product(_SPLIT_TILES, r.block_k, (4, 6), r.split_k, (0, 1)):
        allowed = m in r.block_m and n in r.block_n and stages in r.num_stages and splits > 1
        if allowed and (stages - 1) * (m + n) * k >= _LEAST_BYTES_IN_FLIGHT:
            large = m >= _INSTRUCTION_ROWS
            yield _config(m, n, k, 8 if large else 1, splits, 0, int(not large), load, 0, 0, 4, stages)


def _specialized(r: Ranges) -> Iterator[KernelConfig]:
    """Yield the configs with CONSUMERS > 0 that combine the ranges `r`."""
    for (consumers, n), stages in _SPECIALIZED.items():
        m = _INSTRUCTION_ROWS * consumers
        allowed = consumers in r.consumers and m in r.block_m and n in r.block_n and SCALED in r.block_k
        if allowed and 4 in r.num_warps and 1 in r.programs_per_sm and 1 in r.split_k:
            for held, band in product(stages, (1, 8)):
                yield _config(m, n, SCALED, band, 1, 1, 0, 1, 1, consumers, 4, held)


def _config(*knobs: int) -> KernelConfig:
    """Return the config with these values, in the order of KNOBS."""
    return KernelConfig.of(**dict(zip(KNOBS, knobs, strict=True)))


def _operand_choices(m: int, n: int) -> tuple[tuple[int, int, int], ...]:
    """Return the values of (SWAP_AB, TMA_LOAD, TMA_STORE) to try for an m x n tile."""
    if m >= _INSTRUCTION_ROWS:
        return (0, 0, 0), (0, 1, 0), (0, 1, 1)
    plain: tuple[tuple[int, int, int], ...] = ((0, 0, 0), (0, 1, 0))
    return plain if n < _INSTRUCTION_ROWS else (*plain, (1, 0, 0), (1, 1, 0))


def _specialized_smem_bytes(consumers: int, n: int, stages: int, granularity: str) -> int:
    """Return the shared memory of a warp-specialized program, in bytes; at most 16 bytes too high.

    It consists of the stages, an output per warp group, two barriers per stage, the queue, and what Triton reserves to
    dispatch the warps.
    """
    rest = n - min(n, SCALED)
    outputs = 2 * _INSTRUCTION_ROWS * consumers * (rest or n)  # columns that are stored at a time
    scales = 4 * _INSTRUCTION_ROWS * (consumers + 1) if granularity == BLOCKWISE else 0
    queue = queue_bytes(4, stages)
    aligned = 8 * (stages % 2) + 16 * (granularity == BLOCKWISE) + (32 if rest else 0)
    kept = aligned + (200 if consumers == 2 else 204)
    return stages * ((_INSTRUCTION_ROWS * consumers + n) * SCALED + scales + 16) + outputs + queue + kept


def smem_bytes(config: Knobs, device: DeviceSpec, granularity: str) -> int:
    """Return the shared memory of one program, in bytes: what `supports` compares with the device's limit.

    With CONSUMERS = 0 this is exactly what Triton 3.6 to 3.9 allocates on sm_90, and an upper bound elsewhere.

    Hopper's product (wgmma, if either operand has at least 64 rows) reads its operands from shared memory while the
    next stage loads, so it needs all stages; others copy operands to registers first and need one stage less, and so do
    blockwise scales. With TMA each stage has a barrier, and each operand has separate barriers if the product is not
    asynchronous. The output has space of its own next to the stages, because the next tile's loads are in flight when
    it is stored; partial sums with SPLIT_K > 1 are stored directly from registers. Rowwise scales, if there are at
    least as many as threads, are converted to another layout next to an output that TMA stores.

    Args:
        config: The config.
        device: The GPU.
        granularity: One of `GRANULARITIES`.

    >>> knobs = dict(zip(KNOBS, (128, 128, 128, 8, 1, 1, 0, 1, 1, 0, 8, 4)))
    >>> smem_bytes(KernelConfig.of(**knobs), DeviceSpec.named("h200"), "blockwise")
    166944
    """
    m, n, k, stages = (config[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_stages"))
    if config["CONSUMERS"]:
        return _specialized_smem_bytes(config["CONSUMERS"], n, stages, granularity)
    warps, load, store, arch = config["num_warps"], config["TMA_LOAD"], config["TMA_STORE"], device.arch
    large = m >= _INSTRUCTION_ROWS or config["SWAP_AB"] > 0
    product_is_async = large and arch in ASYNC_PRODUCT_ARCHS
    buffers = stages if product_is_async else max(stages - 1, 1)
    if arch != "sm_90":
        barriers = 16 * (buffers + 2) * 2
    elif product_is_async:
        barriers = 8 * buffers * load
    else:
        barriers = ((8 * buffers + 15) // 16 * 16 + 8 * buffers) * load
    output = 2 * m * n
    if not store and arch == "sm_90":
        stored = 32 * warps * 8 // n  # rows that one 16-byte store per thread covers
        if m < _INSTRUCTION_ROWS:
            rows = min(max(8, stored), m)
        else:
            rows = min(8 * min(warps, m // 16) * (2 if stored >= 16 else 1), m)  # each warp holds 16 rows
        output = 0 if config["SPLIT_K"] > 1 else 2 * rows * n
    scales = 0
    if granularity == BLOCKWISE:
        scales = 4 * max(stages - 1, 1) * (m + (n if n > SCALED else m))
    elif granularity == ROWWISE and store:
        scales = sum(4 * size for size in (m, n) if size >= 32 * warps)
    needed: int = buffers * (m + n) * k + output + barriers + scales
    return needed


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
_DW_MOST_ACCUMULATORS = 64
# Tiles of the warp-specialized kernel, (BLOCK_M, IN_FLIGHT), with their values of num_stages: fewer do not hide
# latency, more do not fit.
_DW_SPECIALIZED = {(128, 1): (4, 5, 6), (128, 2): (4, 5, 6)}
_DW_N = 128
_DW_PLAIN = ((64, 64, 4), (64, 128, 4), (128, 128, 8))  # (BLOCK_M, BLOCK_N, num_warps)
_DW_VALID: dict[str, tuple[str, tuple[int, ...] | range]] = {
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
DW_VALUES = KnobValues.in_words("scaled_grouped_gemm_dw", _DW_VALID)


def wrong_dw_tile(config: KernelConfig) -> str | None:
    """Return why the knobs of a config, each valid alone, cannot be combined, or None if they can.

    >>> wrong_dw_tile(KernelConfig.of(BLOCK_M=256, BLOCK_N=128, CONSUMERS=0, IN_FLIGHT=1, num_warps=8))
    'BLOCK_M x BLOCK_N must be at most 16384 elements with CONSUMERS = 0 and num_warps = 8, or registers spill, but ...'
    """
    if config["CONSUMERS"]:
        decided = {"BLOCK_N": _DW_N, "PROGRAMS_PER_SM": 1, "TMA": 1, "num_warps": 4}
        return wrong_consumers(config.to_json(), decided, _DW_SPECIALIZED, ("BLOCK_M", "IN_FLIGHT"))
    if config["IN_FLIGHT"] > 1:
        return f"IN_FLIGHT must be 1 with CONSUMERS = 0 but is {config['IN_FLIGHT']}"
    m, n = config["BLOCK_M"], config["BLOCK_N"]
    return spilled(m, n, config.num_warps, _DW_MOST_ACCUMULATORS, "CONSUMERS = 0 and ")


@lru_cache(maxsize=1)
def full_dw_space() -> tuple[KernelConfig, ...]:
    """Return every config of dW worth measuring, for all devices."""
    return tuple(
        KernelConfig.of(**dict(zip(DW_KNOBS, knobs, strict=True))) for knobs in (*_specialized_dw(), *_plain_dw())
    )


def _specialized_dw() -> Iterator[tuple[int, ...]]:
    """Yield the knob values of dW's warp-specialized configs (CONSUMERS > 0)."""
    for (m, flight), stages_of_tile in _DW_SPECIALIZED.items():
        for stages, band in product(stages_of_tile, (1, 8)):
            yield m, _DW_N, SCALED, band, 1, 1, 2, flight, 4, stages


def _plain_dw() -> Iterator[tuple[int, ...]]:
    """Yield the knob values of dW's configs without warp specialization (CONSUMERS = 0)."""
    for (m, n, warps), stages, tma in product(_DW_PLAIN, (3, 4), (0, 1)):
        yield m, n, SCALED, 8, 1, tma, 0, 1, warps, stages


def dw_smem_bytes(config: Knobs, blockwise: bool) -> int:
    """Return the shared memory of one program of dW, in bytes; at most 2 KiB too high on sm_90.

    It consists of the stages with their barriers, the outputs, the queue, and what Triton reserves to dispatch warps.
    """
    m, n, stages = (int(config[knob]) for knob in ("BLOCK_M", "BLOCK_N", "num_stages"))
    operands = (m + n) * SCALED
    if config["CONSUMERS"]:
        scales = 4 * (m + n) if blockwise else 0
        staged, buffers = stages * (operands + scales), 2 * 2 * 64 * 64  # a buffer per warp group, or two
        buffers *= 2 if staged + 2 * buffers <= SPECIALIZED_BYTES else 1
        return staged + 16 * stages + buffers + queue_bytes(5, stages) + 272
    scales = 4 * max(stages - 1, 1) * (m + n) if blockwise else 0
    output = 2 * m * n + 16 * (stages + 2) if config["TMA"] else 0
    return stages * operands + scales + output
