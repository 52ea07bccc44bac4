"""The warp-specialized kernel of dW for 16-bit dtypes, in Gluon: configs with CONSUMERS run it.

One warp loads, and two groups of four warps multiply: they share each tile, by rows, and store it while the products of
the next one run.

Programs take tiles from a counter, those of the longest groups first. One that is done early takes more, so a chunk of
rows may be as long as the average work of an SM (`space.chunks_of`). With a fixed number of tiles per program, a group
with many rows would have to be cut into short chunks, whose partial sums are written and read again.

Gluon is part of Triton since 3.6.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...warp_jobs import (
    buffers_of,
    get_job,
    job_barriers,
    job_queue,
    mbarrier,
    packed,
    put_job,
    stage_barriers,
    store_box,
    store_pieces,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .dw import UNSPECIALIZED
from .dw_map import COUNTER
from .ragged_boxes import STORED, load_ragged
from .tiles import load_chunk, load_chunk_count, tile_position


# The parameters are those of the plain kernel; comments give the values that CONSUMERS > 0 fixes.
@gluon.jit(do_not_specialize=UNSPECIALIZED)
def specialized_dw_kernel(
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
    CONSUMERS: gl.constexpr,  # 2
    PINGPONG: gl.constexpr,  # False
    STAGES: gl.constexpr,
):
    """Compute all tiles of all chunks; each program starts with tile number program_id(0).

    A stage is full when its operands have arrived, and empty again when both groups have multiplied it.
    """
    gl.static_assert(TMA_DY == 1 and TMA_X == 1 and TMA_DW == 1)
    gl.static_assert(CONSUMERS == 2 and PINGPONG == 0)
    gl.static_assert(dw_desc.block_shape[1] == STORED and dw_desc.block_shape[2] == STORED)
    N = N8 * 8
    K = K8 * 8
    ROWS: gl.constexpr = BLOCK_M // CONSUMERS
    dtype: gl.constexpr = dw_ptr.dtype.element_ty
    of_tile: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    dy_tiles = gl.allocate_shared_memory(dtype, [STAGES * CONSUMERS, BLOCK_K, ROWS], of_tile)
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, BLOCK_N], of_tile)
    dw_tiles = gl.allocate_shared_memory(dtype, [2 * CONSUMERS, STORED, STORED], of_tile)
    full, empty = stage_barriers(STAGES, CONSUMERS)
    # Barriers of their own let groups read a tile's job before its operands arrive.
    queue = job_queue(5, STAGES), job_barriers(STAGES)

    descs = dy_desc, x_desc, dw_desc, partial_desc
    shared = dy_tiles, x_tiles, dw_tiles, full, empty, queue
    sizes = rows, groups, gl.cdiv(N, BLOCK_M), gl.cdiv(K, BLOCK_N), GROUP_M
    of_all = descs, shared
    # Constexprs must be passed to each function one by one: Triton 3.6 turns those in a named tuple into tensors. The
    # numbers of registers are per thread; the first group has what the others leave, 232.
    gl.warp_specialize(
        [
            (_multiply, (of_all, ROWS, BLOCK_N, BLOCK_K, STAGES, 0)),
            (_multiply, (of_all, ROWS, BLOCK_N, BLOCK_K, STAGES, 1)),
            (_load, (of_all, map_ptr, sizes, ROWS, BLOCK_N, BLOCK_K, STAGES)),
        ],
        [4, 1],
        [240, 32],
    )


@gluon.jit
def _load(
    of_all,
    map_ptr,
    sizes,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Run the loading warp: take tiles until there are none, queue them, and load their steps into empty stages.

    `of_all` is (TMA descriptors, shared memory and barriers), the same for all warps. ROWS is the number of a tile's
    rows per multiplying group. A job is (number of steps, group, slot, first row, first column); one without steps is
    the last.
    """
    descs, shared = of_all
    dy_desc, x_desc, _dw_desc, _partial_desc = descs
    dy_tiles, x_tiles, _dw_tiles, full, empty, queue = shared
    jobs, queued = queue
    rows, groups, m_tiles, n_tiles, GROUP_M = sizes
    chunk_tiles = m_tiles * n_tiles
    tiles = load_chunk_count(map_ptr) * chunk_tiles
    step = 0
    turn = 0
    tile = gl.program_id(0)
    while tile < tiles:
        taken = gl.atomic_add(map_ptr + COUNTER, 1, sem="relaxed")
        # One is added for each tile, so this is the last addition of the launch: zero for the next one.
        if taken == tiles - 1:
            gl.store(map_ptr + COUNTER, 0)
        group, row, row_end, slot = load_chunk(map_ptr, tile // chunk_tiles, rows, groups)
        m_tile, n_tile = tile_position(tile % chunk_tiles, m_tiles, n_tiles, GROUP_M)
        m = m_tile * (2 * ROWS)
        n = n_tile * BLOCK_N
        # At least one step, because zeros must be written for an empty group too.
        steps = gl.maximum(gl.cdiv(row_end - row, BLOCK_K), 1)
        put_job(jobs, turn, (steps, group, slot, m, n))
        mbarrier.arrive(queued.index(turn % queued.shape[0]), count=1)
        turn += 1
        for r in range(row, row + steps * BLOCK_K, BLOCK_K):
            stage = step % STAGES
            is_full = full.index(stage)
            mbarrier.wait(empty.index(stage), (step // STAGES + 1) & 1)
            mbarrier.expect(is_full, (2 * ROWS + BLOCK_N) * BLOCK_K * 2)
            for part in gl.static_range(2):
                load_ragged(dy_desc, r, row_end, m + part * ROWS, is_full, dy_tiles.index(stage * 2 + part))
            load_ragged(x_desc, r, row_end, n, is_full, x_tiles.index(stage))
            step += 1
        tile = gl.num_programs(0) + taken
    put_job(jobs, turn, (0, 0, 0, 0, 0))
    mbarrier.arrive(queued.index(turn % queued.shape[0]), count=1)


@gluon.jit
def _multiply(
    of_all,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER: gl.constexpr,
):
    """Run one group of multiplying warps: its rows of all of the program's tiles. CONSUMER is its index."""
    PIECES: gl.constexpr = ROWS * BLOCK_N // (STORED * STORED)
    descs, shared = of_all
    _dy_desc, _x_desc, dw_desc, partial_desc = descs
    dy_tiles, x_tiles, dw_tiles, full, empty, queue = shared
    of_sum: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    held = buffers_of(dw_tiles, CONSUMER, 2)
    step = 0
    turn = 0
    acc = gl.zeros((ROWS, BLOCK_N), gl.float32, of_sum)  # once, not for each tile: the first step overwrites it
    # The previous tile. Each step of this one stores one of its pieces.
    stored = packed(acc, held[0].dtype)
    pieces = 0
    stored_group = 0
    stored_row = 0
    stored_col = 0
    steps, group, slot, m, n = _next_job(queue, turn, STAGES)
    while steps > 0:
        for k in range(steps):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            dy = dy_tiles.index(stage * 2 + CONSUMER).permute((1, 0))
            # The previous step is done once only this one's product is in flight.
            acc = warpgroup_mma(dy, x_tiles.index(stage), acc, use_acc=k > 0, is_async=True)
            store_pieces(stored, dw_desc, held, stored_group, stored_row, stored_col, k, gl.minimum(k + 1, pieces))
            acc = warpgroup_mma_wait(1, [acc])
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
            step += 1
        store_pieces(stored, dw_desc, held, stored_group, stored_row, stored_col, steps, pieces)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        stored = packed(acc, held[0].dtype)
        stored_group = group
        stored_row = m + CONSUMER * ROWS
        stored_col = n
        pieces = PIECES
        if slot >= 0:
            store_words(acc, partial_desc, held, slot * 2, stored_row, n)
            pieces = 0
        turn += 1
        steps, group, slot, m, n = _next_job(queue, turn, STAGES)
    store_pieces(stored, dw_desc, held, stored_group, stored_row, stored_col, 0, pieces)
    tma.store_wait(0)


@gluon.jit
def _next_job(queue, turn, STAGES: gl.constexpr):
    """Wait for the job of tile number `turn`, and return it."""
    jobs, queued = queue
    mbarrier.wait(queued.index(turn % queued.shape[0]), (turn // queued.shape[0]) & 1)
    return get_job(jobs, turn, STAGES)


@gluon.jit
def store_words(acc, desc, held, matrix, m, n):
    """Store a tile of float32 sums as two matrices of 16-bit words, which `sum_partials_kernel` reads.

    Matrix number `matrix` receives the upper halves, and the next one the lower halves.
    """
    bits = acc.to(gl.uint32, bitcast=True)
    store_box((bits >> 16).to(gl.uint16).to(held[0].dtype, bitcast=True), desc, held, matrix, m, n)
    store_box((bits & 0xFFFF).to(gl.uint16).to(held[0].dtype, bitcast=True), desc, held, matrix + 1, m, n)
