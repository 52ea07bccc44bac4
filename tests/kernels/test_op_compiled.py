"""Training steps of the op compiled for GPUs that need not be here, and how many binaries there are."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Executor, Future
from functools import lru_cache

import pytest
import torch
from foretune import KernelConfig, grouped_gemm
from foretune.kernels.grouped_gemm import op, passes
from foretune.kernels.grouped_gemm.triton_kernels import tiles
from foretune.kernels.op_calls import Memo
from foretune.runtime import use_stub_driver
from foretune.runtime.launching import ahead
from grouped import A100, B200, H200, MI300X

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("own_cache")]

#: Blocks that compile soon.
SMALL = KernelConfig.of(BLOCK_M=32, BLOCK_N=32, BLOCK_K=32, num_stages=2)
WITHOUT_TMA = {"TMA_X": 0, "TMA_W": 0, "TMA_Y": 0}


def step(groups, rows, n, k, side, *, weighted=True, biased=True, dtype=torch.bfloat16, sizes=torch.int32, **chosen):
    """A training step of the op."""
    leaves = {
        "x": torch.zeros(rows // 2 if side == "permute_x" else rows, k, dtype=dtype),
        "w": torch.zeros(groups, n, k, dtype=dtype),
        **({"topk_weights": torch.ones(rows)} if weighted else {}),
        **({"bias": torch.zeros(groups, n, dtype=dtype)} if biased else {}),
    }
    for leaf in leaves.values():
        leaf.requires_grad_()
    permuted = {} if side == "sorted" else {"gather_indices": torch.arange(rows), side: True}
    y = grouped_gemm(group_sizes=torch.zeros(groups, dtype=sizes), topk=2, **leaves, **permuted, **chosen)
    torch.autograd.grad(y.sum(), list(leaves.values()))


def test_one_binary_of_each_kernel_serves_steps_of_any_shape(compiles):
    small = SMALL.to_json()
    chosen = {
        "config": KernelConfig.of(**small, **WITHOUT_TMA),
        "config_dx": KernelConfig.of(**small, **WITHOUT_TMA),
        "config_dw": KernelConfig.of(**small, TMA_DY=0, TMA_X=0, TMA_DW=0),
    }
    with use_stub_driver(H200):
        for shape in ((2, 32, 8, 16), (3, 34, 16, 8), (16, 4096, 128, 264), (1, 2, 8, 8)):
            for side in ("permute_x", "permute_y"):
                step(*shape, side, **chosen)
    permutations = 2  # one gathers what the other scatters
    assert Counter(name for name, _ in compiles) == {
        "tile_map_kernel": 1,
        "dw_map_kernel": 1,
        "grouped_gemm_kernel": 2 * permutations,  # forward and for dx
        "grouped_gemm_dw_kernel": 1,
        "sorted_rows_kernel": 1,
        "sum_partials_kernel": 1,  # of the one shape whose groups may be split
        "weight_grads_kernel": permutations,
        "sum_rows_kernel": 1,
        "bias_partials_kernel": permutations,
        "bias_grads_kernel": 1,
        "zero_ungrouped_kernel": permutations,
    }


@pytest.mark.parametrize(
    "device",
    [H200, A100, *(pytest.param(device, marks=pytest.mark.slow) for device in (B200, MI300X))],
    ids=lambda device: device.arch,
)
def test_a_step_compiles_for(device):
    with use_stub_driver(device) as driver:
        step(3, 34, 16, 8, "permute_y", mode="off", sizes=torch.int64)
    kernels = {launch.kernel for launch in driver.launches}
    assert kernels > {"tile_map_kernel", "grouped_gemm_kernel", "grouped_gemm_dw_kernel", "bias_grads_kernel"}


@pytest.mark.parametrize(
    ("side", "options"),
    [
        ("sorted", {"weighted": False, "biased": False}),
        ("sorted", {"biased": False}),
        ("sorted", {"weighted": False}),
        ("permute_x", {"biased": False, "dtype": torch.float16}),
        ("permute_x", {"weighted": False}),
        ("permute_y", {"weighted": False, "dtype": torch.float32}),
    ],
)
def test_a_step_compiles_without_some_options(side, options):
    """The interpreter is laxer about types than the compiler."""
    with use_stub_driver(H200) as driver:
        step(3, 34, 16, 8, side, config=SMALL, config_dx=SMALL, config_dw=SMALL, **options)
    assert sum(launch.kernel == "grouped_gemm_kernel" for launch in driver.launches) == 2


class AtOnce(Executor):
    """Runs a job where it is handed in."""

    def submit(self, job):
        future = Future()
        try:
            future.set_result(job())
        except Exception as error:  # noqa: BLE001 - as an executor does
            future.set_exception(error)
        return future


def forward_of_a_step(**options):
    x = torch.zeros(16, 16, dtype=torch.bfloat16, requires_grad=True)
    w = torch.zeros(4, 32, 16, dtype=torch.bfloat16, requires_grad=True)
    weights, order = torch.ones(32, requires_grad=True), torch.arange(32)
    sizes = torch.full((4,), 8, dtype=torch.int32)
    y = grouped_gemm(x, w, sizes, gather_indices=order, topk=2, permute_x=True, topk_weights=weights, **options)
    return y, (x, w, weights)


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(ahead._jobs, "pool", AtOnce())
    monkeypatch.setattr(ahead._jobs, "underway", {})
    monkeypatch.setattr(op.OP, "calls", Memo())


def test_the_backward_pass_finds_all_its_binaries_compiled_by_the_forward_pass(compiles, at_once):
    with use_stub_driver(H200) as driver:
        y, leaves = forward_of_a_step()
        compiled = list(compiles)
        assert {launch.kernel for launch in driver.launches} == {"tile_map_kernel", "grouped_gemm_kernel"}
        torch.autograd.grad(y.sum(), leaves)
    assert compiles == compiled
    assert max(Counter(name for name, _ in compiles).values()) == 2  # grouped_gemm_kernel, forward and for dx
    assert {launch.kernel for launch in driver.launches} == {name for name, _ in compiled}


def test_what_launches_a_binary_is_made_beside_it_for_the_backward_pass_too(compiles, at_once, monkeypatch):
    """Triton 3.6 has a C compiler make it."""
    with use_stub_driver(H200) as driver:
        made, make = [], driver.launcher_cls
        monkeypatch.setattr(driver, "launcher_cls", lambda src, metadata: made.append(src.name) or make(src, metadata))
        forward_of_a_step()
    launched = ["tile_map_kernel", "grouped_gemm_kernel"]  # makes its own, of what is on the disk now
    assert sorted(made) == sorted([name for name, _ in compiles] + launched)


def test_a_hot_call_checks_and_prepares_nothing(monkeypatch, at_once):
    done = []

    def counted(function):
        return lambda *given, **options: done.append(function.__name__) or function(*given, **options)

    monkeypatch.setattr(op, "check_call", counted(op.check_call))
    monkeypatch.setattr(passes, "chunks_of", counted(passes.chunks_of))
    monkeypatch.setattr(passes, "prepare_gemm", counted(passes.prepare_gemm))
    monkeypatch.setattr(tiles, "prepared_map", lru_cache(counted(tiles.prepared_map.__wrapped__)))
    config = KernelConfig.of(**SMALL.to_json(), **WITHOUT_TMA)
    with use_stub_driver(H200) as driver:
        for rows in (16, 16, 16, 24, 24, 16):
            x, w, sizes = torch.zeros(rows, 16), torch.zeros(2, 8, 16), torch.zeros(2, dtype=torch.int32)
            grouped_gemm(x, w, sizes, config=config)
        assert len(driver.launches) == 2 * 6
    assert sorted(done) == sorted(["check_call", "chunks_of", "prepare_gemm", "prepared_map"] * 2)


@pytest.mark.parametrize("why", ["no gradient", "timed on the tensors", "contents checked"])
def test_nothing_is_compiled_ahead_where_there_is_no_backward_pass_or_contents_matter(
    compiles, at_once, why, monkeypatch
):
    monkeypatch.setenv("FORETUNE_CHECK", "1" if why == "contents checked" else "0")
    with use_stub_driver(H200), torch.set_grad_enabled(why != "no gradient"):
        monkeypatch.setattr("foretune.kernels.grouped_gemm.passes.check_contents", lambda *_: None)
        forward_of_a_step(mode="shortlist" if why == "timed on the tensors" else None)
    zeroes = {"zero_ungrouped_kernel"} if why == "contents checked" else set()
    assert {name for name, _ in compiles} == {"tile_map_kernel", "grouped_gemm_kernel"} | zeroes


def test_a_later_shape_is_gone_through_ahead_only_for_its_backward_pass(at_once, monkeypatch):
    """The kernel of the tile map is known then, so that there is at most one to compile."""
    begun, ahead_of = [], passes.only_compiling
    monkeypatch.setattr(passes, "only_compiling", lambda: begun.append(True) or ahead_of())
    tiles._launch.forget()
    config = KernelConfig.of(**SMALL.to_json(), **WITHOUT_TMA)
    gone_through = []
    with use_stub_driver(H200):
        for rows, needs in ((16, False), (24, False), (32, False), (16, True), (16, True)):
            x, w = torch.zeros(rows, 16, requires_grad=needs), torch.zeros(2, 8, 16)
            grouped_gemm(x, w, torch.zeros(2, dtype=torch.int32), config=config, config_dx=config)
            gone_through.append(len(begun))
    assert gone_through == [1, 1, 1, 2, 2]


def test_where_compiling_ahead_fails_a_step_runs_as_without_it(compiles, at_once, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("the compiler is not well")

    monkeypatch.setattr("triton.runtime.jit.KernelInterface.warmup", fails)
    with use_stub_driver(H200) as driver:
        y, leaves = forward_of_a_step()
        assert Counter(name for name, _ in compiles) == {"tile_map_kernel": 1, "grouped_gemm_kernel": 1}
        torch.autograd.grad(y.sum(), leaves)
    assert {launch.kernel for launch in driver.launches} > {"grouped_gemm_dw_kernel", "weight_grads_kernel"}
