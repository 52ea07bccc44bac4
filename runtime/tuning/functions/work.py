"""`Work`: what a call computes and moves at least, and what its time is worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ....datasets import DeviceSpec, ForetuneError, Problem
from ....datasets.errors import check_between, check_integer, shown
from ....datasets.problem import MOST_SIZE

_MOST = 1e30


@dataclass(frozen=True)
class Work:
    """Floating-point operations and bytes of one call, each operand read or written once; `dtype` says which matrix
    rate bounds it.

    >>> Work(flops=2e9, bytes=1e6).metrics(time_us=10.0, device=None)
    {'tflops': 200.0, 'bandwidth_gbs': 100.0}
    >>> round(Work(flops=2e9, bytes=1e6).metrics(time_us=10.0, device=DeviceSpec.named("h200"))["roofline_percent"])
    25
    """

    flops: float = 0.0
    bytes: float = 0.0
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        check_between("flops", self.flops, 0.0, _MOST)
        check_between("bytes", self.bytes, 0.0, _MOST)
        itemsize(self.dtype)

    def roofline_us(self, device: DeviceSpec) -> float:
        """The longer of the operations at the device's matrix rate and the bytes at its bandwidth."""
        rate = dict(device.matrix_tflops_by_dtype).get(self.dtype, device.matrix_tflops_of(self.dtype))
        return max(self.flops / (rate * 1e6), self.bytes / (device.copy_bandwidth_gbs * 1e3))

    def metrics(self, time_us: float, device: DeviceSpec | None) -> dict[str, float]:
        """TFLOP/s, GB/s and, where the device is known, per cent of its roofline."""
        found = {"tflops": self.flops / time_us / 1e6, "bandwidth_gbs": self.bytes / time_us / 1e3}
        if device is not None:
            found["roofline_percent"] = 100 * self.roofline_us(device) / time_us
        return found


def gemm_work(m: int, n: int, k: int, *, dtype: str = "bf16", out_dtype: str | None = None, batch: int = 1) -> Work:
    """The work of a product of (m, k) and (k, n), `batch` times: 2 m n k operations.

    Raises `ForetuneError` for sizes and dtypes that there are not.

    >>> gemm_work(1024, 1024, 1024)
    Work(flops=2147483648.0, bytes=6291456.0, dtype='bf16')
    """
    for size in (m, n, k, batch):
        check_integer("each size of a product", size, 0, MOST_SIZE)
    moved = (m * k + k * n) * itemsize(dtype) + m * n * itemsize(out_dtype or dtype)
    return Work(2.0 * batch * m * n * k, float(batch * moved), dtype)


def elementwise_work(
    elements: int, *, reads: int = 1, writes: int = 1, flops_each: float = 1.0, dtype: str = "bf16"
) -> Work:
    """The work of a function that reads and writes so many tensors of so many elements.

    Raises `ForetuneError` for counts and dtypes that there are not.

    >>> elementwise_work(1 << 20, reads=2, dtype="fp32").bytes
    12582912.0
    """
    for name, count in (("elements", elements), ("reads", reads), ("writes", writes)):
        check_integer(name, count, 0, MOST_SIZE)
    check_between("flops_each", flops_each, 0.0, 1e9)
    return Work(float(flops_each * elements), float(elements * (reads + writes) * itemsize(dtype)), dtype)


def work_of(said: Any) -> Work:
    """What a user's `work` function returned: a `Work`, or its fields by name."""
    if isinstance(said, Work):
        return said
    if isinstance(said, Mapping) and said.keys() <= {"flops", "bytes", "dtype"}:
        return Work(**said)
    raise ForetuneError(f"work must return a Work, or flops and bytes by name, but returned {shown(said)}")


def itemsize(dtype: str) -> float:
    """Bytes of an element. Raises `ForetuneError` for a dtype that there is not."""
    return Problem.of("work", dtype=dtype).itemsize_of("any")
