"""The forward kernel on the card: every config of the space, one binary for all shapes, CUDA graphs, autotuning."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from foretune.collect.compiling import CompilePool
from foretune.datasets import DeviceSpec, KernelConfig, Problem
from foretune.kernels import family

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("own_cache")]

FAMILY = family("grouped_gemm_fwd")


@pytest.fixture(scope="module")
def device():
    return DeviceSpec.live()


@pytest.fixture(params=[0, 1], ids=["pointers", "TMA"])
def config(request, device):
    """A plain config of either load path, where the device has both."""
    chosen = small(tma=request.param)
    reason = FAMILY.supports(chosen, FAMILY.check_problem("bf16"), device)
    if reason:
        pytest.skip(reason)
    return chosen


def small(m=64, *, tma=0, band=8):
    return KernelConfig.of(
        BLOCK_M=m,
        BLOCK_N=128,
        BLOCK_K=64,
        GROUP_M=band,
        PROGRAMS_PER_SM=2,
        USE_TMA=tma,
        num_warps=4,
        num_stages=2,
    )


def routed(rows, groups, seed=0):
    """Group sizes as uniform routing would make them, half of the groups without a row where there are several."""
    shares = np.zeros(groups)
    shares[:: 2 if groups > 1 else 1] = 1
    return tuple(int(size) for size in np.random.default_rng(seed).multinomial(rows, shares / shares.sum()))


def made(device, groups, rows, n, k, *, dtype="bf16"):
    """Inputs, the output poisoned with NaN."""
    sizes = routed(rows, groups)
    problem = Problem.of(FAMILY.name, dtype=dtype, groups=groups, rows=rows, n=n, k=k, group_sizes=sizes)
    return FAMILY.inputs(problem, device)


def trouble(y, reference, dtype="bf16"):
    """What is wrong with a result, or None. The norm alone would not see one wrong element of many."""
    difference = y.float() - reference
    error = float(difference.norm() / reference.norm())
    if not error <= FAMILY.tolerance(FAMILY.check_problem(dtype)):  # also for NaN
        return f"relative error {error:.2g}"
    usual = float(reference.norm()) / reference.numel() ** 0.5
    off = int((difference.abs() > 1e-2 * (reference.abs() + usual)).sum())
    return f"{off} wrong elements" if off else None


@pytest.mark.parametrize(("dtype", "every"), [("bf16", 1), ("fp16", 9)])
def test_every_config_of_the_space_is_right(device, dtype, every, compiles):
    space = FAMILY.space(device)[::every]
    inputs = FAMILY.inputs(FAMILY.check_problem(dtype), device, seed=1)
    reference = FAMILY.reference(inputs)
    wrong, tried = {}, 0
    with CompilePool(FAMILY, device) as pool:
        for config, compiled in pool.finished(space, dtype):
            inputs.y.fill_(float("nan"))
            found = compiled.error or trouble(FAMILY.launch(inputs, config), reference, dtype)
            tried += 1
            if found:
                wrong[str(config)] = found
    assert wrong == {}
    assert tried == len(space)
    # What the workers compiled, this process found on disk.
    binaries = {FAMILY.binary_of(config) for config in space}
    assert [found for name, found in compiles if name == "grouped_gemm_fwd_kernel"] == [True] * len(binaries)


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


def test_one_binary_serves_every_shape(device, config, compiles):
    for shape in SHAPES:
        inputs = made(device, *shape)
        assert trouble(FAMILY.launch(inputs, config), FAMILY.reference(inputs)) is None, shape
    assert sorted(name for name, _ in compiles) == ["grouped_gemm_fwd_kernel", "tile_map_kernel"]


def test_no_rows_is_no_launch(device, config):
    assert FAMILY.launch(made(device, 4, 0, 64, 64), config).shape == (0, 64)


@pytest.mark.parametrize(
    ("groups", "rows", "n", "k"), [(3, 96, 32768, 32768), (2, 70_000, 32768, 16)], ids=["weights", "output"]
)
def test_addresses_past_31_bits(device, config, groups, rows, n, k):
    import torch

    if torch.cuda.mem_get_info()[0] < 80 << 30:
        pytest.skip("needs 80 GiB of free memory")
    inputs = made(device, groups, rows, n, k)
    try:
        assert trouble(FAMILY.launch(inputs, config), FAMILY.reference(inputs)) is None
    finally:
        del inputs
        torch.cuda.empty_cache()


def test_sizes_that_do_not_add_up_stay_inside(device, config):
    import torch
    from foretune.kernels.grouped_gemm.tiles import TileMap

    inputs, rows = made(device, 4, 200, 136, 72), 200
    y = torch.empty(rows + 512, 136, dtype=inputs.y.dtype, device=inputs.y.device)
    for sizes in ((90, 90, 0, 90), (1000, 1, 1, 1), (20, 0, 100, 3), (-50, 150, -1, 50)):
        y.fill_(float("nan"))
        group_sizes = torch.tensor(sizes, dtype=torch.int32, device=y.device)
        told = replace(inputs, y=y[:rows], group_sizes=group_sizes, tile_map=TileMap.build(group_sizes, rows))
        FAMILY.launch(told, config)
        covered = min(rows, sum(max(size, 0) for size in sizes))
        reference = FAMILY.reference(replace(told, group_sizes=group_sizes.clamp(min=0)))
        assert trouble(y[:covered], reference[:covered]) is None, sizes
        assert torch.isnan(y[covered:]).all(), sizes


def step(inputs, config):
    """What one layer does: the map of its routing, then the product."""
    from foretune.kernels.grouped_gemm.tiles import TileMap

    tile_map = TileMap.build(inputs.group_sizes, len(inputs.x))
    return FAMILY.launch(replace(inputs, tile_map=tile_map), config)


def test_a_captured_graph_follows_the_group_sizes(device, config):
    import torch

    inputs, rows = made(device, 8, 600, 264, 136), 600
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        step(inputs, config)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(inputs, config)

    for sizes in ((75,) * 8, (0, 0, 0, 600, 0, 0, 0, 0), (1, 0, 299, 17, 16, 200, 67, 0), (5, 0, 0, 0, 0, 0, 100, 0)):
        inputs.group_sizes.copy_(torch.tensor(sizes, dtype=torch.int32))
        inputs.y.fill_(float("nan"))
        graph.replay()
        covered = sum(sizes)
        assert trouble(inputs.y[:covered], FAMILY.reference(inputs)[:covered]) is None, sizes
        assert torch.isnan(inputs.y[covered:]).all(), sizes
    assert covered < rows


def test_a_launch_waits_for_nothing(device, config):
    import torch

    inputs = made(device, 64, 4096, 1024, 512)
    step(inputs, config)  # compiles, loads, and fills the allocator's cache
    torch.cuda.synchronize()
    inputs.y.fill_(float("nan"))
    torch.cuda._sleep(1_000_000_000)  # half a second and more
    asleep = torch.cuda.Event()
    asleep.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = step(inputs, config)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not asleep.query()  # the device is not even past the sleep
    assert trouble(y, FAMILY.reference(inputs)) is None


def test_the_autotuner_chooses_and_computes(device, compiles):
    configs = [small(16, band=1), small(64), small(128)]
    autotuner = FAMILY.autotuner([config.to_triton() for config in configs])
    for shape in (SHAPES[5], SHAPES[9]):
        inputs = made(device, *shape)
        reference = FAMILY.reference(inputs)
        for _ in range(2):  # tuning, and tuned
            inputs.y.fill_(float("nan"))
            assert trouble(FAMILY.launch_autotuned(autotuner, inputs), reference) is None
        assert KernelConfig.from_triton(autotuner.best_config) in configs
    assert sum(name == "grouped_gemm_fwd_kernel" for name, _ in compiles) == len(configs)
