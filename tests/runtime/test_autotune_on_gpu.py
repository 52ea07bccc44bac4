"""`foretune.autotune` on a GPU: real faults, real graphs, real compiles by Inductor."""

from __future__ import annotations

import foretune
import pytest
import triton
from foretune.runtime import arguments
from foretune.runtime.prune import CAN_ASK_SINCE, torch_release
from foretune.runtime.timing import timer

pytestmark = [pytest.mark.gpu]
torch = pytest.importorskip("torch")


def test_an_illegal_access_ends_another_process(gpu_kernels):
    x = torch.rand(1 << 20, device="cuda")
    y = gpu_kernels.launch(gpu_kernels.scale_kernel, x, torch.zeros_like(x))
    torch.cuda.synchronize()
    assert torch.equal(y, 2 * x)
    timings = {str(config): time_ms for config, (time_ms,) in gpu_kernels.scale_kernel.configs_timings.items()}
    print(f"\ntuned in {gpu_kernels.scale_kernel.bench_time:.1f} s", *timings.items(), sep="\n")
    assert timings[str(gpu_kernels.FAULTY)] == float("inf")
    assert sum(time_ms < float("inf") for time_ms in timings.values()) == len(gpu_kernels.CONFIGS)


def test_what_adds_adds_once_eager_and_compiled(gpu_kernels):
    def add(x, y):
        return gpu_kernels.launch(gpu_kernels.add_kernel, x, y)

    compiled = torch.compile(add)
    for n in (1 << 16, 1 << 17, 100_000):  # the second and third have dynamic shapes
        x, y = torch.ones(n, device="cuda"), torch.ones(n, device="cuda")
        assert (compiled(x, y) == 2).all()
        assert (gpu_kernels.launch(gpu_kernels.add_kernel, x, y) == 3).all()
    if torch_release() >= CAN_ASK_SINCE:  # before, the graph breaks there, and runs right as above
        assert (torch.compile(add, fullgraph=True, dynamic=False)(x, y) == 4).all()  # known by now


def test_nothing_is_timed_while_a_graph_is_captured(gpu_kernels):
    x, y = torch.ones(8192, device="cuda"), torch.zeros(8192, device="cuda")
    gpu_kernels.launch(gpu_kernels.add_kernel, x[:4096], y[:4096])  # loads all binaries
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gpu_kernels.launch(gpu_kernels.add_kernel, x, y)
    before = y.clone()
    graph.replay()
    assert torch.equal(y, before + 1)
    assert len(gpu_kernels.add_kernel.cache) == 1


@pytest.mark.parametrize(("option", "expected"), [("reset_to_zero", 1.0), ("restore_value", 6.0)])
def test_the_first_result_is_as_with_triton_also_where_all_times_are_known(gpu_kernels, option, expected):
    kernel = gpu_kernels.add_kernel.fn
    for declare in (triton.autotune, foretune.autotune, foretune.autotune, attached, attached):
        tuned = declare(gpu_kernels.CONFIGS, ["n"], **{option: ["y_ptr"]})(kernel)
        x, y = torch.ones(1 << 16, device="cuda"), torch.full((1 << 16,), 5.0, device="cuda")
        for more in (0, 1):
            assert (gpu_kernels.launch(tuned, x, y) == expected + more).all(), declare


def attached(*what, **options):
    return lambda kernel: foretune.attach(triton.autotune(*what, **options)(kernel))


@pytest.mark.parametrize("declare", [foretune.autotune, attached])
def test_with_little_memory_free_it_tunes_all_the_same(gpu_kernels, monkeypatch, declare):
    monkeypatch.setattr(timer, "_timers", {})
    monkeypatch.setattr(arguments, "_warned", set())
    x, y = torch.ones(1 << 16, device="cuda"), torch.ones(1 << 16, device="cuda")
    tuned = declare(gpu_kernels.CONFIGS, ["n"], restore_value=["y_ptr"])(gpu_kernels.add_kernel.fn)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    taken = torch.empty(torch.cuda.mem_get_info()[0] - (22 << 20), dtype=torch.uint8, device="cuda")
    try:
        with pytest.warns(foretune.ForetuneWarning, match="of GPU memory to clear the L2 are not free"):
            gpu_kernels.launch(tuned, x, y)
    finally:
        del taken
        torch.cuda.empty_cache()
    assert (y == 2).all()
    assert len(tuned.configs_timings) == len(gpu_kernels.CONFIGS)
