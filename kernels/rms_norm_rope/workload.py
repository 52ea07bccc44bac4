"""The problems to measure: the heads of real dense models on one tensor-parallel rank, and random ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...datasets import Case, ForetuneError, Problem
from ...model.splits import RANDOM
from ..workloads import TENSOR_PARALLEL, TOKENS, Deck, DenseModel, Draws, shuffled

#: Families of models that normalize each head of q and k before rotating it; the others only rotate.
NORMED = ("Qwen3", "Gemma")
#: The shares of fp16 (the others are bf16), of interleaved pairs, and of problems of models without a norm that get one
#: anyway, because newer models have it.
FP16_SHARE, INTERLEAVED_SHARE, NORMED_SHARE = 0.15, 0.15, 0.5
#: Random heads: their numbers, ratios of q to kv heads, and sizes.
RANDOM_Q_HEADS, RANDOM_RATIOS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 64, 96, 128), (1, 2, 4, 5, 8, 16)
RANDOM_HEAD_DIMS = (32, 48, 64, 80, 96, 112, 128, 160, 192, 256)
#: The most elements of q and k together: a few milliseconds on an H200.
MOST_ELEMENTS = 2**30


def draw(
    family: str, models: Sequence[DenseModel], draws: Draws, *, most_elements: float = MOST_ELEMENTS
) -> tuple[Case, ...]:
    """Draw problems of one family. Token counts appear equally often.

    Args:
        family: The name of the family.
        models: The models whose heads are drawn, on 1, 2, 4 or 8 ranks: each distinct (q heads, kv heads, head size).
        draws: What to draw. Token counts are TOKENS if there are none.
        most_elements: The maximum number of elements of q and k together in one problem.

    Raises:
        ForetuneError: No problem is within the limit.

    >>> from ..workloads import load_dense_models
    >>> len(draw("rms_norm_rope_fwd", load_dense_models()[:1], Draws(random=3)))
    11
    """
    rng, tokens = draws.rng, draws.tokens
    deck = Deck(tokens or TOKENS, rng)
    drawn: dict[Problem, Case] = {}

    def add(shape: tuple[int, int, int], sources: tuple[str, ...], normed: bool) -> None:
        for _ in range(50):  # draw again if the problem exceeds the limit or repeats one
            count = deck.draw()
            if sources == (RANDOM,) and tokens is None:
                count = draws.between(TOKENS)
            problem = _problem(family, count, shape, normed, rng)
            if count * (shape[0] + shape[1]) * shape[2] <= most_elements and problem not in drawn:
                drawn[problem] = Case(problem, sources)
                return

    for shape, sources in _layers(models).items():
        for _ in range(draws.per_layer):
            normed = any(source.startswith(NORMED) for source in sources) or rng.uniform() < NORMED_SHARE
            add(shape, sources, normed)
    for _ in range(draws.random):
        ratio = int(rng.choice(RANDOM_RATIOS))
        q_heads = int(rng.choice([heads for heads in RANDOM_Q_HEADS if heads % ratio == 0]))
        shape = (q_heads, q_heads // ratio, int(rng.choice(RANDOM_HEAD_DIMS)))
        add(shape, (RANDOM,), bool(rng.uniform() < NORMED_SHARE))
    if not drawn and draws.per_layer + draws.random:
        raise ForetuneError(
            f"found no problem with at most {most_elements:g} elements: raise the limit or lower the token counts"
        )
    return shuffled(list(drawn.values()), rng)


def _layers(models: Sequence[DenseModel]) -> dict[tuple[int, int, int], tuple[str, ...]]:
    """Return the distinct (q heads, kv heads, head size) on one rank, with the models that have them."""
    layers: dict[tuple[int, int, int], tuple[str, ...]] = {}
    for model in models:
        if model.head_dim % 16:
            continue
        shapes = {(*model.heads_on_rank(degree), model.head_dim) for degree in TENSOR_PARALLEL if model.splits(degree)}
        for shape in sorted(shapes):
            layers[shape] = (*layers.get(shape, ()), f"{model.model}/qk")
    return layers


def _problem(family: str, tokens: int, shape: tuple[int, int, int], normed: bool, rng: np.random.Generator) -> Problem:
    """Return a problem with these tokens and heads (q heads, kv heads, head size), of random dtype and layout.

    Unless `normed`, heads are only rotated.
    """
    dtype = "fp16" if rng.uniform() < FP16_SHARE else "bf16"
    flags = ("interleaved",) if rng.uniform() < INTERLEAVED_SHARE else ()
    if not normed and family == "rms_norm_rope_fwd":  # the gradient of a rotation is a rotation too: see `op`
        flags = (*flags, "unnormed")
    q_heads, kv_heads, head_dim = shape
    return Problem.of(
        family, dtype=dtype, flags=flags, tokens=tokens, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim
    )
