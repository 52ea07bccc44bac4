"""Time calls of tuned functions: with the kernel timer or CUDA events on a GPU, else with the host's clock.

`CallTrials` runs and times the configs of a function, with all ranks in step.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real
from typing import Any, Protocol

from ....datasets import ForetuneError, Status
from ....datasets.errors import shown
from ....datasets.measurement import SHORTEST_US
from ...timing.timer import CudaQueue, DeviceQueue, Timer, Timing
from ..ranks.rendezvous import longest
from ..session import Measured
from .config_space import Candidate
from .in_step import Ranks
from .results import check_finished


class CallTimer(Protocol):
    """The interface of a timer of function calls, for tests and users with a timer of their own."""

    def sample(self, call: Callable[[], Any], samples: int, undo: Callable[[], Any] | None) -> list[float]:
        """Return the times of several calls in microseconds, (samples,).

        Args:
            call: The call.
            samples: The number of times.
            undo: Runs before each call, untimed; None if there is nothing to undo.
        """


class HostTimer:
    """A timer with the host's clock, for functions that run on the CPU.

    >>> seconds = iter([1.0, 1.5])
    >>> HostTimer(lambda: next(seconds)).sample(lambda: None, 1, None)
    [500000.0]
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def sample(self, call: Callable[[], Any], samples: int, undo: Callable[[], Any] | None) -> list[float]:
        """See `CallTimer`."""
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
    """A timer that places each call between two events on an idle device with a cold L2 cache.

    It makes exactly the requested number of calls, so that ranks stay in step, and calls may synchronize with the
    device. The launch gap is included in the time.
    """

    def __init__(self, queue: DeviceQueue) -> None:
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
    """A `Timer`, whose times exclude the launch gap, for calls that queue their work without waiting for the device.

    Once a call has synchronized with the device, which `Timer` does not support, all calls are timed by events.
    """

    def __init__(self, timer: Callable[[], Timer], events: EventTimer) -> None:
        self._timer, self._events = timer, events
        self._queues: bool | None = None  # None until a call has shown it

    def sample(self, call: Callable[[], Any], samples: int, undo: Callable[[], Any] | None) -> list[float]:
        """See `CallTimer`."""
        if undo is None and self._queues is not False:
            try:
                times = self._timer().sample(call, samples)
            except ForetuneError:
                if self._queues:  # times by events would not compare with the earlier ones
                    raise
                self._queues = False
            else:
                self._queues = True
                return times
        return self._events.sample(call, samples, undo)


def check_timer(timer: Any) -> Any:
    """Return a `CallTimer` or None unchanged.

    Raises:
        ForetuneError: The value is not a `CallTimer`, so that each config would fail.
    """
    if timer is not None and not callable(getattr(timer, "sample", None)):
        raise ForetuneError(f"timer must have sample(call, samples, undo) but is {shown(timer)}")
    return timer


def timer_for(on_gpu: bool, in_step: bool) -> CallTimer:
    """Return the timer of one tuning: a `HostTimer` without a GPU, else a `KernelTimer`.

    For ranks in step, which must make equally many calls, it is an `EventTimer`.
    """
    if not on_gpu:
        return HostTimer()
    import torch

    index = torch.cuda.current_device()
    events = EventTimer(_queue(index))
    return events if in_step else KernelTimer(lambda: _timer(index), events)


@lru_cache
def _queue(index: int) -> CudaQueue:
    return CudaQueue(index, may_shrink=True)


@lru_cache
def _timer(index: int) -> Timer:
    return Timer(index, queue=_queue(index))


@dataclass
class CallTrials:
    """Runs and times one config after the other, with ranks in step: the `time_one` of a `TuningSession`.

    Attributes:
        name: The function's name.
        run: Calls the function with a config.
        timer: The timer.
        undo: Runs before every call; None if there is nothing to undo.
        ranks: The ranks.
        n_warmup: The number of calls before the timed ones.
        n_repeat: The number of timed calls.
        check: Raises for a config that failed although the call returned.
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
        """Return a config's result, with its time on the slowest rank, or its exception.

        A config that fails on any rank is given up on all ranks after its first run, so that all ranks make equally
        many calls.
        """

        def call() -> Any:
            return self.run(candidate)

        result, error, measured = None, None, None
        try:
            result = self._undone(call)
            self.check(candidate)
        except Exception as raised:  # noqa: BLE001 - a failing config is skipped
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
            timing = Timing.of([max(time_us, SHORTEST_US) for time_us in times])  # some clocks are too coarse
            self.check(candidate)
            measured = Measured(Status.OK, timing.time_us, timing.spread, timing.samples)
        except Exception as raised:  # noqa: BLE001 - a failing config is skipped
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
        return Measured(Status.LAUNCH_FAILED, error=f"failed on another rank: {self.ranks.told(failures)}")


def _freed(error: Exception) -> Exception:
    """Return an error; if it is an out-of-memory error of torch, free torch's unused memory for the next config."""
    if Measured.failed(error).status is Status.OUT_OF_RESOURCES and type(error).__module__.startswith("torch"):
        import torch

        torch.cuda.empty_cache()
    return error


def _text(error: Exception | None) -> str:
    """Return the text of an error; "" for None."""
    return "" if error is None else str(Measured.failed(error).error)


def _checked(times: Any) -> list[float]:
    """Return a timer's result as a list of numbers.

    Raises:
        ForetuneError: The result is not a list of times.
    """
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
