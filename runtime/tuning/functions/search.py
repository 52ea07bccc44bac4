"""`Search`: which of a call's configs are measured, in which order, and when it is enough."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

from ....datasets import ForetuneError, KernelConfig, Problem
from ....datasets.errors import MOST, check_between, check_integer, shown
from ...arguments import warn_once
from ..own_timings import Advice, Advisor, OwnTimings
from ..session import TuningSession
from .config_space import Candidate

#: Longer than anybody tunes.
_LONGEST_S = 30 * 86_400.0


class Search:
    """How a function's space is searched: "exhaustive", or guided by an `Advisor` (see `tune`), which learns from every
    key as it is tuned. At most `budget_s` seconds, and `max_trials` configs, for each key.

    Raises `ForetuneError` for what is no search, and for budgets of nothing.
    """

    def __init__(self, kind: str | Advisor, budget_s: float | None, max_trials: int | None) -> None:
        if kind not in ("exhaustive", "guided") and not (hasattr(kind, "learn") and hasattr(kind, "advise")):
            raise ForetuneError(f"search must be exhaustive, guided, or have learn and advise, but is {shown(kind)}")
        if budget_s is not None:
            check_between("budget_s", budget_s, 0.0, _LONGEST_S)
        self.budget_s = budget_s
        self.max_trials = None if max_trials is None else check_integer("max_trials", max_trials, 1, MOST)
        self.is_guided = kind != "exhaustive"
        self._advisor: Advisor | None = None if isinstance(kind, str) else kind
        self._learned: set[str] = set()

    def __str__(self) -> str:
        limits = [f"budget_s={self.budget_s}"] * (self.budget_s is not None)
        limits += [f"max_trials={self.max_trials}"] * (self.max_trials is not None)
        return " ".join(["guided" if self.is_guided else "exhaustive", *limits])

    def run(
        self,
        session: TuningSession[Candidate],
        problem: Problem | None,
        candidates: Sequence[Candidate],
        exchange: Callable[[str, Any], list[Any]],
    ) -> str:
        """Measure as many configs as are enough, and the others one by one where none of these works.

        Args:
            session: What measures them.
            problem: That of the key.
            candidates: All configs, in the space's order.
            exchange: Returns a value of all ranks, by rank (see `Ranks.exchange`).

        Returns:
            What was measured, in words.
        """
        advice = self._advise(problem, candidates)
        positions, reason = advice.positions, advice.reason
        if self.is_guided:  # each rank has a model of its own
            positions, reason = exchange("the configs that are advised", [positions, reason])[0]
        if over := session.measure([candidates[at] for at in positions]):
            reason = f"{reason}, ended by {over}"
        advised = set(positions)
        for at, candidate in enumerate(candidates):
            if session.best is not None:
                break
            if at not in advised:
                session.measure([candidate])
        return f"{session.n_timed} measured {reason}"

    def _advise(self, problem: Problem | None, candidates: Sequence[Candidate]) -> Advice:
        """Return which configs to measure.

        Where a budget may end it, the space's first config goes first, since somebody put it there, and the others are
        shuffled, the same way each time: a corner of a space is no sample of it.
        """
        if self.is_guided:
            try:
                return self._advised(problem, candidates)
            except Exception as error:  # noqa: BLE001 - a model's trouble costs time, not the tuning
                warn_once(f"no advice on which configs to measure ({type(error).__name__}: {error})", ": all are")
        positions = list(range(len(candidates)))
        if self.budget_s is not None or self.max_trials is not None:
            rest = positions[1:]
            random.Random(0).shuffle(rest)
            positions = positions[:1] + rest
        return Advice(tuple(positions), False, f"of {len(candidates)} configs")

    def learn(self, key: str, problem: Problem | None, times: Mapping[Candidate, float | None]) -> None:
        """Tells the advisor of a key, once."""
        if not self.is_guided or problem is None or key in self._learned:
            return
        self._learned.add(key)
        try:
            self._advisor_of(problem).learn(problem, {kernel_config(one): time_us for one, time_us in times.items()})
        except Exception as error:  # noqa: BLE001 - as in `_advise`
            warn_once(f"nothing is learned from a key ({type(error).__name__}: {error})")

    def _advisor_of(self, problem: Problem) -> Advisor:
        if self._advisor is None:
            self._advisor = OwnTimings(cast(Any, SimpleNamespace(name=problem.family)))  # it asks for no more than that
        return self._advisor

    def _advised(self, problem: Problem | None, candidates: Sequence[Candidate]) -> Advice:
        if problem is None:
            raise ForetuneError("the key has no number in it")
        advice = self._advisor_of(problem).advise(problem, [kernel_config(one) for one in candidates], "auto")
        positions = tuple(dict.fromkeys(int(position) for position in advice.positions))
        if not positions or not all(0 <= position < len(candidates) for position in positions):
            raise ForetuneError(f"the advice was {shown(advice.positions)}")
        return Advice(positions, True, f"{len(positions)} of {len(candidates)} configs advised: {advice.reason}")


def kernel_config(candidate: Candidate) -> KernelConfig:
    """A candidate as a `KernelConfig`: values that are no numbers or texts count by name. Raises `ForetuneError` for
    launch options that no kernel takes."""
    values: dict[str, Any] = {}
    for name, value in candidate.knobs.items():
        known = getattr(value, "all_kwargs", None)
        if callable(known):
            values |= known()
        else:
            values[name] = value if isinstance(value, (int, float, str)) else str(value)
    return KernelConfig.of(**values)
