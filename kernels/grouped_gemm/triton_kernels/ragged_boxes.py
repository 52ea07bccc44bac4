"""The boxes of ragged.py in Gluon: of rows sorted by group, which end where a group ends."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...warp_jobs import load_tile, store_box
from .ragged import FAR

STORED = gl.constexpr(64)  # rows and columns of its tile that a group of warps stores at a time


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

    The tile passes through `held` (see `store_box`).
    """
    store_box(tile, desc, held, (FAR, row_end), row - row_end + FAR, column)
