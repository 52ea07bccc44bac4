"""The plain kernel of forward and dX: y[rows of e] = x[rows of e] @ b[e], with rows optionally permuted.

In the forward pass b[e] = w[e].T, with w (groups, N, K). In dX the other side of the weights is contracted: b[e] =
w[e], with w (groups, K, N), where this kernel's N is the layer's K.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .ragged import ragged_descriptor, store_ragged
from .tiles import load_tile_count, load_tile_in_band

UNSPECIALIZED = ["x_rows", "rows", "groups", "N8", "K8", "divisor", "GROUP_M", "PROGRAMS_PER_SM"]
#: The key of an autotuner of the kernel. Group sizes are tensor contents, which no key can contain.
KEY = ["rows", "groups", "N8", "K8", "TRANSPOSED", "GATHER", "SCATTER"]


# One binary per config serves every shape: no runtime integer is specialized (Triton would otherwise compile again for
# 64 and for 8 groups, or for N divisible by 16 and not), and N and K are passed divided by 8, so that the compiler
# still knows that rows are 16-byte aligned. GROUP_M and PROGRAMS_PER_SM are runtime integers for the same reason.
@triton.jit(do_not_specialize=UNSPECIALIZED)
def grouped_gemm_kernel(
    x_ptr,  # (x_rows, K); sorted by group unless GATHER
    w_ptr,  # (groups, N, K), or (groups, K, N) if TRANSPOSED
    y_ptr,  # (rows, N); sorted by group unless SCATTER
    map_ptr,  # a TileMap's entries
    indices_ptr,  # (rows,) int32 or int64, or None: the position of each sorted row in the permuted order
    scale_ptr,  # (rows,), or None: the factor of each row of y, in the order of the permuted side
    bias_ptr,  # (groups, N), or None: added before scaling
    x_desc,  # TMA descriptors of x, w and y; None: made here, if needed, as an autotuner's configs have other boxes
    w_desc,
    y_desc,
    x_rows,
    rows,
    groups,
    N8,  # N // 8
    K8,  # K // 8
    divisor,  # GATHER loads row index // divisor
    GROUP_M,
    PROGRAMS_PER_SM,  # only the grid depends on it
    TRANSPOSED: tl.constexpr,
    GATHER: tl.constexpr,
    SCATTER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA_X: tl.constexpr,
    TMA_W: tl.constexpr,
    TMA_Y: tl.constexpr,
    CONSUMERS: tl.constexpr,  # 0
    PINGPONG: tl.constexpr,  # 0
):
    """Compute tiles of y: numbers p, p + programs, ... of the tile map in program p; accumulate in float32."""
    tl.static_assert(not (TMA_X and GATHER), "TMA cannot gather rows")
    tl.static_assert(not (TMA_Y and SCATTER), "TMA cannot scatter rows")
    N = N8 * 8
    K = K8 * 8
    n_tiles = tl.cdiv(N, BLOCK_N)
    m_tiles = load_tile_count(map_ptr, BLOCK_M)
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    if TMA_X and x_desc is None:
        x_desc = tl.make_tensor_descriptor(x_ptr, [x_rows, K], [K.to(tl.int64), 1], [BLOCK_M, BLOCK_K])
    # w has three dimensions, so that a box past one group's N or K reads zeros instead of the next group.
    if TMA_W and w_desc is None:
        if TRANSPOSED:
            w_desc = tl.make_tensor_descriptor(
                w_ptr, [groups, K, N], [K.to(tl.int64) * N, N.to(tl.int64), 1], [1, BLOCK_K, BLOCK_N]
            )
        else:
            w_desc = tl.make_tensor_descriptor(
                w_ptr, [groups, N, K], [N.to(tl.int64) * K, K.to(tl.int64), 1], [1, BLOCK_N, BLOCK_K]
            )
    if TMA_Y and y_desc is None:
        y_desc = ragged_descriptor(y_ptr, N, BLOCK_M, BLOCK_N)

    # Flattened: the next tile's loads are in flight while this one is stored (3-5 % on training layers, never slower by
    # more than 0.3 %; H200, 2026-11). No value may be carried from tile to tile, because Triton 3.6 flattens such loops
    # wrongly.
    for tile in tl.range(tl.program_id(0), m_tiles * n_tiles, tl.num_programs(0), flatten=True):
        group, row, row_end, n_tile = load_tile_in_band(map_ptr, tile, n_tiles, rows, groups, GROUP_M, BLOCK_M)
        col = n_tile * BLOCK_N
        # Clamped rows need no mask. A tile without rows (if sizes sum to more than `rows`) reads row 0.
        sorted_rows = tl.maximum(tl.minimum(row + offs_m, row_end - 1), 0)
        if not TMA_X:
            if GATHER:
                source = tl.load(indices_ptr + sorted_rows) // divisor
                source = tl.minimum(tl.maximum(source, 0), x_rows - 1)
            else:
                source = sorted_rows
            x_ptrs = x_ptr + source.to(tl.int64)[:, None] * K + offs_k[None, :]
        if not TMA_W:
            if TRANSPOSED:
                inside_n = (col + offs_n < N)[None, :]
                w_ptrs = w_ptr + group.to(tl.int64) * N * K + offs_k[:, None] * N + (col + offs_n)[None, :]
            else:
                safe_n = tl.minimum(col + offs_n, N - 1)
                w_ptrs = w_ptr + (group.to(tl.int64) * N + safe_n)[:, None] * K + offs_k[None, :]

        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in tl.range(0, K, BLOCK_K):
            if TMA_X:
                # Rows past the group's end belong to the next group; the store drops them.
                x = x_desc.load([row, k])
            else:
                x = tl.load(x_ptrs, (offs_k < K - k)[None, :], other=0.0)
                x_ptrs += BLOCK_K
            if TMA_W:
                if TRANSPOSED:
                    w = w_desc.load([group, k, col]).reshape(BLOCK_K, BLOCK_N)
                else:
                    w = w_desc.load([group, col, k]).reshape(BLOCK_N, BLOCK_K).T
            else:
                if TRANSPOSED:
                    w = tl.load(w_ptrs, (offs_k < K - k)[:, None] & inside_n, other=0.0)
                    w_ptrs += BLOCK_K * N
                else:
                    w = tl.load(w_ptrs, (offs_k < K - k)[None, :], other=0.0).T
                    w_ptrs += BLOCK_K
            acc = tl.dot(x, w, acc, input_precision="ieee")

        y_cols = col + offs_n
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + group.to(tl.int64) * N + y_cols, y_cols < N, other=0.0)
            acc += bias[None, :].to(tl.float32)
        inside = row + offs_m < row_end
        target = row + offs_m
        if SCATTER:
            target = tl.load(indices_ptr + sorted_rows)
            inside = inside & (target >= 0) & (target < rows)  # never out of bounds, whatever the indices are
        if scale_ptr is not None:
            if SCATTER:
                scale = tl.load(scale_ptr + target, inside, other=0.0)
            elif GATHER:
                permuted = tl.load(indices_ptr + sorted_rows)
                scale = tl.load(scale_ptr + permuted, inside & (permuted >= 0) & (permuted < rows), other=0.0)
            else:
                scale = tl.load(scale_ptr + target, inside, other=0.0)
            acc *= scale[:, None].to(tl.float32)
        y = acc.to(y_ptr.dtype.element_ty)
        if TMA_Y:
            store_ragged(y_desc, row, row_end, col, y, BLOCK_M, BLOCK_N)
        else:
            y_ptrs = y_ptr + target.to(tl.int64)[:, None] * N + y_cols[None, :]
            tl.store(y_ptrs, y, inside[:, None] & (y_cols < N)[None, :])
