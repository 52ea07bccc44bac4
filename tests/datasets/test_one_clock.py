"""Times of one problem from two runs, on two days or cards of one name, are scaled to be comparable."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from fakes import fake_cases, fake_dataset
from foretune.datasets.dataset import Dataset
from foretune.datasets.measurement import on_one_clock

CASES = fake_cases(models=2, randoms=0)[:4]
SLOWER = 1.25


def scanned(dataset: Dataset, problem: int) -> pd.DataFrame:
    """Return the rows of the scan that have a time."""
    rows = dataset.measurements
    chosen: pd.DataFrame = rows[(rows["problem"] == problem) & (rows["timing_pass"] == 1) & rows["time_us"].notna()]
    return chosen


def in_two_runs(shared: int, slower: float = SLOWER) -> tuple[Dataset, Dataset, list[int]]:
    """Return the fake dataset, a variant of it, and the numbers of the configs of the variant's second run.

    In the variant, the scanned configs of problem 0 from the fifth on were measured in a later run on a slower card,
    together with `shared` of the first ones.
    """
    whole = fake_dataset(CASES)
    rows = whole.measurements
    configs = scanned(whole, 0)["config"].tolist()
    here = rows["problem"] == 0
    beside, later = configs[:shared], configs[5:]
    again = rows[here & rows["config"].isin([*beside, *later])].assign(run_id="later")
    again["time_us"] *= slower
    left = rows[~(here & rows["config"].isin(later))]
    both = pd.concat([left.astype({"run_id": str}), again.astype({"run_id": str})], ignore_index=True)
    return whole, replace(whole, measurements=both), later


@pytest.mark.parametrize("shared", [2, 3, 5])
def test_a_slower_day_is_no_slower_config(shared: int) -> None:
    whole, split, later = in_two_runs(shared)
    expected, found = whole.grid("fake"), split.grid("fake")
    assert len(later) > 5  # so that the later run scanned most, and its clock counts
    np.testing.assert_allclose(found.slowdowns, expected.slowdowns, rtol=1e-5)
    np.testing.assert_allclose(found.times_us[0], SLOWER * expected.times_us[0], rtol=1e-5)
    np.testing.assert_allclose(found.times_us[1:], expected.times_us[1:], rtol=1e-6)


@pytest.mark.parametrize("shared", [0, 1])
def test_where_two_runs_share_too_little_nothing_is_scaled(shared: int) -> None:
    whole, split, later = in_two_runs(shared)
    expected, found = whole.grid("fake"), split.grid("fake")
    columns = [found.configs.index(split.configs[config]) for config in later]
    scan = scanned(split, 0).set_index("config")["time_us"]
    np.testing.assert_allclose(found.slowdowns[1:], expected.slowdowns[1:], rtol=1e-6)
    assert scan[later].to_numpy() == pytest.approx(SLOWER * scanned(whole, 0).set_index("config")["time_us"][later])
    assert np.isfinite(found.times_us[0, columns]).all()
    confirming = split.measurements["timing_pass"] > 1
    pd.testing.assert_frame_equal(on_one_clock(split.measurements)[confirming], split.measurements[confirming])


def test_one_config_that_changed_does_not_set_the_scale() -> None:
    """The scale is the median of five configs, so one outlier does not matter."""
    whole, split, _ = in_two_runs(5, slower=1.0)
    rows = split.measurements
    odd = scanned(split, 0)["config"].iloc[0]
    where = (rows["problem"] == 0) & (rows["config"] == odd) & (rows["run_id"] == "later")
    split = replace(split, measurements=rows.assign(time_us=rows["time_us"].where(~where, rows["time_us"] * 3)))
    found, expected = split.grid("fake"), whole.grid("fake")
    others = [column for column, config in enumerate(found.configs) if config != split.configs[odd]]
    np.testing.assert_allclose(found.times_us[0, others], expected.times_us[0, others], rtol=1e-5)


def test_one_run_is_left_as_it_is() -> None:
    rows = fake_dataset(CASES).measurements
    assert on_one_clock(rows) is rows


def test_a_scan_at_another_clock_than_its_confirming_passes_is_no_slower_config() -> None:
    """In the larger run, the clock of the scan was half of that of the confirming passes and of the later run."""
    whole, split, later = in_two_runs(5, slower=1.0)
    rows = split.measurements
    throttled = (rows["problem"] == 0) & (rows["run_id"] != "later") & (rows["timing_pass"] == 1)
    split = replace(split, measurements=rows.assign(time_us=rows["time_us"].where(~throttled, rows["time_us"] * 2)))
    found, expected = split.grid("fake"), whole.grid("fake")
    here = np.isfinite(expected.times_us[0])
    assert len(later) > 5
    np.testing.assert_allclose(found.slowdowns[0, here], expected.slowdowns[0, here], rtol=0.05)
