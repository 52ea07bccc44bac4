"""The warp-specialized kernel of dW in fp8, in Gluon: one warp loads, two groups of four multiply half of a tile each.

While one group multiplies its product of a step by the scales of its rows and columns and adds it in float32, the other
one keeps the tensor cores busy. The loading warp passes the positions of tiles through shared memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...config_limits import SPECIALIZED_BYTES
from ...grouped_gemm.triton_kernels.specialized_dw import store_words
from ...grouped_gemm.triton_kernels.tiles import load_chunk, load_chunk_count, tile_position
from ...warp_jobs import (
    async_copy,
    buffers_of,
    get_job,
    job_queue,
    load_scales,
    mbarrier,
    put_job,
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
_SMEM = gl.constexpr(SPECIALIZED_BYTES)


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
    gl.static_assert(TMA == 1 and CONSUMERS == 2 and BLOCK_M == ROWS * CONSUMERS and BLOCK_K == SCALED)
    N = N16 * 16
    K = K16 * 16
    gl.static_assert(dw_desc.block_shape[1] == ROWS and dw_desc.block_shape[2] == STORED)
    of_operand: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    of_tile: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    in_order: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    dys = gl.allocate_shared_memory(dy_ptr.dtype.element_ty, [STAGES * CONSUMERS, ROWS, BLOCK_K], of_operand)
    xs = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [STAGES, BLOCK_N, BLOCK_K], of_operand)
    # Two buffers per group for what is stored, if they fit.
    STAGED: gl.constexpr = STAGES * (BLOCK_M + BLOCK_N) * (BLOCK_K + (4 if BLOCKWISE else 0))
    BUFFERS: gl.constexpr = 2 if STAGED + 4 * CONSUMERS * ROWS * STORED <= _SMEM else 1
    dws = gl.allocate_shared_memory(dw_ptr.dtype.element_ty, [BUFFERS * CONSUMERS, ROWS, STORED], of_tile)
    dy_scales = gl.allocate_shared_memory(gl.float32, [STAGES * CONSUMERS if BLOCKWISE else 1, ROWS], in_order)
    x_scales = gl.allocate_shared_memory(gl.float32, [STAGES if BLOCKWISE else 1, BLOCK_N], in_order)
    full, empty = stage_barriers(STAGES, CONSUMERS)
    jobs = job_queue(5, STAGES)

    tensors = dy_desc, x_desc, dw_desc, partial_desc, dy_scale_ptr, x_scale_ptr
    shared = dys, xs, dws, dy_scales, x_scales, full, empty, jobs
    sizes = rows, groups, N, K, GROUP_M
    of_all = tensors, shared, sizes
    # Constexprs must be passed to each function one by one: Triton 3.6 turns those in a named tuple into tensors. The
    # numbers of registers are per thread and use all 65536 for three times 128 threads.
    gl.warp_specialize(
        [
            (_multiply, (of_all, BLOCKWISE, DY_LARGEST, X_LARGEST, BLOCK_N, IN_FLIGHT, STAGES, BUFFERS, 0)),
            (_multiply, (of_all, BLOCKWISE, DY_LARGEST, X_LARGEST, BLOCK_N, IN_FLIGHT, STAGES, BUFFERS, 1)),
            (_load, (of_all, map_ptr, BLOCKWISE, BLOCK_N, BLOCK_K, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _load(
    of_all,
    map_ptr,
    BLOCKWISE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Run the loading warp: load every step of all of the program's tiles into the next empty stage.

    `of_all` is (TMA descriptors and scales, shared memory, barriers and jobs, sizes), the same for all warps. A job is
    (number of steps, group, slot, first row, first column); one with -1 steps follows the last tile. Jobs arrive with
    the last stage of the tile before, the first one with the first stage. A tile of an empty group has no steps, but a
    stage, which stays unused.
    """
    _, shared, sizes = of_all
    _, _, _, _, _, full, empty, jobs = shared
    _, _, N, K, _ = sizes
    tiles = load_chunk_count(map_ptr) * gl.cdiv(N, 2 * ROWS) * gl.cdiv(K, BLOCK_N)
    step = 0
    turn = 0
    tile = gl.program_id(0)
    steps, block, m, n = _put_tile(jobs, turn, tile, tiles, map_ptr, sizes, BLOCK_N)
    if steps < 0:
        mbarrier.arrive(full.index(0), count=1)
    while steps >= 0:
        for _ in range(steps - 1):
            _load_step(of_all, step, block, m, n, BLOCKWISE, BLOCK_N, BLOCK_K, STAGES)
            step += 1
            block += 1
        turn += 1
        tile += gl.num_programs(0)
        following = _put_tile(jobs, turn, tile, tiles, map_ptr, sizes, BLOCK_N)
        if steps > 0:
            _load_step(of_all, step, block, m, n, BLOCKWISE, BLOCK_N, BLOCK_K, STAGES)
        else:
            mbarrier.wait(empty.index(step % STAGES), (step // STAGES + 1) & 1)
            mbarrier.arrive(full.index(step % STAGES), count=1)
        step += 1
        steps, block, m, n = following


@gluon.jit
def _put_tile(jobs, turn, tile, tiles, map_ptr, sizes, BLOCK_N: gl.constexpr):
    """Queue a tile as number `turn`; return its number of steps, its first block of rows, and its position.

    The number of steps is -1 if there is no such tile.
    """
    rows, groups, N, K, GROUP_M = sizes
    m_tiles = gl.cdiv(N, 2 * ROWS)
    n_tiles = gl.cdiv(K, BLOCK_N)
    chunk_tiles = m_tiles * n_tiles
    known = gl.minimum(tile, tiles - 1)
    group, row, row_end, slot = load_chunk(map_ptr, known // chunk_tiles, rows, groups)
    m_tile, n_tile = tile_position(known % chunk_tiles, m_tiles, n_tiles, GROUP_M)
    m = m_tile * (2 * ROWS)
    n = n_tile * BLOCK_N
    steps = gl.where(tile < tiles, gl.cdiv(row_end - row, SCALED), -1)
    put_job(jobs, turn, (steps, group, slot, m, n))
    return steps, block_of(row, group), m, n


@gluon.jit
def _load_step(
    of_all,
    step,
    block,
    m,
    n,
    BLOCKWISE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Load one step of a tile, a block of rows, once its stage is empty."""
    tensors, shared, sizes = of_all
    dy_desc, x_desc, _, _, dy_scale_ptr, x_scale_ptr = tensors
    dys, xs, _, dy_scales, x_scales, full, empty, _ = shared
    _, _, N, K, _ = sizes
    stage = step % STAGES
    is_full = full.index(stage)
    mbarrier.wait(empty.index(stage), (step // STAGES + 1) & 1)
    if BLOCKWISE:
        lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        offs_m = gl.arange(0, ROWS, layout=lanes)
        offs_n = _column_at(gl.arange(0, BLOCK_N, layout=lanes))
        dy_scale_ptrs = dy_scale_ptr + block.to(gl.int64) * padded_columns(N) + m
        for part in gl.static_range(2):
            load_scales(dy_scales.index(stage * 2 + part), dy_scale_ptrs + part * ROWS + offs_m)
        load_scales(x_scales.index(stage), x_scale_ptr + block.to(gl.int64) * padded_columns(K) + n + offs_n)
        async_copy.mbarrier_arrive(is_full, increment_count=True)
    mbarrier.expect(is_full, (2 * ROWS + BLOCK_N) * BLOCK_K)
    for part in gl.static_range(2):
        load_box(dy_desc, [m + part * ROWS, block * BLOCK_K], is_full, dys.index(stage * 2 + part))
    load_box(x_desc, [n, block * BLOCK_K], is_full, xs.index(stage))


@gluon.jit
def _multiply(
    of_all,
    BLOCKWISE: gl.constexpr,
    DY_LARGEST: gl.constexpr,
    X_LARGEST: gl.constexpr,
    BLOCK_N: gl.constexpr,
    IN_FLIGHT: gl.constexpr,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    CONSUMER: gl.constexpr,
):
    """Run one group of multiplying warps: its rows of all of the program's tiles.

    CONSUMER is the index of the group, and BUFFERS the number of its buffers for what is stored; `_load` explains the
    other parameters.
    """
    tensors, shared, sizes = of_all
    _, _, dw_desc, partial_desc, dy_scale_ptr, x_scale_ptr = tensors
    _, _, dws, _, _, full, empty, jobs = shared
    _, _, N, K, _ = sizes
    of_sum: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 32]
    )
    zeros = gl.zeros((ROWS, BLOCK_N), gl.float32, of_sum)
    held = buffers_of(dws, CONSUMER, BUFFERS)
    step = 0
    turn = 0
    mbarrier.wait(full.index(0), 0)
    steps, group, slot, m, n = get_job(jobs, turn, STAGES)
    while steps >= 0:
        acc = zeros
        m += CONSUMER * ROWS
        if not BLOCKWISE:  # load the scales now, so that the end of the tile need not wait for them
            dy_scale = _scales_at(dy_scale_ptr, group, m, N, ROWS, gl.SliceLayout(1, of_sum))
            x_scale = _scales_at(x_scale_ptr, group, n, K, BLOCK_N, gl.SliceLayout(0, of_sum))
        if steps == 0:
            mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
            mbarrier.arrive(empty.index(step % STAGES), count=1)
            step += 1
        single = steps
        if IN_FLIGHT == 2:
            for _pair in range(steps // 2):
                part = _begun(shared, zeros, step, STAGES, CONSUMER)
                more = _begun(shared, zeros, step + 1, STAGES, CONSUMER)
                part, more = warpgroup_mma_wait(1, [part, more])
                acc = _added(acc, part, shared, step, BLOCKWISE, STAGES, CONSUMER)
                more = warpgroup_mma_wait(0, [more])
                acc = _added(acc, more, shared, step + 1, BLOCKWISE, STAGES, CONSUMER)
                step += 2
            single = steps % 2
        for _step in range(single):
            part = warpgroup_mma_wait(0, [_begun(shared, zeros, step, STAGES, CONSUMER)])
            acc = _added(acc, part, shared, step, BLOCKWISE, STAGES, CONSUMER)
            step += 1
        if not BLOCKWISE:
            acc *= scale_of(dy_scale, DY_LARGEST)[:, None] * scale_of(x_scale, X_LARGEST)[None, :]
        if slot >= 0:
            store_words(acc, partial_desc, held, slot * 2, m, n)
        else:
            store_box(acc.to(held[0].dtype), dw_desc, held, group, m, n)
        turn += 1
        steps, group, slot, m, n = get_job(jobs, turn, STAGES)
    tma.store_wait(0)


@gluon.jit
def _scales_at(ptr, group, first, size, COUNT: gl.constexpr, layout: gl.constexpr):
    """Load a group's scales of COUNT rows, from `first` on, of a transposed operand that has `size` rows."""
    offsets = first + gl.arange(0, COUNT, layout=layout)
    return gl.load(ptr + group.to(gl.int64) * padded_columns(size) + gl.minimum(offsets, size - 1))


@gluon.jit
def _begun(shared, zeros, step, STAGES: gl.constexpr, CONSUMER: gl.constexpr):
    """Wait until a step's operands have arrived, start its asynchronous product and return it."""
    dys, xs, _, _, _, full, _, _ = shared
    stage = step % STAGES
    mbarrier.wait(full.index(stage), (step // STAGES) & 1)
    dy = dys.index(stage * 2 + CONSUMER)
    return warpgroup_mma(dy, xs.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _added(acc, part, shared, step, BLOCKWISE: gl.constexpr, STAGES: gl.constexpr, CONSUMER: gl.constexpr):
    """Return `acc` plus `part`, the product of a step, which is first multiplied by blockwise scales if any.

    The group then signals that it does not need the stage any more.
    """
    _, _, _, dy_scales, x_scales, _, empty, _ = shared
    stage = step % STAGES
    if BLOCKWISE:
        dy_scale = dy_scales.index(stage * 2 + CONSUMER).load(gl.SliceLayout(1, acc.type.layout))
        x_scale = _column_scales(x_scales.index(stage), gl.SliceLayout(0, acc.type.layout))
        part *= dy_scale[:, None] * x_scale[None, :]
    mbarrier.arrive(empty.index(stage), count=1)
    return acc + part


@gluon.jit
def _column_at(place):
    """Return the column whose scale is at a place in shared memory.

    A thread has two of each eight neighboring columns of a product. The scales of four of its columns are adjacent
    there, so that it reads them at once: the products need most of the bandwidth of shared memory.
    """
    return place // 16 * 16 + place % 4 // 2 * 8 + place % 16 // 4 * 2 + place % 2


@gluon.jit
def _column_scales(scales, layout: gl.constexpr):
    """Return the scales of a product's columns, which are in shared memory in the order of `_column_at`."""
    COLUMNS: gl.constexpr = scales.shape[0]
    gl.static_assert(COLUMNS == 128)
    of_threads: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [0, 0, 1, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        lane_bases=[[0, 1, 0, 0], [0, 2, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]],
        warp_bases=[[0, 0, 0, 0], [0, 0, 0, 0]],
        block_bases=[],
        shape=[8, 4, 2, 2],
    )
    found = scales.reshape([8, 4, 2, 2]).load(of_threads).permute((0, 2, 1, 3)).reshape((COLUMNS,))
    return gl.convert_layout(found, layout, assert_trivial=True)
