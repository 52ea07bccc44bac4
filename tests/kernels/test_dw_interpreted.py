"""The kernels of dW against plain PyTorch, in the interpreter: any blocks and groups, split groups, permuted rows.

Float16 and float32: the interpreter's bfloat16 `tl.dot` is wrong (Triton 3.6 to 3.9).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from grouped import (
    CPU,
    DW,
    FLAGS,
    assert_right,
    config,
    expected,
    guarded,
    made,
    named,
    problem,
    routed,
    tma_ways,
    trouble,
)

pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")]

WAYS = [(flags, tma) for flags in FLAGS for tma in tma_ways(DW, flags)]
#: Every permutation, and every load and store by pointer and by TMA.
PATHS = [((), (0, 0, 0)), ((), (1, 1, 1)), (("permute_x",), (1, 0, 0)), (("permute_y",), (0, 1, 1))]


every_way = pytest.mark.parametrize(("flags", "tma"), WAYS, ids=named)
every_path = pytest.mark.parametrize(("flags", "tma"), PATHS, ids=named)


def test_the_ways_are_all_there_are():
    assert len(WAYS) == 3 * 8


@every_way
def test_every_way_to_load_and_store_on_ragged_groups(flags, tma):
    assert_right(DW, made(DW, (0, 37, 1, 0, 33), flags=flags), config(DW, 32, 64, 32, tma=tma))


@every_path
@pytest.mark.parametrize(("m", "n", "k"), [(16, 32, 16), (32, 64, 128), (256, 128, 32)])
def test_any_block(flags, tma, m, n, k):
    # N and K are off every block, and the larger blocks are larger than N, K or the rows.
    assert_right(DW, made(DW, (37, 0, 5), n=72, k=40, flags=flags), config(DW, m, n, k, tma=tma))


@every_path
def test_float32(flags, tma):
    assert_right(DW, made(DW, (70, 0, 33), flags=flags, dtype="fp32"), config(DW, 32, 64, 32, tma=tma))


@every_path
@pytest.mark.parametrize(
    "sizes",
    [(1,) * 4, (16, 32), (50,), (1,), (0, 0, 5), (5, 0, 0), (0, 0, 0)],
    ids=["one row each", "whole steps", "one group", "one row", "last", "first", "none"],
)
def test_any_group_sizes_and_zeros_for_those_without_rows(flags, tma, sizes):
    inputs = made(DW, sizes, n=8, k=24, flags=flags)
    out = DW.launch(inputs, config(DW, 16, 32, 16, tma=tma))
    assert trouble(out, expected(DW, inputs)) is None
    assert all((out[group] == 0).all() for group, size in enumerate(sizes) if not size)


@every_path
@pytest.mark.parametrize(("n", "k"), [(8, 8), (8, 136), (136, 8), (64, 64)])
def test_any_multiple_of_8(flags, tma, n, k):
    assert_right(DW, made(DW, (19, 3), n=n, k=k, flags=flags), config(DW, 64, 64, 32, tma=tma))


@pytest.mark.parametrize(("band", "programs"), [(1, 2), (3, 1), (8, 2), (3, 200), (8, 0)])
def test_the_order_of_tiles_and_the_grid_change_nothing(band, programs):
    inputs = made(DW, (20, 0, 33), n=72, k=72)
    assert_right(DW, inputs, config(DW, 32, 32, 32, band=band, programs=programs))


# (sizes, chunk_rows): chunks have a multiple of 128 rows.
SPLITS = {
    "equal chunks": ((256,), 128),
    "a short last chunk": ((300, 5), 128),
    "chunks without rows": ((5, 130), 16),
    "two split groups, the smaller first": ((140, 0, 300, 1), 128),
    "none long enough": ((100, 0, 128), 128),
    "all rows in one of many": ((0, 0, 150, 0), 75),
}


@every_path
@pytest.mark.parametrize("name", SPLITS)
def test_split_groups(flags, tma, name):
    sizes, chunk_rows = SPLITS[name]
    inputs = made(DW, sizes, n=24, k=40, flags=flags, chunk_rows=chunk_rows)
    assert_right(DW, inputs, config(DW, 32, 64, 64, tma=tma))


@every_way
def test_every_way_to_load_and_store_a_split_group(flags, tma):
    inputs = made(DW, (0, 133, 20), n=24, k=40, flags=flags, chunk_rows=100)
    assert inputs.tile_map.slots
    assert_right(DW, inputs, config(DW, 32, 64, 128, tma=tma))


@every_path
def test_split_groups_in_float32_have_tiles_on_every_side(flags, tma):
    """Partial sums are float32 as words of the gradients' type: one of them here, and two above."""
    inputs = made(DW, (133, 20), n=40, k=72, flags=flags, dtype="fp32", chunk_rows=100)
    assert_right(DW, inputs, config(DW, 32, 64, 128, tma=tma))


def test_a_sum_of_chunks_is_rounded_once():
    """Float16 partial sums would overflow, or lose the small one beside the large one."""
    import torch

    inputs = made(DW, (384,), n=8, k=8, chunk_rows=128)
    left = torch.zeros_like(inputs.left)
    left[0], left[130], left[300] = 60000, 24, -60000
    inputs = replace(inputs, left=left, right=torch.ones_like(inputs.right))
    out = DW.launch(inputs, config(DW, 16, 16, 64))
    assert (out == 24).all()


def test_only_split_groups_are_summed_twice(monkeypatch):
    from foretune.kernels.grouped_gemm.triton_kernels import launches

    grids = []

    monkeypatch.setattr(launches, "summing", lambda: lambda grid, *arguments, **options: grids.append(grid[:2]))
    chosen = config(DW, 32, 64, 64)
    for chunk_rows in (None, 130, 65, 64):
        DW.launch(made(DW, (0, 65, 65), n=72, k=64, chunk_rows=chunk_rows), chosen)
    assert grids == [(2, 2), (2, 2)]  # no more than two groups can have more than 65 rows, or 64


@every_path
@pytest.mark.parametrize("sizes", [(20, 0, 9), (0, 0, 0)])
def test_rows_of_no_group_count_for_none(flags, tma, sizes):
    inputs = routed(made(DW, (40, 10, 10), n=8, k=24, flags=flags), sizes)
    assert_right(DW, inputs, config(DW, 16, 32, 32, tma=tma))


@every_path
@pytest.mark.parametrize("chunk_rows", [None, 16])
@pytest.mark.parametrize("sizes", [(500, 1, 1), (0, 61, 1000), (2**31 - 1,) * 3], ids=["first", "last", "past 31 bits"])
@pytest.mark.large
def test_sizes_that_promise_too_many_rows_write_nothing_outside(flags, tma, chunk_rows, sizes):
    import torch

    inputs = made(DW, (20, 20, 20), n=8, k=24, flags=flags)
    out, guards = guarded(inputs.out, 2)
    inputs = replace(inputs, left=guarded(inputs.left)[0], right=guarded(inputs.right)[0], out=out)
    inputs, chosen = routed(inputs, sizes, chunk_rows), config(DW, 16, 32, 32, tma=tma)
    if chunk_rows is None:
        assert_right(DW, inputs, chosen)
    else:  # there may be more groups to split than room for them: no promise but to stay inside
        DW.launch(inputs, chosen)
    assert all(torch.isnan(matrices).all() for matrices in guards)


@every_path
@pytest.mark.large
def test_negative_sizes_count_as_none(flags, tma):
    inputs = routed(made(DW, (20, 20, 20, 0), n=8, k=24, flags=flags), (-5, 30, -(2**31), 30))
    reference = expected(DW, routed(inputs, (0, 30, 0, 30)))
    assert trouble(DW.launch(inputs, config(DW, 16, 32, 32, tma=tma)), reference) is None


@pytest.mark.parametrize(
    ("flags", "tma", "poison"), [*((*way, float("nan")) for way in WAYS), *((*path, float("inf")) for path in PATHS)]
)
def test_a_groups_rows_reach_no_other_group(flags, tma, poison):
    """Not through the tails of N and K, not through a ragged last step, not through memory beyond the tensors."""
    inputs = made(DW, (21, 10, 19), n=40, k=24, flags=flags)
    reference = expected(DW, inputs)
    dy, x = inputs.left.clone(), inputs.right.repeat_interleave(inputs.topk, 0)  # a row of x for each of dy
    permuted = slice(21, 31) if inputs.indices is None else inputs.indices[21:31].long()
    dy[permuted if "permute_y" in flags else slice(21, 31)] = poison
    x[permuted if "permute_x" in flags else slice(21, 31)] = poison
    left, right = guarded(dy, value=poison)[0], guarded(x, value=poison)[0]
    out = DW.launch(replace(inputs, left=left, right=right, topk=1), config(DW, 64, 32, 16, tma=tma))
    assert not bool(out[1].isfinite().any())
    out[1] = reference[1].to(out.dtype)
    assert trouble(out, reference) is None


@pytest.mark.parametrize(("flags", "tma"), [way for way in WAYS if way[0]], ids=named)
@pytest.mark.large
def test_indices_out_of_range_harm_their_own_group_only(flags, tma):
    import torch

    inputs = made(DW, (21, 0, 19), n=8, k=24, flags=flags)
    indices = inputs.indices.clone()
    for row, index in {3: -1, 7: 2**31 - 1, 11: -(2**31), 20: 240}.items():
        indices[row] = index
    out, guards = guarded(inputs.out, 2)
    left, right = guarded(inputs.left)[0], guarded(inputs.right)[0]
    bad = replace(inputs, left=left, right=right, out=out, indices=indices)
    DW.launch(bad, config(DW, 16, 32, 32, tma=tma))
    assert all(torch.isnan(matrices).all() for matrices in guards)
    assert not torch.isnan(out).any()  # some row of the operand, not what lies around it
    assert trouble(out[1:], expected(DW, inputs)[1:]) is None


@pytest.mark.parametrize("flags", [("permute_x",), ("permute_y",)], ids=named)
def test_indices_of_64_bits(flags):
    inputs = made(DW, (21, 0, 19), n=8, k=24, flags=flags)
    assert_right(DW, replace(inputs, indices=inputs.indices.long()), config(DW, 16, 32, 32))


def test_unknown_group_sizes_are_typical_ones():
    inputs = DW.inputs(problem(DW, dtype="fp16", groups=3, rows=40, n=40, k=72), CPU)
    assert int(inputs.group_sizes.sum()) == 40
    assert_right(DW, inputs, config(DW, 32, 64, 32))
