"""Which problems to measure: the heads of real dense models on one tensor-parallel rank, and random ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...datasets import Case, ForetuneError, Problem
from ...model.splits import RANDOM
from ..workloads import TENSOR_PARALLEL, TOKENS, Deck, DenseModel, check_drawn, shuffled

#: Families of models that norm each head of q and k before they rotate it; the others rotate alone.
NORMED = ("Qwen3", "Gemma")
#: Shares of fp16 (the others are bf16), of interleaved pairs, and of problems without a norm that get one all the same:
#: newer models have it.
FP16_SHARE, INTERLEAVED_SHARE, NORMED_SHARE = 0.15, 0.15, 0.5
#: Random heads: numbers of them, and sizes.
RANDOM_Q_HEADS, RANDOM_RATIOS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 64, 96, 128), (1, 2, 4, 5, 8, 16)
RANDOM_HEAD_DIMS = (32, 48, 64, 80, 96, 112, 128, 160, 192, 256)
#: Elements of q and k together: a few milliseconds on an H200.
MOST_ELEMENTS = 2**30


def draw(
    family: str,
    models: Sequence[DenseModel],
    *,
    tokens: Sequence[int] | None = None,
    per_layer: int = 2,
    random: int = 40,
    most_elements: float = MOST_ELEMENTS,
    seed: int = 0,
) -> tuple[Case, ...]:
    """Problems of one family: `per_layer` of each distinct (q heads, kv heads, head size) of the models on one of 1, 2,
    4 or 8 ranks, and `random` others. Token counts come equally often. The order is shuffled; the same arguments give
    the same cases.

    Raises `ForetuneError` for a count that cannot be.

    >>> from ..workloads import load_dense_models
    >>> len(draw("rms_norm_rope_fwd", load_dense_models()[:1], random=3))
    11
    """
    check_drawn(tokens, per_layer=per_layer, random=random, seed=seed)
    rng = np.random.default_rng(seed)
    deck = Deck(tokens or TOKENS, rng)
    drawn: dict[Problem, Case] = {}

    def add(shape: tuple[int, int, int], sources: tuple[str, ...], normed: bool) -> None:
        for _ in range(50):  # one over the limit, or a repeated one, is drawn again
            count = deck.draw()
            if sources == (RANDOM,) and tokens is None:
                count = int(np.exp(rng.uniform(0, np.log(TOKENS[-1] + 1))))
            problem = _problem(family, count, shape, normed, rng)
            if count * (shape[0] + shape[1]) * shape[2] <= most_elements and problem not in drawn:
                drawn[problem] = Case(problem, sources)
                return

    for shape, sources in _layers(models).items():
        for _ in range(per_layer):
            normed = any(source.startswith(NORMED) for source in sources) or rng.uniform() < NORMED_SHARE
            add(shape, sources, normed)
    for _ in range(random):
        ratio = int(rng.choice(RANDOM_RATIOS))
        q_heads = int(rng.choice([heads for heads in RANDOM_Q_HEADS if heads % ratio == 0]))
        shape = (q_heads, q_heads // ratio, int(rng.choice(RANDOM_HEAD_DIMS)))
        add(shape, (RANDOM,), bool(rng.uniform() < NORMED_SHARE))
    if not drawn and per_layer + random:
        raise ForetuneError(f"no problem has at most {most_elements:g} elements: allow more, or fewer tokens")
    return shuffled(list(drawn.values()), rng)


def _layers(models: Sequence[DenseModel]) -> dict[tuple[int, int, int], tuple[str, ...]]:
    """Distinct (q heads, kv heads, head size) on one rank, and whose they are."""
    layers: dict[tuple[int, int, int], tuple[str, ...]] = {}
    for model in models:
        if model.head_dim % 16:
            continue
        shapes = {(*model.heads_on_rank(degree), model.head_dim) for degree in TENSOR_PARALLEL if model.splits(degree)}
        for shape in sorted(shapes):
            layers[shape] = (*layers.get(shape, ()), f"{model.model}/qk")
    return layers


def _problem(family: str, tokens: int, shape: tuple[int, int, int], normed: bool, rng: np.random.Generator) -> Problem:
    dtype = "fp16" if rng.uniform() < FP16_SHARE else "bf16"
    flags = ("interleaved",) if rng.uniform() < INTERLEAVED_SHARE else ()
    if not normed and family == "rms_norm_rope_fwd":  # whose gradient is a rotation too: see `op`
        flags = (*flags, "unnormed")
    q_heads, kv_heads, head_dim = shape
    return Problem.of(
        family, dtype=dtype, flags=flags, tokens=tokens, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim
    )
