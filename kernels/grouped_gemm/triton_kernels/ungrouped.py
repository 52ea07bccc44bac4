"""Write zeros to rows that belong to no group because the group sizes sum to less than the number of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from ....runtime.launching.launcher import Launcher
from ..space import cdiv
from .sorting import load_permuted
from .tiles import load_tile, load_tile_count

if TYPE_CHECKING:
    import torch

    from .tiles import TileMap

_ROWS, _COLUMNS = 16, 256  # the block that a program stores at a time
_PROGRAMS = 256  # an upper limit: there is rarely anything to store, and a program then reads three integers and ends


@triton.jit(do_not_specialize=["rows", "groups", "width8"])
def zero_ungrouped_kernel(
    y_ptr,  # (rows, width)
    map_ptr,  # a TileMap's entries
    indices_ptr,  # (rows,), or None: the row of y of each sorted row
    rows,
    groups,
    width8,  # width // 8
    TILE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Store zeros in the sorted rows after the map's last tile, which ends where the last group ends."""
    width = width8 * 8
    tiles = load_tile_count(map_ptr, TILE)
    _, _, end = load_tile(map_ptr, tl.maximum(tiles - 1, 0), rows, groups, TILE)
    end = tl.where(tiles > 0, end, 0)
    columns = tl.arange(0, BLOCK_COLUMNS)
    zeros = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), y_ptr.dtype.element_ty)
    for start in range(end + tl.program_id(0) * BLOCK_ROWS, rows, tl.num_programs(0) * BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)
        target, inside = load_permuted(indices_ptr, row, row < rows, rows)
        for column in range(0, width, BLOCK_COLUMNS):
            within = inside[:, None] & (column + columns < width)[None, :]
            tl.store(y_ptr + target[:, None] * width + (column + columns)[None, :], zeros, within)


_launch = Launcher(zero_ungrouped_kernel)


def zero_ungrouped(y: torch.Tensor, tile_map: TileMap, indices: torch.Tensor | None = None) -> None:
    """Zero the rows of y that belong to no group, on the device, without waiting for it.

    Args:
        y: (rows, width), width a multiple of 8.
        tile_map: The map of the group sizes.
        indices: (rows,), the positions in y of the sorted rows; None if y is sorted.
    """
    rows, width = y.shape
    if rows:
        _launch(
            (min(cdiv(rows, _ROWS), _PROGRAMS), 1, 1),
            (y, tile_map.entries, indices),
            (rows, tile_map.groups, width // 8),
            TILE=16,
            BLOCK_ROWS=_ROWS,
            BLOCK_COLUMNS=_COLUMNS,
        )
