"""The three grouped GEMMs as variants, the tuning space of each, the rules for its knobs, and its shared memory."""

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
    no_consumers,
    programs_that_fit,
    queue_bytes,
    spilled,
    with_ranges,
    wrong_consumers,
)

#: The permutations that can be fused into a layer: with `permute_x` it gathers the rows of x while loading them, with
#: `permute_y` it scatters the rows of y while storing them. The backward products mirror this.
PERMUTATIONS = ("permute_x", "permute_y")


@dataclass(frozen=True)
class Variant:
    """One of a layer's three matrix products (forward, dX, dW), written left @ right = out, with w (groups, N, K).

    Each of the operands and the output has a knob that turns on TMA.

    `columns` and `depth` name the layer's dimensions along which the output's columns and the contraction run.
    """

    name: str
    columns: str
    depth: str
    tma: tuple[str, str, str]  # the knobs that turn on TMA for the left operand, the right operand and the output
    dtype_argument: str  # the kernel's parameter whose dtype is the problem's
    permuting: tuple[tuple[str, str], ...]  # (permutation, the kernel's parameter that turns it on)
    kernel_n_k: tuple[str, str] = ("n", "k")  # the layer's dimensions that the kernel names N and K

    @property
    def permuted_by(self) -> tuple[tuple[str, str], ...]:
        """(Permutation flag, TMA knob) pairs: the flag gathers or scatters a tensor, so its knob must be 0."""
        left, _, out = self.tma
        return tuple((flag, left if turned_on == "GATHER" else out) for flag, turned_on in self.permuting)

    @property
    def first_of_kernel(self) -> Variant:
        """The first variant that runs the same kernel as this one: forward for dX, else the variant itself.

        Values that depend on the kernel alone are cached under it.
        """
        return next(variant for variant in VARIANTS.values() if variant.tma == self.tma)


# y = x @ w.T: x is gathered, or y is scattered.
FORWARD = Variant(
    "grouped_gemm_fwd",
    columns="n",
    depth="k",
    tma=("TMA_X", "TMA_W", "TMA_Y"),
    dtype_argument="x_ptr",
    permuting=(("permute_x", "GATHER"), ("permute_y", "SCATTER")),
)
# dx = dy @ w, computed by the forward kernel with dy as its x and dx as its y: dx is scattered, or dy is gathered.
DX = Variant(
    "grouped_gemm_dx",
    columns="k",
    depth="n",
    tma=("TMA_X", "TMA_W", "TMA_Y"),
    dtype_argument="x_ptr",
    permuting=(("permute_x", "SCATTER"), ("permute_y", "GATHER")),
    kernel_n_k=("k", "n"),
)
# dw = dy.T @ x: the permuted operand, x or dy, is sorted in advance, so no TMA knob is excluded.
DW = Variant(
    "grouped_gemm_dw",
    columns="k",
    depth="rows",
    tma=("TMA_DY", "TMA_X", "TMA_DW"),
    dtype_argument="dy_ptr",
    permuting=(),
)

VARIANTS = {variant.name: variant for variant in (FORWARD, DX, DW)}


#: The smallest chunk, in rows: shorter ones have too few steps to pay for adding up the partial sums.
_LEAST_ROWS = 1024
_MULTIPLE = 128


def chunk_rows(rows: int, n: int, k: int, sm_count: int, *, per_sm: int = 6) -> int:
    """Return the maximum number of a group's rows that dW sums in one chunk: 1 / `per_sm` of an SM's average work.

    Without chunks, one huge group among small ones would consist of N x K / (tile area) long jobs, too few to keep all
    SMs busy. The result depends only on values that the host knows. If N x K is large no group is split, because its
    tiles alone balance the SMs.

    >>> chunk_rows(65536, 1536, 2048, 132), chunk_rows(65536, 14336, 4096, 132)
    (8064, 65536)
    """
    tiles = cdiv(n, 128) * cdiv(k, 256)
    share = cdiv(rows * tiles, per_sm * sm_count)
    return min(max(cdiv(share, _MULTIPLE) * _MULTIPLE, _LEAST_ROWS), max(rows, 1))


def chunks_of(rows: int, n: int, k: int, dtype: str, device: DeviceSpec) -> tuple[int, int]:
    """Return dW's `chunk_rows` for configs without CONSUMERS and with them, whose programs take tiles from a counter.

    The latter is 0 if the dtype or the device has no such kernel.
    >>> chunks_of(65536, 1536, 2048, "bf16", DeviceSpec.named("h100"))
    (8064, 47744)
    """
    counts = dtype != "fp32" and no_consumers({"CONSUMERS": 2}, device) is None
    short, long = (chunk_rows(rows, n, k, device.sm_count, per_sm=parts) for parts in (6, 1))
    return short, long if counts else 0


#: A kernel without tiles is faster for at most so many rows, if there are twice as many groups (H100;
#: tests/kernels/decode_on_gpu.py). More rows would cost too much where most of them are in one group.
_FEW_ROWS = 32
#: The largest N of that kernel, whose programs along N are the second dimension of its grid.
MOST_COLUMNS = 2**16 - 1


def is_few(rows: int, groups: int, n: int) -> bool:
    """Return whether `triton_kernels/few_rows.py` is faster than tiles: few rows, mostly in different groups.

    >>> is_few(8, 128, 512), is_few(64, 128, 512), is_few(8, 8, 512)
    (True, False, False)
    """
    return rows <= min(groups // 2, _FEW_ROWS) and n <= MOST_COLUMNS


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


#: The values of BLOCK_M over rows: the tile map holds tiles of these sizes only.
BLOCKS_M = (16, 32, 64, 128, 256)
# Bytes of loads in flight: with fewer, no config hides the latency of memory.
_LEAST_BYTES_IN_FLIGHT = 32 * 1024
# Accumulator registers per thread: above 128 of 255 the kernel spills, and compilation takes up to minutes.
_MOST_ACCUMULATOR_REGISTERS = 128
# Elements that a thread loads per step: at 640 compilation took a minute or more; the space has at most 320 (Triton
# 3.9, 2026-11).
_MOST_LOADED_ELEMENTS = 512
# float32 products run without tensor cores, and each of their steps is unrolled: larger tiles, or more products per
# thread, take minutes to compile or spill.
_MOST_FP32_TILE, _MOST_FP32_PRODUCTS = 64 * 64, 4096
# Tiles of the warp-specialized kernels (CONSUMERS > 0) as (PINGPONG, BLOCK_M, BLOCK_N), with their values of
# num_stages: forward and dX, then dW.
_OVER_ROWS = {(1, 128, 128): (5,), (0, 128, 256): (4,)}
_OF_DW = {(0, 128, 256): (4,), (0, 256, 128): (4,)}
# Knobs that CONSUMERS > 0 fixes; it also requires all TMA knobs to be 1.
_DECIDED = {"BLOCK_K": 64, "PROGRAMS_PER_SM": 1, "num_warps": 4}
# Shared memory and registers of an SM of sm_90 and sm_100, the largest that exist, for which the space is laid out.
_SM_SMEM_BYTES, _SM_REGISTERS = 228 * 1024, 65536


def knobs_of(variant: Variant) -> tuple[str, ...]:
    """Return the names of a variant's knobs. BLOCK_M x BLOCK_N is the output tile, BLOCK_K the contraction's step."""
    return (
        "BLOCK_M",
        "BLOCK_N",
        "BLOCK_K",
        "GROUP_M",  # M tiles that are adjacent in the L2 order; a runtime argument
        "PROGRAMS_PER_SM",  # the persistent grid divided by the number of SMs; a runtime argument
        *variant.tma,
        # CONSUMERS: groups of four warps that multiply while one more warp loads; 0: all warps load and multiply.
        # PINGPONG: 0: the groups share a tile; 1: each has its own tile, and multiplies while the other stores.
        "CONSUMERS",
        "PINGPONG",
        "num_warps",
        "num_stages",
    )


@dataclass(frozen=True)
class Ranges:
    """The values of each knob from which a variant's config space is built.

    Forward and dX do not have BLOCK_K = 32 and 256: without them, 1 of 364 measured problems lost more than 5 % (H200,
    bf16). dW has shorter contractions and needs shorter steps.
    """

    block_m: tuple[int, ...] = BLOCKS_M
    block_n: tuple[int, ...] = (32, 64, 128, 256)
    block_k: tuple[int, ...] = (64, 128)
    group_m: tuple[int, ...] = (8,)  # tiles of fewer than 64 rows have 1: their groups rarely have several
    num_warps: tuple[int, ...] = (4, 8)
    num_stages: tuple[int, ...] = (2, 3, 4, 5, 6)
    tma: tuple[int, ...] = (0, 1)
    consumers: tuple[int, ...] = (0, 2)

    @classmethod
    def of(cls, variant: Variant, **ranges: Sequence[int]) -> Ranges:
        """Return the variant's ranges, with these values in place of its own.

        Args:
            variant: The variant.
            **ranges: New values, by the name of a field.

        Raises:
            ForetuneError: A range does not exist or cannot have a value.

        >>> from foretune.kernels.grouped_gemm.space import DW
        >>> Ranges.of(DW, block_m=[64]).block_m, Ranges.of(DW, block_m=[64]).block_k
        ((64,), (32, 64))
        """
        return with_ranges(_DW_RANGES if variant is DW else cls(), ranges, _VALID)


#: dW: its output tiles are pieces of N x K, which is never small; it contracts over the rows of a group, often few.
_DW_RANGES = Ranges(block_m=(64, 128, 256), block_n=(64, 128, 256), block_k=(32, 64), group_m=(1, 8))

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
    "programs_per_sm": ("between 0 and 64, where 0 launches one program per tile", range(65)),
}


@cache
def values_of(variant: Variant) -> KnobValues:
    """Return the valid values of a variant's knobs: others would not compile, or would access memory out of bounds.

    >>> from foretune.kernels.grouped_gemm.space import FORWARD
    >>> values_of(FORWARD).wrong(KernelConfig.of(**dict.fromkeys(knobs_of(FORWARD), 1) | {"BLOCK_M": 24}).to_json())
    'BLOCK_M cannot be 24: a power of two between 16 and 256'
    """
    names = {knob: "tma" if knob.startswith("TMA_") else knob.lower() for knob in knobs_of(variant)}
    return KnobValues.in_words(variant.name, {knob: _VALID[name] for knob, name in names.items()})


def wrong_tile(variant: Variant, config: KernelConfig, dtype: str) -> str | None:
    """Return why the knobs of a config, each valid alone, cannot be combined, or None if they can.

    The limits exclude accumulators that do not fit in registers, and tiles that take the compiler minutes.

    >>> from foretune.kernels.grouped_gemm.space import DW
    >>> knobs = {"BLOCK_M": 256, "BLOCK_N": 128, "BLOCK_K": 64, "CONSUMERS": 0, "PINGPONG": 0, "num_warps": 4}
    >>> wrong_tile(DW, KernelConfig.of(**knobs), "bf16")
    'BLOCK_M x BLOCK_N must be at most 16384 elements with num_warps = 4, or registers spill, but is 256 x 128'
    """
    knobs = config.to_json()
    if knobs["CONSUMERS"]:
        return _wrong_consumers(variant, knobs, dtype)
    if knobs["PINGPONG"]:
        return "PINGPONG must be 0 with CONSUMERS = 0 but is 1"
    m, n, k, threads = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"], 32 * config.num_warps
    if dtype == "fp32" and m * n > _MOST_FP32_TILE:
        return f"BLOCK_M x BLOCK_N must be at most {_MOST_FP32_TILE} elements in fp32 but is {m} x {n}"
    if (wrong := spilled(m, n, config.num_warps, _MOST_ACCUMULATOR_REGISTERS)) is not None:
        return wrong
    most_k = _MOST_LOADED_ELEMENTS * threads // (m + n)
    if dtype == "fp32":
        most_k = min(most_k, _MOST_FP32_PRODUCTS * threads // (m * n))
    if k > most_k:
        return (
            f"BLOCK_K must be at most {most_k} in {dtype} with BLOCK_M x BLOCK_N = {m} x {n} and num_warps = "
            f"{config.num_warps}, or compilation takes minutes, but is {k}"
        )
    return None


def _wrong_consumers(variant: Variant, knobs: Mapping[str, Any], dtype: str) -> str | None:
    """Return why CONSUMERS > 0 cannot be combined with the other knobs or with a dtype, or None if it can."""
    if dtype == "fp32":
        consumers = knobs["CONSUMERS"]
        return f"CONSUMERS must be 0 in {dtype} but is {consumers}: the warp-specialized kernel takes 16-bit dtypes"
    tiles = [(m, n) for pingpong, m, n in _tiles_of(variant) if pingpong == knobs["PINGPONG"]]
    decided = _DECIDED | dict.fromkeys(variant.tma, 1)
    if not tiles:
        decided["PINGPONG"] = 0
    return wrong_consumers(knobs, decided, tiles, given=("CONSUMERS", "PINGPONG"))


def _tiles_of(variant: Variant) -> Mapping[tuple[int, int, int], tuple[int, ...]]:
    """Return the tiles of a variant's warp-specialized kernel, with their values of num_stages."""
    return _OF_DW if variant is DW else _OVER_ROWS


@lru_cache(maxsize=16)
def full_space(variant: Variant, r: Ranges) -> tuple[KernelConfig, ...]:
    """Return every config worth measuring: the grid without configs that cannot be fast, and warp-specialized ones.

    Configs are left out if their accumulators spill, warps idle, too few bytes are in flight, or they need more shared
    memory than any SM has.
    """
    names = knobs_of(variant)
    knobs = [*(_plain(variant, r) if 0 in r.consumers else ()), *(_specialized(variant, r) if 2 in r.consumers else ())]
    return tuple(KernelConfig.of(**dict(zip(names, values, strict=True))) for values in knobs)


def _plain(variant: Variant, r: Ranges) -> Iterator[tuple[int, ...]]:
    """Yield the knob values of a variant's configs without warp specialization (CONSUMERS = 0), from the ranges `r`."""
    for m, n, k, warps, stages in product(r.block_m, r.block_n, r.block_k, r.num_warps, r.num_stages):
        if (
            accumulator_registers(m, n, warps) > _MOST_ACCUMULATOR_REGISTERS
            or (warps == 8 and m * n < 128 * 128)
            or (stages - 1) * (m + n) * k * 2 < _LEAST_BYTES_IN_FLIGHT
        ):
            continue
        for tma in _tma_choices(variant, m, n, k, r.tma):
            smem = tile_smem_bytes(m, n, k, stages, warps, tma, 2, arch="sm_90")
            fits = programs_that_fit(smem, accumulator_registers(m, n, warps), warps, _SM_SMEM_BYTES, _SM_REGISTERS)
            # More than two programs per SM never won by more than the noise.
            for programs, band in product(range(1, min(fits, 2) + 1), r.group_m if m >= 64 else (1,)):
                yield m, n, k, band, programs, *tma, 0, 0, warps, stages


def _specialized(variant: Variant, r: Ranges) -> Iterator[tuple[int, ...]]:
    """Yield the knob values of a variant's warp-specialized configs (CONSUMERS > 0), from the ranges `r`."""
    k, warps = _DECIDED["BLOCK_K"], _DECIDED["num_warps"]
    for (pingpong, m, n), stages_of_tile in _tiles_of(variant).items():
        if m in r.block_m and n in r.block_n and k in r.block_k and 1 in r.tma and warps in r.num_warps:
            for stages, band in product(stages_of_tile, r.group_m):
                if stages in r.num_stages:
                    yield m, n, k, band, 1, 1, 1, 1, 2, pingpong, warps, stages


def _tma_choices(variant: Variant, m: int, n: int, k: int, tma: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """Yield the TMA knobs (left, right, out) to try for an m x n x k tile; `tma` are the allowed values."""
    if 0 in tma:
        yield 0, 0, 0
    if 1 not in tma:
        return
    if variant is DW:
        # Without a TMA store dW spills, and its output always allows one. Loading x through pointers and dy by TMA won
        # by at most 1.6 % on any of 56 problems (H200, 2026-11).
        yield from ((1, 1, 1), (0, 1, 1))
        return
    yield 1, 1, 0
    if m >= 64:
        yield 1, 1, 1
    # Weights by TMA although x is gathered: worth it only for large tiles.
    if m >= 64 and n >= 128 and k <= 64:
        yield 0, 1, 0


# Cached: a space has two or three configs per set of arguments, each of them checked several times.
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
    """Return the shared memory of one program with CONSUMERS = 0, in bytes.

    `tma` has the knobs that turn on TMA for the left operand, the right operand and the output; `itemsize` is in bytes.

    This is exactly what Triton 3.6 to 3.9 allocates for 16-bit tiles on sm_90 and sm_100, and an upper bound on other
    architectures and for float32 (tests compare it with binaries).

    The asynchronous products of sm_90 (wgmma) and sm_100 (tcgen05) read their operands from shared memory while the
    next stage loads, so they need all stages; all other products, and tiles of fewer than 64 rows everywhere, copy them
    to registers first and need one stage less. With TMA each stage has a barrier, and a tcgen05 product has one more.
    The output has space of its own next to the stages, because the next tile's loads are in flight when it is stored.
    """
    product_is_async = block_m >= 64 and arch in ASYNC_PRODUCT_ARCHS and itemsize == 2
    # On AMD, Triton 3.6 may keep one more padded copy of each operand than 3.9 does.
    buffers = stages if product_is_async or arch.startswith("gfx") else max(stages - 1, 1)
    barriers = 8 * buffers * max(tma[:2])
    if product_is_async and arch != "sm_90":
        barriers = (barriers + 15) // 16 * 16 + 16
    output = block_m * block_n * itemsize
    if itemsize == 4:
        # An operand that TMA loaded is converted to another layout for the product without tensor cores.
        operand = max(block_m, block_n) * block_k * itemsize * max(tma[:2])
        output = output + operand if tma[2] else max(output, operand)
    elif not tma[2]:
        output = min(output, exchange_bytes(block_m, block_n, num_warps, arch))
    return buffers * (block_m + block_n) * block_k * itemsize + output + barriers


def smem_bytes(variant: Variant, config: Knobs, itemsize: int, device: DeviceSpec) -> int:
    """Return the shared memory of one program in bytes, for elements of `itemsize` bytes."""
    blocks = (config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"])
    if config["CONSUMERS"]:
        return _specialized_smem_bytes(variant, config)
    left, right, out = variant.tma
    tma = config[left], config[right], config[out]
    needed = tile_smem_bytes(*blocks, config["num_stages"], config["num_warps"], tma, itemsize, arch=device.arch)
    # Combinations that no config of the space has: an upper bound.
    if variant is DW and blocks[0] < 64 and itemsize == 2 and tma[:2] == (1, 1):
        needed += 16 + 8 * max(config["num_stages"] - 1, 1)  # dy and x have separate barriers for tiles this small
    elif variant is not DW and tma[2] and tma[:2] != (1, 1):
        needed += 2048  # TMA stores from an aligned buffer, which may be next to one that converts layouts
    return needed


def _specialized_smem_bytes(variant: Variant, config: Knobs) -> int:
    """Return the shared memory of a warp-specialized program on 16-bit elements, in bytes; at most 88 bytes too high.

    It consists of the stages, two buffers of 8 KiB per warp group for what is stored, the queue, barriers, and what
    Triton reserves to dispatch the warps.
    """
    m, n, k, groups, stages = (
        int(config[knob]) for knob in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "CONSUMERS", "num_stages")
    )
    queue = queue_bytes(5, stages) + 8 * (stages + 2) if variant is DW else queue_bytes(4, stages)
    return stages * (2 * (m + n) * k + 16) + groups * 16 * 1024 + queue + 240


def estimate_smem_bytes(config: KernelConfig, problem: Problem, device: DeviceSpec | None = None) -> int:
    """Return the shared memory of one program of a config, in bytes: what `supports` compares with the device's limit.

    Args:
        config: The config.
        problem: A problem of a grouped GEMM; its family and dtype matter.
        device: The GPU, whose architecture matters; an H200 if omitted.

    Raises:
        ForetuneError: The problem belongs to another family.

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
