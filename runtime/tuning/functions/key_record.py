"""`KeyRecord`: what is known of one key, as the cache keeps it, and the loop that finds it out."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ....datasets import ForetuneError, Problem, Status
from ....datasets.measurement import SHORTEST_US
from ...timing.timer import Timing
from .call_timer import CallTimer
from .config_space import Candidate
from .in_step import Ranks
from .plain_values import text_of
from .results import failure_of
from .search import Search

#: A process that is killed loses what it measured since it last wrote: at most so much, or one config.
_WRITE_EVERY_S = 1.0
#: No call takes so long, in microseconds; a file may say that one did.
_MOST_US = 1e18


def record_key(function: str, digest: str, place: str, key: str) -> str:
    """What the cache keeps a key's record under: `digest` is that of the function's source, `place` where it runs."""
    return f"{function}#{digest} on {place}: {key}"


def function_of(key: str) -> str:
    """The function of a `record_key`.

    >>> function_of(record_key("package.scale", "a1b2", "NVIDIA H200", "64"))
    'package.scale'
    """
    return key.partition("#")[0]


class Outcome(NamedTuple):
    """What a config did: see `Trial`."""

    status: Status
    time_us: float | None = None
    spread: float | None = None
    samples: int = 0
    error: str | None = None


@dataclass
class KeyRecord:
    """Outcomes by a config's text; the one that was `chosen`, and for which list of configs and which search that was
    the end (`done`)."""

    problem: Problem | None
    software: Mapping[str, str]
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    chosen: str | None = None
    done: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "problem": None if self.problem is None else self.problem.to_json(),
            "software": dict(self.software),
            "outcomes": {text: [one.status.value, *one[1:]] for text, one in self.outcomes.items()},
            "chosen": self.chosen,
            "done": self.done,
        }

    @property
    def gist(self) -> str:
        """What ranks must have in common to choose the same; each has its own spread and errors."""
        times = {text: outcome.time_us for text, outcome in self.outcomes.items()}
        return hashlib.sha256(text_of([times, self.chosen, self.done]).encode()).hexdigest()

    @classmethod
    def from_json(cls, value: Mapping[str, Any] | None) -> KeyRecord | None:
        """None for what is none: a file may say anything."""
        try:
            assert value is not None
            outcomes = {str(text): _outcome(*one) for text, one in value["outcomes"].items()}
            problem = None if value["problem"] is None else Problem.from_json(value["problem"])
            software, chosen, done = dict(value["software"]), value["chosen"], value["done"]
            texts = (*software, *software.values(), done, *([] if chosen is None else [chosen]))
            if not all(isinstance(text, str) for text in texts):
                return None
            return cls(problem, software, outcomes, chosen, done)
        except (AssertionError, KeyError, TypeError, ValueError, AttributeError):
            return None

    def times(self, candidates: Sequence[Candidate]) -> dict[Candidate, float | None]:
        """Those of the candidates that were measured."""
        return {one: self.outcomes[one.text].time_us for one in candidates if one.text in self.outcomes}

    def fastest(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """The fastest of those that work; the first of equals; None where none does."""
        timed = {one: time_us for one, time_us in self.times(candidates).items() if time_us is not None}
        return min(timed, key=timed.__getitem__, default=None)


@dataclass
class Tuning:
    """One tuning of one key: runs configs, ranks in step, until the search has enough. `check` raises for a config that
    failed although the call ended well."""

    run: Callable[[Candidate], Any]
    timer: CallTimer
    undo: Callable[[], Any] | None
    ranks: Ranks
    n_warmup: int
    n_repeat: int
    save: Callable[[], Any]
    say: Callable[[str], Any]
    clock: Callable[[], float] = time.monotonic
    check: Callable[[Candidate], Any] = lambda candidate: None

    def measure(self, record: KeyRecord, candidates: Sequence[Candidate], search: Search) -> str:
        """Fills the record with what the search asks for; says in words what that was. What was measured is kept
        whatever ends it, Ctrl-C among others."""
        began = saved = self.clock()
        plan = search.plan(record.problem, candidates)
        in_plan = set(plan.positions)
        positions = (*plan.positions, *(at for at in range(len(candidates)) if at not in in_plan))
        measured, reason = 0, plan.reason
        try:
            for turn, position in enumerate(positions):
                works = record.fastest(candidates) is not None
                if works and turn >= len(plan.positions):
                    break
                candidate = candidates[position]
                if candidate.text in record.outcomes:
                    continue
                if works and (over := self._is_over(search, measured, self.clock() - began)):
                    reason = f"{plan.reason}, ended by {over}"
                    break
                outcome = record.outcomes[candidate.text] = self._outcome(candidate)
                measured += 1
                self._tell(record, candidates, candidate, outcome)
                if self.clock() - saved >= _WRITE_EVERY_S:
                    self.save()
                    saved = self.clock()
        finally:
            self.save()
        return f"{measured} measured {reason}"

    def _is_over(self, search: Search, measured: int, spent_s: float) -> str:
        if search.max_trials is not None and measured >= search.max_trials:
            return f"max_trials={search.max_trials}"
        if search.budget_s is not None and not self.ranks.all_say(spent_s < search.budget_s):
            return f"budget_s={search.budget_s:g}"
        return ""

    def _outcome(self, candidate: Candidate) -> Outcome:
        """What a config does here, with its time on the slowest rank. One that fails anywhere is given up everywhere
        after its first run, so that all ranks make as many calls."""

        def call() -> Any:
            return self.run(candidate)

        try:
            self._undone(call)
            self.check(candidate)
            outcome = Outcome(Status.OK)
        except Exception as error:  # noqa: BLE001 - a config that fails is one config less
            outcome = Outcome(*_failed(error))
        works = outcome.status is Status.OK
        if not self.ranks.all_say(works):
            return outcome if not works else Outcome(Status.LAUNCH_FAILED, error="failed on another rank")
        try:
            for _ in range(self.n_warmup - 1):
                self._undone(call)
            times = self.timer.sample(call, self.n_repeat, self.undo)
            timing = Timing.of([max(time_us, SHORTEST_US) for time_us in times])  # some clocks stand still
            self.check(candidate)
            outcome = Outcome(Status.OK, timing.time_us, timing.spread, timing.samples)
        except Exception as error:  # noqa: BLE001 - as above
            outcome = Outcome(*_failed(error))
        time_us = self.ranks.slowest(outcome.time_us)
        if time_us is None and outcome.time_us is not None:
            return Outcome(Status.LAUNCH_FAILED, error="failed on another rank")
        return outcome._replace(time_us=time_us)

    def _undone(self, call: Callable[[], Any]) -> None:
        if self.undo is not None:
            self.undo()
        call()

    def _tell(self, record: KeyRecord, candidates: Sequence[Candidate], candidate: Candidate, outcome: Outcome) -> None:
        best = record.fastest(candidates)
        took = f"{outcome.status.value}: {outcome.error}" if outcome.time_us is None else f"{outcome.time_us:.1f} us"
        so_far = "" if best is None else f" (best {record.outcomes[best.text].time_us:.1f} us: {best})"
        self.say(f"{len(record.outcomes)}/{len(candidates)} {candidate}: {took}{so_far}")


def _failed(error: Exception) -> tuple[Any, ...]:
    status, text = failure_of(error)
    if status is Status.OUT_OF_RESOURCES and type(error).__module__.startswith("torch"):
        import torch

        torch.cuda.empty_cache()  # so that it costs this config alone
    return status, None, None, 0, text


def _outcome(status: Any, time_us: Any, spread: Any, samples: Any, error: Any) -> Outcome:
    status = Status(status)
    is_timed = status is Status.OK
    if is_timed != (time_us is not None) or (is_timed and not (_is_number(time_us) and time_us > 0)):
        raise ForetuneError("a time goes with a config that works")
    if not (spread is None or _is_number(spread)) or not _is_number(samples) or not isinstance(error, str | None):
        raise ForetuneError("spread and samples must be numbers and an error a text")
    return Outcome(status, time_us, spread, int(samples), error)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < _MOST_US
