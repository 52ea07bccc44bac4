"""What an op's call is compared with, a bare launch of its kernel, is one: it passes all that the kernel takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from foretune.datasets import DeviceSpec
from foretune.kernels import find_measurable
from foretune.kernels.registry import comparison_of
from foretune.runtime import use_stub_driver
from foretune.runtime.timing.compare import LaunchPath

pytestmark = [
    pytest.mark.compile,
    pytest.mark.usefixtures("own_cache"),
    pytest.mark.filterwarnings("ignore::foretune.runtime.ForetuneWarning"),
]

H200 = DeviceSpec.named("h200")


@pytest.mark.parametrize("name", ["gated_mlp", "grouped_gemm_fwd", "matmul", "rms_norm_rope_fwd"])
def test_a_bare_launch_runs_the_kernel_that_the_op_runs(name, monkeypatch):
    launched = []

    def timed(cls, name, op, bare, calls=200):
        for call in (op, bare):
            driver.launches.clear()
            with torch.no_grad():
                call()
            launched.append([launch.kernel for launch in driver.launches])
        return cls(name, 6.0, 4.0)

    monkeypatch.setattr(LaunchPath, "timed", classmethod(timed))
    comparison = comparison_of(find_measurable(name))
    with use_stub_driver(H200) as driver:
        comparison.launch_path(replace(H200, backend="cpu"))  # where the tensors are
    of_op, of_bare = launched
    assert len(of_bare) == 1
    assert of_bare[0] in of_op
