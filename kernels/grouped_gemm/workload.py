"""The problems to measure: the layers of real MoE models, and random shapes in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from ...datasets import Case, Problem
from ...model.splits import RANDOM
from ..workloads import TENSOR_PARALLEL, Deck, Draws, Model
from .group_sizes import ROUTINGS, drawn_sizes

#: Routed rows (tokens x top_k) of one call, from decode to training.
ROWS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
#: Expert-parallel degrees: each rank holds num_experts / degree experts.
EXPERT_PARALLEL = (1, 4, 8, 16)
#: A rank's part of the intermediate size is a multiple of this.
SPLIT_STEP = 64
#: Synthetic models: their numbers of experts, the values whose multiples their widths are, and the ranges of widths
#: (hidden, intermediate).
INVENTED_EXPERTS = (8, 16, 32, 48, 60, 64, 72, 96, 128, 144, 160, 192, 256, 288, 320, 384, 512)
INVENTED_STEPS = (64, 128, 256, 512)
INVENTED_WIDTHS = ((1024, 8192), (256, 24576))
#: The share of problems in fp16 (the others are in bf16), and of those with the layer's permutation fused.
FP16_SHARE, PERMUTED_SHARE = 0.15, 0.35
#: The permutation that can be fused into each projection: tokens are gathered at a layer's input, and scattered at its
#: output.
PERMUTATION = {"w13": "permute_x", "w2": "permute_y"}
#: Limits of one problem: a few milliseconds on an H200 with the best config, and weights that fit in memory next to the
#: other tensors.
MOST_TFLOP = 2.5
MOST_WEIGHT_BYTES = 12e9


def draw(family: str, models: Sequence[Model], draws: Draws) -> tuple[Case, ...]:
    """Draw problems of one grouped GEMM family.

    Both projections of each model are crossed with row counts, expert-parallel and tensor-parallel degrees, and
    routings by stratified sampling, so that every count appears equally often. Some problems are in fp16, and some have
    the layer's permutation fused.

    Args:
        family: The name of the family.
        models: The models whose layers are drawn.
        draws: What to draw. Token counts are multiplied by a model's top_k; without any, ROWS has the numbers of rows.

    Raises:
        ForetuneError: Too few random shapes are within the limits.

    >>> from ..workloads import load_models
    >>> len(draw("grouped_gemm_fwd", load_models()[:2], Draws(random=3)))
    11
    """
    rng, tokens, most_tflop = draws.rng, draws.tokens, draws.limit(MOST_TFLOP)
    deck = Deck(tokens or ROWS, rng)
    taken: set[tuple[int, ...]] = set()

    def of_layer(item: tuple[tuple[int, int, int], _Layer]) -> Case | None:
        (experts, n, k), layer = item
        degrees = [degree for degree in EXPERT_PARALLEL if experts % degree == 0 and experts // degree >= 2]
        groups = experts // int(rng.choice(degrees))
        on_rank = _split(n, k, layer.sources[0], layer.inter, rng)
        shape = groups, deck.draw() * (int(rng.choice(layer.top_ks)) if tokens else 1), *on_rank
        if (*item[0], *shape) in taken or not _affordable(*shape, most_tflop):
            return None
        taken.add((*item[0], *shape))
        return _case(family, *shape, layer.sources, rng)

    def of_chance(draw_shape: Callable[[np.random.Generator], tuple[int, int, int, str]]) -> Case | None:
        groups, n, k, source = draw_shape(rng)
        shape = groups, draws.between(tokens or ROWS), n, k
        return _case(family, *shape, (source,), rng) if _affordable(*shape, most_tflop) else None

    shapes = [_random_shape] * draws.random + [_invented_shape] * draws.invented
    return draws.cases(_layers(models).items(), of_layer, [partial(of_chance, shape) for shape in shapes])


@dataclass
class _Layer:
    """The models with one layer shape: their "MODEL/PROJECTION" names, top_k values and intermediate size."""

    inter: int
    sources: tuple[str, ...] = ()
    top_ks: tuple[int, ...] = ()


def _layers(models: Sequence[Model]) -> dict[tuple[int, int, int], _Layer]:
    """Return the models of each distinct layer shape (experts, N, K)."""
    layers: dict[tuple[int, int, int], _Layer] = {}
    for model in models:
        for projection, (n, k) in model.projections().items():
            layer = layers.setdefault((model.num_experts, n, k), _Layer(model.moe_intermediate_size))
            layer.sources += (f"{model.model}/{projection}",)
            layer.top_ks += (model.top_k,)
    return layers


def _split(n: int, k: int, source: str, inter: int, rng: np.random.Generator) -> tuple[int, int]:
    """Return (N, K) of a layer on one rank of a random tensor-parallel degree, which is 1 with probability 1/2.

    The degree divides the intermediate size `inter`, which is in N if `source` ends with "/w13", else K.
    """
    degrees = [degree for degree in TENSOR_PARALLEL[1:] if inter % (degree * SPLIT_STEP) == 0]
    degree = int(rng.choice(degrees)) if degrees and rng.uniform() < 0.5 else 1
    return (n // degree, k) if source.endswith("/w13") else (n, k // degree)


def _random_shape(rng: np.random.Generator) -> tuple[int, int, int, str]:
    """Draw (groups, N, K) at random; return them and the source that marks a random shape."""
    groups, n, k = (int(s) for s in np.exp(rng.uniform(np.log((1, 128, 128)), np.log((512, 16384, 16384)))))
    step = int(rng.choice((8, 64, 128)))
    n, k = (max(step, size // step * step) for size in (n, k))
    return groups, n, k, RANDOM


def _invented_shape(rng: np.random.Generator) -> tuple[int, int, int, str]:
    """Draw a layer of a synthetic model on one rank: (groups, N, K) and "random/w13" or "random/w2"."""
    experts = int(rng.choice(INVENTED_EXPERTS))
    groups = experts // int(rng.choice([degree for degree in EXPERT_PARALLEL if experts % degree == 0]))
    hidden, inter = (
        max(step, int(np.exp(rng.uniform(*np.log(widths)))) // step * step)
        for widths, step in zip(INVENTED_WIDTHS, rng.choice(INVENTED_STEPS, 2).tolist(), strict=True)
    )
    projection = str(rng.choice(list(PERMUTATION)))
    n, k = (2 * inter, hidden) if projection == "w13" else (hidden, inter)
    return max(groups, 2), *_split(n, k, f"{RANDOM}/{projection}", inter, rng), f"{RANDOM}/{projection}"


def _affordable(groups: int, rows: int, n: int, k: int, most_tflop: float) -> bool:
    """Return whether a problem needs at most `most_tflop` TFLOP and has at most `MOST_WEIGHT_BYTES` of weights."""
    return 2e-12 * rows * n * k <= most_tflop and 2.0 * groups * n * k <= MOST_WEIGHT_BYTES


def _case(
    family: str, groups: int, rows: int, n: int, k: int, sources: tuple[str, ...], rng: np.random.Generator
) -> Case:
    """Return a case with random routing, dtype and permutation; `sources` name the layers ("MODEL/PROJECTION")."""
    routing = str(rng.choice(list(ROUTINGS), p=list(ROUTINGS.values())))
    dtype = "fp16" if rng.uniform() < FP16_SHARE else "bf16"
    projections = [source.rsplit("/", 1)[1] for source in sources if "/" in source] or list(PERMUTATION)
    possible = [PERMUTATION[projection] for projection in projections]
    flags = (str(rng.choice(possible)),) if rng.uniform() < PERMUTED_SHARE else ()
    sizes = drawn_sizes(routing, rows, groups, rng)
    problem = Problem.of(family, dtype=dtype, flags=flags, groups=groups, rows=rows, n=n, k=k, ragged={"rows": sizes})
    return Case(problem, sources, routing)
