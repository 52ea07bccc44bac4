"""Which problems to measure: the layers of real MoE models, and random shapes that fill the gaps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from ..datasets import Case, ForetuneError, Model, Problem

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..datasets.dataset import Dataset

#: Routed rows (tokens x top_k) of one call, from decode to training.
ROWS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
#: Expert-parallel degrees: each rank holds num_experts / degree experts.
EXPERT_PARALLEL = (1, 4, 8, 16)
#: How rows spread over experts, and how often a case is drawn so.
ROUTINGS = {"uniform": 0.4, "balanced": 0.2, "zipf": 0.25, "hot": 0.15}
#: Shares of the problems in fp16 (the others are in bf16), and of those with the permutation of their layer fused.
FP16_SHARE, PERMUTED_SHARE = 0.15, 0.35
#: What can be fused into each projection: tokens are gathered on the way into a layer, and scattered on the way out.
PERMUTATION = {"w13": "permute_x", "w2": "permute_y"}
#: Limits of one problem: on an H200 a few milliseconds at the best config, and weights that fit beside everything else.
MOST_TFLOP = 2.5
MOST_WEIGHT_BYTES = 12e9
#: With more tokens than this hardly any layer is within the limits.
MOST_TOKENS = 1 << 22
#: So many draws of a random shape that are over the limits in a row: there is hardly one within.
MOST_DRAWS = 10_000


def group_sizes(routing: str, rows: int, groups: int, rng: np.random.Generator) -> tuple[int, ...]:
    """Rows of each group, (groups,), summing to `rows`.

    balanced: as even as can be. uniform: each row picks a group at random. zipf: group i is picked with a
    probability proportional to 1 / i, in random order. hot: one group has half the rows, the rest is uniform.

    >>> group_sizes("balanced", 10, 4, np.random.default_rng(0))
    (3, 3, 2, 2)
    """
    if routing == "balanced":
        return tuple(rows // groups + (group < rows % groups) for group in range(groups))
    if routing == "uniform":
        shares = np.full(groups, 1 / groups)
    elif routing == "zipf":
        weights = 1 / np.arange(1, groups + 1)
        shares = rng.permutation(weights / weights.sum())
    elif routing == "hot":
        shares = np.full(groups, 0.5 / groups)
        shares[rng.integers(groups)] += 0.5
    else:
        raise ForetuneError(f"routing must be one of {', '.join(ROUTINGS)} but got {routing!r}")
    sizes: NDArray[np.int64] = rng.multinomial(rows, shares)
    return tuple(int(size) for size in sizes)


def cases(
    family: str,
    models: Sequence[Model],
    *,
    tokens: Sequence[int] | None = None,
    per_layer: int = 2,
    random: int = 40,
    most_tflop: float = MOST_TFLOP,
    seed: int = 0,
) -> tuple[Case, ...]:
    """Problems of one grouped-GEMM family: `per_layer` of each distinct layer shape, and `random` random ones.

    None computes more than `most_tflop` times 1e12 floating-point operations.

    Both projections of each model, crossed with row counts (`tokens` times the model's top_k, or ROWS),
    expert-parallel degrees and routings by stratified sampling, so that every count appears equally often; a share
    in fp16, and a share with the layer's permutation fused. The order is shuffled, so that a run cut short by its
    budget has a fair sample. The same arguments give the same cases.

    >>> from ..datasets import load_models
    >>> len(cases("grouped_gemm_fwd", load_models()[:2], random=3))
    11
    """
    for name, value in (("per_layer", per_layer), ("random", random), ("seed", seed)):
        if value < 0:
            raise ForetuneError(f"{name} must be >= 0 but got {value}")
    if tokens is not None and not (tokens and all(1 <= count <= MOST_TOKENS for count in tokens)):
        raise ForetuneError(f"token counts must be between 1 and {MOST_TOKENS} but got {list(tokens)}")
    rng = np.random.default_rng(seed)
    drawn: list[Case] = []
    deck: list[int] = []
    for (experts, n, k), layer in _layers(models).items():
        degrees = [degree for degree in EXPERT_PARALLEL if experts % degree == 0 and experts // degree >= 2]
        taken: set[tuple[int, int]] = set()
        for _ in range(per_layer):
            for _ in range(50):  # a draw over the limits, or a repeated one, is drawn again
                groups = experts // int(rng.choice(degrees))
                deck = deck or [int(count) for count in rng.permutation(tokens or ROWS)]
                count = deck.pop() * (int(rng.choice(layer.top_ks)) if tokens else 1)
                if (groups, count) not in taken and _affordable(groups, count, n, k, most_tflop):
                    taken.add((groups, count))
                    drawn.append(_case(family, groups, count, n, k, layer.sources, rng))
                    break
    low, high = min(tokens or ROWS), max(tokens or ROWS)
    for _ in range(random):
        for _ in range(MOST_DRAWS):
            groups, n, k = (int(s) for s in np.exp(rng.uniform(np.log((1, 128, 128)), np.log((512, 16384, 16384)))))
            step = int(rng.choice((8, 64, 128)))
            n, k = (max(step, size // step * step) for size in (n, k))
            count = int(np.exp(rng.uniform(np.log(low), np.log(high + 1))))
            if _affordable(groups, count, n, k, most_tflop):
                drawn.append(_case(family, groups, count, n, k, ("random",), rng))
                break
        else:
            raise ForetuneError(
                f"no random shape of {low} rows or more has at most {most_tflop} TFLOP: allow more, or fewer tokens"
            )
    return tuple(drawn[i] for i in rng.permutation(len(drawn)))


def like(dataset: Dataset, family: str, *, seed: int = 0) -> tuple[Case, ...]:
    """The problems that a dataset has of one family, for who wants to compare cards; shuffled by `seed`.

    >>> from ..datasets import load
    >>> like(load("h200"), "grouped_gemm_dw")[0].problem.family
    'grouped_gemm_dw'
    """
    found = [case for case in dataset.cases if case.problem.family == family]
    return tuple(found[i] for i in np.random.default_rng(seed).permutation(len(found)))


def first(cases: Iterable[Case], limit: int | None = None, *, most_tflop: float = MOST_TFLOP) -> tuple[Case, ...]:
    """The first `limit` of these cases, all if None: each problem once, and none larger than `most_tflop`."""
    once = {case.problem: case for case in cases}
    small = (p for p in once if _tflop(p["rows"], p["n"], p["k"]) <= most_tflop)
    return tuple(once[problem] for problem in islice(small, limit))


@dataclass
class _Layer:
    """Who has a layer of one shape: "MODEL/PROJECTION" strings, and those models' top_k."""

    sources: tuple[str, ...] = ()
    top_ks: tuple[int, ...] = ()


def _layers(models: Sequence[Model]) -> dict[tuple[int, int, int], _Layer]:
    """Distinct layer shapes: (experts, N, K)."""
    layers: dict[tuple[int, int, int], _Layer] = {}
    for model in models:
        for projection, (n, k) in model.projections().items():
            layer = layers.setdefault((model.num_experts, n, k), _Layer())
            layer.sources += (f"{model.model}/{projection}",)
            layer.top_ks += (model.top_k,)
    return layers


def _affordable(groups: int, rows: int, n: int, k: int, most_tflop: float) -> bool:
    return _tflop(rows, n, k) <= most_tflop and 2.0 * groups * n * k <= MOST_WEIGHT_BYTES


def _tflop(rows: int, n: int, k: int) -> float:
    return 2e-12 * rows * n * k


def _case(
    family: str, groups: int, rows: int, n: int, k: int, sources: tuple[str, ...], rng: np.random.Generator
) -> Case:
    routing = str(rng.choice(list(ROUTINGS), p=list(ROUTINGS.values())))
    dtype = "fp16" if rng.uniform() < FP16_SHARE else "bf16"
    projections = [source.rsplit("/", 1)[1] for source in sources if "/" in source] or list(PERMUTATION)
    possible = [PERMUTATION[projection] for projection in projections]
    flags = (str(rng.choice(possible)),) if rng.uniform() < PERMUTED_SHARE else ()
    sizes = group_sizes(routing, rows, groups, rng)
    problem = Problem.of(family, dtype=dtype, flags=flags, groups=groups, rows=rows, n=n, k=k, group_sizes=sizes)
    return Case(problem, sources, routing)
