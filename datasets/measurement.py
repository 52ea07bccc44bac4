"""`Case`: a problem and its origin. `Measurement`: the time of one config on one problem, or how it failed.

Every run also times a drift probe, one fixed config of one problem, every few seconds on each GPU. A `Reading` of it
reveals another process on the GPU or a falling clock. `on_one_clock` makes times of several runs comparable.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from .config import KernelConfig
from .errors import MOST, ForetuneError, check_between, check_integer, check_word, check_words, shown
from .problem import Problem

if TYPE_CHECKING:
    import pandas as pd

#: The most sources of a case: more models than share a layer's shape.
_MOST_SOURCES = 4096


@dataclass(frozen=True)
class Case:
    """A problem to measure, with the models whose layers have that shape.

    Attributes:
        problem: The problem.
        sources: "MODEL/LAYER" for each such layer, or ("random",) for a random shape.
        scenario: The family's name for how the problem was sampled, e.g. how skewed its segment sizes are; may be "".

    Raises:
        ForetuneError: An attribute has a wrong type or value. The message names it.

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
        """The first word of each source's model name, sorted. Evaluation splits by these."""
        return tuple(sorted({re.split(r"[^A-Za-z]", source)[0] for source in self.sources}))


class Status(str, Enum):
    """The result of a measurement. Only OK and EARLY_STOPPED have a time."""

    OK = "ok"
    INVALID = "invalid"  # refused by `Family.supports`, neither compiled nor measured
    COMPILE_FAILED = "compile_failed"
    OUT_OF_RESOURCES = "out_of_resources"
    LAUNCH_FAILED = "launch_failed"
    WRONG_RESULT = "wrong_result"
    TIMEOUT = "timeout"
    EARLY_STOPPED = "hopeless"  # given up after one launch, which was much slower than the best config

    @property
    def text(self) -> str:
        """The status's name in messages, in lower case with hyphens: "early-stopped". The stored value may differ."""
        return self.name.lower().replace("_", "-")


#: The statuses with a time.
TIMED = (Status.OK, Status.EARLY_STOPPED)
#: 1 = the scan of all configs; 2 and 3 = the confirming passes, which time the leading configs again, interleaved.
TIMING_PASSES = (1, 2, 3)
#: Bounds of a time. A launch alone takes about two microseconds, and no kernel runs for an hour.
SHORTEST_US, LONGEST_US = 1e-3, 3.6e9
#: The most characters of a stored error message.
_LONGEST_ERROR = 10_000


class BinaryFacts(NamedTuple):
    """The compiler's report on a config's binary: registers, spills and shared memory."""

    registers: int  # of a thread
    spills: int  # spilled registers as Triton counts them
    smem_bytes: int  # of a block


@dataclass(frozen=True)
class Measurement:
    """The result of timing one config on one problem and device in one timing pass.

    Attributes:
        problem: The problem.
        device: The name of the `DeviceSpec`, which itself is in the dataset's manifest.
        config: The config.
        status: How the measurement ended.
        time_us: The time of the kernel alone with a cold L2: the median of `samples` launches, in microseconds, from
            1e-3 to 3.6e9; of a confirming pass, the mean of the medians with a dirty and with a clean L2. None unless
            the status is OK or EARLY_STOPPED.
        spread: The interquartile range of the samples divided by their median.
        samples: The number of timed launches.
        timing_pass: 1 for the scan, 2 and 3 for the confirming passes.
        compile_ms: The compile time in milliseconds.
        registers: Registers of a thread.
        spills: Spilled registers as Triton counts them.
        smem_bytes: Shared memory of a block.
        run_id: The run that measured it.
        error: The error message of a failed measurement.

    Raises:
        ForetuneError: An attribute has a wrong type or value. The message names it.

    >>> problem, config = Problem.of("row_softmax", rows=8, columns=8), KernelConfig.of(BLOCK=16)
    >>> Measurement(problem, "NVIDIA H200", config, Status.OK, time_us=1e30)
    Traceback (most recent call last):
    foretune.datasets.errors.ForetuneError: status ok needs a time_us between 0.001 and 3600000000.0 but got 1e+30
    """

    problem: Problem
    device: str
    config: KernelConfig
    status: Status
    time_us: float | None = None
    spread: float | None = None
    samples: int = 0
    timing_pass: int = 1
    compile_ms: float | None = None
    registers: int | None = None
    spills: int | None = None
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
                f"error must be a string of at most {_LONGEST_ERROR} characters but is {shown(self.error)}"
            )


def _check_time(status: Status, time_us: Any) -> None:
    """Raise `ForetuneError` unless a time suits a status: microseconds in bounds for one of `TIMED`, else None."""
    if status not in TIMED:
        if time_us is not None:
            raise ForetuneError(f"time_us must be None for status {status.value} but is {shown(time_us)}")
        return
    try:
        check_between("time_us", time_us, SHORTEST_US, LONGEST_US)
    except ForetuneError:
        bounds = f"between {SHORTEST_US} and {LONGEST_US}"
        raise ForetuneError(f"status {status.value} needs a time_us {bounds} but got {shown(time_us)}") from None


#: A case is flagged if the drift probe took more than this multiple of its usual time while the case was measured. A
#: clock that follows the power limit changes the probe by a few percent, a second process on the GPU by 50 % or more.
FLAGGED = 1.15


@dataclass(frozen=True)
class Reading:
    """The time of the drift probe on one GPU of a run.

    Attributes:
        problem: The problem that was being measured on that GPU.
        gpu: Which of the run's GPUs it is.
        at_s: Seconds since the start of the run.
        time_us: The probe's time in microseconds.
    """

    problem: Problem
    gpu: str
    at_s: float
    time_us: float


def flagged(drift: pd.DataFrame) -> pd.Series[float]:
    """Return the problems whose worst drift reading is a slowdown above `FLAGGED`, and that slowdown.

    The slowdown is relative to the median of the reading's run and GPU. `drift` has the columns of `tables.DRIFT`.

    >>> import pandas as pd
    >>> readings = pd.DataFrame({"run_id": "r1", "gpu": "0", "problem": [0, 0, 1], "time_us": [100.0, 100.0, 150.0]})
    >>> flagged(readings).to_dict()
    {1: 1.5}
    """
    usual = drift.groupby(["run_id", "gpu"])["time_us"].transform("median")
    worst: pd.Series[float] = (drift["time_us"] / usual).groupby(drift["problem"]).max()
    return worst[worst > FLAGGED]


def flagged_names(drift: pd.DataFrame) -> dict[str, float]:
    """Return the worst slowdown of the drift probe for each problem that `flagged` finds, by the problem's name.

    `drift` has the names in its column `problem`.

    Problems that differ only in their segment sizes share a name; the worst slowdown counts.

    >>> import pandas as pd
    >>> readings = pd.DataFrame({"run_id": "r1", "gpu": "0", "problem": [*"aab"], "time_us": [100.0, 100.0, 150.0]})
    >>> flagged_names(readings)
    {'b': 1.5}
    """
    return {str(name): round(float(worst), 3) for name, worst in flagged(drift).items()}


#: The fewest configs that two runs must share for the ratio of their times to be used.
_SHARED = 2
_PLACE = ["problem", "device"]
_RUN = [*_PLACE, "run_id"]


def on_one_clock(timed: pd.DataFrame) -> pd.DataFrame:
    """Scale the times of each problem's runs so that times of different runs are comparable.

    Times of the same config differ by a few percent between cards of one name and between days, which is more than the
    differences between the leading configs. For each (problem, device), the reference is the run that measured the most
    configs (the latest of several). Times of another run are multiplied by the median ratio of the configs that both
    measured, e.g. because the `missing` plan times new configs next to the fastest old ones; they are kept if the runs
    share fewer than two configs. Within a run, the clock may differ between the scan and the confirming passes, so the
    scan is first scaled to these by the median ratio of the configs that have both.

    Args:
        timed: Rows of measurements that have a time, with the columns of `tables.MEASUREMENTS`.
    """
    several = timed.groupby(_PLACE, observed=True)["run_id"].transform("nunique") > 1
    if not several.any():
        return timed
    passes = timed[several].groupby([*_RUN, "config", timed["timing_pass"] > 1], observed=True)["time_us"].mean()
    cells = passes.unstack("timing_pass").rename(columns={False: "scan", True: "confirmed"})
    cells = cells.reindex(columns=["scan", "confirmed"]).reset_index()
    of_scan = (cells["confirmed"] / cells["scan"]).groupby([cells[name] for name in _RUN], observed=True).median()
    cells["us"] = cells["confirmed"].fillna(cells["scan"] * _of_rows(cells, of_scan))
    counts = cells.groupby(_RUN, observed=True).size().reset_index(name="tried")
    widest = counts.sort_values("tried", kind="stable").drop_duplicates(_PLACE, keep="last")[_RUN]
    reference = cells.merge(widest, on=_RUN)[[*_PLACE, "config", "us"]]
    shared = cells.merge(reference, on=[*_PLACE, "config"], suffixes=("", "_there"))
    ratios = (shared["us_there"] / shared["us"]).groupby([shared[name] for name in _RUN], observed=True)
    of_run = ratios.median()[ratios.size() >= _SHARED]
    scale = _of_rows(timed, of_run) * _of_rows(timed, of_scan).where(timed["timing_pass"] == 1, 1.0)
    scaled: pd.DataFrame = timed.assign(time_us=timed["time_us"] * scale)
    return scaled


def _of_rows(rows: pd.DataFrame, of_run: pd.Series[float]) -> pd.Series[float]:
    """Look up each row's (problem, device, run) in `of_run`, and return the values by the rows' index; 1 if missing."""
    found = rows[_RUN].merge(of_run.rename("scale").reset_index(), on=_RUN, how="left")["scale"].fillna(1.0)
    scale: pd.Series[float] = found.set_axis(rows.index)
    return scale
