"""`Measurement`: one config's outcome on one problem. A failure is data, not an exception."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from .config import KernelConfig
from .errors import ForetuneError
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


class BinaryFacts(NamedTuple):
    """What a compiled config says of itself."""

    registers: int  # per thread
    spills: int  # as Triton counts them; 0 = none
    smem_bytes: int


@dataclass(frozen=True)
class Measurement:
    """One config on one problem and device, in one pass.

    `time_us` is the kernel's own time with a cold L2, the median of `samples` launches; None unless the status
    is OK or HOPELESS, never infinite. `spread` is the samples' interquartile range over their median.
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
        timed = self.time_us is not None and math.isfinite(self.time_us) and self.time_us > 0
        if timed != (self.status in TIMED) or (self.time_us is not None and not timed):
            raise ForetuneError(f"status {self.status.value} does not go with time_us={self.time_us}")
