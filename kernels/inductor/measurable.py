"""Inductor's products as a `Measurable` family, which launches the kernel that Inductor generates for a config.

The problems are linear layers of real dense models, and random shapes. torch and triton are imported when needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...datasets import Case, DeviceSpec, ForetuneError, KernelConfig, Problem
from ...model.splits import RANDOM
from .. import workloads
from ..workloads import DenseModel, check_drawn, chosen, shuffled
from .generated_family import GeneratedFamily, Inputs
from .matmul import TF32, InductorMMFamily, is_exact

if TYPE_CHECKING:
    import torch

    from .generated import GeneratedKernel, Operand

#: Token counts of one call, from decoding to training.
TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
#: The products of compiled models, y = x @ w.T, and in training dx = dy @ w and dw = dy.T @ x. Each has its flags, and
#: the positions of its m, n and k in (tokens, n, k).
PASSES = {
    "forward": (("b_transposed",), (0, 1, 2)),
    "bias": (("b_transposed", "bias"), (0, 1, 2)),
    "fp8": (("b_transposed",), (0, 1, 2)),
    "dx": ((), (0, 2, 1)),
    "dw": (("a_transposed",), (1, 2, 0)),
}
SHARES = {"forward": 0.5, "bias": 0.1, "fp8": 0.1, "dx": 0.15, "dw": 0.15}
#: The least token count of training.
LEAST_TRAINED = 128
#: Shares of dtypes. TF32 is float32 with a flag; without it products are exact, and configs that spill take seconds.
DTYPES = {"bf16": 0.8, "fp16": 0.1, TF32: 0.07, "fp32": 0.03}
#: Random shapes: ranges of m, n and k, and the divisors of n and k with their shares.
RANDOM_SIZES = ((1, 16384), (16, 16384), (16, 16384))
STEPS = {1: 0.1, 8: 0.2, 64: 0.35, 256: 0.35}
BATCHED, MOST_MATRICES = 0.15, 128
#: Limits of one problem: a few milliseconds on an H200, and operands that leave room in its memory.
MOST_TFLOP, MOST_BYTES = 2.0, 4e9
#: The slowdown of exact float32 products relative to bf16 (H100 whitepaper: 990 and 67 TFLOP/s).
_FP32_SLOWER = 16
#: Drawing stops after this many consecutive draws above the limits.
_MOST_DRAWS = 10_000


def draw(
    models: Sequence[DenseModel],
    *,
    tokens: Sequence[int] | None = None,
    per_layer: int = 2,
    random: int = 40,
    most_tflop: float | None = None,
    seed: int = 0,
) -> tuple[Case, ...]:
    """Return `per_layer` problems of each linear layer of each model and `random` random ones, shuffled.

    The same arguments give the same cases.

    Args:
        models: The models.
        tokens: The token counts to draw from; `TOKENS` if None.
        per_layer: Problems per layer.
        random: The number of random shapes.
        most_tflop: The maximum size of a problem, in 1e12 floating-point operations; `MOST_TFLOP` if None. In exact
            float32, which is 16 times as slow, it is a sixteenth of this.
        seed: The random seed.

    Raises:
        ForetuneError: A number is negative, a token count is out of range, or no problem is within the limit.

    >>> from ..workloads import load_dense_models
    >>> len(draw(load_dense_models()[:2], random=3))
    23
    """
    check_drawn(tokens, per_layer=per_layer, random=random, seed=seed)
    rng = np.random.default_rng(seed)
    limit = (MOST_TFLOP if most_tflop is None else most_tflop) * 1e12
    sources: dict[Problem, list[str]] = {}
    for model in models:
        for layer, (n, k) in model.linear_layers().items():
            counts = [count for count in tokens or TOKENS if 2 * count * n * k <= limit]
            for _ in range(per_layer if counts else 0):
                _add(sources, f"{model.model}/{layer}", limit, partial(_of_layer, n, k, counts, rng))
    for _ in range(random):
        if not _add(sources, RANDOM, limit, partial(_of_chance, tokens, rng)):
            raise ForetuneError(f"no random shape has at most {limit * 1e-12} TFLOP: allow more")
    cases = [Case(problem, tuple(names)) for problem, names in sources.items()]
    return shuffled(cases, rng)


def _add(sources: dict[Problem, list[str]], source: str, limit: float, drawn: Callable[[], Problem]) -> bool:
    """Call `drawn` until it returns a new problem within the limits, add that to `sources` and return True.

    Return False if many draws in a row give none. `limit` is the maximum number of floating-point operations.
    """
    for _ in range(_MOST_DRAWS if source == RANDOM else 50):
        problem = drawn()
        batch, m, n, k = (problem[dim] for dim in ("batch", "m", "n", "k"))
        slower = _FP32_SLOWER if is_exact(problem) else 1
        fits = 2 * batch * m * n * k * slower <= limit and 4 * batch * (m * k + k * n + m * n) <= MOST_BYTES
        if fits and problem not in sources:
            sources[problem] = [source]
            return True
    return False


def _of_layer(n: int, k: int, tokens: Sequence[int], rng: np.random.Generator) -> Problem:
    count = int(rng.choice(tokens))
    shares = {name: share for name, share in SHARES.items() if count >= LEAST_TRAINED or name[0] != "d"}
    passing = chosen(shares, rng)
    flags, places = PASSES[passing]
    m, n, k = ((count, n, k)[place] for place in places)
    if passing == "fp8":
        return Problem.of("inductor_mm", dtype="fp8e4m3", flags=flags, batch=1, m=m, n=n, k=k)
    return _product(flags, rng, 1, m, n, k)


def _of_chance(tokens: Sequence[int] | None, rng: np.random.Generator) -> Problem:
    m, n, k = (int(size) for size in np.exp(rng.uniform(*np.log(np.transpose(RANDOM_SIZES)))))
    m = m if tokens is None else int(rng.choice(tokens))
    step = chosen(STEPS, rng)
    n, k = (max(step, size // step * step) for size in (n, k))
    batch = int(np.exp(rng.uniform(0, np.log(MOST_MATRICES)))) if rng.uniform() < BATCHED else 1
    flags, _ = PASSES[chosen({name: share for name, share in SHARES.items() if name != "fp8"}, rng)]
    return _product(flags, rng, batch, m, n, k)


def _product(flags: tuple[str, ...], rng: np.random.Generator, batch: int, m: int, n: int, k: int) -> Problem:
    dtype = chosen(DTYPES, rng)
    if dtype == TF32:
        dtype, flags = "fp32", (*flags, TF32)
    return Problem.of("inductor_mm", dtype=dtype, flags=flags, batch=batch, m=m, n=n, k=k)


#: TF32 products that tensor cores add at once (PTX ISA, mma and wgmma: k8).
_TF32_STEP = 8


class InductorMM(InductorMMFamily, GeneratedFamily):
    """The family of Inductor's mm, addmm, bmm, baddbmm and scaled_mm, with all that `foretune collect` needs.

    >>> from foretune.kernels import find_family
    >>> family, h200 = find_family("inductor:mm"), DeviceSpec.named("h200")
    >>> problem = Problem.of("inductor_mm", batch=1, m=4096, n=4096, k=4096)
    >>> sum(family.supports(config, problem, h200) is None for config in family.space(h200))
    2105
    """

    def draw(self, models: Path | str | None, max_tflop: float | None, **drawn: Any) -> tuple[Case, ...]:
        """Draw the problems that `cases` returns for these arguments: layers of models, and random shapes."""
        return draw(workloads.load_dense_models(models), most_tflop=max_tflop, **drawn)

    def default(self, problem: Problem, device: DeviceSpec) -> KernelConfig:
        # Inductor's first config, then smaller ones.
        """Return the first config of Inductor's list, or the next smaller one that can run the problem."""
        for m, n, k in (
            (64, 64, 32),
            (64, 32, 32),
            (32, 64, 32),
            (32, 32, 32),
            (16, 32, 32),
            (32, 16, 32),
            (16, 16, 32),
        ):
            config = KernelConfig.of(
                BLOCK_M=m,
                BLOCK_N=n,
                BLOCK_K=k,
                GROUP_M=8,
                PERSISTENT_TMA=0,
                num_warps=min(4, m * n // 256),
                num_stages=2,
            )
            if self.supports(config, problem, device) is None:
                return config
        return super().default(problem, device)

    def operands(self, problem: Problem) -> dict[str, Operand]:
        """Return (shape, strides, dtype) of each operand by name, in the order of Inductor's op, and of "y"."""
        from .generated import operands_of

        return operands_of(problem)

    def generate(self, problem: Problem, config: KernelConfig) -> GeneratedKernel:
        """Generate Inductor's kernel for a problem and a config."""
        from .generated import product_kernel

        return product_kernel(problem, config)

    def fill(self, tensors: Mapping[str, torch.Tensor], problem: Problem, generator: torch.Generator) -> None:
        """Make the random scales of an fp8 product positive, in place."""
        for name in tensors.keys() & {"scale_a", "scale_b"}:
            tensors[name].abs_().add_(0.5)

    def reference(self, inputs: Inputs) -> torch.Tensor:
        """Return the result of the product in float32."""
        given = {name: tensor.float() for name, tensor in inputs.tensors.items() if name != "y"}
        y: torch.Tensor = given["a"] @ given["b"]
        if "scale_a" in given:
            y = y * given["scale_a"] * given["scale_b"]
        return y + given["bias"] if "bias" in given else y

    def tolerance(self, problem: Problem) -> float:
        # Rounding the float32 sum once: a relative error of about 2^-9 (bf16) or 2^-12 (fp16) at most, less on average.
        # float32 differs by the order of the sum; operands in TF32 are rounded to 2^-11 each, or cut off, which is
        # twice as far. The tensor cores also cut their sum off, by half a bit of 24 a step on average: after 151,936
        # products an H200 was off by 1.1e-3 (torch 2.11). Of float8 they keep about 14 bits of partial sums.
        """Return the maximum relative error that a correct result may have."""
        cut_off = problem["k"] / _TF32_STEP * 2.0**-25
        known = {"bf16": 4e-3, "fp16": 5e-4, "fp32": 1e-5, TF32: 1e-3 + cut_off, "fp8e4m3": 8e-3}
        return known[self.multiplied_as(problem)]

    def templates(self) -> Iterable[Any]:
        """Return Inductor's templates that the kernels are generated from."""
        from torch._inductor.kernel import bmm, mm

        return (
            mm.mm_template,
            mm.persistent_tma_mm_template,
            mm.scaled_mm_device_tma_epilogue_scaling_template,
            bmm.bmm_template,
        )
