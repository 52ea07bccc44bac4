"""`TuningSession`: the tuning of one key, of a kernel or of a function.

The steps are the same for `foretune.autotune`, `attach`, `tune` and `contextual_autotune`: recall what is known of the
candidates, compile the others ahead, time one after the other, record each at once, stop at a limit, and choose the
fastest. What they do not share, they hand over: how a candidate is launched and timed, and where times are kept.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from traceback import clear_frames
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from ...datasets import ForetuneError, Status
from ...datasets.errors import abridged, printable
from ..launching.ahead import compile_ahead, cores

C = TypeVar("C", bound=Hashable)

#: Configs for each compiling thread before those are timed: enough to keep all threads busy, and few enough that an
#: interrupted tuning has times to go on with. (Not both at once: compiling threads would disturb the timing.)
_AT_ONCE = 2


class TuningFailed(ForetuneError):  # noqa: N818 - what happened, as people say it
    """No config of a kernel, or of a function, works; the message lists why, for each. Of a function, `trials` has
    them all."""

    trials: Sequence[Any] = ()


class Measured(NamedTuple):
    """The result of timing a config: the median time of `samples` calls, or why there is none."""

    status: Status
    time_us: float | None = None  # None unless the status is OK
    spread: float | None = None  # interquartile range over median
    samples: int = 0
    error: str | None = None

    @classmethod
    def of(cls, time_us: float | None) -> Measured:
        """Return a time, or a failure of which no more is known."""
        return cls(Status.LAUNCH_FAILED, error="it failed before") if time_us is None else cls(Status.OK, time_us)

    @classmethod
    def failed(cls, error: Exception) -> Measured:
        """Return the failure that an exception is."""
        status, text = failure_of(error)
        return cls(status, error=text)


def failure_of(error: Exception) -> tuple[Status, str]:
    """Return the status of an exception, and what a table says of it."""
    kind = type(error).__name__
    text = printable(abridged(f"{kind}: {error}" if str(error) else kind))
    if kind in ("OutOfResources", "OutOfMemoryError", "MemoryError"):
        return Status.OUT_OF_RESOURCES, text
    if "Compil" in kind or kind == "PTXASError":
        return Status.COMPILE_FAILED, text
    return Status.LAUNCH_FAILED, text


class Known(Protocol[C]):
    """The memory of one key's candidates: results from before, and where new ones are kept."""

    def recall(self, candidates: Sequence[C]) -> Mapping[C, Measured]:
        """Return what is known of some of these."""

    def record(self, candidate: C, measured: Measured, error: Exception | None) -> None:
        """Keep what came of a candidate. `error` is the exception, where one was raised here."""


class TuningSession(Generic[C]):
    """Finds out which of one key's candidates is the fastest.

    Args:
        known: Where times come from and go to.
        time_one: Times a candidate, or returns the exception that it failed with; what it raises ends the session. None
            where the loop is elsewhere, as Triton's is for `attach`, and hands over each time with `keep`.
        compile_one: Compiles a candidate ahead; None where there is nothing to compile.
        workers: The number of compiling threads; None for as many as there are cores.
        budget_s: No candidate is begun after so many seconds since the session began.
        max_trials: No more candidates than this are timed.
        needs_one: Whether the limits wait until one candidate works.
        in_step: Makes of whether this rank has time left whether all ranks have.
        report: Called with each candidate and what was measured of it.
        clock: Seconds, for `budget_s`.
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
        #: What is known of each candidate, from before or from now; why those fail that do; and the fastest so far.
        self.measured: dict[C, Measured] = {}
        self.failed: dict[C, str] = {}
        self.best: C | None = None
        self.failures = Failures()
        self.n_timed = 0

    def times(self, candidates: Iterable[C]) -> dict[C, float]:
        """Return the times, in microseconds, of those candidates that work."""
        found = {one: self.measured[one].time_us for one in candidates if one in self.measured}
        return {one: time_us for one, time_us in found.items() if time_us is not None}

    def fastest(self, candidates: Iterable[C]) -> C | None:
        """Return the fastest of those that work, the first of equals; None where none does."""
        times = self.times(candidates)
        return min(times, key=times.__getitem__, default=None)

    def recall(self, candidates: Sequence[C]) -> None:
        """Take over what is known of candidates, unless it is only failures: these are tried again."""
        known = self.known.recall(candidates)
        if any(measured.time_us is not None for measured in known.values()):
            for one, measured in known.items():
                self._note(one, measured)

    def measure(self, candidates: Sequence[C]) -> str:
        """Time the candidates of which nothing is known, in order, and record each.

        Returns:
            The limit that ended it, such as "budget_s=3", or "".
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
                self._try(one)
        return ""

    def compile(self, candidates: Sequence[C], compile_one: Callable[[C], object]) -> dict[C, BaseException | None]:
        """Compile candidates in parallel, and return the error of each."""
        errors = compile_ahead([partial(compile_one, one) for one in candidates], self._threads)
        return dict(zip(candidates, errors, strict=True))

    def keep(self, candidate: C, measured: Measured, error: Exception | None = None) -> None:
        """Record what was measured of a candidate, or that it failed with an error."""
        self._note(candidate, measured, error)
        self.known.record(candidate, measured, error)
        if self.report is not None:
            self.report(candidate, measured)

    def refuse(self, candidate: C, error: Exception) -> None:
        """Count a candidate as failed, in this session alone."""
        self._note(candidate, Measured.failed(error), error)

    def _note(self, candidate: C, measured: Measured, error: Exception | None = None) -> None:
        self.measured[candidate] = measured
        if measured.time_us is None:
            self.failed[candidate] = abridged(f"{type(error).__name__}: {error}") if error else str(measured.error)
            self.failures.add(error)
            return
        self.failures.clear()
        best_us = None if self.best is None else self.measured[self.best].time_us
        if best_us is None or measured.time_us < best_us:
            self.best = candidate

    def _try(self, candidate: C) -> None:
        assert self.time_one is not None
        self.n_timed += 1
        found = self.time_one(candidate)
        if isinstance(found, Exception):
            self.keep(candidate, Measured.failed(found), found)
        else:
            self.keep(candidate, found)

    def _over(self) -> str:
        """Return the limit that is reached, or ""."""
        if self._needs_one and self.best is None:
            return ""
        if self._max_trials is not None and self.n_timed >= self._max_trials:
            return f"max_trials={self._max_trials}"
        if self._budget_s is not None and not self._in_step(self._clock() - self._began < self._budget_s):
            return f"budget_s={self._budget_s:g}"
        return ""


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured; the device cannot be waited for then."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_available() and bool(torch.cuda.is_current_stream_capturing())


def checked_time(time_us: float) -> Measured:
    """Return a time that a kernel timer gave. Raises `ForetuneError` for what is none."""
    if not 0 < time_us < math.inf:
        raise ForetuneError(f"its time was {time_us} us")
    return Measured.of(time_us)


def none_launched(kernel: str, session: TuningSession[Any]) -> TuningFailed:
    """Return the error of a kernel of which every config failed, caused by the first one's. What many of them failed of
    is listed once."""
    reasons: dict[str, list[str]] = {}
    for config, reason in session.failed.items():
        reasons.setdefault(reason, []).append(str(config))
    lines = [f"  {reason}\n    " + "\n    ".join(configs) for reason, configs in reasons.items()]
    error = TuningFailed(f"{kernel}: none of its {len(session.failed)} configs could be launched:\n" + "\n".join(lines))
    error.__cause__ = session.failures.first
    return error


class Failures:
    """The exceptions of one tuning's configs, the first of each type, as long as no config works.

    >>> failures = Failures()
    >>> failures.add(KeyError("x"))
    >>> failures.error(TuningFailed("none of the 2 configs works"))
    KeyError('x')
    """

    def __init__(self) -> None:
        self._first: dict[type[Exception], Exception] = {}
        self._are_all_ours = True

    @property
    def first(self) -> Exception | None:
        """The first exception, of any type."""
        return next(iter(self._first.values()), None)

    def add(self, error: Exception | None) -> None:
        """Note what a config raised; None for one that failed on another rank."""
        if error is None:
            self._are_all_ours = False
        elif type(error) not in self._first:
            chain: dict[int, BaseException] = {}
            left: list[BaseException | None] = [error]
            while left:
                if (one := left.pop()) is not None and id(one) not in chain:
                    chain[id(one)] = one
                    clear_frames(one.__traceback__)  # the frames' variables, tensors among them, would stay in memory
                    left += [one.__cause__, one.__context__]
            self._first[type(error)] = error

    def clear(self) -> None:
        """Forget them, because a config works."""
        self._first.clear()

    def error(self, failed: TuningFailed) -> Exception:
        """Return what is raised where no config works: the first exception itself, with the list of all as a note,
        where every config raised the same type; else `failed`, with the first exception as its cause."""
        if (first := self.first) is None or len(self._first) > 1 or not self._are_all_ours:
            failed.__cause__ = first
            return failed
        if hasattr(first, "add_note"):  # from Python 3.11
            first.add_note(str(failed))
        return first
