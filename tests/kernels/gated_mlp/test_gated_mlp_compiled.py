"""The gated MLP compiled for GPUs that need not be here: how many binaries there are, and what they need."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
from foretune import DeviceSpec, KernelConfig, Problem, gated_mlp
from foretune.kernels import find_family
from foretune.kernels.gated_mlp.op import _launch, _launch_backward
from foretune.kernels.gated_mlp.space import smem_bytes
from foretune.kernels.matmul.triton_kernels import launches as matmul_launches
from foretune.runtime import use_stub_driver

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("own_cache")]

FAMILY, MATMUL, H200 = find_family("gated_mlp"), find_family("matmul"), DeviceSpec.named("h200")
A100 = replace(H200, name="A100", arch="sm_80", sm_count=108, smem_per_block_bytes=166912)
B200 = replace(H200, name="B200", arch="sm_100", sm_count=148)
SMALL = KernelConfig.of(BLOCK_M=16, BLOCK_N=16, BLOCK_K=32, TMA=0, num_stages=2)


def test_one_binary_of_each_kernel_serves_steps_of_any_shape(monkeypatch):
    """And the gradients of x and of the weight are two products of tensors as they lie, a binary for each config."""
    names, products = [], set()
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda src, **_: names.append(src.name))
    _launch.forget()
    _launch_backward.forget()
    matmul_launches.LAUNCHERS.made.clear()
    with use_stub_driver(H200):
        for m, n, k in ((1, 8, 8), (16, 8, 40), (300, 2048, 1024)):
            x, w = (torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((m, k), (2 * n, k)))
            for programs, band in ((0, 1), (2, 8)):
                config = KernelConfig.from_json(SMALL.to_json() | {"PROGRAMS_PER_SM": programs, "GROUP_M": band})
                gated_mlp(x, w, config=config, mode="off").sum().backward()
            for flags, sizes in ((("b_kn",), (m, k, 2 * n)), (("a_km", "b_kn"), (2 * n, k, m))):
                call = Problem.of("matmul", flags=flags, batch=1, **dict(zip("mnk", sizes, strict=True)))
                products.add(MATMUL.binary_key(MATMUL.default(call, H200), call))
    assert sorted(names) == ["gated_backward_kernel", "gated_mlp_kernel", *["matmul_kernel"] * len(products)]


def asked(m, n, k, *, tma, warps, stages):
    blocks = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": 1, "PROGRAMS_PER_SM": 1}
    return KernelConfig.of(**blocks, TMA=tma, num_warps=warps, num_stages=stages)


@pytest.mark.parametrize(
    ("device", "config"),
    [
        (H200, asked(128, 128, 64, tma=1, warps=8, stages=3)),  # up beside gate in each thread
        (H200, asked(16, 64, 64, tma=0, warps=4, stages=5)),  # in other warps
        (A100, asked(64, 32, 64, tma=0, warps=4, stages=3)),
        (B200, asked(128, 32, 64, tma=1, warps=8, stages=4)),
    ],
    ids=lambda value: getattr(value, "arch", ""),
)
def test_no_binary_needs_more_shared_memory_than_supports_counts(device, config):
    problem = Problem.of("gated_mlp", m=64, n=64, k=64)
    assert FAMILY.supports(config, problem, device) is None
    with use_stub_driver(device):
        assert FAMILY.compile(config, problem).metadata.shared <= smem_bytes(config, 2, device.arch)


@pytest.mark.slow
@pytest.mark.parametrize("device", [H200, A100, B200], ids=lambda device: device.arch)
def test_nor_does_any_binary_of_the_space(device):
    problem = Problem.of("gated_mlp", flags=("saves",), m=64, n=64, k=64)
    configs = {FAMILY.binary_key(config, problem): config for config in FAMILY.space(device)}
    with use_stub_driver(device):
        for config in configs.values():
            assert FAMILY.compile(config, problem).metadata.shared <= smem_bytes(config, 2, device.arch), config


def test_a_gpu_without_tma_says_so():
    reason = FAMILY.supports(asked(64, 64, 64, tma=1, warps=4, stages=2), Problem.of("gated_mlp", m=8, n=8, k=8), A100)
    assert reason == "TMA cannot be 1: sm_80 has none"
