"""The cheapest kernel to compile, its family, and stand-ins for what an autotuner of ours remembers and learns with."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import triton
import triton.language as tl
from foretune.datasets import DeviceSpec, Family, KernelConfig, Problem
from foretune.model import Bundle, Ranker
from foretune.model.calibration.training_domain import Distance

H200 = DeviceSpec.named("h200")
WARPS = (1, 2, 4, 8)


def configs(warps=WARPS):
    return [triton.Config({"BLOCK": 32}, num_warps=count) for count in warps]


def fill_kernel(out_ptr, M, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, 1.0, mask=at < M * N)


def biased_kernel(out_ptr, N, bias_ptr=None, BLOCK: tl.constexpr = 32):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, 1.0, mask=at < N)


def launch(kernel, m=64, n=64, out=None, **options):
    import torch

    out = torch.zeros(m, n) if out is None else out
    kernel[lambda meta: (triton.cdiv(m * n, meta["BLOCK"]),)](out, m, n, **options)
    return out


class Filler(Family):
    name = "filler"
    dims = ("m", "n")
    dtypes = ("fp32",)
    bucketed = ("m",)
    knobs = ("BLOCK", "num_warps", "num_stages")
    features = None

    def space(self, device=None):
        return tuple(map(KernelConfig.from_triton, configs()))

    def supports(self, config, problem, device):
        return "more warps than rows" if config.num_warps > problem["m"] else None

    def problem_from_call(self, arguments):
        return Problem.of("filler", m=arguments["M"], n=arguments["N"], dtype="fp32")


class FillerBundle(Bundle):
    """Predicts that few warps are slow: the last config is the fastest."""

    digest = "filler-bundle"

    def __init__(self):
        """Nothing is learned."""

    def calibration(self, family_name):
        return None

    def distance(self, family_name, problem, device):
        return Distance(0.0)

    def trained_on(self, family_name):
        return (H200,)

    fastest, trust_ = Ranker.fastest, Ranker.trust_

    def ranker(self, family_name):
        return self

    def wrong_results(self, family_name, problem):
        return ()

    def predict(self, family, problem, device, configs):
        return np.array([1.0 + 1.0 / config.num_warps for config in configs])


@dataclass
class Bench:
    """A `do_bench` that launches once and counts: `ms` by number of warps, or an exception to raise."""

    driver: object = None
    ms: dict = field(default_factory=dict)
    timed: list = field(default_factory=list)

    def __call__(self, run, quantiles):
        run()
        warps = self.driver.launches[-1].metadata.num_warps
        self.timed.append(warps)
        found = self.ms.get(warps, float(warps))
        if isinstance(found, BaseException):
            raise found
        return [found] * len(quantiles)
