"""The warp-specialized kernel of the dense GEMM for 16-bit dtypes, in Gluon.

One warp loads, and CONSUMERS groups of four warps multiply. The groups share each tile, by rows, and two of them store
it while the products of the next one run; with PINGPONG they take whole tiles in turns, so that one stores while the
other multiplies. Where power-of-two tiles leave many SMs idle in the last round, tiles of 160 or 192 columns, or 192
rows, may not. (The number of columns of a Triton tensor is a power of two, so such a tile is two products per step.)

Gluon is part of Triton since 3.6.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...config_limits import SPECIALIZED_BYTES
from ...warp_jobs import (
    buffers_of,
    get_job,
    job_queue,
    load_tile,
    mbarrier,
    packed,
    put_job,
    stage_barriers,
    store_box,
    store_pieces,
    tma,
    turn_barriers,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .epilogue import activated
from .gemm import UNSPECIALIZED
from .tile_order import tile_at

WIDEST = gl.constexpr(128)  # columns of a step's first product, unless the tile has 256
STORED = gl.constexpr(64)  # rows, and the most columns, that are stored at a time: 128 bytes, those of a swizzle
_SMEM = gl.constexpr(SPECIALIZED_BYTES)
_UNIT = gl.constexpr(8)  # 16-bit elements in 16 bytes


# The parameters are those of the plain kernel; comments give the values that CONSUMERS > 0 fixes.
@gluon.jit(do_not_specialize=UNSPECIALIZED)
def specialized_matmul_kernel(
    a_ptr,
    b_ptr,
    y_ptr,
    bias_ptr,
    a_desc,
    b_desc,
    y_desc,
    rest_desc,  # of b, with boxes of the columns of a tile that those of b_desc leave; None if they leave none
    batch,
    M,
    N,
    K,
    lda,
    ldb,
    ldy,
    GROUP_M,
    SPLIT_K,  # 1
    PROGRAMS_PER_SM,  # 1
    A_KM: gl.constexpr,
    B_KN: gl.constexpr,
    ACTIVATION: gl.constexpr,
    ALIGNED: gl.constexpr,  # True
    SPLIT: gl.constexpr,  # False
    PERSISTENT: gl.constexpr,  # True
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    TMA: gl.constexpr,  # 2
    CONSUMERS: gl.constexpr,
    PINGPONG: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Compute the tiles p, p + programs, ... of y in program p (persistent).

    A stage is full when its operands have arrived, and empty again when every group that needs it has multiplied it.
    """
    gl.static_assert(ALIGNED and TMA == 2, "TMA wants rows that begin at multiples of 16 bytes")
    N = N // _UNIT * _UNIT
    # SHARE: groups that share a tile; ROWS: rows of each; WIDE and REST: columns of a step's two products; HELD: those
    # stored at a time.
    SHARE: gl.constexpr = 1 if PINGPONG else CONSUMERS
    ROWS: gl.constexpr = BLOCK_M // SHARE
    WIDE: gl.constexpr = 256 if BLOCK_N == 256 else WIDEST
    REST: gl.constexpr = BLOCK_N - WIDE
    HELD: gl.constexpr = STORED if REST == 0 else min(REST, STORED)
    gl.static_assert(b_desc.block_shape[2 if B_KN else 1] == WIDE)
    gl.static_assert(y_desc.block_shape[1] == STORED and y_desc.block_shape[2] == HELD)
    # Two buffers per group, if they fit and the pieces of each part alternate between them.
    SPARE: gl.constexpr = _SMEM - STAGES * (BLOCK_M + BLOCK_N) * BLOCK_K * 2
    EVEN: gl.constexpr = ROWS * REST // (STORED * HELD) % 2 == 0
    BUFFERS: gl.constexpr = 2 if EVEN and SPARE >= 2 * CONSUMERS * STORED * HELD * 2 else 1
    if REST == 0:
        rest_desc = b_desc
    dtype: gl.constexpr = a_ptr.dtype.element_ty
    of_tile: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    of_rest: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=rest_desc.layout.swizzle_byte_width, element_bitwidth=16, rank=2
    )
    of_held: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * HELD, element_bitwidth=16, rank=2)

    a_tiles = _stages(dtype, STAGES * SHARE, A_KM, ROWS, BLOCK_K, of_tile)
    b_tiles = _stages(dtype, STAGES, B_KN, WIDE, BLOCK_K, of_tile)
    rest_tiles = b_tiles
    if REST > 0:
        rest_tiles = _stages(dtype, STAGES, B_KN, REST, BLOCK_K, of_rest)
    y_tiles = gl.allocate_shared_memory(dtype, [CONSUMERS * BUFFERS, STORED, HELD], of_held)
    full, empty = stage_barriers(STAGES, SHARE)
    turns = full
    if PINGPONG:
        turns = turn_barriers()
    jobs = job_queue(3, STAGES)

    descs = a_desc, b_desc, rest_desc, y_desc
    shared = a_tiles, b_tiles, rest_tiles, y_tiles, full, empty, turns, jobs
    m_tiles = gl.cdiv(M, BLOCK_M)
    n_tiles = gl.cdiv(N, BLOCK_N)
    tiles = batch * m_tiles * n_tiles
    sizes = tiles, m_tiles, n_tiles, GROUP_M
    of_all = descs, shared, sizes, N, K
    # Constexprs must be passed to each function one by one: Triton 3.6 turns those in a named tuple into tensors. The
    # numbers of registers are per thread and use all 65536 for three or four times 128 threads.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (of_all, bias_ptr, A_KM, B_KN, ACTIVATION, SHARE, ROWS, WIDE, REST, BLOCK_K, STAGES, BUFFERS, 0),
                ),
                (
                    _multiply,
                    (of_all, bias_ptr, A_KM, B_KN, ACTIVATION, SHARE, ROWS, WIDE, REST, BLOCK_K, STAGES, BUFFERS, 1),
                ),
                (_load, (of_all, A_KM, B_KN, SHARE, ROWS, WIDE, REST, BLOCK_K, STAGES)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.static_assert(CONSUMERS == 3 and not PINGPONG)
        gl.warp_specialize(
            [
                (
                    _multiply,
                    (of_all, bias_ptr, A_KM, B_KN, ACTIVATION, SHARE, ROWS, WIDE, REST, BLOCK_K, STAGES, BUFFERS, 0),
                ),
                (
                    _multiply,
                    (of_all, bias_ptr, A_KM, B_KN, ACTIVATION, SHARE, ROWS, WIDE, REST, BLOCK_K, STAGES, BUFFERS, 1),
                ),
                (
                    _multiply,
                    (of_all, bias_ptr, A_KM, B_KN, ACTIVATION, SHARE, ROWS, WIDE, REST, BLOCK_K, STAGES, BUFFERS, 2),
                ),
                (_load, (of_all, A_KM, B_KN, SHARE, ROWS, WIDE, REST, BLOCK_K, STAGES)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )


@gluon.jit
def _load(
    of_all,
    A_KM: gl.constexpr,
    B_KN: gl.constexpr,
    SHARE: gl.constexpr,
    ROWS: gl.constexpr,
    WIDE: gl.constexpr,
    REST: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Run the loading warp: load every step of the program's tiles into the next empty stage.

    `of_all` is (TMA descriptors, shared memory and barriers, sizes, N, K), the same for all warps. SHARE groups share a
    tile and have ROWS of its rows each. Its columns are multiplied in two parts, WIDE and REST; REST may be 0. A job is
    (matrix, first row, first column).
    """
    descs, shared, sizes, _, K = of_all
    a_desc, b_desc, rest_desc, _ = descs
    a_tiles, b_tiles, rest_tiles, _, full, empty, _, jobs = shared
    tiles, m_tiles, n_tiles, GROUP_M = sizes
    step = 0
    turn = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        matrix, m_tile, n_tile = tile_at(tile, m_tiles, n_tiles, GROUP_M)
        row = m_tile * (ROWS * SHARE)
        col = n_tile * (WIDE + REST)
        put_job(jobs, turn, (matrix, row, col))
        turn += 1
        for k in range(0, K, BLOCK_K):
            stage = step % STAGES
            is_full = full.index(stage)
            mbarrier.wait(empty.index(stage), (step // STAGES + 1) & 1)
            mbarrier.expect(is_full, (SHARE * ROWS + WIDE + REST) * BLOCK_K * 2)
            for part in gl.static_range(SHARE):
                _load_box(a_desc, matrix, k, row + part * ROWS, is_full, a_tiles.index(stage * SHARE + part), A_KM)
            _load_box(b_desc, matrix, k, col, is_full, b_tiles.index(stage), B_KN)
            if REST > 0:
                _load_box(rest_desc, matrix, k, col + WIDE, is_full, rest_tiles.index(stage), B_KN)
            step += 1


@gluon.jit
def _multiply(
    of_all,
    bias_ptr,
    A_KM: gl.constexpr,
    B_KN: gl.constexpr,
    ACTIVATION: gl.constexpr,
    SHARE: gl.constexpr,
    ROWS: gl.constexpr,
    WIDE: gl.constexpr,
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
    LATER: gl.constexpr = SHARE == 2  # store a tile during the next one; three groups lack the registers
    SECOND: gl.constexpr = REST if REST > 0 else STORED
    descs, shared, sizes, N, K = of_all
    _, _, _, y_desc = descs
    a_tiles, b_tiles, rest_tiles, y_tiles, full, empty, turns, jobs = shared
    of_wide: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDE, 16])
    of_rest: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, SECOND, 16]
    )
    held = buffers_of(y_tiles, CONSUMER, BUFFERS)
    PIECES: gl.constexpr = ROWS * WIDE // (STORED * held[0].shape[1])
    REST_PIECES: gl.constexpr = ROWS * REST // (STORED * held[0].shape[1])
    gl.static_assert(PIECES % BUFFERS == 0 and REST_PIECES % BUFFERS == 0, "the pieces alternate between the buffers")
    tiles, _, _, _ = sizes
    programs = gl.num_programs(0)
    steps = gl.cdiv(K, BLOCK_K)
    step = CONSUMER * steps if TURNS else 0
    turn = CONSUMER if TURNS else 0
    # Zeros once, not for each tile, because the first step overwrites them.
    acc = gl.zeros((ROWS, WIDE), gl.float32, of_wide)
    rest = gl.zeros((ROWS, SECOND), gl.float32, of_rest)
    # The previous tile. If LATER, each step of this one stores one of its pieces.
    stored = packed(acc, held[0].dtype)
    stored_rest = packed(rest, held[0].dtype)
    pieces = 0
    stored_matrix = 0
    stored_row = 0
    stored_col = 0
    first = gl.program_id(0) + CONSUMER * programs if TURNS else gl.program_id(0)
    for _tile in range(first, tiles, 2 * programs if TURNS else programs):
        if TURNS:
            # Wait until the other group is through with the previous tile; otherwise a stage could look full that holds
            # the previous round's operands. (The first turn of the first group waits for the phase before the first,
            # which is over.)
            mbarrier.wait(turns.index(CONSUMER), (turn // 2 + 1 - CONSUMER) & 1)
        mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
        matrix, row, col = get_job(jobs, turn, STAGES)
        turn += 2 if TURNS else 1
        for k in range(steps):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            a = a_tiles.index(stage * SHARE + PART)
            b = b_tiles.index(stage)
            b_rest = rest_tiles.index(stage)
            if A_KM:
                a = a.permute((1, 0))
            if not B_KN:
                b = b.permute((1, 0))
                b_rest = b_rest.permute((1, 0))
            # The previous step is done once only this one's products are in flight.
            acc = warpgroup_mma(a, b, acc, use_acc=k > 0, is_async=True)
            if REST > 0:
                rest = warpgroup_mma(a, b_rest, rest, use_acc=k > 0, is_async=True)
            end = gl.minimum(k + 1, pieces)
            _store_parts(stored, stored_rest, y_desc, held, stored_matrix, stored_row, stored_col, k, end, WIDE, REST)
            if REST > 0:
                acc, rest = warpgroup_mma_wait(2, [acc, rest])
            else:
                acc = warpgroup_mma_wait(1, [acc])
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
            step += 1
        _store_parts(
            stored, stored_rest, y_desc, held, stored_matrix, stored_row, stored_col, steps, pieces, WIDE, REST
        )
        if TURNS:
            mbarrier.arrive(turns.index(1 - CONSUMER), count=1)
        if REST > 0:
            acc, rest = warpgroup_mma_wait(0, [acc, rest])
        else:
            acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        if TURNS:
            step += steps  # skip the steps of the other group's tile
        row += PART * ROWS
        if LATER:
            stored = packed(_finished(acc, bias_ptr, col, N, ACTIVATION), held[0].dtype)
            if REST > 0:
                stored_rest = packed(_finished(rest, bias_ptr, col + WIDE, N, ACTIVATION), held[0].dtype)
            stored_matrix = matrix
            stored_row = row
            stored_col = col
            pieces = PIECES + REST_PIECES
        else:
            y = _finished(acc, bias_ptr, col, N, ACTIVATION).to(held[0].dtype)
            store_box(y, y_desc, held, matrix, row, col)
            if REST > 0:
                y = _finished(rest, bias_ptr, col + WIDE, N, ACTIVATION).to(held[0].dtype)
                store_box(y, y_desc, held, matrix, row, col + WIDE)
    _store_parts(stored, stored_rest, y_desc, held, stored_matrix, stored_row, stored_col, 0, pieces, WIDE, REST)
    tma.store_wait(0)


@gluon.jit
def _store_parts(wide, rest, y_desc, held, matrix, row, col, first, end, WIDE: gl.constexpr, REST: gl.constexpr):
    """Store those pieces of both parts of a packed tile whose numbers are at least `first` and below `end`."""
    PIECES: gl.constexpr = 2 * wide.shape[0] * wide.shape[1] // (held[0].shape[0] * held[0].shape[1])
    store_pieces(wide, y_desc, held, matrix, row, col, first, end)
    if REST > 0:
        store_pieces(rest, y_desc, held, matrix, row, col + WIDE, first - PIECES, end - PIECES)


@gluon.jit
def _finished(acc, bias_ptr, col, N, ACTIVATION: gl.constexpr):
    """Return a block of sums with the bias of its columns, which begin at `col`, and the activation."""
    if bias_ptr is not None:
        offs_n = col + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout))
        acc += gl.load(bias_ptr + offs_n, offs_n < N, other=0.0)[None, :].to(gl.float32)
    return activated(acc, ACTIVATION)


@gluon.jit
def _stages(
    dtype: gl.constexpr,
    COUNT: gl.constexpr,
    ALONG_K: gl.constexpr,
    SIZE: gl.constexpr,
    LENGTH: gl.constexpr,
    layout: gl.constexpr,
):
    """Allocate shared memory for COUNT tiles of an operand, each SIZE x LENGTH, or LENGTH x SIZE if ALONG_K."""
    if ALONG_K:
        return gl.allocate_shared_memory(dtype, [COUNT, LENGTH, SIZE], layout)
    else:
        return gl.allocate_shared_memory(dtype, [COUNT, SIZE, LENGTH], layout)


@gluon.jit
def _load_box(desc, matrix, k, first, is_full, held, ALONG_K: gl.constexpr):
    """Start a TMA load of an operand's tile that begins at `first` (a row of a, or a column of b) and k.

    The tile arrives in the shared memory `held`, and the barrier `is_full` signals it.
    """
    box = held.reshape([1, held.shape[0], held.shape[1]])
    if ALONG_K:
        load_tile(desc, [matrix, k, first], is_full, box)
    else:
        load_tile(desc, [matrix, first, k], is_full, box)
