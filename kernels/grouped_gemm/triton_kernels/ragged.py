"""TMA descriptors over rows sorted by group, whose boxes end where a group ends.

TMA clips a box only at the end of a dimension, but a group ends in the middle of one. So the rows get three dimensions:
x, whose end is at 2^30; y, which moves to the end of any group; and z, which subtracts the 2^30 rows of x again. The
address of (z, y, x) = (2^30, end, 2^30 - end + row) is

    2^30 * (2^34 - stride) + end * stride + (2^30 - end + row) * stride = row * stride   (mod 2^64 bytes),

and x is past its end exactly if row >= end: such rows load as zeros and are not stored. (Triton's own ragged_tma.py
uses the same idea. The interpreter's 64-bit addresses wrap around too.)
"""

from __future__ import annotations

import triton
import triton.language as tl

FAR = tl.constexpr(2**30)
MOST = tl.constexpr(2**31 - 1)


@triton.jit
def ragged_descriptor(ptr, columns, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """Return a descriptor of (rows, columns), for `load_ragged` and `store_ragged`."""
    stride = columns.to(tl.int64)
    return tl.make_tensor_descriptor(
        ptr,
        [MOST, MOST, FAR, columns],
        [2**34 - stride, stride, stride, 1],
        [1, 1, BLOCK_ROWS, BLOCK_COLUMNS],
    )


@triton.jit
def load_ragged(descriptor, row, row_end, column, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """Load the box at (row, column), with zeros from `row_end` on and past the last column."""
    box = descriptor.load([FAR, row_end, row - row_end + FAR, column])
    return box.reshape(BLOCK_ROWS, BLOCK_COLUMNS)


@triton.jit
def store_ragged(descriptor, row, row_end, column, tile, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """Store the rows of the tile before `row_end`, and its columns up to the last one."""
    descriptor.store([FAR, row_end, row - row_end + FAR, column], tile.reshape(1, 1, BLOCK_ROWS, BLOCK_COLUMNS))
