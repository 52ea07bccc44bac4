"""`measured`: measure a device's bandwidths and other rates; `sm_partition`: run work on a part of a GPU's SMs.

`CudaRateMeter` measures how fast the current device reads, copies and multiplies. A partition is some of a GPU's SMs as
a device of its own. It lets code that depends on the device be trained and tested on several devices with one card. A
CUDA green context runs only on its own SMs (64 of an H200's 132 take 2.0 times as long for a matrix product, 2026-11),
but shares the memory, the L2 and the clocks of the full card.
"""

from __future__ import annotations

import ctypes
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

from ...datasets import DeviceSpec, ForetuneError, torch_dtype
from ...datasets.device import MATRIX_DTYPES
from .timer import Timer

#: The sweep over set sizes: the smallest and the largest in L2 sizes, and the number of sizes for each doubling.
_SMALLEST, _LARGEST, _PER_DOUBLING = 1 / 8, 4, 4
#: A set fits into the L2 if it is read at this share of the L2's rate.
_FITS = 0.9


def measured(device: DeviceSpec, meter: CudaRateMeter | None = None) -> DeviceSpec:
    """Return the current device's spec with measured rates. Takes about a second.

    It measures the copy and read bandwidth far outside the L2, the matrix rate of every dtype, and the L2 size that a
    sweep over growing sets sees. That size is smaller than the queried one if the L2 has partitions that keep copies of
    each other's lines.

    Args:
        device: The spec of the current device (see `DeviceSpec.live`).
        meter: Measures the rates; a new one if None. Tests replace it.

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
    """Return how many bytes to read in each step of a sweep: around the L2's size, geometrically spaced, ascending."""
    steps = round(math.log2(_LARGEST / _SMALLEST) * _PER_DOUBLING)
    return [round(l2_bytes * _SMALLEST * 2 ** (step / _PER_DOUBLING)) for step in range(steps + 1)]


def l2_knee(sizes_bytes: Sequence[int], bandwidths_gbs: Sequence[float]) -> int | None:
    """Return the size of the largest set that is read at the L2's rate.

    The L2's rate is the median of the rates that are nearer to the fastest than to the largest set's. A set fits if it
    is read at 90 % of that rate. The edge between the last set that fits and the next one is interpolated in
    logarithms.

    Args:
        sizes_bytes: The sizes, growing, (n_sizes,).
        bandwidths_gbs: The rate of each size, (n_sizes,).

    Returns:
        The size in bytes; None if the largest set fits too, because the sweep did not leave the cache or there is none.

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


#: The size of the buffer, far larger than any L2; at most a quarter of the free memory is used.
_BUFFER_BYTES = 2 << 30
#: The least bytes of one reading, so that starting and stopping the kernel do not matter.
_LEAST_BYTES_READ = 1 << 30
#: The size of the square matrices, which keep an H200 busy for a millisecond or more.
_MATRIX = 8192
_WARM_UPS = 5


class CudaRateMeter:
    """Measures the current CUDA or HIP device and stream; only the number of SMs is taken from `device`.

    Each rate is the median of up to 30 launches on random data. Zeros would look faster: they save power, and may be
    compressed.
    """

    def __init__(self, device: DeviceSpec) -> None:
        import torch

        free, _ = torch.cuda.mem_get_info()
        elements = min(_BUFFER_BYTES, free // 4) // 4
        self._x = torch.rand(elements, device="cuda")
        self._timer = Timer(flush_bytes=0)  # no flush: what must not be cached does not fit
        self._programs = device.sm_count

    @property
    def most_bytes(self) -> int:
        """The size in bytes of the buffer that is read, the largest set for `read_gbs`."""
        return 4 * self._x.numel()

    def read_gbs(self, set_bytes: int) -> float:
        """Return the rate of reading a part of the buffer repeatedly, in 10^9 bytes per second."""
        import torch

        from .read_kernel import BLOCK, PROGRAMS_PER_SM, read_blocks_kernel

        blocks = max(min(set_bytes, self.most_bytes) // (4 * BLOCK), 1)
        passes = -(-_LEAST_BYTES_READ // (4 * BLOCK * blocks))
        programs = self._programs * PROGRAMS_PER_SM
        sums = torch.empty(programs, device="cuda")
        us = self._us(lambda: read_blocks_kernel[(programs,)](self._x, sums, blocks, passes, BLOCK=BLOCK, num_warps=4))
        return 4e-3 * BLOCK * blocks * passes / us

    def copy_gbs(self) -> float:
        """Return the rate of negating the buffer into another one, in 10^9 bytes read and written per second."""
        import torch

        y = torch.empty_like(self._x)
        # Not y.copy_(x), which the driver may give to a copy engine.
        return 2e-3 * self.most_bytes / self._us(lambda: torch.neg(self._x, out=y))

    def matrix_tflops(self, dtype: str) -> float:
        """Return the rate of a matrix product of a dtype in 10^12 operations per second."""
        import torch

        element = torch_dtype(dtype)
        a, b = (torch.randn(_MATRIX, _MATRIX, device="cuda", dtype=element) for _ in range(2))
        y = torch.empty_like(a)
        return 2e-6 * _MATRIX**3 / self._us(lambda: torch.mm(a, b, out=y))

    def _us(self, launch: Any) -> float:
        """Return the time of a launch in microseconds, after warm-up launches."""
        for _ in range(_WARM_UPS):
            launch()
        return self._timer.time(launch, budget_us=30_000.0).time_us


#: A context manager that sets a stream on at least this many SMs of the current device, and yields how many it got.
Carve = Callable[[int], AbstractContextManager[int]]

_SM_RESOURCE = 1  # CU_DEV_RESOURCE_TYPE_SM
_RESOURCE_WORDS = 64  # a CUdevResource is 144 bytes in CUDA 12.4 to 13.3
_SM_COUNT_WORD = 24  # ... whose union, 96 bytes in, starts with smCount


@contextmanager
def sm_partition(sms: int, device: DeviceSpec | None = None, *, carve: Carve | None = None) -> Iterator[DeviceSpec]:
    """Run the work queued in the block on some SMs of the current device; yield the partition's spec.

    Create inputs and timers and launch kernels inside of the block. Only work on the current stream is confined.

    Args:
        sms: The number of SMs. The driver may give more (on an H100 and later, the next multiple of 8); the yielded
            spec has the actual number.
        device: The spec of the current device; queried if None.
        carve: Makes a partition of this many SMs for a `with` block; a green context if None. Tests replace it.

    Raises:
        ForetuneError: The device does not have so many SMs, or there are no green contexts.

    >>> from contextlib import nullcontext
    >>> with sm_partition(60, DeviceSpec.named("h200"), carve=lambda sms: nullcontext(sms + -sms % 8)) as device:
    ...     device.name, device.sm_count
    ('NVIDIA H200 (64 SMs)', 64)
    """
    device = DeviceSpec.live() if device is None else DeviceSpec.find(device)
    device.with_sms(sms)  # raises for an impossible number
    with (carve or _green_context)(sms) as given:
        yield device.with_sms(given)


@contextmanager
def _green_context(sms: int) -> Iterator[int]:
    """Make a green context's stream the current one for the block; yield its number of SMs."""
    import torch

    outside = torch.cuda.current_stream()
    _, stream = _made(torch.cuda.current_device(), sms)
    stream.wait_stream(outside)
    try:
        with torch.cuda.stream(stream):
            yield _granted(stream.cuda_stream, ctypes.CDLL("libcuda.so.1"))
    finally:
        outside.wait_stream(stream)


@cache
def _made(index: int, sms: int) -> tuple[Any, Any]:
    """Return a green context with `sms` SMs of a device, and its stream; both live until the process ends.

    PyTorch's allocator keeps memory by stream, so a deleted stream's handle must not be used again.
    """
    try:
        from torch.cuda.green_contexts import SUPPORTED, GreenContext
    except ImportError:
        SUPPORTED = False
    if not SUPPORTED:
        raise ForetuneError("partitions need green contexts: PyTorch 2.11 or later with CUDA")
    try:
        context: Any = GreenContext.create(num_sms=sms, device_id=index)
        return context, context.Stream()
    except RuntimeError as error:
        raise ForetuneError(f"no partition of {sms} SMs: {str(error).splitlines()[0]}") from error


def _granted(stream: int, driver: Any) -> int:
    """Return the number of SMs of a green context's stream, as the driver (libcuda) reports it."""
    context, resource = ctypes.c_void_p(), (ctypes.c_uint32 * _RESOURCE_WORDS)()
    for function, arguments in (
        ("cuStreamGetGreenCtx", (ctypes.c_void_p(stream), ctypes.byref(context))),
        ("cuGreenCtxGetDevResource", (context, resource, _SM_RESOURCE)),
    ):
        if failure := getattr(driver, function)(*arguments):
            raise ForetuneError(f"{function} fails with error {failure}; it needs a driver of CUDA 12.4 or later")
    return int(resource[_SM_COUNT_WORD])
