"""What a call takes: with a GPU as the kernel timer has it, or between two events; without one by the host's clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol

from ....datasets import ForetuneError
from ....datasets.errors import shown
from ...timing.timer import CudaQueue, DeviceQueue, Timer


class CallTimer(Protocol):
    """Times calls of a function. Tests, and whoever knows better, put their own in its place."""

    def sample(self, call: Callable[[], Any], samples: int, undo: Callable[[], Any] | None) -> list[float]:
        """The times of so many calls in microseconds, (samples,). `undo` runs before each, untimed."""


class HostTimer:
    """The host's clock, for functions that run on the CPU.

    >>> seconds = iter([1.0, 1.5])
    >>> HostTimer(lambda: next(seconds)).sample(lambda: None, 1, None)
    [500000.0]
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def sample(self, call: Callable[[], Any], samples: int, undo: Callable[[], Any] | None) -> list[float]:
        times = []
        for _ in range(samples):
            if undo is not None:
                undo()
            began = self._clock()
            call()
            times.append((self._clock() - began) * 1e6)
        return times


class EventTimer:
    """One call at a time between two events on an idle device, L2 cold: exactly as many calls as are asked for, so that
    ranks stay in step, and calls that wait for the device are no trouble. The launch gap counts."""

    def __init__(self, queue: DeviceQueue) -> None:
        self._queue = queue

    def sample(self, call: Callable[[], Any], samples: int, undo: Callable[[], Any] | None) -> list[float]:
        times = []
        for _ in range(samples):
            if undo is not None:
                undo()
            self._queue.flush()
            self._queue.wait()
            start = self._queue.mark()
            call()
            end = self._queue.mark()
            self._queue.wait()
            times.append(self._queue.elapsed_us(start, end))
        return times


class KernelTimer:
    """`Timer`, without the launch gap, as long as calls queue their work and leave. The first call that waits for the
    device shows that they do not: then all of them are timed by events."""

    def __init__(self, timer: Callable[[], Timer], events: EventTimer) -> None:
        self._timer, self._events = timer, events
        self._queues: bool | None = None  # until a call has shown it

    def sample(self, call: Callable[[], Any], samples: int, undo: Callable[[], Any] | None) -> list[float]:
        if undo is None and self._queues is not False:
            try:
                times = self._timer().sample(call, samples)
            except ForetuneError:
                if self._queues:  # those before were timed otherwise, so a time would not compare
                    raise
                self._queues = False
            else:
                self._queues = True
                return times
        return self._events.sample(call, samples, undo)


def check_timer(timer: Any) -> Any:
    """Returns it, None included. Raises `ForetuneError` for what is no `CallTimer`: each config would fail of it."""
    if timer is not None and not callable(getattr(timer, "sample", None)):
        raise ForetuneError(f"timer must have sample(call, samples, undo) but is {shown(timer)}")
    return timer


def timer_for(on_gpu: bool, in_step: bool) -> CallTimer:
    """The timer of one tuning: a `KernelTimer` on a GPU; where ranks run in step, whose calls must be as many on each,
    an `EventTimer`."""
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
