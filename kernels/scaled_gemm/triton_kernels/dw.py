"""The plain kernel of dW in fp8, dw[e] = dy[rows of e].T @ x[rows of e].

specialized_dw.py has the warp-specialized one. Both operands are the transposed copies of
`both_ways.quantize_both_ways`, whose blocks of 128 columns hold rows of one group each, so a step of 128 never needs a
mask.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...grouped_gemm.triton_kernels.dw import store_partial, store_tile
from ...grouped_gemm.triton_kernels.tiles import chunk_capacity, load_chunk, load_chunk_count, tile_position
from .blocks import SCALED, block_of, padded_columns, scale_of

UNSPECIALIZED = ["rows", "groups", "N16", "K16", "GROUP_M", "PROGRAMS_PER_SM"]


@triton.jit(do_not_specialize=UNSPECIALIZED)
def scaled_dw_kernel(
    dy_ptr,  # (N, 128 * blocks) fp8, where blocks = rows // 128 + groups
    x_ptr,  # (K, 128 * blocks) fp8
    dy_scale_ptr,  # BLOCKWISE: (blocks, N padded), the scales; otherwise (groups, N padded), the largest magnitudes
    x_scale_ptr,  # the same for x
    dw_ptr,  # (groups, N, K) bf16
    partial_ptr,  # (slots, 2, N, K): the sums of chunks of split groups; see grouped_gemm's `store_partial`
    map_ptr,  # a TileMap's entries
    dy_desc,  # TMA descriptors of dy, x, dw and the sums; None unless TMA
    x_desc,
    dw_desc,
    partial_desc,
    rows,
    groups,
    N16,  # N // 16
    K16,  # K // 16
    GROUP_M,
    PROGRAMS_PER_SM,  # only the grid depends on it
    BLOCKWISE: tl.constexpr,
    DY_LARGEST: tl.constexpr,  # the largest numbers of the operands' dtypes
    X_LARGEST: tl.constexpr,
    BLOCK_M: tl.constexpr,  # along N
    BLOCK_N: tl.constexpr,  # along K
    BLOCK_K: tl.constexpr,  # along the rows: 128
    TMA: tl.constexpr,
    CONSUMERS: tl.constexpr,  # 0
    IN_FLIGHT: tl.constexpr,  # 1
    STAGES: tl.constexpr,  # num_stages
):
    """Compute the tiles of dW with numbers p, p + programs, ... of all chunks of rows in program p.

    Each step's product is added in float32, as in `scaled_gemm_kernel`.
    """
    tl.static_assert(BLOCK_K == SCALED, "a step is one block of the operands")
    N = N16 * 16
    K = K16 * 16
    m_tiles = tl.cdiv(N, BLOCK_M)
    n_tiles = tl.cdiv(K, BLOCK_N)
    chunk_tiles = m_tiles * n_tiles
    depth = chunk_capacity(rows, groups, SCALED).to(tl.int64) * SCALED
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    dw_out = dw_ptr
    partial_out = partial_ptr
    if TMA:
        dw_out = dw_desc
        partial_out = partial_desc
    for tile in tl.range(tl.program_id(0), load_chunk_count(map_ptr) * chunk_tiles, tl.num_programs(0)):
        group, row, row_end, slot = load_chunk(map_ptr, tile // chunk_tiles, rows, groups)
        m_tile, n_tile = tile_position(tile % chunk_tiles, m_tiles, n_tiles, GROUP_M)
        m = m_tile * BLOCK_M
        n = n_tile * BLOCK_N
        first = block_of(row, group)
        safe_m = tl.minimum(m + offs_m, N - 1)
        safe_n = tl.minimum(n + offs_n, K - 1)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in tl.range(0, tl.cdiv(row_end - row, SCALED), num_stages=STAGES):
            block = first + step
            if BLOCKWISE:
                dy_scale = tl.load(dy_scale_ptr + block.to(tl.int64) * padded_columns(N) + safe_m)
                x_scale = tl.load(x_scale_ptr + block.to(tl.int64) * padded_columns(K) + safe_n)
            if TMA:
                dy = dy_desc.load([m, block * BLOCK_K])
                x = x_desc.load([n, block * BLOCK_K])
            else:
                start = block.to(tl.int64) * BLOCK_K + offs_k
                dy = tl.load(dy_ptr + safe_m.to(tl.int64)[:, None] * depth + start[None, :])
                x = tl.load(x_ptr + safe_n.to(tl.int64)[:, None] * depth + start[None, :])
            part = tl.dot(dy, x.T)
            if BLOCKWISE:
                part *= dy_scale[:, None] * x_scale[None, :]
            acc += part
        if not BLOCKWISE:
            of_group = group.to(tl.int64)
            dy_scale = scale_of(tl.load(dy_scale_ptr + of_group * padded_columns(N) + safe_m), DY_LARGEST)
            x_scale = scale_of(tl.load(x_scale_ptr + of_group * padded_columns(K) + safe_n), X_LARGEST)
            acc *= dy_scale[:, None] * x_scale[None, :]
        if slot >= 0:
            store_partial(partial_out, slot, m, n, acc, N, K, dw_ptr.dtype.element_ty, 2, TMA)
        else:
            store_tile(dw_out, group, m, n, acc.to(dw_ptr.dtype.element_ty), N, K, TMA)
