"""The second warp-specialized kernel of dW for 16-bit dtypes, in Gluon: for tiles of 192 columns, or two stages.

It works as specialized_dw.py does, with two differences:

- With BLOCK_N = 192, a group holds its tile as 128 and 64 columns, because the compiler's tensors are powers of two.
- With two stages, which leave shared memory free, each group stores through three buffers in turn, so that it waits
  for the oldest of its stores instead of the last.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...warp_jobs import (
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
from .dw import UNSPECIALIZED
from .ragged_boxes import load_ragged, ragged_descriptor
from .specialized_dw import _matrix_descriptor, _steps_of, _steps_of_tile
from .tiles import load_chunk, load_chunk_count, tile_position

_HELD = gl.constexpr(64 * 128)  # elements of its tile that a group stores at a time


# The parameters are those of specialized_dw_kernel.
@gluon.jit(do_not_specialize=UNSPECIALIZED)
def buffered_dw_kernel(
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
    """Compute tiles p, p + programs, ... of all chunks in program p.

    A stage is full when its operands have arrived, and empty again when every group that needs it has multiplied it.
    """
    gl.static_assert(TMA_DY == 1 and TMA_X == 1 and TMA_DW == 1)
    N = N8 * 8
    K = K8 * 8
    SHARE: gl.constexpr = 1 if PINGPONG else CONSUMERS  # groups that share a tile
    ROWS: gl.constexpr = BLOCK_M // SHARE
    HELD: gl.constexpr = _HELD // ROWS  # columns
    BUFFERS: gl.constexpr = 3 if STAGES == 2 else 1
    REST: gl.constexpr = BLOCK_N % 128
    WIDTH: gl.constexpr = BLOCK_N - REST
    dtype: gl.constexpr = dw_ptr.dtype.element_ty
    of_tile: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    dy_desc = ragged_descriptor(dy_ptr, N, BLOCK_K, ROWS)
    x_desc = ragged_descriptor(x_ptr, K, BLOCK_K, WIDTH)
    rest_desc = x_desc
    dw_desc = _matrix_descriptor(dw_ptr, groups, N, K, ROWS, HELD)
    partial_desc = _matrix_descriptor(partial_ptr, slots * 2, N, K, ROWS, HELD)

    dy_tiles = gl.allocate_shared_memory(dtype, [STAGES * SHARE, BLOCK_K, ROWS], of_tile)
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, WIDTH], of_tile)
    rest_tiles = x_tiles
    dw_tiles = gl.allocate_shared_memory(dtype, [CONSUMERS * BUFFERS, ROWS, HELD], of_tile)
    if REST > 0:
        rest_desc = ragged_descriptor(x_ptr, K, BLOCK_K, REST)
        rest_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, REST], of_tile)
    full, empty = stage_barriers(STAGES, SHARE)
    turns = turn_barriers()

    descs = dy_desc, x_desc, rest_desc, dw_desc, partial_desc
    shared = dy_tiles, x_tiles, rest_tiles, dw_tiles, full, empty, turns
    sizes = rows, groups, gl.cdiv(N, BLOCK_M), gl.cdiv(K, BLOCK_N), GROUP_M
    of_all = descs, shared, map_ptr, sizes
    # specialized_dw.py explains how the arguments are passed, and the numbers of registers.
    gl.static_assert(CONSUMERS == 2)
    gl.warp_specialize(
        [
            (_multiply, (of_all, SHARE, ROWS, WIDTH, REST, BLOCK_K, STAGES, BUFFERS, 0)),
            (_multiply, (of_all, SHARE, ROWS, WIDTH, REST, BLOCK_K, STAGES, BUFFERS, 1)),
            (_load, (of_all, SHARE, ROWS, WIDTH, REST, BLOCK_K, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _load(
    of_all,
    SHARE: gl.constexpr,
    ROWS: gl.constexpr,
    WIDTH: gl.constexpr,
    REST: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Run the loading warp: load every step of all of the program's tiles into the next empty stage.

    `of_all` is (TMA descriptors, shared memory and barriers, tile map, sizes), the same for all warps. SHARE is the
    number of groups that share a tile, ROWS the number of a tile's rows per group, and WIDTH and REST are its columns.
    """
    descs, shared, map_ptr, sizes = of_all
    dy_desc, x_desc, rest_desc, _dw_desc, _partial_desc = descs
    dy_tiles, x_tiles, rest_tiles, _dw_tiles, full, empty, _turns = shared
    rows, groups, m_tiles, n_tiles, GROUP_M = sizes
    chunk_tiles = m_tiles * n_tiles
    step = 0
    for tile in range(gl.program_id(0), load_chunk_count(map_ptr) * chunk_tiles, gl.num_programs(0)):
        _group, row, row_end, _slot = load_chunk(map_ptr, tile // chunk_tiles, rows, groups)
        m_tile, n_tile = tile_position(tile % chunk_tiles, m_tiles, n_tiles, GROUP_M)
        m = m_tile * (ROWS * SHARE)
        n = n_tile * (WIDTH + REST)
        for r in range(row, gl.maximum(row_end, row + 1), BLOCK_K):
            stage = step % STAGES
            is_full = full.index(stage)
            mbarrier.wait(empty.index(stage), (step // STAGES + 1) & 1)
            mbarrier.expect(is_full, (SHARE * ROWS + WIDTH + REST) * BLOCK_K * 2)
            for part in gl.static_range(SHARE):
                load_ragged(dy_desc, r, row_end, m + part * ROWS, is_full, dy_tiles.index(stage * SHARE + part))
            load_ragged(x_desc, r, row_end, n, is_full, x_tiles.index(stage))
            if REST > 0:
                load_ragged(rest_desc, r, row_end, n + WIDTH, is_full, rest_tiles.index(stage))
            step += 1


@gluon.jit
def _multiply(
    of_all,
    SHARE: gl.constexpr,
    ROWS: gl.constexpr,
    WIDTH: gl.constexpr,
    REST: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    CONSUMER: gl.constexpr,
):
    """Run one group of multiplying warps: its rows of all of the program's tiles, or every second tile (PINGPONG).

    CONSUMER is the index of the group; `_load` explains the other parameters.
    """
    TURNS: gl.constexpr = SHARE == 1
    PART: gl.constexpr = 0 if TURNS else CONSUMER
    descs, shared, map_ptr, sizes = of_all
    _dy_desc, _x_desc, _rest_desc, dw_desc, partial_desc = descs
    dy_tiles, x_tiles, rest_tiles, dw_tiles, full, empty, turns = shared
    rows, groups, m_tiles, n_tiles, GROUP_M = sizes
    of_sum: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16])
    chunk_tiles = m_tiles * n_tiles
    tiles = load_chunk_count(map_ptr) * chunk_tiles
    programs = gl.num_programs(0)
    first = gl.program_id(0)
    step = 0
    turn = 0
    stored = 0  # boxes stored so far
    if TURNS:
        if CONSUMER == 1:
            step += _steps_of_tile(map_ptr, first, tiles, chunk_tiles, rows, groups, BLOCK_K)
            first += programs
        programs *= 2
    for tile in range(first, tiles, programs):
        group, row, row_end, slot = load_chunk(map_ptr, tile // chunk_tiles, rows, groups)
        m_tile, n_tile = tile_position(tile % chunk_tiles, m_tiles, n_tiles, GROUP_M)
        m = m_tile * (ROWS * SHARE) + PART * ROWS
        n = n_tile * (WIDTH + REST)
        steps = _steps_of(row, row_end, BLOCK_K)
        acc = gl.zeros((ROWS, WIDTH), gl.float32, of_sum)
        if REST > 0:
            of_rest: gl.constexpr = gl.NVMMADistributedLayout(
                version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, REST, 16]
            )
            rest = gl.zeros((ROWS, REST), gl.float32, of_rest)
        if TURNS:
            # Wait until the other group is through with the previous tile, as in specialized_dw.py.
            mbarrier.wait(turns.index(CONSUMER), (turn + 1 - CONSUMER) & 1)
            turn += 1
        for k in range(steps):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            dy = dy_tiles.index(stage * SHARE + PART).permute((1, 0))
            # The previous step is done once only this one's products are in flight.
            acc = warpgroup_mma(dy, x_tiles.index(stage), acc, use_acc=k > 0, is_async=True)
            if REST > 0:
                rest = warpgroup_mma(dy, rest_tiles.index(stage), rest, use_acc=k > 0, is_async=True)
                acc, rest = warpgroup_mma_wait(2, [acc, rest])
            else:
                acc = warpgroup_mma_wait(1, [acc])
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
            step += 1
        if TURNS:
            mbarrier.arrive(turns.index(1 - CONSUMER), count=1)
        if REST > 0:
            acc, rest = warpgroup_mma_wait(0, [acc, rest])
        else:
            acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        if TURNS:
            # Skip the steps of the other group's tile.
            step += _steps_of_tile(map_ptr, tile + programs // 2, tiles, chunk_tiles, rows, groups, BLOCK_K)
        if slot >= 0:
            stored = _store_words(acc, partial_desc, dw_tiles, stored, slot * 2, m, n, BUFFERS, CONSUMER)
            if REST > 0:
                stored = _store_words(rest, partial_desc, dw_tiles, stored, slot * 2, m, n + WIDTH, BUFFERS, CONSUMER)
        else:
            stored = _store(acc.to(dw_tiles.dtype), dw_desc, dw_tiles, stored, group, m, n, BUFFERS, CONSUMER)
            if REST > 0:
                more = rest.to(dw_tiles.dtype)
                stored = _store(more, dw_desc, dw_tiles, stored, group, m, n + WIDTH, BUFFERS, CONSUMER)
    tma.store_wait(0)


@gluon.jit
def _store_words(acc, desc, buffers, stored, matrix, m, n, BUFFERS: gl.constexpr, CONSUMER: gl.constexpr):
    """Store a tile of float32 sums as two matrices of 16-bit words, which `sum_partials_kernel` reads.

    Matrix number `matrix` receives the upper halves, and the next one the lower halves. Return `stored` as `_store`.
    """
    bits = acc.to(gl.uint32, bitcast=True)
    high = (bits >> 16).to(gl.uint16).to(buffers.dtype, bitcast=True)
    stored = _store(high, desc, buffers, stored, matrix, m, n, BUFFERS, CONSUMER)
    low = (bits & 0xFFFF).to(gl.uint16).to(buffers.dtype, bitcast=True)
    return _store(low, desc, buffers, stored, matrix + 1, m, n, BUFFERS, CONSUMER)


@gluon.jit
def _store(tile, desc, buffers, stored, matrix, m, n, BUFFERS: gl.constexpr, CONSUMER: gl.constexpr):
    """Store one warp group's part of a tile at (m, n) of matrix number `matrix`, by TMA.

    It passes through the group's BUFFERS buffers in turn, whose number of columns is stored at a time. `stored` is the
    number of boxes stored before; return it with those of this call.
    """
    if buffers.shape[2] < tile.shape[1]:
        left, right = halves(tile)
        stored = _store(left, desc, buffers, stored, matrix, m, n, BUFFERS, CONSUMER)
        stored = _store(right, desc, buffers, stored, matrix, m, n + tile.shape[1] // 2, BUFFERS, CONSUMER)
    else:
        tma.store_wait(BUFFERS - 1)  # until the previous content of the buffer is stored
        held = buffers.index(CONSUMER * BUFFERS + stored % BUFFERS)
        held.store(tile)
        fence_async_shared()
        store_tile(desc, [matrix, m, n], held.reshape([1, tile.shape[0], tile.shape[1]]))
        stored += 1
    return stored
