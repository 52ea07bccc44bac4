"""`Case`: a problem and where it comes from. `Measurement`: one config's time on one problem, or how it failed.

Every run also has a drift probe: one config of one problem, timed again every few seconds on each GPU. A `Reading` of
it shows another process on the card, or a clock that sinks; `on_one_clock` puts times of several runs on one clock.
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


#: A case is flagged when the drift probe was slower than usual by more than this while it was measured. A clock that
#: follows the power limit moves it by some percent; a second process on the card, by 50 % or more.
FLAGGED = 1.15


@dataclass(frozen=True)
class Reading:
    """The drift probe's time on one GPU of a run, while a problem was measured there."""

    problem: Problem  # the one that was measured
    gpu: str  # which one of the run's
    at_s: float  # since the run began
    time_us: float


def slowdowns(drift: pd.DataFrame) -> pd.Series[float]:
    """The time of each reading over the median of its run and GPU, (n_readings,): 1.0 = as usual.

    `drift` has the columns of `tables.DRIFT`.

    >>> import pandas as pd
    >>> readings = pd.DataFrame({"run_id": "r1", "gpu": "0", "problem": [0, 0, 1], "time_us": [100.0, 100.0, 150.0]})
    >>> slowdowns(readings).tolist()
    [1.0, 1.0, 1.5]
    """
    usual = drift.groupby(["run_id", "gpu"])["time_us"].transform("median")
    return drift["time_us"] / usual


def flagged(drift: pd.DataFrame) -> pd.Series[float]:
    """Of the problems that were measured while the drift probe was off: its worst slowdown, by problem.

    >>> import pandas as pd
    >>> readings = pd.DataFrame({"run_id": "r1", "gpu": "0", "problem": [0, 0, 1], "time_us": [100.0, 100.0, 150.0]})
    >>> flagged(readings).to_dict()
    {1: 1.5}
    """
    worst: pd.Series[float] = slowdowns(drift).groupby(drift["problem"]).max()
    return worst[worst > FLAGGED]


def flagged_names(drift: pd.DataFrame) -> dict[str, float]:
    """`flagged` for people, where `drift` has the problems by name: those that differ in their ragged sizes alone
    share one, and the worst counts.

    >>> import pandas as pd
    >>> readings = pd.DataFrame({"run_id": "r1", "gpu": "0", "problem": [*"aab"], "time_us": [100.0, 100.0, 150.0]})
    >>> flagged_names(readings)
    {'b': 1.5}
    """
    return {str(name): round(float(worst), 3) for name, worst in flagged(drift).items()}


#: Configs that two runs must share for the ratio of their times to say anything.
_SHARED = 2
_PLACE = ["problem", "device"]
_RUN = [*_PLACE, "run_id"]


def on_one_clock(timed: pd.DataFrame) -> pd.DataFrame:
    """The same rows of measurements, with the times of each problem's runs scaled to those of the run that tried most
    of its configs, of several the latest.

    Cards of one name, and days, differ by a few percent, so that what came later would look faster or slower than what
    is compared with it, by more than what sets the leading configs apart. The scale is the median ratio of the configs
    that both runs tried, as where the `missing` plan measures new ones next to the fastest of old; it is 1 where they
    share fewer than two. Since the clock of a run's scan may be another one than that of its confirming passes, the
    scan is brought to these first, by the median ratio of what has both.
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
    """What each row's run has; 1 where it has nothing."""
    found = rows[_RUN].merge(of_run.rename("scale").reset_index(), on=_RUN, how="left")["scale"].fillna(1.0)
    scale: pd.Series[float] = found.set_axis(rows.index)
    return scale
