"""Copy matrices into transposed storage, tile by tile; PyTorch's copy reads or writes single elements."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from ....runtime.launching.launcher import Launcher

if TYPE_CHECKING:
    import torch

_BLOCK = 64  # rows and columns of one program's tile
_ALIGNMENT = 4  # elements of float32 in 16 bytes
_UNSPECIALIZED = ["rows", "columns", "ld"]


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def turn_kernel(
    x_ptr,  # (batch, rows, columns), rows `ld` elements apart
    y_ptr,  # (batch, columns, rows), contiguous
    rows,
    columns,
    ld,
    ALIGNED: tl.constexpr,  # all three are multiples of 4: a thread moves 16 bytes
    BLOCK: tl.constexpr,
):
    """Transpose one tile of one matrix."""
    if ALIGNED:
        rows = rows // 4 * 4
        columns = columns // 4 * 4
        ld = ld // 4 * 4
    x_ptr += tl.program_id(1).to(tl.int64) * rows * ld
    y_ptr += tl.program_id(1).to(tl.int64) * rows * columns
    column_blocks = tl.cdiv(columns, BLOCK)
    row = tl.program_id(0) // column_blocks * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(0) % column_blocks * BLOCK + tl.arange(0, BLOCK)
    within = (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.load(x_ptr + row.to(tl.int64)[:, None] * ld + column[None, :], within)
    tl.store(y_ptr + column.to(tl.int64)[:, None] * rows + row[None, :], tl.trans(x), tl.trans(within))


_launch = Launcher(turn_kernel)


def turned_copy(x: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of x.mT.

    Args:
        x: (batch, rows, columns) float32, with contiguous rows at equal distances throughout the batch.
    """
    batch, rows, columns = x.shape
    y, ld = x.new_empty(batch, columns, rows), x.stride(-2)
    _launch(
        (-(-rows // _BLOCK) * -(-columns // _BLOCK), batch, 1),
        (x, y),
        (rows, columns, ld),
        ALIGNED=not any(size % _ALIGNMENT for size in (rows, columns, ld)),
        BLOCK=_BLOCK,
    )
    return y
