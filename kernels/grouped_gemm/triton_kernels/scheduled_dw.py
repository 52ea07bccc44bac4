"""The warp-specialized kernel of dW whose programs take tiles from a counter, in Gluon.

Configs with CONSUMERS run it, unless they have PINGPONG, whose kernel is in specialized_dw.py. There each program has a
fixed number of tiles, so a group with many rows must be cut into short chunks, whose partial sums are written and read
again. Here a program that is done early takes more tiles, those of the longest groups first, so a chunk may be as long
as the average work of an SM (`space.chunks_of`).

The loading warp takes the tiles, and passes their numbers to the multiplying groups through a queue in shared memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...warp_jobs import mbarrier, stage_barriers, tma, warpgroup_mma, warpgroup_mma_wait
from .dw import UNSPECIALIZED
from .dw_map import COUNTER
from .ragged_boxes import STORED, load_ragged
from .specialized_dw import _steps_of, _store, _store_words
from .tiles import load_chunk, load_chunk_count, tile_position


# The parameters are those of the plain kernel; comments give the values that CONSUMERS > 0 fixes.
@gluon.jit(do_not_specialize=UNSPECIALIZED)
def scheduled_dw_kernel(
    dy_ptr,
    x_ptr,
    dw_ptr,
    partial_ptr,
    map_ptr,  # the second map of `dw_map_kernel`
    dy_desc,
    x_desc,
    dw_desc,
    partial_desc,
    rows,
    groups,
    slots,
    N8,
    K8,
    GROUP_M,
    PROGRAMS_PER_SM,  # 1
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    TMA_DY: gl.constexpr,  # True, like those below
    TMA_X: gl.constexpr,
    TMA_DW: gl.constexpr,
    CONSUMERS: gl.constexpr,
    PINGPONG: gl.constexpr,  # False
    STAGES: gl.constexpr,
):
    """Compute all tiles of all chunks; each program starts with tile number program_id(0).

    A stage is full when its operands have arrived, and empty again when every group has multiplied it.
    """
    gl.static_assert(TMA_DY == 1 and TMA_X == 1 and TMA_DW == 1)
    gl.static_assert(CONSUMERS == 2 and PINGPONG == 0)
    N = N8 * 8
    K = K8 * 8
    ROWS: gl.constexpr = BLOCK_M // CONSUMERS
    HELD: gl.constexpr = STORED // ROWS  # columns
    gl.static_assert(dw_desc.block_shape[2] == HELD)
    # The loading warp is at most STAGES steps ahead, and a tile has at least one step. So when it writes an entry of
    # the queue again, both groups have stored the tile that was there.
    QUEUE: gl.constexpr = STAGES + 2
    dtype: gl.constexpr = dw_ptr.dtype.element_ty
    of_tile: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    dy_tiles = gl.allocate_shared_memory(dtype, [STAGES * CONSUMERS, BLOCK_K, ROWS], of_tile)
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, BLOCK_N], of_tile)
    dw_tiles = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, HELD], of_tile)
    full, empty = stage_barriers(STAGES, CONSUMERS)
    queue = gl.allocate_shared_memory(gl.int32, [QUEUE, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    queued = gl.allocate_shared_memory(gl.int64, [QUEUE, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(QUEUE):
        mbarrier.init(queued.index(place), count=1)

    descs = dy_desc, x_desc, dw_desc, partial_desc
    shared = dy_tiles, x_tiles, dw_tiles, full, empty, queue, queued
    sizes = rows, groups, gl.cdiv(N, BLOCK_M), gl.cdiv(K, BLOCK_N), GROUP_M
    of_all = descs, shared, map_ptr, sizes
    # Constexprs must be passed to each function one by one: Triton 3.6 turns those in a named tuple into tensors. The
    # numbers of registers are per thread and use all 65536 for three times 128 threads.
    gl.warp_specialize(
        [
            (_multiply, (of_all, ROWS, BLOCK_N, BLOCK_K, STAGES, QUEUE, 0)),
            (_multiply, (of_all, ROWS, BLOCK_N, BLOCK_K, STAGES, QUEUE, 1)),
            (_load, (of_all, ROWS, BLOCK_N, BLOCK_K, STAGES, QUEUE)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _load(
    of_all,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    QUEUE: gl.constexpr,
):
    """Run the loading warp: take tiles until there are none, queue them, and load their steps into empty stages.

    `of_all` is (TMA descriptors, shared memory and barriers, tile map, sizes), the same for all warps. ROWS is the
    number of a tile's rows per multiplying group.
    """
    descs, shared, map_ptr, sizes = of_all
    dy_desc, x_desc, _dw_desc, _partial_desc = descs
    dy_tiles, x_tiles, _dw_tiles, full, empty, queue, queued = shared
    rows, groups, m_tiles, n_tiles, GROUP_M = sizes
    chunk_tiles = m_tiles * n_tiles
    tiles = load_chunk_count(map_ptr) * chunk_tiles
    step = 0
    turn = 0
    tile = gl.program_id(0)
    while tile < tiles:
        _put(queue, queued, turn, QUEUE, tile)
        turn += 1
        taken = gl.atomic_add(map_ptr + COUNTER, 1, sem="relaxed")
        # One is added for each tile, so this is the last addition of the launch: zero for the next one.
        if taken == tiles - 1:
            gl.store(map_ptr + COUNTER, 0)
        _group, row, row_end, _slot = load_chunk(map_ptr, tile // chunk_tiles, rows, groups)
        m_tile, n_tile = tile_position(tile % chunk_tiles, m_tiles, n_tiles, GROUP_M)
        m = m_tile * (2 * ROWS)
        n = n_tile * BLOCK_N
        for r in range(row, gl.maximum(row_end, row + 1), BLOCK_K):
            stage = step % STAGES
            is_full = full.index(stage)
            mbarrier.wait(empty.index(stage), (step // STAGES + 1) & 1)
            mbarrier.expect(is_full, (2 * ROWS + BLOCK_N) * BLOCK_K * 2)
            for part in gl.static_range(2):
                load_ragged(dy_desc, r, row_end, m + part * ROWS, is_full, dy_tiles.index(stage * 2 + part))
            load_ragged(x_desc, r, row_end, n, is_full, x_tiles.index(stage))
            step += 1
        tile = gl.num_programs(0) + taken
    _put(queue, queued, turn, QUEUE, tiles)


@gluon.jit
def _multiply(
    of_all,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    QUEUE: gl.constexpr,
    CONSUMER: gl.constexpr,
):
    """Run one group of multiplying warps: its rows of all of the program's tiles. CONSUMER is its index."""
    descs, shared, map_ptr, sizes = of_all
    _dy_desc, _x_desc, dw_desc, partial_desc = descs
    dy_tiles, x_tiles, dw_tiles, full, empty, queue, queued = shared
    rows, groups, m_tiles, n_tiles, GROUP_M = sizes
    of_sum: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    held = dw_tiles.index(CONSUMER)
    chunk_tiles = m_tiles * n_tiles
    tiles = load_chunk_count(map_ptr) * chunk_tiles
    step = 0
    turn = 0
    tile = _get(queue, queued, turn, QUEUE)
    while tile < tiles:
        group, row, row_end, slot = load_chunk(map_ptr, tile // chunk_tiles, rows, groups)
        m_tile, n_tile = tile_position(tile % chunk_tiles, m_tiles, n_tiles, GROUP_M)
        m = m_tile * (2 * ROWS) + CONSUMER * ROWS
        n = n_tile * BLOCK_N
        steps = _steps_of(row, row_end, BLOCK_K)
        acc = gl.zeros((ROWS, BLOCK_N), gl.float32, of_sum)
        for k in range(steps):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            dy = dy_tiles.index(stage * 2 + CONSUMER).permute((1, 0))
            # The previous step is done once only this one's product is in flight.
            acc = warpgroup_mma(dy, x_tiles.index(stage), acc, use_acc=k > 0, is_async=True)
            acc = warpgroup_mma_wait(1, [acc])
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
            step += 1
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        if slot >= 0:
            _store_words(acc, partial_desc, held, slot * 2, m, n)
        else:
            _store(acc.to(held.dtype), dw_desc, held, group, m, n)
        turn += 1
        tile = _get(queue, queued, turn, QUEUE)
    tma.store_wait(0)


@gluon.jit
def _put(queue, queued, turn, QUEUE: gl.constexpr, tile):
    """Append a tile's number to the queue, as number `turn`."""
    of_warp: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    place = turn % QUEUE
    queue.index(place).store(gl.full([1], tile, gl.int32, of_warp))
    mbarrier.arrive(queued.index(place), count=1)


@gluon.jit
def _get(queue, queued, turn, QUEUE: gl.constexpr):
    """Wait for number `turn` of the queue, and return it."""
    of_group: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    place = turn % QUEUE
    mbarrier.wait(queued.index(place), (turn // QUEUE) & 1)
    return gl.max(queue.index(place).load(of_group), 0)
