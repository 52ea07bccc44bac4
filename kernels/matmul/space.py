"""The flags of a dense GEMM, its tuning space, the rules for its knobs, and the shared memory that a config needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import product
from typing import Any

from ...datasets import DeviceSpec, KernelConfig, Problem
from ..config_limits import (
    ASYNC_PRODUCT_ARCHS,
    SPECIALIZED_BYTES,
    Knobs,
    KnobValues,
    exchange_bytes,
    queue_bytes,
    spilled,
    wrong_consumers,
    wrong_tile_of_all_warps,
)

#: Storage that differs from a linear layer's, which has a (M, K) and b (N, K), so that y = a @ b.T: A_KM stores a as
#: (K, M), B_KN stores b as (K, N). The gradient of a layer's input has B_KN; that of its weight has both.
A_KM, B_KN = LAYOUTS = ("a_km", "b_kn")
BIAS = "bias"
ACTIVATIONS = ("relu", "gelu", "silu")
FLAGS = (*LAYOUTS, BIAS, *ACTIVATIONS)
#: The dtypes of the operands, and of the output, except that int8 is summed in int32, which is then the output's dtype.
#: float32 is multiplied as tf32.
DTYPES = ("bf16", "fp16", "fp32", "int8")
#: Rows must begin at multiples of this many bytes for TMA, and for 16-byte loads.
ALIGNMENT_BYTES = 16
#: A kernel without tiles is faster for at most so many rows.
_FEW_ROWS = 2
#: When a float32 operand that is stored across K is copied first: products per element, products in all, and K from
#: which on an H200 gained at every size (tests/kernels/matmul/turning_on_gpu.py).
_REUSED_FROM, _PRODUCTS_FROM, _DEPTH_FROM = 512, 2**31, 64


def output_dtype(problem: Problem) -> str:
    """Return the dtype of y.

    >>> output_dtype(Problem.of("matmul", batch=1, m=16, n=64, k=64, dtype="int8"))
    'int32'
    """
    return "int32" if problem.dtype == "int8" else problem.dtype_name


def activation_of(problem: Problem) -> str:
    """Return the activation that follows the product, or "none"."""
    return next((flag for flag in problem.flags if flag in ACTIVATIONS), "none")


def row_lengths(problem: Problem) -> tuple[str, str, str]:
    """Return for each of a, b and y the dimension along which it is contiguous in memory.

    >>> row_lengths(Problem.of("matmul", batch=1, m=16, n=64, k=64, flags=("b_kn",)))
    ('k', 'n', 'n')
    """
    return ("m" if A_KM in problem.flags else "k"), ("n" if B_KN in problem.flags else "k"), "n"


def is_aligned(problem: Problem) -> bool:
    """Return whether all rows are multiples of 16 bytes long, in bytes of the operands.

    Only then can TMA move them, and only then are loads 16 bytes wide.

    >>> layer = {"batch": 1, "m": 7, "n": 64}
    >>> is_aligned(Problem.of("matmul", **layer, k=64)), is_aligned(Problem.of("matmul", **layer, k=60))
    (True, False)
    """
    unit = ALIGNMENT_BYTES // problem.itemsize
    return not any(problem[dim] % unit for dim in row_lengths(problem))


def is_few(problem: Problem) -> bool:
    """Return whether `triton_kernels/few_rows.py` computes a problem: one product x @ w.T of one or two rows.

    >>> is_few(Problem.of("matmul", batch=1, m=2, n=64, k=64)), is_few(Problem.of("matmul", batch=1, m=3, n=64, k=64))
    (True, False)
    """
    few = problem["batch"] == 1 and problem["m"] <= _FEW_ROWS and problem.dtype != "int8"
    return few and is_aligned(problem) and A_KM not in problem.flags and B_KN not in problem.flags


def call_dims(problem: Problem) -> tuple[str, ...]:
    """Return the dimensions that vary from call to call with the number of tokens, which are rounded.

    This is M; or K if both operands are stored along it, as in the gradient of a weight; or no dimension if rows of a
    run along M and rows of b along K, so that rounding never changes whether a problem is aligned.
    """
    if A_KM not in problem.flags:
        return ("m",)
    return ("k",) if B_KN in problem.flags else ()


def worth_turning(problem: Problem, device: DeviceSpec) -> tuple[bool, bool]:
    """Return whether a, and b, should be copied so that their rows run along K before the product.

    This is so for large float32 operands that are stored across K. sm_90's asynchronous products take only 16-bit
    operands transposed (PTX ISA, wgmma), so the kernel rearranges such operands itself, and is several times slower.

    >>> gradient = Problem.of("matmul", batch=1, m=4096, n=4096, k=4096, dtype="fp32", flags=LAYOUTS)
    >>> worth_turning(gradient, DeviceSpec.named("h200"))
    (True, True)
    """
    batch, m, n, k = (problem[dim] for dim in ("batch", "m", "n", "k"))
    if device.arch != "sm_90" or problem.dtype != "fp32" or k < _DEPTH_FROM or batch * m * n * k < _PRODUCTS_FROM:
        return False, False
    turn_a = A_KM in problem.flags and n >= _REUSED_FROM
    # If both are stored across K, copying b alone does not pay: rearranging a is what slows the kernel most.
    turn_b = B_KN in problem.flags and m >= _REUSED_FROM and (turn_a or A_KM not in problem.flags)
    return turn_a, turn_b


def smem_bytes(knobs: Knobs, itemsize: int, device: DeviceSpec) -> int:
    """Return the shared memory of one program, in bytes, for operands of `itemsize` bytes per element.

    This is exactly what Triton 3.9 allocates for 16-bit tiles in the layout of a linear layer on sm_90, and an upper
    bound otherwise (tests compare it with binaries).

    wgmma and tcgen05 read their operands from shared memory while the next stage loads, so they need all stages; all
    other products copy them to registers first and need one stage less. A persistent program has space for the output
    next to the stages, because the next tile's loads are in flight when it is stored; others reuse the space of the
    stages.
    """
    if knobs["CONSUMERS"]:
        return _specialized_smem_bytes(knobs)
    m, n, k, stages, tma = (knobs[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_stages", "TMA"))
    arch, split = device.arch, knobs["SPLIT_K"] > 1
    is_async = m >= 64 and arch in ASYNC_PRODUCT_ARCHS
    buffers = stages if is_async or arch.startswith("gfx") else max(stages - 1, 1)
    staged = buffers * (m + n) * k * itemsize
    barriers = 16 * buffers + 16 if tma else 0
    if is_async and arch != "sm_90":
        barriers += 32  # of the product
    output = m * n * (4 if itemsize == 1 or split else itemsize)
    if tma == 2:
        output += 1024  # TMA stores from an aligned buffer, which may be next to the bias
    elif tma == 1 and itemsize == 2 and not split:  # rows that are not aligned are converted all at once
        output = min(output, exchange_bytes(m, n, knobs["num_warps"], arch))
    return int(staged + output if knobs["PROGRAMS_PER_SM"] else max(staged, output)) + barriers


def _specialized_smem_bytes(knobs: Knobs) -> int:
    """Return the shared memory of a warp-specialized program on 16-bit elements, in bytes; at most 88 bytes too high.

    It consists of the stages, one or two buffers per group for the columns that are stored at a time, the queue, two
    barriers per stage, and what Triton reserves to dispatch the warps and to align a tile's second part.
    """
    m, n, k = (int(knobs[f"BLOCK_{axis}"]) for axis in "MNK")
    stages, groups = int(knobs["num_stages"]), int(knobs["CONSUMERS"])
    staged, buffer = 2 * stages * (m + n) * k, 2 * 64 * (n % 64 or 64)
    one_piece = n % 128 and not knobs["PINGPONG"]  # of the tile's second part, so that pieces cannot alternate
    buffers = groups * (2 if not one_piece and staged + 2 * groups * buffer <= SPECIALIZED_BYTES else 1)
    return staged + 16 * stages + buffers * buffer + queue_bytes(3, stages) + (288 if n % 128 else 256)


#: The knobs: BLOCK_M x BLOCK_N is the output tile, BLOCK_K the contraction's step.
KNOBS = (
    "BLOCK_M",
    "BLOCK_N",
    "BLOCK_K",
    "GROUP_M",  # M tiles that are adjacent in the L2 order; a runtime argument
    "SPLIT_K",  # parts that K is split into, 1 for none; a runtime argument if more than 1
    "PROGRAMS_PER_SM",  # persistent grid / number of SMs; 0: one program per tile; a runtime argument if not 0
    "TMA",  # 0: everything through pointers; 1: loads through TMA; 2: loads and stores
    "CONSUMERS",  # groups of four warps that multiply while one more warp loads; 0: all warps do both
    "PINGPONG",  # 0: the groups share a tile; 1: each has its own, and multiplies while the other stores
    "num_warps",
    "num_stages",
)
_BLOCKS = (16, 32, 64, 128, 256)
_POWER = "a power of two between 16 and 256"
VALUES = KnobValues.in_words(
    "matmul",
    {
        "BLOCK_M": (f"{_POWER}, or 192", (*_BLOCKS, 192)),
        "BLOCK_N": (f"{_POWER}, or 160 or 192", (*_BLOCKS, 160, 192)),
        "BLOCK_K": (_POWER, _BLOCKS),
        "GROUP_M": ("between 1 and 1024", range(1, 1025)),
        "SPLIT_K": ("between 1 and 64", range(1, 65)),
        "PROGRAMS_PER_SM": ("between 0 and 64, where 0 launches one program per tile", range(65)),
        "TMA": ("0, 1 (loads) or 2 (loads and stores)", (0, 1, 2)),
        "CONSUMERS": ("0, 2 or 3", (0, 2, 3)),
        "PINGPONG": ("0 or 1", (0, 1)),
        "num_warps": ("2, 4 or 8", (2, 4, 8)),
        "num_stages": ("between 1 and 8", range(1, 9)),
    },
)
# Accumulator registers per thread: above 128 of 255 the kernel spills, and compilation takes up to minutes.
_MOST_ACCUMULATOR_REGISTERS = 128
# Elements that a thread loads per step: with more, compilation takes a minute or longer (as for the grouped kernels).
_MOST_LOADED_ELEMENTS = 512
#: The least bytes that can be copied to shared memory directly, without registers (PTX ISA, cp.async).
LEAST_COPY_BYTES = 4
# Elements that a thread loads per step and accumulates, if rows are not aligned: each element is then loaded alone, and
# through a register if it has fewer than LEAST_COPY_BYTES. Many kernels with more elements spill registers and take
# several times as long (tests/kernels/matmul/test_family.py).
_MOST_UNALIGNED_ELEMENTS = 128
# Bytes of loads in flight, of 16-bit operands: with fewer the latency of memory is not hidden; more are never needed.
_BYTES_IN_FLIGHT = (40 * 1024, 192 * 1024)
# Shared memory of a block on sm_90 and sm_100, for which the space is laid out.
_SMEM_BYTES = 227 * 1024
# Tiles of the warp-specialized kernel, (CONSUMERS, PINGPONG, BLOCK_M, BLOCK_N), with as many stages as fit, and the
# values of GROUP_M. Some programs of the two smallest tiles fall behind the others in longer bands, depending on the
# state of the L2 ("Two speeds of one kernel" in kernels/NOTES.md).
_BANDS = (1, 4, 8, 16)
_SPECIALIZED = {
    (2, 1, 64, 256): (5, (1, 4, 8)),
    (2, 1, 128, 128): (6, (1, 4, 8)),
    (2, 1, 128, 160): (5, _BANDS),
    (2, 1, 128, 192): (4, _BANDS),
    (2, 0, 128, 128): (6, _BANDS),
    (2, 0, 128, 160): (6, _BANDS),
    (2, 0, 128, 192): (5, _BANDS),
    (2, 0, 128, 256): (4, _BANDS),
    (3, 0, 192, 128): (5, _BANDS),
    (3, 0, 192, 192): (4, _BANDS),
}


def wrong_knob(knobs: Mapping[str, Any]) -> str | None:
    """Return why these knobs are not a valid config of the kernel for any problem, or None if they are.

    >>> wrong_knob(KernelConfig.of(**dict.fromkeys(KNOBS, 1) | {"BLOCK_M": 24}).to_json())
    'BLOCK_M cannot be 24: a power of two between 16 and 256, or 192'
    """
    if (wrong := VALUES.wrong(knobs)) is not None:
        return wrong
    if knobs["CONSUMERS"]:
        return _wrong_consumers(knobs)
    if knobs["PINGPONG"]:
        return "PINGPONG must be 0 with CONSUMERS = 0 but is 1"
    if (wrong := wrong_tile_of_all_warps(knobs)) is not None:
        return wrong
    if knobs["SPLIT_K"] > 1 and knobs["PROGRAMS_PER_SM"]:
        return f"PROGRAMS_PER_SM must be 0 with SPLIT_K = {knobs['SPLIT_K']} but is {knobs['PROGRAMS_PER_SM']}"
    if knobs["SPLIT_K"] > 1 and knobs["TMA"] == 2:
        return f"TMA must be 0 or 1 with SPLIT_K = {knobs['SPLIT_K']}, which stores partial sums in float32, but is 2"
    return _wrong_tile(knobs["BLOCK_M"], knobs["BLOCK_N"], knobs["BLOCK_K"], knobs["num_warps"])


def _wrong_tile(m: int, n: int, k: int, warps: int) -> str | None:
    """Return why an m x n x k tile is too large (spilled registers, or minutes of compilation), or None."""
    threads = 32 * warps
    if (wrong := spilled(m, n, warps, _MOST_ACCUMULATOR_REGISTERS)) is not None:
        return wrong
    if k > (most_k := _MOST_LOADED_ELEMENTS * threads // (m + n)):
        return (
            f"BLOCK_K must be at most {most_k} with BLOCK_M x BLOCK_N = {m} x {n} and num_warps = {warps}, or "
            f"compilation takes minutes, but is {k}"
        )
    return None


def wrong_unaligned_tile(knobs: Knobs, itemsize: int) -> str | None:
    """Return why a tile is too large for a problem whose rows are not aligned (`is_aligned`), or None.

    >>> tile = {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4}
    >>> wrong_unaligned_tile(tile, itemsize=2).partition(", or ")[0]
    '(BLOCK_M + BLOCK_N) * BLOCK_K + BLOCK_M * BLOCK_N must be at most 16384 with num_warps = 4'
    >>> wrong_unaligned_tile(tile, itemsize=4) is None
    True
    """
    m, n, k, warps = (knobs[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps"))
    held, most = (m + n) * k + m * n, _MOST_UNALIGNED_ELEMENTS * 32 * warps
    if held <= most or itemsize >= LEAST_COPY_BYTES:
        return None
    return (
        f"(BLOCK_M + BLOCK_N) * BLOCK_K + BLOCK_M * BLOCK_N must be at most {most} with num_warps = {warps}, or "
        f"registers may spill, as rows do not begin at multiples of {ALIGNMENT_BYTES} bytes, but is {held}"
    )


def _wrong_consumers(knobs: Mapping[str, Any]) -> str | None:
    """Return why CONSUMERS > 0 cannot be combined with the other knobs, or None if it can."""
    consumers, pingpong = knobs["CONSUMERS"], knobs["PINGPONG"]
    decided = {"BLOCK_K": 64, "SPLIT_K": 1, "PROGRAMS_PER_SM": 1, "TMA": 2, "num_warps": 4}
    tiles = [(m, n) for *groups, m, n in _SPECIALIZED if groups == [consumers, pingpong]]
    if not tiles:
        decided["PINGPONG"] = 0
    return wrong_consumers(knobs, decided, tiles, given=("CONSUMERS", "PINGPONG"))


@lru_cache(maxsize=1)
def full_space() -> tuple[KernelConfig, ...]:
    """Return every config worth measuring, for all dtypes: all combinations of blocks that can be fast."""
    return tuple(KernelConfig.of(**dict(zip(KNOBS, knobs, strict=True))) for knobs in _grid())


def _grid() -> Iterator[tuple[int, ...]]:
    """Yield the values of `KNOBS` of each config worth measuring."""
    for (m, n, k), warps, stages in product(_blocks(), (4, 8), (2, 3, 4, 5, 6)):
        if (warps == 8 and m * n < 128 * 128) or _wrong_tile(m, n, k, warps) is not None:
            continue
        least, most = _BYTES_IN_FLIGHT
        if not least <= (stages - 1) * (m + n) * k * 2 <= most or (m <= 32 and stages % 2 == 0):
            continue
        for tma, programs, band, splits in _launch_choices(m, n, k, warps, stages):
            yield m, n, k, band, splits, programs, tma, 0, 0, warps, stages
    for (consumers, pingpong, m, n), (stages, bands) in _SPECIALIZED.items():
        for band in bands:
            yield m, n, 64, band, 1, 1, 2, consumers, pingpong, 4, stages


def _blocks() -> Iterator[tuple[int, int, int]]:
    """Yield the tiles (BLOCK_M, BLOCK_N, BLOCK_K) of the space with CONSUMERS = 0.

    Products of few rows use many small tiles with long steps; large tiles have short steps, and float32 the shortest.
    """
    yield from product((16, 32), (32, 64, 128), (64, 128, 256))
    yield from product((64, 128, 256), (64, 128, 256), (64, 128))
    yield from product((128, 256), (128, 256), (32,))
    yield from ((64, 256, 32), (256, 64, 32))


def _launch_choices(m: int, n: int, k: int, warps: int, stages: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (TMA, PROGRAMS_PER_SM, GROUP_M, SPLIT_K) to try for an m x n x k tile."""
    if m <= 32:
        yield from ((tma, 0, 1, splits) for tma in (0, 1) for splits in (1, 2, 4, 8))
        yield 1, 2, 1, 1
        return
    knobs = dict(zip(KNOBS, (m, n, k, 1, 1, 1, 1, 0, 0, warps, stages), strict=True))
    smem = smem_bytes(knobs, 2, DeviceSpec.named("h200"))
    two_fit = m * n <= 128 * 128 and 2 * smem < _SMEM_BYTES
    yield 0, 0, 8, 1
    for band in (1, 8):
        yield 1, 0, band, 1
        for programs in (1, 2) if two_fit else (1,):
            yield 1, programs, band, 1
            if m >= 128:
                yield 2, programs, band, 1
    if m * n <= 128 * 128:
        for splits in (2, 4, 8) if m * n <= 64 * 128 else (2, 4):
            yield 1, 0, 8, splits
            if m == 64:
                yield 0, 0, 8, splits
