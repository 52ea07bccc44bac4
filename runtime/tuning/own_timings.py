"""`OwnTimings`: which configs of a kernel are worth timing, learned from what its autotuner has timed so far.

A config is judged by its slowdowns (its time over the best config's) on the problems that are like the one at hand. On
the four workloads of `tests/third_party/replay_tunings.py` nothing cleverer did better: see README.md for the table.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...datasets import Family, ForetuneError, KernelConfig, Problem
from ...datasets.errors import shown
from ...datasets.forking import renew_in_children
from ..how_many import Length, check_length

#: So many problems are tuned as ever before anything is left out. (After four of them one choice in a hundred was 23 %
#: off, after eight 16 %: the replay of November 2026.)
LEARNED_FIRST = 8
#: Problems that are left out in turn must be solved to this, on the average, by a shortlist of the length chosen. It is
#: more than what is aimed at (3 %), because with one problem less each is guessed worse than a new one will be.
_TOLERANCE = 0.04
#: Lists this short may be cut to one, which is then not measured against another.
_SHORT = 8


@dataclass(frozen=True)
class Advice:
    """Which configs to time: their positions in the list that was asked about, best first; all of them where `sure` is
    False. `reason` says why."""

    positions: tuple[int, ...]
    sure: bool
    reason: str


class Advisor(Protocol):
    """A model of the timings of a kernel, or a function: it learns from the problems that were tuned, and says which
    configs are worth measuring for a new one. `OwnTimings` is one; a user's may be another (see `foretune.tune`)."""

    def learn(self, problem: Problem, times: Mapping[KernelConfig, float | None]) -> None:
        """Learn the times of one problem, in microseconds; None for a config that failed."""

    def advise(self, problem: Problem, configs: Sequence[KernelConfig], k: Any) -> Any:
        """Return an `Advice`, or any object with these attributes."""


class OwnTimings:
    """The timings of one kernel on one device, and what they say of problems not tuned yet. Thread-safe; the same
    timings, learned in any order, give the same advice.

    >>> class Toy(Family):
    ...     name, dims = "toy", ("rows",)
    ...     space = supports = features = problem_from_call = None
    >>> own, configs = OwnTimings(Toy()), [KernelConfig.of(BLOCK=size) for size in (16, 32, 64, 128)]
    >>> own.advise(Problem.of("toy", rows=100), configs, "auto").reason
    '0 of the first 8 problems are known'
    >>> for rows in range(64, 128, 8):
    ...     own.learn(Problem.of("toy", rows=rows), dict(zip(configs, (4.0, 2.0, 1.0, None))))
    >>> advice = own.advise(Problem.of("toy", rows=100), configs, "auto")
    >>> advice.positions, advice.sure
    ((2,), True)
    >>> own.advise(Problem.of("toy", rows=10_000), configs, "auto").reason
    'rows=10000 is far from all that is known (64 to 120)'
    """

    def __init__(self, family: Family) -> None:
        self._name = family.name
        self._times: dict[Problem, dict[KernelConfig, float | None]] = {}
        renew_in_children(self)

    def renew(self) -> None:
        """See `renew_in_children`."""
        self._lock = threading.Lock()

    def learn(self, problem: Problem, times: Mapping[KernelConfig, float | None]) -> None:
        """Takes note of times in microseconds (any unit would do); None for a config that failed. What was known of
        other configs stays. Raises `ForetuneError` for a problem of another kernel."""
        self._check(problem)
        with self._lock:
            self._times.setdefault(problem, {}).update(times)

    def advise(self, problem: Problem, configs: Sequence[KernelConfig], k: Length = "auto") -> Advice:
        """Which of `configs` to time for a problem. With `k="auto"` as many as solve the known problems, each left out
        in turn, to 4 % on the average; all of them where half would not do, where fewer than `LEARNED_FIRST`
        problems are known, or where this one is unlike them. A config that was never timed is always among them.

        Raises `ForetuneError` for a problem of another kernel, no configs, and a `k` that is no length.
        """
        self._check(problem)
        if not configs:
            raise ForetuneError("configs must have at least one config but has none")
        check_length(k)
        with self._lock:
            known = {like: dict(times) for like, times in self._times.items()}
        from .slowdowns import Slowdowns, unlike

        every = tuple(range(len(configs)))
        table = Slowdowns(problem, known, configs)
        if (count := int(table.is_full.sum())) < LEARNED_FIRST:
            return Advice(every, False, f"{count} of the first {LEARNED_FIRST} problems are known")
        if (why := unlike(problem, table.problems)) is not None:
            return Advice(every, False, why)
        lost = table.left_out().tolist()
        length = int(k) if k != "auto" else _length(lost)
        if length is None:
            return Advice(every, False, "half of the configs would not have solved the problems that are known")
        chosen = table.ranking()[:length]
        chosen += [at for at in table.untimed if at not in chosen]
        sure_to = 100 * lost[min(len(chosen), len(lost)) - 1]
        reason = (
            f"learned from {len(table.problems)} problems; lists this long lose {sure_to:.2g} % on them, each left out"
        )
        return Advice(tuple(chosen), True, reason)

    def _check(self, problem: Problem) -> None:
        if not isinstance(problem, Problem) or problem.family != self._name:
            raise ForetuneError(f"a problem of {self._name} was due but this is {shown(problem)}")


def _length(losses: Sequence[float]) -> int | None:
    """The least length of a shortlist that is long enough; `losses` are what each length loses, from 1 on."""
    enough = next((length for length, loss in enumerate(losses, 1) if loss <= _TOLERANCE), len(losses))
    if len(losses) >= _SHORT:
        enough = max(enough, 2)
    return enough if enough <= max(len(losses) // 2, 1) else None
