"""`CallReader`: get from a call of a tuned function its key, problem, device and work, and the configs worth trying."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ....datasets import DTYPES, DeviceSpec, Family, ForetuneError, Measurable, Problem, Status
from ....datasets.errors import check_between, check_integer, shown
from ....datasets.problem import MOST_SIZE, dtype_from_json, dtype_of_tensor
from ...arguments import family_of
from ...launching.stub_driver import device_here
from ..launches import flag_of
from .config_space import Candidate, ConfigSpace, kernel_config
from .plain_values import text_of
from .results import Trial, all_failed
from .wrapped import CallKey

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
        """Return the roofline time in microseconds: the longer of computing at the matrix rate and moving the bytes."""
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


#: The dtype of problems of functions without tensors: that of Python's floats.
_PYTHON = "fp64"


@dataclass(frozen=True)
class Place:
    """The device that a call runs on: its name and, for a GPU, its spec."""

    name: str
    spec: DeviceSpec | None


@dataclass(frozen=True)
class FunctionCall:
    """A call of a tuned function: its arguments, and the key, problem and device for which it is tuned."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    named: Mapping[str, Any]  # arguments by parameter, with defaults
    fixed: Mapping[str, Any]  # knobs that the call passes
    key: str
    problem: Problem | None
    place: Place

    @property
    def own_kwargs(self) -> dict[str, Any]:
        """The call's keyword arguments without those that set knobs."""
        return {name: value for name, value in self.kwargs.items() if name not in self.fixed}


class CallReader:
    """Determines the key, problem, device and configs of calls of one function.

    `foretune.tune` documents the arguments. `device`, if given, is used for `supports` and rooflines in place of the
    device that calls run on.

    Raises:
        ForetuneError: An argument is not valid.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        space: Any,
        key: Callable[..., Any] | Sequence[str] | None,
        prune: Callable[..., Any] | None,
        family: Family | None,
        work: Callable[..., Work | Mapping[str, Any]] | None,
        device: DeviceSpec | Path | str | None,
        name: str,
    ) -> None:
        for what, value in (("prune", prune), ("work", work)):
            if value is not None and not callable(value):
                raise ForetuneError(f"{what} must be a function but is {shown(value)}")
        self._key, self.space = CallKey(function, key), ConfigSpace(space, function)
        self._takes_key, self._prune, self._work, self._name = key is not None, prune, work, name
        self._family = None if family is None else family_of(family)
        self._device = None if device is None else DeviceSpec.find(device)

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], n_ranks: int = 1) -> FunctionCall:
        """Return a `FunctionCall` for these arguments, made by `n_ranks` ranks together.

        Raises `TypeError` if the function does not accept the arguments.
        """
        named = self._key.named(args, kwargs, self.space.candidates()[0].knobs)
        fixed = {name: named[name] for name in self.space.knobs if name in named}
        place = place_of((value for name, value in named.items() if name not in fixed), n_ranks)
        problem = None if self._family is None else self._family.problem_from_call(named)
        if problem is not None and self._family is not None and not self._takes_key:
            key: Any = self._family.at_call_time(problem).to_json()
        else:
            own = {name: value for name, value in kwargs.items() if name not in fixed}
            key = self._key.of(args, own, {name: value for name, value in named.items() if name not in fixed})
            problem = problem or problem_of_key(self._name, key)
        return FunctionCall(args, kwargs, named, fixed, text_of(key), problem, place)

    def candidates(self, call: FunctionCall) -> tuple[dict[Candidate, str], tuple[Candidate, ...]]:
        """Return the refused configs of a call with the reasons, and the accepted ones in the order of the space.

        Raises:
            TuningFailed: All configs are refused.
            ForetuneError: No config has the knob values that the call passes.
        """
        found = [candidate for candidate in self.space.candidates() if _has(candidate, call.fixed)]
        if not found:
            raise ForetuneError(f"{self._name}: no config of the space has {Candidate(call.fixed, '')}")
        refused = {one: why for one in found if (why := self._refusal(one, call)) is not None}
        left = tuple(one for one in found if one not in refused)
        if not left:
            raise all_failed(self._name, [Trial(one.knobs, Status.INVALID, error=why) for one, why in refused.items()])
        return refused, left

    def metrics(self, call: FunctionCall) -> Callable[[float | None], dict[str, float]]:
        """Return a function that converts microseconds to rates such as TFLOP/s, by name; {} if the work is unknown."""
        work, device = self._work_of(call), self._device or call.place.spec
        return lambda time_us: {} if work is None or time_us is None else work.metrics(time_us, device)

    def _refusal(self, candidate: Candidate, call: FunctionCall) -> str | None:
        """Return why a config is refused; None if it is accepted."""
        if self._family is not None and call.problem is not None:
            device = self._device or call.place.spec
            if device is None:
                raise ForetuneError(
                    f"{self._family.name} needs a device to tell which configs it supports: pass one, as device='h200'"
                )
            if (reason := self._family.supports(kernel_config(candidate), call.problem, device)) is not None:
                return reason
        if self._prune is None:
            return None
        try:
            kept = self._prune(dict(candidate.knobs), *call.args, **call.own_kwargs)
        except Exception as error:  # noqa: BLE001 - counts as a failing config
            return f"prune raised {type(error).__name__}: {error}"
        if isinstance(kept, str):
            return kept or "refused by prune"
        if kept is None or not hasattr(kept, "__bool__"):
            raise ForetuneError(f"prune must return True, or False or the reason why not, but returned {shown(kept)}")
        return None if kept else "refused by prune"

    def _work_of(self, call: FunctionCall) -> Work | None:
        if self._work is not None:
            return work_of(self._work(*call.args, **call.own_kwargs))
        if isinstance(self._family, Measurable) and call.problem is not None:
            dtype = call.problem.dtype if isinstance(call.problem.dtype, str) else "bf16"
            return Work(self._family.flops(call.problem), self._family.bytes(call.problem), dtype)
        return None


def _has(candidate: Candidate, fixed: Mapping[str, Any]) -> bool:
    return all(
        name not in candidate.knobs or Candidate.of({name: value}) == Candidate.of({name: candidate.knobs[name]})
        for name, value in fixed.items()
    )


def place_of(arguments: Iterable[Any], n_ranks: int = 1) -> Place:
    """Return the device that a call with these arguments runs on.

    That is the device of its tensors; without tensors the GPU, if this process has initialized one, else the CPU. With
    several ranks, the name includes their number, since times of different numbers of ranks are not comparable.
    """
    place = _one_place(arguments)
    return place if n_ranks == 1 else replace(place, name=f"{place.name} x{n_ranks}")


def _one_place(arguments: Iterable[Any]) -> Place:
    devices = {getattr(getattr(value, "device", None), "type", None) for value in arguments} - {None}
    torch = sys.modules.get("torch")
    if torch is None or ("cpu" in devices and "cuda" not in devices):
        return cpu_place()
    if torch.cuda.is_available() and ("cuda" in devices or torch.cuda.is_initialized()):
        spec = device_here()
        return Place(spec.name, spec)
    return cpu_place()


@lru_cache
def cpu_place() -> Place:
    """Return the `Place` of calls that run on this machine's CPU."""
    try:
        model = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        model = None
    name = " ".join((model[1] if model else platform.processor() or platform.machine()).split())
    return Place(f"{name}, {os.cpu_count()} cores", None)


def problem_of_key(function: str, key: Any) -> Problem | None:
    """Convert a key that `plain` created to a `Problem`; None if it has no number, or too many for a problem.

    Integers >= 0 become dimensions, dtypes of tensors become the problem's dtypes, and other values become flags.

    >>> print(problem_of_key("scale", {"x": {"shape": [64, 8], "dtype": "float16"}, "mode": "fast"}))
    scale x.0=64 x.1=8 fp16 mode=fast
    """
    dims: dict[str, int] = {}
    dtypes: dict[str, str] = {}
    flags: list[str] = []
    for path, value in _leaves("", key):
        name = path.replace(".shape", "") or "key"
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_SIZE:
            dims[name] = value
        elif path.endswith(".dtype") and (known := _dtype(value)) is not None:
            dtypes[path.removesuffix(".dtype")] = known
        else:
            flags.append(flag_of(name, value))
    try:
        dtype = dtype_from_json(dtypes or _PYTHON)
        return Problem(function[-200:], tuple(dims.items()), dtype, tuple(flags)) if dims else None
    except ForetuneError:  # too many numbers, or an unprintable text
        return None


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, one in value.items():
            yield from _leaves(f"{path}.{name}".lstrip("."), one)
    elif isinstance(value, list):
        for position, one in enumerate(value):
            yield from _leaves(f"{path}.{position}".lstrip("."), one)
    else:
        yield path, value


def _dtype(value: Any) -> str | None:
    try:
        found = dtype_of_tensor("an argument", SimpleNamespace(dtype=str(value)))
    except ForetuneError:
        return None
    return found if found in DTYPES else None
