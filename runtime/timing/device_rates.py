"""`measured`: a device's spec with the rates that the card reaches, not those that its clocks suggest.

`CudaRateMeter` finds how fast the current device reads, copies and multiplies."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from ...datasets import DeviceSpec, torch_dtype
from ...datasets.device import MATRIX_DTYPES
from .timer import Timer

#: The sweep over set sizes: from this share of the L2 to this multiple, so many sizes for each doubling.
_SMALLEST, _LARGEST, _PER_DOUBLING = 1 / 8, 4, 4
#: A set that is read at this share of the L2's rate still fits.
_FITS = 0.9


def measured(device: DeviceSpec, meter: RateMeter | None = None) -> DeviceSpec:
    """`device` with its rates measured, in about a second. It must be the current one (see `DeviceSpec.live`).

    Copy and read bandwidth far outside the L2, the matrix rate of every dtype, and the L2 size that a sweep over
    growing sets sees, which is less than the queried one where the L2 has parts that keep copies of each other's lines.

    >>> import torch
    >>> if torch.cuda.is_available():
    ...     assert measured(DeviceSpec.live()).rates_measured
    """
    meter = meter or CudaRateMeter(device)
    matrix = {dtype: round(meter.matrix_tflops(dtype), 1) for dtype in MATRIX_DTYPES}
    sizes = [size for size in _sweep(device.l2_bytes) if size <= meter.most_bytes]
    return replace(
        device,
        copy_bandwidth_gbs=round(meter.copy_gbs(), 1),
        read_bandwidth_gbs=round(meter.read_gbs(meter.most_bytes), 1),
        l2_seen_bytes=l2_knee(sizes, [meter.read_gbs(size) for size in sizes]),
        matrix_tflops=matrix["bf16"],
        matrix_tflops_by_dtype=tuple(matrix.items()),
        rates_measured=True,
    )


def _sweep(l2_bytes: int) -> list[int]:
    """Set sizes around the L2's, evenly spaced in their logs, smallest first."""
    steps = round(math.log2(_LARGEST / _SMALLEST) * _PER_DOUBLING)
    return [round(l2_bytes * _SMALLEST * 2 ** (step / _PER_DOUBLING)) for step in range(steps + 1)]


def l2_knee(sizes_bytes: Sequence[int], bandwidths_gbs: Sequence[float]) -> int | None:
    """The largest set that is read at the L2's rate, from the rates of sets of growing size, both (n_sizes,).

    The L2's rate is the median of the rates that are nearer to the fastest than to the largest set's. A set fits if
    it is read at 90 % of that; between the last that fits and the next, the edge is interpolated in logs. None where
    the largest set fits too: then the sweep has not left the cache, or there is none.

    >>> l2_knee([8, 16, 32, 64, 128, 256], [7.0, 7.1, 7.0, 5.0, 4.0, 4.0])
    40
    """
    if not sizes_bytes:
        return None
    middle = math.sqrt(max(bandwidths_gbs) * bandwidths_gbs[-1])
    edge = _FITS * statistics.median(rate for rate in bandwidths_gbs if rate >= middle)
    if bandwidths_gbs[-1] >= edge:
        return None
    last = max(i for i, rate in enumerate(bandwidths_gbs) if rate >= edge)
    inside, outside = bandwidths_gbs[last], bandwidths_gbs[last + 1]
    way = math.log(inside / edge) / math.log(inside / outside)
    step = math.log(sizes_bytes[last + 1] / sizes_bytes[last])
    return round(sizes_bytes[last] * math.exp(way * step))


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
