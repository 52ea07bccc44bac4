"""Rows sorted by group by a kernel of their own: what dW does with a permuted operand before its product."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from ....runtime.launching.launcher import Launcher
from ..variants import cdiv

if TYPE_CHECKING:
    import torch

_ROWS, _COLUMNS = 16, 256  # of the block that a program holds


@triton.jit
def load_permuted(indices_ptr, rows, inside, limit):
    """(the permuted row of each sorted row, which of them are rows); the row itself where nothing is permuted."""
    permuted = rows
    if indices_ptr is not None:
        permuted = tl.load(indices_ptr + rows, inside, other=0)
        inside = inside & (permuted >= 0) & (permuted < limit)  # never out of bounds, whatever the indices
    return permuted.to(tl.int64), inside


@triton.jit(do_not_specialize=["x_rows", "rows", "width8", "topk"])
def sorted_rows_kernel(
    x_ptr,  # (x_rows, width)
    scale_ptr,  # (rows,), or None: permuted
    indices_ptr,  # (rows,)
    y_ptr,  # (rows, width)
    x_rows,
    rows,
    width8,  # width // 8
    topk,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
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
    # First to be evicted: the L2 has better use for the rows of x, each of which is read topk times.
    tl.store(y_ptrs, x.to(y_ptr.dtype.element_ty), within, eviction_policy="evict_first")


_launch = Launcher(sorted_rows_kernel)


def sorted_rows(
    x: torch.Tensor, indices: torch.Tensor, topk: int = 1, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """y[i] = x[indices[i] // topk], times scale[indices[i]] if there is a scale; zero where an index is no row's.

    x (rows / topk, width), width a multiple of 8; indices (rows,); scale (rows,); y (rows, width).
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
