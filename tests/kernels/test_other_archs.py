"""Matrix products compiled for architectures other than sm_90, whose kernels in Gluon no other one runs."""

from __future__ import annotations

import random

import pytest
from foretune.datasets import Problem
from foretune.kernels import find_measurable
from foretune.runtime import use_stub_driver
from grouped import A100, B200, H200, L40S, MI300X, RTX_5090

pytestmark = [pytest.mark.compile, pytest.mark.slow, pytest.mark.usefixtures("own_cache")]

GROUPED, DENSE = {"groups": 8, "rows": 4096, "n": 2048, "k": 1024}, {"m": 1024, "n": 1024, "k": 1024}
FP8 = {"dtype": "fp8e4m3", "flags": ("blockwise",)}
PROBLEMS = [
    *(Problem.of(f"grouped_gemm_{which}", **GROUPED) for which in ("fwd", "dx", "dw")),
    Problem.of("matmul", batch=1, **DENSE),
    Problem.of("scaled_gemm", **FP8, **DENSE),
    *(Problem.of(f"scaled_grouped_gemm_{which}", **FP8, **GROUPED) for which in ("fwd", "dw")),
]
SAMPLED = 3


@pytest.mark.parametrize("device", [A100, L40S, B200, RTX_5090, MI300X], ids=lambda device: device.arch)
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.family)
def test_the_default_and_a_sample_compile_and_fit(problem, device):
    """On cards without fp8, all configs are refused."""
    family = find_measurable(problem.family)
    reasons = {config: family.supports(config, problem, device) for config in family.space(H200)}
    specialized = [config for config in reasons if config["CONSUMERS"]]
    assert specialized
    assert all(map(reasons.get, specialized))
    able = [config for config, reason in reasons.items() if reason is None]
    if problem.dtype == "fp8e4m3" and device in (A100, MI300X):
        assert not able
        assert any(f"{device.arch} does not support fp8e4m3" in reason for reason in reasons.values())
        return
    with use_stub_driver(device):
        for config in [family.default(problem, device), *random.Random(0).sample(able, SAMPLED)]:
            binary = family.compile(config, problem)
            assert str(binary.metadata.target.arch) in device.arch, str(config)
            assert binary.metadata.shared <= device.smem_per_block_bytes, str(config)
