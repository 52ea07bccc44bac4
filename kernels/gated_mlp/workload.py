"""Draw the problems to measure: gate-up layers of real dense models on one tensor-parallel rank, and random shapes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...datasets import Case, Problem
from ...model.splits import RANDOM
from ..workloads import TENSOR_PARALLEL, TOKENS, Deck, DenseModel, Draws
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


def draw(models: Sequence[DenseModel], draws: Draws) -> tuple[Case, ...]:
    """Draw problems of the gate-up layers of dense models, and random shapes.

    The layers are the distinct ones among those of each model on one of 1, 2, 4 or 8 tensor-parallel ranks. Each token
    count is drawn equally often for them.

    Args:
        models: The models whose layers to draw.
        draws: What to draw. Token counts (rows of x) are those of `kernels.workloads.TOKENS` if there are none; random
            shapes have a number of rows between the smallest and the largest.

    Raises:
        ForetuneError: Too few random shapes are within the limit.

    >>> from ..workloads import load_dense_models
    >>> len(draw(load_dense_models()[:1], Draws(random=3)))
    11
    """
    rng, most_tflop, tokens = draws.rng, draws.limit(MOST_TFLOP), draws.tokens or TOKENS
    deck = Deck(tokens, rng)
    drawn: set[Problem] = set()

    def case(count: int, n: int, k: int, sources: tuple[str, ...]) -> Case | None:
        if 4e-12 * count * n * k > most_tflop or (problem := _problem(count, n, k, sources, rng)) in drawn:
            return None
        drawn.add(problem)
        return Case(problem, sources)

    def of_layer(layer: tuple[tuple[int, int], tuple[str, ...]]) -> Case | None:
        return case(deck.draw(), *layer[0], layer[1])

    def of_chance() -> Case | None:
        n, k = (int(np.exp(rng.uniform(*np.log(widths)))) for widths in RANDOM_WIDTHS)
        step = int(rng.choice((8, 64, 128)))
        n, k = (max(size // step * step, step) for size in (n, k))
        return case(draws.between(tokens), n, k, (RANDOM,))

    return draws.cases(_layers(models).items(), of_layer, [of_chance] * draws.random)


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
