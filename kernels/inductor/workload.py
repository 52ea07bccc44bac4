"""Which products to measure through Inductor: linear layers of real dense models, and random shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from ...datasets import Case, ForetuneError, Problem
from ...model.splits import RANDOM
from ..dense_llms import DenseModel
from ..drawing import check_drawn, chosen, shuffled
from .matmul import TF32, is_exact

#: Tokens of one call, from decode to training.
TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
#: As compiled models call them: y = x @ w.T, and where that is trained dx = dy @ w and dw = dy.T @ x; as (flags, which
#: of (tokens, n, k) are m, n and k).
PASSES = {
    "forward": (("b_transposed",), (0, 1, 2)),
    "bias": (("b_transposed", "bias"), (0, 1, 2)),
    "fp8": (("b_transposed",), (0, 1, 2)),
    "dx": ((), (0, 2, 1)),
    "dw": (("a_transposed",), (1, 2, 0)),
}
SHARES = {"forward": 0.5, "bias": 0.1, "fp8": 0.1, "dx": 0.15, "dw": 0.15}
#: With fewer tokens nothing is trained.
LEAST_TRAINED = 128
#: TF32 is float32 with a flag. Without it products are exact, and their configs that spill take seconds.
DTYPES = {"bf16": 0.8, "fp16": 0.1, TF32: 0.07, "fp32": 0.03}
#: Random shapes: ranges of m, n and k, and what n and k are multiples of, with shares.
RANDOM_SIZES = ((1, 16384), (16, 16384), (16, 16384))
STEPS = {1: 0.1, 8: 0.2, 64: 0.35, 256: 0.35}
BATCHED, MOST_MATRICES = 0.15, 128
#: Limits of one problem: a few milliseconds on an H200, and operands that fit beside everything else.
MOST_TFLOP, MOST_BYTES = 2.0, 4e9
#: float32 that is not rounded to TF32 takes about so many times as long (H100 whitepaper: 990 and 67 TFLOP/s).
_FP32_SLOWER = 16
#: So many draws over the limits in a row: there is hardly one within.
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
    """`per_layer` problems of each linear layer of each model, and `random` random ones, shuffled, none of more than
    `most_tflop` times 1e12 floating-point operations (a sixteenth in fp32, which is so much slower). The same arguments
    give the same cases.

    Raises `ForetuneError` for counts that are negative, token counts that no call has, and where nothing is within the
    limit.

    >>> from ..dense_llms import load_dense_models
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
    """One more problem within the limits, if one is drawn in time."""
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
