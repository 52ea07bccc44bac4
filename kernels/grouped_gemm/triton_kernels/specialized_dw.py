"""The warp-specialized kernel of dW for 16-bit dtypes and configs with PINGPONG, in Gluon.

One warp loads, and two groups of four warps take whole tiles in turns, so that one stores while the other multiplies.
Configs with CONSUMERS and without PINGPONG run scheduled_dw.py.

Gluon is part of Triton since 3.6.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...warp_jobs import (
    halves,
    mbarrier,
    stage_barriers,
    store_box,
    tma,
    turn_barriers,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .dw import UNSPECIALIZED
from .ragged_boxes import STORED, load_ragged
from .tiles import load_chunk, load_chunk_count, tile_position


# The parameters are those of the plain kernel; comments give the values that CONSUMERS > 0 fixes.
@gluon.jit(do_not_specialize=UNSPECIALIZED)
def specialized_dw_kernel(
    dy_ptr,
    x_ptr,
    dw_ptr,
    partial_ptr,
    map_ptr,
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
    CONSUMERS: gl.constexpr,  # 2
    PINGPONG: gl.constexpr,  # True
    STAGES: gl.constexpr,
):
    """Compute the tiles of dW with numbers p, p + programs, ... of all chunks of rows in program p.

    A stage is full when its operands have arrived, and empty again when the group that needs it has multiplied it.
    """
    gl.static_assert(TMA_DY == 1 and TMA_X == 1 and TMA_DW == 1)
    gl.static_assert(CONSUMERS == 2 and PINGPONG == 1)
    N = N8 * 8
    K = K8 * 8
    HELD: gl.constexpr = STORED // BLOCK_M  # columns
    gl.static_assert(dw_desc.block_shape[2] == HELD)
    dtype: gl.constexpr = dw_ptr.dtype.element_ty
    of_tile: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    dy_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, BLOCK_M], of_tile)
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, BLOCK_N], of_tile)
    dw_tiles = gl.allocate_shared_memory(dtype, [CONSUMERS, BLOCK_M, HELD], of_tile)
    full, empty = stage_barriers(STAGES, 1)
    turns = turn_barriers()

    descs = dy_desc, x_desc, dw_desc, partial_desc
    shared = dy_tiles, x_tiles, dw_tiles, full, empty, turns
    sizes = rows, groups, gl.cdiv(N, BLOCK_M), gl.cdiv(K, BLOCK_N), GROUP_M
    of_all = descs, shared, map_ptr, sizes
    # Constexprs must be passed to each function one by one: Triton 3.6 turns those in a named tuple into tensors. The
    # numbers of registers are per thread and use all 65536 for three times 128 threads.
    gl.warp_specialize(
        [
            (_multiply, (of_all, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, 0)),
            (_multiply, (of_all, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, 1)),
            (_load, (of_all, BLOCK_M, BLOCK_N, BLOCK_K, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _load(
    of_all,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Run the loading warp: load every step of all of the program's tiles into the next empty stage.

    `of_all` is (TMA descriptors, shared memory and barriers, tile map, sizes), the same for all warps.
    """
    descs, shared, map_ptr, sizes = of_all
    dy_desc, x_desc, _dw_desc, _partial_desc = descs
    dy_tiles, x_tiles, _dw_tiles, full, empty, _turns = shared
    rows, groups, m_tiles, n_tiles, GROUP_M = sizes
    chunk_tiles = m_tiles * n_tiles
    step = 0
    for tile in range(gl.program_id(0), load_chunk_count(map_ptr) * chunk_tiles, gl.num_programs(0)):
        _group, row, row_end, _slot = load_chunk(map_ptr, tile // chunk_tiles, rows, groups)
        m_tile, n_tile = tile_position(tile % chunk_tiles, m_tiles, n_tiles, GROUP_M)
        m = m_tile * BLOCK_M
        n = n_tile * BLOCK_N
        for r in range(row, gl.maximum(row_end, row + 1), BLOCK_K):
            stage = step % STAGES
            is_full = full.index(stage)
            mbarrier.wait(empty.index(stage), (step // STAGES + 1) & 1)
            mbarrier.expect(is_full, (BLOCK_M + BLOCK_N) * BLOCK_K * 2)
            load_ragged(dy_desc, r, row_end, m, is_full, dy_tiles.index(stage))
            load_ragged(x_desc, r, row_end, n, is_full, x_tiles.index(stage))
            step += 1


@gluon.jit
def _multiply(
    of_all,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER: gl.constexpr,
):
    """Run one group of multiplying warps, number CONSUMER: every second one of the program's tiles."""
    descs, shared, map_ptr, sizes = of_all
    _dy_desc, _x_desc, dw_desc, partial_desc = descs
    dy_tiles, x_tiles, dw_tiles, full, empty, turns = shared
    rows, groups, m_tiles, n_tiles, GROUP_M = sizes
    of_sum: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    held = dw_tiles.index(CONSUMER)
    chunk_tiles = m_tiles * n_tiles
    tiles = load_chunk_count(map_ptr) * chunk_tiles
    programs = gl.num_programs(0)
    first = gl.program_id(0)
    step = 0
    turn = 0
    if CONSUMER == 1:
        step += _steps_of_tile(map_ptr, first, tiles, chunk_tiles, rows, groups, BLOCK_K)
        first += programs
    programs *= 2
    # (The position of a tile is not loaded one tile ahead, which would hide the latency: Triton 3.6 uses the first
    # tile's position for all tiles in a loop that carries it.)
    for tile in range(first, tiles, programs):
        group, row, row_end, slot = load_chunk(map_ptr, tile // chunk_tiles, rows, groups)
        m_tile, n_tile = tile_position(tile % chunk_tiles, m_tiles, n_tiles, GROUP_M)
        m = m_tile * BLOCK_M
        n = n_tile * BLOCK_N
        steps = _steps_of(row, row_end, BLOCK_K)
        acc = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, of_sum)
        # Wait until the other group is through with the previous tile; otherwise a stage could look full that holds the
        # previous round's operands. (The first turn of the first group waits for the phase before the first, which is
        # over.)
        mbarrier.wait(turns.index(CONSUMER), (turn + 1 - CONSUMER) & 1)
        turn += 1  # noqa: SIM113 - kernels have no enumerate
        for k in range(steps):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            dy = dy_tiles.index(stage).permute((1, 0))
            # The previous step is done once only this one's product is in flight.
            acc = warpgroup_mma(dy, x_tiles.index(stage), acc, use_acc=k > 0, is_async=True)
            acc = warpgroup_mma_wait(1, [acc])
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
            step += 1
        mbarrier.arrive(turns.index(1 - CONSUMER), count=1)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        # Skip the steps of the other group's tile.
        step += _steps_of_tile(map_ptr, tile + programs // 2, tiles, chunk_tiles, rows, groups, BLOCK_K)
        if slot >= 0:
            _store_words(acc, partial_desc, held, slot * 2, m, n)
        else:
            _store(acc.to(held.dtype), dw_desc, held, group, m, n)
    tma.store_wait(0)


@gluon.jit
def _steps_of(row, row_end, BLOCK_K: gl.constexpr):
    """Return the number of BLOCK_K steps of a chunk, at least 1: zeros must be written for an empty one too."""
    return gl.maximum(gl.cdiv(row_end - row, BLOCK_K), 1)


@gluon.jit
def _steps_of_tile(map_ptr, tile, tiles, chunk_tiles, rows, groups, BLOCK_K: gl.constexpr):
    """Return the number of BLOCK_K steps of the chunk to which a tile belongs.

    A `tile` past the last one counts as the last one.
    """
    _group, row, row_end, _slot = load_chunk(map_ptr, gl.minimum(tile, tiles - 1) // chunk_tiles, rows, groups)
    return _steps_of(row, row_end, BLOCK_K)


@gluon.jit
def _store_words(acc, desc, held, matrix, m, n):
    """Store a tile of float32 sums as two matrices of 16-bit words, which `sum_partials_kernel` reads.

    Matrix number `matrix` receives the upper halves, and the next one the lower halves.
    """
    bits = acc.to(gl.uint32, bitcast=True)
    _store((bits >> 16).to(gl.uint16).to(held.dtype, bitcast=True), desc, held, matrix, m, n)
    _store((bits & 0xFFFF).to(gl.uint16).to(held.dtype, bitcast=True), desc, held, matrix + 1, m, n)


@gluon.jit
def _store(tile, desc, held, matrix, m, n):
    """Store one warp group's part of a tile at (m, n) of matrix number `matrix`, by TMA.

    It passes through `held`, shared memory whose number of columns is stored at a time.
    """
    if held.shape[1] < tile.shape[1]:
        left, right = halves(tile)
        _store(left, desc, held, matrix, m, n)
        _store(right, desc, held, matrix, m, n + tile.shape[1] // 2)
    else:
        store_box(tile, desc, held, matrix, m, n)
