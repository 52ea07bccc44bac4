"""The plain kernel of both scaled GEMMs: y[rows of e] = (x[rows of e] @ w[e].T) in fp8, times the scales, in bf16.

The dense product is the grouped one with a single group and no tile map. `specialized.py` has the warp-specialized
kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...dependent_launch import let_next_begin
from ...grouped_gemm.triton_kernels.ragged import store_ragged
from ...grouped_gemm.triton_kernels.tiles import load_tile_count, load_tile_in_band, tile_position
from ...matmul.triton_kernels.tile_order import split_range

UNSPECIALIZED = ["rows", "groups", "N16", "K16", "GROUP_M", "PROGRAMS_PER_SM", "SPLIT_K"]
_SCALED = tl.constexpr(128)  # elements of K, and columns of w, that share one blockwise scale


# One binary per config serves every shape, as in grouped_gemm: no runtime integer is specialized, and N and K are
# passed divided by 16, so that the compiler still knows that rows are 16-byte aligned.
@triton.jit(do_not_specialize=UNSPECIALIZED)
def scaled_gemm_kernel(
    x_ptr,  # (rows, K) fp8; sorted by group
    w_ptr,  # (groups, N, K) fp8
    x_scale_ptr,  # (1,); ROWWISE: (rows,); BLOCKWISE: (cdiv(K, 128), rows)
    w_scale_ptr,  # (groups,); ROWWISE: (groups, N); BLOCKWISE: (groups, cdiv(N, 128), cdiv(K, 128))
    y_ptr,  # (rows, N) bf16; (SPLIT_K, rows, N) float32 if SPLIT
    map_ptr,  # a TileMap's entries; None if there is one group
    x_desc,  # TMA descriptors of x, w, in three dimensions, and y, `ragged`; None for what is not accessed by TMA
    w_desc,
    y_desc,
    rows,
    groups,
    N16,  # N // 16
    K16,  # K // 16
    GROUP_M,
    PROGRAMS_PER_SM,  # only the grid depends on it
    SPLIT_K,  # parts of K, 1 unless SPLIT
    ROWWISE: tl.constexpr,
    BLOCKWISE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP_AB: tl.constexpr,
    TMA_LOAD: tl.constexpr,
    TMA_STORE: tl.constexpr,
    CONSUMERS: tl.constexpr,  # 0
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,  # programmatic dependent launch: the kernel that adds up the parts waits for this one
    STAGES: tl.constexpr,  # num_stages
):
    """Compute the tiles p, p + programs, ... of y in program p (persistent).

    Each step's product is added in float32: Hopper's tensor cores keep about 14 bits of a sum of fp8 products, so they
    never sum more than BLOCK_K <= 128 of them. SWAP_AB computes the transposed tile: 64 or more rows of w fill an
    instruction, but a few rows of x would not.
    """
    tl.static_assert(_SCALED % BLOCK_K == 0, "a step must lie inside one block of the scales")
    if PDL:
        let_next_begin()
    N = N16 * 16
    K = K16 * 16
    n_tiles = tl.cdiv(N, BLOCK_N)
    k_blocks = tl.cdiv(K, _SCALED)
    m_tiles = tl.cdiv(rows, BLOCK_M) if map_ptr is None else load_tile_count(map_ptr, BLOCK_M)
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)

    # Flattened: the next tile's loads are in flight while this one is stored. No value may be carried from tile to
    # tile, because Triton 3.6 flattens such loops wrongly.
    tiles = m_tiles * n_tiles
    for tile in tl.range(tl.program_id(0), tiles * SPLIT_K if SPLIT else tiles, tl.num_programs(0), flatten=True):
        first_k = 0
        end_k = K
        if SPLIT:
            first_k, end_k = split_range(tile // tiles, SPLIT_K, K, BLOCK_K)
        of_y = tile % tiles if SPLIT else tile
        if map_ptr is None:
            m_tile, n_tile = tile_position(of_y, m_tiles, n_tiles, GROUP_M)
            group, row, row_end = m_tile * 0, m_tile * BLOCK_M, rows
        else:
            group, row, row_end, n_tile = load_tile_in_band(map_ptr, of_y, n_tiles, rows, groups, GROUP_M, BLOCK_M)
        col = n_tile * BLOCK_N
        # Clamped rows and columns need no mask. A tile without rows (if sizes sum to more than `rows`) reads row 0.
        safe_m = tl.maximum(tl.minimum(row + offs_m, row_end - 1), 0)
        safe_n = tl.minimum(col + offs_n, N - 1)
        if not TMA_LOAD:
            x_ptrs = x_ptr + safe_m.to(tl.int64)[:, None] * K + (first_k + offs_k)[None, :]
            w_ptrs = w_ptr + (group.to(tl.int64) * N + safe_n)[:, None] * K + (first_k + offs_k)[None, :]
        if BLOCKWISE:
            x_scale_ptrs = x_scale_ptr + safe_m
            first = w_scale_ptr + group.to(tl.int64) * tl.cdiv(N, _SCALED) * k_blocks
            if BLOCK_N > _SCALED:
                w_scale_ptrs = first + (safe_n // _SCALED) * k_blocks
            else:
                w_scale_ptrs = first + (col // _SCALED) * k_blocks + offs_m * 0

        acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP_AB else (BLOCK_M, BLOCK_N), tl.float32)
        # If num_stages is given, the loop loads scales to shared memory ahead of time, as it does operands. Otherwise
        # it waits for them in every step, twice as long as for everything else (H200, 2026-11).
        for k in tl.range(first_k, end_k, BLOCK_K, num_stages=STAGES if BLOCKWISE else None):
            if BLOCKWISE:
                block = k // _SCALED
                x_scale = tl.load(x_scale_ptrs + block.to(tl.int64) * rows)
                w_scale = tl.load(w_scale_ptrs + block)
            if TMA_LOAD:
                # Rows past the group's end belong to the next group; the store drops them.
                x = x_desc.load([row, k])
                w = w_desc.load([group, col, k]).reshape(BLOCK_N, BLOCK_K)
            else:
                inside_k = (offs_k < K - k)[None, :]
                x = tl.load(x_ptrs, inside_k, other=0.0)
                w = tl.load(w_ptrs, inside_k, other=0.0)
                x_ptrs += BLOCK_K
                w_ptrs += BLOCK_K
            # A separate sum instead of `tl.dot(x, w, acc)`; see the docstring.
            if SWAP_AB:
                part = tl.dot(w, x.T)
                if BLOCKWISE:
                    if BLOCK_N > _SCALED:
                        part *= x_scale[None, :] * w_scale[:, None]
                    else:
                        part *= (x_scale * w_scale)[None, :]
            else:
                part = tl.dot(x, w.T)
                if BLOCKWISE:
                    if BLOCK_N > _SCALED:
                        part *= x_scale[:, None] * w_scale[None, :]
                    else:
                        part *= (x_scale * w_scale)[:, None]
            acc += part

        if SWAP_AB:
            acc = acc.T
        y_cols = col + offs_n
        if ROWWISE:
            x_scales = tl.load(x_scale_ptr + safe_m)
            w_scales = tl.load(w_scale_ptr + group.to(tl.int64) * N + safe_n)
            acc *= x_scales[:, None] * w_scales[None, :]
        elif not BLOCKWISE:
            acc *= tl.load(x_scale_ptr) * tl.load(w_scale_ptr + group)
        y = acc.to(y_ptr.dtype.element_ty)
        if TMA_STORE:
            store_ragged(y_desc, row, row_end, col, y, BLOCK_M, BLOCK_N)
        else:
            y_rows = (row + offs_m).to(tl.int64)
            if SPLIT:
                y_rows += (tile // tiles).to(tl.int64) * rows
            y_ptrs = y_ptr + y_rows[:, None] * N + y_cols[None, :]
            tl.store(y_ptrs, y, (row + offs_m < row_end)[:, None] & (y_cols < N)[None, :])
