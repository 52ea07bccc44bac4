"""Gluon code that kernels with CONSUMERS share: Hopper's asynchronous copies and products, and barriers.

Loading warps and multiplying warps of a program synchronize by barriers. Gluon is experimental: its names and their
locations are collected here, and `config_limits.why_no_gluon` checks whether this module can be imported.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

__all__ = [
    "async_copy",
    "buffers_of",
    "fence_async_shared",
    "get_job",
    "job_barriers",
    "job_queue",
    "load_scales",
    "load_tile",
    "mbarrier",
    "packed",
    "put_job",
    "stage_barriers",
    "store_box",
    "store_pieces",
    "tma",
    "turn_barriers",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]

# The names of copies since Triton 3.8 or 3.9, and before.
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
load_scales = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def stage_barriers(STAGES: gl.constexpr, READERS: gl.constexpr):
    """Return barriers (full, empty): full once a stage is loaded, empty once all READERS have read it."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=READERS)
    return full, empty


@gluon.jit
def turn_barriers():
    """Return a barrier for each of two warp groups that alternate; a group waits at its own until the other arrives."""
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for turn in gl.static_range(2):
        mbarrier.init(turns.index(turn), count=1)
    return turns


@gluon.jit
def job_queue(FIELDS: gl.constexpr, STAGES: gl.constexpr):
    """Return shared memory for a queue of jobs: FIELDS integers that tell the multiplying warps their next tile.

    A job arrives with a stage that they wait for anyway, the first one of its tile or the last one of the tile before,
    or at a barrier of its own (`job_barriers`). The loading warp is at most STAGES steps ahead, and a tile has at least
    one step. So when it writes a place of the queue again, all groups have read the job that was there.
    """
    return gl.allocate_shared_memory(gl.int32, [(STAGES + 2) * FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def job_barriers(STAGES: gl.constexpr):
    """Return a barrier for each place of a queue of jobs; each takes time when a program begins."""
    queued = gl.allocate_shared_memory(gl.int64, [STAGES + 2, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(STAGES + 2):
        mbarrier.init(queued.index(place), count=1)
    return queued


@gluon.jit
def put_job(jobs, turn, job):
    """Write the job of tile number `turn`, a tuple; the loading warp must call it before it fills the job's stage."""
    of_warp: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    place = turn % (jobs.shape[0] // len(job))
    for field in gl.static_range(len(job)):
        jobs.index(place * len(job) + field).store(gl.full([1], job[field], gl.int32, of_warp))


@gluon.jit
def get_job(jobs, turn, STAGES: gl.constexpr):
    """Return the job of tile number `turn`, which has arrived.

    A group of multiplying warps must call it before it arrives at the barrier `empty` of the tile's first stage.
    """
    of_group: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    FIELDS: gl.constexpr = jobs.shape[0] // (STAGES + 2)
    place = turn % (STAGES + 2)
    job = ()
    for field in gl.static_range(FIELDS):
        job = job + (gl.max(jobs.index(place * FIELDS + field).load(of_group), 0),)  # type: ignore[assignment]  # noqa: RUF005
    return job


@gluon.jit
def packed(tile, dtype: gl.constexpr):
    """Return a warp group's tile of float32, rounded to a 16-bit dtype, with two neighbors of a row in 32 bits.

    (As a tensor of 16-bit elements, each would take a register while a loop keeps it.)
    """
    gl.static_assert(dtype == gl.bfloat16 or dtype == gl.float16)
    convert: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    first, second = tile.reshape((tile.shape[0], tile.shape[1] // 2, 2)).split()
    return gl.inline_asm_elementwise(convert, "=r,f,f", [first, second], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _unpacked(pairs, dtype: gl.constexpr):
    """Return the 16-bit tile of a warp group that is `packed` into pairs."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 2 * pairs.shape[1], 16]
    )
    first = (pairs & 0xFFFF).to(gl.uint16).to(dtype, bitcast=True)
    second = (pairs >> 16).to(gl.uint16).to(dtype, bitcast=True)
    tile = gl.join(first, second).reshape((pairs.shape[0], 2 * pairs.shape[1]))
    return gl.convert_layout(tile, layout, assert_trivial=True)


@gluon.jit
def _halves(tile, DIM: gl.constexpr):
    """Return the halves of a warp group's tile, by rows (DIM = 0) or columns (1); every value stays in its thread."""
    ROWS: gl.constexpr = tile.shape[0] // (2 - DIM)
    COLUMNS: gl.constexpr = tile.shape[1] // (1 + DIM)
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16]
    )
    if DIM == 0:
        first, second = tile.reshape((2, ROWS, COLUMNS)).permute((1, 2, 0)).split()
    else:
        first, second = tile.reshape((ROWS, 2, COLUMNS)).permute((0, 2, 1)).split()
    first = gl.convert_layout(first, layout, assert_trivial=True)
    second = gl.convert_layout(second, layout, assert_trivial=True)
    return first, second


@gluon.jit
def buffers_of(tiles, CONSUMER: gl.constexpr, BUFFERS: gl.constexpr):
    """Return the BUFFERS tiles in shared memory that belong to warp group number CONSUMER, as a tuple."""
    held = ()
    for place in gl.static_range(BUFFERS):
        held = held + (tiles.index(CONSUMER * BUFFERS + place),)  # type: ignore[assignment]  # noqa: RUF005
    return held


@gluon.jit
def store_box(tile, desc, held, place, row, col):
    """Store a warp group's tile by TMA, at (*place, row, col) of a descriptor.

    It passes through `held`, a tuple of buffers in shared memory, in pieces of their size: with two buffers, one is
    stored while the other is written. The number of pieces is a multiple of the number of buffers.
    """
    PIECES: gl.constexpr = tile.shape[0] * tile.shape[1] // (held[0].shape[0] * held[0].shape[1])
    for piece in gl.static_range(PIECES):
        _store_piece(tile, desc, held, place, row, col, piece, 0)


@gluon.jit
def store_pieces(pairs, desc, held, place, row, col, first, end):
    """Store those pieces of a `packed` tile (see `store_box`) whose numbers are at least `first` and below `end`."""
    PIECES: gl.constexpr = 2 * pairs.shape[0] * pairs.shape[1] // (held[0].shape[0] * held[0].shape[1])
    for piece in gl.static_range(PIECES):
        if (piece >= first) & (piece < end):
            _store_piece(_unpacked(pairs, held[0].dtype), desc, held, place, row, col, piece, 0)


@gluon.jit
def _store_piece(tile, desc, held, place, row, col, PIECE: gl.constexpr, FIRST: gl.constexpr):
    """Store piece number PIECE of a tile whose first piece has the number FIRST."""
    ROWS: gl.constexpr = held[0].shape[0]
    COLUMNS: gl.constexpr = held[0].shape[1]
    HALF: gl.constexpr = FIRST + tile.shape[0] * tile.shape[1] // (2 * ROWS * COLUMNS)
    if tile.shape[1] > COLUMNS:
        left, right = _halves(tile, 1)
        if PIECE < HALF:
            _store_piece(left, desc, held, place, row, col, PIECE, FIRST)
        else:
            _store_piece(right, desc, held, place, row, col + tile.shape[1] // 2, PIECE, HALF)
    elif tile.shape[0] > ROWS:
        upper, lower = _halves(tile, 0)
        if PIECE < HALF:
            _store_piece(upper, desc, held, place, row, col, PIECE, FIRST)
        else:
            _store_piece(lower, desc, held, place, row + tile.shape[0] // 2, col, PIECE, HALF)
    else:
        piece = held[PIECE % len(held)]
        tma.store_wait(len(held) - 1)  # until the previous content of this buffer is stored
        piece.store(tile)
        fence_async_shared()
        if len(desc.block_shape) == 3:
            store_tile(desc, [place, row, col], piece.reshape([1, ROWS, COLUMNS]))
        else:
            store_tile(desc, [place[0], place[1], row, col], piece.reshape([1, 1, ROWS, COLUMNS]))
