"""`Search`: the choice and order of the configs that are measured, and when to stop."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

from ....datasets import ForetuneError, KernelConfig, Problem
from ....datasets.errors import MOST, check_between, check_integer, shown
from ...arguments import warn_once
from ..own_timings import USUAL_COST_S, Advice, Advisor, OwnTimings
from ..session import TuningSession
from .config_space import Candidate

#: Upper bound of `budget_s` in seconds (30 days), to catch mistakes.
_LONGEST_S = 30 * 86_400.0


class Search:
    """A strategy for searching the configs of a function.

    Args:
        strategy: "exhaustive"; "model": a model of the function's own timings searches each key (`OwnTimings`); or an
            `Advisor` of the user's, which selects the configs of a key at once.
        budget_s: The maximum seconds of tuning for each key, or None.
        max_trials: The maximum number of configs measured for each key, or None.

    Raises:
        ForetuneError: The strategy is unknown, or a limit is not a positive number.
    """

    def __init__(self, strategy: str | Advisor, budget_s: float | None, max_trials: int | None) -> None:
        is_advisor = hasattr(strategy, "learn") and hasattr(strategy, "advise")
        if strategy not in ("exhaustive", "model") and not is_advisor:
            raise ForetuneError(
                f"search must be 'exhaustive', 'model' or an object with learn and advise but is {shown(strategy)}"
            )
        if budget_s is not None:
            check_between("budget_s", budget_s, 0.0, _LONGEST_S)
        self.budget_s = budget_s
        self.max_trials = None if max_trials is None else check_integer("max_trials", max_trials, 1, MOST)
        self.is_guided = strategy != "exhaustive"
        self._advisor: Advisor | None = None if isinstance(strategy, str) else strategy
        self._is_theirs = self._advisor is not None
        self._learned: set[str] = set()

    def __str__(self) -> str:
        limits = [f"budget_s={self.budget_s}"] * (self.budget_s is not None)
        limits += [f"max_trials={self.max_trials}"] * (self.max_trials is not None)
        return " ".join(["model" if self.is_guided else "exhaustive", *limits])

    def run(
        self,
        session: TuningSession[Candidate],
        problem: Problem | None,
        candidates: Sequence[Candidate],
        exchange: Callable[[str, Any], list[Any]],
    ) -> str:
        """Measure the selected configs; if none of them works, the others one by one until one does.

        Args:
            session: Measures configs.
            problem: The problem of the key.
            candidates: All configs, in the order of the space.
            exchange: Returns the values of all ranks (see `Ranks.exchange`).

        Returns:
            A text that says how many configs were measured and why.
        """
        advised: set[int] = set()
        while True:
            advice = self._advise(problem, candidates, session)
            positions, reason = advice.positions, advice.reason
            if self.is_guided:  # each rank has its own model: all use that of rank 0
                positions, reason = exchange("the configs that are advised", [positions, reason])[0]
            if advised.issuperset(positions):
                break
            advised.update(positions)
            if over := session.measure([candidates[at] for at in positions]):
                reason = f"{reason}, ended by {over}"
                break
            if not self.is_guided or self._is_theirs:
                break
        for at, candidate in enumerate(candidates):
            if session.best is not None:
                break
            if at not in advised:
                session.measure([candidate])
        return f"{session.n_timed} measured {reason}"

    def _advise(
        self, problem: Problem | None, candidates: Sequence[Candidate], session: TuningSession[Candidate]
    ) -> Advice:
        """Return which configs to measure, in order.

        If a limit may end an exhaustive search, the first config of the space stays first, since the user put it
        there, and the others are shuffled with a fixed seed, so that the measured ones sample the whole space.
        """
        if self.is_guided:
            try:
                return self._advised(problem, candidates, session)
            except Exception as error:  # noqa: BLE001 - a failing model must not fail the tuning
                warn_once(f"no advice on which configs to measure ({type(error).__name__}: {error})", ": all are")
        positions = list(range(len(candidates)))
        if self.budget_s is not None or self.max_trials is not None:
            rest = positions[1:]
            random.Random(0).shuffle(rest)
            positions = positions[:1] + rest
        return Advice(tuple(positions), False, f"of {len(candidates)} configs")

    def learn(self, key: str, problem: Problem | None, times: Mapping[Candidate, float | None]) -> None:
        """Train the advisor on the times of a key, once for each key."""
        if not self.is_guided or problem is None or key in self._learned:
            return
        self._learned.add(key)
        try:
            self._advisor_of(problem).learn(problem, {kernel_config(one): time_us for one, time_us in times.items()})
        except Exception as error:  # noqa: BLE001 - as in `_advise`
            warn_once(f"nothing was learned from the times of a key ({type(error).__name__}: {error})")

    def _advisor_of(self, problem: Problem) -> Advisor:
        if self._advisor is None:
            # `OwnTimings` reads only the name of a family.
            self._advisor = OwnTimings(cast(Any, SimpleNamespace(name=problem.family)))
        return self._advisor

    def _advised(
        self, problem: Problem | None, candidates: Sequence[Candidate], session: TuningSession[Candidate]
    ) -> Advice:
        if problem is None:
            raise ForetuneError("the key has no number in it")
        advisor, configs = self._advisor_of(problem), [kernel_config(one) for one in candidates]
        if isinstance(advisor, OwnTimings):
            known = {one: measured.time_us for one, measured in session.measured.items()}
            advisor.learn(problem, {kernel_config(one): time_us for one, time_us in known.items()})
            found = advisor.advise(problem, configs, "auto", session.cost_s or USUAL_COST_S)
            return found if found.positions else Advice(tuple(range(len(configs))), False, "all have failed before")
        advice = advisor.advise(problem, configs, "auto")
        positions = tuple(dict.fromkeys(int(position) for position in advice.positions))
        if not positions or not all(0 <= position < len(candidates) for position in positions):
            raise ForetuneError(
                f"advise must return positions from 0 to {len(candidates) - 1} but returned {shown(advice.positions)}"
            )
        return Advice(positions, True, f"{len(positions)} of {len(candidates)} configs advised: {advice.reason}")


def kernel_config(candidate: Candidate) -> KernelConfig:
    """Return a candidate as a `KernelConfig`; values other than numbers and strings are converted to strings.

    Raises:
        ForetuneError: A launch option has a value that no kernel takes.
    """
    values: dict[str, Any] = {}
    for name, value in candidate.knobs.items():
        known = getattr(value, "all_kwargs", None)
        if callable(known):
            values |= known()
        else:
            values[name] = value if isinstance(value, (int, float, str)) else str(value)
    return KernelConfig.of(**values)
