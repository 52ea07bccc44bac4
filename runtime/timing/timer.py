"""`Timer`: how long one kernel launch takes on the GPU, alone.

Three traps, and what is done about each:

- *The launch gap.* Events around a launch on an empty queue also time the wait for the host (25-40 % too much on
  an H200, 2026-11). So the device is held back by a spinning kernel until every launch is queued. That it was is
  checked: if it got past the hold before the host was done, the samples are thrown away and the hold is doubled.
- *A warm L2.* Between samples a buffer of twice the L2 is written, outside the timed interval. (Its last lines
  are still dirty when the kernel starts, as the previous layer's output would be. A `clean` timer reads that buffer.)
- *The events themselves.* Between the first event's time stamp and the kernel's start, and between its end and the
  second one's stamp, the front end of the GPU is at work: the same time for every kernel, 3 us and more on an H200,
  of which a pair of events around nothing shows less than half. So the constant is measured, when the timer is
  made, on a kernel whose own time is known: an empty one. What its events read, less `EMPTY_KERNEL_US`, is
  subtracted from every sample. tests/runtime/test_exactness.py compares the result with CUPTI, and this constant
  with others that one could subtract.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from ...datasets import ForetuneError, KernelConfig, Measurable, Problem
from ...datasets.errors import reason_of
from ..arguments import warn_once

MIN_SAMPLES, MAX_SAMPLES = 5, 30
#: What starting and draining a grid takes, as CUPTI sees it in an empty kernel. It is part of every kernel's own time,
#: and no event can tell it from what happens around the kernel: the one figure that a timer cannot find for itself.
#: tests/runtime/test_exactness.py prints it (an H200's, 2026-11), and fails where this is 0.3 us off.
EMPTY_KERNEL_US = 0.64
_HOST_US = (50.0, 300.0)  # what a launch costs the host: assumed until one has been seen, and the most that is believed
_HOLD_US = 60.0  # the shortest hold: what queueing the hold itself and its mark costs the host
_TRIES = 8  # the hold doubles at each
_SHORTEST_US = 0.01  # a launch that queues nothing reads 0 or less, but a time is positive


@dataclass(frozen=True)
class Timing:
    """What some launches of one kernel took.

    >>> Timing.of([12.0, 10.0, 11.0])
    Timing(time_us=11.0, spread=0.09090909090909091, samples=3)
    """

    time_us: float  # median
    spread: float  # interquartile range over median; 0.0 for one sample
    samples: int

    @classmethod
    def of(cls, times_us: Sequence[float]) -> Timing:
        """The summary of at least one sample."""
        median = statistics.median(times_us)
        if len(times_us) == 1:
            return cls(median, 0.0, 1)
        low, _, high = statistics.quantiles(times_us, n=4, method="inclusive")
        return cls(median, (high - low) / median, len(times_us))


class Timer:
    """Times launches on one device (the current one if `device_index` is left out), on its current stream.

    `flush_bytes` is how much is written between samples to evict the L2 (twice its size if left out; 0 leaves
    it warm, for a kernel that finds its inputs there); `clean` has it read instead, for comparing with a bandwidth:
    writing back what is dirty takes up to 11 us of it (H200, 2026-11). `overhead_us` is what is subtracted from every
    sample.

    >>> import torch
    >>> if torch.cuda.is_available():
    ...     x = torch.rand(1 << 24, device="cuda")
    ...     assert 10 < Timer().time(lambda: x.mul_(2)).time_us < 1000
    """

    def __init__(
        self,
        device_index: int | None = None,
        flush_bytes: int | None = None,
        *,
        clean: bool = False,
        queue: DeviceQueue | None = None,
    ) -> None:
        self._device_queue = queue or CudaQueue(device_index, flush_bytes, clean=clean)
        self._host_us = _HOST_US[0]
        self.overhead_us = 0.0
        empty_us = statistics.median(self.sample(lambda: self._device_queue.hold(0.0), MAX_SAMPLES))
        self.overhead_us = max(empty_us - EMPTY_KERNEL_US, 0.0)
        self._flush_us = statistics.median(self.sample(self._device_queue.flush, MIN_SAMPLES))

    def time(
        self,
        launch: Callable[[], Any],
        *,
        samples: int | Callable[[float], int] | None = None,
        budget_us: float = 5000.0,
        before: Callable[[], Any] | None = None,
    ) -> Timing:
        """The time of `launch`, which must queue its work on the current stream and not wait for it.

        One launch is measured first, alone. It is a sample like the others, and it decides how many there are in all:
        `samples`, or what `samples` makes of its time (so that a hopeless config costs one launch), or as many as
        take about `budget_us` of device time, flushes included, but 5 at least and 30 at most.

        Raises `ForetuneError` for a launch that waits for the device, and whatever `launch` raises.
        """
        first = self.sample(launch, 1, before)
        if samples is None:
            samples = _samples(budget_us, first[0] + self._flush_us)
        elif callable(samples):
            samples = samples(first[0])
        if samples < 1:
            raise ForetuneError(f"samples must be >= 1 but got {samples}")
        return Timing.of(first + self.sample(launch, samples - 1, before) if samples > 1 else first)

    def sample(self, launch: Callable[[], Any], samples: int, before: Callable[[], Any] | None = None) -> list[float]:
        """The time of each of some launches, in microseconds, (samples,), queued together. Raises as `time` does.

        `before` is called before each launch, and what it queues is not timed: it puts back what launches overwrite.
        A kernel's very first launch loads its binary, which outlasts the hold: it then counts as a rehearsal."""
        hold_us = _HOLD_US + 1.5 * self._host_us * samples
        for _ in range(_TRIES):
            self._device_queue.hold(hold_us)
            gate = self._device_queue.mark()
            began = time.perf_counter()
            marks = [self._queue(launch, before) for _ in range(samples)]
            host_us = (time.perf_counter() - began) * 1e6
            in_time = not self._device_queue.passed(gate)
            self._device_queue.wait()
            if in_time:
                self._host_us = min(max(host_us / samples, _HOST_US[0]), _HOST_US[1])
                return [
                    max(self._device_queue.elapsed_us(start, end) - self.overhead_us, _SHORTEST_US)
                    for start, end in marks
                ]
            hold_us *= 2
        raise ForetuneError(
            f"the device got ahead of the host although it was held back for {hold_us / 2000:.0f} ms: "
            "does the launch wait for it? Time a function that only queues its work"
        )

    def _queue(self, launch: Callable[[], Any], before: Callable[[], Any] | None) -> tuple[Any, Any]:
        if before is not None:
            before()
        self._device_queue.flush()
        start = self._device_queue.mark()
        launch()
        return start, self._device_queue.mark()


def _samples(budget_us: float, each_us: float) -> int:
    return min(max(int(budget_us / max(each_us, 1.0)), MIN_SAMPLES), MAX_SAMPLES)


_timers: dict[int, Timer] = {}


def timer_of(device_index: int) -> Timer:
    """The timer of a device, made once: making one takes measurements of its own. One that found too little memory
    to clear the L2 is not kept: it would hold what little there is, and there may be more next time."""
    if device_index in _timers:
        return _timers[device_index]
    queue = CudaQueue(device_index, may_shrink=True)  # it chooses configs: data are measured by timers that are whole
    timer = Timer(queue=queue)
    if queue.flush.is_whole:
        _timers[device_index] = timer
    return timer


_CALIBRATION_CYCLES = 2_000_000  # about 1 ms: long enough that the launch gap does not count


class DeviceQueue(Protocol):
    """A queue of work on one device. All but `wait` return at once."""

    def hold(self, us: float) -> None:
        """Queues one kernel that keeps the device busy for about this long; with 0, one that does nothing."""

    def flush(self) -> None:
        """Queues the eviction of everything from the L2."""

    def mark(self) -> Any:
        """Queues a time stamp."""

    def passed(self, mark: Any) -> bool:
        """Whether the device has already come to this time stamp."""

    def elapsed_us(self, start: Any, end: Any) -> float:
        """The time between two stamps that the device has passed."""

    def wait(self) -> None:
        """Returns when the queue is empty."""


class CudaQueue:
    """The current stream of one CUDA or HIP device (the current device if `index` is left out).

    `flush_bytes`, `clean` and `may_shrink`: see `L2Flush`.
    """

    def __init__(
        self,
        index: int | None = None,
        flush_bytes: int | None = None,
        *,
        clean: bool = False,
        may_shrink: bool = False,
    ) -> None:
        import torch

        self._cuda: Any = torch.cuda  # large parts of it are untyped
        self._device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        self.flush = L2Flush(self._device, flush_bytes, clean=clean, may_shrink=may_shrink)
        self._cycles_per_us = self._calibrate()

    def _calibrate(self) -> float:
        us = 0.0
        for _ in range(2):  # the first launch also loads the kernel and wakes the clocks
            start = self.mark()
            with self._cuda.device(self._device):
                self._cuda._sleep(_CALIBRATION_CYCLES)
            end = self.mark()
            self.wait()
            us = self.elapsed_us(start, end)
        return _CALIBRATION_CYCLES / us

    def hold(self, us: float) -> None:
        with self._cuda.device(self._device):
            self._cuda._sleep(int(us * self._cycles_per_us))

    def mark(self) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self._device))
        return event

    def passed(self, mark: Any) -> bool:
        return bool(mark.query())

    def elapsed_us(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) * 1000

    def wait(self) -> None:
        self._cuda.synchronize(self._device)


#: Enough that nothing of the last launch is left in the L2; a bigger buffer only costs time.
_FLUSH_L2_SIZES = 2
#: Integers of the smallest buffer that is tried: 64 KiB.
_SMALLEST = 1 << 14


class L2Flush:
    """Queues the eviction on the current stream of one CUDA or HIP device.

    `flush_bytes` is how much is written to evict the L2: twice its size if left out. With `clean` it is read instead,
    and no launch finds lines that must go to memory before its own can come. With `may_shrink` the buffer is as large
    as fits where so much memory is not free; `is_whole` says whether it is as large as it should be.
    """

    def __init__(
        self, device: Any, flush_bytes: int | None = None, *, clean: bool = False, may_shrink: bool = False
    ) -> None:
        import torch

        if flush_bytes is None:
            flush_bytes = _FLUSH_L2_SIZES * torch.cuda.get_device_properties(device).L2_cache_size
        self._buffer, self.is_whole = _allocated(max(flush_bytes // 4, 1), device, may_shrink=may_shrink)
        self._clean = clean

    def __call__(self) -> None:
        if self._clean:
            self._buffer.sum()
        else:
            self._buffer.fill_(0x5EED)


def _allocated(count: int, device: Any, *, may_shrink: bool) -> tuple[Any, bool]:
    """A buffer of so many 32-bit integers, or of as many as fit (halved until they do), and whether it is all of them.

    Raises torch's `OutOfMemoryError` where it may not shrink, and where not even `_SMALLEST` fit.
    """
    import torch

    wanted = count
    while True:
        try:
            # Written, not read, and not with zeros: those may take a short cut (compression) on the way to memory.
            buffer = torch.full((count,), 0x5EED, dtype=torch.int32, device=device)
        except torch.cuda.OutOfMemoryError:
            if not may_shrink or count <= _SMALLEST:
                raise
            count //= 2
            continue
        if count < wanted:
            what = f"{4 * wanted >> 20} MiB of GPU memory to clear the L2 with are not free"
            warn_once(what, f": {4 * count >> 10} KiB are used, and kernels may find some of their inputs in the L2")
        return buffer, count == wanted


def resetting(family: Measurable, inputs: Any) -> dict[str, Any]:
    """Return the argument `before` of a timer that resets a family's inputs; empty if the family never has to."""
    if type(family).reset is Measurable.reset:
        return {}
    return {"before": partial(family.reset, inputs)}


def time_configs(
    timer: Timer, family: Measurable, problem: Problem, inputs: Any, configs: Sequence[KernelConfig]
) -> dict[KernelConfig, float]:
    """The time in microseconds of each config that compiles and launches, on `inputs` of the problem, in their order.

    Raises `ForetuneError` where none does, with what was wrong with the last one.
    """
    times: dict[KernelConfig, float] = {}
    reason = "there are none"
    for config in configs:
        launch = partial(family.launch, inputs, config)
        try:
            launch()  # compiled, and loaded
            times[config] = timer.time(launch, **resetting(family, inputs)).time_us
        except Exception as error:  # noqa: BLE001 - one that does not compile or launch is none
            reason = reason_of(error)
    if not times:
        raise ForetuneError(f"none of {len(configs)} configs of {family.name} ran {problem}: {reason}")
    return times
