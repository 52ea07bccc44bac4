"""Problems to measure: gate-up layers of real dense models on one tensor-parallel rank, and random shapes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...datasets import Case, ForetuneError, Problem
from ...model.splits import RANDOM
from ..workloads import TENSOR_PARALLEL, TOKENS, Deck, DenseModel, check_drawn, shuffled
from .space import flags_of

#: Prefixes of the names of models that use gelu_tanh instead of silu.
GELU_TANH = ("Gemma",)
#: Fractions of fp16 problems (the others are bf16), of gelu_tanh in random shapes, and of calls that save gate and up,
#: as training does.
FP16_SHARE, GELU_SHARE, SAVING_SHARE = 0.15, 0.15, 0.3
#: Ranges of the random N and K.
RANDOM_WIDTHS = ((128, 28672), (256, 16384))
#: Operations of the largest problem, in 1e12: a few milliseconds on an H200 with the best config.
MOST_TFLOP = 2.5


def draw(
    models: Sequence[DenseModel],
    *,
    tokens: Sequence[int] | None = None,
    per_layer: int = 2,
    random: int = 40,
    most_tflop: float = MOST_TFLOP,
    seed: int = 0,
) -> tuple[Case, ...]:
    """Draw problems of real models and random shapes, in random order.

    Token counts of real layers are drawn equally often; those of random shapes are log-uniform. Because the order is
    random, a run that stops early has a fair sample. Equal arguments give equal cases.

    Args:
        models: Models whose gate-up layers are drawn, on one of 1, 2, 4 or 8 tensor-parallel ranks.
        tokens: Token counts to draw from; `workloads.TOKENS` by default.
        per_layer: Problems per distinct layer.
        random: Number of random shapes.
        most_tflop: The largest problem, in 1e12 floating-point operations.
        seed: Seed of the random generator.

    Raises:
        ForetuneError: An argument is out of range, or almost no random shape is within `most_tflop`.

    >>> from ..workloads import load_dense_models
    >>> len(draw(load_dense_models()[:1], random=3))
    11
    """
    check_drawn(tokens, per_layer=per_layer, random=random, seed=seed)
    rng = np.random.default_rng(seed)
    drawn: dict[Problem, Case] = {}
    deck = Deck(tokens or TOKENS, rng)
    for (n, k), sources in _layers(models).items():
        for _ in range(per_layer):
            for _ in range(50):  # draw again if over the limit or repeated
                count = deck.draw()
                if 4e-12 * count * n * k > most_tflop:
                    continue
                problem = _problem(count, n, k, sources, rng)
                if problem not in drawn:
                    drawn[problem] = Case(problem, sources)
                    break
    low, high = min(tokens or TOKENS), max(tokens or TOKENS)
    for _ in range(random):
        for _ in range(10_000):
            n, k = (int(np.exp(rng.uniform(*np.log(widths)))) for widths in RANDOM_WIDTHS)
            step = int(rng.choice((8, 64, 128)))
            n, k = (max(size // step * step, step) for size in (n, k))
            count = int(np.exp(rng.uniform(np.log(low), np.log(high + 1))))
            if 4e-12 * count * n * k > most_tflop:
                continue
            problem = _problem(count, n, k, (RANDOM,), rng)
            if problem not in drawn:
                drawn[problem] = Case(problem, (RANDOM,))
                break
        else:
            raise ForetuneError(
                f"no random shape with at least {low} rows has at most {most_tflop} TFLOP: raise the limit or lower "
                "tokens"
            )
    return shuffled(list(drawn.values()), rng)


def _layers(models: Sequence[DenseModel]) -> dict[tuple[int, int], tuple[str, ...]]:
    """Return the distinct (N, K) of one rank, each with the names of its layers."""
    layers: dict[tuple[int, int], tuple[str, ...]] = {}
    for model in models:
        for degree in TENSOR_PARALLEL:
            if model.splits(degree):
                shape = (model.intermediate_size // degree, model.hidden_size)
                layers[shape] = (*layers.get(shape, ()), f"{model.model}/gate_up")
    return layers


def _problem(m: int, n: int, k: int, sources: Sequence[str], rng: np.random.Generator) -> Problem:
    """Return a problem with random dtype and flags."""
    dtype = "fp16" if rng.uniform() < FP16_SHARE else "bf16"
    gelu = sources[0].startswith(GELU_TANH) or (sources[0] == RANDOM and rng.uniform() < GELU_SHARE)
    flags = flags_of("gelu_tanh" if gelu else "silu", saves=bool(rng.uniform() < SAVING_SHARE))
    return Problem.of("gated_mlp", dtype=dtype, flags=flags, m=m, n=n, k=k)
