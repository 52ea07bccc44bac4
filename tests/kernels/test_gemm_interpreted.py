"""The kernel of the forward pass and of dX against plain PyTorch, in the interpreter.

Float16 and float32: the interpreter's bfloat16 `tl.dot` is wrong (Triton 3.6 to 3.9).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from grouped import (
    CPU,
    DX,
    FLAGS,
    FORWARD,
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

#: Every permutation with every way to load and store that it allows.
WAYS = [(family, flags, tma) for family in (FORWARD, DX) for flags in FLAGS for tma in tma_ways(family, flags)]
#: Every permutation of both, and every load and store by pointer and by TMA, once or twice.
PATHS = [
    (FORWARD, (), (0, 0, 0)),
    (FORWARD, (), (1, 1, 1)),
    (FORWARD, ("permute_x",), (0, 1, 1)),
    (FORWARD, ("permute_y",), (0, 0, 0)),
    (DX, (), (0, 0, 0)),
    (DX, (), (1, 1, 1)),
    (DX, ("permute_x",), (1, 0, 0)),
    (DX, ("permute_y",), (0, 1, 1)),
]


def gathers(family, flags):
    return ("permute_x" if family is FORWARD else "permute_y") in flags


every_way = pytest.mark.parametrize(("family", "flags", "tma"), WAYS, ids=named)
every_permuting_way = pytest.mark.parametrize(("family", "flags", "tma"), [way for way in WAYS if way[1]], ids=named)
every_path = pytest.mark.parametrize(("family", "flags", "tma"), PATHS, ids=named)
# Empty groups first, in between and last; one row; one over and one under the smaller blocks.
RAGGED = (0, 37, 0, 1, 33, 16, 0)


def test_the_ways_are_all_there_are():
    assert len(WAYS) == 2 * (8 + 4 + 4)


@every_way
def test_every_way_to_load_and_store_on_ragged_groups(family, flags, tma):
    assert_right(family, made(family, RAGGED, n=40, k=72, flags=flags), config(family, 32, 32, 64, tma=tma))


@every_path
@pytest.mark.parametrize(("m", "n", "k"), [(64, 64, 128), (256, 32, 32), (16, 256, 256)])
def test_any_block(family, flags, tma, m, n, k):
    # N and K are off every block, and the larger blocks are larger than either.
    assert_right(family, made(family, RAGGED, n=72, k=40, flags=flags), config(family, m, n, k, tma=tma))


@every_path
def test_float32(family, flags, tma):
    inputs = made(family, RAGGED, n=72, k=136, flags=flags, dtype="fp32")
    assert_right(family, inputs, config(family, 32, 64, 32, tma=tma))


@every_path
@pytest.mark.parametrize(
    "sizes",
    [(1,) * 7, (16, 32), (50,), (1,), (0, 0, 5), (5, 0, 0), (0, 0, 17, 0, 0)],
    ids=["one row each", "whole tiles", "one group", "one row", "last", "first", "middle"],
)
def test_any_group_sizes(family, flags, tma, sizes):
    assert_right(family, made(family, sizes, flags=flags), config(family, 16, 32, 64, tma=tma))


@every_path
@pytest.mark.parametrize(("n", "k"), [(8, 8), (8, 136), (136, 8), (64, 64), (72, 104)])
def test_any_multiple_of_8(family, flags, tma, n, k):
    assert_right(family, made(family, (19, 3), n=n, k=k, flags=flags), config(family, 16, 64, 64, tma=tma))


@pytest.mark.parametrize(("band", "programs"), [(1, 2), (3, 1), (8, 1), (8, 2), (3, 200), (8, 0)])
def test_the_order_of_tiles_and_the_grid_change_nothing(band, programs):
    inputs = made(FORWARD, (20, 0, 33, 30), n=72, k=72)
    assert_right(FORWARD, inputs, config(FORWARD, 16, 32, 64, band=band, programs=programs))


@every_path
@pytest.mark.parametrize("groups", [1, 3])
def test_no_rows_at_all(family, flags, tma, groups):
    out = family.launch(made(family, (0,) * groups, flags=flags), config(family, 16, 32, 64, tma=tma))
    assert out.shape == (0, 40 if family is FORWARD else 72)


@every_path
@pytest.mark.parametrize("sizes", [(20, 0, 9), (0, 0, 0)])
def test_rows_of_no_group_are_left_alone(family, flags, tma, sizes):
    inputs = routed(made(family, (40, 10, 10), flags=flags), sizes)
    assert_right(family, inputs, config(family, 32, 32, 64, tma=tma))


@pytest.mark.parametrize(
    ("family", "flags", "tma", "sizes"),
    [
        *((*way, (2**31 - 1,) * 3) for way in WAYS),  # past 31 bits
        *((*path, sizes) for path in PATHS for sizes in ((500, 1, 1), (0, 61, 1000))),
    ],
    ids=named,
)
@pytest.mark.large
def test_sizes_that_promise_too_many_rows_write_nothing_outside(family, flags, tma, sizes):
    import torch

    inputs = made(family, (20, 20, 20), flags=flags)
    out, guards = guarded(inputs.out)
    inputs = replace(inputs, left=guarded(inputs.left)[0], right=guarded(inputs.right, 2)[0], out=out)
    assert_right(family, routed(inputs, sizes), config(family, 64, 32, 64, tma=tma))
    assert all(torch.isnan(rows).all() for rows in guards)


@every_path
@pytest.mark.large
def test_negative_sizes_count_as_none(family, flags, tma):
    inputs = routed(made(family, (20, 20, 20, 0), flags=flags), (-5, 30, -(2**31), 30))
    reference = expected(family, routed(inputs, (0, 30, 0, 30)))
    assert trouble(family.launch(inputs, config(family, 16, 32, 64, tma=tma)), reference) is None


@pytest.mark.parametrize(
    ("family", "flags", "tma", "poison"),
    [*((*way, float("nan")) for way in WAYS), *((*path, float("inf")) for path in PATHS)],
)
def test_a_groups_rows_and_weights_reach_no_other_group(family, flags, tma, poison):
    """Not through the tails of N and K, not through the ragged end of a tile, not through memory beyond the tensors."""
    inputs = made(family, (21, 10, 19), n=40, k=24, flags=flags)
    reference = expected(family, inputs)
    # A row of x for each of y, so that the group's own rows can go bad.
    left, right = inputs.left.repeat_interleave(inputs.topk, 0), inputs.right.clone()
    permuted = slice(21, 31) if inputs.indices is None else inputs.indices[21:31].long()
    left[permuted if gathers(family, flags) else slice(21, 31)] = poison
    right[1] = poison
    left, right = guarded(left, value=poison)[0], guarded(right, 2, value=poison)[0]
    out = family.launch(replace(inputs, left=left, right=right, topk=1), config(family, 32, 64, 64, tma=tma))
    spoilt = slice(21, 31) if gathers(family, flags) else permuted
    assert not bool(out[spoilt].isfinite().any())
    out[spoilt] = reference[spoilt].to(out.dtype)
    assert trouble(out, reference) is None


@every_permuting_way
@pytest.mark.large
def test_indices_out_of_range_write_nothing_outside(family, flags, tma):
    import torch

    inputs = made(family, (21, 0, 19), flags=flags)
    good = expected(family, inputs)
    indices = inputs.indices.clone()
    wrong = {3: -1, 20: len(inputs.out), 25: 2**31 - 1, 30: -(2**31), 39: len(inputs.out) + 200}
    for row, index in wrong.items():
        indices[row] = index
    out, guards = guarded(inputs.out)
    left = guarded(inputs.left)[0]
    family.launch(replace(inputs, left=left, out=out, indices=indices), config(family, 16, 32, 64, tma=tma))
    assert all(torch.isnan(rows).all() for rows in guards)
    gathered = gathers(family, flags)
    right = torch.ones(len(out), dtype=torch.bool)
    right[torch.tensor(list(wrong)) if gathered else inputs.indices[list(wrong)].long()] = False
    assert trouble(out[right], good[right]) is None
    if gathered:
        assert not torch.isnan(out).any()  # some row of x, not what lies around it
    else:
        assert torch.isnan(out[~right]).all()  # of a row that goes nowhere, nothing is stored


def check_scale_and_bias(family, flags, tma, *, scaled, biased, index="int32"):
    import torch
    from grouped import launch_gemm

    inputs = made(family, (21, 0, 1, 30), n=40, k=72, flags=flags)
    rows, columns = inputs.out.shape
    scale, bias = torch.rand(rows), torch.randn(4, columns).half()
    indices = None if inputs.indices is None else inputs.indices.to(getattr(torch, index))
    launch_gemm(
        inputs.left,
        inputs.right,
        inputs.out,
        inputs.tile_map,
        config(family, 16, 32, 64, tma=tma),
        CPU.sm_count,
        transposed=family is DX,
        gather=indices if gathers(family, flags) else None,
        divisor=inputs.topk,
        scatter=None if gathers(family, flags) else indices,
        scale=scale if scaled else None,
        bias=bias if biased else None,
    )
    sorted_rows = torch.arange(rows)
    permuted = sorted_rows if indices is None else indices.long()
    target = sorted_rows if gathers(family, flags) else permuted  # row of the output, by sorted row
    reference = expected(family, inputs)
    if biased:
        reference[target] += bias.float()[torch.repeat_interleave(torch.arange(4), inputs.group_sizes)]
    if scaled:  # after the bias
        reference[target] *= scale[permuted, None]
    assert trouble(inputs.out, reference) is None


@every_way
def test_scale_and_bias(family, flags, tma):
    check_scale_and_bias(family, flags, tma, scaled=True, biased=True)


@every_path
@pytest.mark.parametrize("scaled", [True, False], ids=["scale", "bias"])
def test_scale_or_bias_alone(family, flags, tma, scaled):
    check_scale_and_bias(family, flags, tma, scaled=scaled, biased=not scaled)


@every_permuting_way
def test_indices_of_64_bits(family, flags, tma):
    check_scale_and_bias(family, flags, tma, scaled=True, biased=False, index="int64")


def test_unknown_group_sizes_are_typical_ones():
    inputs = FORWARD.inputs(problem(FORWARD, dtype="fp16", groups=3, rows=40, n=40, k=72), CPU)
    assert int(inputs.group_sizes.sum()) == 40
    assert_right(FORWARD, inputs, config(FORWARD, 16, 32, 64))
