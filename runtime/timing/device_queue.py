"""`DeviceQueue`: what timing needs of a GPU, in six verbs. Tests put a queue of their own in its place."""

from __future__ import annotations

from typing import Any, Protocol

from .l2_flush import L2Flush

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
