"""What the ranks of `tuning/test_pinned_ranks.py` launch, under a name that is the same in each process."""

from __future__ import annotations

import foretune
import triton
import triton.language as tl
from foretune import DeviceSpec, Problem
from foretune.kernels import find_family
from foretune.runtime import Mode, choice

H200 = DeviceSpec.named("h200")
WARPS = (1, 2, 4)
SIZES = (16, 32)
FAMILY = "grouped_gemm_fwd"
LAYER = Problem.of(FAMILY, groups=16, rows=512, n=1024, k=512)


@triton.jit
def fill(x_ptr, n):
    at = tl.arange(0, 16)
    tl.store(x_ptr + at, 1.0, mask=at < n)


@triton.jit
def double(x_ptr, n):
    at = tl.arange(0, 16)
    tl.store(x_ptr + at, 2.0, mask=at < n)


def everything(driver, bench, timer):
    """Launch each kind of kernel at each size; return what ran. `bench` and `timer` are for what is tuned."""
    import torch

    configs = [triton.Config({}, num_warps=count) for count in WARPS]
    attached = triton.autotune(configs, ["n"], do_bench=bench)(double)
    foretune.attach(attached)
    kernels = {"autotune": foretune.autotune(configs, ["n"], do_bench=bench)(fill), "attach": attached}

    def scale(n, tile):
        return tile

    scale.__qualname__ = "scale"
    tuned = foretune.tune({"tile": list(WARPS)}, key=["n"], timer=timer, n_warmup=1, n_repeat=1)(scale)
    ran = {}
    for n in SIZES:
        for name, kernel in kernels.items():
            kernel[(1,)](torch.zeros(16), n)
            ran[f"{name} {n}"] = driver.launches[-1].metadata.num_warps
        ran[f"tune {n}"] = tuned(n)
    foretune.detach(attached)
    ran["op"] = str(choice.choose(find_family(FAMILY), LAYER, H200, Mode.SHORTLIST, lambda config: config))
    return ran
