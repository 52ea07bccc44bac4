"""Experimental kernels of dW for sm_90, compared by hopper_on_gpu.py."""

from __future__ import annotations

from foretune.kernels.grouped_gemm.triton_kernels.ragged_boxes import load_ragged, ragged_descriptor
from foretune.kernels.grouped_gemm.triton_kernels.specialized_dw import _matrix_descriptor
from foretune.kernels.grouped_gemm.triton_kernels.tiles import load_chunk, load_chunk_count, tile_position
from foretune.kernels.warp_jobs import (
    fence_async_shared,
    halves,
    mbarrier,
    stage_barriers,
    store_tile,
    tma,
    turn_barriers,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

UNSPECIALIZED = ["rows", "groups", "slots", "N8", "K8", "GROUP_M"]


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def dw_kernel(
    dy_ptr,
    x_ptr,
    dw_ptr,
    partial_ptr,
    map_ptr,
    rows,
    groups,
    slots,
    N8,
    K8,
    GROUP_M,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    PINGPONG: gl.constexpr,
    WIDTH: gl.constexpr,  # columns stored at a time
    BUFFERS: gl.constexpr,  # of WIDTH columns, per group
    LAG: gl.constexpr,  # steps that group 1 starts behind group 0
    EXTRA: gl.constexpr,  # columns of the second accumulator
):
    N = N8 * 8
    K = K8 * 8
    SHARE: gl.constexpr = 1 if PINGPONG else CONSUMERS
    ROWS: gl.constexpr = BLOCK_M // SHARE
    dtype: gl.constexpr = dw_ptr.dtype.element_ty
    of_tile: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    dy_desc = ragged_descriptor(dy_ptr, N, BLOCK_K, ROWS)
    x_desc = ragged_descriptor(x_ptr, K, BLOCK_K, BLOCK_N)
    dw_desc = _matrix_descriptor(dw_ptr, groups, N, K, ROWS, WIDTH)
    partial_desc = _matrix_descriptor(partial_ptr, slots * 2, N, K, ROWS, WIDTH)
    dy_tiles = gl.allocate_shared_memory(dtype, [STAGES * SHARE, BLOCK_K, ROWS], of_tile)
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, BLOCK_N], of_tile)
    dw_tiles = gl.allocate_shared_memory(dtype, [CONSUMERS * BUFFERS, ROWS, WIDTH], of_tile)
    full, empty = stage_barriers(STAGES, SHARE)
    turns = turn_barriers()
    sizes = rows, groups, gl.cdiv(N, BLOCK_M), gl.cdiv(K, BLOCK_N + EXTRA), GROUP_M, N
    if EXTRA > 0:
        more_desc = ragged_descriptor(x_ptr, K, BLOCK_K, EXTRA)
        more_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, EXTRA], of_tile)
        descs = dy_desc, x_desc, dw_desc, partial_desc, more_desc
        shared = dy_tiles, x_tiles, dw_tiles, full, empty, turns, more_tiles
        of_all = descs, shared, map_ptr, sizes
    else:
        descs = dy_desc, x_desc, dw_desc, partial_desc, x_desc
        shared = dy_tiles, x_tiles, dw_tiles, full, empty, turns, x_tiles
        of_all = descs, shared, map_ptr, sizes
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_multiply, (of_all, SHARE, ROWS, BLOCK_N, BLOCK_K, STAGES, BUFFERS, LAG, EXTRA, 0)),
                (_multiply, (of_all, SHARE, ROWS, BLOCK_N, BLOCK_K, STAGES, BUFFERS, LAG, EXTRA, 1)),
                (_load, (of_all, SHARE, ROWS, BLOCK_N, BLOCK_K, STAGES, EXTRA)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (of_all, SHARE, ROWS, BLOCK_N, BLOCK_K, STAGES, BUFFERS, LAG, EXTRA, 0)),
                (_multiply, (of_all, SHARE, ROWS, BLOCK_N, BLOCK_K, STAGES, BUFFERS, LAG, EXTRA, 1)),
                (_multiply, (of_all, SHARE, ROWS, BLOCK_N, BLOCK_K, STAGES, BUFFERS, LAG, EXTRA, 2)),
                (_load, (of_all, SHARE, ROWS, BLOCK_N, BLOCK_K, STAGES, EXTRA)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )


@gluon.jit
def _load(
    of_all,
    SHARE: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    EXTRA: gl.constexpr,
):
    descs, shared, map_ptr, sizes = of_all
    dy_desc, x_desc, _dw_desc, _partial_desc, more_desc = descs
    dy_tiles, x_tiles, _dw_tiles, full, empty, _turns, more_tiles = shared
    rows, groups, m_tiles, n_tiles, GROUP_M, _N = sizes
    chunk_tiles = m_tiles * n_tiles
    step = 0
    for tile in range(gl.program_id(0), load_chunk_count(map_ptr) * chunk_tiles, gl.num_programs(0)):
        _group, row, row_end, _slot = load_chunk(map_ptr, tile // chunk_tiles, rows, groups)
        m_tile, n_tile = tile_position(tile % chunk_tiles, m_tiles, n_tiles, GROUP_M)
        m = m_tile * (ROWS * SHARE)
        n = n_tile * (BLOCK_N + EXTRA)
        for r in range(row, gl.maximum(row_end, row + 1), BLOCK_K):
            stage = step % STAGES
            is_full = full.index(stage)
            mbarrier.wait(empty.index(stage), (step // STAGES + 1) & 1)
            mbarrier.expect(is_full, (SHARE * ROWS + BLOCK_N + EXTRA) * BLOCK_K * 2)
            for part in gl.static_range(SHARE):
                load_ragged(dy_desc, r, row_end, m + part * ROWS, is_full, dy_tiles.index(stage * SHARE + part))
            load_ragged(x_desc, r, row_end, n, is_full, x_tiles.index(stage))
            if EXTRA > 0:
                load_ragged(more_desc, r, row_end, n + BLOCK_N, is_full, more_tiles.index(stage))
            step += 1


@gluon.jit
def _multiply(
    of_all,
    SHARE: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    LAG: gl.constexpr,
    EXTRA: gl.constexpr,
    CONSUMER: gl.constexpr,
):
    TURNS: gl.constexpr = SHARE == 1
    PART: gl.constexpr = 0 if TURNS else CONSUMER
    descs, shared, map_ptr, sizes = of_all
    _dy_desc, _x_desc, dw_desc, partial_desc, _more_desc = descs
    dy_tiles, x_tiles, dw_tiles, full, empty, turns, more_tiles = shared
    rows, groups, m_tiles, n_tiles, GROUP_M, N = sizes
    of_sum: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128 if SHARE == 3 else BLOCK_N, 16]
    )
    chunk_tiles = m_tiles * n_tiles
    tiles = load_chunk_count(map_ptr) * chunk_tiles
    programs = gl.num_programs(0)
    first = gl.program_id(0)
    step = 0
    turn = 0
    stored = 0  # buffers used so far
    if TURNS:
        if CONSUMER == 1:
            step += _steps_of_tile(map_ptr, first, tiles, chunk_tiles, rows, groups, BLOCK_K)
            first += programs
        programs *= 2
    if LAG > 0 and CONSUMER == 1:
        mbarrier.wait(turns.index(1), 0, pred=first < tiles)
    for tile in range(first, tiles, programs):
        group, row, row_end, slot = load_chunk(map_ptr, tile // chunk_tiles, rows, groups)
        m_tile, n_tile = tile_position(tile % chunk_tiles, m_tiles, n_tiles, GROUP_M)
        m = m_tile * (ROWS * SHARE) + PART * ROWS
        n = n_tile * (BLOCK_N + EXTRA)
        steps = _steps_of(row, row_end, BLOCK_K)
        acc = gl.zeros((ROWS, BLOCK_N), gl.float32, of_sum)
        if EXTRA > 0:
            of_more: gl.constexpr = gl.NVMMADistributedLayout(
                version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, EXTRA, 16]
            )
            more = gl.zeros((ROWS, EXTRA), gl.float32, of_more)
        if TURNS:
            mbarrier.wait(turns.index(CONSUMER), (turn + 1 - CONSUMER) & 1)
            turn += 1
        if m < N:
            for k in range(steps):
                stage = step % STAGES
                mbarrier.wait(full.index(stage), (step // STAGES) & 1)
                dy = dy_tiles.index(stage * SHARE + PART).permute((1, 0))
                acc = warpgroup_mma(dy, x_tiles.index(stage), acc, use_acc=k > 0, is_async=True)
                if EXTRA > 0:
                    more = warpgroup_mma(dy, more_tiles.index(stage), more, use_acc=k > 0, is_async=True)
                    acc, more = warpgroup_mma_wait(2, [acc, more])
                else:
                    acc = warpgroup_mma_wait(1, [acc])
                mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
                if LAG > 0 and CONSUMER == 0:
                    mbarrier.arrive(turns.index(1), count=1, pred=step == LAG)
                step += 1
            if TURNS:
                mbarrier.arrive(turns.index(1 - CONSUMER), count=1)
            if EXTRA > 0:
                acc, more = warpgroup_mma_wait(0, [acc, more])
            else:
                acc = warpgroup_mma_wait(0, [acc])
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        else:  # past the last row: only take part in the barriers
            for _ in range(steps):
                stage = step % STAGES
                mbarrier.wait(full.index(stage), (step // STAGES) & 1)
                mbarrier.arrive(empty.index(stage), count=1)
                step += 1
        if TURNS:
            step += _steps_of_tile(map_ptr, tile + programs // 2, tiles, chunk_tiles, rows, groups, BLOCK_K)
        if m < N:
            if slot >= 0:
                bits = acc.to(gl.uint32, bitcast=True)
                high = (bits >> 16).to(gl.uint16).to(dw_tiles.dtype, bitcast=True)
                low = (bits & 0xFFFF).to(gl.uint16).to(dw_tiles.dtype, bitcast=True)
                stored = _store(high, partial_desc, dw_tiles, stored, slot * 2, m, n, BUFFERS, CONSUMER)
                stored = _store(low, partial_desc, dw_tiles, stored, slot * 2 + 1, m, n, BUFFERS, CONSUMER)
                if EXTRA > 0:
                    bits = more.to(gl.uint32, bitcast=True)
                    high = (bits >> 16).to(gl.uint16).to(dw_tiles.dtype, bitcast=True)
                    low = (bits & 0xFFFF).to(gl.uint16).to(dw_tiles.dtype, bitcast=True)
                    stored = _store(high, partial_desc, dw_tiles, stored, slot * 2, m, n + BLOCK_N, BUFFERS, CONSUMER)
                    stored = _store(
                        low, partial_desc, dw_tiles, stored, slot * 2 + 1, m, n + BLOCK_N, BUFFERS, CONSUMER
                    )
            else:
                stored = _store(acc.to(dw_tiles.dtype), dw_desc, dw_tiles, stored, group, m, n, BUFFERS, CONSUMER)
                if EXTRA > 0:
                    stored = _store(
                        more.to(dw_tiles.dtype), dw_desc, dw_tiles, stored, group, m, n + BLOCK_N, BUFFERS, CONSUMER
                    )
    if LAG > 0 and CONSUMER == 0:
        mbarrier.arrive(turns.index(1), count=1, pred=step <= LAG)
    tma.store_wait(0)


@gluon.jit
def _steps_of(row, row_end, BLOCK_K: gl.constexpr):
    return gl.maximum(gl.cdiv(row_end - row, BLOCK_K), 1)


@gluon.jit
def _steps_of_tile(map_ptr, tile, tiles, chunk_tiles, rows, groups, BLOCK_K: gl.constexpr):
    _group, row, row_end, _slot = load_chunk(map_ptr, gl.minimum(tile, tiles - 1) // chunk_tiles, rows, groups)
    return _steps_of(row, row_end, BLOCK_K)


@gluon.jit
def _store(tile, desc, buffers, stored, matrix, m, n, BUFFERS: gl.constexpr, CONSUMER: gl.constexpr):
    if buffers.shape[2] < tile.shape[1]:
        left, right = halves(tile)
        stored = _store(left, desc, buffers, stored, matrix, m, n, BUFFERS, CONSUMER)
        stored = _store(right, desc, buffers, stored, matrix, m, n + tile.shape[1] // 2, BUFFERS, CONSUMER)
    else:
        tma.store_wait(BUFFERS - 1)  # until the buffer's previous content is stored
        held = buffers.index(CONSUMER * BUFFERS + stored % BUFFERS)
        held.store(tile)
        fence_async_shared()
        store_tile(desc, [matrix, m, n], held.reshape([1, tile.shape[0], tile.shape[1]]))
        stored += 1
    return stored
