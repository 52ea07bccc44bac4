"""The tile map: which rows of which group each M tile holds, built on the device from the group sizes.

Nothing here waits for the GPU. One launch makes the map for every BLOCK_M at once, so one map serves all
configs, all projections of a layer and the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from .space import BLOCKS_M

if TYPE_CHECKING:
    import torch

#: The map starts with one tile count a BLOCK_M (padded to 8), then (group, first row, end row) a tile.
_HEADER = tl.constexpr(8)
_ENTRY = tl.constexpr(3)
_CHUNK = 1024


@triton.jit
def tile_capacity(rows, groups):
    """The most tiles there can be, for any BLOCK_M and any sizes: every group adds at most one ragged tile."""
    return tl.cdiv(rows, 16) + groups


@triton.jit(do_not_specialize=["rows", "groups"])
def tile_map_kernel(group_sizes_ptr, tiles_ptr, rows, groups, CHUNK: tl.constexpr):
    """Program (g, b) writes group g's entries for BLOCK_M = 16 << b.

    Sizes that are negative count as 0. Where they sum to more than `rows`, tiles end at `rows` and the map at
    its capacity, so nothing is ever read or written out of bounds; where they sum to less, the rest of the
    rows belongs to no tile.
    """
    group = tl.program_id(0)
    which = tl.program_id(1)
    block_m = 16 << which
    lanes = tl.arange(0, CHUNK)

    row = tl.zeros((), tl.int32)
    tile = tl.zeros((), tl.int32)
    for start in range(0, group, CHUNK):
        before = start + lanes
        sizes = tl.maximum(tl.load(group_sizes_ptr + before, before < group, other=0), 0)
        row += tl.sum(sizes)
        tile += tl.sum((sizes + block_m - 1) // block_m)
    size = tl.maximum(tl.load(group_sizes_ptr + group), 0)
    n_tiles = (size + block_m - 1) // block_m

    capacity = tile_capacity(rows, groups)
    entries_ptr = tiles_ptr + _HEADER + which * capacity * _ENTRY
    row_end = tl.minimum(row + size, rows)
    for start in range(0, n_tiles, CHUNK):
        i = start + lanes
        mask = (i < n_tiles) & (tile + i < capacity)
        entry_ptrs = entries_ptr + (tile + i) * _ENTRY
        tl.store(entry_ptrs, i * 0 + group, mask)
        tl.store(entry_ptrs + 1, row + i * block_m, mask)
        tl.store(entry_ptrs + 2, i * 0 + row_end, mask)
    if group == groups - 1:
        tl.store(tiles_ptr + which, tl.minimum(tile + n_tiles, capacity))


@triton.jit
def load_tile(tiles_ptr, m_tile, rows, groups, BLOCK_M: tl.constexpr):
    """(group, first row, end row) of one M tile."""
    which: tl.constexpr = (BLOCK_M // 32 > 0) + (BLOCK_M // 64 > 0) + (BLOCK_M // 128 > 0) + (BLOCK_M // 256 > 0)
    entry_ptr = tiles_ptr + _HEADER + (which * tile_capacity(rows, groups) + m_tile) * _ENTRY
    return tl.load(entry_ptr), tl.load(entry_ptr + 1), tl.load(entry_ptr + 2)


@triton.jit
def load_tile_count(tiles_ptr, BLOCK_M: tl.constexpr):
    """How many M tiles there are at this BLOCK_M."""
    which: tl.constexpr = (BLOCK_M // 32 > 0) + (BLOCK_M // 64 > 0) + (BLOCK_M // 128 > 0) + (BLOCK_M // 256 > 0)
    return tl.load(tiles_ptr + which)


@triton.jit
def tile_position(tile, m_tiles, n_tiles, GROUP_M):
    """(m_tile, n_tile) of a linear tile id: bands of GROUP_M M tiles, M fastest within a band, so that
    concurrent programs share w tiles in L2."""
    band = GROUP_M * n_tiles
    first_m = (tile // band) * GROUP_M
    height = tl.minimum(m_tiles - first_m, GROUP_M)
    within = tile % band
    return first_m + within % height, within // height


@dataclass(frozen=True)
class TileMap:
    """The device-built map of one routing, good for any config. Make it once a layer with `TileMap.build`."""

    tiles: torch.Tensor  # int32, the header and the entries of every BLOCK_M
    rows: int
    groups: int

    @classmethod
    def build(cls, group_sizes: torch.Tensor, rows: int) -> TileMap:
        """Launches the kernel that makes the map; does not wait for it. `group_sizes` is (groups,) int32."""
        import torch

        groups = group_sizes.numel()
        capacity = triton.cdiv(rows, BLOCKS_M[0]) + groups
        tiles = torch.empty(8 + len(BLOCKS_M) * capacity * 3, dtype=torch.int32, device=group_sizes.device)
        tile_map_kernel[(groups, len(BLOCKS_M))](group_sizes, tiles, rows, groups, CHUNK=_CHUNK, num_warps=4)
        return cls(tiles, rows, groups)
