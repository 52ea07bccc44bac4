"""`Race`: decide which config each call of an op tries, and from their times, which config is the best."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Timed calls, after the last candidate has joined, that a decision takes at most.
CALLS = 200
#: The least and the most calls that are planned at once; between them, a quarter of the calls so far. Longer plans cost
#: less of the host's time in each call, but react later.
_SHORTEST, _LONGEST = 8, 24
#: The standard deviation of the log of a config's time around the prediction, and the part of a predicted log slowdown
#: that is real (regression to the mean). Shipped data, with held-out models: 0.051 and 0.70, as `refine_replay.py`
#: prints. `_UNPREDICTED` is the deviation if all slowdowns are the same, because nothing predicted them.
_PRIOR, _SHRUNK, _UNPREDICTED = 0.045, 0.7, 0.3
#: The first guess of a call's noise (standard deviation of the log time), and how fast the estimate follows the data.
#: The guess is high, because a config that the first few times show as the fastest by chance would run for long.
_NOISE, _NOISE_RATE = 0.04, 0.02
#: The variance by which the common level of all configs (clock, data) moves from call to call, in units of the
#: noise's variance.
_DRIFT = 0.05
#: A surprise of more standard deviations is cut to this many, so that an interrupted call counts little.
_OUTLIER = 3.0
#: The first time of a config is ignored if its log is above the prediction by more, and by this many prior deviations.
#: Even if the device waited 15 % longer only, the config would seem slow for the next ten calls, or be dropped.
_FIRST, _UNLIKELY = 0.1, 3.0
#: A config is dropped if it is slower than the current choice by this many standard deviations, and replaces the first
#: choice if it is faster than that by `_CERTAIN` of them and by the margin (a share of the time).
_DROP, _CERTAIN, MARGIN = 3.0, 1.5, 0.002
#: A config is not dropped before it has been timed this often, and it is planned only once at a time until then.
_LEAST = 2
#: How many calls fewer a config gets that is predicted to be 100 % slower than the first.
_SPARING = 100.0
#: The limit of the cost is compared with this many standard deviations more than the estimate, and by this share of it.
_CAUTION, _SAFE = 0.5, 0.8


class Race:
    """A race of configs over real calls, each of which times one config.

    One of each two calls runs the current choice, in an order that does not repeat (the Thue-Morse sequence), because
    different data may alternate. The others run the remaining candidates in turn, the least often timed first, as in a
    race with blocking (Maron and Moore 1994, "Hoeffding races"; Birattari et al. 2002, "F-Race"). A candidate is
    dropped once it is significantly slower than the current choice (successive elimination; Even-Dar et al. 2006). The
    bounds are Bayesian: the log time of a call is a level that all configs share and that drifts, plus the config's log
    slowdown, plus noise. A Kalman filter estimates all of them, with the predicted slowdowns as the prior. So the clock
    and other data move the level rather than a config's slowdown. Calls are planned and times are added many at a time,
    which costs the host little in each call.

    `tests/studies/refine_replay.py` compares this with sequential halving, UCB and Thompson sampling.

    Args:
        slowdowns: The predicted slowdown of each config, relative to the first, (n_configs,). All the same if nothing
            is predicted: then any config may be much slower, and the limit of the cost allows fewer first calls.
        max_cost: The most time that exploring may cost, as a share of the time of all calls so far.
        max_s: The most seconds that exploring may cost; replaces `max_cost` if given.

    >>> race = Race([1.0, 1.02])
    >>> race.join(1)
    >>> for _ in range(10):
    ...     configs = race.plan()
    ...     race.see(configs, [math.log((10.0, 9.0)[config]) for config in configs])
    >>> race.best, round(race.slowdown(1)[0], 2)
    (1, 0.9)
    """

    def __init__(self, slowdowns: Sequence[float], max_cost: float = 0.01, max_s: float | None = None) -> None:
        count = len(slowdowns)
        self._max_cost, self._max_s = max_cost, max_s
        # The state of the filter: the level, then the log slowdown of each config.
        logs = _SHRUNK * np.log(np.asarray(slowdowns, float) / slowdowns[0])
        prior = _PRIOR if logs.any() else _UNPREDICTED
        self._first = max(_FIRST, _UNLIKELY * prior)
        self._mean: NDArray[np.float64] = np.concatenate([[0.0], logs])
        self._cov: NDArray[np.float64] = np.diag([0.0] + [prior**2] * count)
        self._noise = _NOISE**2  # variance
        self._fastest = np.full(count, np.inf)  # the least log slowdown of a call, (n_configs,)
        self.calls = np.zeros(count, int)  # calls that ran a config, (n_configs,)
        self.seen = np.zeros(count, int)  # times that were read, (n_configs,)
        self.alive = np.ones(count, bool)
        self.ready = np.zeros(count, bool)  # whether a config's binary exists
        self.ready[0] = True
        self.unit_us = 1.0  # the time in microseconds of a call whose predicted time is 1
        self._since_joined = 0
        self.best = 0  # the current choice; it has been timed

    @property
    def is_over(self) -> bool:
        """True once no further call needs to be timed."""
        return int(self.alive.sum()) == 1 or self._since_joined >= CALLS

    def join(self, config: int) -> None:
        """Let a config take part in the race from now on; call this when its binary is ready."""
        self.ready[config], self._since_joined = True, 0
        self._choose()

    def recall(self, config: int, slowdown: float, deviation: float, calls: int) -> None:
        """Add an earlier process's measurement of a config.

        Args:
            config: The config's position.
            slowdown: Its slowdown relative to the first config.
            deviation: The standard deviation of the logarithm of the slowdown.
            calls: The number of its timed calls.
        """
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

    def plan(self, most: int = _LONGEST) -> list[int]:
        """Return the configs that the next calls run, in this order, and count these calls; at most `most`."""
        number, limit = int(self.calls.sum()), self._max_cost
        if self._max_s is not None:
            limit = self._max_s * 1e6 / self.time_us(0)
        logs = self._mean[1:] - self._mean[1]
        # The cost of a call relative to one of the first config, with caution. The times of a config that is much
        # slower than predicted are cut as outliers at first, so its fastest call counts, too.
        high = logs + _CAUTION * self._deviations(0)
        costs: list[float] = np.expm1(high).tolist()
        known = np.where(np.isfinite(self._fastest), self._fastest, high)
        spent = float(self.calls @ np.expm1(np.maximum(high, known)))
        order = np.argsort(self.calls + _SPARING * np.expm1(logs), kind="stable").tolist()
        usable, best = (self.alive & self.ready).tolist(), self.best
        queue = deque(at for at in order if usable[at] and at != best)
        planned: list[int] = []
        left = max(CALLS - self._since_joined, 1)
        for call in range(min(max(_SHORTEST, number // 4), _LONGEST, most, left)):
            picked = best
            if (number + call).bit_count() % 2 and queue:
                allowed = limit if self._max_s is not None else limit * (number + call + 1)
                if spent + costs[queue[0]] <= _SAFE * allowed:  # otherwise save for it
                    picked = queue.popleft()
                    if self.seen[picked] >= _LEAST:  # otherwise its time must be read before it runs again
                        queue.append(picked)
            spent += costs[picked]
            planned.append(picked)
        self.count(planned)
        return planned

    def undo(self, planned: Sequence[int]) -> None:
        """Subtract planned calls that will not run from the counts of calls."""
        self.count(planned, -1)

    def count(self, configs: Sequence[int], sign: int = 1) -> None:
        """Add a call of each of these configs to the counts of calls, or with `sign` -1 subtract it."""
        for config in configs:
            self.calls[config] += sign
        if not (self.alive & ~self.ready).any():
            self._since_joined += sign * len(configs)

    def see(self, configs: Sequence[int], log_times: Sequence[float]) -> None:
        """Add the times of successive calls.

        Args:
            configs: The config that each call ran, (n_calls,).
            log_times: The natural logarithm of each call's time, divided by the time predicted for the call's size,
                (n_calls,).
        """
        at = np.asarray(configs) + 1
        surprise = np.asarray(log_times) - self._mean[at]
        if self._cov[0, 0] == 0.0:
            known = surprise[at == self.best + 1]
            self._mean[0], self._cov[0, 0] = np.median(known if len(known) else surprise), self._noise
        surprise -= self._mean[0]
        # The first launch of a config loads its binary. If the device had to wait for that, the time means nothing.
        was_loaded = (surprise < self._first) | (self.seen[at - 1] > 0)
        self.seen += np.bincount(configs, minlength=len(self.seen))
        if not was_loaded.all():
            at, surprise = at[was_loaded], surprise[was_loaded]
        if not (count := len(at)):
            return
        np.minimum.at(self._fastest, at - 1, surprise + self._mean[at] - self._mean[1])
        drift = _DRIFT * self._noise  # of the level since the previous call
        after = np.arange(1.0, count + 1)
        with_level = self._cov[:, :1] + self._cov[:, at]  # covariances of the state and the times
        cov = with_level[0] + with_level[at] + drift * np.minimum.outer(after, after)  # of the times
        cov.flat[:: count + 1] += self._noise
        variances = cov.diagonal()
        most = _OUTLIER * np.sqrt(variances)
        surprise = np.minimum(np.maximum(surprise, -most), most)
        with_level[0] += drift * after
        gain = np.linalg.solve(cov, with_level.T)
        self._mean = self._mean + surprise @ gain
        self._cov = self._cov - with_level @ gain
        self._cov[0, 0] += drift * count
        follow = (1 - (1 - _NOISE_RATE) ** count) * (float(surprise @ (surprise / variances)) / count - 1)
        self._noise = max(self._noise * (1 + follow), 1e-6)
        self._choose()

    def slowdown(self, config: int) -> tuple[float, float]:
        """Return a config's estimated slowdown relative to the first, and the standard deviation of its logarithm."""
        return math.exp(float(self._mean[config + 1] - self._mean[1])), float(self._deviations(0)[config])

    def time_us(self, config: int) -> float:
        """Return a config's estimated time in microseconds."""
        return self.unit_us * math.exp(float(self._mean[0] + self._mean[config + 1]))

    def cost(self) -> float:
        """Estimate by which share all calls so far took longer than if each had used the first config; 0.01 is 1 %."""
        excess = np.expm1(self._mean[1:] - self._mean[1])
        return float(self.calls @ excess) / max(int(self.calls.sum()), 1)

    def _deviations(self, other: int) -> NDArray[np.float64]:
        """Return the standard deviation of each config's log slowdown minus that of config `other`, (n_configs,)."""
        at, variances = other + 1, self._cov.diagonal()
        result: NDArray[np.float64] = np.sqrt(np.maximum(variances + variances[at] - 2 * self._cov[at], 0.0)[1:])
        return result

    def _choose(self) -> None:
        """Update the current choice from the estimates, and drop the configs that are significantly slower."""
        logs, deviations = self._mean[1:] - self._mean[1], self._deviations(0)
        faster = self.alive & self.ready & (self.seen > 0) & (logs + _CERTAIN * deviations < -MARGIN)
        self.best = 0
        if faster.any():
            self.best = int(np.argmin(np.where(faster, logs, np.inf)))
            logs, deviations = logs - logs[self.best], self._deviations(self.best)
        slow = (logs > _DROP * deviations) & (self.seen >= _LEAST)
        slow[0] = slow[self.best] = False
        self.alive &= ~slow
