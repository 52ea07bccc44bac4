"""RMSNorm with rotary embedding compiled for a GPU that need not be here: how many binaries there are."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import triton
from foretune import DeviceSpec, KernelConfig, rms_norm_rope
from foretune.kernels.rms_norm_rope import launches
from foretune.runtime import use_stub_driver

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("own_cache")]


def step(tokens, q_heads, kv_heads, *, weight, steps):
    q, k = (torch.zeros(tokens, heads, 64, dtype=torch.bfloat16, requires_grad=True) for heads in (q_heads, kv_heads))
    angles = torch.zeros(tokens, 32)
    config, backward = KernelConfig.of(HEADS=4, num_warps=1), KernelConfig.of(HEADS=2, STEPS=steps, num_warps=1)
    options = {"eps": 1e-5 * tokens, "config": config, "config_backward": backward, "mode": "off"}
    out = rms_norm_rope(q, k, angles, angles, weight, weight, **options)
    torch.autograd.grad(out, (q, k), out)


def test_one_binary_of_each_kernel_serves_steps_of_any_shape(monkeypatch):
    names = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda src, **_: names.append(src.name))
    for launch in (launches._launch, launches._launch_backward, launches._launch_sums):
        launch.forget()
    weight = torch.ones(64, dtype=torch.bfloat16)
    with use_stub_driver(DeviceSpec.named("h200")):
        for tokens, q_heads, kv_heads in ((1, 1, 1), (16, 8, 2), (300, 40, 5)):
            for steps in (1, 16):
                step(tokens, q_heads, kv_heads, weight=weight, steps=steps)
        step(7, 4, 4, weight=None, steps=1)
    assert Counter(names) == {
        "rms_norm_rope_kernel": 3,  # with a norm, without one, and that one's way back
        "rms_norm_rope_backward_kernel": 1,
        "weight_sums_kernel": 1,
    }
