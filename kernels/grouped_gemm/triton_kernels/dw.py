"""The plain kernel of dW, dw[e] = dy[rows of e].T @ x[rows of e]; specialized_dw.py has the warp-specialized one.

The contraction runs over ragged rows, so the work of a group grows with its size. Tiles of the longest groups come
first, and a group longer than `chunk_rows` (see tiles.py) is summed in chunks: partial sums in float32, which a second
kernel adds up in a fixed order, so that results are bitwise reproducible.

Both operands must be sorted by group: if a layer permutes one, `sorting.sorted_rows` sorts it first. A gather inside
the loop was 1.31 to 1.65 times as slow as the sorted product on training layers (H200, 2026-11), because every step
contracts over different rows, whose addresses all threads must compute and whose boxes TMA cannot load.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .ragged import load_ragged, ragged_descriptor
from .tiles import load_chunk, load_chunk_count, load_chunk_steps, load_split, tile_position

UNSPECIALIZED = ["rows", "groups", "slots", "N8", "K8", "GROUP_M", "PROGRAMS_PER_SM"]
KEY = ["rows", "groups", "N8", "K8"]
_LANES = tl.constexpr(256)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def grouped_gemm_dw_kernel(
    dy_ptr,  # (rows, N), sorted by group
    x_ptr,  # (rows, K), sorted by group
    dw_ptr,  # (groups, N, K)
    partial_ptr,  # (slots, words, N, K): the sums of chunks of split groups; see `store_partial`
    map_ptr,  # a TileMap's entries
    dy_desc,  # TMA descriptors of dy, x, dw and the sums; None: made here, if needed, as in `grouped_gemm_kernel`
    x_desc,
    dw_desc,
    partial_desc,
    rows,
    groups,
    slots,
    N8,  # N // 8
    K8,  # K // 8
    GROUP_M,
    PROGRAMS_PER_SM,  # only the grid depends on it
    BLOCK_M: tl.constexpr,  # along N
    BLOCK_N: tl.constexpr,  # along K
    BLOCK_K: tl.constexpr,  # along the rows
    TMA_DY: tl.constexpr,
    TMA_X: tl.constexpr,
    TMA_DW: tl.constexpr,
    CONSUMERS: tl.constexpr,  # 0
    PINGPONG: tl.constexpr,  # 0
):
    """Compute the tiles of dW with numbers p, p + programs, ... of all chunks of rows in program p, in float32.

    There is a single loop over the steps of all of a program's tiles, instead of one loop per tile: the first loads of
    the next tile are then in flight while the last products of this one run, and many groups have only a few steps.
    (Triton's own flattening needs inner loops of equal length.) The compiler pipelines the loop only if loop-carried
    counters decide whether a tile begins.
    """
    tl.static_assert(CONSUMERS == 0, "CONSUMERS are another kernel's")
    N = N8 * 8
    K = K8 * 8
    WORDS: tl.constexpr = 4 // (dw_ptr.dtype.element_ty.primitive_bitwidth // 8)
    m_tiles = tl.cdiv(N, BLOCK_M)
    n_tiles = tl.cdiv(K, BLOCK_N)
    chunk_tiles = m_tiles * n_tiles
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    if TMA_DY and dy_desc is None:
        dy_desc = ragged_descriptor(dy_ptr, N, BLOCK_K, BLOCK_M)
    if TMA_X and x_desc is None:
        x_desc = ragged_descriptor(x_ptr, K, BLOCK_K, BLOCK_N)
    dw_out = dw_ptr
    partial_out = partial_ptr
    if TMA_DW and dw_desc is None:
        dw_desc = matrix_descriptor(dw_ptr, groups, N, K, BLOCK_M, BLOCK_N)
        partial_desc = matrix_descriptor(partial_ptr, slots * WORDS, N, K, BLOCK_M, BLOCK_N)
    if TMA_DW:
        dw_out = dw_desc
        partial_out = partial_desc

    tiles = load_chunk_count(map_ptr) * chunk_tiles
    programs = tl.num_programs(0)
    steps = tl.zeros((), tl.int32)
    for start in range(tl.program_id(0), tiles, programs * _LANES):
        later = start + tl.arange(0, _LANES) * programs
        steps += tl.sum(load_chunk_steps(map_ptr, later // chunk_tiles, later < tiles, rows, groups, BLOCK_K))

    tile = tl.program_id(0) - programs
    step = -1
    tile_steps = 0
    group = 0
    row = 0
    row_end = 0
    slot = 0
    m = 0
    n = 0
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in tl.range(0, steps):
        step = tl.where(step == tile_steps - 1, 0, step + 1)
        if step == 0:
            tile += programs
            group, row, row_end, slot = load_chunk(map_ptr, tile // chunk_tiles, rows, groups)
            m_tile, n_tile = tile_position(tile % chunk_tiles, m_tiles, n_tiles, GROUP_M)
            m = m_tile * BLOCK_M
            n = n_tile * BLOCK_N
            tile_steps = tl.maximum(tl.cdiv(row_end - row, BLOCK_K), 1)
        r = row + step * BLOCK_K
        inside = r + offs_k < row_end
        if TMA_DY:
            dy = load_ragged(dy_desc, r, row_end, m, BLOCK_K, BLOCK_M)
        else:
            dy_ptrs = dy_ptr + (r + offs_k).to(tl.int64)[:, None] * N + (m + offs_m)[None, :]
            dy = tl.load(dy_ptrs, inside[:, None] & (m + offs_m < N)[None, :], other=0.0)
        if TMA_X:
            x = load_ragged(x_desc, r, row_end, n, BLOCK_K, BLOCK_N)
        else:
            x_ptrs = x_ptr + (r + offs_k).to(tl.int64)[:, None] * K + (n + offs_n)[None, :]
            x = tl.load(x_ptrs, inside[:, None] & (n + offs_n < K)[None, :], other=0.0)
        acc = tl.dot(dy.T, x, acc, input_precision="ieee")

        if step == tile_steps - 1:
            if slot >= 0:
                store_partial(partial_out, slot, m, n, acc, N, K, dw_ptr.dtype.element_ty, WORDS, TMA_DW)
            else:
                store_tile(dw_out, group, m, n, acc.to(dw_ptr.dtype.element_ty), N, K, TMA_DW)
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)


@triton.jit
def matrix_descriptor(ptr, matrices, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return a TMA descriptor of (matrices, N, K) whose boxes end where a matrix ends."""
    return tl.make_tensor_descriptor(
        ptr, [matrices, N, K], [N.to(tl.int64) * K, K.to(tl.int64), 1], [1, BLOCK_M, BLOCK_N]
    )


@triton.jit
def store_tile(out, matrix, m, n, tile, N, K, TMA: tl.constexpr):
    """Store a tile at (m, n) of matrix number `matrix` in a stack of (N, K) matrices.

    `out` is the stack's pointer or, with TMA, its descriptor.
    """
    if TMA:
        out.store([matrix, m, n], tile.reshape(1, tile.shape[0], tile.shape[1]))
    else:
        rows = m + tl.arange(0, tile.shape[0])
        columns = n + tl.arange(0, tile.shape[1])
        ptrs = out + (matrix.to(tl.int64) * N + rows)[:, None] * K + columns[None, :]
        tl.store(ptrs, tile, (rows < N)[:, None] & (columns < K)[None, :])


@triton.jit
def store_partial(out, slot, m, n, acc, N, K, element: tl.constexpr, WORDS: tl.constexpr, TMA: tl.constexpr):
    """Store a tile of float32 sums in a slot, as elements of the output's dtype.

    For a 16-bit output a slot is two matrices: the upper and the lower 16-bit halves of the sums. In this form they
    take the same path through shared memory as the output, and need no extra float32 buffer of twice the size.
    """
    if WORDS == 1:
        store_tile(out, slot, m, n, acc, N, K, TMA)
    else:
        bits = acc.to(tl.uint32, bitcast=True)
        upper = (bits >> 16).to(tl.uint16).to(element, bitcast=True)
        lower = (bits & 0xFFFF).to(tl.uint16).to(element, bitcast=True)
        store_tile(out, slot * 2, m, n, upper, N, K, TMA)
        store_tile(out, slot * 2 + 1, m, n, lower, N, K, TMA)


@triton.jit(do_not_specialize=["rows", "groups", "chunk_rows", "size8"])
def sum_partials_kernel(partial_ptr, dw_ptr, map_ptr, rows, groups, chunk_rows, size8, BLOCK: tl.constexpr):
    """Add up block b of the partial sums of split group s in program (b, s)."""
    WORDS: tl.constexpr = 4 // (dw_ptr.dtype.element_ty.primitive_bitwidth // 8)
    size = size8.to(tl.int64) * 8  # N * K
    group, first_slot, slots = load_split(map_ptr, tl.program_id(1), rows, groups, chunk_rows)
    if slots > 0:
        offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = offs < size
        acc = tl.zeros((BLOCK,), tl.float32)
        ptrs = partial_ptr + first_slot.to(tl.int64) * WORDS * size + offs
        for _ in range(0, slots):
            if WORDS == 1:
                acc += tl.load(ptrs, inside, other=0.0)
            else:
                upper = tl.load(ptrs, inside, other=0.0).to(tl.uint16, bitcast=True).to(tl.uint32)
                lower = tl.load(ptrs + size, inside, other=0.0).to(tl.uint16, bitcast=True).to(tl.uint32)
                acc += ((upper << 16) | lower).to(tl.float32, bitcast=True)
            ptrs += WORDS * size
        tl.store(dw_ptr + group.to(tl.int64) * size + offs, acc.to(dw_ptr.dtype.element_ty), inside)
