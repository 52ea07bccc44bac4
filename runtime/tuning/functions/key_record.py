"""`KeyRecord`: what is known of one key, as the cache keeps it, and the loop that finds it out."""

from __future__ import annotations

import hashlib
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NamedTuple

from ....datasets import ForetuneError, Problem, Status
from ....datasets.errors import shown
from ....datasets.measurement import SHORTEST_US
from ...timing.timer import Timing
from ..cache.kernel_cache import FAILURES_LAST_S
from ..ranks.rendezvous import longest
from .call_timer import CallTimer
from .config_space import Candidate
from .in_step import Ranks
from .plain_values import text_of
from .results import Failures, check_finished, failure_of
from .search import Plan, Search

#: A process that is killed loses what it measured since it last wrote: at most this much, this share of the time spent
#: so far, or one config. The share keeps the bytes written proportional to the number of configs, up to a logarithm.
_WRITE_EVERY_S, _WRITE_EVERY_SHARE = 1.0, 0.125
#: A record in a full file is shortened where it has more than this share of all outcomes, and more than this many.
_LARGE_SHARE, _FEW = 0.25, 32
#: No call takes so long, in microseconds; a file may say that one did.
_MOST_US = 1e18
#: Later than any clock, in seconds.
_LATEST_S = 1e15


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

    @property
    def may_pass(self) -> bool:
        """Whether a config that failed so may work later. What the compiler or the device refused, they refuse again,
        and some such errors end the process's use of the device."""
        error = self.error or ""
        if error.startswith(("OutOfMemoryError", "MemoryError")):
            return True
        return self.status is Status.LAUNCH_FAILED and not re.search("CUDA|HIP|cuda|hip", error)


@dataclass
class KeyRecord:
    """Outcomes by a config's text; the one that was `chosen`, and for which list of configs and which search that was
    the end (`done`); and when the first of the kept failures was (`failed_at`, seconds since 1970)."""

    problem: Problem | None
    software: Mapping[str, str]
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    chosen: str | None = None
    done: str = ""
    failed_at: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "problem": None if self.problem is None else self.problem.to_json(),
            "software": dict(self.software),
            "outcomes": {text: [one.status.value, *one[1:]] for text, one in self.outcomes.items()},
            "chosen": self.chosen,
            "done": self.done,
            "failed_at": self.failed_at,
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
            failed_at = value.get("failed_at")  # files of earlier versions do not have it
            assert failed_at is None or (type(failed_at) in (int, float) and 0 <= failed_at < _LATEST_S)
            software, chosen, done = dict(value["software"]), value["chosen"], value["done"]
            texts = (*software, *software.values(), done, *([] if chosen is None else [chosen]))
            if not all(isinstance(text, str) for text in texts):
                return None
            return cls(problem, software, outcomes, chosen, done, failed_at)
        except (AssertionError, KeyError, TypeError, ValueError, AttributeError):
            return None

    def times(self, candidates: Sequence[Candidate]) -> dict[Candidate, float | None]:
        """Those of the candidates that were measured."""
        return {one: self.outcomes[one.text].time_us for one in candidates if one.text in self.outcomes}

    def fastest(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """The fastest of those that work; the first of equals; None where none does."""
        timed = {one: time_us for one, time_us in self.times(candidates).items() if time_us is not None}
        return min(timed, key=timed.__getitem__, default=None)

    def retry_failures(self, candidates: Sequence[Candidate], now: float) -> None:
        """Forget failures that are to be tried again: all of them where no candidate has a time, and after
        `FAILURES_LAST_S` those that may pass."""
        failures = [text for text, one in self.outcomes.items() if one.time_us is None]
        if self.fastest(candidates) is not None:
            if self.failed_at is None or 0 <= now - self.failed_at < FAILURES_LAST_S:
                return
            failures = [text for text in failures if self.outcomes[text].may_pass]
        for text in failures:
            del self.outcomes[text]
        self.failed_at = None
        if failures:
            self.done = ""

    def is_faster(self, candidate: Candidate, than: Candidate | None) -> bool:
        """Whether a config that was tried works, and is faster than another one that works (None: there is none)."""
        time_us = self.outcomes[candidate.text].time_us
        if time_us is None or than is None:
            return time_us is not None
        known_us = self.outcomes[than.text].time_us
        return known_us is None or time_us < known_us


def records_of(entry: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any], KeyRecord]]:
    """Yield a cache entry's records by label, each as JSON and as read: one, with the label "", of a function; one for
    each kernel of a contextual function. Anything else is left out."""
    sites = entry.get("sites", {"": entry})
    for label, value in sites.items() if isinstance(sites, dict) else ():
        if (record := KeyRecord.from_json(value)) is not None:
            yield label, value, record


def shorten_largest(records: Sequence[dict[str, Any]]) -> bool:
    """Drop the slower half of the record with the most outcomes, where these are a large share of all; False if not."""
    largest: dict[str, Any] = max(records, key=lambda value: len(value["outcomes"]), default={"outcomes": {}})
    outcomes, total = largest["outcomes"], sum(len(value["outcomes"]) for value in records)
    if len(outcomes) <= max(_FEW, _LARGE_SHARE * total):
        return False
    by_time = sorted(outcomes, key=lambda text: (text != largest["chosen"], outcomes[text][1] or math.inf))
    kept = set(by_time[: len(by_time) // 2])
    largest["outcomes"] = {text: outcome for text, outcome in outcomes.items() if text in kept}
    return True


@dataclass
class Tuning:
    """One tuning of one key: runs configs, ranks in step, until the search has enough. `check` raises for a config that
    failed although the call ended well. `now` is the time of day in seconds; `failures` has what was raised."""

    name: str
    run: Callable[[Candidate], Any]
    timer: CallTimer
    undo: Callable[[], Any] | None
    ranks: Ranks
    n_warmup: int
    n_repeat: int
    save: Callable[[], Any]
    say: Callable[[str], Any]
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], float] = time.time
    check: Callable[[Candidate], Any] = lambda candidate: None
    failures: Failures = field(default_factory=Failures)

    def measure(self, record: KeyRecord, candidates: Sequence[Candidate], search: Search) -> str:
        """Fills the record with what the search asks for; says in words what that was. What was measured is kept
        whatever ends it, Ctrl-C among others."""
        began = saved = self.clock()
        best = record.fastest(candidates)
        plan = search.plan(record.problem, candidates)
        if search.is_guided:  # each rank has a model of its own
            positions, why = self.ranks.exchange("the configs that are advised", [plan.positions, plan.reason])[0]
            plan = Plan(tuple(positions), why)
        in_plan = set(plan.positions)
        positions = (*plan.positions, *(at for at in range(len(candidates)) if at not in in_plan))
        measured, reason = 0, plan.reason
        try:
            for turn, position in enumerate(positions):
                works = best is not None
                if works and turn >= len(plan.positions):
                    break
                candidate = candidates[position]
                if candidate.text in record.outcomes:
                    continue
                if works and (over := self._is_over(search, measured, self.clock() - began)):
                    reason = f"{plan.reason}, ended by {over}"
                    break
                outcome = record.outcomes[candidate.text] = self._outcome(candidate)
                if outcome.time_us is None and record.failed_at is None:
                    record.failed_at = self.now()
                measured += 1
                if record.is_faster(candidate, best):
                    best = candidate
                self._tell(record, len(candidates), candidate, best)
                if self.clock() - saved >= max(_WRITE_EVERY_S, _WRITE_EVERY_SHARE * (saved - began)):
                    self.save()
                    saved = self.clock()
        finally:
            self.save()
        return f"{measured} measured {reason}"

    def _is_over(self, search: Search, measured: int, spent_s: float) -> str:
        if search.max_trials is not None and measured >= search.max_trials:
            return f"max_trials={search.max_trials}"
        if search.budget_s is not None and not all(self.ranks.exchange("budget_s", spent_s < search.budget_s)):
            return f"budget_s={search.budget_s:g}"
        return ""

    def _outcome(self, candidate: Candidate) -> Outcome:
        """What a config does here, with its time on the slowest rank. One that fails anywhere is given up everywhere
        after its first run, so that all ranks make as many calls."""

        def call() -> Any:
            return self.run(candidate)

        result, outcome = None, Outcome(Status.OK)
        try:
            result = self._undone(call)
            self.check(candidate)
        except Exception as error:  # noqa: BLE001 - a config that fails is one config less
            outcome = self._failed(error)
        failures = self.ranks.exchange(f"the first run of {candidate}", outcome.error or "", outcome.error)
        check_finished(self.name, result)
        del result  # which may be large
        if any(failures):
            return self._failed_elsewhere(failures) if outcome.status is Status.OK else outcome
        try:
            for _ in range(self.n_warmup - 1):
                self._undone(call)
            times = _checked(self.timer.sample(call, self.n_repeat, self.undo))
            timing = Timing.of([max(time_us, SHORTEST_US) for time_us in times])  # some clocks stand still
            self.check(candidate)
            outcome = Outcome(Status.OK, timing.time_us, timing.spread, timing.samples)
        except Exception as error:  # noqa: BLE001 - as above
            outcome = self._failed(error)
        everyones = self.ranks.exchange(
            f"the time of {candidate}", [outcome.time_us, outcome.error or ""], outcome.error
        )
        time_us = longest([time for time, _ in everyones])
        if time_us is None and outcome.time_us is not None:
            return self._failed_elsewhere([failure for _, failure in everyones])
        if time_us is not None:
            self.failures.clear()
        return outcome._replace(time_us=time_us)

    def _failed(self, error: Exception) -> Outcome:
        self.failures.add(error)
        status, text = failure_of(error)
        if status is Status.OUT_OF_RESOURCES and type(error).__module__.startswith("torch"):
            import torch

            torch.cuda.empty_cache()  # so that it costs this config alone
        return Outcome(status, error=text)

    def _failed_elsewhere(self, failures: Sequence[str]) -> Outcome:
        self.failures.add(None)
        return Outcome(Status.LAUNCH_FAILED, error=f"failed on another rank: {self.ranks.told(failures)}")

    def _undone(self, call: Callable[[], Any]) -> Any:
        if self.undo is not None:
            self.undo()
        return call()

    def _tell(self, record: KeyRecord, total: int, candidate: Candidate, best: Candidate | None) -> None:
        outcome = record.outcomes[candidate.text]
        took = f"{outcome.status.value}: {outcome.error}" if outcome.time_us is None else f"{outcome.time_us:.1f} us"
        so_far = "" if best is None else f" (best {record.outcomes[best.text].time_us:.1f} us: {best})"
        self.say(f"{len(record.outcomes)}/{total} {candidate}: {took}{so_far}")


def _checked(times: Any) -> list[float]:
    """What a timer returned, as numbers. Raises `ForetuneError` for what cannot be times."""
    found = list(times) if isinstance(times, Iterable) else []
    if not found:
        raise ForetuneError(f"the timer must return a list of times but returned {shown(times)}")
    for time_us in found:
        is_number = isinstance(time_us, Real) and not isinstance(time_us, bool)
        if not is_number or not 0 <= time_us <= sys.float_info.max:
            raise ForetuneError(
                f"the timer must return finite numbers of microseconds >= 0 but returned {shown(time_us)}"
            )
    return [float(time_us) for time_us in found]


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
