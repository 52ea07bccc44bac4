"""Find a `Dispatch`, a table with a config for each range of sizes, from the loss of each config at each size.

`best_dispatch` finds the `k` configs that together lose least, and `fewest_dispatch` as few configs as stay within a
bound at every size.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: The log time, summed over the sizes, that one more range must save. Predictions and times are not much more accurate.
LEAST_GAIN = 0.01
#: The most sets of configs that are enumerated; with more, single configs are exchanged while that helps.
MOST_SETS = 50_000
#: Replaces an infinite loss: larger than all finite ones together, but finite, so that sums of several can be compared.
_CANNOT_RUN = 1e6
#: The penalty for exceeding the bound at one size: larger than the allowed losses of all sizes together.
_TOO_MUCH = 1e3


@dataclass(frozen=True)
class Dispatch:
    """A table that divides consecutive sizes into ranges, each with one config.

    `starts` has the index of each range's first size, and `columns` the column of each range's config in the matrix of
    losses, (n_ranges,) each.
    """

    starts: tuple[int, ...]  # (n_ranges,) the row of each range's first size
    columns: tuple[int, ...]  # (n_ranges,) the column of each range's config

    def path(self, sizes: int) -> NDArray[np.intp]:
        """Return the column of the config that runs at each size, (sizes,), where `sizes` is the number of sizes."""
        return np.repeat(np.array(self.columns, dtype=np.intp), np.diff((*self.starts, sizes)))


def best_dispatch(losses: NDArray[np.float64], weights: NDArray[np.float64], k: int, ranges: int) -> Dispatch:
    """Choose up to `k` configs and the range of sizes of each, so that the weighted sum of losses is the least.

    For a given set of configs, the dispatch is exact, by dynamic programming over the crossover points. The set is
    exact if at most `MOST_SETS` sets are possible; otherwise no exchange of a single config improves it.

    Args:
        losses: The loss of each config at each size, (n_sizes, n_configs); inf where it cannot run.
        weights: The weight of each size, (n_sizes,), which is scaled to a mean of 1.
        k: The most configs.
        ranges: The most ranges; each one after the first costs `LEAST_GAIN`.

    >>> losses = np.array([[0.0, 0.5, 0.1], [0.0, 0.5, 0.1], [0.5, 0.0, 0.1], [0.5, 0.0, 0.1]])
    >>> best_dispatch(losses, np.ones(4), k=2, ranges=2)
    Dispatch(starts=(0, 2), columns=(0, 1))
    >>> best_dispatch(losses, np.ones(4), k=1, ranges=2)
    Dispatch(starts=(0,), columns=(2,))
    """
    costs = np.minimum(losses, _CANNOT_RUN) * (weights / weights.mean())[:, None]
    able = _not_dominated(costs)
    costs = costs[:, able]
    k = min(k, len(able))
    chosen = _by_search(costs, k, ranges) if math.comb(len(able), k) <= MOST_SETS else _by_exchange(costs, k, ranges)
    path = able[list(chosen)][_walk(costs[:, chosen], ranges)[1]]
    starts = [0, *(np.flatnonzero(np.diff(path)) + 1).tolist()]
    return Dispatch(tuple(starts), tuple(int(path[start]) for start in starts))


def fewest_dispatch(
    losses: NDArray[np.float64], weights: NDArray[np.float64], most: float, k: int, ranges: int
) -> Dispatch:
    """Return the best dispatch over as few configs as lose at most `most` at any size.

    If more than `k` configs were needed, the result is that of `best_dispatch`, which also documents the other
    arguments.

    >>> losses = np.array([[0.0, 0.5, 0.1], [0.0, 0.5, 0.1], [0.5, 0.0, 0.1], [0.5, 0.0, 0.1]])
    >>> fewest_dispatch(losses, np.ones(4), most=0.2, k=3, ranges=4)
    Dispatch(starts=(0,), columns=(2,))
    >>> fewest_dispatch(losses, np.ones(4), most=0.05, k=3, ranges=4)
    Dispatch(starts=(0, 2), columns=(0, 1))
    """
    rows = np.arange(len(losses))
    judged = np.where(losses > most, losses + _TOO_MUCH, losses)
    for few in range(1, k + 1):
        found = best_dispatch(judged, weights, few, ranges)
        if (losses[rows, found.path(len(rows))] <= most).all():
            return found
    return best_dispatch(losses, weights, k, ranges)


def _not_dominated(costs: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return the columns of `costs` that no other column equals or beats at every size; of equal ones the first."""
    kept: list[int] = []
    for column in np.argsort(costs.sum(axis=0), kind="stable").tolist():
        if not (costs[:, kept] <= costs[:, [column]]).all(axis=0).any():
            kept.append(column)
    return np.array(sorted(kept), dtype=np.intp)


def _walk(costs: NDArray[np.float64], ranges: int) -> tuple[float, NDArray[np.intp]]:
    """Return the cost of the cheapest dispatch with at most `ranges` ranges, and its column at each size, (n_sizes,).

    `costs` is (n_sizes, n_configs). The dispatch is found by dynamic programming.
    """
    sizes, columns = costs.shape
    total = np.full((ranges, columns), np.inf)  # by the number of ranges so far minus 1, and the last column
    total[0] = costs[0]
    changed = np.zeros((sizes, ranges, columns), dtype=bool)
    came_from = np.zeros((sizes, ranges), dtype=np.intp)
    for size in range(1, sizes):
        came_from[size, 1:] = total[:-1].argmin(axis=1)
        by_change = np.full((ranges, 1), np.inf)
        by_change[1:, 0] = total[:-1].min(axis=1) + LEAST_GAIN
        changed[size] = by_change < total
        total = np.minimum(total, by_change) + costs[size]
    used, column = divmod(int(total.argmin()), columns)
    least, path = float(total[used, column]), np.empty(sizes, dtype=np.intp)
    for size in range(sizes - 1, -1, -1):
        path[size] = column
        if changed[size, used, column]:
            column, used = int(came_from[size, used]), used - 1
    return least, path


def _by_search(costs: NDArray[np.float64], k: int, ranges: int) -> tuple[int, ...]:
    """Return the set of `k` columns whose best dispatch costs least, by exhaustive search with pruning.

    A set is skipped if even its cost with any number of ranges exceeds the best set's. `costs` is (n_sizes, n_configs).
    """
    sets = np.array(list(itertools.combinations(range(costs.shape[1]), k)))
    least = sum(np.minimum.reduce([row[sets[:, at]] for at in range(k)]) for row in costs)
    return _first_best(costs, sets, np.asarray(least), ranges, np.inf)[1]


def _by_exchange(costs: NDArray[np.float64], k: int, ranges: int) -> tuple[int, ...]:
    """Return a set of `k` columns whose dispatch, with at most `ranges` ranges, costs little, by local search.

    It starts with a greedily chosen set, and exchanges one column at a time while the cost decreases; the best set may
    differ in several columns. `costs` is (n_sizes, n_configs).
    """
    chosen: list[int] = []
    so_far = np.full(len(costs), np.inf)
    for _ in range(k):
        chosen.append(int(np.minimum(so_far[:, None], costs).sum(axis=0).argmin()))
        so_far = np.minimum(so_far, costs[:, chosen[-1]])
    best, value = tuple(chosen), _walk(costs[:, chosen], ranges)[0]
    improved = True
    while improved:
        improved = False
        for at in range(k):
            others = [*best[:at], *best[at + 1 :]]
            rest = costs[:, others].min(axis=1) if others else np.full(len(costs), np.inf)
            sets = np.array([[*others, column] for column in range(costs.shape[1]) if column not in others])
            least = np.minimum(rest[:, None], costs[:, sets[:, -1]]).sum(axis=0)
            found, one = _first_best(costs, sets, least, ranges, value)
            if found < value:
                best, value, improved = one, found, True
    return best


def _first_best(
    costs: NDArray[np.float64], sets: NDArray[np.intp], least: NDArray[np.float64], ranges: int, bound: float
) -> tuple[float, tuple[int, ...]]:
    """Return the cost and the columns of the set whose best dispatch is cheapest; `bound`, () if none is below `bound`.

    `sets` are (n_sets, n) columns, `least` are lower bounds of the sets' costs, (n_sets,), and a dispatch has at most
    `ranges` ranges.
    """
    best: tuple[int, ...] = ()
    for at in np.argsort(least, kind="stable").tolist():
        if least[at] >= bound:
            break
        one = tuple(sets[at].tolist())
        if (value := _walk(costs[:, one], ranges)[0]) < bound:
            bound, best = value, one
    return bound, best
