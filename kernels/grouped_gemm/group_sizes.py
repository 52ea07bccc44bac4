"""Group sizes: drawn at random for a workload, or the expected ones where they are unknown."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ...datasets import ForetuneError, Problem
from ...datasets.problem import Ragged

#: How rows are distributed over experts, and the share of the workload's cases with each distribution.
ROUTINGS = {"uniform": 0.4, "balanced": 0.2, "zipf": 0.25, "hot": 0.15}
# The mean above which the Poisson distribution is approximated by the normal one.
_NORMAL_ABOVE = 30.0


@lru_cache(maxsize=4096)
def typical_sizes(rows: int, groups: int) -> NDArray[np.int64]:
    """Return the group sizes expected under uniform random routing, (groups,), descending, summing to `rows`.

    The sizes are the quantiles (i + 1/2) / groups of a Poisson distribution with mean rows / groups, which is the
    distribution of one group's rows if each row picks its group at random.

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
    """Return the quantiles (i + 1/2) / groups of the standard normal distribution, (groups,), descending."""
    from statistics import NormalDist  # imported here: few problems need it, and it imports decimal and fractions

    normal = NormalDist()
    return np.array([normal.inv_cdf((place - 0.5) / groups) for place in range(groups, 0, -1)])


def expected_sizes(rows: int, groups: int, routing: str) -> NDArray[np.int64]:
    """Return the group sizes expected under one of ROUTINGS, (groups,), descending, summing to `rows`.

    For "hot", these are the sizes of "zipf".

    >>> [expected_sizes(16, 4, routing).tolist() for routing in ("uniform", "balanced", "zipf")]
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


def plausible_problems(problem: Problem, shares: Mapping[str, float]) -> tuple[tuple[float, Problem], ...]:
    """Return (weight, problem) pairs over which a prediction is marginalized if group sizes are unknown.

    Args:
        problem: The problem.
        shares: The weight of each routing; they sum to 1.

    Returns:
        One problem with known sizes per routing, equal ones merged; the problem itself with weight 1 if its sizes are
        known or it has no groups.

    >>> problem = Problem.of("grouped", groups=4, rows=16)
    >>> [(share, one.ragged.sizes) for share, one in plausible_problems(problem, {"uniform": 0.5, "zipf": 0.5})]
    [(1.0, (7, 4, 3, 2))]
    """
    if problem.ragged is not None or problem["groups"] < 1:
        return ((1.0, problem),)
    routings = _plausible_routings(problem["rows"], problem["groups"], tuple(shares.items()))
    return tuple((share, problem.with_sizes(ragged)) for share, ragged in routings)


# Cached: the layers of a model have the same groups, and rows are rounded at call time, so the same arguments recur.
@lru_cache(maxsize=64)
def _plausible_routings(
    rows: int, groups: int, shares: tuple[tuple[str, float], ...]
) -> tuple[tuple[float, Ragged], ...]:
    """Return (weight, group sizes) for each routing in `shares` (routing, weight); equal sizes are merged."""
    found: dict[tuple[int, ...], float] = {}  # two routings may give the same sizes if rows are few
    for routing, share in shares:
        sizes = tuple(expected_sizes(rows, groups, routing).tolist())
        found[sizes] = found.get(sizes, 0.0) + share
    return tuple((share, Ragged("rows", sizes)) for sizes, share in found.items())


@lru_cache(maxsize=256)
def _zipf(groups: int) -> tuple[NDArray[np.float64], float]:
    """Return the Zipf weight 1 / i of each group, (groups,), descending, and their sum."""
    ranks = 1 / np.arange(1, groups + 1)
    return ranks, float(ranks.sum())


def _summing_to(rows: int, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return sizes that sum to `rows`: add or subtract what rounding left, evenly, starting with the largest groups."""
    while (lack := rows - int(sizes.sum())) != 0:
        able = np.flatnonzero(sizes > 0) if lack < 0 else np.arange(len(sizes))
        share = max(abs(lack) // len(able), 1)
        step = np.minimum(share, sizes[able]) if lack < 0 else np.full(len(able), share)
        count = min(len(able), abs(lack) // share)
        sizes[able[:count]] += step[:count] * int(math.copysign(1, lack))
    return -np.sort(-sizes)


def drawn_sizes(routing: str, rows: int, groups: int, rng: np.random.Generator) -> tuple[int, ...]:
    """Draw the number of rows of each group, (groups,), summing to `rows`.

    Args:
        routing: "balanced" (as even as possible), "uniform" (each row picks a group at random), "zipf" (group i, in
            random order, is picked with probability proportional to 1 / i) or "hot" (one group has half the rows, the
            rest is uniform).
        rows: The number of rows.
        groups: The number of groups.
        rng: The random generator.

    Returns:
        The sizes.

    Raises:
        ForetuneError: There is no such routing.

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
