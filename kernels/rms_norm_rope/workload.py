"""Problems to measure: attention heads of real dense models on one tensor-parallel rank, and random ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...datasets import Case, ForetuneError, Problem
from ...model.splits import RANDOM
from ..workloads import TENSOR_PARALLEL, TOKENS, Deck, DenseModel, check_drawn, shuffled

#: Prefixes of the names of models that normalize the heads of q and k before rotating them; others only rotate.
NORMED = ("Qwen3", "Gemma")
#: Fractions of fp16 problems (the others are bf16), of interleaved pairs, and of other models' and random problems that
#: are given a norm, because newer models have one.
FP16_SHARE, INTERLEAVED_SHARE, NORMED_SHARE = 0.15, 0.15, 0.5
#: Numbers of q heads, ratios of q heads to kv heads, and head sizes of random problems.
RANDOM_Q_HEADS, RANDOM_RATIOS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 64, 96, 128), (1, 2, 4, 5, 8, 16)
RANDOM_HEAD_DIMS = (32, 48, 64, 80, 96, 112, 128, 160, 192, 256)
#: Most elements of q and k together: a few milliseconds on an H200.
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
    """Draw problems of one family, in random order.

    Token counts of real layers are drawn equally often; those of random problems are log-uniform unless `tokens` is
    given. Equal arguments give equal cases.

    Args:
        family: "rms_norm_rope_fwd" or "rms_norm_rope_bwd".
        models: Models whose heads are drawn, on one of 1, 2, 4 or 8 tensor-parallel ranks.
        tokens: Token counts to draw from; `workloads.TOKENS` by default.
        per_layer: Problems per distinct (q heads, kv heads, head size).
        random: Number of random shapes.
        most_elements: The largest problem, in elements of q and k together.
        seed: Seed of the random generator.

    Raises:
        ForetuneError: An argument is out of range, or no problem is within `most_elements`.

    >>> from ..workloads import load_dense_models
    >>> len(draw("rms_norm_rope_fwd", load_dense_models()[:1], random=3))
    11
    """
    check_drawn(tokens, per_layer=per_layer, random=random, seed=seed)
    rng = np.random.default_rng(seed)
    deck = Deck(tokens or TOKENS, rng)
    drawn: dict[Problem, Case] = {}

    def add(shape: tuple[int, int, int], sources: tuple[str, ...], normed: bool) -> None:
        for _ in range(50):  # draw again if over the limit or repeated
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
        raise ForetuneError(f"no problem has at most {most_elements:g} elements: raise the limit or lower tokens")
    return shuffled(list(drawn.values()), rng)


def _layers(models: Sequence[DenseModel]) -> dict[tuple[int, int, int], tuple[str, ...]]:
    """Return the distinct (q heads, kv heads, head size) of one rank, each with the names of its layers."""
    layers: dict[tuple[int, int, int], tuple[str, ...]] = {}
    for model in models:
        if model.head_dim % 16:
            continue
        shapes = {(*model.heads_on_rank(degree), model.head_dim) for degree in TENSOR_PARALLEL if model.splits(degree)}
        for shape in sorted(shapes):
            layers[shape] = (*layers.get(shape, ()), f"{model.model}/qk")
    return layers


def _problem(family: str, tokens: int, shape: tuple[int, int, int], normed: bool, rng: np.random.Generator) -> Problem:
    """Return a problem with random dtype and layout."""
    dtype = "fp16" if rng.uniform() < FP16_SHARE else "bf16"
    flags = ("interleaved",) if rng.uniform() < INTERLEAVED_SHARE else ()
    if not normed and family == "rms_norm_rope_fwd":  # its gradient runs the forward kernel: see `op`
        flags = (*flags, "unnormed")
    q_heads, kv_heads, head_dim = shape
    return Problem.of(
        family, dtype=dtype, flags=flags, tokens=tokens, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim
    )
