"""`Race`: decide which config each call of an op runs, and which one it runs in the end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Timed calls, after the last candidate has joined, that a decision takes at most.
CALLS = 200
#: The standard deviation of the log of a config's time around the prediction. A slowdown, which has two of them, has
#: sqrt(2) * 0.045 = 0.064 on held-out models of shipped data, which `refine_replay.py` prints.
_PRIOR = 0.045
#: The first guess of a call's noise (standard deviation of the log time), and how fast the estimate follows the data.
_NOISE, _NOISE_RATE = 0.02, 0.05
#: The variance by which the common level of all configs (clock, data) moves from call to call, in units of the
#: noise's variance.
_DRIFT = 0.05
#: A surprise of more standard deviations is cut to this many, so that an interrupted call counts little.
_OUTLIER = 3.0
#: A config is dropped if it is slower than the current choice by this many standard deviations, and replaces the first
#: choice if it is faster than that by `_CERTAIN` of them and by the margin (a share of the time).
_DROP, _CERTAIN, MARGIN = 3.0, 1.5, 0.002
#: A config is not dropped before it has been timed this often.
_LEAST = 2
#: How many calls fewer a config gets that is predicted to be 100 % slower than the first.
_SPARING = 100.0
#: The share of `max_cost` that the estimated cost may reach, because the estimate is uncertain itself.
_SAFE = 0.7


class Race:
    """A race of configs over real calls, each of which times one config.

    Every second call runs the current choice. The others run the remaining candidates in turn, the least often timed
    first, as in a race with blocking (Maron and Moore 1994, "Hoeffding races"; Birattari et al. 2002, "F-Race"). A
    candidate is dropped once it is significantly slower than the current choice (successive elimination; Even-Dar et
    al. 2006). The bounds are Bayesian: the log time of a call is a level that all configs share and that drifts, plus
    the config's log slowdown, plus noise. A Kalman filter estimates all of them, with the predicted slowdowns as the
    prior. So the clock and other data move the level rather than a config's slowdown.

    `tests/studies/refine_replay.py` compares this with sequential halving, UCB and Thompson sampling.

    Args:
        slowdowns: The predicted slowdown of each config, relative to the first, (n_configs,).
        max_cost: The most time that exploring may cost, as a share of the time of all calls so far.
        max_s: The most seconds that exploring may cost; replaces `max_cost` if given.

    >>> race = Race([1.0, 1.02])
    >>> race.join(1)
    >>> for _ in range(100):
    ...     config = race.pick()
    ...     race.see(config, math.log((10.0, 9.0)[config]))
    >>> race.best, round(race.slowdown(1)[0], 2)
    (1, 0.9)
    """

    def __init__(self, slowdowns: Sequence[float], max_cost: float = 0.01, max_s: float | None = None) -> None:
        count = len(slowdowns)
        self._max_cost, self._max_s = max_cost, max_s
        # The state of the filter: the level, then the log slowdown of each config.
        self._mean: NDArray[np.float64] = np.concatenate([[0.0], np.log(np.asarray(slowdowns, float) / slowdowns[0])])
        self._cov: NDArray[np.float64] = np.diag([0.0] + [_PRIOR**2] * count)
        self._noise = _NOISE**2  # variance
        self.calls = np.zeros(count, int)  # calls that a config was picked for, (n_configs,)
        self.seen = np.zeros(count, int)  # times that were read, (n_configs,)
        self.alive = np.ones(count, bool)
        self.ready = np.zeros(count, bool)  # whether a config's binary exists
        self.ready[0] = True
        self.unit_us = 1.0  # the time in microseconds of a call whose predicted time is 1
        self._since_joined = 0
        self.best = 0  # the current choice; it has been timed

    @property
    def is_over(self) -> bool:
        """Whether no more calls need to be timed."""
        return int(self.alive.sum()) == 1 or self._since_joined >= CALLS

    def join(self, config: int) -> None:
        """Let a config take part, because its binary is ready."""
        self.ready[config], self._since_joined = True, 0
        self._choose()

    def recall(self, config: int, slowdown: float, deviation: float, calls: int) -> None:
        """Start from what an earlier process found out about a config, relative to the first."""
        place = config + 1
        self._mean[place] = self._mean[1] + math.log(slowdown)
        self._cov[place, :] = self._cov[:, place] = self._cov[1, :]
        self._cov[place, place] = self._cov[1, 1] + deviation**2
        self.seen[config] += calls
        self._choose()

    def drop(self, config: int) -> None:
        """Remove a config that cannot run. The first config cannot be dropped."""
        self.alive[config] = False
        self._choose()

    def pick(self) -> int:
        """Return the config that the next call runs."""
        number, can_run = int(self.calls.sum()), self.alive & self.ready
        picked = self.best
        if number % 2 and can_run.sum() > 1:
            excess = np.exp(self._mean[1:] - self._mean[1]) - 1  # relative to a call of the first config
            spent, allowed = float((self.calls * excess).sum()), self._max_cost * (number + 1)
            if self._max_s is not None:
                allowed = self._max_s * 1e6 / self.time_us(0)
            others = can_run.copy()
            others[self.best] = False
            turn = int(np.argmin(np.where(others, self.calls + _SPARING * excess, np.inf)))
            if spent + excess[turn] <= _SAFE * allowed:  # otherwise save for it
                picked = turn
        self.calls[picked] += 1
        if not (self.alive & ~self.ready).any():
            self._since_joined += 1
        return picked

    def see(self, config: int, log_time: float) -> None:
        """Add the time of a call that ran a config.

        Args:
            config: The config.
            log_time: The natural logarithm of the call's time, divided by the time predicted for the call's size.
        """
        self.seen[config] += 1
        if self._cov[0, 0] == 0.0:
            self._mean[0], self._cov[0, 0] = log_time - self._mean[config + 1], 0.1**2
            return
        self._cov[0, 0] += _DRIFT * self._noise
        with_level = self._cov[:, 0] + self._cov[:, config + 1]
        variance = float(with_level[0] + with_level[config + 1] + self._noise)
        most = _OUTLIER * math.sqrt(variance)
        surprise = min(max(log_time - float(self._mean[0] + self._mean[config + 1]), -most), most)
        gain = with_level / variance
        self._mean = self._mean + gain * surprise
        self._cov = self._cov - np.outer(gain, with_level)
        self._noise = max(self._noise * (1 + _NOISE_RATE * (surprise**2 / variance - 1)), 1e-6)
        self._choose()

    def slowdown(self, config: int) -> tuple[float, float]:
        """Return a config's estimated slowdown relative to the first, and the standard deviation of its logarithm."""
        return math.exp(float(self._mean[config + 1] - self._mean[1])), float(self._deviations(0)[config])

    def time_us(self, config: int) -> float:
        """Return a config's estimated time in microseconds."""
        return self.unit_us * math.exp(float(self._mean[0] + self._mean[config + 1]))

    def cost(self) -> float:
        """Return the estimated extra time of all calls so far, as a share of that of the first config alone."""
        excess = np.exp(self._mean[1:] - self._mean[1]) - 1
        return float((self.calls * excess).sum() / max(self.calls.sum(), 1))

    def _deviations(self, other: int) -> NDArray[np.float64]:
        """Return the standard deviation of the difference between each config's log slowdown and another one's."""
        at, variances = other + 1, self._cov.diagonal()
        result: NDArray[np.float64] = np.sqrt(np.maximum(variances + variances[at] - 2 * self._cov[at], 0.0)[1:])
        return result

    def _choose(self) -> None:
        """Update the current choice, and drop the configs that are slower."""
        logs = self._mean[1:] - self._mean[1]
        faster = self.alive & self.ready & (self.seen > 0) & (logs + _CERTAIN * self._deviations(0) < -MARGIN)
        self.best = int(np.argmin(np.where(faster, logs, np.inf))) if faster.any() else 0
        slow = (logs - logs[self.best] > _DROP * self._deviations(self.best)) & (self.seen >= _LEAST)
        slow[[0, self.best]] = False
        self.alive &= ~slow
