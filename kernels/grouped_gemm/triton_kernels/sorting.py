"""A kernel that sorts rows by group, for permuted operands of dW."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from ....runtime.launching.launcher import Launcher
from ..space import cdiv

if TYPE_CHECKING:
    import torch

_ROWS, _COLUMNS = 16, 256  # the block of one program


@triton.jit
def load_permuted(indices_ptr, rows, inside, limit):
    """Return (the permuted position of each sorted row, whether it is valid); without indices, the rows themselves.

    A position is valid if `inside` is true for its row and, with indices, it is at least 0 and less than `limit`.
    """
    permuted = rows
    if indices_ptr is not None:
        permuted = tl.load(indices_ptr + rows, inside, other=0)
        inside = inside & (permuted >= 0) & (permuted < limit)  # never out of bounds, whatever the indices are
    return permuted.to(tl.int64), inside


@triton.jit(do_not_specialize=["x_rows", "rows", "width8", "topk"])
def sorted_rows_kernel(
    x_ptr,  # (x_rows, width)
    scale_ptr,  # (rows,) in the permuted order, or None
    indices_ptr,  # (rows,)
    y_ptr,  # (rows, width)
    x_rows,
    rows,
    width8,  # width // 8
    topk,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Copy the row of x that belongs at each sorted position, times its scale."""
    width = width8 * 8
    column_blocks = tl.cdiv(width, BLOCK_COLUMNS)
    row = tl.program_id(0) // column_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(0) % column_blocks * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    permuted, inside = load_permuted(indices_ptr, row, row < rows, rows)
    source = permuted.to(tl.int32) // topk
    inside = inside & (source < x_rows)
    x_ptrs = x_ptr + source.to(tl.int64)[:, None] * width + column[None, :]
    x = tl.load(x_ptrs, inside[:, None] & (column < width)[None, :], other=0.0)
    if scale_ptr is not None:
        x = x.to(tl.float32) * tl.load(scale_ptr + permuted, inside, other=0.0).to(tl.float32)[:, None]
    y_ptrs = y_ptr + row.to(tl.int64)[:, None] * width + column[None, :]
    within = (row < rows)[:, None] & (column < width)[None, :]
    # Evicted first, to leave the L2 to the rows of x, each of which is read topk times.
    tl.store(y_ptrs, x.to(y_ptr.dtype.element_ty), within, eviction_policy="evict_first")


_launch = Launcher(sorted_rows_kernel)


def sorted_rows(
    x: torch.Tensor, indices: torch.Tensor, topk: int = 1, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Return y[i] = x[indices[i] // topk], times scale[indices[i]] if there is a scale; zero for invalid indices.

    Args:
        x: (rows / topk, width), width a multiple of 8.
        indices: (rows,).
        topk: The number of sorted rows per row of x.
        scale: (rows,), or None.

    Returns:
        y, (rows, width).
    """
    import torch

    rows, width = len(indices), x.shape[1]
    y = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows:
        _launch(
            (cdiv(rows, _ROWS) * cdiv(width, _COLUMNS), 1, 1),
            (x, scale, indices, y),
            (len(x), rows, width // 8, topk),
            BLOCK_ROWS=_ROWS,
            BLOCK_COLUMNS=_COLUMNS,
        )
    return y
