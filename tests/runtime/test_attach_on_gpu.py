"""`foretune.attach` on a GPU: what our timer says of configs is what Triton says, and what adds adds once."""

from __future__ import annotations

import foretune
import pytest
import triton

pytestmark = [pytest.mark.gpu]
torch = pytest.importorskip("torch")


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
