"""The kernels on the card: every config of the spaces, one binary for all shapes, CUDA graphs, determinism, autotuning,
and what sizes and indices that are garbage may not do."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from foretune.collect.compiling import Binary, CompilePool
from foretune.collect.processes import Watch
from foretune.datasets import DeviceSpec, KernelConfig
from foretune.kernels import families
from foretune.kernels.grouped_gemm.contenders import autotuned
from foretune.kernels.grouped_gemm.triton_kernels.tiles import TileMap
from foretune.kernels.registry import comparison_of
from grouped import (
    DW,
    DX,
    FAMILIES,
    FLAGS,
    FORWARD,
    as_they_count,
    config,
    expected,
    guarded,
    made,
    named,
    problem,
    routed,
    specialized,
    tma_ways,
    trouble,
)
from triton.backends.nvidia import compiler as nvidia

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("own_cache")]

GROUPED = ("grouped_gemm_kernel", "grouped_gemm_dw_kernel", "specialized_gemm_kernel", "specialized_dw_kernel")
every_family = pytest.mark.parametrize("family", FAMILIES, ids=named)


@pytest.fixture(scope="module")
def device():
    return DeviceSpec.live()


def small(family, m=64, *, tma=(0, 0, 0), band=8):
    return config(family, m, 128, 64, tma=tma, band=band, programs=2)


@pytest.fixture(params=[0, 1, 2, 3], ids=["pointers", "TMA", "CONSUMERS", "PINGPONG"])
def path(request, device):
    """Picks the config of a family that loads and stores by pointer, by TMA as far as the flags allow, or by warps that
    have one job each."""

    def chosen(family, flags=()):
        if request.param > 1:
            one = specialized(family, *((1, 128, 128, 5) if request.param == 3 else (0, 128, 256, 4)))
            if reason := family.supports(one, problem(family, flags=flags), device):
                pytest.skip(reason)
            return one
        ways = tma_ways(family, flags, device)
        if request.param and len(ways) == 1:
            pytest.skip(f"{device.arch} has no TMA")
        return small(family, tma=max(ways, key=sum) if request.param else (0, 0, 0))

    return chosen


def routing(rows, groups, seed=0):
    """Group sizes as uniform routing would make them, half of the groups without a row where there are several."""
    shares = np.zeros(groups)
    shares[:: 2 if groups > 1 else 1] = 1
    return tuple(int(size) for size in np.random.default_rng(seed).multinomial(rows, shares / shares.sum()))


def inputs_of(family, device, groups, rows, n, k, **told):
    """Inputs, the output poisoned with NaN."""
    return made(family, routing(rows, groups), n=n, k=k, device=device, **{"dtype": "bf16"} | told)


def check(family, inputs, config, reference=None):
    """What is wrong with the result of a launch, or None."""
    inputs.out.fill_(float("nan"))
    reference = expected(family, inputs) if reference is None else reference
    return trouble(family.launch(inputs, config), reference, inputs.problem.dtype)


def some_of(family, device, flags, dtype, every):
    """The problem to check, and the configs that it supports of one binary in `every`."""
    space = family.space(device)
    call = family.check_problem(space[0], problem(family, flags=flags, dtype=dtype))  # the same for all
    configs = [each for each in space if family.supports(each, call, device) is None]
    if dtype == "fp32":  # minutes of compilation where the steps are long
        configs = [each for each in configs if each["BLOCK_N"] * each["BLOCK_K"] <= 64 * 64]
    keys = {each: family.binary_key(each, call) for each in configs}
    binaries = set(list(dict.fromkeys(keys.values()))[::every])
    return call, [each for each, key in keys.items() if key in binaries]


@pytest.fixture(scope="module")
def compiled(request, device, own_cache):
    """Gives each config of a test of a space with its outcome, as soon as it is compiled; what the later tests need is
    compiled meanwhile."""
    asked = [
        tuple(item.callspec.params[name] for name in ("family", "flags", "dtype", "every"))
        for item in request.session.items
        if getattr(item, "function", None) is test_every_config_of_the_space_is_right  # others have that name, too
    ]
    # Inductor sets TRITON_PTXAS_PATH, which the pool's processes get, but Triton keeps the version that it read before,
    # and it is a part of every binary's key.
    nvidia.get_ptxas_version.cache_clear()
    with Watch() as watch:
        pool = CompilePool(families(), watch)
        pool.start()
        rank = itertools.count(1)
        for family, *told in asked:
            call, configs = some_of(family, device, *told)
            for each in configs:
                pool.request(Binary.of(family, each, call, device), next(rank))

        def outcomes(family, call, configs):
            waiting = {each: Binary.of(family, each, call, device) for each in configs}
            while waiting:
                watch.handle(0.01)
                pool.check()
                for each, outcome in [(each, pool.request(binary, 0)) for each, binary in waiting.items()]:
                    if outcome is not None:
                        del waiting[each]
                        yield each, outcome

        yield outcomes


#: Every config in bfloat16; of all others, whose binaries differ in little, some. The rest is for a long evening.
SPACES = [
    pytest.param((), "bf16", 1, id="bf16"),
    *(pytest.param(flags, "bf16", 4, id=f"bf16-{flags[0]}") for flags in FLAGS[1:]),
    *(pytest.param(flags, "fp16", 9, id=f"fp16-{named(flags)}") for flags in FLAGS),
    *(pytest.param(flags, "fp32", 25, id=f"fp32-{named(flags)}") for flags in FLAGS),
    *(pytest.param(flags, "bf16", 1, id=f"all-{flags[0]}", marks=pytest.mark.slow) for flags in FLAGS[1:]),
]


@every_family
@pytest.mark.parametrize(("flags", "dtype", "every"), SPACES)
def test_every_config_of_the_space_is_right(family, flags, dtype, every, device, compiled, compiles):
    call, configs = some_of(family, device, flags, dtype, every)
    inputs = family.inputs(call, device, seed=1)
    if family is DW:  # some groups are split, some are not
        inputs = routed(inputs, call.ragged.sizes, 128)
        assert inputs.tile_map.slots
    reference, wrong, tried = expected(family, inputs), {}, 0
    for each, outcome in compiled(family, call, configs):
        tried += 1
        found = outcome.error or check(family, inputs, each, reference)
        if found:
            wrong[str(each)] = found
    assert wrong == {}
    assert tried == len(configs) > 0
    # What the workers compiled, this process found on disk.
    binaries = {family.binary_key(each, call) for each in configs}
    assert [found for name, found in compiles if name in GROUPED] == [True] * len(binaries)


# (groups, rows, N, K): sizes that are 1, multiples of 16, and neither; N and K multiples of 8 that are not of 16.
SHAPES = [
    (1, 1, 8, 8),
    (1, 16, 64, 64),
    (2, 17, 72, 40),
    (7, 33, 128, 24),
    (16, 1, 136, 16),
    (64, 4096, 1024, 512),
    (100, 1000, 24, 8),
    (128, 129, 8, 1288),
    (256, 48, 2056, 32),
    (512, 20000, 520, 264),
]


@every_family
@pytest.mark.parametrize("flags", FLAGS, ids=named)
def test_one_binary_serves_every_shape(family, flags, device, path, compiles):
    for i, shape in enumerate(SHAPES):
        inputs = inputs_of(family, device, *shape, flags=flags, chunk_rows=(None, 128)[i % 2])
        assert check(family, inputs, path(family, flags)) is None, shape
    others = ["tile_map_kernel"]
    if family is DW:
        others = [*(["sorted_rows_kernel"] if flags else []), "sum_partials_kernel"]
        others = ["dw_map_kernel", *others] if inputs.tile_map.long_rows else [*others, "tile_map_kernel"]
    assert sorted({name for name, _ in compiles} - set(GROUPED)) == others
    assert len(compiles) == len(others) + 1


#: (group sizes, N, K): split groups and groups without rows; fewer tiles than programs; many tiles of one step.
COUNTED = [((0, 3000, 1, 0, 129, 5000, 70, 0), 264, 520), ((5, 0), 8, 16), ((40,) * 64, 1032, 776)]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("tile", [(128, 256), (256, 128)], ids=named)
def test_tiles_from_a_counter_are_right_and_the_same_in_any_order(tile, dtype, device):
    import torch

    one = specialized(DW, 0, *tile, 4)
    if reason := DW.supports(one, problem(DW, dtype=dtype), device):
        pytest.skip(reason)
    for sizes, n, k in COUNTED:
        inputs = made(DW, sizes, n=n, k=k, dtype=dtype, device=device)
        assert check(DW, inputs, one) is None, sizes
        first = inputs.out.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            DW.launch(inputs, one)
        for _ in range(20):
            inputs.out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(inputs.out, first), sizes


@pytest.mark.parametrize("flags", FLAGS, ids=named)
def test_no_rows_are_no_launch_and_gradients_of_zero(device, path, flags):
    for family in (FORWARD, DX):
        assert len(family.launch(inputs_of(family, device, 4, 0, 64, 64, flags=flags), path(family, flags))) == 0
    dw = DW.launch(inputs_of(DW, device, 4, 0, 72, 136, flags=flags), path(DW, flags))
    assert dw.shape == (4, 72, 136)
    assert bool((dw == 0).all())


@pytest.mark.parametrize(
    ("family", "groups", "rows", "n", "k", "chunk_rows"),
    [
        pytest.param(FORWARD, 3, 96, 32768, 32768, None, id="forward, weights"),
        pytest.param(FORWARD, 2, 70_000, 32768, 16, None, id="forward, output"),
        pytest.param(FORWARD, 2, 70_000, 16, 32768, None, id="forward, input"),
        pytest.param(DX, 3, 96, 32768, 32768, None, id="dX, weights"),
        pytest.param(DX, 2, 70_000, 16, 32768, None, id="dX, output"),
        pytest.param(DW, 3, 96, 32768, 32768, None, id="dW, output"),
        pytest.param(DW, 2, 70_000, 32768, 16, None, id="dW, gradients"),
        pytest.param(DW, 2, 70_000, 16, 32768, 35_000, id="dW, input"),
        pytest.param(DW, 1, 256, 32768, 32768, 128, id="dW, partial sums"),
    ],
)
def test_addresses_past_31_bits(device, path, family, groups, rows, n, k, chunk_rows):
    import torch

    if torch.cuda.mem_get_info()[0] < 80 << 30:
        pytest.skip("needs 80 GiB of free memory")
    try:
        inputs = inputs_of(family, device, groups, rows, n, k, chunk_rows=chunk_rows)
        out, reference = family.launch(inputs, path(family)), expected(family, inputs)
        pieces = zip(
            out.view(-1, out.shape[-1]).split(16384), reference.view(-1, out.shape[-1]).split(16384), strict=True
        )
        assert {trouble(*piece, "bf16") for piece in pieces} == {None}
    finally:
        inputs = out = reference = pieces = None
        torch.cuda.empty_cache()


@every_family
@pytest.mark.parametrize("flags", FLAGS, ids=named)
def test_sizes_that_do_not_add_up_stay_inside(family, flags, device, path):
    import torch

    rows, chosen = 200, path(family, flags)
    inputs = inputs_of(family, device, 4, rows, 136, 72, flags=flags)
    out, guards = guarded(inputs.out)
    left, right = guarded(inputs.left)[0], guarded(inputs.right, 300)[0]
    inputs = replace(inputs, left=left, right=right, out=out)
    for sizes in ((90, 90, 0, 90), (1000, 1, 1, 1), (20, 0, 100, 3), (-50, 150, -1, 50), (2**31 - 1,) * 4):
        assert check(family, routed(inputs, sizes), chosen) is None, sizes
        # Where groups are split too, there may be more to split than room for them: no promise but to stay inside.
        family.launch(routed(inputs, sizes, 16), chosen)
        assert all(bool(torch.isnan(each).all()) for each in guards), sizes


def test_a_map_of_sizes_that_sum_past_31_bits_names_only_rows_there_are(device):
    """A thousand groups of all rows each: what comes before the last sums to 2^32."""
    import torch

    rows, groups = 1 << 22, 1024
    sizes = torch.full((groups,), 2**31 - 1, dtype=torch.int32, device="cuda")
    tile_map = TileMap.build(sizes, rows, 1 << 20)
    entries, capacity = tile_map.entries, rows // 16 + groups
    counts = entries[:6].tolist()
    for which, count in enumerate(counts[:5]):
        tiles = entries[8 + 4 * which * capacity :][: 4 * count].view(-1, 4)
        assert count <= capacity
        assert 0 <= int(tiles[:, 0].min()) <= int(tiles[:, 0].max()) < groups
        assert 0 <= int(tiles[:, 1:].min()) <= int(tiles[:, 1:3].max()) <= rows
        assert int(tiles[:, 3].max()) * (16 << which) < rows + (16 << which)
    chunks = entries[8 + 4 * 5 * capacity :][: 4 * counts[5]].view(-1, 4)
    assert counts[5] <= tile_map.most_chunks
    assert 0 <= int(chunks[:, 1:3].min()) <= int(chunks[:, 1:3].max()) <= rows
    assert -1 <= int(chunks[:, 3].min()) <= int(chunks[:, 3].max()) < tile_map.slots


@every_family
@pytest.mark.parametrize("flags", [flags for flags in FLAGS if flags], ids=named)
def test_indices_out_of_range_write_nothing_outside(family, flags, device, path):
    import torch

    inputs = inputs_of(family, device, 2, 200, 136, 72, flags=flags)
    out, guards = guarded(inputs.out)
    indices = inputs.indices.clone()
    indices[::7] = torch.tensor([-1, 200, 2**31 - 1, -(2**31), 450], dtype=torch.int32, device="cuda").repeat(6)[:29]
    left, right = guarded(inputs.left)[0], guarded(inputs.right)[0]
    out = family.launch(replace(inputs, left=left, right=right, out=out, indices=indices), path(family, flags))
    assert all(bool(torch.isnan(each).all()) for each in guards)
    scattered = flags == (("permute_y",) if family is FORWARD else ("permute_x",)) and family is not DW
    assert int(torch.isnan(out).any(dim=-1).sum()) == (29 if scattered else 0)


@every_family
@pytest.mark.parametrize("flags", FLAGS, ids=named)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_groups_rows_and_weights_reach_no_other_group(family, flags, poison, device, path):
    """Also where TMA's boxes reach into the neighbour's rows."""
    inputs = made(family, (21, 100, 79), n=136, k=72, flags=flags, dtype="bf16", device=device)
    reference = expected(family, inputs)
    rows = permuted_rows(inputs, 21, 121)
    left, right = inputs.left, inputs.right
    if family is DW:
        x = right.repeat_interleave(inputs.topk, 0)
        left, right = left.clone(), x.clone()
        left[rows if flags == ("permute_y",) else slice(21, 121)] = poison
        right[rows if flags == ("permute_x",) else slice(21, 121)] = poison
        spoilt = 1
    else:
        left, right = left.repeat_interleave(inputs.topk, 0).clone(), right.clone()
        gathers = flags == (("permute_x",) if family is FORWARD else ("permute_y",))
        left[rows if gathers else slice(21, 121)] = poison
        right[1] = poison
        spoilt = slice(21, 121) if gathers else rows
    left, right = guarded(left, value=poison)[0], guarded(right, value=poison)[0]
    out = family.launch(replace(inputs, left=left, right=right, topk=1), path(family, flags))
    assert not bool(out[spoilt].isfinite().any())
    out[spoilt] = reference[spoilt].to(out.dtype)
    assert trouble(out, reference, "bf16") is None


def permuted_rows(inputs, start, end):
    """The rows of the permuted side that some sorted rows are."""
    return slice(start, end) if inputs.indices is None else inputs.indices[start:end].long()


def step(family, inputs, config):
    """What one layer does: the map of its routing, then the product. Groups of dW are split."""
    rows = inputs.tile_map.rows
    chunks = (128, 128 if config["CONSUMERS"] else 0) if family is DW else (None,)
    tile_map = TileMap.build(inputs.group_sizes, rows, *chunks)
    return family.launch(replace(inputs, tile_map=tile_map), config)


@every_family
@pytest.mark.parametrize("flags", FLAGS, ids=named)
def test_a_captured_graph_follows_the_group_sizes(family, flags, device, path):
    import torch

    chosen, inputs = path(family, flags), inputs_of(family, device, 8, 600, 264, 136, flags=flags)
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        step(family, inputs, chosen)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(family, inputs, chosen)

    for sizes in ((75,) * 8, (0, 0, 0, 600, 0, 0, 0, 0), (1, 0, 299, 17, 16, 200, 67, 0), (5, 0, 0, 0, 0, 0, 100, 0)):
        inputs.group_sizes.copy_(torch.tensor(sizes, dtype=torch.int32))
        inputs.out.fill_(float("nan"))
        graph.replay()
        assert trouble(inputs.out, expected(family, inputs), "bf16") is None, sizes
    assert sum(as_they_count(sizes, 600)) < 600  # the last leaves rows alone


@every_family
def test_a_launch_waits_for_nothing(family, device, path):
    import torch

    chosen, inputs = path(family), inputs_of(family, device, 64, 4096, 1024, 512)
    step(family, inputs, chosen)  # compiles, loads, and fills the allocator's cache
    reference = expected(family, inputs)
    torch.cuda.synchronize()
    inputs.out.fill_(float("nan"))
    torch.cuda._sleep(1_000_000_000)  # half a second and more
    asleep = torch.cuda.Event()
    asleep.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = step(family, inputs, chosen)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not asleep.query()  # the device is not even past the sleep
    assert trouble(out, reference, "bf16") is None


@pytest.mark.parametrize("flags", FLAGS, ids=named)
def test_split_groups_are_summed_alike_in_every_run(device, path, flags):
    import torch

    inputs = inputs_of(DW, device, 6, 20_000, 520, 264, flags=flags, chunk_rows=1024)
    assert max(inputs.group_sizes.tolist()) > 2 * 1024
    runs = []
    for _ in range(5):
        inputs.out.fill_(float("nan"))
        runs.append(DW.launch(inputs, path(DW, flags)).clone())
    assert all(torch.equal(run, runs[0]) for run in runs)
    assert trouble(runs[0], expected(DW, inputs), "bf16") is None


@every_family
def test_a_launch_gives_the_same_bits_in_every_order_of_tiles(family, device):
    import torch

    inputs = inputs_of(family, device, 8, 3000, 520, 264)
    ways = [config(family, 64, 128, 64, band=band, programs=programs) for band, programs in ((1, 1), (8, 2), (3, 0))]
    runs = [family.launch(inputs, way).clone() for way in ways]
    assert all(torch.equal(run, runs[0]) for run in runs)


@every_family
def test_the_autotuner_chooses_and_computes(family, device, compiles):
    configs = [small(family, 64, band=1), small(family, 64), small(family, 128)]
    binaries = {family.binary_key(each, problem(family)) for each in configs}
    first = inputs_of(family, device, *SHAPES[0])
    autotuner, call = autotuned(family, first, [each.to_triton() for each in configs])
    for shape in (SHAPES[5], SHAPES[9]):
        inputs = inputs_of(family, device, *shape, chunk_rows=128)
        reference = expected(family, inputs)
        for _ in range(2):  # tuning, and tuned
            inputs.out.fill_(float("nan"))
            assert trouble(call(inputs), reference, "bf16") is None
        assert KernelConfig.from_triton(autotuner.best_config) in configs
    assert sum(name in GROUPED for name, _ in compiles) == len(binaries)


@every_family
@pytest.mark.parametrize("way", ["quack", "quack_tuned"])
def test_what_it_is_compared_with_computes_the_same(family, way, device):
    pytest.importorskip("quack")
    inputs = made(family, (300, 0, 17, 515), 256, 384, dtype="bf16", device=device)
    comparison_of(family).contenders(family, inputs.problem, inputs, device, {})[way]()
    reference = expected(family, inputs)
    assert float((inputs.out.float() - reference).norm() / reference.norm()) < family.tolerance(inputs.problem)
