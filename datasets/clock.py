"""Whether the device's clock stayed the same while it was measured, and the times of several runs on one clock.

Every run has a drift probe: one config of one problem, timed again every few seconds on each GPU. Another process on
the card, or a clock that sinks, shows in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .problem import Problem

if TYPE_CHECKING:
    import pandas as pd

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

    `drift` has the columns of `schema.DRIFT`.

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
