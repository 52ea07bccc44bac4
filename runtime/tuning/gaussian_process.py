"""Predict the times of a kernel's configs from few measurements, with a Gaussian process: `Predicted`.

It models log times. The more similar the knobs of two measured configs and the sizes of their problems are, the more
their times are correlated. Each problem also has a level of its own, so that only differences within a problem count.
The constants were chosen with replays of `tests/studies/key_search.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]

#: The shares of the covariance between configs: a sum over single knobs, a product over all knobs, and the part of a
#: config that its knobs do not explain.
_ADDITIVE, _PRODUCT, _OWN = 0.4, 0.55, 0.05
#: The covariance between distant problems, relative to equal ones: without and with a prior, which predicts how the
#: times depend on sizes, so that what it misses has more to do with the kernel. And the distance in standard deviations
#: of the sizes (per dimension) over which the covariance falls to that.
_FAR, _FAR_WITH_PRIOR, _REACH = 0.1, 0.5, 0.5
#: The least standard deviation of a dimension, in octaves.
_LEAST_STD = 1.0
#: The variances of a problem's level and of the noise, relative to that of the configs' differences.
_LEVEL, _NOISE = 4.0, 1e-3
#: The prior guess of the standard deviation of log times, and the number of measurements that it counts as.
_SPREAD, _GUESSES = 0.25, 8
#: A measured config counts as at most this much slower than its problem's fastest one, in logs. The differences among
#: slow configs say little about fast ones.
MOST_SLOWDOWN = math.log(4.0)

_erf = np.vectorize(math.erf, otypes=[float])


class Predicted:
    """The predicted log times of all configs on one problem.

    Args:
        points: The coordinates of the problems, (n_problems, n_dims); the last one is the problem to predict.
        knobs: The coordinates of the configs, (n_configs, n_knobs).
        rows: The measurements, as pairs of positions: of the problem in `points` and of the config in `knobs`. At least
            one, unless there is a `prior`.
        log_times: The log of each measured time, (n_rows,).
        prior: The log times that are expected without measurements, up to a constant for each problem, (n_problems,
            n_configs). If left out, they are equal.

    Attributes:
        mean: The expected log times, (n_configs,). If this problem has no measurement, only their differences are
            meaningful.
    """

    def __init__(
        self,
        points: Array,
        knobs: Array,
        rows: Sequence[tuple[int, int]],
        log_times: Sequence[float],
        prior: Array | None = None,
    ) -> None:
        problem, config = np.array(rows, int).reshape(-1, 2).T
        times = np.array(log_times, float)
        least = np.full(len(points), np.inf)
        np.minimum.at(least, problem, times)
        times = np.minimum(times, least[problem] + MOST_SLOWDOWN)
        times -= 0.0 if prior is None else prior[problem, config]
        count = np.bincount(problem, minlength=len(points))
        level = np.bincount(problem, times, len(points)) / np.maximum(count, 1)
        far = _FAR if prior is None else _FAR_WITH_PRIOR
        near = far + (1 - far) * np.exp(-0.5 * _squares(points) / _REACH**2)
        self._knobs = _scaled(knobs)
        alike, same = self._alike(config), problem[:, None] == problem
        covariance = near[np.ix_(problem, problem)] * alike[:, config] + _LEVEL * same + _NOISE * np.eye(len(rows))
        towards = near[problem, -1][:, None] * alike + _LEVEL * (problem == len(points) - 1)[:, None]
        factor = np.linalg.cholesky(covariance)
        solved = np.linalg.solve(factor, np.column_stack([towards, times - level[problem]]))
        self._gain, residual = solved[:, :-1], solved[:, -1]
        self.mean: Array = self._gain.T @ residual + level[-1] + (0.0 if prior is None else prior[-1])
        self._scale = math.sqrt((_GUESSES * _SPREAD**2 + residual @ residual) / (_GUESSES + len(rows)))
        self._variance = 1 + _LEVEL - (self._gain**2).sum(axis=0)

    def next(self, untimed: Sequence[int], best: float | None, worth: float, most: int) -> list[int]:
        """Return the positions of the next configs to time, at most `most`: those of the largest expected gain.

        Each is chosen as if those before it had turned out as expected (the "kriging believer").

        Args:
            untimed: The positions of the configs to choose from.
            best: The least log time measured on this problem; None if there is none. If None, the first position
                returned is that of the config predicted to be fastest, and at least one more is returned.
            worth: The least expected gain, as a part of the best time, that pays for a config.
            most: The largest number of configs.
        """
        left, chosen = np.array(untimed, int), list[int]()
        least = 2 if best is None else 0
        gain, variance = self._gain, self._variance
        while len(left) and len(chosen) < most:
            if best is None:
                at = int(np.argmin(self.mean[left]))
            else:
                spread = self._scale * np.sqrt(np.maximum(variance[left], 1e-9))
                gains = _expected_gain(best - self.mean[left], spread)
                at = int(np.argmax(gains))
                if gains[at] < worth and len(chosen) >= least:
                    break
            one = int(left[at])
            # Extend the Cholesky factor by a row, as if the config had its expected time.
            row = (self._alike(np.array([one]))[0] + _LEVEL - gain.T @ gain[:, one]) / math.sqrt(variance[one] + _NOISE)
            gain, variance = np.vstack([gain, row]), variance - row**2
            best = min(self.mean[one], math.inf if best is None else best)
            chosen.append(one)
            left = np.delete(left, at)
        return chosen

    def _alike(self, configs: NDArray[np.intp]) -> Array:
        """Return the covariances between the configs at these positions and all configs, (len(configs), n_configs)."""
        squares = (self._knobs[configs][:, None] - self._knobs) ** 2
        single: Array = np.exp(-0.5 * squares).mean(axis=-1)
        own = configs[:, None] == np.arange(len(self._knobs))
        product: Array = np.exp(-0.5 * squares.mean(axis=-1))
        alike: Array = _ADDITIVE * single + _PRODUCT * product + _OWN * own
        return alike


def far_apart(knobs: Array, count: int, first: Sequence[int] = (0,)) -> list[int]:
    """Return the positions of `count` configs that differ much from each other.

    The positions in `first` come first; each next one is that of the config farthest from all before it.
    """
    knobs, chosen = _scaled(knobs), [*first[:count]]
    nearest = ((knobs[:, None] - knobs[chosen]) ** 2).sum(axis=-1).min(axis=1)
    while len(chosen) < min(count, len(knobs)):
        nearest[chosen] = -1.0
        chosen.append(int(nearest.argmax()))
        nearest = np.minimum(nearest, ((knobs - knobs[chosen[-1]]) ** 2).sum(axis=1))
    return chosen


def _expected_gain(lead: Array, spread: Array) -> Array:
    """Return the expected improvement of normal variables of mean improvement `lead` and deviation `spread`."""
    ratio = lead / spread
    density = np.exp(-0.5 * ratio**2) / math.sqrt(2 * math.pi)
    gains: Array = spread * (ratio * 0.5 * (1 + _erf(ratio / math.sqrt(2))) + density)
    return gains


def _scaled(values: Array) -> Array:
    """Return the columns that vary, each with a standard deviation of 1; at least one column."""
    spread = values.std(axis=0)
    varied = values[:, spread > 0] / spread[spread > 0]
    return varied if varied.shape[1] else np.zeros((len(values), 1))


def _squares(points: Array) -> Array:
    """Return the mean squared differences between points, (n, n), over the columns that vary."""
    spread = np.maximum(points.std(axis=0), _LEAST_STD) * (points.std(axis=0) > 0)
    varied = points[:, spread > 0] / spread[spread > 0]
    if not varied.shape[1]:
        return np.zeros((len(points), len(points)))
    squares: Array = ((varied[:, None] - varied) ** 2).mean(axis=-1)
    return squares


def distances(points: Array) -> Array:
    """Return the squared distances of points from the last one, (n_points,)."""
    from_last: Array = _squares(points)[-1]
    return from_last
