"""The problems to measure: the linear layers and experts of real models, and random shapes in between."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ...datasets import Case, Problem
from ...model.splits import RANDOM
from ..grouped_gemm import workload as grouped
from ..grouped_gemm.group_sizes import ROUTINGS, drawn_sizes
from ..workloads import TENSOR_PARALLEL, TOKENS, DenseModel, Draws, Model
from .space import DTYPE, GRANULARITIES, STEP, flags_of

T = TypeVar("T")


#: The share of each granularity of scales: most users of fp8 have blocks (DeepSeek's models) or rows (vLLM, torchao).
GRANULARITY_SHARES = {"blockwise": 0.5, "rowwise": 0.3, "tensorwise": 0.2}
#: The dense layers of DeepSeek-V3 (and R1) as (N, K), which use blockwise fp8; see its `inference/model.py`.
DEEPSEEK_V3 = {
    "q_a": (1536, 7168),
    "q_b": (24576, 1536),
    "kv_a": (576, 7168),
    "kv_b": (32768, 512),
    "o": (7168, 16384),
    "gate_up": (36864, 7168),
    "down": (7168, 18432),
    "shared_gate_up": (4096, 7168),
    "shared_down": (7168, 2048),
}
#: The layers whose N, and those whose K, tensor parallelism splits.
_SPLIT_N, _SPLIT_K = ("q_b", "kv_b", "gate_up", "shared_gate_up"), ("o", "down", "shared_down")
#: A rank's part of a split width is a multiple of this.
_PART = 64
#: Limits of one problem: a few milliseconds on an H200 with the best config, and weights that fit in memory next to the
#: other tensors.
MOST_TFLOP, MOST_BYTES = 4.0, 12e9
#: Random widths of N and K: the range (log-uniform), and the values whose multiples they are.
_RANDOM_WIDTHS, _RANDOM_STEPS = (128, 32768), (16, 64, 128)


@dataclass(frozen=True)
class Layer:
    """A layer shape (N, K), and the "MODEL/LAYER" names of the layers that have it."""

    n: int
    k: int
    sources: tuple[str, ...]


def dense_layers(models: Sequence[DenseModel], with_deepseek: bool = True) -> tuple[Layer, ...]:
    """Return the layers of these models on 1 to 8 ranks, and those of DeepSeek-V3, each (N, K) once.

    The source of a shape that several model families share is "random/LAYER": with their names, cross-validation would
    have to hold out these families together.

    >>> from ..workloads import load_dense_models
    >>> len(dense_layers(load_dense_models()[:1], with_deepseek=False)) > 5
    True
    """
    found: dict[tuple[int, int], list[str]] = {}
    named = [*_of_deepseek()] if with_deepseek else []
    for model in models:
        for degree in TENSOR_PARALLEL:
            if model.splits(degree):
                layers = model.linear_layers(degree).items()
                named += [(f"{model.model}/{name}", n, k) for name, (n, k) in layers]
    for source, n, k in named:
        if n % STEP == 0 and k % STEP == 0:
            sources = found.setdefault((n, k), [])
            if source not in sources:
                sources.append(source)
    return tuple(Layer(n, k, _owners(sources)) for (n, k), sources in found.items())


def _owners(sources: Sequence[str]) -> tuple[str, ...]:
    """Return these "MODEL/LAYER" sources, or "random/LAYER" alone if they belong to several model families."""
    families = Case(Problem.of("any", n=1), tuple(sources)).model_families
    return tuple(sources) if len(families) == 1 else (f"{RANDOM}/{sources[0].rpartition('/')[2]}",)


def _of_deepseek() -> Iterator[tuple[str, int, int]]:
    """Yield (source, N, K) of DeepSeek-V3's layers on 1 to 8 ranks."""
    for name, (n, k) in DEEPSEEK_V3.items():
        for degree in TENSOR_PARALLEL:
            if name in _SPLIT_N and n % (degree * _PART) == 0:
                yield f"DeepSeek-V3/{name}", n // degree, k
            elif name in _SPLIT_K and k % (degree * _PART) == 0:
                yield f"DeepSeek-V3/{name}", n, k // degree
            elif degree == 1:
                yield f"DeepSeek-V3/{name}", n, k


def draw_dense(
    family: str, models: Sequence[DenseModel], draws: Draws, *, with_deepseek: bool = True
) -> tuple[Case, ...]:
    """Draw problems of the dense family.

    Token counts and granularities are drawn by stratified sampling, so that each appears with its share.

    Args:
        family: The name of the family.
        models: The models whose layers are drawn, on one to eight ranks.
        draws: What to draw. Token counts are TOKENS if there are none.
        with_deepseek: Add the dense layers of DeepSeek-V3.

    Raises:
        ForetuneError: Too few random shapes are within the limits.

    >>> from ..workloads import load_dense_models
    >>> drawn = Draws(per_layer=1, random=3)
    >>> len(draw_dense("scaled_gemm", load_dense_models()[:1], drawn, with_deepseek=False)) > 10
    True
    """
    rng, most_tflop, tokens = draws.rng, draws.limit(MOST_TFLOP), draws.tokens or TOKENS
    counts, granularities = _endless(rng, tokens), _granularities(rng)
    taken: set[tuple[Layer, int]] = set()

    def of_layer(layer: Layer) -> Case | None:
        m = next(counts)
        if (layer, m) in taken or not _affordable(m, layer.n, layer.k, most_tflop):
            return None
        taken.add((layer, m))
        return _case(family, next(granularities), layer.sources, m=m, n=layer.n, k=layer.k)

    def of_chance() -> Case | None:
        n, k = _random_widths(rng)
        m = draws.between(tokens)
        fits = _affordable(m, n, k, most_tflop)
        return _case(family, next(granularities), (RANDOM,), m=m, n=n, k=k) if fits else None

    return draws.cases(dense_layers(models, with_deepseek), of_layer, [of_chance] * draws.random, len(tokens))


def draw_grouped(family: str, models: Sequence[Model], draws: Draws) -> tuple[Case, ...]:
    """Draw problems of the grouped family.

    They are those of `grouped_gemm`'s forward pass with widths rounded down to what fp8 supports, new routings, and
    scales of one granularity each. The arguments are those of `grouped_gemm.workload.draw`.

    >>> from ..workloads import load_models
    >>> len(draw_grouped("scaled_grouped_gemm_fwd", load_models()[:2], Draws(random=0)))
    8
    """
    rng = np.random.default_rng(draws.seed)
    granularities = _granularities(rng)
    draws.limit(MOST_TFLOP)  # else it would be that of the bf16 family
    drawn = []
    for case in grouped.draw("grouped_gemm_fwd", models, draws):
        shape = dict(case.problem.dims)
        n, k = (max(shape[dim] // STEP, 1) * STEP for dim in ("n", "k"))
        routing = str(rng.choice(list(ROUTINGS), p=list(ROUTINGS.values())))
        sizes = drawn_sizes(routing, shape["rows"], shape["groups"], rng)
        dims = shape | {"n": n, "k": k}
        drawn.append(_case(family, next(granularities), case.sources, routing, ragged={"rows": sizes}, **dims))
    return tuple(drawn)


def _case(
    family: str,
    granularity: str,
    sources: tuple[str, ...],
    scenario: str = "",
    **shape: int | Mapping[str, Sequence[int]],
) -> Case:
    """Return the case of a problem with scales of one granularity; `shape` has its dimensions and group sizes."""
    problem = Problem.of(family, dtype=DTYPE, flags=flags_of(granularity), **shape)  # type: ignore[arg-type]
    return Case(problem, sources, scenario)


def _endless(rng: np.random.Generator, values: Sequence[T]) -> Iterator[T]:
    """Yield the values in random order without end; each appears once before any is repeated."""
    while True:
        yield from (values[place] for place in rng.permutation(len(values)))


def _granularities(rng: np.random.Generator) -> Iterator[str]:
    """Yield granularities of scales without end; of every ten, each has the number that GRANULARITY_SHARES gives it."""
    return _endless(
        rng, [granularity for granularity in GRANULARITIES for _ in range(round(10 * GRANULARITY_SHARES[granularity]))]
    )


def _affordable(m: int, n: int, k: int, most_tflop: float) -> bool:
    """Return whether a problem needs at most `most_tflop` TFLOP, and its tensors are small enough to measure."""
    return 2e-12 * m * n * k <= most_tflop and m * (k + 2.0 * n) + n * k <= MOST_BYTES


def _random_widths(rng: np.random.Generator) -> tuple[int, int]:
    """Draw the widths (N, K) of a random layer."""
    step = int(rng.choice(_RANDOM_STEPS))
    low, high = np.log(_RANDOM_WIDTHS)
    widths = np.exp(rng.uniform(low, high, size=2)).astype(int)
    n, k = (max(step, int(width) // step * step) for width in widths)
    return n, k
