"""`OwnTimings`: choose which configs of a kernel to time next on a problem, from the kernel's earlier timings."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ...datasets import Family, ForetuneError, KernelConfig, Problem
from ...datasets.errors import shown
from ...datasets.forking import renew_in_children
from ..how_many import Length, check_length
from .gaussian_process import MOST_SLOWDOWN, Array, Predicted, distances, far_apart

#: A search goes on while the next config's expected gain, over this many seconds of a problem's launches, exceeds what
#: compiling and timing the config takes; twice as many without a prior, as later problems lose more then.
_LAUNCHES_S = 30.0
#: Seconds to compile and time a config, if they are not known: 4 side by side, as fla's and Liger's kernels compile.
USUAL_COST_S = 0.15
#: The number of configs that are compiled and timed together; of those that start the search on a kernel without any
#: timing, as a share of the list; the share of these that a prior selects; and the share of the list from which the
#: others are chosen, if there is a prior: those that it predicts to be the fastest.
AT_ONCE, _START, _PREDICTED, _PLAUSIBLE = 4, 0.2, 0.3, 0.75
#: The number of measurements that the model uses, those of the nearest problems. More make a step slower.
_MOST_ROWS = 200


@dataclass(frozen=True)
class Advice:
    """The configs that are worth timing on a problem, as positions in the list of configs passed to `advise`.

    Attributes:
        positions: The positions of configs that have a time, fastest first, then of those to time next, best first.
        sure: Whether the advice is based on at least one timing of the kernel.
        reason: A text on the timings that the advice is based on.
        new: The positions to time next; empty if no further config is expected to pay for its compilation and timing.
    """

    positions: tuple[int, ...]
    sure: bool
    reason: str
    new: tuple[int, ...] = ()


class Advisor(Protocol):
    """The interface of a model of a kernel's or function's timings.

    It learns from tuned problems and selects the configs worth measuring for a new one. `OwnTimings` implements it; a
    user may pass another (see `foretune.tune`).
    """

    def learn(self, problem: Problem, times: Mapping[KernelConfig, float | None]) -> None:
        """Learn the times of one problem, in microseconds; None for a config that failed."""

    def advise(self, problem: Problem, configs: Sequence[KernelConfig], k: Any) -> Any:
        """Select the configs to time on a problem, at most `k`; return an `Advice` or an object with its attributes."""


class OwnTimings:
    """The timings of one kernel on one device, and the search for the fastest config of each problem.

    A caller asks `advise` which configs to time, times and learns them, and asks again until there are no new ones. The
    first problem starts with configs that are far apart, or that a prior predicts to be fast. Later ones start with
    those that were fast on the nearest problems. Configs that failed on similar problems, and worked on none of them,
    are left out as long as others remain.

    Thread-safe. The same timings give the same advice, whatever the order in which they were learned.

    >>> class Toy(Family):
    ...     name, dims = "toy", ("rows",)
    ...     space = supports = features = problem_from_call = None
    >>> own, configs = OwnTimings(Toy()), [KernelConfig.of(BLOCK=2**power) for power in range(4, 12)]
    >>> times = dict(zip(configs, (8.0, 6.0, 5.0, 5.5, 6.0, 8.0, 9.0, None)))
    >>> problem = Problem.of("toy", rows=100)
    >>> while new := own.advise(problem, configs).new:
    ...     own.learn(problem, {configs[at]: times[configs[at]] for at in new})
    >>> str(configs[own.advise(problem, configs).positions[0]])
    'BLOCK=64 num_warps=4 num_stages=3'
    """

    def __init__(self, family: Family) -> None:
        self._name = family.name
        self._times: dict[Problem, dict[KernelConfig, float | None]] = {}
        self._finished: set[Problem] = set()
        self._priors: dict[Problem, dict[KernelConfig, float]] = {}
        renew_in_children(self)

    def renew(self) -> None:
        """Create a new lock, at construction and in forked processes (see `renew_in_children`)."""
        self._lock = threading.Lock()

    def learn(self, problem: Problem, times: Mapping[KernelConfig, float | None]) -> None:
        """Add a problem's times to those known; known times of other configs stay.

        Args:
            problem: A problem of this kernel.
            times: Microseconds by config (any unit works if it is always the same); None for a config that failed.

        Raises:
            ForetuneError: The problem is one of another kernel.
        """
        self._check(problem)
        with self._lock:
            self._times.setdefault(problem, {}).update(times)

    def finish(self, problem: Problem) -> None:
        """End the search on a problem: from now on, `advise` returns its timed configs alone, if there are any."""
        self._check(problem)
        with self._lock:
            self._finished.add(problem)

    def advise(
        self,
        problem: Problem,
        configs: Sequence[KernelConfig],
        k: Length = "auto",
        cost_s: float = USUAL_COST_S,
        at_once: int = AT_ONCE,
        prior: Array | None = None,
    ) -> Advice:
        """Return which of `configs` to time on a problem.

        Args:
            problem: A problem of this kernel.
            configs: The configs to choose from.
            k: The largest number of configs to time on this problem. "auto" ends the search when the expected gain of
                the next config, over 30 seconds of launches (60 without a prior), is less than `cost_s`.
            cost_s: The seconds that compiling and timing a config takes.
            at_once: The largest number of configs that are timed before this is asked again, except for those that
                start the search on a kernel without timings.
            prior: The log times that are expected without timings, up to a constant, (n_configs,). It is remembered
                with the problem.

        Raises:
            ForetuneError: The problem is one of another kernel, there are no configs, or `k` is not a length.
        """
        self._check(problem)
        if not configs:
            raise ForetuneError("configs must have at least one config but has none")
        check_length(k)
        with self._lock:
            known, is_finished = {like: dict(times) for like, times in self._times.items()}, problem in self._finished
            if prior is not None:
                self._priors[problem] = dict(zip(configs, prior.tolist(), strict=True))
        here = known.pop(problem, {})
        tried = [at for at, config in enumerate(configs) if config in here]
        timed = sorted((time_us, at) for at in tried if (time_us := here[configs[at]]) is not None)
        untimed = [at for at, config in enumerate(configs) if config not in here]
        failing = _failing(problem, known)
        if timed or any(configs[at] not in failing for at in untimed):
            untimed = [at for at in untimed if configs[at] not in failing]
        most = len(untimed) if k == "auto" else max(int(k) - len(tried), int(not timed))
        problems, points, rows, log_times = _measured(problem, {**known, problem: here}, configs)
        expected = self._expected(problems, configs)
        start, new = max(3, math.ceil(len(configs) * _START)), list[int]()
        # If fewer configs were timed than any search starts with, the list was shorter.
        is_finished = is_finished and bool(timed) and (len(points) > 1 or len(tried) >= min(start, len(configs)))
        if untimed and most and not rows and (expected is None or k == "auto"):
            pool, n_fast = untimed, 1
            if expected is not None:
                # A prior may be wrong about a kernel, so most configs are far from its first ones. Its last ones are
                # left out, because tiles that are far too large for their threads also take longest to compile.
                plausible = max(start, math.ceil(len(untimed) * _PLAUSIBLE))
                pool = sorted(untimed, key=expected[-1].tolist().__getitem__)[:plausible]
                n_fast = math.ceil(start * _PREDICTED)
            apart = far_apart(knob_values([configs[at] for at in pool]), min(most, start), range(n_fast))
            new = sorted(pool[at] for at in apart)
        elif untimed and most and not is_finished:
            # The model does not know from a kernel's first configs alone how far it errs: it chooses once in any case.
            is_start = len(points) == 1 and len(tried) <= start
            launches_s = 2 * _LAUNCHES_S if expected is None else _LAUNCHES_S
            worth = 0.0 if is_start or k != "auto" else cost_s / launches_s
            model = Predicted(points, knob_values(configs), rows, log_times, expected)
            new = model.next(untimed, math.log(timed[0][0]) if timed else None, worth, min(most, at_once))
        reason = f"{len(tried)} timed, {len(new)} to time; learned from {len(points) - 1} other problems"
        return Advice((*(at for _, at in timed), *new), bool(rows), reason, (*new,))

    def _expected(self, problems: Sequence[Problem], configs: Sequence[KernelConfig]) -> Array | None:
        """Return the log times that a prior expects of each problem's configs, (n_problems, n_configs).

        A problem without a stored prior, because an earlier process timed it, gets the prior of the last problem.
        Returns None if the last problem has none.
        """
        with self._lock:
            priors = [self._priors.get(one) for one in problems]
        if (last := priors[-1]) is None:
            return None
        return np.array([[(prior or last).get(config, 0.0) for config in configs] for prior in priors])

    def _check(self, problem: Problem) -> None:
        if not isinstance(problem, Problem) or problem.family != self._name:
            raise ForetuneError(f"problem must be a problem of {self._name} but is {shown(problem)}")


def _measured(
    problem: Problem, known: Mapping[Problem, Mapping[KernelConfig, float | None]], configs: Sequence[KernelConfig]
) -> tuple[list[Problem], Array, list[tuple[int, int]], list[float]]:
    """Return the measurements that predict a problem: its own, and those of the nearest problems with its dimensions.

    A failed config counts as slower than all others.

    Returns:
        The problems, `problem` last, and their coordinates; the positions of each measurement's problem and
        config; and the log times.
    """
    names = [name for name, _ in problem.dims]
    # Sorted, so that the order of learning does not matter.
    others = sorted((one for one in known if one != problem and [name for name, _ in one.dims] == names), key=str)
    problems = [*others, problem]
    points = coordinates(problems)
    used: list[int] = []
    rows: list[tuple[int, int]] = []
    log_times: list[float] = []
    for i in distances(points).argsort(kind="stable").tolist():
        times = {at: known[problems[i]][config] for at, config in enumerate(configs) if config in known[problems[i]]}
        worked = [time_us for time_us in times.values() if time_us is not None]
        if used and len(rows) + len(times) > _MOST_ROWS:
            break
        if worked or problems[i] is problem:
            rows += [(len(used), at) for at in times if worked]
            slowest = math.log(min(worked)) + MOST_SLOWDOWN if worked else 0.0
            log_times += [slowest if time_us is None else math.log(time_us) for time_us in times.values() if worked]
            used.append(i)
    # `problem`, whose distance is 0, comes first; the model expects it last.
    used.reverse()
    return [problems[i] for i in used], points[used], [(len(used) - 1 - one, at) for one, at in rows], log_times


def _failing(problem: Problem, known: Mapping[Problem, Mapping[KernelConfig, float | None]]) -> set[KernelConfig]:
    """Return the configs that failed on problems near this one and worked on none of them.

    Problems are near if they have the same dtype and flags, and each dimension differs by at most a factor of two.
    """
    dims = dict(problem.dims)

    def is_near(one: Problem) -> bool:
        sizes = dict(one.dims)
        if (one.dtype, one.flags, sizes.keys()) != (problem.dtype, problem.flags, dims.keys()):
            return False
        return all(size <= 2 * dims[name] and dims[name] <= 2 * size for name, size in sizes.items())

    near = [times for one, times in known.items() if is_near(one)]
    failed = {config for times in near for config, time_us in times.items() if time_us is None}
    return failed and failed - {config for times in near for config, time_us in times.items() if time_us is not None}


def coordinates(problems: Sequence[Problem]) -> Array:
    """Return the coordinates of problems, (n_problems, n_columns).

    Each dimension is a column of log2 of the size; each dtype and flag that occurs is a column of 0 or 1.
    """
    words = sorted({word for one in problems for word in (one.dtype_name, *one.flags)})
    rows = [
        [*(math.log2(max(size, 1)) for _, size in one.dims), *(word in (one.dtype_name, *one.flags) for word in words)]
        for one in problems
    ]
    return np.array(rows, float)


def knob_values(configs: Sequence[KernelConfig]) -> Array:
    """Return the coordinates of configs, (n_configs, n_columns).

    A knob with numbers is a column of their log2 (values up to 0.5: the value minus 1.5). A knob with strings has a
    column of 0 or 1 for each value.
    """
    values = [config.to_json() for config in configs]
    columns: list[list[float]] = []
    for name in sorted({name for one in values for name in one}):
        column = [one.get(name, 0) for one in values]
        numbers = [value for value in column if not isinstance(value, str)]
        if len(numbers) == len(column):
            columns.append([math.log2(value) if value > 0.5 else value - 1.5 for value in numbers])
        else:
            columns += [[float(value == one) for value in column] for one in sorted({*column}, key=str)]
    found: Array = np.array(columns, float).reshape(len(columns), len(configs)).T
    return found
