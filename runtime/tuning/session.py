"""Tune one key of a kernel or of a function with a `TuningSession`.

`foretune.autotune`, `attach`, `tune` and `contextual_autotune` share its steps: recall the known times of the
candidates, compile the other candidates ahead, time them one after the other, record each time at once, stop at a
limit, and choose the fastest. The caller passes functions that launch and time a candidate, and an object that
stores times. `ProgressLine` shows how far a session is.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from traceback import clear_frames
from typing import Any, Generic, NamedTuple, Protocol, TextIO, TypeVar

from ...datasets import ForetuneError, Status
from ...datasets.errors import abridged, printable
from ..launching.ahead import compile_ahead, cores

C = TypeVar("C", bound=Hashable)

#: Number of configs per compiling thread in one batch: enough to keep all threads busy, and few enough that an
#: interrupted tuning has stored some times. Compiling and timing do not overlap, because compiling threads disturb the
#: timing.
_AT_ONCE = 2


class TuningFailed(ForetuneError):  # noqa: N818 - reads as what happened
    """No config of a kernel or function works; the message lists the reason of each.

    For a function, `trials` has the results of all configs.
    """

    trials: Sequence[Any] = ()


class Measured(NamedTuple):
    """The result of timing a candidate: the median time of `samples` calls, or the reason why there is no time."""

    status: Status
    time_us: float | None = None  # None unless the status is OK
    spread: float | None = None  # interquartile range over median
    samples: int = 0
    error: str | None = None

    @classmethod
    def of(cls, time_us: float | None) -> Measured:
        """Return the result for a known time in microseconds; None stands for an earlier failure of unknown reason."""
        return cls(Status.LAUNCH_FAILED, error="it failed before") if time_us is None else cls(Status.OK, time_us)

    @classmethod
    def failed(cls, error: Exception) -> Measured:
        """Return the result for a candidate that raised an exception, with its text for tables and messages."""
        kind, status = type(error).__name__, Status.LAUNCH_FAILED
        if kind in ("OutOfResources", "OutOfMemoryError", "MemoryError"):
            status = Status.OUT_OF_RESOURCES
        elif "Compil" in kind or kind == "PTXASError":
            status = Status.COMPILE_FAILED
        return cls(status, error=printable(abridged(f"{kind}: {error}" if str(error) else kind)))


class Known(Protocol[C]):
    """The interface through which a `TuningSession` reads and stores the results of one key's candidates."""

    def recall(self, candidates: Sequence[C]) -> Mapping[C, Measured]:
        """Return the known results among these candidates."""

    def record(self, candidate: C, measured: Measured, error: Exception | None) -> None:
        """Store a candidate's result. `error` is the exception if the candidate raised one in this process."""


class TuningSession(Generic[C]):
    """Find the fastest of one key's candidates.

    Args:
        known: Stores results and returns earlier ones.
        time_one: Times a candidate and returns the result, or returns the exception with which the candidate failed. An
            exception that it raises ends the session. None if the loop is elsewhere (Triton has it for `attach`) and
            passes each result to `keep`.
        compile_one: Compiles a candidate ahead of its timing; None if there is nothing to compile.
        workers: The number of compiling threads; None for one per core.
        budget_s: The time limit in seconds from the session's construction; no candidate is started after it.
        max_trials: The maximum number of candidates to time.
        needs_one: Whether the limits apply only once a candidate has worked.
        in_step: Makes the ranks stop together: takes whether this rank has time left, and returns whether all ranks do.
        report: Called with each candidate and its result.
        clock: Returns the current time in seconds, for `budget_s`.
    """

    def __init__(
        self,
        known: Known[C],
        time_one: Callable[[C], Measured | Exception] | None = None,
        *,
        compile_one: Callable[[C], object] | None = None,
        workers: int | None = None,
        budget_s: float | None = None,
        max_trials: int | None = None,
        needs_one: bool = False,
        in_step: Callable[[bool], bool] = bool,
        report: Callable[[C, Measured], object] | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.known, self.time_one, self.compile_one, self.report = known, time_one, compile_one, report
        self._threads = cores() if workers is None else workers
        self._budget_s, self._max_trials, self._needs_one, self._in_step = budget_s, max_trials, needs_one, in_step
        self._clock = clock or time.monotonic
        self._began = self._clock()
        #: Each candidate's result, from this session or recalled; the reasons of the failed ones; and the fastest so
        #: far.
        self.measured: dict[C, Measured] = {}
        self.failed: dict[C, str] = {}
        self.best: C | None = None
        self.failures = Failures()
        self.n_timed = self._n_kept = 0

    @property
    def cost_s(self) -> float | None:
        """The mean seconds that the session took for each candidate that it measured; None if it measured none."""
        return (self._clock() - self._began) / self._n_kept if self._n_kept else None

    @property
    def best_us(self) -> float | None:
        """The time of the fastest candidate so far, in microseconds; None if none works."""
        return None if self.best is None else self.measured[self.best].time_us

    def times(self, candidates: Iterable[C]) -> dict[C, float]:
        """Return the times, in microseconds, of those candidates that work."""
        found = {one: self.measured[one].time_us for one in candidates if one in self.measured}
        return {one: time_us for one, time_us in found.items() if time_us is not None}

    def fastest(self, candidates: Iterable[C]) -> C | None:
        """Return the fastest working candidate, the first of equals; None if none works."""
        times = self.times(candidates)
        return min(times, key=times.__getitem__, default=None)

    def recall(self, candidates: Sequence[C]) -> None:
        """Load the known results of candidates.

        If all of them are failures, nothing is loaded, so that these candidates are tried again.
        """
        known = self.known.recall(candidates)
        if any(measured.time_us is not None for measured in known.values()):
            for one, measured in known.items():
                self._note(one, measured)

    def measure(self, candidates: Sequence[C]) -> str:
        """Time the candidates without a result, in order, and record each result.

        Returns:
            The limit that ended the measurement, such as "budget_s=3"; "" if none did.
        """
        new = [one for one in candidates if one not in self.measured]
        size, errors = max(_AT_ONCE * self._threads, 1), dict[C, BaseException | None]()
        for at, one in enumerate(new):
            if self.compile_one is not None and at % size == 0:
                if over := self._over():
                    return over
                errors = self.compile(new[at : at + size], self.compile_one)
            error = errors.get(one)
            if isinstance(error, Exception):
                self.keep(one, Measured.failed(error), error)
            elif over := self._over():
                return over
            else:
                assert self.time_one is not None
                self.n_timed += 1
                found = self.time_one(one)
                if isinstance(found, Exception):
                    self.keep(one, Measured.failed(found), found)
                else:
                    self.keep(one, found)
        return ""

    def compile(self, candidates: Sequence[C], compile_one: Callable[[C], object]) -> dict[C, BaseException | None]:
        """Compile candidates in parallel and return each candidate's error, None for success."""
        errors = compile_ahead([partial(compile_one, one) for one in candidates], self._threads)
        return dict(zip(candidates, errors, strict=True))

    def keep(self, candidate: C, measured: Measured, error: Exception | None = None) -> None:
        """Record a candidate's result; `error` is the exception if it failed with one."""
        self._n_kept += 1
        self._note(candidate, measured, error)
        self.known.record(candidate, measured, error)
        if self.report is not None:
            self.report(candidate, measured)

    def refuse(self, candidate: C, error: Exception) -> None:
        """Count a candidate as failed in this session only: the failure is not stored."""
        self._note(candidate, Measured.failed(error), error)

    def _note(self, candidate: C, measured: Measured, error: Exception | None = None) -> None:
        self.measured[candidate] = measured
        if measured.time_us is None:
            self.failed[candidate] = abridged(f"{type(error).__name__}: {error}") if error else str(measured.error)
            self.failures.add(error)
            return
        self.failures.clear()
        if self.best_us is None or measured.time_us < self.best_us:
            self.best = candidate

    def _over(self) -> str:
        """Return the limit that has been reached, or ""."""
        if self._needs_one and self.best is None:
            return ""
        if self._max_trials is not None and self.n_timed >= self._max_trials:
            return f"max_trials={self._max_trials}"
        if self._budget_s is not None and not self._in_step(self._clock() - self._began < self._budget_s):
            return f"budget_s={self._budget_s:g}"
        return ""


def search(
    candidates: list[C], measure: Callable[[list[C]], C | None], more: Callable[[], list[C] | None]
) -> tuple[list[C], C | None]:
    """Measure candidates, ask `more` for further ones, and repeat until it returns no candidate that was not measured.

    Args:
        candidates: The first candidates.
        measure: Measures candidates and returns the fastest one; None ends the search.
        more: Returns the measured candidates and those to measure next; None ends the search.

    Returns:
        The last list of candidates, and the fastest one.
    """
    asked: set[C] = set()
    while True:
        asked.update(candidates)
        best = measure(candidates)
        following = None if best is None else more()
        if not following or asked.issuperset(following):
            return following or candidates, best
        candidates = following


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured, during which the device cannot be synchronized."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized() and bool(torch.cuda.is_current_stream_capturing())


def checked_time(time_us: float) -> Measured:
    """Return the result for a time from a kernel timer, in microseconds.

    Raises:
        ForetuneError: The time is not a positive finite number.
    """
    if not 0 < time_us < math.inf:
        raise ForetuneError(f"its time must be a positive finite number of microseconds but was {time_us}")
    return Measured.of(time_us)


def none_launched(kernel: str, session: TuningSession[Any]) -> TuningFailed:
    """Return the error for a kernel whose configs all failed in a tuning session.

    The message lists each reason once, with the configs that failed for it; the error's cause is the first exception.
    """
    reasons: dict[str, list[str]] = {}
    for config, reason in session.failed.items():
        reasons.setdefault(reason, []).append(str(config))
    lines = [f"  {reason}\n    " + "\n    ".join(configs) for reason, configs in reasons.items()]
    error = TuningFailed(f"{kernel}: none of its {len(session.failed)} configs could be launched:\n" + "\n".join(lines))
    error.__cause__ = session.failures.first
    return error


class Failures:
    """The exceptions that the configs of one tuning raised, the first of each type, until a config works.

    >>> failures = Failures()
    >>> failures.add(KeyError("x"))
    >>> failures.error(TuningFailed("none of the 2 configs works"))
    KeyError('x')
    """

    def __init__(self) -> None:
        self._first: dict[type[Exception], Exception] = {}
        self._all_raised_here = True

    @property
    def first(self) -> Exception | None:
        """The exception of the first config that failed, or None."""
        return next(iter(self._first.values()), None)

    def add(self, error: Exception | None) -> None:
        """Add a config's exception; None for a config that failed on another rank."""
        if error is None:
            self._all_raised_here = False
        elif type(error) not in self._first:
            chain: dict[int, BaseException] = {}
            left: list[BaseException | None] = [error]
            while left:
                if (one := left.pop()) is not None and id(one) not in chain:
                    chain[id(one)] = one
                    clear_frames(one.__traceback__)  # otherwise the frames keep their variables (tensors) alive
                    left += [one.__cause__, one.__context__]
            self._first[type(error)] = error

    def clear(self) -> None:
        """Drop all exceptions, because a config works."""
        self._first.clear()

    def error(self, failed: TuningFailed) -> Exception:
        """Return the exception to raise when no config works.

        If every config raised the same type, that is the first exception itself, with the message of `failed` as a
        note; otherwise it is `failed`, with the first exception as its cause.
        """
        if (first := self.first) is None or len(self._first) > 1 or not self._all_raised_here:
            failed.__cause__ = first
            return failed
        if hasattr(first, "add_note"):  # from Python 3.11
            first.add_note(str(failed))
        return first


#: Shorter tunings show no line; seconds.
AFTER_S = 2.0
#: Seconds between two updates: in a log, where every line stays, and on a terminal, where one replaces the other.
_EVERY_S, _ON_TERMINAL_S = 30.0, 0.5
_CLEAR = "\r\x1b[2K"


class ProgressLine:
    """A context manager that shows a tuning's progress on stderr if it takes longer than two seconds.

    The line has the kernel's name, how many of its configs are done, and the best time so far. On a terminal it is one
    line that is updated and finally removed; otherwise a new line is written every 30 seconds.

    Args:
        kernel: The kernel's name.
        total: The number of configs.
        out: Where to write; stderr if left out.
        wait: Waits for some seconds and returns whether the block has ended; a thread's event if left out.
    """

    def __init__(
        self, kernel: str, total: int, *, out: TextIO | None = None, wait: Callable[[float], bool] | None = None
    ) -> None:
        self.kernel, self.total, self.done, self.best_us = kernel, total, 0, float("inf")
        self._out = sys.stderr if out is None else out
        self._over = threading.Event()
        self._wait = wait or self._over.wait
        self._thread = threading.Thread(target=self._show, name="foretune-progress", daemon=True)

    def __enter__(self) -> ProgressLine:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def advance(self, time_us: float | None) -> None:
        """Count one more config as done, with its time in microseconds; None if it failed."""
        self.done += 1
        if time_us is not None:
            self.best_us = min(self.best_us, time_us)

    def __str__(self) -> str:
        best = "" if self.best_us == float("inf") else f", best {self.best_us:.1f} us"
        return f"foretune: tuning {self.kernel}: {self.done} of {self.total} configs{best}"

    def _show(self) -> None:
        """Write lines until the block ends; runs in a thread."""
        wait_s, is_terminal, shown = AFTER_S, _is_terminal(self._out), ""
        try:
            while not self._wait(wait_s):
                wait_s = _ON_TERMINAL_S if is_terminal else _EVERY_S
                if (text := str(self)) != shown or not is_terminal:
                    self._out.write(f"{_CLEAR}{text}" if is_terminal else f"{text}\n")
                    self._out.flush()
                shown = text
            if shown and is_terminal:
                self._out.write(_CLEAR)
                self._out.flush()
        except (OSError, ValueError):  # stderr is closed
            return


def _is_terminal(out: TextIO) -> bool:
    """Return whether a stream is a terminal; False for a closed one."""
    try:
        return out.isatty()
    except (OSError, ValueError, AttributeError):
        return False
