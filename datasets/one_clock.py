"""Times of one problem that several runs took, on one clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

#: Configs that two runs must share for the ratio of their times to say anything.
_SHARED = 2
_PLACE = ["problem", "device"]
_RUN = [*_PLACE, "run_id"]


def on_one_clock(timed: pd.DataFrame) -> pd.DataFrame:
    """The same rows of measurements, with the times of each problem's runs scaled to those of the run that tried most
    of its configs, of several the latest.

    Cards of one name, and days, differ by a few percent, so that what came later would look faster or slower than what
    is compared with it, by more than what sets the leading configs apart. The scale is the median ratio of the configs
    that both runs tried, as where the `missing` plan measures new ones beside the fastest of old; it is 1 where they
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
