"""The granularities of the scales of fp8 operands, as flags of a problem, and the shapes of the scales."""

from __future__ import annotations

from typing import Any

from ...datasets import Problem

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
