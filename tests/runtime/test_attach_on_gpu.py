"""`foretune.attach` on a GPU: what our timer says of configs is what Triton says, and what adds adds once."""

from __future__ import annotations

import foretune
import pytest
import triton

pytestmark = [pytest.mark.gpu]
torch = pytest.importorskip("torch")


def test_a_new_key_in_a_captured_graph_runs_without_being_timed(gpu_kernels):
    kernel = triton.autotune(gpu_kernels.CONFIGS, ["n"], restore_value=["y_ptr"])(gpu_kernels.add_kernel.fn)
    foretune.attach(kernel)
    x, y = torch.ones(8192, device="cuda"), torch.zeros(8192, device="cuda")
    gpu_kernels.launch(kernel, x[:4096], y[:4096])  # loads all binaries
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gpu_kernels.launch(kernel, x, y)
    assert len(kernel.cache) == 1
    before = y.clone()
    graph.replay()
    graph.replay()
    assert torch.equal(y, before + 2)
    gpu_kernels.launch(kernel, x, y)
    assert torch.equal(y, before + 3)
    assert len(kernel.cache) == 2


def test_times_are_those_of_triton_less_the_launch_gap(gpu_kernels):
    times = []
    for attached in (False, True):
        kernel = triton.autotune(gpu_kernels.CONFIGS, ["n"], restore_value=["y_ptr"])(gpu_kernels.add_kernel.fn)
        if attached:
            foretune.attach(kernel)
        x, y = (torch.ones(1 << 24, device="cuda") for _ in range(2))
        assert (gpu_kernels.launch(kernel, x, y) == 2).all()
        times.append([kernel.configs_timings[config][0] for config in gpu_kernels.CONFIGS])
    for theirs, ours in zip(*times, strict=True):
        assert 0.8 * theirs < ours < 1.05 * theirs, times
