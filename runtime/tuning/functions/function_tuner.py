"""`FunctionTuner`: the base class of `TunedFunction` and `ContextualFunction`, which tune in a `TuningSession`."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

from ....datasets import ForetuneError, Problem
from ....datasets.errors import MOST, check_integer, printable
from ...arguments import pin_epoch, requested_or_set, warn_once
from ...launching.stub_driver import measures
from ...pin_file import PinError
from ...pins import pins_in_force
from ...timing.flywheel import Software
from ..session import Measured, TuningSession
from .call_timer import CallTimer, CallTrials, check_timer, timer_for
from .calls import FunctionCall
from .config_cache import ConfigCache, KeyRecord, RecordTimes, record_key
from .config_space import Candidate, Search
from .in_step import Ranks
from .plain_values import plain, text_of
from .results import Trial, TuneResult
from .side_effects import SideEffects
from .wrapped import P, R, WrappedFunction

#: The environment variable that sets `Reuse`.
VARIABLE = "FORETUNE_TUNE"


class Reuse(str, Enum):
    """The tuning results of earlier processes to reuse (FORETUNE_TUNE): all, those of equal versions, or none."""

    KNOWN = "known"  # all, with a warning if another driver, torch, Triton or Python measured them
    STRICT = "strict"  # those measured with the same versions
    ALWAYS = "always"  # none: every process tunes again


def resolve_reuse() -> Reuse:
    """Return the `Reuse` that FORETUNE_TUNE names. Raises `ForetuneError` with the valid values for any other.

    >>> resolve_reuse()
    <Reuse.KNOWN: 'known'>
    """
    return requested_or_set(VARIABLE, None, VARIABLE, Reuse.KNOWN)


def software() -> dict[str, str]:
    """Return the versions of driver, torch, Triton and Python, on which times depend."""
    return asdict(Software.here()) | {"python": platform.python_version()}


class FunctionTuner(WrappedFunction[P, R]):
    """A function that is called with its fastest config, which is found by timing calls, and cached.

    `foretune.tune` documents the options. Subclasses define what a config is and how it is tuned.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        n_warmup: int = 3,
        n_repeat: int = 10,
        reset: Callable[..., Any] | None = None,
        restore: Sequence[str] = (),
        cache: ConfigCache | Path | str | bool = True,
        timer: CallTimer | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(function)
        resolve_reuse()  # an invalid value raises at the declaration, not in a call
        self.n_warmup = check_integer("n_warmup", n_warmup, 1, MOST)  # the first call compiles
        self.n_repeat = check_integer("n_repeat", n_repeat, 1, MOST)
        self._effects = SideEffects(reset, restore)
        self.cache = ConfigCache.for_function(self.name, cache)
        self._timer, self._clock, self._now = check_timer(timer), clock, now
        #: The choices of this process, by `_memory_key`.
        self._chosen: dict[tuple[str, str, int], Any] = {}
        self._valid_for = self.cache.generation, pin_epoch()

    def _remembered(self, key: tuple[str, str, int]) -> Any:
        """Return this process's choice for a key; None if there is none or the cache or the pins have changed since."""
        if self._valid_for != (now := (self.cache.generation, pin_epoch())):
            self._valid_for = now
            self._chosen.clear()
        return self._chosen.get(key)

    def _pinned(self, call: FunctionCall) -> Mapping[str, str] | None:
        """Return the texts of the configs that the pin file in force has for a call, by label.

        Returns None if no file is in force, and {} for an uncovered call if only a warning is given.

        Raises:
            PinError: The file does not cover the call.
        """
        if (pins := pins_in_force()) is None:
            return None
        try:
            return pins.function_configs(self.name, self.digest, call.place.name, call.key)
        except PinError as error:
            pins.fall_back(self.name, error)
            return {}

    def _fall_back(self, difference: str) -> None:
        """Raise a `PinError`, or with `Missing.PREDICT` warn, that the pin file in force does not fit this process.

        `difference` says how it differs. Does nothing if no file is in force.
        """
        if (pins := pins_in_force()) is not None:
            pins.fall_back(self.name, PinError(f"{pins.path} {difference}"))

    def _record_key(self, call: FunctionCall) -> str:
        return record_key(self.name, self.digest, call.place.name, call.key)

    def _memory_key(self, call: FunctionCall, group: Any) -> tuple[str, str, int]:
        fixed = text_of(plain(call.fixed, str)) if call.fixed else ""
        return self._record_key(call), fixed, Ranks(group).number

    def _is_repeatable(self, call: FunctionCall, consequence: str | None = None) -> bool:
        """Return whether a call can be repeated: its first run uses up no argument, such as an iterator.

        If one is used up, warn with the text `consequence`; if this is None, raise `ForetuneError`.
        """
        if (reason := self._effects.used_up(call.named)) is None:
            return True
        if consequence is None:
            raise ForetuneError(f"{self.name}: {reason}: pass a list, or a function that opens it")
        warn_once(f"{self.name}: {reason}", consequence)
        return False

    def _new_record(self, problem: Problem | None) -> KeyRecord:
        return KeyRecord(problem, software())

    def _usable(self, records: Mapping[str, KeyRecord]) -> dict[str, KeyRecord]:
        """Return the records if FORETUNE_TUNE allows reusing them, else {}; warn if other versions measured one."""
        others = [record for record in records.values() if dict(record.software) != software()]
        if others and resolve_reuse() is Reuse.STRICT:
            return {}
        if others:
            then = " ".join(f"{name}={version}" for name, version in others[0].software.items())
            warn_once(f"{self.name}: was tuned with {then}", ": that choice runs; FORETUNE_TUNE=strict tunes again")
        return dict(records)

    def _keep(self, call: FunctionCall, entry: dict[str, Any]) -> None:
        """Store `entry` in the cache for a call's key; not if the driver is a stub, whose times are not real."""
        if self._timer is not None or measures():
            self.cache.set(self._record_key(call), entry)

    @contextmanager
    def _tuning(
        self, call: FunctionCall, group: Any, verbose: bool, logs: Path | None = None, **terms: object
    ) -> Iterator[CallTuning]:
        """Yield a `CallTuning` of a call; all ranks of `group` begin and end the block together.

        The key, the source and the `terms` must be equal on all ranks. Progress is printed if `verbose`, and written to
        files in the folder `logs`.
        """
        ranks, runs = Ranks(group), f"{self.n_warmup} + {self.n_repeat}"
        with ranks.together(self.name, {"key": call.key, "source": self._code, **terms, "runs": runs}):
            yield CallTuning(self, call, ranks, _line_reporter(verbose, self.name, call.key, ranks, logs))


@dataclass
class CallTuning:
    """Measures the configs for one call of a function, on all ranks in lockstep.

    Attributes:
        tuner: The function that is tuned.
        call: The call.
        ranks: The ranks that tune together.
        report_line: Reports a line of progress.
    """

    tuner: FunctionTuner[Any, Any]
    call: FunctionCall
    ranks: Ranks
    report_line: Callable[[str], object]

    @cached_property
    def undo(self) -> Callable[[], object] | None:
        """A function that undoes the changes of a run, or None; the first access takes the snapshot."""
        return self.tuner._effects.undo(self.call.args, self.call.kwargs, self.call.named)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Undo, at the end of the block, the changes to the arguments that runs of the function in the block made."""
        undo = self.undo
        try:
            yield
        finally:
            if undo is not None:
                undo()

    def is_shared(self, digest: str) -> bool:
        """Return whether `digest`, which identifies the results known so far, is equal on all ranks.

        If it is not, the caller measures everything again on all ranks in lockstep.
        """
        return len(set(self.ranks.exchange("what is known", digest))) == 1

    def measure(
        self,
        record: KeyRecord,
        candidates: Sequence[Candidate],
        search: Search,
        run: Callable[[Candidate], Any],
        *,
        label: str = "",
        save: Callable[[], object] = lambda: None,
        check: Callable[[Candidate], object] = lambda candidate: None,
    ) -> tuple[TuningSession[Candidate], str]:
        """Measure the configs that a search selects, into a record; save it even if an exception or Ctrl-C ends it.

        Args:
            record: Known measurements of the key; new ones are added.
            candidates: All configs of the call, in the order of the space.
            search: Selects the configs to measure.
            run: Calls the function with a config.
            label: Prefix of progress lines.
            save: Writes the record.
            check: Raises if a config failed although its run ended normally.

        Returns:
            The session, and a text that says what was measured.
        """
        tuner, ranks = self.tuner, self.ranks

        def report(candidate: Candidate, measured: Measured) -> None:
            took, best = f"{measured.status.value}: {measured.error}", session.best
            if measured.time_us is not None:
                took = f"{measured.time_us:.1f} us"
            so_far = "" if best is None else f" (best {session.measured[best].time_us:.1f} us: {best})"
            self.report_line(f"{label}{len(record.measured)}/{len(candidates)} {candidate}: {took}{so_far}")

        timer = tuner._timer or timer_for(self.call.place.spec is not None, in_step=not ranks.alone)
        session = TuningSession(
            RecordTimes(record, save, tuner._clock, tuner._now),
            CallTrials(tuner.name, run, timer, self.undo, ranks, tuner.n_warmup, tuner.n_repeat, check),
            budget_s=search.budget_s,
            max_trials=search.max_trials,
            needs_one=True,
            in_step=lambda is_in_time: all(ranks.exchange("budget_s", is_in_time)),
            report=report,
            clock=tuner._clock,
        )
        session.recall(candidates)
        try:
            return session, search.run(session, record.problem, candidates, ranks.exchange)
        finally:
            save()

    def result(
        self, function: str, key: str, record: KeyRecord, best: Candidate, trials: Sequence[Trial], **rest: Any
    ) -> TuneResult:
        """Return the `TuneResult` of a function, or of a kernel in it, whose best config is `best`.

        `record` has its measurements, and `rest` has other fields of the result.
        """
        chosen = record.measured.get(best.text)
        return TuneResult(
            function=function,
            key=key,
            problem=record.problem,
            device=self.call.place.name,
            software=dict(record.software),
            best_config=dict(best.knobs),
            best_time_us=None if chosen is None else chosen.time_us,
            trials=tuple(trials),
            **rest,
        )


def trials_of(
    candidates: Iterable[Candidate],
    measured: Mapping[Candidate, Measured],
    metrics: Callable[[float | None], dict[str, float]] = lambda time_us: {},
) -> list[Trial]:
    """Return the trials of all measured candidates, in the order of the candidates, with the metrics of their times."""
    return [
        Trial(dict(one.knobs), *measured[one], metrics(measured[one].time_us)) for one in candidates if one in measured
    ]


def _line_reporter(
    is_verbose: bool, function: str, key: str, ranks: Ranks, logs: Path | None = None
) -> Callable[[str], None]:
    """Return a function that reports one line of a tuning on stderr if `is_verbose`.

    With `logs`, each line is also appended to rank-N.log in that folder, whether verbose or not.
    """
    label = f"{function} {key}" if ranks.alone else f"rank {ranks.rank}: {function} {key}"

    def report(text: str) -> None:
        line = printable(f"{label}: {text}")
        if is_verbose:
            from rich.console import Console

            Console(stderr=True).print(line, soft_wrap=True, markup=False, emoji=False, highlight=False)
        if logs is not None:
            logs.mkdir(parents=True, exist_ok=True)
            with (logs / f"rank-{ranks.rank}.log").open("a") as file:
                file.write(line + "\n")

    return report
