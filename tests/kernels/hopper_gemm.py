"""Experimental kernels of forward and dX for sm_90, compared by hopper_on_gpu.py."""

from __future__ import annotations

from foretune.kernels.grouped_gemm.triton_kernels.gemm import UNSPECIALIZED
from foretune.kernels.grouped_gemm.triton_kernels.ragged_boxes import ragged_descriptor, store_ragged
from foretune.kernels.grouped_gemm.triton_kernels.tiles import load_tile, load_tile_count, tile_position
from foretune.kernels.warp_jobs import load_tile as load_box
from foretune.kernels.warp_jobs import mbarrier, stage_barriers, tma, turn_barriers, warpgroup_mma, warpgroup_mma_wait
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_HELD = gl.constexpr(64 * 128)  # elements of its tile that a group stores at a time


# The parameters are those of the plain kernel; comments give the values that CONSUMERS > 0 fixes.
@gluon.jit(do_not_specialize=UNSPECIALIZED)
def gemm_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    map_ptr,
    indices_ptr,  # None
    scale_ptr,
    bias_ptr,
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
    LAG: gl.constexpr,
    SKIP: gl.constexpr,
    EXTRA: gl.constexpr,
):
    """Compute tiles p, p + programs, ... of the map in program p.

    A stage is full when its operands have arrived, and empty again when every group that needs it has multiplied it.
    """
    gl.static_assert(TMA_X == 1 and TMA_W == 1 and TMA_Y == 1 and not GATHER and not SCATTER)
    N = N8 * 8
    K = K8 * 8
    SHARE: gl.constexpr = 1 if PINGPONG else CONSUMERS  # groups that share a tile
    ROWS: gl.constexpr = BLOCK_M // SHARE
    HELD: gl.constexpr = _HELD // ROWS  # columns
    dtype: gl.constexpr = y_ptr.dtype.element_ty
    of_tile: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    of_w: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    x_desc = tma.make_tensor_descriptor(x_ptr, [x_rows, K], [K.to(gl.int64), 1], [ROWS, BLOCK_K], of_tile)
    # w has three dimensions, so that a box past one group's N or K reads zeros instead of the next group.
    if TRANSPOSED:
        w_desc = tma.make_tensor_descriptor(
            w_ptr, [groups, K, N], [K.to(gl.int64) * N, N.to(gl.int64), 1], [1, BLOCK_K, BLOCK_N], of_w
        )
        w_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, BLOCK_N], of_tile)
    else:
        w_desc = tma.make_tensor_descriptor(
            w_ptr, [groups, N, K], [N.to(gl.int64) * K, K.to(gl.int64), 1], [1, BLOCK_N, BLOCK_K], of_w
        )
        w_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_K], of_tile)
    y_desc = ragged_descriptor(y_ptr, N, ROWS, HELD)
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES * SHARE, ROWS, BLOCK_K], of_tile)
    y_tiles = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, HELD], of_tile)
    full, empty = stage_barriers(STAGES, SHARE)
    turns = turn_barriers()

    sizes = rows, groups, N, K, GROUP_M
    if EXTRA > 0:
        if TRANSPOSED:
            more_desc = tma.make_tensor_descriptor(
                w_ptr, [groups, K, N], [K.to(gl.int64) * N, N.to(gl.int64), 1], [1, BLOCK_K, EXTRA], of_w
            )
            more_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, EXTRA], of_tile)
        else:
            more_desc = tma.make_tensor_descriptor(
                w_ptr, [groups, N, K], [N.to(gl.int64) * K, K.to(gl.int64), 1], [1, EXTRA, BLOCK_K], of_w
            )
            more_tiles = gl.allocate_shared_memory(dtype, [STAGES, EXTRA, BLOCK_K], of_tile)
        descs = x_desc, w_desc, y_desc, more_desc
        shared = x_tiles, w_tiles, y_tiles, full, empty, turns, more_tiles
        of_all = descs, shared, map_ptr, sizes
    else:
        descs = x_desc, w_desc, y_desc, w_desc
        shared = x_tiles, w_tiles, y_tiles, full, empty, turns, w_tiles
        of_all = descs, shared, map_ptr, sizes
    # Constexprs must be passed to each function one by one: Triton 3.6 turns those in a named tuple into tensors. The
    # numbers of registers are per thread and use all 65536 for three times 128 threads.
    gl.static_assert(CONSUMERS == 2)
    gl.warp_specialize(
        [
            (
                _multiply,
                (of_all, scale_ptr, bias_ptr, TRANSPOSED, SHARE, ROWS, BLOCK_N, BLOCK_K, STAGES, LAG, SKIP, EXTRA, 0),
            ),
            (
                _multiply,
                (of_all, scale_ptr, bias_ptr, TRANSPOSED, SHARE, ROWS, BLOCK_N, BLOCK_K, STAGES, LAG, SKIP, EXTRA, 1),
            ),
            (_load, (of_all, TRANSPOSED, SHARE, ROWS, BLOCK_N, BLOCK_K, STAGES, EXTRA)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _load(
    of_all,
    TRANSPOSED: gl.constexpr,
    SHARE: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    EXTRA: gl.constexpr,
):
    """Run the loading warp: load every step of all of the program's tiles into the next empty stage.

    `of_all` is (TMA descriptors, shared memory and barriers, tile map, sizes), the same for all warps. SHARE is the
    number of groups that share a tile, and ROWS the number of a tile's rows per group.
    """
    BLOCK_M: gl.constexpr = ROWS * SHARE
    descs, shared, map_ptr, sizes = of_all
    x_desc, w_desc, _y_desc, more_desc = descs
    x_tiles, w_tiles, _y_tiles, full, empty, _turns, more_tiles = shared
    rows, groups, N, K, GROUP_M = sizes
    m_tiles = load_tile_count(map_ptr, BLOCK_M)
    n_tiles = gl.cdiv(N, BLOCK_N + EXTRA)
    step = 0
    for tile in range(gl.program_id(0), m_tiles * n_tiles, gl.num_programs(0)):
        m_tile, n_tile = tile_position(tile, m_tiles, n_tiles, GROUP_M)
        group, row, _row_end = load_tile(map_ptr, m_tile, rows, groups, BLOCK_M)
        col = n_tile * (BLOCK_N + EXTRA)
        for k in range(0, K, BLOCK_K):
            stage = step % STAGES
            is_full = full.index(stage)
            mbarrier.wait(empty.index(stage), (step // STAGES + 1) & 1)
            mbarrier.expect(is_full, (BLOCK_M + BLOCK_N + EXTRA) * BLOCK_K * 2)
            # Rows past the group's end belong to the next group; the store drops them.
            for part in gl.static_range(SHARE):
                load_box(x_desc, [row + part * ROWS, k], is_full, x_tiles.index(stage * SHARE + part))
            held = w_tiles.index(stage)
            box = held.reshape([1, held.shape[0], held.shape[1]])
            if TRANSPOSED:
                load_box(w_desc, [group, k, col], is_full, box)
            else:
                load_box(w_desc, [group, col, k], is_full, box)
            if EXTRA > 0:
                rest = more_tiles.index(stage)
                rest = rest.reshape([1, rest.shape[0], rest.shape[1]])
                if TRANSPOSED:
                    load_box(more_desc, [group, k, col + BLOCK_N], is_full, rest)
                else:
                    load_box(more_desc, [group, col + BLOCK_N, k], is_full, rest)
            step += 1


@gluon.jit
def _multiply(
    of_all,
    scale_ptr,
    bias_ptr,
    TRANSPOSED: gl.constexpr,
    SHARE: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    LAG: gl.constexpr,
    SKIP: gl.constexpr,
    EXTRA: gl.constexpr,
    CONSUMER: gl.constexpr,
):
    """Run one group of multiplying warps: its rows of all of the program's tiles, or every second tile (PINGPONG).

    CONSUMER is the index of the group; `_load` explains the other parameters.
    """
    BLOCK_M: gl.constexpr = ROWS * SHARE
    TURNS: gl.constexpr = SHARE == 1
    PART: gl.constexpr = 0 if TURNS else CONSUMER
    descs, shared, map_ptr, sizes = of_all
    _x_desc, _w_desc, y_desc, _more_desc = descs
    x_tiles, w_tiles, y_tiles, full, empty, turns, more_tiles = shared
    rows, groups, N, K, GROUP_M = sizes
    of_sum: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    held = y_tiles.index(CONSUMER)
    m_tiles = load_tile_count(map_ptr, BLOCK_M)
    n_tiles = gl.cdiv(N, BLOCK_N + EXTRA)
    steps = gl.cdiv(K, BLOCK_K)
    first = gl.program_id(0)
    programs = gl.num_programs(0)
    step = 0
    turn = 0
    if TURNS:
        first += CONSUMER * programs
        programs *= 2
        step += CONSUMER * steps
    if LAG > 0 and CONSUMER == 1:
        mbarrier.wait(turns.index(1), 0, pred=first < m_tiles * n_tiles)
    for tile in range(first, m_tiles * n_tiles, programs):
        m_tile, n_tile = tile_position(tile, m_tiles, n_tiles, GROUP_M)
        group, row, row_end = load_tile(map_ptr, m_tile, rows, groups, BLOCK_M)
        row += PART * ROWS
        col = n_tile * (BLOCK_N + EXTRA)
        acc = gl.zeros((ROWS, BLOCK_N), gl.float32, of_sum)
        if EXTRA > 0:
            of_more: gl.constexpr = gl.NVMMADistributedLayout(
                version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, EXTRA, 16]
            )
            more = gl.zeros((ROWS, EXTRA), gl.float32, of_more)
        if TURNS:
            # Wait until the other group is through with the previous tile; otherwise a stage could look full that holds
            # the previous round's operands. (The first turn of the first group waits for the phase before the first,
            # which is over.)
            mbarrier.wait(turns.index(CONSUMER), (turn + 1 - CONSUMER) & 1)
            turn += 1
        if SKIP and row >= row_end:  # no rows: only take part in the barriers
            for _ in range(steps):
                stage = step % STAGES
                mbarrier.wait(full.index(stage), (step // STAGES) & 1)
                mbarrier.arrive(empty.index(stage), count=1)
                step += 1
        else:
            for k in range(steps):
                stage = step % STAGES
                mbarrier.wait(full.index(stage), (step // STAGES) & 1)
                w = w_tiles.index(stage)
                if not TRANSPOSED:
                    w = w.permute((1, 0))
                # The previous step is done once only this one's product is in flight.
                x = x_tiles.index(stage * SHARE + PART)
                acc = warpgroup_mma(x, w, acc, use_acc=k > 0, is_async=True)
                if EXTRA > 0:
                    rest = more_tiles.index(stage)
                    if not TRANSPOSED:
                        rest = rest.permute((1, 0))
                    more = warpgroup_mma(x, rest, more, use_acc=k > 0, is_async=True)
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
        if TURNS:
            step += steps  # skip the steps of the other group's tile
        if not SKIP or row < row_end:
            if bias_ptr is not None:
                offs_n = col + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, of_sum))
                bias = gl.load(bias_ptr + group.to(gl.int64) * N + offs_n, offs_n < N, other=0.0)
                acc += bias[None, :].to(gl.float32)
            if scale_ptr is not None:
                offs_m = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, of_sum))
                scale = gl.load(scale_ptr + offs_m, offs_m < row_end, other=0.0)
                acc *= scale[:, None].to(gl.float32)
            store_ragged(acc.to(held.dtype), y_desc, held, row, row_end, col)
            if EXTRA > 0:
                store_ragged(more.to(held.dtype), y_desc, held, row, row_end, col + BLOCK_N)
    if LAG > 0 and CONSUMER == 0:
        mbarrier.arrive(turns.index(1), count=1, pred=step <= LAG)
    tma.store_wait(0)
