"""The warp-specialized kernel of dW in fp8, in Gluon: one warp loads, two groups of four multiply half of a tile each.

While one group multiplies its product of a step by the scales of its rows and columns and adds it in float32, the other
one keeps the tensor cores busy. With BLOCK_M = 256 each group has two halves of 64 rows, which it multiplies in turns.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...grouped_gemm.triton_kernels.specialized_dw import store_words
from ...grouped_gemm.triton_kernels.tiles import load_chunk, load_chunk_count, tile_position
from ...warp_jobs import (
    async_copy,
    load_scales,
    mbarrier,
    stage_barriers,
    store_box,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ...warp_jobs import load_tile as load_box
from .blocks import SCALED, block_of, padded_columns, scale_of
from .dw import UNSPECIALIZED

ROWS = gl.constexpr(64)  # of an instruction
STORED = gl.constexpr(64)  # columns of its tile that a group stores at a time


# The parameters are those of the plain kernel; comments give the values that CONSUMERS > 0 fixes.
@gluon.jit(do_not_specialize=UNSPECIALIZED)
def specialized_scaled_dw_kernel(
    dy_ptr,
    x_ptr,
    dy_scale_ptr,
    x_scale_ptr,
    dw_ptr,
    partial_ptr,
    map_ptr,
    dy_desc,
    x_desc,
    dw_desc,
    partial_desc,
    rows,
    groups,
    N16,
    K16,
    GROUP_M,
    PROGRAMS_PER_SM,  # 1
    BLOCKWISE: gl.constexpr,
    DY_LARGEST: gl.constexpr,
    X_LARGEST: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    TMA: gl.constexpr,  # 1
    CONSUMERS: gl.constexpr,  # 2
    IN_FLIGHT: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Compute the tiles of dW with numbers p, p + programs, ... of all chunks of rows in program p.

    A stage is full when its operands and scales have arrived, and empty again when both groups have multiplied it.
    """
    gl.static_assert(TMA == 1 and CONSUMERS == 2 and BLOCK_K == SCALED)
    HALVES: gl.constexpr = BLOCK_M // (ROWS * CONSUMERS)
    N = N16 * 16
    K = K16 * 16
    gl.static_assert(dw_desc.block_shape[1] == ROWS and dw_desc.block_shape[2] == STORED)
    of_operand: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    of_tile: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    in_order: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    dys = gl.allocate_shared_memory(dy_ptr.dtype.element_ty, [STAGES * HALVES * CONSUMERS, ROWS, BLOCK_K], of_operand)
    xs = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [STAGES, BLOCK_N, BLOCK_K], of_operand)
    dws = gl.allocate_shared_memory(dw_ptr.dtype.element_ty, [CONSUMERS, ROWS, STORED], of_tile)
    dy_scales = gl.allocate_shared_memory(gl.float32, [STAGES * HALVES * CONSUMERS if BLOCKWISE else 1, ROWS], in_order)
    x_scales = gl.allocate_shared_memory(gl.float32, [STAGES if BLOCKWISE else 1, BLOCK_N], in_order)
    full, empty = stage_barriers(STAGES, CONSUMERS)

    tensors = dy_desc, x_desc, dw_desc, partial_desc, dy_scale_ptr, x_scale_ptr
    shared = dys, xs, dws, dy_scales, x_scales, full, empty
    sizes = rows, groups, N, K, GROUP_M
    of_all = tensors, shared, map_ptr, sizes
    # Constexprs must be passed to each function one by one: Triton 3.6 turns those in a named tuple into tensors. The
    # numbers of registers are per thread and use all 65536 for three times 128 threads.
    gl.warp_specialize(
        [
            (_multiply, (of_all, BLOCKWISE, DY_LARGEST, X_LARGEST, HALVES, BLOCK_N, IN_FLIGHT, STAGES, 0)),
            (_multiply, (of_all, BLOCKWISE, DY_LARGEST, X_LARGEST, HALVES, BLOCK_N, IN_FLIGHT, STAGES, 1)),
            (_load, (of_all, BLOCKWISE, HALVES, BLOCK_N, BLOCK_K, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _load(
    of_all,
    BLOCKWISE: gl.constexpr,
    HALVES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Run the loading warp: load every step of all of the program's tiles into the next empty stage.

    `of_all` is (TMA descriptors and scales, shared memory and barriers, tile map, sizes), the same for all warps.
    HALVES is the number of 64-row parts of a tile per group.
    """
    tensors, shared, map_ptr, sizes = of_all
    dy_desc, x_desc, _, _, dy_scale_ptr, x_scale_ptr = tensors
    dys, xs, _, dy_scales, x_scales, full, empty = shared
    _, _, N, K, _ = sizes
    PARTS: gl.constexpr = 2 * HALVES
    chunk_tiles = gl.cdiv(N, ROWS * PARTS) * gl.cdiv(K, BLOCK_N)
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    offs_m = gl.arange(0, ROWS, layout=lanes)
    offs_n = gl.arange(0, BLOCK_N, layout=lanes)
    step = 0
    for tile in range(gl.program_id(0), load_chunk_count(map_ptr) * chunk_tiles, gl.num_programs(0)):
        group, row, row_end, m, n, _slot = _place(tile, map_ptr, sizes, PARTS, BLOCK_N)
        first = block_of(row, group)
        for index in range(gl.cdiv(row_end - row, SCALED)):
            block = first + index
            stage = step % STAGES
            is_full = full.index(stage)
            mbarrier.wait(empty.index(stage), (step // STAGES + 1) & 1)
            if BLOCKWISE:
                dy_scale_ptrs = dy_scale_ptr + block.to(gl.int64) * padded_columns(N) + m
                for part in gl.static_range(PARTS):
                    load_scales(dy_scales.index(stage * PARTS + part), dy_scale_ptrs + part * ROWS + offs_m)
                x_scale_ptrs = x_scale_ptr + block.to(gl.int64) * padded_columns(K) + n
                load_scales(x_scales.index(stage), x_scale_ptrs + offs_n)
                async_copy.mbarrier_arrive(is_full, increment_count=True)
            mbarrier.expect(is_full, (PARTS * ROWS + BLOCK_N) * BLOCK_K)
            for part in gl.static_range(PARTS):
                load_box(dy_desc, [m + part * ROWS, block * BLOCK_K], is_full, dys.index(stage * PARTS + part))
            load_box(x_desc, [n, block * BLOCK_K], is_full, xs.index(stage))
            step += 1


@gluon.jit
def _multiply(
    of_all,
    BLOCKWISE: gl.constexpr,
    DY_LARGEST: gl.constexpr,
    X_LARGEST: gl.constexpr,
    HALVES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    IN_FLIGHT: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER: gl.constexpr,
):
    """Run one group of multiplying warps: its rows of all of the program's tiles.

    CONSUMER is the index of the group; `_load` explains the other parameters.
    """
    tensors, shared, map_ptr, sizes = of_all
    _, _, dw_desc, partial_desc, dy_scale_ptr, x_scale_ptr = tensors
    _, _, dws, _, _, _, _ = shared
    _, _, N, K, _ = sizes
    PARTS: gl.constexpr = 2 * HALVES
    of_sum: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 32]
    )
    zeros = gl.zeros((ROWS, BLOCK_N), gl.float32, of_sum)
    held = (dws.index(CONSUMER),)
    chunk_tiles = gl.cdiv(N, ROWS * PARTS) * gl.cdiv(K, BLOCK_N)
    step = 0
    for tile in range(gl.program_id(0), load_chunk_count(map_ptr) * chunk_tiles, gl.num_programs(0)):
        group, row, row_end, m, n, slot = _place(tile, map_ptr, sizes, PARTS, BLOCK_N)
        acc = zeros
        other = zeros
        single = gl.cdiv(row_end - row, SCALED)
        if IN_FLIGHT == 2:
            for _pair in range(single // 2):
                part = _begun(shared, zeros, step, HALVES, STAGES, CONSUMER)
                more = _begun(shared, zeros, step + 1, HALVES, STAGES, CONSUMER)
                part, more = warpgroup_mma_wait(1, [part, more])
                acc = _added(acc, part, shared, step, BLOCKWISE, HALVES, STAGES, CONSUMER)
                more = warpgroup_mma_wait(0, [more])
                acc = _added(acc, more, shared, step + 1, BLOCKWISE, HALVES, STAGES, CONSUMER)
                step += 2
            single = single % 2
        for _step in range(single):
            part = warpgroup_mma_wait(0, [_begun(shared, zeros, step, HALVES, STAGES, CONSUMER * HALVES)])
            acc = _added(acc, part, shared, step, BLOCKWISE, HALVES, STAGES, CONSUMER * HALVES)
            if HALVES == 2:
                part = warpgroup_mma_wait(0, [_begun(shared, zeros, step, HALVES, STAGES, CONSUMER * HALVES + 1)])
                other = _added(other, part, shared, step, BLOCKWISE, HALVES, STAGES, CONSUMER * HALVES + 1)
            step += 1
        m += CONSUMER * HALVES * ROWS
        out = dw_desc, partial_desc, held, dy_scale_ptr, x_scale_ptr
        _store_sum(acc, out, sizes, group, m, n, slot, BLOCKWISE, DY_LARGEST, X_LARGEST)
        if HALVES == 2:
            _store_sum(other, out, sizes, group, m + ROWS, n, slot, BLOCKWISE, DY_LARGEST, X_LARGEST)
    tma.store_wait(0)


@gluon.jit
def _begun(shared, zeros, step, HALVES: gl.constexpr, STAGES: gl.constexpr, PART: gl.constexpr):
    """Wait until a step's operands have arrived, start one part's asynchronous product and return it."""
    dys, xs, _, _, _, full, _ = shared
    stage = step % STAGES
    mbarrier.wait(full.index(stage), (step // STAGES) & 1)
    dy = dys.index(stage * (2 * HALVES) + PART)
    return warpgroup_mma(dy, xs.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _added(
    acc,
    part,
    shared,
    step,
    BLOCKWISE: gl.constexpr,
    HALVES: gl.constexpr,
    STAGES: gl.constexpr,
    PART: gl.constexpr,
):
    """Return `acc` plus `part`, one part's product of a step, which is first multiplied by blockwise scales if any.

    After its last part, a group signals that the stage is empty.
    """
    _, _, _, dy_scales, x_scales, _, empty = shared
    stage = step % STAGES
    if BLOCKWISE:
        dy_scale = dy_scales.index(stage * (2 * HALVES) + PART).load(gl.SliceLayout(1, acc.type.layout))
        x_scale = x_scales.index(stage).load(gl.SliceLayout(0, acc.type.layout))
        part *= dy_scale[:, None] * x_scale[None, :]
    if PART % HALVES == HALVES - 1:
        mbarrier.arrive(empty.index(stage), count=1)
    return acc + part


@gluon.jit
def _store_sum(
    acc,
    out,
    sizes,
    group,
    m,
    n,
    slot,
    BLOCKWISE: gl.constexpr,
    DY_LARGEST: gl.constexpr,
    X_LARGEST: gl.constexpr,
):
    """Store 64 rows of a tile at (m, n), in dW or, if `slot` is not negative, in that slot of the partial sums."""
    dw_desc, partial_desc, held, dy_scale_ptr, x_scale_ptr = out
    _, _, N, K, _ = sizes
    if not BLOCKWISE:
        offs_m = m + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, acc.type.layout))
        offs_n = n + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout))
        of_dy = gl.load(dy_scale_ptr + group.to(gl.int64) * padded_columns(N) + gl.minimum(offs_m, N - 1))
        of_x = gl.load(x_scale_ptr + group.to(gl.int64) * padded_columns(K) + gl.minimum(offs_n, K - 1))
        acc *= scale_of(of_dy, DY_LARGEST)[:, None] * scale_of(of_x, X_LARGEST)[None, :]
    if slot >= 0:
        store_words(acc, partial_desc, held, slot * 2, m, n)
    else:
        store_box(acc.to(held[0].dtype), dw_desc, held, group, m, n)


@gluon.jit
def _place(tile, map_ptr, sizes, PARTS: gl.constexpr, BLOCK_N: gl.constexpr):
    """Return (group, first row, end row, first row of dW, first column of dW, slot) of a tile."""
    rows, groups, N, K, GROUP_M = sizes
    m_tiles = gl.cdiv(N, ROWS * PARTS)
    n_tiles = gl.cdiv(K, BLOCK_N)
    chunk_tiles = m_tiles * n_tiles
    group, row, row_end, slot = load_chunk(map_ptr, tile // chunk_tiles, rows, groups)
    m_tile, n_tile = tile_position(tile % chunk_tiles, m_tiles, n_tiles, GROUP_M)
    return group, row, row_end, m_tile * (ROWS * PARTS), n_tile * BLOCK_N, slot
