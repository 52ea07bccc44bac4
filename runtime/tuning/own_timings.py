"""Learn from a kernel's own timings which of its configs are worth timing: `OwnTimings`.

A config is judged by its slowdowns (its time over the best config's) on problems near the current one. On the four
workloads of `tests/third_party/replay_tunings.py` more complex models did not do better; runtime/NOTES.md has the
table.
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

#: The number of problems that are tuned over all configs before any config is left out. (After four problems, one
#: choice in a hundred was 23 % off the best; after eight, 16 %: replay of November 2026.)
LEARNED_FIRST = 8
#: The mean loss that a shortlist may have on known problems, each left out in turn. It is more than the actual aim (3
#: %), because with one problem less each is predicted worse than a new one will be.
_TOLERANCE = 0.04
#: Lists of at least this many configs are cut to no fewer than two; shorter ones may be cut to one, which then is not
#: measured.
_SHORT = 8


@dataclass(frozen=True)
class Advice:
    """The configs to time: their positions in the list that was passed, best first.

    If `sure` is False, these are all positions. `reason` says why.
    """

    positions: tuple[int, ...]
    sure: bool
    reason: str


class Advisor(Protocol):
    """The interface of a model of a kernel's or function's timings.

    It learns from tuned problems and selects the configs worth measuring for a new one. `OwnTimings` implements it; a
    user may pass another (see `foretune.tune`).
    """

    def learn(self, problem: Problem, times: Mapping[KernelConfig, float | None]) -> None:
        """Learn the times of one problem, in microseconds; None for a config that failed."""

    def advise(self, problem: Problem, configs: Sequence[KernelConfig], k: Any) -> Any:
        """Return an `Advice`, or any object with these attributes."""


class OwnTimings:
    """The timings of one kernel on one device, and shortlists learned from them for new problems.

    Thread-safe. The same timings give the same advice, whatever the order in which they were learned.

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
    'rows=10000 is far from the known sizes (64 to 120)'
    """

    def __init__(self, family: Family) -> None:
        self._name = family.name
        self._times: dict[Problem, dict[KernelConfig, float | None]] = {}
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

    def advise(self, problem: Problem, configs: Sequence[KernelConfig], k: Length = "auto") -> Advice:
        """Return which of `configs` to time for a problem.

        All configs are returned, not `sure`, if fewer than `LEARNED_FIRST` problems are known, if this problem is
        unlike them, or if half of the configs would not be enough. Configs without any known time are always included.

        Args:
            problem: A problem of this kernel.
            configs: The configs to choose from.
            k: The number of configs. "auto" is the smallest number that solves the known problems, each left out in
                turn, to within 4 % on average.

        Raises:
            ForetuneError: The problem is one of another kernel, there are no configs, or `k` is not a length.
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
            return Advice(every, False, "half of the configs would not be enough for the known problems")
        chosen = table.ranking()[:length]
        chosen += [at for at in table.untimed if at not in chosen]
        sure_to = 100 * lost[min(len(chosen), len(lost)) - 1]
        reason = f"learned from {len(table.problems)} problems; mean loss {sure_to:.2g} % with each problem left out"
        return Advice(tuple(chosen), True, reason)

    def _check(self, problem: Problem) -> None:
        if not isinstance(problem, Problem) or problem.family != self._name:
            raise ForetuneError(f"problem must be a problem of {self._name} but is {shown(problem)}")


def _length(losses: Sequence[float]) -> int | None:
    """Return the smallest list length whose loss is small enough; None if it is over half of all configs.

    `losses` has the loss of each length from 1 on.
    """
    enough = next((length for length, loss in enumerate(losses, 1) if loss <= _TOLERANCE), len(losses))
    if len(losses) >= _SHORT:
        enough = max(enough, 2)
    return enough if enough <= max(len(losses) // 2, 1) else None
