"""What group sizes look like: drawn for a workload, and where nobody has told us, expected under uniform routing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ...datasets import ForetuneError, Problem
from ...datasets.problem import Ragged

#: How rows spread over experts, and how often a case is drawn so.
ROUTINGS = {"uniform": 0.4, "balanced": 0.2, "zipf": 0.25, "hot": 0.15}
# Above this mean the Poisson distribution is close enough to the normal one.
_NORMAL_ABOVE = 30.0


@lru_cache(maxsize=4096)
def typical_sizes(rows: int, groups: int) -> NDArray[np.int64]:
    """Group sizes that sum to `rows` and are spread as uniform random routing spreads them, (groups,), descending.

    The sizes are the quantiles (i + 1/2) / groups of a Poisson distribution with mean rows / groups, which is
    what the number of rows of one group follows when each row picks its group at random.

    >>> typical_sizes(16, 4).tolist()
    [7, 4, 3, 2]
    """
    mean = rows / groups
    if mean > _NORMAL_ABOVE:
        sizes = np.rint(mean + math.sqrt(mean) * _normal_quantiles(groups)).astype(np.int64)
    else:
        quantiles = (np.arange(groups, 0, -1) - 0.5) / groups
        counts = np.arange(int(mean + 10 * math.sqrt(mean)) + 12)
        log_pmf = counts * math.log(max(mean, 1e-9)) - mean - np.array([math.lgamma(c + 1) for c in counts])
        sizes = np.searchsorted(np.cumsum(np.exp(log_pmf)), quantiles).astype(np.int64)
    return _summing_to(rows, np.maximum(sizes, 0))


@lru_cache(maxsize=256)
def _normal_quantiles(groups: int) -> NDArray[np.float64]:
    """The quantiles (i + 1/2) / groups of the standard normal distribution, (groups,), descending."""
    from statistics import NormalDist  # which few problems ask for, and imports decimals and fractions

    normal = NormalDist()
    return np.array([normal.inv_cdf((place - 0.5) / groups) for place in range(groups, 0, -1)])


def likely_sizes(rows: int, groups: int, routing: str) -> NDArray[np.int64]:
    """What group sizes look like under one of ROUTINGS, (groups,), descending, summing to `rows`; hot ones as zipf's.

    >>> [likely_sizes(16, 4, routing).tolist() for routing in ("uniform", "balanced", "zipf")]
    [[7, 4, 3, 2], [4, 4, 4, 4], [7, 4, 3, 2]]
    """
    if routing == "uniform":
        return typical_sizes(rows, groups)
    if routing == "balanced":
        sizes = np.full(groups, rows // groups)
        sizes[: rows % groups] += 1
        return sizes
    ranks, total = _zipf(groups)
    return _summing_to(rows, np.rint(rows * ranks / total).astype(np.int64))


def likely_problems(problem: Problem, shares: Mapping[str, float]) -> tuple[tuple[float, Problem], ...]:
    """What a problem whose group sizes are unknown may turn out to be, by the shares of routings: itself where they are
    known, or where it has no groups.

    >>> problem = Problem.of("grouped", groups=4, rows=16)
    >>> [(share, one.ragged.sizes) for share, one in likely_problems(problem, {"uniform": 0.5, "zipf": 0.5})]
    [(1.0, (7, 4, 3, 2))]
    """
    if problem.ragged is not None or problem["groups"] < 1:
        return ((1.0, problem),)
    routings = _likely_routings(problem["rows"], problem["groups"], tuple(shares.items()))
    return tuple((share, problem.with_sizes(ragged)) for share, ragged in routings)


# A model's layers have the same groups, and rows are rounded at call time: the same few are asked for again and again.
@lru_cache(maxsize=64)
def _likely_routings(rows: int, groups: int, shares: tuple[tuple[str, float], ...]) -> tuple[tuple[float, Ragged], ...]:
    found: dict[tuple[int, ...], float] = {}  # a few rows may fall alike
    for routing, share in shares:
        sizes = tuple(likely_sizes(rows, groups, routing).tolist())
        found[sizes] = found.get(sizes, 0.0) + share
    return tuple((share, Ragged("rows", sizes)) for sizes, share in found.items())


@lru_cache(maxsize=256)
def _zipf(groups: int) -> tuple[NDArray[np.float64], float]:
    """How likely each group is picked, (groups,), descending, and what that adds up to."""
    ranks = 1 / np.arange(1, groups + 1)
    return ranks, float(ranks.sum())


def _summing_to(rows: int, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Spreads the rounding's excess or lack evenly over the groups that can take it, largest first."""
    while (lack := rows - int(sizes.sum())) != 0:
        able = np.flatnonzero(sizes > 0) if lack < 0 else np.arange(len(sizes))
        share = max(abs(lack) // len(able), 1)
        step = np.minimum(share, sizes[able]) if lack < 0 else np.full(len(able), share)
        count = min(len(able), abs(lack) // share)
        sizes[able[:count]] += step[:count] * int(math.copysign(1, lack))
    return -np.sort(-sizes)


def drawn_sizes(routing: str, rows: int, groups: int, rng: np.random.Generator) -> tuple[int, ...]:
    """Rows of each group, (groups,), summing to `rows`.

    balanced: as even as can be. uniform: each row picks a group at random. zipf: group i is picked with a
    probability proportional to 1 / i, in random order. hot: one group has half the rows, the rest is uniform.

    >>> drawn_sizes("balanced", 10, 4, np.random.default_rng(0))
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
