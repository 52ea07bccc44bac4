"""The forward kernel and its tile map against plain Python and PyTorch, in the interpreter.

Float16 throughout: the interpreter's bfloat16 `tl.dot` is wrong (Triton 3.6 to 3.9).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from foretune.datasets import DeviceSpec, KernelConfig, Problem
from foretune.kernels import family

pytestmark = pytest.mark.interpret

FAMILY = family("grouped_gemm_fwd")
#: Fewer programs than tiles nearly everywhere, so that programs take several.
DEVICE = replace(DeviceSpec.named("h200"), backend="cpu", sm_count=3)
BLOCKS_M = (16, 32, 64, 128, 256)


def config(m=32, n=32, k=32, *, tma=0, group_m=1, programs_per_sm=1):
    return KernelConfig.of(
        BLOCK_M=m,
        BLOCK_N=n,
        BLOCK_K=k,
        GROUP_M=group_m,
        PROGRAMS_PER_SM=programs_per_sm,
        USE_TMA=tma,
        num_warps=4,
        num_stages=2,
    )


def made(sizes, n=40, k=72):
    """Inputs for these group sizes, the output poisoned with NaN."""
    problem = Problem.of(FAMILY.name, dtype="fp16", groups=len(sizes), rows=sum(sizes), n=n, k=k, group_sizes=sizes)
    return FAMILY.inputs(problem, DEVICE)


def routed(inputs, sizes):
    """The same tensors under other group sizes, which need not sum to the rows."""
    import torch
    from foretune.kernels.grouped_gemm.tiles import TileMap

    group_sizes = torch.tensor(sizes, dtype=torch.int32)
    return replace(inputs, group_sizes=group_sizes, tile_map=TileMap.build(group_sizes, len(inputs.x)))


def assert_right(y, reference):
    error = float((y.float() - reference).norm() / reference.norm())
    assert error <= 5e-4  # false for NaN


@pytest.mark.parametrize("tma", [0, 1])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(16, 32, 32), (32, 64, 128), (64, 32, 64), (128, 64, 32), (256, 32, 64), (16, 256, 256)]
)
def test_any_block_on_ragged_groups(m, n, k, tma):
    # Empty groups first, in between and last; one row; one over and one under the smaller blocks. N and K are off every
    # block, and the larger blocks are larger than N, K or all the rows.
    inputs = made((0, 37, 0, 1, 33, 16, 0), n=72, k=40)
    assert_right(FAMILY.launch(inputs, config(m, n, k, tma=tma)), FAMILY.reference(inputs))


@pytest.mark.parametrize("tma", [0, 1])
@pytest.mark.parametrize(
    "sizes",
    [(1,) * 7, (16, 32), (50,), (1,), (0, 0, 5), (5, 0, 0), (0, 0, 17, 0, 0)],
    ids=["one row each", "whole tiles", "one group", "one row", "last", "first", "middle"],
)
def test_any_group_sizes(sizes, tma):
    inputs = made(sizes)
    assert_right(FAMILY.launch(inputs, config(16, tma=tma)), FAMILY.reference(inputs))


@pytest.mark.parametrize("tma", [0, 1])
@pytest.mark.parametrize(("n", "k"), [(8, 8), (8, 136), (136, 8), (64, 64), (72, 104)])
def test_any_multiple_of_8(n, k, tma):
    inputs = made((19, 3), n=n, k=k)
    assert_right(FAMILY.launch(inputs, config(16, 64, 64, tma=tma)), FAMILY.reference(inputs))


@pytest.mark.parametrize("tma", [0, 1])
@pytest.mark.parametrize(("group_m", "programs_per_sm"), [(1, 2), (3, 1), (8, 1), (8, 2), (3, 200)])
def test_the_order_of_tiles_and_the_grid_change_nothing(group_m, programs_per_sm, tma):
    inputs = made((20, 0, 33, 30), n=72, k=24)
    chosen = config(16, 32, 32, tma=tma, group_m=group_m, programs_per_sm=programs_per_sm)
    assert_right(FAMILY.launch(inputs, chosen), FAMILY.reference(inputs))


@pytest.mark.parametrize("tma", [0, 1])
@pytest.mark.parametrize("groups", [1, 3])
def test_no_rows_at_all(groups, tma):
    inputs = made((0,) * groups)
    assert FAMILY.launch(inputs, config(tma=tma)).shape == (0, 40)


@pytest.mark.parametrize("tma", [0, 1])
@pytest.mark.parametrize("sizes", [(20, 0, 9), (0, 0, 0), (3, 0, 0)])
def test_rows_of_no_group_are_left_alone(sizes, tma):
    import torch

    inputs = routed(made((40, 10, 10)), sizes)
    y, used = FAMILY.launch(inputs, config(16, tma=tma)), sum(sizes)
    assert torch.isnan(y[used:]).all()
    if used:
        assert_right(y[:used], FAMILY.reference(inputs)[:used])


def guarded(inputs, guard=300):
    """x and y as the first rows of larger tensors; y's guard rows, (guard, n)."""
    import torch

    rows, n = inputs.y.shape
    x = torch.cat([inputs.x, torch.full((guard, inputs.x.shape[1]), float("nan"), dtype=inputs.x.dtype)])
    y = torch.full((rows + guard, n), float("nan"), dtype=inputs.y.dtype)
    return replace(inputs, x=x[:rows], y=y[:rows]), y[rows:]


@pytest.mark.parametrize("tma", [0, 1])
@pytest.mark.parametrize("m", [16, 128])
@pytest.mark.parametrize("sizes", [(40, 40, 40), (500, 1, 1), (0, 61, 100), (60, 0, 1000)])
def test_sizes_that_promise_too_many_rows_write_nothing_outside(sizes, m, tma):
    import torch

    inputs, guard = guarded(made((20, 20, 20)))
    inputs = routed(inputs, sizes)
    y = FAMILY.launch(inputs, config(m, tma=tma))
    assert torch.isnan(guard).all()
    assert_right(y, FAMILY.reference(inputs))


@pytest.mark.parametrize("tma", [0, 1])
def test_negative_sizes_count_as_none(tma):
    inputs = made((20, 20, 20, 0))
    y = FAMILY.launch(routed(inputs, (-5, 30, -(2**30), 30)), config(16, tma=tma))
    assert_right(y, FAMILY.reference(routed(inputs, (0, 30, 0, 30))))


def tiles_of(sizes, rows, block_m):
    """(group, first row, end row) of every M tile, by the book."""
    tiles, start = [], 0
    for group, size in enumerate(max(size, 0) for size in sizes):
        end = min(start + size, rows)
        tiles += [(group, first, end) for first in range(start, start + size, block_m)]
        start += size
    return tiles[: capacity_of(sizes, rows)]


def capacity_of(sizes, rows):
    return -(-rows // 16) + len(sizes)


MAPS = {
    "ragged": (37, 0, 1, 300, 0, 16, 129, 5),
    "one group": (77,),
    "one row each": (1,) * 20,
    "none": (0, 0, 0),
    "negative": (-3, 20, -1, 64),
    "too many rows": (90, 500, 2, 0, 77),
    "too few rows": (3, 0, 4),
    "many groups": (2, 0, 0, 17) * 10,  # several chunks of groups, below
    "large group": (5, 600, 3),  # several chunks of tiles
}


@pytest.mark.parametrize("chunk", [16, 1024])
@pytest.mark.parametrize("name", MAPS)
def test_the_tile_map(name, chunk):
    import torch
    from foretune.kernels.grouped_gemm.tiles import tile_map_kernel

    sizes = MAPS[name]
    rows = {"too many rows": 100, "too few rows": 50}.get(name, sum(max(size, 0) for size in sizes))
    capacity = capacity_of(sizes, rows)
    used = 8 + len(BLOCKS_M) * capacity * 3
    memory = torch.full((1000 + used + 1000,), -7, dtype=torch.int32)
    tiles = memory[1000 : 1000 + used]
    tile_map_kernel[(len(sizes), len(BLOCKS_M))](torch.tensor(sizes, dtype=torch.int32), tiles, rows, len(sizes), chunk)

    assert (memory[:1000] == -7).all()
    assert (memory[1000 + used :] == -7).all()
    for which, block_m in enumerate(BLOCKS_M):
        expected = tiles_of(sizes, rows, block_m)
        entries = tiles[8 + which * capacity * 3 :][: capacity * 3].view(-1, 3).tolist()
        assert tiles[which] == len(expected)
        assert [tuple(entry) for entry in entries[: len(expected)]] == expected
        assert all(entry == [-7] * 3 for entry in entries[len(expected) :])


def test_the_tile_map_of_a_routing_has_room_for_every_block():
    import torch
    from foretune.kernels.grouped_gemm.tiles import TileMap

    sizes = MAPS["ragged"]
    built = TileMap.build(torch.tensor(sizes, dtype=torch.int32), sum(sizes))
    assert built.tiles[: len(BLOCKS_M)].tolist() == [len(tiles_of(sizes, sum(sizes), m)) for m in BLOCKS_M]
    assert (built.rows, built.groups) == (sum(sizes), len(sizes))
    assert built.tiles.numel() == 8 + len(BLOCKS_M) * capacity_of(sizes, sum(sizes)) * 3


def test_unknown_group_sizes_are_typical_ones():
    inputs = FAMILY.inputs(Problem.of(FAMILY.name, dtype="fp16", groups=3, rows=40, n=40, k=72), DEVICE)
    assert int(inputs.group_sizes.sum()) == 40
    assert_right(FAMILY.launch(inputs, config(16)), FAMILY.reference(inputs))
