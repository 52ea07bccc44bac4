"""`CudaRateMeter`: how fast the current device reads, copies and multiplies."""

from __future__ import annotations

from typing import Any, Protocol

from ...datasets import DeviceSpec, torch_dtype
from .timer import Timer

#: Far larger than any L2. Of a smaller card's free memory, a buffer takes a quarter at most.
_BUFFER_BYTES = 2 << 30
#: A reading lasts at least as long as this many bytes take, so that starting and stopping do not count.
_LEAST_BYTES_READ = 1 << 30
#: Square matrices of this size keep an H200 busy for a millisecond and more.
_MATRIX = 8192
_WARM_UPS = 5


class RateMeter(Protocol):
    """What measuring a device's rates needs of it. Tests put one of their own in its place."""

    @property
    def most_bytes(self) -> int:
        """The largest set that can be read."""

    def read_gbs(self, set_bytes: int) -> float:
        """The rate of reading a set of this size again and again, in 10^9 bytes a second."""

    def copy_gbs(self) -> float:
        """The rate of an elementwise kernel on sets far larger than the L2, bytes read + written."""

    def matrix_tflops(self, dtype: str) -> float:
        """The rate of a dense square product of random matrices, as torch computes it."""


class CudaRateMeter:
    """The current CUDA or HIP device and stream; `device` says how many SMs that is.

    Random data throughout (zeros flatter: they save power, and may be compressed), medians of up to 30 launches.
    """

    def __init__(self, device: DeviceSpec) -> None:
        import torch

        free, _ = torch.cuda.mem_get_info()
        elements = min(_BUFFER_BYTES, free // 4) // 4
        self._x = torch.rand(elements, device="cuda")
        self._timer = Timer(flush_bytes=0)  # what must not be cached does not fit
        self._programs = device.sm_count

    @property
    def most_bytes(self) -> int:
        return 4 * self._x.numel()

    def read_gbs(self, set_bytes: int) -> float:
        import torch

        from .read_kernel import BLOCK, PROGRAMS_PER_SM, read_blocks_kernel

        blocks = max(min(set_bytes, self.most_bytes) // (4 * BLOCK), 1)
        passes = -(-_LEAST_BYTES_READ // (4 * BLOCK * blocks))
        programs = self._programs * PROGRAMS_PER_SM
        sums = torch.empty(programs, device="cuda")
        us = self._us(lambda: read_blocks_kernel[(programs,)](self._x, sums, blocks, passes, BLOCK=BLOCK, num_warps=4))
        return 4e-3 * BLOCK * blocks * passes / us

    def copy_gbs(self) -> float:
        import torch

        y = torch.empty_like(self._x)
        # Not y.copy_(x): the driver may leave that to a copy engine, which no kernel has.
        return 2e-3 * self.most_bytes / self._us(lambda: torch.neg(self._x, out=y))

    def matrix_tflops(self, dtype: str) -> float:
        import torch

        element = torch_dtype(dtype)
        a, b = (torch.randn(_MATRIX, _MATRIX, device="cuda", dtype=element) for _ in range(2))
        y = torch.empty_like(a)
        return 2e-6 * _MATRIX**3 / self._us(lambda: torch.mm(a, b, out=y))

    def _us(self, launch: Any) -> float:
        for _ in range(_WARM_UPS):
            launch()
        return self._timer.time(launch, budget_us=30_000.0).time_us
