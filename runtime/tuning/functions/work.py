"""`Work`: the operations and memory traffic of a call, and the rates that follow from its time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ....datasets import DeviceSpec, ForetuneError, Problem
from ....datasets.errors import check_between, check_integer, shown
from ....datasets.problem import MOST_SIZE

#: Upper bound of operations and bytes, to catch mistakes.
_MOST = 1e30


@dataclass(frozen=True)
class Work:
    """The floating-point operations and memory traffic of one call.

    Attributes:
        flops: Floating-point operations.
        bytes: Bytes moved, if each operand is read or written once.
        dtype: The dtype whose matrix rate bounds the operations.

    Raises:
        ForetuneError: A number is negative or too large, or the dtype is unknown.

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
        """Return the roofline time in microseconds: the operations at the matrix rate or the bytes at the bandwidth."""
        rate = dict(device.matrix_tflops_by_dtype).get(self.dtype, device.matrix_tflops_of(self.dtype))
        return max(self.flops / (rate * 1e6), self.bytes / (device.copy_bandwidth_gbs * 1e3))

    def metrics(self, time_us: float, device: DeviceSpec | None) -> dict[str, float]:
        """Return TFLOP/s, GB/s and, given a device, percent of its roofline.

        Args:
            time_us: The time of the call in microseconds.
            device: The device of the roofline, or None.

        Returns:
            "tflops", "bandwidth_gbs" and, given a device, "roofline_percent".
        """
        found = {"tflops": self.flops / time_us / 1e6, "bandwidth_gbs": self.bytes / time_us / 1e3}
        if device is not None:
            found["roofline_percent"] = 100 * self.roofline_us(device) / time_us
        return found


def gemm_work(m: int, n: int, k: int, *, dtype: str = "bf16", out_dtype: str | None = None, batch: int = 1) -> Work:
    """Return the work of a matrix product of (m, k) and (k, n): 2 m n k operations.

    Args:
        m: Rows of the first operand.
        n: Columns of the second operand.
        k: The inner dimension.
        dtype: The dtype of the operands.
        out_dtype: The dtype of the result; `dtype` if None.
        batch: The number of such products.

    Raises:
        ForetuneError: A size is not an integer >= 0, or a dtype is unknown.

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
    """Return the work of an elementwise function.

    Args:
        elements: Elements of each tensor.
        reads: The number of tensors that are read.
        writes: The number of tensors that are written.
        flops_each: Operations for each element.
        dtype: The dtype of the tensors.

    Raises:
        ForetuneError: A count is not an integer >= 0, or the dtype is unknown.

    >>> elementwise_work(1 << 20, reads=2, dtype="fp32").bytes
    12582912.0
    """
    for name, count in (("elements", elements), ("reads", reads), ("writes", writes)):
        check_integer(name, count, 0, MOST_SIZE)
    check_between("flops_each", flops_each, 0.0, 1e9)
    return Work(float(flops_each * elements), float(elements * (reads + writes) * itemsize(dtype)), dtype)


def work_of(returned: Any) -> Work:
    """Return the `Work` that a user's `work` function returned, as such or as a mapping of its fields."""
    if isinstance(returned, Work):
        return returned
    if isinstance(returned, Mapping) and returned.keys() <= {"flops", "bytes", "dtype"}:
        return Work(**returned)
    raise ForetuneError(
        f"work must return a Work, or a mapping of flops, bytes and dtype, but returned {shown(returned)}"
    )


def itemsize(dtype: str) -> float:
    """Return the bytes of an element. Raises `ForetuneError` for an unknown dtype."""
    return Problem.of("work", dtype=dtype).itemsize_of("any")
