"""A tiny matrix product, its family and its bundle: what the tests of runtime/ tune."""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl
from foretune.datasets import DeviceSpec, Family, ForetuneError, KernelConfig, Problem
from foretune.model import Bundle, Ranker
from foretune.model.calibration.training_domain import Distance

H200 = DeviceSpec.named("h200")
#: 128 KB a block at 64 x 64 x 128 with 4 stages does not fit into the first; everything here fits into the second.
SIZES = [(16, 16, 16, 1), (32, 16, 16, 1), (16, 32, 32, 2), (32, 32, 32, 2), (64, 64, 128, 4), (64, 32, 32, 2)]


def triton_configs() -> list[triton.Config]:
    return [
        triton.Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}, num_warps=4, num_stages=stages)
        for m, n, k, stages in SIZES
    ]


CONFIGS = tuple(KernelConfig.from_triton(config) for config in triton_configs())


class ToyFamily(Family):
    """The part of a `Family` that runtime/ asks for."""

    name = "toy"
    dims = ("rows", "n", "k")
    dtypes = ("bf16", "fp16")
    knobs = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages")
    features = None
    largest = {"rows": 65536}

    def __init__(self, refuses=lambda config, problem: None) -> None:
        self.refuses, self.asked, self.calls = refuses, [], []

    def space(self, device=None):
        return CONFIGS

    def supports(self, config, problem, device):
        self.asked.append(config)
        return self.refuses(config, problem)

    def at_call_time(self, problem):
        return problem.without_sizes().rounded("rows")

    def problem_from_call(self, arguments):
        self.calls.append(dict(arguments))
        missing = {"M", "N", "K", "a_ptr"} - arguments.keys()
        if missing:
            raise ForetuneError(f"the launch has no argument {', '.join(sorted(missing))}")
        return Problem.of("toy", rows=arguments["M"], n=arguments["N"], k=arguments["K"], dtype="fp16")


class ToyBundle(Bundle):
    """Predicts that the last of the space is the fastest, unless told what to predict."""

    digest = "0123456789abcdef"

    def __init__(self, slowdowns=None, digest=None, wrong=(), calibration=None, distance=Distance(0.0)) -> None:  # noqa: B008 - it is frozen
        self.slowdowns, self.wrong, self.predicted = slowdowns, wrong, []
        self.known = calibration, distance
        self.digest = digest or f"toy-{id(self)}"

    def calibration(self, family_name):
        return self.known[0]

    def distance(self, family_name, problem, device):
        return self.known[1]

    def trained_on(self, family_name):
        return (H200,)

    fastest, trust_ = Ranker.fastest, 0.3

    def ranker(self, family_name):
        return self

    def wrong_results(self, family_name, problem):
        return self.wrong

    def predict(self, family, problem, device, configs):
        self.predicted.append(problem)
        if callable(self.slowdowns):
            return self.slowdowns(problem, configs)
        return np.arange(len(configs), 0, -1.0) if self.slowdowns is None else np.asarray(self.slowdowns)


def matmul_kernel(a_ptr, b_ptr, c_ptr, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        depth = start + tl.arange(0, BLOCK_K)
        a = tl.load(
            a_ptr + rows[:, None] * K + depth[None, :], mask=(rows[:, None] < M) & (depth[None, :] < K), other=0.0
        )
        b = tl.load(
            b_ptr + depth[:, None] * N + columns[None, :], mask=(depth[:, None] < K) & (columns[None, :] < N), other=0.0
        )
        total = tl.dot(a, b, total)
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    tl.store(c_ptr + rows[:, None] * N + columns[None, :], total, mask=inside)


def skewed_kernel(a_ptr, M, N, K, skew, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    tl.store(a_ptr + tl.arange(0, BLOCK_M), 0.0)


def named_kernel(a_ptr, kernel, attachment, run, args, kwargs, BLOCK_M: tl.constexpr):
    """Whose arguments have names that whoever launches it may use for its own."""
    tl.store(a_ptr + tl.arange(0, BLOCK_M), 1.0)


def tuned(prune, configs=None, **options):
    """The kernel under the real autotuner, with a prune callback."""
    return triton.autotune(
        configs=configs or triton_configs(),
        key=["M", "N", "K"],
        prune_configs_by={"early_config_prune": prune},
        **options,
    )(triton.jit(matmul_kernel))


def grid(meta):
    return (triton.cdiv(meta["M"], meta["BLOCK_M"]), triton.cdiv(meta["N"], meta["BLOCK_N"]))


def operands(m=64, n=64, k=64):
    """a (m, k), b (k, n) in float16, and c (m, n) in float32 for their product."""
    import torch

    torch.manual_seed(0)
    a, b = torch.randn(m, k, dtype=torch.float16), torch.randn(k, n, dtype=torch.float16)
    return a, b, torch.full((m, n), float("nan"), dtype=torch.float32)


WARM = {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32, "num_warps": 4, "num_stages": 2}


def warm_up():
    """Compiles one config without operands, as a worker of a compile pool does."""
    import torch

    half, single = torch.float16, torch.float32
    return triton.jit(matmul_kernel).warmup(half, half, single, 64, 64, 64, grid=(1,), **WARM)
