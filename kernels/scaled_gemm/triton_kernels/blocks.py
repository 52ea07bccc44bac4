"""The blocks of 128 rows in which dW's operands are stored, and the scales of their columns.

Both operands are transposed, (columns, rows), and padded so that 128 of their columns, a block, never hold rows of two
groups. Rows [row, row + 128) of a group, where row is a multiple of 128 rows from the group's first one, are block
row // 128 + group. A group of s rows from row r on takes ceil(s / 128) blocks from r // 128 + group on, and the next
group begins at (r + s) // 128 + group + 1, which is never less than r // 128 + ceil(s / 128) + group. So the position
depends on the row and the group alone, and rows // 128 + groups blocks are enough for any group sizes. Blocks in
between are never written nor read.
"""

from __future__ import annotations

import triton
import triton.language as tl

SCALED = tl.constexpr(128)  # rows, or columns, that share a scale
PADDED = tl.constexpr(256)  # the scales of columns are stored in rows of a multiple of this many
_TINY = tl.constexpr(1.1754943508222875e-38)  # the smallest normal float32


@triton.jit
def scale_of(largest, LARGEST: tl.constexpr):
    """Return the scale of values of at most this magnitude, so that the scaled ones reach LARGEST; see quantize.py."""
    scale = largest / LARGEST
    return tl.where(scale < _TINY, 1.0, scale)


@triton.jit
def block_of(row, group):
    """Return the block of the transposed copy that has these rows of a group; see the module's docstring."""
    return row // SCALED + group


@triton.jit
def padded_columns(N):
    """Return N rounded up to a multiple of PADDED: the length of a row of column scales, one per column."""
    return tl.cdiv(N, PADDED) * PADDED
