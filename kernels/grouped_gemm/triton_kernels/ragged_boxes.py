"""The boxes of ragged.py in Gluon: of rows sorted by group, which end where a group ends."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...warp_jobs import fence_async_shared, halves, load_tile, store_tile, tma
from .ragged import FAR

STORED = gl.constexpr(64 * 128)  # elements of its tile that a group of warps stores at a time


@gluon.jit
def load_ragged(desc, row, row_end, column, is_full, held):
    """Start a TMA load of the box at (row, column) into `held`, with zeros from `row_end` on and past the last column.

    `held` is shared memory of the box's shape; the load completes on the barrier `is_full`.
    """
    box = held.reshape([1, 1, held.shape[0], held.shape[1]])
    load_tile(desc, [FAR, row_end, row - row_end + FAR, column], is_full, box)


@gluon.jit
def store_ragged(tile, desc, held, row, row_end, column):
    """Store a tile at (row, column) by TMA, without rows from `row_end` on and columns past the last one.

    The tile passes through `held`, shared memory whose number of columns is stored at a time.
    """
    if held.shape[1] < tile.shape[1]:
        left, right = halves(tile)
        store_ragged(left, desc, held, row, row_end, column)
        store_ragged(right, desc, held, row, row_end, column + tile.shape[1] // 2)
    else:
        tma.store_wait(0)  # until the previous contents of `held` are stored
        held.store(tile)
        fence_async_shared()
        box = held.reshape([1, 1, held.shape[0], held.shape[1]])
        store_tile(desc, [FAR, row_end, row - row_end + FAR, column], box)
