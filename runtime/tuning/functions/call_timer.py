"""Timers of calls: on a GPU by the kernel timer or between two events, on the CPU by the host's clock.

`CallTrials` runs and times the configs of a function, on all ranks in lockstep.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol

from ....datasets import ForetuneError, Status
from ....datasets.errors import shown
from ....datasets.measurement import SHORTEST_US
from ...timing.timer import CudaQueue, Timer, Timing, timer_of
from ..ranks.rendezvous import longest
from ..session import Measured
from .config_space import Candidate
from .in_step import Ranks
from .results import check_finished


class CallTimer(Protocol):
    """The interface of timers. Pass an object with the method `sample` as `timer` to measure in your own way."""

    def sample(self, call: Callable[[], Any], samples: int, undo: Callable[[], Any] | None) -> list[float]:
        """Return the times of `samples` calls in microseconds; `undo` runs before each call, untimed."""


class HostTimer:
    """Times calls with the host's clock, for functions that run on the CPU.

    >>> seconds = iter([1.0, 1.5])
    >>> HostTimer(lambda: next(seconds)).sample(lambda: None, 1, None)
    [500000.0]
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def sample(self, call: Callable[[], Any], samples: int, undo: Callable[[], Any] | None) -> list[float]:
        """Return the time of each of `samples` calls in microseconds; `undo` runs before each call, untimed."""
        times = []
        for _ in range(samples):
            if undo is not None:
                undo()
            times.append(self._time_us(call))
        return times

    def _time_us(self, call: Callable[[], Any]) -> float:
        began = self._clock()
        call()
        return (self._clock() - began) * 1e6


class EventTimer(HostTimer):
    """Times each call between two events, on an idle device with a cold L2 cache.

    It makes exactly `samples` calls, so that ranks stay in lockstep, and calls may synchronize with the device. The
    time includes the launch gap.
    """

    def __init__(self, queue: CudaQueue) -> None:
        self._queue = queue

    def _time_us(self, call: Callable[[], Any]) -> float:
        self._queue.flush()
        self._queue.wait()
        start = self._queue.mark()
        call()
        end = self._queue.mark()
        self._queue.wait()
        return self._queue.elapsed_us(start, end)


class KernelTimer:
    """Times calls with `Timer`, without the launch gap, if they only enqueue work; otherwise with events.

    `Timer` raises for calls that synchronize with the device. If the first sample raises, all samples are taken with
    events; if a later one raises, the config fails, since the two kinds of times are not comparable. Calls with `undo`
    are always timed with events.
    """

    def __init__(self, timer: Timer, events: EventTimer) -> None:
        self._timer, self._events = timer, events
        self._queues: bool | None = None  # None: not known before the first call

    def sample(self, call: Callable[[], Any], samples: int, undo: Callable[[], Any] | None) -> list[float]:
        """Return the times of `samples` calls in microseconds, by `Timer` or by events; see `CallTimer.sample`."""
        if undo is None and self._queues is not False:
            try:
                times = self._timer.sample(call, samples)
            except ForetuneError:
                if self._queues:  # earlier times came from `Timer`
                    raise
                self._queues = False
            else:
                self._queues = True
                return times
        return self._events.sample(call, samples, undo)


def check_timer(timer: Any) -> Any:
    """Return a timer or None. Raises `ForetuneError` if it has no `sample`, since every config would fail."""
    if timer is not None and not callable(getattr(timer, "sample", None)):
        raise ForetuneError(f"timer must have sample(call, samples, undo) but is {shown(timer)}")
    return timer


def timer_for(on_gpu: bool, in_step: bool) -> CallTimer:
    """Return the timer of one tuning.

    On a GPU it is a `KernelTimer`, or an `EventTimer` for ranks in lockstep, which must make equal numbers of calls;
    on the CPU a `HostTimer`.
    """
    if not on_gpu:
        return HostTimer()
    import torch

    timer = timer_of(torch.cuda.current_device())
    events = EventTimer(timer.queue)
    return events if in_step else KernelTimer(timer, events)


@dataclass
class CallTrials:
    """Runs and times one config at a time, on all ranks in lockstep: the `time_one` of a `TuningSession`.

    Attributes:
        name: The function's name, for errors.
        run: Calls the function with a config.
        timer: Times calls.
        undo: Undoes the changes of a run, before every run; or None.
        ranks: The ranks that tune together.
        n_warmup: Calls before timing.
        n_repeat: Timed calls.
        check: Raises if a config failed although its call ended normally.
    """

    name: str
    run: Callable[[Candidate], Any]
    timer: CallTimer
    undo: Callable[[], Any] | None
    ranks: Ranks
    n_warmup: int
    n_repeat: int
    check: Callable[[Candidate], Any] = lambda candidate: None

    def __call__(self, candidate: Candidate) -> Measured | Exception:
        """Run and time a config; return its measurement, with the time on the slowest rank, or its exception.

        A config that fails on any rank is not timed on the others, so that all ranks make the same calls.
        """

        def call() -> Any:
            return self.run(candidate)

        result, error, measured = None, None, None
        try:
            result = self._undone(call)
            self.check(candidate)
        except Exception as raised:  # noqa: BLE001 - a failing config is only excluded
            error = _freed(raised)
        mine = _text(error)
        everyones = self.ranks.exchange(f"the first run of {candidate}", mine, mine or None)
        check_finished(self.name, result)
        del result  # it may be large
        if any(everyones):
            return error or self._failed_elsewhere(everyones)
        try:
            for _ in range(self.n_warmup - 1):
                self._undone(call)
            times = _checked(self.timer.sample(call, self.n_repeat, self.undo))
            timing = Timing.of([max(time_us, SHORTEST_US) for time_us in times])  # coarse clocks may measure 0
            self.check(candidate)
            measured = Measured(Status.OK, timing.time_us, timing.spread, timing.samples)
        except Exception as raised:  # noqa: BLE001 - as above
            error = _freed(raised)
        mine, time_us = _text(error), None if measured is None else measured.time_us
        everyones = self.ranks.exchange(f"the time of {candidate}", [time_us, mine], mine or None)
        if measured is None:
            return error or ForetuneError("it was not measured")
        slowest_us = longest([time for time, _ in everyones])
        if slowest_us is None:
            return self._failed_elsewhere([failure for _, failure in everyones])
        return measured._replace(time_us=slowest_us)

    def _undone(self, call: Callable[[], Any]) -> Any:
        if self.undo is not None:
            self.undo()
        return call()

    def _failed_elsewhere(self, failures: Sequence[str]) -> Measured:
        return Measured(Status.LAUNCH_FAILED, error=f"failed on another rank: {self.ranks.failures_by_rank(failures)}")


def _freed(error: Exception) -> Exception:
    """Return the error; after torch ran out of memory, first free its cached memory for the next configs."""
    if Measured.failed(error).status is Status.OUT_OF_RESOURCES and type(error).__module__.startswith("torch"):
        import torch

        torch.cuda.empty_cache()
    return error


def _text(error: Exception | None) -> str:
    return "" if error is None else str(Measured.failed(error).error)


def _checked(times: Any) -> list[float]:
    """Return a timer's times as floats. Raises `ForetuneError` if they are not finite numbers >= 0."""
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
