"""`Case`: a problem and where it comes from. `Measurement`: one config's time on one problem, or how it failed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from .config import KernelConfig
from .errors import MOST, ForetuneError, check_between, check_integer, check_word, check_words, shown
from .problem import Problem

#: More models than share a layer's shape.
_MOST_SOURCES = 4096


@dataclass(frozen=True)
class Case:
    """A problem to measure, the models whose layers have that shape, and under which scenario it was drawn.

    `sources` are "MODEL/LAYER" strings, or ("random",) for a shape drawn at random. `scenario` is a word of the
    family's own for what the dimensions do not say, as for how skewed ragged sizes were drawn; "" where there is none.

    Raises `ForetuneError` naming what is none of that.

    >>> problem = Problem.of("linear", m=16, n=4096, k=14336)
    >>> Case(problem, ("Llama-3-8B/down", "Qwen3-8B/down")).model_families
    ('Llama', 'Qwen')
    """

    problem: Problem
    sources: tuple[str, ...]
    scenario: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.problem, Problem):
            raise ForetuneError(f"the problem of a case must be a Problem but is {shown(self.problem)}")
        object.__setattr__(self, "sources", check_words("sources", self.sources, _MOST_SOURCES))
        if not isinstance(self.scenario, str) or self.scenario:
            check_word("scenario", self.scenario)

    @property
    def model_families(self) -> tuple[str, ...]:
        """The leading word of each source's model name: what evaluation splits by."""
        return tuple(sorted({re.split(r"[^A-Za-z]", source)[0] for source in self.sources}))


class Status(str, Enum):
    """How a measurement ended. Only OK and EARLY_STOPPED carry a time."""

    OK = "ok"
    INVALID = "invalid"  # refused by `Family.supports` before compiling
    COMPILE_FAILED = "compile_failed"
    OUT_OF_RESOURCES = "out_of_resources"
    LAUNCH_FAILED = "launch_failed"
    WRONG_RESULT = "wrong_result"
    TIMEOUT = "timeout"
    EARLY_STOPPED = "hopeless"  # one launch was so much slower than the best that no more were spent on it


TIMED = (Status.OK, Status.EARLY_STOPPED)
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
    the status is OK or EARLY_STOPPED. `spread` is the samples' interquartile range over their median.

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
