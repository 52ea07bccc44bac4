"""The warp-specialized kernel of the scaled GEMMs, in Gluon: one warp loads, CONSUMERS groups of four multiply.

Hopper's tensor cores may sum at most 128 fp8 products here, so every step ends with an addition in float32. If all
warps do the same, nothing is multiplied meanwhile; here one group adds while the others multiply. Two groups also have
two products each in flight, and add the first while the second is computed: those of two steps, or of the two parts of
a tile of 160 or 192 columns. (The number of columns of a Triton tensor is a power of two. Such tiles are for products
where others leave many SMs idle in the last round.)

Each group has 64 rows of the tile, as many as an instruction. Gluon is part of Triton since 3.6.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...grouped_gemm.triton_kernels.ragged_boxes import store_ragged
from ...grouped_gemm.triton_kernels.tiles import load_tile_count, load_tile_in_band, tile_position
from ...warp_jobs import (
    async_copy,
    get_job,
    job_queue,
    load_scales,
    mbarrier,
    put_job,
    stage_barriers,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ...warp_jobs import load_tile as load_box
from .product import UNSPECIALIZED

_ROWS = gl.constexpr(64)  # of a tile, per group of warps
_SCALED = gl.constexpr(128)  # elements of K, and columns of w, that share one blockwise scale
WIDEST = gl.constexpr(128)  # columns of a product: registers hold two, in addition to the accumulators


# The parameters are those of the plain kernel; comments give the values that CONSUMERS > 0 fixes.
@gluon.jit(do_not_specialize=UNSPECIALIZED)
def specialized_scaled_gemm_kernel(
    x_ptr,
    w_ptr,
    x_scale_ptr,
    w_scale_ptr,
    y_ptr,
    map_ptr,
    x_desc,
    w_desc,
    y_desc,
    rest_desc,  # of w, with boxes of the columns of a tile that those of w_desc leave; None if they leave none
    rows,
    groups,
    N16,
    K16,
    GROUP_M,
    PROGRAMS_PER_SM,
    SPLIT_K,
    ROWWISE: gl.constexpr,
    BLOCKWISE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    SWAP_AB: gl.constexpr,  # 0
    TMA_LOAD: gl.constexpr,  # 1
    TMA_STORE: gl.constexpr,  # 1
    CONSUMERS: gl.constexpr,
    SPLIT: gl.constexpr,  # False
    STAGES: gl.constexpr,
):
    """Compute the tiles p, p + programs, ... of y in program p (persistent).

    A stage is full when its operands and scales have arrived, and empty again when every group has multiplied it.
    """
    gl.static_assert(BLOCK_M == _ROWS * CONSUMERS, "each group of warps has 64 rows")
    # WIDE and REST: columns of a tile's two parts; HELD: columns that are stored at a time.
    WIDE: gl.constexpr = min(BLOCK_N, WIDEST)
    REST: gl.constexpr = BLOCK_N - WIDE
    HELD: gl.constexpr = WIDE if REST == 0 else REST
    gl.static_assert(w_desc.block_shape[1] == WIDE and y_desc.block_shape[3] == HELD)
    if REST == 0:
        rest_desc = w_desc
    N = N16 * 16
    K = K16 * 16
    n_tiles = gl.cdiv(N, BLOCK_N)
    m_tiles = gl.cdiv(rows, BLOCK_M) if map_ptr is None else load_tile_count(map_ptr, BLOCK_M)
    fp8: gl.constexpr = x_ptr.dtype.element_ty
    bf16: gl.constexpr = y_ptr.dtype.element_ty
    of_x: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    of_y: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=min(2 * HELD, 128), element_bitwidth=16, rank=2)

    xs = gl.allocate_shared_memory(fp8, [STAGES * CONSUMERS, _ROWS, BLOCK_K], of_x)
    ws = gl.allocate_shared_memory(fp8, [STAGES, WIDE, BLOCK_K], of_x)
    rests = ws
    if REST > 0:
        rests = gl.allocate_shared_memory(fp8, [STAGES, REST, BLOCK_K], of_x)
    ys = gl.allocate_shared_memory(bf16, [CONSUMERS, _ROWS, HELD], of_y)
    # Per stage: the scales of each group's rows, and w's scale repeated for 64 rows.
    in_order: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    scales = gl.allocate_shared_memory(gl.float32, [STAGES * (CONSUMERS + 1) if BLOCKWISE else 1, _ROWS], in_order)
    full, empty = stage_barriers(STAGES, CONSUMERS)
    queue = job_queue(4, STAGES)

    shared = xs, ws, rests, ys, scales, full, empty, queue
    sizes = rows, groups, N, K, m_tiles, n_tiles, GROUP_M
    of_all = (x_desc, w_desc, rest_desc, y_desc, x_scale_ptr, w_scale_ptr), shared, sizes
    # Constexprs must be passed to each function one by one: Triton 3.6 turns those in a named tuple into tensors. The
    # numbers of registers are per thread and use all 65536 for three or four times 128 threads.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_multiply, (of_all, ROWWISE, BLOCKWISE, WIDE, REST, BLOCK_K, CONSUMERS, STAGES, 0)),
                (_multiply, (of_all, ROWWISE, BLOCKWISE, WIDE, REST, BLOCK_K, CONSUMERS, STAGES, 1)),
                (_load, (of_all, map_ptr, ROWWISE, BLOCKWISE, WIDE, REST, BLOCK_K, CONSUMERS, STAGES)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.static_assert(CONSUMERS == 3)
        gl.warp_specialize(
            [
                (_multiply, (of_all, ROWWISE, BLOCKWISE, WIDE, REST, BLOCK_K, CONSUMERS, STAGES, 0)),
                (_multiply, (of_all, ROWWISE, BLOCKWISE, WIDE, REST, BLOCK_K, CONSUMERS, STAGES, 1)),
                (_multiply, (of_all, ROWWISE, BLOCKWISE, WIDE, REST, BLOCK_K, CONSUMERS, STAGES, 2)),
                (_load, (of_all, map_ptr, ROWWISE, BLOCKWISE, WIDE, REST, BLOCK_K, CONSUMERS, STAGES)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )


@gluon.jit
def _load(
    of_all,
    map_ptr,
    ROWWISE: gl.constexpr,
    BLOCKWISE: gl.constexpr,
    WIDE: gl.constexpr,
    REST: gl.constexpr,
    BLOCK_K: gl.constexpr,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Run the loading warp: queue all of the program's tiles, and load their steps into empty stages.

    `of_all` is (TMA descriptors and scales, shared memory and barriers, sizes), the same for all warps. A tile's
    columns are multiplied in two parts, WIDE and REST; REST may be 0. A job is (group, first row, end row, first
    column); one with a negative group is the last.
    """
    tensors, shared, sizes = of_all
    x_desc, w_desc, rest_desc, _, x_scale_ptr, w_scale_ptr = tensors
    xs, ws, rests, _, scales, full, empty, queue = shared
    rows, _, N, K, m_tiles, n_tiles, _ = sizes
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    offs_m = gl.arange(0, _ROWS, layout=lanes)
    k_blocks = gl.cdiv(K, _SCALED)
    step = 0
    turn = 0
    for tile in range(gl.program_id(0), m_tiles * n_tiles, gl.num_programs(0)):
        group, row, row_end, col = _place(tile, map_ptr, sizes, WIDE + REST, CONSUMERS)
        put_job(queue, turn, (group, row, row_end, col))
        turn += 1
        for k in range(0, K, BLOCK_K):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), (step // STAGES + 1) & 1)
            if BLOCKWISE:
                block = k // _SCALED
                x_scale_ptrs = x_scale_ptr + block.to(gl.int64) * rows
                for consumer in gl.static_range(CONSUMERS):
                    safe_m = gl.maximum(gl.minimum(row + consumer * _ROWS + offs_m, row_end - 1), 0)
                    load_scales(scales.index(stage * (CONSUMERS + 1) + consumer), x_scale_ptrs + safe_m)
                w_blocks = group.to(gl.int64) * gl.cdiv(N, _SCALED) + col // _SCALED
                w_scale_ptrs = w_scale_ptr + w_blocks * k_blocks + block + offs_m * 0
                load_scales(scales.index(stage * (CONSUMERS + 1) + CONSUMERS), w_scale_ptrs)
                async_copy.mbarrier_arrive(full.index(stage), increment_count=True)
            mbarrier.expect(full.index(stage), (CONSUMERS * _ROWS + WIDE + REST) * BLOCK_K)
            # Rows past the group's end belong to the next group; the store drops them.
            for consumer in gl.static_range(CONSUMERS):
                of_consumer = xs.index(stage * CONSUMERS + consumer)
                load_box(x_desc, [row + consumer * _ROWS, k], full.index(stage), of_consumer)
            load_box(w_desc, [group, col, k], full.index(stage), ws.index(stage).reshape([1, WIDE, BLOCK_K]))
            if REST > 0:
                of_rest = rests.index(stage).reshape([1, REST, BLOCK_K])
                load_box(rest_desc, [group, col + WIDE, k], full.index(stage), of_rest)
            step += 1
    put_job(queue, turn, (-1, 0, 0, 0))


@gluon.jit
def _multiply(
    of_all,
    ROWWISE: gl.constexpr,
    BLOCKWISE: gl.constexpr,
    WIDE: gl.constexpr,
    REST: gl.constexpr,
    BLOCK_K: gl.constexpr,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER: gl.constexpr,
):
    """Run one group of multiplying warps: its rows of all of the program's tiles.

    CONSUMER is the index of the group; `_load` explains the other parameters.
    """
    gl.static_assert(not (REST > 0 and BLOCKWISE), "a tile has one scale of w a step")
    SECOND: gl.constexpr = REST if REST > 0 else WIDE
    PAIRS: gl.constexpr = REST == 0 and CONSUMERS == 2  # three groups lack registers for two products
    tensors, shared, sizes = of_all
    xs, _, rests, ys, scales, _, empty, queue = shared
    _, _, _, K, _, _, _ = sizes
    of_wide: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDE, 32])
    of_rest: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, SECOND, 32]
    )
    of_rows: gl.constexpr = gl.SliceLayout(1, of_wide)
    zeros = gl.zeros((_ROWS, WIDE), gl.float32, of_wide)
    rest_zeros = gl.zeros((_ROWS, SECOND), gl.float32, of_rest)
    steps = gl.cdiv(K, BLOCK_K)
    step = 0
    turn = 0
    group, row, row_end, col = get_job(queue, turn)
    while group >= 0:
        row += CONSUMER * _ROWS
        acc = zeros
        rest = rest_zeros
        single = steps
        if PAIRS:
            single = steps % 2
            for _pair in range(steps // 2):
                part = _begun(shared, zeros, step, CONSUMERS, STAGES, CONSUMER)
                if BLOCKWISE:
                    scale = _scale(scales, step, of_rows, CONSUMERS, STAGES, CONSUMER)
                more = _begun(shared, zeros, step + 1, CONSUMERS, STAGES, CONSUMER)
                if BLOCKWISE:
                    more_scale = _scale(scales, step + 1, of_rows, CONSUMERS, STAGES, CONSUMER)
                part, more = warpgroup_mma_wait(1, [part, more])
                mbarrier.arrive(empty.index(step % STAGES), count=1)
                if BLOCKWISE:
                    part *= scale[:, None]
                acc += part
                more = warpgroup_mma_wait(0, [more])
                mbarrier.arrive(empty.index((step + 1) % STAGES), count=1)
                if BLOCKWISE:
                    more *= more_scale[:, None]
                acc += more
                step += 2
        for _step in range(single):
            stage = step % STAGES
            part = _begun(shared, zeros, step, CONSUMERS, STAGES, CONSUMER)
            if BLOCKWISE:
                scale = _scale(scales, step, of_rows, CONSUMERS, STAGES, CONSUMER)
            if REST > 0:
                x = xs.index(stage * CONSUMERS + CONSUMER)
                more = warpgroup_mma(x, rests.index(stage).permute((1, 0)), rest_zeros, use_acc=False, is_async=True)
                part, more = warpgroup_mma_wait(1, [part, more])
                acc += part
                more = warpgroup_mma_wait(0, [more])
                mbarrier.arrive(empty.index(stage), count=1)
                rest += more
            else:
                part = warpgroup_mma_wait(0, [part])
                mbarrier.arrive(empty.index(stage), count=1)
                if BLOCKWISE:
                    part *= scale[:, None]
                acc += part
            step += 1

        held = (ys.index(CONSUMER),)
        place = group, row, row_end
        _store(acc, tensors, held, place, col, sizes, ROWWISE, BLOCKWISE)
        if REST > 0:
            _store(rest, tensors, held, place, col + WIDE, sizes, ROWWISE, BLOCKWISE)
        turn += 1
        group, row, row_end, col = get_job(queue, turn)
    tma.store_wait(0)


@gluon.jit
def _begun(shared, zeros, step, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, CONSUMER: gl.constexpr):
    """Wait until a step's operands have arrived, start its asynchronous product and return it.

    The product starts from `zeros`, so that it is a separate sum, as in the plain kernel.
    """
    xs, ws, _, _, _, full, _, _ = shared
    stage = step % STAGES
    mbarrier.wait(full.index(stage), (step // STAGES) & 1)
    x = xs.index(stage * CONSUMERS + CONSUMER)
    return warpgroup_mma(x, ws.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _scale(scales, step, layout: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, CONSUMER: gl.constexpr):
    """Return the blockwise scales of one step that has been loaded, (rows,): those of x's rows times that of w.

    The rows are those of warp group CONSUMER.
    """
    first = step % STAGES * (CONSUMERS + 1)
    return scales.index(first + CONSUMER).load(layout) * scales.index(first + CONSUMERS).load(layout)


@gluon.jit
def _store(y, tensors, held, place, col, sizes, ROWWISE: gl.constexpr, BLOCKWISE: gl.constexpr):
    """Store one warp group's block of y at column `col`, after multiplying it by rowwise or tensorwise scales.

    `place` is (group, first row, end row). Blockwise scales have been applied already.
    """
    _, _, _, y_desc, x_scale_ptr, w_scale_ptr = tensors
    _, _, N, _, _, _, _ = sizes
    group, row, row_end = place
    if ROWWISE:
        offs_m = row + gl.arange(0, y.shape[0], layout=gl.SliceLayout(1, y.type.layout))
        offs_n = col + gl.arange(0, y.shape[1], layout=gl.SliceLayout(0, y.type.layout))
        of_x = gl.load(x_scale_ptr + gl.maximum(gl.minimum(offs_m, row_end - 1), 0))
        of_w = gl.load(w_scale_ptr + group.to(gl.int64) * N + gl.minimum(offs_n, N - 1))
        y *= of_x[:, None] * of_w[None, :]
    elif not BLOCKWISE:
        y *= gl.load(x_scale_ptr) * gl.load(w_scale_ptr + group)
    store_ragged(y.to(held[0].dtype), y_desc, held, row, row_end, col)


@gluon.jit
def _place(tile, map_ptr, sizes, BLOCK_N: gl.constexpr, CONSUMERS: gl.constexpr):
    """Return (group, first row, end row, first column) of a tile."""
    BLOCK_M: gl.constexpr = _ROWS * CONSUMERS
    rows, groups, _, _, m_tiles, n_tiles, GROUP_M = sizes
    if map_ptr is None:
        m_tile, n_tile = tile_position(tile, m_tiles, n_tiles, GROUP_M)
        group, row, row_end = m_tile * 0, m_tile * BLOCK_M, rows
    else:
        group, row, row_end, n_tile = load_tile_in_band(map_ptr, tile, n_tiles, rows, groups, GROUP_M, BLOCK_M)
    return group, row, row_end, n_tile * BLOCK_N
