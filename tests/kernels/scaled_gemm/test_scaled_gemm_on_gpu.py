"""The scaled GEMMs on the card: right for every kind of scales on every path, exact enough where sums are long, the
same bits every time, one binary for all shapes, and next to what torch has.

`pytest -s -m gpu tests/kernels/scaled_gemm` prints what it saw.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from foretune.collect.compiling import compile_ahead
from foretune.datasets import DeviceSpec
from foretune.kernels.registry import comparison_of
from foretune.kernels.scaled_gemm.space import GRANULARITIES
from foretune.runtime.timing.compare import time_side_by_side
from scaled import (
    DENSE,
    FAMILIES,
    GROUPED,
    SPECIALIZED,
    SPLIT,
    WAYS,
    checked,
    config,
    exact,
    named,
    problem,
    specialized,
    split,
    trouble,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("own_cache")]

CONFIGS = [
    *(config(*way) for way in WAYS),
    *(specialized(*way) for way in SPECIALIZED),
    *(split(*way) for way in SPLIT),
]
LONG = [config(*WAYS[0]), config(*WAYS[4]), config(*WAYS[6]), specialized(*SPECIALIZED[1]), split(*SPLIT[1])]
THEIRS = ("torch", "fast", "bf16")
every_family = pytest.mark.parametrize("family", FAMILIES, ids=named)
every_kind = pytest.mark.parametrize("kind", GRANULARITIES)


@pytest.fixture(scope="module")
def device(own_cache):
    """The device, and every config compiled for every family and kind of scales."""
    device = DeviceSpec.live()
    for family in FAMILIES:
        pairs = [(each, checked(family, kind)) for kind in GRANULARITIES for each in CONFIGS]
        compile_ahead(family, [p for p in pairs if family.supports(*p, device) is None], device)
    return device


@every_family
@every_kind
def test_every_way_is_right(family, kind, device):
    call, tried = checked(family, kind), 0
    inputs = family.inputs(call, device)
    for each in CONFIGS:
        if family.supports(each, call, device) is None:
            tried += 1
            found = trouble(family, inputs, each)
            assert found is None, f"{found}: {each}"
    assert tried
    print(f"{family.name} {kind}: {tried} configs right")


@every_kind
@pytest.mark.parametrize("each", LONG, ids=str)
def test_long_sums_keep_their_digits(kind, each, device):
    """All products are positive, so what tensor cores drop adds up: without sums in float32, 2 % at K = 4096."""
    import torch

    inputs = DENSE.inputs(problem(DENSE, kind, m=128, n=256, k=16384), device)
    for operand in (inputs.x, inputs.w):
        operand.copy_(operand.float().abs().to(operand.dtype))
    out = DENSE.launch(inputs, each).double()
    y, _ = exact(inputs)
    off = float(((out - y) / y).abs().max())
    ways = comparison_of(DENSE).contenders(DENSE, inputs.problem, inputs, device, {})
    others = {name: float(((run().double() - y) / y).abs().max()) for name, run in ways.items() if name != "bf16"}
    torch.cuda.synchronize()
    print(f"{kind} {each}: largest relative error {off:.2e}; " + ", ".join(f"{k} {v:.2e}" for k, v in others.items()))
    assert off < 5e-3  # of which bf16 has 2e-3


@every_family
def test_the_same_bits_every_time(family, device):
    import torch

    inputs = family.inputs(checked(family, "blockwise"), device)
    for each in CONFIGS:
        if family.supports(each, inputs.problem, device) is not None:
            continue
        first = family.launch(inputs, each).clone()
        for _ in range(20):
            inputs.out.fill_(float("nan"))
            assert torch.equal(first.view(torch.int16), family.launch(inputs, each).view(torch.int16))


def test_one_binary_serves_every_shape(device):
    import triton

    shapes = [(1, 16, 16), (17, 2112, 7168), (128, 128, 128), (100, 4096, 2064)]
    seen, before = [], triton.knobs.compilation.listener
    triton.knobs.compilation.listener = lambda src, cache_hit, **_: seen.append(src.name)
    try:
        for m, n, k in shapes:
            inputs = DENSE.inputs(problem(DENSE, "blockwise", m=m, n=n, k=k), device)
            for programs, band in ((1, 8), (0, 1), (2, 3)):
                each = config(64, 64, 0, 1, 1, k=64, programs=programs, band=band)
                assert trouble(DENSE, inputs, each) is None
            for band in (1, 3):
                assert trouble(DENSE, inputs, specialized(2, 64, 8, band=band)) is None
    finally:
        triton.knobs.compilation.listener = before
    assert seen.count("scaled_gemm_kernel") <= 1
    assert seen.count("specialized_scaled_gemm_kernel") <= 1


def test_garbage_sizes_write_nothing_out_of_bounds(device):
    import torch
    from foretune.kernels.grouped_gemm.triton_kernels.tiles import TileMap

    inputs = GROUPED.inputs(problem(GROUPED, "blockwise", (50, 70), n=144, k=144), device)
    for sizes in ((-5, 10**9), (0, 0), (200, 200)):
        told = torch.tensor(sizes, dtype=torch.int32, device="cuda")
        whole = torch.full((120 + 600, 144), float("nan"), dtype=torch.bfloat16, device="cuda")
        routed = replace(inputs, group_sizes=told, tile_map=TileMap.build(told, 120), out=whole[300:420])
        for each in (CONFIGS[0], CONFIGS[4], specialized(2, 128, 4)):
            GROUPED.launch(routed, each)
            assert torch.isnan(whole[:300]).all()
            assert torch.isnan(whole[420:]).all()


def test_next_to_torch(device):
    """Not judged: `foretune bench kernels` does that. A few shapes, to see that nothing is far off."""
    from foretune.runtime.timing.timer import Timer

    timer = Timer(clean=True)
    shapes = [(16, 7168, 2048), (512, 4096, 7168), (4096, 7168, 16384), (8192, 4096, 7168)]
    print(f"\n{'kind':<11}{'m n k':<20}" + "".join(f"{name:>10}" for name in ("ours us", *THEIRS)))
    for kind in GRANULARITIES:
        for m, n, k in shapes:
            us = times_us(problem(DENSE, kind, m=m, n=n, k=k), device, timer)
            best = min(time for name, time in us.items() if name not in THEIRS)
            theirs = "".join(f"{us[name]:>10.1f}" if name in us else f"{'-':>10}" for name in THEIRS)
            print(f"{kind:<11}{f'{m} {n} {k}':<20}{best:>10.1f}{theirs}")


def times_us(call, device, timer):
    """The time of each of `CONFIGS` and of each of `THEIRS` that there is."""
    inputs = DENSE.inputs(call, device)
    configs = [each for each in CONFIGS if DENSE.supports(each, call, device) is None]
    ways = dict(comparison_of(DENSE).contenders(DENSE, call, inputs, device, {}))
    ours = {f"ours {i}": partial(DENSE.launch, inputs, each) for i, each in enumerate(configs)}
    return time_side_by_side(ours | ways, timer, rounds=2)
