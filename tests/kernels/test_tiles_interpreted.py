"""The tile map: tiles by the book, and chunks that hold every row once, in the interpreter."""

from __future__ import annotations

import itertools

import pytest
import triton
import triton.language as tl
from foretune.kernels.grouped_gemm.triton_kernels.tiles import load_tile_count, load_tile_in_band

pytestmark = [pytest.mark.interpret, pytest.mark.large]

BLOCKS_M = (16, 32, 64, 128, 256)


def tile_capacity(sizes, rows):
    return -(-rows // 16) + len(sizes)


def tiles_of(sizes, rows, block_m):
    """(group, its first row, its end row, index in the group) of every M tile, by the book."""
    tiles, start = [], 0
    for group, size in enumerate(min(max(size, 0), rows) for size in sizes):
        begin, end = min(start, rows), min(start + size, rows)
        most = -(-(end - begin) // block_m)  # tiles past the last row are equal
        tiles += [(group, begin, end, min(index, most)) for index in range(-(-size // block_m))]
        start += size
    return tiles[: tile_capacity(sizes, rows)]


class Map:
    """A map made amid memory that is not its own, and read as it is said to be laid out."""

    def __init__(self, sizes, rows, chunk_rows, lanes=1024):
        import torch
        from foretune.kernels.grouped_gemm.triton_kernels.tiles import tile_map_kernel

        tiles, chunks, splits = tile_capacity(sizes, rows), rows // chunk_rows + len(sizes), rows // chunk_rows
        used = 8 + len(BLOCKS_M) * tiles * 4 + chunks * 4 + splits * 3
        memory = torch.full((1000 + used + 1000,), -7, dtype=torch.int32)
        self.entries = memory[1000 : 1000 + used]
        told = torch.tensor(sizes, dtype=torch.int32)
        tile_map_kernel[(len(sizes), len(BLOCKS_M) + 1)](told, self.entries, rows, len(sizes), chunk_rows, lanes)
        self.around = torch.cat([memory[:1000], memory[1000 + used :]]).unique().tolist()
        *self.tile_counts, chunk_count, split_count = self.entries[: len(BLOCKS_M) + 2].tolist()
        parts = iter(self.entries[8:].split([tiles * 4] * len(BLOCKS_M) + [chunks * 4, splits * 3]))
        self.tiles = [part.view(-1, 4).tolist() for part in itertools.islice(parts, len(BLOCKS_M))]
        self.chunks = next(parts).view(-1, 4)[:chunk_count].tolist()
        self.splits = next(parts).view(-1, 3)[:split_count].tolist()
        self.slots = 2 * (rows // chunk_rows)


MAPS = {
    "ragged": (37, 0, 1, 300, 0, 16, 129, 5),
    "one group": (77,),
    "one row each": (1,) * 7,
    "none": (0, 0, 0),
    "negative": (-3, 20, -1, 64),
    "too many rows": (90, 500, 2, 0, 77),
    "past 31 bits": (2**31 - 1, 2**31 - 1, 5, 2**31 - 1),
    "too few rows": (3, 0, 4),
    "many groups": (2, 0, 17) * 6,  # two blocks of groups, below
    "large group": (5, 600, 3),  # several blocks of tiles
}
ROWS = {"too many rows": 100, "too few rows": 50, "past 31 bits": 100}


def rows_of(name):
    return ROWS.get(name, sum(max(size, 0) for size in MAPS[name]))


@pytest.mark.parametrize(
    ("name", "lanes"), [*((name, 1024) for name in MAPS), ("many groups", 16), ("large group", 16)]
)
def test_the_tiles(name, lanes):
    sizes, rows = MAPS[name], rows_of(name)
    made = Map(sizes, rows, max(rows, 1), lanes)
    assert made.around == [-7]
    for block_m, count, entries in zip(BLOCKS_M, made.tile_counts, made.tiles, strict=True):
        book = tiles_of(sizes, rows, block_m)
        assert count == len(book)
        assert [tuple(entry) for entry in entries[:count]] == book
        assert all(entry == [-7] * 4 for entry in entries[count:])


@triton.jit
def write_tiles(map_ptr, out_ptr, n_tiles, rows, groups, band, BLOCK_M: tl.constexpr):
    for tile in range(load_tile_count(map_ptr, BLOCK_M) * n_tiles):
        group, row, row_end, n_tile = load_tile_in_band(map_ptr, tile, n_tiles, rows, groups, band, BLOCK_M)
        tl.store(out_ptr + 4 * tile, group)
        tl.store(out_ptr + 4 * tile + 1, row)
        tl.store(out_ptr + 4 * tile + 2, row_end)
        tl.store(out_ptr + 4 * tile + 3, n_tile)


def ordered(sizes, block_m, n_tiles, band):
    """(group, first row, end row, n_tile) of every tile of the output by the book: bands begin and end with a group."""
    order, start = [], 0
    for group, size in enumerate(sizes):
        tops = list(range(start, start + size, block_m))
        for first in range(0, len(tops), band):
            of_band = tops[first : first + band]
            order += [(group, top, start + size, n_tile) for n_tile in range(n_tiles) for top in of_band]
        start += size
    return order


@pytest.mark.parametrize("band", [1, 2, 8])
@pytest.mark.parametrize("name", ["ragged", "one group", "one row each", "none", "many groups", "large group"])
def test_tiles_of_the_output_are_in_bands_that_end_where_a_group_ends(name, band):
    import torch
    from foretune.kernels.grouped_gemm.triton_kernels.tiles import TileMap

    sizes, rows = MAPS[name], rows_of(name)
    tile_map = TileMap.build(torch.tensor(sizes, dtype=torch.int32), rows)
    for block_m, n_tiles in ((16, 1), (64, 3)):
        expected = ordered(sizes, block_m, n_tiles, band)
        out = torch.full((len(expected) + 5, 4), -7, dtype=torch.int32)
        write_tiles[(1,)](tile_map.entries, out, n_tiles, rows, len(sizes), band, block_m)
        assert [tuple(one) for one in out.tolist()] == expected + [(-7,) * 4] * 5


@pytest.mark.parametrize(("sizes", "rows"), [
    ((30, 60), 60), ((250, 256), 256), ((64, 256), 256), *((MAPS[name], rows) for name, rows in ROWS.items())
])  # fmt: skip
@pytest.mark.parametrize("band", [2, 8])
def test_tiles_of_sizes_that_sum_to_other_than_the_rows_stay_inside(sizes, rows, band):
    import torch
    from foretune.kernels.grouped_gemm.triton_kernels.tiles import TileMap

    clipped, start = [], 0
    for size in sizes:
        clipped.append(min(max(size, 0), rows - start))
        start += clipped[-1]
    tile_map = TileMap.build(torch.tensor(sizes, dtype=torch.int32), rows)
    for block_m, n_tiles in ((16, 3), (64, 3)):
        count = int(tile_map.entries[BLOCKS_M.index(block_m)]) * n_tiles
        out = torch.full((count, 4), -7, dtype=torch.int32)
        write_tiles[(1,)](tile_map.entries, out, n_tiles, rows, len(sizes), band, block_m)
        found = [tuple(one) for one in out.tolist()]
        with_rows = {one for one in found if one[1] < one[2]}
        assert with_rows == set(ordered(clipped, block_m, n_tiles, band))
        assert all(0 <= row <= row_end <= rows and 0 <= n_tile < n_tiles for _, row, row_end, n_tile in found)


@pytest.mark.parametrize("name", MAPS)
def test_the_second_map_has_longer_chunks_and_a_counter_at_zero(name):
    import torch
    from foretune.kernels.grouped_gemm.triton_kernels.tiles import TileMap

    rows, sizes = rows_of(name), torch.tensor(MAPS[name], dtype=torch.int32)
    short, long = (TileMap.build(sizes, rows, chunk) for chunk in (128, 256))
    both = TileMap.build(sizes, rows, 128, 256)
    assert both[1:] == (rows, len(sizes), 128, 256)
    second = both.second(both.entries)
    assert second[1:] == long[1:]
    assert second.entries.data_ptr() % 16 == both.entries.data_ptr() % 16
    assert second.entries[7] == 0
    chunks = 8 + len(BLOCKS_M) * tile_capacity(MAPS[name], rows) * 4
    for made, expected, tiles in ((both, short, True), (second, long, False)):
        counts, start = expected.entries[5:7].tolist(), chunks + 4 * (rows // expected.chunk_rows + len(sizes))
        assert made.entries[5:7].tolist() == counts
        parts = [slice(chunks, chunks + 4 * counts[0]), slice(start, start + 3 * counts[1])]
        assert all(torch.equal(made.entries[part], expected.entries[part]) for part in parts)
        if tiles:
            for block, count in enumerate(expected.entries[:5].tolist()):
                first = 8 + block * tile_capacity(MAPS[name], rows) * 4
                assert torch.equal(*(one.entries[first : first + 4 * count] for one in (made, expected)))
                assert made.entries[block] == count


@pytest.mark.parametrize(("name", "chunk_rows", "lanes"), [
    ("ragged", 128, 1024),
    ("ragged", 100, 16),
    ("ragged", 488, 1024),
    ("one group", 16, 16),  # 128 rows a chunk: all but the first have none
    ("one row each", 1, 16),
    ("none", 1, 1024),
    ("negative", 20, 16),
    ("too few rows", 2, 1024),
    ("many groups", 5, 16),
    ("large group", 128, 16),
])  # fmt: skip
def test_the_chunks_hold_every_row_once_and_the_longest_come_first(name, chunk_rows, lanes):
    sizes, rows = [max(size, 0) for size in MAPS[name]], rows_of(name)
    made = Map(MAPS[name], rows, chunk_rows, lanes)
    assert made.around == [-7]

    order = list(dict.fromkeys(group for group, *_ in made.chunks))
    assert order == sorted(range(len(sizes)), key=lambda group: -sizes[group])  # also the empty ones: they get zeros
    first_rows = [0, *itertools.accumulate(sizes)]
    splits, slots = [], []
    for group in order:
        chunks = [chunk for chunk in made.chunks if chunk[0] == group]
        spans = [(row, row_end) for _, row, row_end, _ in chunks if row < row_end]
        held = [row for span in spans for row in range(*span)]
        assert held == list(range(first_rows[group], first_rows[group + 1]))
        longest = max((end - row for row, end in spans), default=0)
        assert longest <= -(-chunk_rows // 128) * 128
        own = [slot for *_, slot in chunks]
        assert len(own) == max(-(-sizes[group] // chunk_rows), 1)
        if len(own) == 1:
            assert own == [-1]
        else:
            splits.append([group, own[0], len(own)])
            slots += own
    assert slots == list(range(len(slots)))  # a group's are neighbours, in the order of its rows
    assert len(slots) <= made.slots
    assert made.splits == splits


@pytest.mark.parametrize("chunk_rows", [1, 16, 60, 99, 100])
@pytest.mark.parametrize("name", ["too many rows", "past 31 bits"])
def test_chunks_of_sizes_that_promise_too_many_rows_stay_inside(name, chunk_rows):
    sizes, rows = MAPS[name], rows_of(name)
    made = Map(sizes, rows, chunk_rows)
    assert made.around == [-7]
    for group, row, row_end, slot in made.chunks:
        assert 0 <= group < len(sizes)
        assert 0 <= row <= row_end <= rows
        assert -1 <= slot < made.slots
    for group, slot, slots in made.splits:
        assert 0 <= group < len(sizes)
        assert slots == 0 or 0 <= slot < slot + slots <= made.slots


def test_a_map_is_as_large_as_its_sizes_can_make_it():
    import torch
    from foretune.kernels.grouped_gemm.triton_kernels.tiles import TileMap

    sizes = MAPS["ragged"]
    built = TileMap.build(torch.tensor(sizes, dtype=torch.int32), sum(sizes), 100)
    assert built.entries[: len(BLOCKS_M)].tolist() == [len(tiles_of(sizes, sum(sizes), m)) for m in BLOCKS_M]
    assert (built.rows, built.groups, built.chunk_rows) == (488, 8, 100)
    assert (built.most_chunks, built.most_splits, built.slots) == (4 + 8, 4, 8)
    assert built.entries.numel() == 8 + len(BLOCKS_M) * tile_capacity(sizes, sum(sizes)) * 4 + 12 * 4 + 4 * 3


@pytest.mark.parametrize(("rows", "chunk_rows"), [(100, 100), (99, 100), (0, 1), (0, None), (100, None)])
def test_a_map_of_short_groups_has_no_room_for_splits(rows, chunk_rows):
    import torch
    from foretune.kernels.grouped_gemm.triton_kernels.tiles import TileMap

    built = TileMap.build(torch.tensor([rows, 0], dtype=torch.int32), rows, chunk_rows)
    assert built.most_splits == built.slots == 0
    assert int(built.entries[len(BLOCKS_M) + 1]) == 0
