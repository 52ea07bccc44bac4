"""Rank configs for a problem by their slowdowns on known problems, where near problems count most: `Slowdowns`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...datasets import KernelConfig, Problem

Array: TypeAlias = NDArray[np.float64]

#: The width of the weight's Gaussian, in standard deviations of the dimensions, and the weight of the most distant
#: problem. Results with half and double of these values differ by less than the noise.
_REACH, _FAR = 0.5, 0.02
#: A dimension more than a factor of two beyond the known range is too far to be predicted.
_BEYOND = 1.0  # in octaves
#: The largest log slowdown, also that of a failed config: beyond it a config is never chosen.
_MOST_LOG_SLOWDOWN = math.log(4.0)
#: The weight of a config's own slowdown in a ranking, relative to what it saves as an addition to a list.
_OWN = 0.3
#: The number of places in a ranking that complement each other; later configs are sorted by their own slowdowns.
_MOST_COMPLEMENTS = 16
#: The number of nearest problems that are used. More take time and change nothing.
_MOST_KNOWN = 64
#: The minimum number of problems to estimate the loss of a list's length.
_FEWEST_JUDGED = 3


class Slowdowns:
    """The known log slowdowns of `configs` on the problems nearest to `problem` that have the same dimensions.

    Attributes:
        problems: The known problems with the same dimensions.
        is_full: (n_nearest,) Whether at least half of the configs were timed, so that the fastest one is known.
    """

    def __init__(
        self,
        problem: Problem,
        known: Mapping[Problem, Mapping[KernelConfig, float | None]],
        configs: Sequence[KernelConfig],
    ) -> None:
        names = [name for name, _ in problem.dims]
        rows = {
            one: [math.nan if config not in times else times[config] or math.inf for config in configs]
            # Sorted, so that the order of learning does not matter.
            for one, times in sorted(known.items(), key=lambda item: str(item[0]))
            if [name for name, _ in one.dims] == names and any(config in times for config in configs)
        }
        self.problems = tuple(rows)
        points = _points([*self.problems, problem])
        distance = np.sqrt(((points[:-1] - points[-1]) ** 2).mean(axis=1)) if points.size else np.zeros(len(rows))
        nearest = np.sort(np.argsort(distance, kind="stable")[:_MOST_KNOWN])
        log_times = np.log(np.array(list(rows.values()), float).reshape(len(rows), len(configs)))[nearest]
        #: If half of the configs were timed, the fastest one is known to be the best.
        self.is_full = (~np.isnan(log_times)).mean(axis=1) >= 0.5
        self._points, self._at, self._scale = points[:-1][nearest], points[-1], points.std(axis=0)
        self._table = _over_best(log_times, self.is_full)  # (n_problems, n_configs), NaN where not timed

    @property
    def untimed(self) -> tuple[int, ...]:
        """The positions of configs without any known time."""
        return tuple(np.flatnonzero(np.isnan(self._table).all(axis=0)).tolist())

    def ranking(self) -> list[int]:
        """Return the positions of all configs, best first."""
        return _ranking(self._table, self._weights(np.arange(len(self._table)), self._at))

    def left_out(self) -> Array:
        """Return what a shortlist of each length would have lost: the mean slowdown - 1, by length, (n_configs,).

        Each fully timed problem is ranked by the others (leave-one-out). Problems outside the range of the others are
        skipped, because all configs would have been timed for them, unless fewer than `_FEWEST_JUDGED` problems remain.
        """
        n = len(self._table)
        judged = [i for i in np.flatnonzero(self.is_full) if not self._is_beyond(i)]
        if len(judged) < _FEWEST_JUDGED:
            judged = np.flatnonzero(self.is_full).tolist()
        losses = []
        for i in judged:
            others = np.flatnonzero(np.arange(n) != i)
            order = _ranking(self._table[others], self._weights(others, self._points[i]))
            ranked = np.nan_to_num(self._table[i][order], nan=_MOST_LOG_SLOWDOWN)
            losses.append(np.minimum.accumulate(ranked))
        lost: Array = np.expm1(np.mean(losses, axis=0))
        return lost

    def _weights(self, rows: NDArray[np.intp], at: Array) -> Array:
        """Return the weights of the known problems in `rows`, (n_rows,), which fall with their distance from `at`.

        `at` has the coordinates of a problem, as `_points` returns them.
        """
        scale = np.where(self._scale > 0, self._scale, 1.0)
        varied = max(int((self._scale > 0).sum()), 1)
        distance = np.sqrt((((self._points[rows] - at) / scale) ** 2).sum(axis=1) / varied)
        result: Array = np.exp(-0.5 * (distance / _REACH) ** 2) + _FAR
        return result

    def _is_beyond(self, row: int) -> bool:
        """Return whether the known problem in a row has a dimension far outside the range of all others."""
        point, others = self._points[row], np.delete(self._points, row, axis=0)
        return bool(((point > others.max(axis=0) + _BEYOND) | (point < others.min(axis=0) - _BEYOND)).any())


def unlike(problem: Problem, known: Sequence[Problem]) -> str | None:
    """Return why the slowdowns of the known problems do not predict those of this one; None if they do.

    `known` have the same dimensions as the problem.
    """
    if problem.dtype not in {one.dtype for one in known}:
        return f"dtype {problem.dtype_name} is new"
    for flag in sorted({*problem.flags, *(flag for one in known for flag in one.flags)}):
        if all((flag in one.flags) != (flag in problem.flags) for one in known):
            return f"{flag} is new" if flag in problem.flags else f"no known problem is without {flag}"
    for name, size in problem.dims:
        sizes = [one[name] for one in known]
        if not min(sizes) <= size * 2**_BEYOND or not size <= max(sizes) * 2**_BEYOND:
            return f"{name}={size} is far from the known sizes ({min(sizes)} to {max(sizes)})"
    return None


def _points(problems: Sequence[Problem]) -> Array:
    """Return the coordinates of problems, (n_problems, n_columns).

    Dimensions are in octaves (log2); each dtype and flag is a column of 0 or 1.
    """
    words = sorted({(one.dtype_name, *one.flags)[i] for one in problems for i in range(1 + len(one.flags))})
    rows = [
        [*(math.log2(max(size, 1)) for _, size in one.dims), *(word in (one.dtype_name, *one.flags) for word in words)]
        for one in problems
    ]
    return np.array(rows, float)


def _over_best(log_times: Array, is_full: NDArray[np.bool_]) -> Array:
    """Return log times as log slowdowns over each problem's best, (n_problems, n_configs).

    Slowdowns are limited to `_MOST_LOG_SLOWDOWN`.

    If only a few configs of a problem were timed, the fastest of them need not be the best: such a row is shifted so
    that its configs are, in the median, as slow as on the fully timed problems.
    """
    finite = np.where(np.isinf(log_times), np.nan, log_times)
    best = np.array([np.nanmin(row) if not np.isnan(row).all() else 0.0 for row in finite])[:, None]
    table: Array = np.minimum(log_times - best, _MOST_LOG_SLOWDOWN)
    if is_full.any() and not is_full.all():
        counts = (~np.isnan(table[is_full])).sum(axis=0)
        usual = np.where(counts > 0, np.nansum(table[is_full], axis=0) / np.maximum(counts, 1), np.nan)
        for i in np.flatnonzero(~is_full):
            excess = (finite[i] - best[i] - usual)[~np.isnan(finite[i] - usual)]
            if excess.size:
                table[i] = np.minimum(table[i] - min(float(np.median(excess)), 0.0), _MOST_LOG_SLOWDOWN)
    return table


def _ranking(table: Array, weights: Array) -> list[int]:
    """Return the positions of all configs, best first, from a table of log slowdowns and the weight of each row.

    The first has the least weighted slowdown. Each of the next saves the most in addition to those before it, so
    equally fast twins of an earlier config come late.
    """
    timed = ~np.isnan(table)
    total = (weights[:, None] * timed).sum(axis=0)
    own = (weights[:, None] * np.where(timed, table, 0.0)).sum(axis=0) / np.maximum(total, 1e-12)
    own = np.where(total > 0, own, _MOST_LOG_SLOWDOWN)
    filled = np.where(timed, table, own)
    share = weights / weights.sum()
    left = list(range(table.shape[1]))
    order: list[int] = []
    reached = np.full(len(table), np.inf)
    while left and len(order) < _MOST_COMPLEMENTS:
        losses = share @ np.minimum(reached[:, None], filled[:, left]) + _OWN * own[left]
        best = left.pop(int(np.argmin(losses)))
        order.append(best)
        reached = np.minimum(reached, filled[:, best])
    return order + sorted(left, key=lambda at: (own[at], at))
