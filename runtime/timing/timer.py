"""`Timer`: measure the time of one kernel launch on the GPU, without the host's overhead and with a cold L2.

There are three traps:

- *The launch gap.* Events around a launch on an empty queue also measure the wait for the host (25-40 % too much on an
  H200, 2026-11). So a spinning kernel holds the device back until every launch is queued. The timer checks this: if the
  hold ended before the host was done, the samples are discarded and the hold is doubled.
- *A warm L2.* Between samples, outside of the timed interval, a buffer of twice the L2's size is written. Its last
  lines are still dirty when the kernel starts, as the previous layer's output would be. A `clean` timer reads the
  buffer instead.
- *The events themselves.* The GPU's front end takes time between the first event's time stamp and the kernel's start,
  and between the kernel's end and the second stamp: the same time for every kernel, 3 us and more on an H200, of which
  a pair of events around nothing shows less than half. So the timer measures this constant when it is created, on an
  empty kernel, whose own time is known (`EMPTY_KERNEL_US`), and subtracts it from every sample.
  tests/runtime/test_exactness.py compares the result with CUPTI, and this constant with other possible ones.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...datasets import ForetuneError, KernelConfig, Measurable, Problem
from ...datasets.errors import reason_of
from ..arguments import warn_once

#: The bounds on the number of samples that `Timer.time` chooses.
MIN_SAMPLES, MAX_SAMPLES = 5, 30
#: Microseconds of starting and draining a grid, as CUPTI measures an empty kernel. They are part of every kernel's own
#: time, and events cannot separate them from what happens around the kernel, so a timer cannot measure them.
#: tests/runtime/test_exactness.py prints the figure (H200, 2026-11), and fails if this value is 0.3 us off.
EMPTY_KERNEL_US = 0.64
#: Host microseconds of one launch: the value assumed before the first launch, and the upper bound of measured ones.
_HOST_US = (50.0, 300.0)
#: The shortest hold in microseconds: the host's time to queue the hold itself and its mark.
_HOLD_US = 60.0
#: The most attempts; the hold doubles at each one.
_TRIES = 8
#: The shortest time reported, in microseconds: a launch that queues nothing reads 0 or less, but times are positive.
_SHORTEST_US = 0.01


@dataclass(frozen=True)
class Timing:
    """The median time of several launches of one kernel, with its spread and the number of samples.

    The spread is the interquartile range divided by the median; 0.0 for one sample.

    >>> Timing.of([12.0, 10.0, 11.0])
    Timing(time_us=11.0, spread=0.09090909090909091, samples=3)
    """

    time_us: float  # median
    spread: float  # interquartile range over median; 0.0 for one sample
    samples: int

    @classmethod
    def of(cls, times_us: Sequence[float]) -> Timing:
        """Return the median, spread and number of at least one sample; samples are in microseconds."""
        median = statistics.median(times_us)
        if len(times_us) == 1:
            return cls(median, 0.0, 1)
        low, _, high = statistics.quantiles(times_us, n=4, method="inclusive")
        return cls(median, (high - low) / median, len(times_us))


class Timer:
    """Times launches on one device, on its current stream.

    The module's docstring explains the method. `overhead_us` is the constant that is subtracted from every sample, and
    `queue` is the device's queue.

    Args:
        device_index: The device; the current one if None.
        flush_bytes: How many bytes are written between samples to evict the L2: twice its size if None. With 0 the L2
            stays warm, for a kernel that finds its inputs there.
        clean: Read these bytes instead of writing them. Use this to compare with a bandwidth: writing back dirty lines
            takes up to 11 us of a kernel's time (H200, 2026-11). Collections use both.
        queue: The device's queue; tests replace it.

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
        queue: CudaQueue | None = None,
    ) -> None:
        self.queue = queue or CudaQueue(device_index, flush_bytes, clean=clean)
        self._host_us = _HOST_US[0]
        self.overhead_us = 0.0
        empty_us = statistics.median(self.sample(lambda: self.queue.hold(0.0), MAX_SAMPLES))
        self.overhead_us = max(empty_us - EMPTY_KERNEL_US, 0.0)
        self._flush_us = statistics.median(self.sample(self.queue.flush, MIN_SAMPLES))

    def time(
        self,
        launch: Callable[[], Any],
        *,
        samples: int | Callable[[float], int] | None = None,
        budget_us: float = 5000.0,
        give_up_us: float = math.inf,
        before: Callable[[], Any] | None = None,
    ) -> Timing:
        """Return the time of a launch.

        One launch is measured first, alone. It is one of the samples, and its time may set how many there are.

        Args:
            launch: A function that queues its work on the current stream and does not wait for it.
            samples: The number of samples, or a function from the first one's microseconds to that number, which may
                return 1 to stop early. If None, as many as fit into `budget_us`, but at least 5 and at most 30.
            budget_us: Microseconds of device time, including flushes.
            give_up_us: If the first sample takes longer and `samples` is None, it is the only one.
            before: Called before each launch, to restore what launches overwrite. What it queues is not timed.

        Raises:
            ForetuneError: The launch waits for the device. Exceptions of `launch` pass through.
        """
        first = self.sample(launch, 1, before)
        if samples is None:
            fitting = int(budget_us / max(first[0] + self._flush_us, 1.0))
            samples = 1 if first[0] > give_up_us else min(max(fitting, MIN_SAMPLES), MAX_SAMPLES)
        elif callable(samples):
            samples = samples(first[0])
        if samples < 1:
            raise ForetuneError(f"samples must be >= 1 but got {samples}")
        return Timing.of(first + self.sample(launch, samples - 1, before) if samples > 1 else first)

    def sample(self, launch: Callable[[], Any], samples: int, before: Callable[[], Any] | None = None) -> list[float]:
        """Return the time of each of several launches that are queued together, in microseconds, (samples,).

        A kernel's very first launch loads its binary, which takes longer than the hold, so its samples are repeated.
        Raises as `time` does.

        Args:
            launch: As for `time`.
            samples: The number of launches.
            before: Called before each launch, to restore what launches overwrite. What it queues is not timed.
        """
        hold_us = _HOLD_US + 1.5 * self._host_us * samples
        for _ in range(_TRIES):
            self.queue.hold(hold_us)
            gate = self.queue.mark()
            began = time.perf_counter()
            marks = [self._queue(launch, before) for _ in range(samples)]
            host_us = (time.perf_counter() - began) * 1e6
            in_time = not self.queue.passed(gate)
            self.queue.wait()
            if in_time:
                self._host_us = min(max(host_us / samples, _HOST_US[0]), _HOST_US[1])
                return [max(self.queue.elapsed_us(start, end) - self.overhead_us, _SHORTEST_US) for start, end in marks]
            hold_us *= 2
        raise ForetuneError(
            f"the device got ahead of the host although it was held back for {hold_us / 2000:.0f} ms: the launch "
            "probably waits for the device, so time a function that only queues its work"
        )

    def _queue(self, launch: Callable[[], Any], before: Callable[[], Any] | None) -> tuple[Any, Any]:
        """Queue `before`, a flush of the L2 and a launch between two events; return these events."""
        if before is not None:
            before()
        self.queue.flush()
        start = self.queue.mark()
        launch()
        return start, self.queue.mark()


_timers: dict[int, Timer] = {}


def timer_of(device_index: int) -> Timer:
    """Return the timer of a device, which is created once, because creating it takes measurements.

    A timer with too little memory to clear the L2 is not kept: it would occupy scarce memory, and more may be free next
    time.
    """
    if device_index in _timers:
        return _timers[device_index]
    queue = CudaQueue(device_index, may_shrink=True)  # for choosing configs; data need a full flush
    timer = Timer(queue=queue)
    if queue.flush.is_whole:
        _timers[device_index] = timer
    return timer


#: Cycles of the calibrating launch: about 1 ms, so that the launch gap does not matter.
_CALIBRATION_CYCLES = 2_000_000


class CudaQueue:
    """The queue of the current stream of one CUDA or HIP device, the current device if `index` is None.

    `flush()` queues the eviction of everything from the L2. All methods but `wait` return at once.

    `flush_bytes`, `clean` and `may_shrink` are as for `L2Flush`.
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

        self._cuda: Any = torch.cuda  # Any, because large parts of it are untyped
        self._device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        self.flush = L2Flush(self._device, flush_bytes, clean=clean, may_shrink=may_shrink)
        self._cycles_per_us = self._calibrate()

    def _calibrate(self) -> float:
        """Return the GPU's clock cycles per microsecond, measured with `torch.cuda._sleep`."""
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
        """Queue a kernel that does nothing for about `us` microseconds (`torch.cuda._sleep`); with 0, an empty one."""
        with self._cuda.device(self._device):
            self._cuda._sleep(int(us * self._cycles_per_us))

    def mark(self) -> Any:
        """Queue an event that records the time when the device reaches it, and return it."""
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self._device))
        return event

    def passed(self, mark: Any) -> bool:
        """Return whether the device has passed an event."""
        return bool(mark.query())

    def elapsed_us(self, start: Any, end: Any) -> float:
        """Return the microseconds between two events that the device has passed."""
        return float(start.elapsed_time(end)) * 1000

    def wait(self) -> None:
        """Wait until the queue is empty."""
        self._cuda.synchronize(self._device)


#: The size of the flushed buffer in L2 sizes: nothing of the last launch stays in the L2. More only costs time.
_FLUSH_L2_SIZES = 2
#: The 32-bit integers of the smallest buffer that is tried (64 KiB).
_SMALLEST = 1 << 14


class L2Flush:
    """Queues the eviction of the L2 on the current stream of one CUDA or HIP device.

    `is_whole` is False if less memory was free than requested.

    Args:
        device: The torch device.
        flush_bytes: How many bytes are written to evict the L2: twice its size if None.
        clean: Read the bytes instead, so that the L2 has no dirty lines that must be written back first.
        may_shrink: Use a smaller buffer, halved until it fits, if so much memory is not free.
    """

    def __init__(
        self, device: Any, flush_bytes: int | None = None, *, clean: bool = False, may_shrink: bool = False
    ) -> None:
        import torch

        if flush_bytes is None:
            flush_bytes = _FLUSH_L2_SIZES * torch.cuda.get_device_properties(device).L2_cache_size
        self._clean, count = clean, max(flush_bytes // 4, 1)
        wanted = count
        while True:
            try:
                # Not zeros, which may be compressed on the way to memory.
                self._buffer = torch.full((count,), 0x5EED, dtype=torch.int32, device=device)
                break
            except torch.cuda.OutOfMemoryError:
                if not may_shrink or count <= _SMALLEST:
                    raise
                count //= 2
        self.is_whole = count == wanted
        if not self.is_whole:
            what = f"{4 * wanted >> 20} MiB of GPU memory to clear the L2 are not free"
            warn_once(what, f": {4 * count >> 10} KiB are used, and kernels may find some of their inputs in the L2")

    def __call__(self) -> None:
        """Queue a kernel that writes (or with `clean` reads) the buffer, which evicts everything else from the L2."""
        if self._clean:
            self._buffer.sum()
        else:
            self._buffer.fill_(0x5EED)


def resetting(family: Measurable, inputs: Any) -> dict[str, Any]:
    """Return keyword arguments for a timer: `before`, which resets a family's inputs; empty if it never has to."""
    if type(family).reset is Measurable.reset:
        return {}
    return {"before": partial(family.reset, inputs)}


def time_configs(
    timer: Timer, family: Measurable, problem: Problem, inputs: Any, configs: Sequence[KernelConfig]
) -> dict[KernelConfig, float]:
    """Return the time in microseconds of each config that compiles and launches, in the given order.

    Raises `ForetuneError` if no config does, with the error of the last one.
    """
    times: dict[KernelConfig, float] = {}
    reason = "the list is empty"
    for config in configs:
        launch = partial(family.launch, inputs, config)
        try:
            launch()  # compile and load the binary
            times[config] = timer.time(launch, **resetting(family, inputs)).time_us
        except Exception as error:  # noqa: BLE001 - a config that fails has no time
            reason = reason_of(error)
    if not times:
        raise ForetuneError(f"none of {len(configs)} configs of {family.name} ran {problem}: {reason}")
    return times
