"""`best_dispatch`: the few configs that lose least over many sizes, and which of them runs at which size;
`fewest_dispatch`: as few as lose no more than so much at any size."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: What one more range of sizes must save, summed over the sizes: predictions, and times, are not known much better.
LEAST_GAIN = 0.01
#: Sets of configs that are all looked at; of more, the best one is approached by exchanging one config at a time.
MOST_SETS = 50_000
#: In place of an infinite loss: more than all finite ones together, and finite so that sums of several compare.
_HOPELESS = 1e6
#: What losing more than is allowed at one size costs: more than all that is allowed at all of them.
_TOO_MUCH = 1e3


@dataclass(frozen=True)
class Dispatch:
    """Ranges of neighbouring sizes, each with the column of the config that runs there."""

    starts: tuple[int, ...]  # (n_ranges,) the row of each range's first size
    columns: tuple[int, ...]  # (n_ranges,)

    def path(self, sizes: int) -> NDArray[np.intp]:
        """The column at each of so many sizes."""
        return np.repeat(np.array(self.columns, dtype=np.intp), np.diff((*self.starts, sizes)))


def best_dispatch(losses: NDArray[np.float64], weights: NDArray[np.float64], n: int, ranges: int) -> Dispatch:
    """The dispatch over at most `n` configs and `ranges` ranges with the least loss, summed over the sizes.

    `losses` are what each config loses at each size, (n_sizes, n_configs), inf where it cannot run; `weights`,
    (n_sizes,), are scaled to 1 in the mean. Each further range costs `LEAST_GAIN`.

    For a set of configs the dispatch is exact, by dynamic programming over the crossover points. The set is exact where
    at most `MOST_SETS` are possible; else no exchange of one config for another makes it better.

    >>> losses = np.array([[0.0, 0.5, 0.1], [0.0, 0.5, 0.1], [0.5, 0.0, 0.1], [0.5, 0.0, 0.1]])
    >>> best_dispatch(losses, np.ones(4), n=2, ranges=2)
    Dispatch(starts=(0, 2), columns=(0, 1))
    >>> best_dispatch(losses, np.ones(4), n=1, ranges=2)
    Dispatch(starts=(0,), columns=(2,))
    """
    costs = np.minimum(losses, _HOPELESS) * (weights / weights.mean())[:, None]
    able = _not_dominated(costs)
    costs = costs[:, able]
    n = min(n, len(able))
    chosen = _by_looking(costs, n, ranges) if math.comb(len(able), n) <= MOST_SETS else _by_exchange(costs, n, ranges)
    path = able[list(chosen)][_walk(costs[:, chosen], ranges)[1]]
    starts = [0, *(np.flatnonzero(np.diff(path)) + 1).tolist()]
    return Dispatch(tuple(starts), tuple(int(path[start]) for start in starts))


def fewest_dispatch(
    losses: NDArray[np.float64], weights: NDArray[np.float64], most: float, n: int, ranges: int
) -> Dispatch:
    """The dispatch over as few configs as lose no more than `most` at any size, and then least in all; where no `n`
    configs do, as `best_dispatch` has it. Arguments are as there.

    >>> losses = np.array([[0.0, 0.5, 0.1], [0.0, 0.5, 0.1], [0.5, 0.0, 0.1], [0.5, 0.0, 0.1]])
    >>> fewest_dispatch(losses, np.ones(4), most=0.2, n=3, ranges=4)
    Dispatch(starts=(0,), columns=(2,))
    >>> fewest_dispatch(losses, np.ones(4), most=0.05, n=3, ranges=4)
    Dispatch(starts=(0, 2), columns=(0, 1))
    """
    rows = np.arange(len(losses))
    judged = np.where(losses > most, losses + _TOO_MUCH, losses)
    for few in range(1, n + 1):
        found = best_dispatch(judged, weights, few, ranges)
        if (losses[rows, found.path(len(rows))] <= most).all():
            return found
    return best_dispatch(losses, weights, n, ranges)


def _not_dominated(costs: NDArray[np.float64]) -> NDArray[np.intp]:
    """Columns that no other one is as good as everywhere; of several alike, the first."""
    kept: list[int] = []
    for column in np.argsort(costs.sum(axis=0), kind="stable").tolist():
        if not (costs[:, kept] <= costs[:, [column]]).all(axis=0).any():
            kept.append(column)
    return np.array(sorted(kept), dtype=np.intp)


def _walk(costs: NDArray[np.float64], ranges: int) -> tuple[float, NDArray[np.intp]]:
    """The least cost over all dispatches among these columns, and the column at each size, (n_sizes,)."""
    sizes, columns = costs.shape
    total = np.full((ranges, columns), np.inf)  # by ranges so far, less one, and by the last one's column
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


def _by_looking(costs: NDArray[np.float64], n: int, ranges: int) -> tuple[int, ...]:
    """The best set of all; what a set loses at least, with no limit on ranges, says how many need a second look."""
    sets = np.array(list(itertools.combinations(range(costs.shape[1]), n)))
    least = sum(np.minimum.reduce([row[sets[:, at]] for at in range(n)]) for row in costs)
    return _first_best(costs, sets, np.asarray(least), ranges, np.inf)[1]


def _by_exchange(costs: NDArray[np.float64], n: int, ranges: int) -> tuple[int, ...]:
    """From the set that a greedy choice makes, one config exchanged at a time while that helps."""
    chosen: list[int] = []
    so_far = np.full(len(costs), np.inf)
    for _ in range(n):
        chosen.append(int(np.minimum(so_far[:, None], costs).sum(axis=0).argmin()))
        so_far = np.minimum(so_far, costs[:, chosen[-1]])
    best, value = tuple(chosen), _walk(costs[:, chosen], ranges)[0]
    improved = True
    while improved:
        improved = False
        for at in range(n):
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
    """The set with the least cost below `bound`, and that cost. Those that lose least at least come first."""
    best: tuple[int, ...] = ()
    for at in np.argsort(least, kind="stable").tolist():
        if least[at] >= bound:
            break
        one = tuple(sets[at].tolist())
        if (value := _walk(costs[:, one], ranges)[0]) < bound:
            bound, best = value, one
    return bound, best
