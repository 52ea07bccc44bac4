"""`Measurement`: one config's outcome on one problem. A failure is data, not an exception."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from .config import KernelConfig
from .errors import MOST, ForetuneError, check_between, check_integer, check_word, shown
from .problem import Problem


class Status(str, Enum):
    """How a measurement ended. Only OK and HOPELESS carry a time."""

    OK = "ok"
    INVALID = "invalid"  # refused by `Family.supports` before compiling
    COMPILE_FAILED = "compile_failed"
    OUT_OF_RESOURCES = "out_of_resources"
    LAUNCH_FAILED = "launch_failed"
    WRONG_RESULT = "wrong_result"
    TIMEOUT = "timeout"
    HOPELESS = "hopeless"  # one launch was so much slower than the best that no more were spent on it


TIMED = (Status.OK, Status.HOPELESS)
#: 1 = the scan of every config, 2 and 3 = the leading ones again, interleaved.
TIMING_PASSES = (1, 2, 3)
#: No kernel takes less: starting one takes a GPU about two microseconds. And none is waited for longer than an hour.
SHORTEST_US, LONGEST_US = 1e-3, 3.6e9
_LONGEST_ERROR = 10_000


class BinaryFacts(NamedTuple):
    """What a compiled config says of itself."""

    registers: int  # per thread
    spills: int  # as Triton counts them; 0 = none
    smem_bytes: int


@dataclass(frozen=True)
class Measurement:
    """One config on one problem and device, in one pass.

    `time_us` is the kernel's own time with a cold L2, the median of `samples` launches, from 1e-3 to 3.6e9; None unless
    the status is OK or HOPELESS. `spread` is the samples' interquartile range over their median.

    Raises `ForetuneError` naming the value that cannot be measured.

    >>> problem, config = Problem.of("row_softmax", rows=8, columns=8), KernelConfig.of(BLOCK=16)
    >>> Measurement(problem, "NVIDIA H200", config, Status.OK, time_us=1e30)
    Traceback (most recent call last):
    foretune.datasets.errors.ForetuneError: status ok needs a time_us between 0.001 and 3600000000.0 but got 1e+30
    """

    problem: Problem
    device: str  # the DeviceSpec's name; the spec itself is in the dataset's manifest
    config: KernelConfig
    status: Status
    time_us: float | None = None
    spread: float | None = None
    samples: int = 0
    timing_pass: int = 1
    compile_ms: float | None = None
    registers: int | None = None  # per thread
    spills: int | None = None  # as Triton counts them; 0 = none
    smem_bytes: int | None = None
    run_id: str = ""
    error: str | None = None

    def __post_init__(self) -> None:
        for name, kind in (("problem", Problem), ("config", KernelConfig), ("status", Status)):
            if not isinstance(getattr(self, name), kind):
                raise ForetuneError(f"{name} must be a {kind.__name__} but is {shown(getattr(self, name))}")
        check_word("device", self.device)
        _check_time(self.status, self.time_us)
        check_integer("timing_pass", self.timing_pass, TIMING_PASSES[0], TIMING_PASSES[-1])
        check_integer("samples", self.samples, 0, MOST)
        for name in ("spread", "compile_ms"):
            if getattr(self, name) is not None:
                check_between(name, getattr(self, name), 0.0, LONGEST_US)
        for name in BinaryFacts._fields:
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 0, MOST)
        if not isinstance(self.run_id, str) or self.run_id:
            check_word("run_id", self.run_id)
        if self.error is not None and not (isinstance(self.error, str) and len(self.error) <= _LONGEST_ERROR):
            raise ForetuneError(
                f"error must be a text of at most {_LONGEST_ERROR} characters but is {shown(self.error)}"
            )


def _check_time(status: Status, time_us: Any) -> None:
    if status not in TIMED:
        if time_us is not None:
            raise ForetuneError(f"status {status.value} does not go with a time_us, but got {shown(time_us)}")
        return
    try:
        check_between("time_us", time_us, SHORTEST_US, LONGEST_US)
    except ForetuneError:
        bounds = f"between {SHORTEST_US} and {LONGEST_US}"
        raise ForetuneError(f"status {status.value} needs a time_us {bounds} but got {shown(time_us)}") from None
