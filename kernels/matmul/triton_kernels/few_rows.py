"""One or two rows times a matrix stored as (N, K): a kernel that streams it, instead of tiles padded to 16 rows.

Each program reads a few rows of b whole, with float32 multiply-adds, and reduces once at the end; so K needs no split,
and results are bitwise reproducible.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl

from ....runtime.launching.launcher import Launcher
from ..space import activation_of
from .epilogue import activated

if TYPE_CHECKING:
    from ....datasets import Problem
    from ....runtime.launching.launcher import PreparedLaunch


@triton.jit(do_not_specialize=["M", "N", "K", "lda", "ldb"])
def few_rows_matmul_kernel(
    a_ptr,  # (M, K), rows `lda` apart
    b_ptr,  # (N, K), rows `ldb` apart
    y_ptr,  # (M, N)
    bias_ptr,  # (N,), or None
    M,
    N,
    K,
    lda,
    ldb,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,  # M
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,  # 1, or the steps whose loads are in flight, through shared memory
):
    """Compute BLOCK_N columns of y. K and the row strides lda and ldb are multiples of 16 bytes."""
    UNIT: tl.constexpr = 128 // a_ptr.dtype.element_ty.primitive_bitwidth
    K = K // UNIT * UNIT
    lda = lda // UNIT * UNIT
    ldb = ldb // UNIT * UNIT
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)[None, :]
    a_at = a_ptr + offs_k
    b_at = b_ptr + tl.minimum(col, N - 1).to(tl.int64)[:, None] * ldb + offs_k
    acc0 = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    acc1 = acc0
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        there = offs_k < K - k
        b = tl.load(b_at, there, other=0.0, eviction_policy="evict_first").to(tl.float32)
        acc0 += b * tl.load(a_at, there, other=0.0).to(tl.float32)
        if ROWS > 1:
            acc1 += b * tl.load(a_at + lda, there, other=0.0).to(tl.float32)
        a_at += BLOCK_K
        b_at += BLOCK_K
    store_row(acc0, y_ptr, bias_ptr, col, N, ACTIVATION)
    if ROWS > 1:
        store_row(acc1, y_ptr + N, bias_ptr, col, N, ACTIVATION)


@triton.jit
def store_row(acc, y_ptr, bias_ptr, col, N, ACTIVATION: tl.constexpr):
    """Store activation(sum over K + bias) as part of one row of y."""
    y = tl.sum(acc, 1)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + col, col < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + col, activated(y, ACTIVATION).to(y_ptr.dtype.element_ty), col < N)


_launch = Launcher(few_rows_matmul_kernel)


class Blocks(NamedTuple):
    """The block of one program, `n` columns in steps of `k` along K, and the program's warps and pipeline stages."""

    n: int
    k: int
    warps: int
    stages: int = 1


#: By the number of rows: of 29 blocks, one within 1 % of the least mean time over ten layers that was on no layer
#: slower than the tiled kernel or cuBLAS (H100; tests/kernels/decode_on_gpu.py). With three rows there is none.
_BLOCKS = {1: Blocks(1, 2048, 8), 2: Blocks(4, 512, 2, 3)}


def prepare_few_rows(problem: Problem, lda: int, ldb: int, blocks: Blocks | None = None) -> PreparedLaunch:
    """Return a function that launches the product on any (a, b, y, bias) of a problem that `is_few`.

    Args:
        problem: The problem.
        lda: The distance of the rows of a, (m, k), in elements.
        ldb: The distance of the rows of b, stored as (n, k), in elements.
        blocks: The block of one program; the default for this number of rows if None.
    """
    m, n, k = (problem[dim] for dim in "mnk")
    block_n, block_k, warps, stages = blocks or _BLOCKS[m]
    return _launch.prepare(
        (-(-n // block_n), 1, 1),
        (m, n, k, lda, ldb),
        ACTIVATION=activation_of(problem),
        ROWS=m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        STAGES=stages,
        num_warps=warps,
    )
