"""The warp-specialized kernel of the scaled GEMMs, in Gluon: one warp loads, CONSUMERS groups of four multiply.

Hopper's tensor cores may sum at most 128 fp8 products here, so every step ends with an addition in float32. If all
warps do the same, nothing is multiplied meanwhile; here one group adds while the others multiply. Two groups also take
two steps at a time, and add a product while the next one is computed: that of the next step, or of the other part of a
tile of 144, 160 or 192 columns. (The number of columns of a Triton tensor is a power of two. Such tiles are for
products where others leave many SMs idle in the last round.)

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
    jobs = job_queue(4, STAGES)

    shared = xs, ws, rests, ys, scales, full, empty, jobs
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
    """Run the loading warp: load the steps of all of the program's tiles into empty stages.

    `of_all` is (TMA descriptors and scales, shared memory and barriers, sizes), the same for all warps. A tile's
    columns are multiplied in two parts, WIDE and REST; REST may be 0. A job is (group, first row, end row, first
    column).
    """
    tensors, shared, sizes = of_all
    x_desc, w_desc, rest_desc, _, x_scale_ptr, w_scale_ptr = tensors
    xs, ws, rests, _, scales, full, empty, jobs = shared
    rows, _, N, K, m_tiles, n_tiles, _ = sizes
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    offs_m = gl.arange(0, _ROWS, layout=lanes)
    k_blocks = gl.cdiv(K, _SCALED)
    step = 0
    turn = 0
    for tile in range(gl.program_id(0), m_tiles * n_tiles, gl.num_programs(0)):
        group, row, row_end, col = _place(tile, map_ptr, sizes, WIDE + REST, CONSUMERS)
        put_job(jobs, turn, (group, row, row_end, col))
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
    AT_ONCE: gl.constexpr = 2 if CONSUMERS == 2 else 1  # steps; three groups lack registers for two products
    # Load scales at a tile's beginning, so that its end need not wait for them, if there are registers for them.
    EARLY: gl.constexpr = not ROWWISE or (CONSUMERS == 2 and REST < WIDE // 2)
    tensors, shared, sizes = of_all
    y_desc = tensors[3]
    _, _, _, ys, _, full, _, jobs = shared
    _, _, _, K, m_tiles, n_tiles, _ = sizes
    of_wide: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDE, 32])
    of_rest: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, SECOND, 32]
    )
    zeros = gl.zeros((_ROWS, WIDE), gl.float32, of_wide), gl.zeros((_ROWS, SECOND), gl.float32, of_rest)
    held = (ys.index(CONSUMER),)
    steps = gl.cdiv(K, BLOCK_K)
    step = 0
    turn = 0
    for _tile in range(gl.program_id(0), m_tiles * n_tiles, gl.num_programs(0)):
        mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
        group, row, row_end, col = get_job(jobs, turn, STAGES)
        turn += 1
        row += CONSUMER * _ROWS
        acc, rest = zeros
        place = group, row, row_end
        if EARLY:
            scales = _scales_of(acc, tensors, place, col, sizes, ROWWISE, BLOCKWISE)
            rest_scales = _scales_of(rest, tensors, place, col + WIDE, sizes, ROWWISE, BLOCKWISE)
        for _ in range(steps // AT_ONCE):
            acc, rest = _added(acc, rest, zeros, shared, step, BLOCKWISE, REST, CONSUMERS, STAGES, CONSUMER, AT_ONCE)
            step += AT_ONCE
        if AT_ONCE > 1:
            for _ in range(steps % AT_ONCE):
                acc, rest = _added(acc, rest, zeros, shared, step, BLOCKWISE, REST, CONSUMERS, STAGES, CONSUMER, 1)
                step += 1
        if not EARLY:
            scales = _scales_of(acc, tensors, place, col, sizes, ROWWISE, BLOCKWISE)
            rest_scales = _scales_of(rest, tensors, place, col + WIDE, sizes, ROWWISE, BLOCKWISE)
        _store(acc, scales, y_desc, held, place, col, ROWWISE, BLOCKWISE)
        if REST > 0:
            _store(rest, rest_scales, y_desc, held, place, col + WIDE, ROWWISE, BLOCKWISE)
    tma.store_wait(0)


@gluon.jit
def _added(
    acc,
    rest,
    zeros,
    shared,
    step,
    BLOCKWISE: gl.constexpr,
    REST: gl.constexpr,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER: gl.constexpr,
    COUNT: gl.constexpr,
):
    """Return the sums of a tile's two parts plus the products of COUNT steps from `step` on.

    Each product is added while the next one is computed. Blockwise scales are applied before. The group then signals
    that it does not need a step's stage any more.
    """
    xs, _, rests, _, scales, _, empty, _ = shared
    layout: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    part = _begun(shared, zeros[0], step, CONSUMERS, STAGES, CONSUMER)
    if BLOCKWISE:
        scale = _scale(scales, step, layout, CONSUMERS, STAGES, CONSUMER)
    for index in gl.static_range(COUNT):
        stage = (step + index) % STAGES
        if REST > 0:
            x = xs.index(stage * CONSUMERS + CONSUMER)
            more = warpgroup_mma(x, rests.index(stage).permute((1, 0)), zeros[1], use_acc=False, is_async=True)
            part, more = warpgroup_mma_wait(1, [part, more])
            acc += part
            if index + 1 < COUNT:
                part = _begun(shared, zeros[0], step + index + 1, CONSUMERS, STAGES, CONSUMER)
                more, part = warpgroup_mma_wait(1, [more, part])
            else:
                more = warpgroup_mma_wait(0, [more])
            mbarrier.arrive(empty.index(stage), count=1)
            rest += more
        else:
            if index + 1 < COUNT:
                more = _begun(shared, zeros[0], step + index + 1, CONSUMERS, STAGES, CONSUMER)
                if BLOCKWISE:
                    more_scale = _scale(scales, step + index + 1, layout, CONSUMERS, STAGES, CONSUMER)
                part, more = warpgroup_mma_wait(1, [part, more])
            else:
                part = warpgroup_mma_wait(0, [part])
            mbarrier.arrive(empty.index(stage), count=1)
            if BLOCKWISE:
                part *= scale[:, None]
            acc += part
            if index + 1 < COUNT:
                part = more
                if BLOCKWISE:
                    scale = more_scale
    return acc, rest


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
def _scales_of(y, tensors, place, col, sizes, ROWWISE: gl.constexpr, BLOCKWISE: gl.constexpr):
    """Load the scales of one warp group's block of y at column `col`: of x and of w, ones if BLOCKWISE.

    `place` is (group, first row, end row).
    """
    _, _, _, _, x_scale_ptr, w_scale_ptr = tensors
    _, _, N, _, _, _, _ = sizes
    group, row, row_end = place
    if ROWWISE:
        offs_m = row + gl.arange(0, y.shape[0], layout=gl.SliceLayout(1, y.type.layout))
        offs_n = col + gl.arange(0, y.shape[1], layout=gl.SliceLayout(0, y.type.layout))
        of_x = gl.load(x_scale_ptr + gl.maximum(gl.minimum(offs_m, row_end - 1), 0))
        return of_x, gl.load(w_scale_ptr + group.to(gl.int64) * N + gl.minimum(offs_n, N - 1))
    elif BLOCKWISE:
        return 1.0, 1.0
    else:
        return gl.load(x_scale_ptr), gl.load(w_scale_ptr + group)


@gluon.jit
def _store(y, scales, y_desc, held, place, col, ROWWISE: gl.constexpr, BLOCKWISE: gl.constexpr):
    """Store one warp group's block of y at column `col`, after multiplying it by the scales of `_scales_of`.

    `place` is (group, first row, end row).
    """
    x_scale, w_scale = scales
    _, row, row_end = place
    if ROWWISE:
        y *= x_scale[:, None] * w_scale[None, :]
    elif not BLOCKWISE:
        y *= x_scale * w_scale
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
