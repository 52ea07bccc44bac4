"""The tile map: the rows and group of each tile, built on the device from the group sizes.

Nothing here synchronizes with the GPU. One launch builds the map for all BLOCK_M at once, and the chunks of rows over
which dW sums, so one map serves all configs, all projections of a layer and the backward pass.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl

from ....runtime.launching.launcher import Launcher
from ..space import BLOCKS_M

if TYPE_CHECKING:
    import torch

    from ....runtime.launching.launcher import PreparedLaunch

# The map begins with the number of tiles for each BLOCK_M, the number of chunks and the number of split groups, padded
# to 8 entries. Then follow per tile, by BLOCK_M, (group, the group's first row, its end row, the tile's index in the
# group); (group, first row, end row, slot) per chunk; and (group, first slot, slots) per split group.
_HEADER = tl.constexpr(8)
_TILE = tl.constexpr(4)
_CHUNK = tl.constexpr(4)
_SPLIT = tl.constexpr(3)
_BLOCKS = tl.constexpr(len(BLOCKS_M))
_LANES = 128  # more cost more than another step: a lane divides several times in 64 bits, with or without a group
_CHUNK_STEP = tl.constexpr(128)


@triton.jit
def tile_capacity(rows, groups):
    """Return an upper bound on the number of M tiles, for any BLOCK_M and group sizes that sum to at most `rows`.

    There are at most rows / 16 full tiles, as 16 is the smallest BLOCK_M, and each group adds at most one partial tile.
    """
    return tl.cdiv(rows, 16) + groups


@triton.jit
def chunk_capacity(rows, groups, chunk_rows):
    """Return an upper bound on the number of chunks of at most `chunk_rows` rows, for any group sizes."""
    return rows // chunk_rows + groups


@triton.jit
def slot_capacity(rows, chunk_rows):
    """Return an upper bound on the number of slots, which hold the partial sums of groups split into chunks.

    A split group of s > chunk_rows rows needs ceil(s / chunk_rows) slots, fewer than 2 * s / chunk_rows. Over all
    groups, whose sizes sum to at most `rows`, that is fewer than 2 * rows / chunk_rows.
    """
    return 2 * (rows // chunk_rows)


@triton.jit
def tiles_offset(BLOCK_M: tl.constexpr, rows, groups):
    """Return the offset in the map of the tiles for one BLOCK_M; 512 gives the offset of the chunks after all tiles."""
    return _HEADER + block_index(BLOCK_M) * tile_capacity(rows, groups) * _TILE


@triton.jit
def block_index(BLOCK_M: tl.constexpr):
    """Return the index of a BLOCK_M: 0 for 16, 1 for 32, ... 5 for 512."""
    which: tl.constexpr = (
        (BLOCK_M // 32 > 0) + (BLOCK_M // 64 > 0) + (BLOCK_M // 128 > 0) + (BLOCK_M // 256 > 0) + (BLOCK_M // 512 > 0)
    )
    return which


@triton.jit(do_not_specialize=["rows", "groups", "chunk_rows"])
def tile_map_kernel(group_sizes_ptr, map_ptr, rows, groups, chunk_rows, LANES: tl.constexpr):
    """Write group g's tiles for BLOCK_M = 16 << b in program (g, b), and its chunks in program (g, 5).

    Negative sizes count as 0. If sizes sum to more than `rows`, tiles and chunks end at `rows` and the map at its
    capacity, so nothing is ever read or written out of bounds; if they sum to less, the remaining rows belong to no
    tile.
    """
    group = tl.program_id(0)
    which = tl.program_id(1)
    lanes = tl.arange(0, LANES)
    size = clamped(tl.load(group_sizes_ptr + group), rows)
    n_chunks = n_chunks_of(size, chunk_rows)
    block_m = 16 << which

    # 64 bits, because invalid sizes may sum to more than 2^31.
    row = tl.zeros((), tl.int64)
    tile = tl.zeros((), tl.int64)
    chunk = tl.zeros((), tl.int64)
    slot = tl.zeros((), tl.int64)
    rank = tl.zeros((), tl.int64)
    split = tl.zeros((), tl.int64)
    for start in range(0, groups, LANES):
        other = start + lanes
        sizes = clamped(tl.load(group_sizes_ptr + other, other < groups, other=0), rows).to(tl.int64)
        before = other < group
        row += tl.sum(tl.where(before, sizes, 0))
        tile += tl.sum(tl.where(before, (sizes + block_m - 1) // block_m, 0))
        # Chunks are in descending order of their group's size, so that the longest work starts first.
        longer = ((sizes > size) | ((sizes == size) & before)) & (other < groups)
        chunks = tl.where(longer, n_chunks_of(sizes, chunk_rows), 0)
        chunk += tl.sum(chunks)
        slot += tl.sum(tl.where(chunks > 1, chunks, 0))
        rank += tl.sum(longer.to(tl.int64))
        split += tl.sum((chunks > 1).to(tl.int64))
    row = tl.minimum(row, rows)
    row_end = tl.minimum(row + size, rows)

    if which < _BLOCKS:
        n_tiles = (size + block_m - 1) // block_m
        capacity = tile_capacity(rows, groups)
        entries_ptr = map_ptr + _HEADER + which * capacity * _TILE
        for start in range(0, n_tiles, LANES):
            i = start + lanes
            mask = (i < n_tiles) & (tile + i < capacity)
            entry_ptrs = entries_ptr + (tile + i) * _TILE
            tl.store(entry_ptrs, i * 0 + group, mask)
            tl.store(entry_ptrs + 1, i * 0 + row, mask)
            tl.store(entry_ptrs + 2, i * 0 + row_end, mask)
            tl.store(entry_ptrs + 3, tl.minimum(i, tl.cdiv(row_end - row, block_m)), mask)
        if group == groups - 1:
            tl.store(map_ptr + which, tl.minimum(tile + n_tiles, capacity))
    else:
        capacity = chunk_capacity(rows, groups, chunk_rows)
        entries_ptr = map_ptr + tiles_offset(512, rows, groups)
        # Only sizes that sum to more than `rows` can need more slots than there are; the sums of those groups are
        # wrong.
        splits = (n_chunks > 1) & (slot + n_chunks <= slot_capacity(rows, chunk_rows))
        length = tl.cdiv(tl.cdiv(size, n_chunks), _CHUNK_STEP) * _CHUNK_STEP  # as even as possible
        for start in range(0, n_chunks, LANES):
            i = start + lanes
            mask = (i < n_chunks) & (chunk + i < capacity)
            entry_ptrs = entries_ptr + (chunk + i) * _CHUNK
            first = row + i.to(tl.int64) * length
            tl.store(entry_ptrs, i * 0 + group, mask)
            tl.store(entry_ptrs + 1, tl.minimum(first, row_end), mask)
            tl.store(entry_ptrs + 2, tl.minimum(first + length, row_end), mask)
            tl.store(entry_ptrs + 3, tl.where(splits, slot + i, -1), mask)
        if (n_chunks > 1) & (split < rows // chunk_rows):
            split_ptr = entries_ptr + capacity * _CHUNK + split * _SPLIT
            tl.store(split_ptr, group)
            tl.store(split_ptr + 1, slot)
            tl.store(split_ptr + 2, tl.where(splits, n_chunks, 0))
        if rank == groups - 1:
            tl.store(map_ptr + _BLOCKS, tl.minimum(chunk + n_chunks, capacity))
            tl.store(map_ptr + _BLOCKS + 1, tl.minimum(split + (n_chunks > 1), rows // chunk_rows))


@triton.jit
def clamped(sizes, rows):
    """Return group sizes limited to between 0 and `rows`."""
    return tl.minimum(tl.maximum(sizes, 0), rows)


@triton.jit
def n_chunks_of(sizes, chunk_rows):
    """Return the number of chunks of each group, at least 1: zeros must be written for an empty one too."""
    return tl.maximum((sizes + chunk_rows - 1) // chunk_rows, 1)


@triton.jit
def load_tile_count(map_ptr, BLOCK_M: tl.constexpr):
    """Load the number of M tiles for this BLOCK_M."""
    return tl.load(map_ptr + block_index(BLOCK_M))


@triton.jit
def load_tile(map_ptr, m_tile, rows, groups, BLOCK_M: tl.constexpr):
    """Load (group, first row, end row) of one M tile; the end is that of the whole group."""
    group, start, row_end, index = _load_entry(map_ptr, m_tile, rows, groups, BLOCK_M)
    return group, tl.minimum(start + index * BLOCK_M, row_end), row_end


@triton.jit
def load_tile_in_band(map_ptr, tile, n_tiles, rows, groups, GROUP_M, BLOCK_M: tl.constexpr):
    """Load (group, first row, end row, n_tile) of the tile with this linear id.

    The tiles of a group follow each other, in bands of GROUP_M of its M tiles (see `tile_position`). Tiles that exist
    only because sizes sum to more than `rows` have no rows, or are another of the group's tiles.
    """
    m_tile = tile // n_tiles
    group, start, row_end, index = _load_entry(map_ptr, m_tile, rows, groups, BLOCK_M)
    in_group = tile - (m_tile - index) * n_tiles
    m_tile, n_tile = tile_position(in_group, tl.cdiv(row_end - start, BLOCK_M), n_tiles, GROUP_M)
    return group, tl.minimum(start + m_tile * BLOCK_M, row_end), row_end, tl.minimum(n_tile, n_tiles - 1)


@triton.jit
def _load_entry(map_ptr, m_tile, rows, groups, BLOCK_M: tl.constexpr):
    """Load (group, the group's first row, its end row, the tile's index in the group) of one M tile."""
    entry_ptr = map_ptr + tiles_offset(BLOCK_M, rows, groups) + m_tile * _TILE
    return tl.load(entry_ptr), tl.load(entry_ptr + 1), tl.load(entry_ptr + 2), tl.load(entry_ptr + 3)


@triton.jit
def load_chunk_count(map_ptr):
    """Load the number of chunks, at least one per group."""
    return tl.load(map_ptr + _BLOCKS)


@triton.jit
def load_chunk(map_ptr, chunk, rows, groups):
    """Load (group, first row, end row, slot) of one chunk.

    The slot is the index of its partial sum, or -1 if the chunk is a whole group and so has the final sum.
    """
    entry_ptr = map_ptr + tiles_offset(512, rows, groups) + chunk * _CHUNK
    return tl.load(entry_ptr), tl.load(entry_ptr + 1), tl.load(entry_ptr + 2), tl.load(entry_ptr + 3)


@triton.jit
def load_chunk_steps(map_ptr, chunks, there, rows, groups, BLOCK_K: tl.constexpr):
    """Load for each of the given chunks its number of BLOCK_K steps, at least 1; 0 where the mask `there` is false."""
    entry_ptrs = map_ptr + tiles_offset(512, rows, groups) + chunks * _CHUNK
    row = tl.load(entry_ptrs + 1, there, other=0)
    row_end = tl.load(entry_ptrs + 2, there, other=0)
    return tl.where(there, tl.maximum(tl.cdiv(row_end - row, BLOCK_K), 1), 0)


@triton.jit
def load_split(map_ptr, split, rows, groups, chunk_rows):
    """Load (group, first slot, number of slots) of split group number `split`, or zeros if there are fewer of them."""
    chunks_ptr = map_ptr + tiles_offset(512, rows, groups)
    entry_ptr = chunks_ptr + chunk_capacity(rows, groups, chunk_rows) * _CHUNK + split * _SPLIT
    there = split < tl.load(map_ptr + _BLOCKS + 1)
    return (
        tl.load(entry_ptr, there, other=0),
        tl.load(entry_ptr + 1, there, other=0),
        tl.load(entry_ptr + 2, there, other=0),
    )


@triton.jit
def tile_position(tile, m_tiles, n_tiles, GROUP_M):
    """Return (m_tile, n_tile) of a linear tile id.

    The order is bands of GROUP_M M tiles, M fastest within a band, so that concurrent programs share tiles of w in L2.
    """
    band = GROUP_M * n_tiles
    first_m = (tile // band) * GROUP_M
    height = tl.maximum(tl.minimum(m_tiles - first_m, GROUP_M), 1)  # 1 if there is no such band
    within = tile % band
    return first_m + within % height, within // height


_launch = Launcher(tile_map_kernel)


@cache
def _of_dw() -> Launcher:
    """Return the launcher of the kernel that builds dW's map."""
    from .dw_map import dw_map_kernel

    return Launcher(dw_map_kernel)


@lru_cache(maxsize=4096)  # calls of a layer have the same sizes
def prepared_map(rows: int, groups: int, chunk_rows: int, long_rows: int = 0) -> tuple[int, PreparedLaunch]:
    """Return the length of a tile map for these sizes, and a function that launches its computation.

    The function takes (group sizes, map). With `long_rows` there is a second map.
    """
    size, launcher, kinds = _size(rows, groups, rows // chunk_rows), _launch, len(BLOCKS_M) + 1
    numbers: tuple[int, ...] = (rows, groups, chunk_rows)
    if long_rows:
        second = second_map(rows, groups, chunk_rows)
        size, launcher, kinds = second + _size(rows, groups, rows // long_rows), _of_dw(), kinds + 1
        numbers += (long_rows, second)
    return size, launcher.prepare((groups, kinds, 1), numbers, LANES=_LANES, num_warps=2)


def second_map(rows: int, groups: int, chunk_rows: int) -> int:
    """Return the entry at which the second map begins, at a multiple of 16 bytes."""
    return -(-_size(rows, groups, rows // chunk_rows) // 4) * 4


def _size(rows: int, groups: int, splits: int) -> int:
    """Return the length of a tile map of at most `splits` split groups."""
    tiles = -(-rows // BLOCKS_M[0]) + groups
    return 8 + len(BLOCKS_M) * tiles * 4 + (splits + groups) * 4 + splits * 3


def routing_shape(rows: int, groups: int) -> tuple[int, int]:
    """Return the shape of a routing: a tile map without split groups, and as its last row the group sizes (groups,)."""
    return -(-_size(rows, groups, 1) // (4 * groups)) * 4 + 1, groups  # so that sizes begin at a multiple of 16 bytes


def sizes_of(group_sizes: torch.Tensor) -> torch.Tensor:
    """Return the group sizes (groups,) that a routing contains, or the argument itself if it is group sizes."""
    return group_sizes if group_sizes.dim() == 1 else group_sizes[-1]


class TileMap(NamedTuple):
    """The tiles and chunks of one routing's groups, on the device, for any config.

    Build the map once per layer with `TileMap.build`.
    """

    entries: torch.Tensor  # int32: header, tiles of every BLOCK_M, chunks, split groups
    rows: int
    groups: int
    chunk_rows: int  # the most rows of a group that dW sums at a time
    long_rows: int = 0  # those in the second map, for kernels that take tiles from a counter; 0: there is none

    @classmethod
    def build(cls, group_sizes: torch.Tensor, rows: int, chunk_rows: int | None = None, long_rows: int = 0) -> TileMap:
        """Return the tile map of group sizes: launch the kernel that builds it, without waiting for it.

        Args:
            group_sizes: (groups,) int32; or int64, which one more small kernel converts; or a routing
                (`routing_shape`), whose own map is used if it has these chunks.
            rows: The number of rows.
            chunk_rows: The maximum number of rows per chunk (`space.chunk_rows`); if omitted, no group is split.
            long_rows: The maximum number of rows per chunk of a second map in the same entries, for kernels that take
                tiles from a counter; 0 for no second map.
        """
        import torch

        groups, chunk_rows = group_sizes.shape[-1], chunk_rows or max(rows, 1)
        if group_sizes.dim() == 2:
            if chunk_rows == max(rows, 1) and not long_rows:
                return cls(group_sizes, rows, groups, chunk_rows)
            group_sizes = sizes_of(group_sizes)
        if group_sizes.dtype != torch.int32:
            group_sizes = group_sizes.to(torch.int32)
        size, launch = prepared_map(rows, groups, chunk_rows, long_rows)
        entries = group_sizes.new_empty(size)
        launch((group_sizes, entries))
        return cls(entries, rows, groups, chunk_rows, long_rows)

    @staticmethod
    def has_binary() -> bool:
        """Return whether the kernel that builds maps has been compiled in this process."""
        return _launch.is_known

    def second(self, entries: torch.Tensor) -> TileMap:
        """Return the map with chunks of `long_rows` rows, which lies behind this one in the same `entries`."""
        start = second_map(self.rows, self.groups, self.chunk_rows)
        return TileMap(entries[start:], self.rows, self.groups, self.long_rows)

    @property
    def most_chunks(self) -> int:
        """The maximum number of chunks that the map can hold."""
        return self.rows // self.chunk_rows + self.groups

    @property
    def most_splits(self) -> int:
        """An upper bound for the number of groups that are split, which are those of more than `chunk_rows` rows."""
        return self.rows // self.chunk_rows if self.rows > self.chunk_rows else 0

    @property
    def slots(self) -> int:
        """The number of partial sums to allocate; a split group needs at most two per `chunk_rows` rows that it has."""
        return 2 * self.most_splits
