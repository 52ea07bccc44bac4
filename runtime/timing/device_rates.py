"""`measured`: a device's spec with the rates that the card reaches, not those that its clocks suggest."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from ...datasets import DeviceSpec
from ...datasets.device import MATRIX_DTYPES
from .rate_meter import CudaRateMeter, RateMeter

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
