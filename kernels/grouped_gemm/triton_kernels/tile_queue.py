"""Tiles from a counter: the loading warp takes them, and the multiplying groups read their numbers from a queue.

The counter is in the tile map's header, and the queue in shared memory. The queue has STAGES + 2 places: the loading
warp is at most STAGES steps ahead, and a tile has at least one step. So when it writes to a place again, the groups
have read and multiplied the tile whose number was there.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...warp_jobs import mbarrier
from .tiles import COUNTER


@gluon.jit
def tile_queue(QUEUE: gl.constexpr):
    """Return a queue with QUEUE places: (tile numbers, barriers, each complete once its place is written)."""
    numbers = gl.allocate_shared_memory(gl.int32, [QUEUE, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    written = gl.allocate_shared_memory(gl.int64, [QUEUE, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(QUEUE):
        mbarrier.init(written.index(place), count=1)
    return numbers, written


@gluon.jit
def take_tile(map_ptr, tiles):
    """Return the program's next tile, at least `tiles` if there are no more. Call it once for each tile before that."""
    taken = gl.atomic_add(map_ptr + COUNTER, 1, sem="relaxed")
    # One is added for each tile, so this is the last addition of the launch: zero for the next one.
    if taken == tiles - 1:
        gl.store(map_ptr + COUNTER, 0)
    return gl.num_programs(0) + taken


@gluon.jit
def put_tile(queue, turn, QUEUE: gl.constexpr, tile):
    """Append a tile's number to the queue, as number `turn`."""
    numbers, written = queue
    of_warp: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    place = turn % QUEUE
    numbers.index(place).store(gl.full([1], tile, gl.int32, of_warp))
    mbarrier.arrive(written.index(place), count=1)


@gluon.jit
def get_tile(queue, turn, QUEUE: gl.constexpr):
    """Wait for number `turn` of the queue, and return it."""
    numbers, written = queue
    of_group: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    place = turn % QUEUE
    mbarrier.wait(written.index(place), (turn // QUEUE) & 1)
    return gl.max(numbers.index(place).load(of_group), 0)
