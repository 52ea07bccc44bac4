"""The warp-specialized kernel of dW whose programs take the next tile from a counter, in Gluon.

`specialized_dw.py` gives each program the same number of tiles, so one group with many rows must be cut into short
chunks, whose partial sums are written and read again. Here a program that is done early takes more tiles, the longest
first, so a chunk may be as long as the average work of an SM. The loading warp takes a tile's number from the counter
and passes it to the multiplying groups in shared memory. Each tile is computed as in specialized_dw.py, with the same
bits.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...warp_jobs import mbarrier, stage_barriers, tma, turn_barriers, warpgroup_mma, warpgroup_mma_wait
from .dw import UNSPECIALIZED
from .ragged_boxes import load_ragged, ragged_descriptor
from .specialized_dw import _HELD, _matrix_descriptor, _steps_of, _steps_of_tile, _store, _store_words
from .tiles import load_chunk, load_chunk_count, tile_position

_QUEUE = gl.constexpr(4)  # tiles that the loading warp may be ahead


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def scheduled_dw_kernel(
    dy_ptr,
    x_ptr,
    dw_ptr,
    partial_ptr,
    map_ptr,
    counter_ptr,  # (1,) int32, zero: the number of tiles that were taken beyond the first of each program
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
    PINGPONG: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Compute all tiles of all chunks; each program starts with tile number program_id(0)."""
    gl.static_assert(TMA_DY == 1 and TMA_X == 1 and TMA_DW == 1)
    N = N8 * 8
    K = K8 * 8
    SHARE: gl.constexpr = 1 if PINGPONG else CONSUMERS  # groups that share a tile
    ROWS: gl.constexpr = BLOCK_M // SHARE
    HELD: gl.constexpr = _HELD // ROWS  # columns
    dtype: gl.constexpr = dw_ptr.dtype.element_ty
    of_tile: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    dy_desc = ragged_descriptor(dy_ptr, N, BLOCK_K, ROWS)
    x_desc = ragged_descriptor(x_ptr, K, BLOCK_K, BLOCK_N)
    dw_desc = _matrix_descriptor(dw_ptr, groups, N, K, ROWS, HELD)
    partial_desc = _matrix_descriptor(partial_ptr, slots * 2, N, K, ROWS, HELD)

    dy_tiles = gl.allocate_shared_memory(dtype, [STAGES * SHARE, BLOCK_K, ROWS], of_tile)
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, BLOCK_N], of_tile)
    dw_tiles = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, HELD], of_tile)
    full, empty = stage_barriers(STAGES, SHARE)
    turns = turn_barriers()
    numbers = gl.allocate_shared_memory(gl.int32, [_QUEUE, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    queued, taken = stage_barriers(_QUEUE, CONSUMERS)

    descs = dy_desc, x_desc, dw_desc, partial_desc
    shared = dy_tiles, x_tiles, dw_tiles, full, empty, turns, numbers, queued, taken
    sizes = rows, groups, gl.cdiv(N, BLOCK_M), gl.cdiv(K, BLOCK_N), GROUP_M
    of_all = descs, shared, map_ptr, counter_ptr, sizes
    gl.static_assert(CONSUMERS == 2)
    gl.warp_specialize(
        [
            (_multiply, (of_all, SHARE, ROWS, BLOCK_N, BLOCK_K, STAGES, 0)),
            (_multiply, (of_all, SHARE, ROWS, BLOCK_N, BLOCK_K, STAGES, 1)),
            (_load, (of_all, SHARE, ROWS, BLOCK_N, BLOCK_K, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _load(
    of_all,
    SHARE: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Run the loading warp: take tiles until there are none, and load their steps; see `specialized_dw._load`."""
    descs, shared, map_ptr, counter_ptr, sizes = of_all
    dy_desc, x_desc, _dw_desc, _partial_desc = descs
    dy_tiles, x_tiles, _dw_tiles, full, empty, _turns, numbers, queued, taken = shared
    rows, groups, m_tiles, n_tiles, GROUP_M = sizes
    chunk_tiles = m_tiles * n_tiles
    tiles = load_chunk_count(map_ptr) * chunk_tiles
    step = 0
    turn = 0
    tile = gl.program_id(0)
    while tile < tiles:
        _put(numbers, queued, taken, turn, tile)
        turn += 1
        later = gl.num_programs(0) + gl.atomic_add(counter_ptr, 1, sem="relaxed")
        _group, row, row_end, _slot = load_chunk(map_ptr, tile // chunk_tiles, rows, groups)
        m_tile, n_tile = tile_position(tile % chunk_tiles, m_tiles, n_tiles, GROUP_M)
        m = m_tile * (ROWS * SHARE)
        n = n_tile * BLOCK_N
        for r in range(row, gl.maximum(row_end, row + 1), BLOCK_K):
            stage = step % STAGES
            is_full = full.index(stage)
            mbarrier.wait(empty.index(stage), (step // STAGES + 1) & 1)
            mbarrier.expect(is_full, (SHARE * ROWS + BLOCK_N) * BLOCK_K * 2)
            for part in gl.static_range(SHARE):
                load_ragged(dy_desc, r, row_end, m + part * ROWS, is_full, dy_tiles.index(stage * SHARE + part))
            load_ragged(x_desc, r, row_end, n, is_full, x_tiles.index(stage))
            step += 1
        tile = later
    _put(numbers, queued, taken, turn, tile)


@gluon.jit
def _multiply(
    of_all,
    SHARE: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER: gl.constexpr,
):
    """Run one group of multiplying warps: its rows of all of the program's tiles, or every second tile (PINGPONG)."""
    TURNS: gl.constexpr = SHARE == 1
    PART: gl.constexpr = 0 if TURNS else CONSUMER
    descs, shared, map_ptr, _counter_ptr, sizes = of_all
    _dy_desc, _x_desc, dw_desc, partial_desc = descs
    dy_tiles, x_tiles, dw_tiles, full, empty, turns, numbers, queued, taken = shared
    rows, groups, m_tiles, n_tiles, GROUP_M = sizes
    of_sum: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    held = dw_tiles.index(CONSUMER)
    chunk_tiles = m_tiles * n_tiles
    tiles = load_chunk_count(map_ptr) * chunk_tiles
    step = 0
    turn = 0
    place = 0  # in the queue
    tile = _take(numbers, queued, taken, place)
    if TURNS and CONSUMER == 1:  # noqa: SIM102 - constexprs decide what is compiled
        if tile < tiles:  # the other group's
            step += _steps_of_tile(map_ptr, tile, tiles, chunk_tiles, rows, groups, BLOCK_K)
            place += 1
            tile = _take(numbers, queued, taken, place)
    while tile < tiles:
        group, row, row_end, slot = load_chunk(map_ptr, tile // chunk_tiles, rows, groups)
        m_tile, n_tile = tile_position(tile % chunk_tiles, m_tiles, n_tiles, GROUP_M)
        m = m_tile * (ROWS * SHARE) + PART * ROWS
        n = n_tile * BLOCK_N
        steps = _steps_of(row, row_end, BLOCK_K)
        acc = gl.zeros((ROWS, BLOCK_N), gl.float32, of_sum)
        if TURNS:
            mbarrier.wait(turns.index(CONSUMER), (turn + 1 - CONSUMER) & 1)
            turn += 1
        for k in range(steps):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            dy = dy_tiles.index(stage * SHARE + PART).permute((1, 0))
            # The previous step is done once only this one's product is in flight.
            acc = warpgroup_mma(dy, x_tiles.index(stage), acc, use_acc=k > 0, is_async=True)
            acc = warpgroup_mma_wait(1, [acc])
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
            step += 1
        if TURNS:
            mbarrier.arrive(turns.index(1 - CONSUMER), count=1)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        if slot >= 0:
            _store_words(acc, partial_desc, held, slot * 2, m, n)
        else:
            _store(acc.to(held.dtype), dw_desc, held, group, m, n)
        place += 1
        tile = _take(numbers, queued, taken, place)
        if TURNS:  # noqa: SIM102
            if tile < tiles:  # the other group's
                step += _steps_of_tile(map_ptr, tile, tiles, chunk_tiles, rows, groups, BLOCK_K)
                place += 1
                tile = _take(numbers, queued, taken, place)
    tma.store_wait(0)


@gluon.jit
def _put(numbers, queued, taken, turn, tile):
    """Pass a tile's number to the multiplying groups, as number `turn` of the queue."""
    of_warp: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    place = turn % _QUEUE
    mbarrier.wait(taken.index(place), (turn // _QUEUE + 1) & 1)
    numbers.index(place).store(gl.full([1], tile, gl.int32, of_warp))
    mbarrier.arrive(queued.index(place), count=1)


@gluon.jit
def _take(numbers, queued, taken, turn):
    """Return number `turn` of the queue."""
    of_group: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    place = turn % _QUEUE
    mbarrier.wait(queued.index(place), (turn // _QUEUE) & 1)
    tile = gl.max(numbers.index(place).load(of_group), 0)
    mbarrier.arrive(taken.index(place), count=1)
    return tile
