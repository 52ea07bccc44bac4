"""The warp-specialized kernel of forward and dX for 16-bit dtypes, in Gluon.

One warp loads, and CONSUMERS groups of four warps multiply. The groups share each tile, by rows, and store it while the
products of the next one run; with PINGPONG they take whole tiles in turns, so that one stores while the other
multiplies.

Gluon is part of Triton since 3.6.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...warp_jobs import (
    buffers_of,
    get_job,
    job_queue,
    mbarrier,
    packed,
    put_job,
    stage_barriers,
    store_pieces,
    tma,
    turn_barriers,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ...warp_jobs import load_tile as load_box
from .gemm import UNSPECIALIZED
from .ragged import FAR
from .ragged_boxes import STORED, store_ragged
from .tiles import load_tile_count, load_tile_in_band


# The parameters are those of the plain kernel; comments give the values that CONSUMERS > 0 fixes.
@gluon.jit(do_not_specialize=UNSPECIALIZED)
def specialized_gemm_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    map_ptr,
    indices_ptr,  # None
    scale_ptr,
    bias_ptr,
    x_desc,
    w_desc,
    y_desc,
    x_rows,
    rows,
    groups,
    N8,
    K8,
    divisor,
    GROUP_M,
    PROGRAMS_PER_SM,  # 1
    TRANSPOSED: gl.constexpr,
    GATHER: gl.constexpr,  # False
    SCATTER: gl.constexpr,  # False
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    TMA_X: gl.constexpr,  # True, like those below
    TMA_W: gl.constexpr,
    TMA_Y: gl.constexpr,
    CONSUMERS: gl.constexpr,
    PINGPONG: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Compute tiles of y: those with numbers p, p + programs, ... of the tile map in program p.

    A stage is full when its operands have arrived, and empty again when every group that needs it has multiplied it.
    """
    gl.static_assert(TMA_X == 1 and TMA_W == 1 and TMA_Y == 1 and not GATHER and not SCATTER)
    N = N8 * 8
    K = K8 * 8
    SHARE: gl.constexpr = 1 if PINGPONG else CONSUMERS  # groups that share a tile
    ROWS: gl.constexpr = BLOCK_M // SHARE
    gl.static_assert(y_desc.block_shape[2] == STORED and y_desc.block_shape[3] == STORED)
    dtype: gl.constexpr = y_ptr.dtype.element_ty
    of_tile: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    if TRANSPOSED:
        w_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, BLOCK_N], of_tile)
    else:
        w_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_K], of_tile)
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES * SHARE, ROWS, BLOCK_K], of_tile)
    y_tiles = gl.allocate_shared_memory(dtype, [2 * CONSUMERS, STORED, STORED], of_tile)
    full, empty = stage_barriers(STAGES, SHARE)
    turns = full
    if PINGPONG:
        turns = turn_barriers()
    jobs = job_queue(4, STAGES)

    descs = x_desc, w_desc, y_desc
    shared = x_tiles, w_tiles, y_tiles, full, empty, turns, jobs
    sizes = rows, groups, GROUP_M
    of_all = descs, shared, N, K
    # Constexprs must be passed to each function one by one: Triton 3.6 turns those in a named tuple into tensors. The
    # numbers of registers are per thread and use all 65536 for three times 128 threads.
    gl.static_assert(CONSUMERS == 2)
    gl.warp_specialize(
        [
            (_multiply, (of_all, map_ptr, scale_ptr, bias_ptr, TRANSPOSED, SHARE, ROWS, BLOCK_N, BLOCK_K, STAGES, 0)),
            (_multiply, (of_all, map_ptr, scale_ptr, bias_ptr, TRANSPOSED, SHARE, ROWS, BLOCK_N, BLOCK_K, STAGES, 1)),
            (_load, (of_all, map_ptr, sizes, TRANSPOSED, SHARE, ROWS, BLOCK_N, BLOCK_K, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _load(
    of_all,
    map_ptr,
    sizes,
    TRANSPOSED: gl.constexpr,
    SHARE: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Run the loading warp: load every step of the program's tiles into the next empty stage.

    `of_all` is (TMA descriptors, shared memory and barriers, N, K), the same for all warps. SHARE is the number of
    groups of warps that share a tile, and ROWS the number of a tile's rows per group. A job is (group, first row, end
    row of the group, first column).
    """
    BLOCK_M: gl.constexpr = ROWS * SHARE
    descs, shared, N, K = of_all
    x_desc, w_desc, _y_desc = descs
    x_tiles, w_tiles, _y_tiles, full, empty, _turns, jobs = shared
    rows, groups, GROUP_M = sizes
    m_tiles = load_tile_count(map_ptr, BLOCK_M)
    n_tiles = gl.cdiv(N, BLOCK_N)
    step = 0
    turn = 0
    for tile in range(gl.program_id(0), m_tiles * n_tiles, gl.num_programs(0)):
        group, row, row_end, n_tile = load_tile_in_band(map_ptr, tile, n_tiles, rows, groups, GROUP_M, BLOCK_M)
        col = n_tile * BLOCK_N
        put_job(jobs, turn, (group, row, row_end, col))
        turn += 1
        for k in range(0, K, BLOCK_K):
            stage = step % STAGES
            is_full = full.index(stage)
            mbarrier.wait(empty.index(stage), (step // STAGES + 1) & 1)
            mbarrier.expect(is_full, (BLOCK_M + BLOCK_N) * BLOCK_K * 2)
            # Rows past the group's end belong to the next group; the store drops them.
            for part in gl.static_range(SHARE):
                load_box(x_desc, [row + part * ROWS, k], is_full, x_tiles.index(stage * SHARE + part))
            held = w_tiles.index(stage)
            box = held.reshape([1, held.shape[0], held.shape[1]])
            if TRANSPOSED:
                load_box(w_desc, [group, k, col], is_full, box)
            else:
                load_box(w_desc, [group, col, k], is_full, box)
            step += 1


@gluon.jit
def _multiply(
    of_all,
    map_ptr,
    scale_ptr,
    bias_ptr,
    TRANSPOSED: gl.constexpr,
    SHARE: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER: gl.constexpr,
):
    """Run one group of multiplying warps: its rows of all of the program's tiles, or every second tile (PINGPONG).

    CONSUMER is the index of the group; `_load` explains the other parameters.
    """
    TURNS: gl.constexpr = SHARE == 1
    PART: gl.constexpr = 0 if TURNS else CONSUMER
    PIECES: gl.constexpr = ROWS * BLOCK_N // (STORED * STORED)
    descs, shared, N, K = of_all
    _x_desc, _w_desc, y_desc = descs
    x_tiles, w_tiles, y_tiles, full, empty, turns, jobs = shared
    of_sum: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    held = buffers_of(y_tiles, CONSUMER, 2)
    tiles = load_tile_count(map_ptr, ROWS * SHARE) * gl.cdiv(N, BLOCK_N)
    programs = gl.num_programs(0)
    steps = gl.cdiv(K, BLOCK_K)
    step = CONSUMER * steps if TURNS else 0
    turn = CONSUMER if TURNS else 0
    acc = gl.zeros((ROWS, BLOCK_N), gl.float32, of_sum)  # once, not for each tile: the first step overwrites it
    # The previous tile. Without PINGPONG, each step of this one stores one of its pieces.
    stored = packed(acc, held[0].dtype)
    pieces = 0
    stored_row = 0
    stored_end = 0
    stored_col = 0
    first = gl.program_id(0) + CONSUMER * programs if TURNS else gl.program_id(0)
    for _tile in range(first, tiles, 2 * programs if TURNS else programs):
        if TURNS:
            # Wait until the other group is through with the previous tile; otherwise a stage could look full that holds
            # the previous round's operands. (The first turn of the first group waits for the phase before the first,
            # which is over.)
            mbarrier.wait(turns.index(CONSUMER), (turn // 2 + 1 - CONSUMER) & 1)
        mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
        group, row, row_end, col = get_job(jobs, turn, STAGES)
        turn += 2 if TURNS else 1
        for k in range(steps):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            w = w_tiles.index(stage)
            if not TRANSPOSED:
                w = w.permute((1, 0))
            # The previous step is done once only this one's product is in flight.
            acc = warpgroup_mma(x_tiles.index(stage * SHARE + PART), w, acc, use_acc=k > 0, is_async=True)
            store_pieces(stored, y_desc, held, (FAR, stored_end), stored_row, stored_col, k, gl.minimum(k + 1, pieces))
            acc = warpgroup_mma_wait(1, [acc])
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
            step += 1
        store_pieces(stored, y_desc, held, (FAR, stored_end), stored_row, stored_col, steps, pieces)
        if TURNS:
            mbarrier.arrive(turns.index(1 - CONSUMER), count=1)
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        if TURNS:
            step += steps  # skip the steps of the other group's tile
        row += PART * ROWS
        y = acc
        if bias_ptr is not None:
            offs_n = col + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, of_sum))
            bias = gl.load(bias_ptr + group.to(gl.int64) * N + offs_n, offs_n < N, other=0.0)
            y += bias[None, :].to(gl.float32)
        if scale_ptr is not None:
            offs_m = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, of_sum))
            scale = gl.load(scale_ptr + offs_m, offs_m < row_end, other=0.0)
            y *= scale[:, None].to(gl.float32)
        if TURNS:
            store_ragged(y.to(held[0].dtype), y_desc, held, row, row_end, col)
        else:
            pieces = PIECES
        stored = packed(y, held[0].dtype)
        stored_row = row - row_end + FAR
        stored_end = row_end
        stored_col = col
    store_pieces(stored, y_desc, held, (FAR, stored_end), stored_row, stored_col, 0, pieces)
    tma.store_wait(0)
