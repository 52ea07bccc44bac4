"""`FunctionTuner`: what `TunedFunction` and `ContextualFunction` have in common, on the way to a `TuningSession`."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Any

from ....datasets import ForetuneError, Problem, Status
from ....datasets.errors import MOST, check_integer, shown
from ...launching.stub_driver import measures
from ...warn import warn_once
from ..cache.choice_cache import Software
from ..session import Measured, TuningSession
from .call_timer import CallTimer, CallTrials, check_timer, timer_for
from .calls import Call
from .config_cache import ConfigCache
from .config_space import Candidate
from .in_step import Ranks
from .key_record import KeyRecord, RecordTimes, record_key
from .plain_values import plain, text_of
from .results import Trial, TuneResult
from .search import Search
from .side_effects import SideEffects
from .wrapped import WrappedFunction

VARIABLE = "FORETUNE_TUNE"


class Reuse(str, Enum):
    """How far what was found out before is trusted: what becomes of a key that was tuned before."""

    KNOWN = "known"  # it is used, with a warning where another driver, torch, Triton or Python measured it
    STRICT = "strict"  # it is used where the same versions measured it
    ALWAYS = "always"  # every process tunes anew


def resolve_reuse() -> Reuse:
    """Return what the environment requests now. Raises `ForetuneError` listing the valid values.

    >>> resolve_reuse()
    <Reuse.KNOWN: 'known'>
    """
    value = os.environ.get(VARIABLE) or Reuse.KNOWN.value
    try:
        return Reuse(value.lower())
    except ValueError:
        valid = ", ".join(reuse.value for reuse in Reuse)
        raise ForetuneError(f"{VARIABLE} must be one of {valid} but got {shown(value)}") from None


def software() -> dict[str, str]:
    """Return the versions that a time depends on."""
    return asdict(Software.here()) | {"python": platform.python_version()}


class FunctionTuner(WrappedFunction):
    """A function whose calls are timed, and whose records are kept. Its options are explained at `foretune.tune`."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        n_warmup: int,
        n_repeat: int,
        reset: Callable[..., Any] | None,
        restore: Sequence[str],
        cache: ConfigCache | Path | str | bool,
        timer: CallTimer | None,
        clock: Callable[[], float],
        now: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(function)
        resolve_reuse()  # a value that does not exist is refused here, not in a launch
        self.n_warmup = check_integer("n_warmup", n_warmup, 1, MOST)  # the first call compiles
        self.n_repeat = check_integer("n_repeat", n_repeat, 1, MOST)
        self._effects = SideEffects(reset, restore)
        self.cache = ConfigCache.for_function(self.name, cache)
        self._timer, self._clock, self._now = check_timer(timer), clock, now
        #: What was chosen in this process, by `_memory_key`.
        self._chosen: dict[tuple[str, str, int], Any] = {}
        self._generation = self.cache.generation

    def _remembered(self, key: tuple[str, str, int]) -> Any:
        """What was chosen in this process, unless the cache has changed since."""
        if self._generation != self.cache.generation:
            self._generation = self.cache.generation
            self._chosen.clear()
        return self._chosen.get(key)

    def _record_key(self, call: Call) -> str:
        return record_key(self.name, self._digest, call.place.name, call.key)

    def _memory_key(self, call: Call, group: Any) -> tuple[str, str, int]:
        fixed = text_of(plain(call.fixed, str)) if call.fixed else ""
        return self._record_key(call), fixed, Ranks(group).number

    def _bears_trials(self, call: Call, consequence: str) -> bool:
        """Whether a call may be repeated; where not, warn of that and its consequence."""
        if (reason := self._effects.used_up(call.named)) is not None:
            warn_once(f"{self.name}: {reason}", consequence)
        return reason is None

    def _check_bears_trials(self, call: Call) -> None:
        """Raise `ForetuneError` for a call that must not be repeated."""
        if (reason := self._effects.used_up(call.named)) is not None:
            raise ForetuneError(f"{self.name}: {reason}: pass a list, or what opens it")

    def _new_record(self, problem: Problem | None) -> KeyRecord:
        return KeyRecord(problem, software())

    def _usable(self, records: Mapping[str, KeyRecord]) -> dict[str, KeyRecord]:
        """Return the records where they may be used, as FORETUNE_TUNE has it."""
        others = [record for record in records.values() if dict(record.software) != software()]
        if others and resolve_reuse() is Reuse.STRICT:
            return {}
        if others:
            then = " ".join(f"{name}={version}" for name, version in others[0].software.items())
            warn_once(f"{self.name}: was tuned with {then}", ": that choice runs; FORETUNE_TUNE=strict tunes again")
        return dict(records)

    def _keep(self, call: Call, entry: Mapping[str, Any]) -> None:
        """Keep what was measured of a call's key, if it was (see `measures`)."""
        if self._timer is not None or measures():
            self.cache.set(self._record_key(call), dict(entry))

    @contextmanager
    def _in_step(self, call: Call, ranks: Ranks, **terms: object) -> Iterator[None]:
        """All ranks tune this call, or all raise (see `Ranks.together`)."""
        runs = f"{self.n_warmup} + {self.n_repeat}"
        with ranks.together(self.name, {"key": call.key, "source": self._code, **terms, "runs": runs}):
            yield

    def _measure(
        self,
        call: Call,
        record: KeyRecord,
        candidates: Sequence[Candidate],
        search: Search,
        ranks: Ranks,
        run: Callable[[Candidate], Any],
        *,
        undo: Callable[[], Any] | None,
        say: Callable[[str], object],
        save: Callable[[], object] = lambda: None,
        check: Callable[[Candidate], object] = lambda candidate: None,
    ) -> tuple[TuningSession[Candidate], str]:
        """Fill a record with what a search asks for. What was measured is saved whatever ends it, Ctrl-C among others.

        Returns:
            The session, and what was measured, in words.
        """

        def report(candidate: Candidate, measured: Measured) -> None:
            took = (
                f"{measured.status.value}: {measured.error}"
                if measured.time_us is None
                else f"{measured.time_us:.1f} us"
            )
            best = session.best
            so_far = "" if best is None else f" (best {session.measured[best].time_us:.1f} us: {best})"
            say(f"{len(record.measured)}/{len(candidates)} {candidate}: {took}{so_far}")

        timer = self._timer or timer_for(call.place.on_gpu, in_step=not ranks.alone)
        session = TuningSession(
            RecordTimes(record, save, self._clock, self._now),
            CallTrials(self.name, run, timer, undo, ranks, self.n_warmup, self.n_repeat, check),
            budget_s=search.budget_s,
            max_trials=search.max_trials,
            needs_one=True,
            in_step=lambda is_in_time: all(ranks.exchange("budget_s", is_in_time)),
            report=report,
            clock=self._clock,
        )
        session.recall(candidates)
        try:
            return session, search.run(session, record.problem, candidates, ranks.exchange)
        finally:
            save()

    def _result(
        self,
        call: Call,
        function: str,
        key: str,
        record: KeyRecord,
        best: Candidate,
        trials: Sequence[Trial],
        *,
        n_candidates: int,
        tuned_s: float,
        reason: str,
    ) -> TuneResult:
        chosen = record.measured.get(best.text)
        return TuneResult(
            function=function,
            key=key,
            problem=record.problem,
            device=call.place.name,
            software=dict(record.software),
            best_config=dict(best.knobs),
            best_time_us=None if chosen is None else chosen.time_us,
            trials=tuple(trials),
            untried=n_candidates - len(trials),
            tuned_s=tuned_s,
            reason=reason,
        )


def trials_of(
    candidates: Iterable[Candidate],
    measured: Mapping[Candidate, Measured],
    metrics: Callable[[float | None], dict[str, float]] = lambda time_us: {},
) -> list[Trial]:
    """Return the trials of those candidates that something is known of, in their order."""
    return [
        Trial(dict(one.knobs), *measured[one], metrics(measured[one].time_us)) for one in candidates if one in measured
    ]


def refused(reasons: Mapping[Candidate, str]) -> dict[Candidate, Measured]:
    """Return refusals as what was measured."""
    return {one: Measured(Status.INVALID, error=why) for one, why in reasons.items()}
