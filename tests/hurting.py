"""A family whose configs do to a GPU what must not end a run. A module of its own, because processes import it."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from fakes import FakeFamily
from foretune.datasets import Case, KernelConfig, Problem

#: What the knob FAULT stands for; 0 is a kernel that works.
FAULTS = ("none", "far", "endless", "wrong", "slow", "ptxas", "uncompilable", "memory")


@triton.jit
def hurting_kernel(x_ptr, y_ptr, flag_ptr, n, far, BLOCK: tl.constexpr, FAULT: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = 2 * tl.load(x_ptr + at, mask=at < n, other=0.0)
    if FAULT == 1:
        tl.store(y_ptr + far + at, y)
    if FAULT == 2:
        spins = 0
        while tl.load(flag_ptr, volatile=True) == 0:
            spins += 1
    if FAULT == 3:
        y += 1
    if FAULT == 4:
        for _ in range(100_000):
            y = tl.sin(y) * 1e-20 + y
    if FAULT == 5:
        y = tl.inline_asm_elementwise("no.such $0, $1;", "=f,f", [y], dtype=tl.float32, is_pure=False, pack=1)
    if FAULT == 6:
        tl.static_assert(BLOCK == 0, "this config does not compile")
    tl.store(y_ptr + at, y, mask=at < n)


@dataclass
class Inputs:
    x: torch.Tensor  # (n,)
    y: torch.Tensor  # (n,)
    flag: torch.Tensor  # (1,) of zeros: whoever waits for another value waits for ever


class HurtingFamily(FakeFamily):
    """y = 2 x, in blocks of BLOCK; FAULT is a position in `FAULTS`."""

    name = "hurting"
    dims = ("n",)
    dtypes = ("fp32",)
    bucketed = ()
    knobs = ("BLOCK", "FAULT")
    feature_names = ("estimate_us",)

    def space(self, device=None):
        faulty = [KernelConfig.of(BLOCK=256, FAULT=fault) for fault in range(1, len(FAULTS))]
        return tuple(KernelConfig.of(BLOCK=block, FAULT=0) for block in (128, 256, 512, 1024)) + tuple(faulty)

    def default(self, problem, device):
        return KernelConfig.of(BLOCK=1024, FAULT=0)

    def supports(self, config, problem, device):
        return None

    def estimate_us(self, problem, device, configs):
        """The faults come in the midst of the others."""
        return np.array([1.0 + config["FAULT"] if config["FAULT"] else config["BLOCK"] / 100 for config in configs])

    def features(self, problem, device, configs, binaries=None):
        return self.estimate_us(problem, device, configs)[:, None].astype(np.float32)

    def flops(self, problem):
        return 1.0 * problem["n"]

    def bytes(self, problem):
        return 8.0 * problem["n"]

    def inputs(self, problem, device, *, seed=0):
        x = torch.rand(problem["n"], device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
        return Inputs(x, torch.full_like(x, float("nan")), torch.zeros(1, dtype=torch.int32, device="cuda"))

    def launch(self, inputs, config):
        if FAULTS[config["FAULT"]] == "memory":
            torch.empty(1 << 45, device="cuda")
        n = len(inputs.x)
        grid = (triton.cdiv(n, config["BLOCK"]),)
        hurting_kernel[grid](inputs.x, inputs.y, inputs.flag, n, 1 << 40, **config.to_json())
        return inputs.y

    def reference(self, inputs):
        return 2 * inputs.x

    def tolerance(self, problem):
        return 1e-6

    def check_problem(self, config, problem):
        return Problem.of(self.name, dtype="fp32", n=1 << 10)

    def compile(self, config, problem):
        return hurting_kernel.warmup(
            torch.float32, torch.float32, torch.int32, 1 << 10, 1 << 40, grid=(1,), **config.to_json()
        )

    def source_hash(self):
        return "hurting"


class SoundFamily(HurtingFamily):
    """Its kernels that work, alone."""

    def space(self, device=None):
        return tuple(config for config in super().space(device) if config["FAULT"] == 0)


def cases(*sizes: int) -> tuple[Case, ...]:
    return tuple(Case(Problem.of("hurting", dtype="fp32", n=n), ("random",), "uniform") for n in sizes)


def hog(ready):
    """Another process that uses the GPU all the time, for two minutes; `ready` is set when it has begun."""
    a = torch.rand(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(10):
        a @ a
    torch.cuda.synchronize()
    ready.set()
    end = time.monotonic() + 120
    while time.monotonic() < end:
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()
