"""Draw the problems to measure: gate-up layers of real dense models on one tensor-parallel rank, and random shapes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...datasets import Case, ForetuneError, Problem
from ...model.splits import RANDOM
from ..workloads import TENSOR_PARALLEL, TOKENS, Deck, DenseModel, check_drawn, shuffled
from .space import flags_of

#: Prefixes of the names of models that use gelu_tanh; all others use silu.
GELU_TANH = ("Gemma",)
#: Share of problems in fp16 (the others are bf16), of random shapes with gelu_tanh, and of problems with the flag
#: "saves", as in training.
FP16_SHARE, GELU_SHARE, SAVING_SHARE = 0.15, 0.15, 0.3
#: The ranges of N and of K of random shapes.
RANDOM_WIDTHS = ((128, 28672), (256, 16384))
#: The most floating-point operations of one problem, in 1e12: a few milliseconds with the best config on an H200.
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
    """Draw problems of the gate-up layers of dense models, and random shapes.

    The layers are the distinct ones among those of each model on one of 1, 2, 4 or 8 tensor-parallel ranks. Each token
    count is drawn equally often for them. The order is shuffled, so that a collection that stops early has a
    representative sample. The same arguments give the same cases.

    Args:
        models: The models whose layers to draw.
        tokens: The token counts (rows of x) to draw from; those of `kernels.workloads.TOKENS` if None. Random shapes
            have a number of rows between the smallest and the largest.
        per_layer: The number of problems of each layer; a layer gets fewer if too few are within the limit.
        random: The number of random shapes.
        most_tflop: The maximum number of floating-point operations of one problem, in 1e12.
        seed: The seed of all random choices.

    Raises:
        ForetuneError: A count or the seed is not valid, or too few random shapes are within `most_tflop`.

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
            for _ in range(50):  # draw again if it is over the limit or a duplicate
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
                f"no random shape with at least {low} rows needs at most {most_tflop} TFLOP: raise the limit, or use "
                "smaller token counts"
            )
    return shuffled(list(drawn.values()), rng)


def _layers(models: Sequence[DenseModel]) -> dict[tuple[int, int], tuple[str, ...]]:
    """Return the names of the gate-up layers on one rank by their shape, (N, K)."""
    layers: dict[tuple[int, int], tuple[str, ...]] = {}
    for model in models:
        for degree in TENSOR_PARALLEL:
            if model.splits(degree):
                shape = (model.intermediate_size // degree, model.hidden_size)
                layers[shape] = (*layers.get(shape, ()), f"{model.model}/gate_up")
    return layers


def _problem(m: int, n: int, k: int, sources: Sequence[str], rng: np.random.Generator) -> Problem:
    dtype = "fp16" if rng.uniform() < FP16_SHARE else "bf16"
    gelu = sources[0].startswith(GELU_TANH) or (sources[0] == RANDOM and rng.uniform() < GELU_SHARE)
    flags = flags_of("gelu_tanh" if gelu else "silu", saves=bool(rng.uniform() < SAVING_SHARE))
    return Problem.of("gated_mlp", dtype=dtype, flags=flags, m=m, n=n, k=k)
