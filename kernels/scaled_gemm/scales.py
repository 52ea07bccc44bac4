"""The kinds of scales that fp8 operands come with, as flags of a problem, and the shapes that their scales have."""

from __future__ import annotations

from typing import Any

from ...datasets import Problem

#: The dtype of both operands; the output is bf16.
DTYPE = "fp8e4m3"
#: N and K are multiples of so many: rows of 16 bytes, which TMA and cuBLAS want too, of operands and their transposes.
STEP = 16
#: Elements along K that one scale of a block is for, and rows of w.
SCALED = 128
#: Flags of a problem, at most one of them. Without one there is one scale a tensor.
ROWWISE, BLOCKWISE = "rowwise", "blockwise"
FLAGS = (BLOCKWISE, ROWWISE)
TENSORWISE = "tensorwise"
KINDS = (TENSORWISE, ROWWISE, BLOCKWISE)


def kind_of(problem: Problem) -> str:
    """One of `KINDS`.

    >>> kind_of(Problem.of("scaled_gemm", dtype="fp8e4m3", flags=("rowwise",), m=16, n=16, k=16))
    'rowwise'
    """
    return problem.flags[0] if problem.flags else TENSORWISE


def flags_of(kind: str) -> tuple[str, ...]:
    """The flags of a problem of this kind."""
    return () if kind == TENSORWISE else (kind,)


def scale_shapes(kind: str, rows: int, n: int, k: int, groups: int | None = None) -> tuple[tuple[int, ...], ...]:
    """The shapes of the scales of x (rows, K) and of w (N, K), or (groups, N, K) where there are groups.

    Those of x by blocks, (rows, blocks of K), are stored the other way round, block by block, as cuBLAS and DeepGEMM
    want them: `stride()` is (1, rows).

    >>> scale_shapes("blockwise", 64, 256, 1000)
    ((64, 8), (2, 8))
    >>> scale_shapes("rowwise", 64, 256, 1024, groups=4), scale_shapes("tensorwise", 64, 256, 1024)
    (((64, 1), (4, 256)), ((1,), (1,)))
    """
    blocks = (-(-n // SCALED), -(-k // SCALED))
    if kind == BLOCKWISE:
        return (rows, blocks[1]), blocks if groups is None else (groups, *blocks)
    if kind == ROWWISE:
        return (rows, 1), (n, 1) if groups is None else (groups, n)
    return (1,), (1,) if groups is None else (groups,)


def scale_bytes(kind: str, rows: Any, n: Any, k: Any, groups: Any) -> Any:
    """Bytes of all scales of a call, float32, of numbers or of arrays of them."""
    blocks_n, blocks_k = -(-n // SCALED), -(-k // SCALED)
    if kind == BLOCKWISE:
        return 4 * blocks_k * (rows + groups * blocks_n)
    return 4 * (rows + groups * n) if kind == ROWWISE else 4 * (1 + groups)
