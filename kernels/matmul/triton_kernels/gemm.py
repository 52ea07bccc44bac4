"""The plain Triton kernel of the dense GEMM, y = a @ b for a batch of matrices.

One kernel covers all knobs except CONSUMERS: one program per tile or persistent programs, loads and stores through
pointers or TMA, and K whole or in SPLIT_K parts, which `split_k.py` adds up. It accumulates in float32 (int32 for int8)
and multiplies float32 as tf32. `specialized.py` has the warp-specialized kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...dependent_launch import let_next_begin
from .epilogue import activated
from .tile_order import split_range, tile_at

UNSPECIALIZED = ["batch", "M", "N", "K", "lda", "ldb", "ldy", "GROUP_M", "SPLIT_K", "PROGRAMS_PER_SM"]


# One binary per config serves every aligned shape, and one every other shape: no runtime integer is specialized. If
# ALIGNED, rows begin at multiples of 16 bytes; sizes are divided and multiplied once, so that the compiler knows it too
# and loads 16 bytes at a time. (Measured for the grouped kernels; see their gemm.py.)
@triton.jit(do_not_specialize=UNSPECIALIZED)
def matmul_kernel(
    a_ptr,  # (batch, M, K), rows `lda` apart; (batch, K, M) if A_KM
    b_ptr,  # (batch, N, K), rows `ldb` apart; (batch, K, N) if B_KN
    y_ptr,  # (batch, M, N), rows `ldy` apart; (SPLIT_K, batch, M, N) in float32 or int32 if SPLIT
    bias_ptr,  # (N,), or None
    a_desc,  # TMA descriptors of a, b and y, in three dimensions; None for tensors that are not accessed by TMA
    b_desc,
    y_desc,
    batch,
    M,
    N,
    K,
    lda,
    ldb,
    ldy,
    GROUP_M,
    SPLIT_K,  # 1 unless SPLIT
    PROGRAMS_PER_SM,  # only the grid depends on it
    A_KM: tl.constexpr,
    B_KN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALIGNED: tl.constexpr,  # N, lda, ldb, ldy, and M or K if rows have that length, are multiples of 16 bytes
    SPLIT: tl.constexpr,
    PERSISTENT: tl.constexpr,
    PDL: tl.constexpr,  # programmatic dependent launch: the kernel that adds up the parts waits for this one
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,  # 0: through pointers; 1: loads through TMA; 2: loads and stores
    CONSUMERS: tl.constexpr,  # 0
    PINGPONG: tl.constexpr,  # 0
):
    """Compute one tile of y per program, or, if PERSISTENT, tiles p, p + programs, ... of y in program p."""
    tl.static_assert(ALIGNED or TMA == 0, "TMA wants rows that begin at multiples of 16 bytes")
    if PDL:
        let_next_begin()
    if ALIGNED:
        UNIT: tl.constexpr = 128 // a_ptr.dtype.element_ty.primitive_bitwidth
        N = N // UNIT * UNIT
        lda = lda // UNIT * UNIT
        ldb = ldb // UNIT * UNIT
        ldy = ldy // UNIT * UNIT
        if A_KM:
            M = M // UNIT * UNIT
        if not (A_KM and B_KN):
            K = K // UNIT * UNIT
    m_tiles = tl.cdiv(M, BLOCK_M)
    n_tiles = tl.cdiv(N, BLOCK_N)

    if PERSISTENT:
        # Flattened: the next tile's loads are in flight while this one is stored.
        tiles = batch * SPLIT_K * m_tiles * n_tiles
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
            matrix, m_tile, n_tile = tile_at(tile, m_tiles, n_tiles, GROUP_M)
            one_tile(
                a_ptr, b_ptr, y_ptr, bias_ptr, a_desc, b_desc, y_desc, matrix, m_tile * BLOCK_M, n_tile * BLOCK_N,
                batch, M, N, K, lda, ldb, ldy, SPLIT_K, A_KM, B_KN, ACTIVATION, SPLIT, BLOCK_M, BLOCK_N, BLOCK_K, TMA,
            )  # fmt: skip
    else:
        # With both operands stored along K, Triton 3.6 serializes the products of a wide tile (ptxas, C7515) unless it
        # knows that there is at least one step. Most other tiles get slower from this hint (H200, 2026-11).
        if BLOCK_N == 256 and not B_KN and not SPLIT and a_ptr.dtype.element_ty.primitive_bitwidth == 16:
            tl.assume(K > 0)
        matrix, m_tile, n_tile = tile_at(tl.program_id(0), m_tiles, n_tiles, GROUP_M)
        one_tile(
            a_ptr, b_ptr, y_ptr, bias_ptr, a_desc, b_desc, y_desc, matrix, m_tile * BLOCK_M, n_tile * BLOCK_N,
            batch, M, N, K, lda, ldb, ldy, SPLIT_K, A_KM, B_KN, ACTIVATION, SPLIT, BLOCK_M, BLOCK_N, BLOCK_K, TMA,
        )  # fmt: skip


@triton.jit
def one_tile(
    a_ptr,
    b_ptr,
    y_ptr,
    bias_ptr,
    a_desc,
    b_desc,
    y_desc,
    matrix,  # of the output: one of `batch`, or of SPLIT_K x `batch`
    row,
    col,
    batch,
    M,
    N,
    K,
    lda,
    ldb,
    ldy,
    SPLIT_K,
    A_KM: tl.constexpr,
    B_KN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
):
    """Compute one tile of the output, given its first row and column."""
    offs_m = row + tl.arange(0, BLOCK_M)
    offs_n = col + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    which = matrix
    first = 0
    end = K
    if SPLIT:
        which = matrix % batch
        first, end = split_range(matrix // batch, SPLIT_K, K, BLOCK_K)
    if TMA == 0:
        # Rows past the end read the last one, and their products are not stored.
        if A_KM:
            a_at = a_ptr + which.to(tl.int64) * K * lda + (first + offs_k).to(tl.int64)[:, None] * lda + offs_m[None, :]
        else:
            safe_m = tl.minimum(offs_m, M - 1).to(tl.int64)
            a_at = a_ptr + (which.to(tl.int64) * M + safe_m)[:, None] * lda + (first + offs_k)[None, :]
        if B_KN:
            b_at = b_ptr + which.to(tl.int64) * K * ldb + (first + offs_k).to(tl.int64)[:, None] * ldb + offs_n[None, :]
        else:
            safe_n = tl.minimum(offs_n, N - 1).to(tl.int64)
            b_at = b_ptr + (which.to(tl.int64) * N + safe_n)[:, None] * ldb + (first + offs_k)[None, :]

    WIDE: tl.constexpr = tl.int32 if a_ptr.dtype.element_ty == tl.int8 else tl.float32
    acc = tl.zeros((BLOCK_M, BLOCK_N), WIDE)
    for k in tl.range(first, end, BLOCK_K):
        if TMA > 0:
            if A_KM:
                a = a_desc.load([which, k, row]).reshape(BLOCK_K, BLOCK_M).T
            else:
                a = a_desc.load([which, row, k]).reshape(BLOCK_M, BLOCK_K)
            if B_KN:
                b = b_desc.load([which, k, col]).reshape(BLOCK_K, BLOCK_N)
            else:
                b = b_desc.load([which, col, k]).reshape(BLOCK_N, BLOCK_K).T
        else:
            there = offs_k < K - k  # parts end at multiples of BLOCK_K, or at K
            if A_KM:
                a = tl.load(a_at, there[:, None] & (offs_m < M)[None, :], other=0).T
                a_at += BLOCK_K * lda.to(tl.int64)
            else:
                a = tl.load(a_at, there[None, :], other=0)
                a_at += BLOCK_K
            if B_KN:
                b = tl.load(b_at, there[:, None] & (offs_n < N)[None, :], other=0)
                b_at += BLOCK_K * ldb.to(tl.int64)
            else:
                b = tl.load(b_at, there[None, :], other=0).T
                b_at += BLOCK_K
        acc = tl.dot(a, b, acc, input_precision="tf32", out_dtype=WIDE)

    if bias_ptr is not None:
        acc += tl.load(bias_ptr + offs_n, offs_n < N, other=0.0)[None, :].to(tl.float32)
    acc = activated(acc, ACTIVATION)
    y = acc.to(y_ptr.dtype.element_ty)
    if TMA > 1:
        y_desc.store([matrix, row, col], y.reshape(1, BLOCK_M, BLOCK_N))
    else:
        y_at = y_ptr + (matrix.to(tl.int64) * M + offs_m)[:, None] * ldy + offs_n[None, :]
        tl.store(y_at, y, (offs_m < M)[:, None] & (offs_n < N)[None, :])
