"""Merging: no measurement is lost, duplicated or given to another kernel or card; the result can be shipped."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from foretune.datasets import (
    Case,
    DatasetError,
    DeviceSpec,
    ForetuneWarning,
    KernelConfig,
    Measurement,
    Problem,
    Status,
)
from foretune.datasets.dataset import Dataset
from foretune.datasets.log_part import LOGGED
from foretune.datasets.measurement import Reading
from foretune.datasets.merge import merge_datasets
from foretune.datasets.store import Writer, read, seal_dataset

H200 = DeviceSpec.named("h200")
PART = H200.with_sms(64)
CONFIGS = [KernelConfig.of(BLOCK=block) for block in (16, 32, 64)]
SMALL, LARGE, HUGE = (Problem.of("toy", rows=rows, columns=64, ragged={"rows": (rows,)}) for rows in (8, 64, 512))


def case(problem: Problem, *sources: str) -> Case:
    return Case(problem, sources or ("random",), "even")


def write(
    folder: Path,
    run_id: str,
    times: dict[Case, Sequence[float]],
    *,
    device: DeviceSpec = H200,
    family: str = "toy",
    kernel: str | None = "k1",
    **more: Any,
) -> Dataset:
    """Write a run that scans the configs of each case with these times and confirms the first config."""
    origin = {"family": family, **({"kernel_source": kernel} if kernel else {})}
    writer = Writer(folder, folder.name, [device], origin | more, run_id=run_id)
    for one, times_us in times.items():
        passes = [(config, time_us, 1) for config, time_us in zip(CONFIGS, times_us, strict=False)]
        passes += [(CONFIGS[0], times_us[0], timing_pass) for timing_pass in (2, 3)]
        writer.append(
            one,
            [
                Measurement(one.problem, device.name, config, Status.OK, time_us=time_us, timing_pass=timing_pass)
                for config, time_us, timing_pass in passes
            ],
        )
    writer.append_drift(Reading(one.problem, "0", float(place), 100.0) for place, one in enumerate(times))
    return read(folder)


@pytest.fixture
def a(tmp_path: Path) -> Dataset:
    return write(
        tmp_path / "a", "20261101-a", {case(SMALL, "A/x"): (10.0, 11.0, 12.0), case(LARGE): (20.0, 21.0, 22.0)}
    )


@pytest.fixture
def b(tmp_path: Path) -> Dataset:
    """A dataset that shares a problem with `a`, from another model: one config is slower, another one is missing."""
    return write(tmp_path / "b", "20261102-b", {case(HUGE): (30.0, 31.0), case(SMALL, "B/y"): (15.0, 16.0)})


def sealed_files(dataset: Dataset, folder: Path) -> dict[str, bytes]:
    seal_dataset(dataset, folder, name="merged")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def learned(dataset: Dataset) -> dict[str, Any]:
    """Return the data that a ranker learns from; see `Grid.tidy`."""
    grid = dataset.grid("toy").tidy()
    problems = [one.problem for one in grid.cases]
    return {
        "problems": problems,
        "devices": grid.devices,
        "configs": grid.configs,
        "first": str(grid.first_us.tolist()),  # NaN is not NaN
        "second": str(grid.second_us.tolist()),
    }


def test_merged_with_itself_a_dataset_is_itself(a: Dataset, tmp_path: Path) -> None:
    twice = merge_datasets([a, a], name="merged")
    assert (twice.cases, twice.configs, twice.devices) == (a.cases, a.configs, a.devices)
    assert twice.provenance == a.provenance
    pd.testing.assert_frame_equal(twice.measurements, a.measurements, check_dtype=False)
    pd.testing.assert_frame_equal(twice.drift, a.drift, check_dtype=False)
    assert sealed_files(twice, tmp_path / "twice") == sealed_files(a, tmp_path / "once")


def test_one_alone_is_merged_too(a: Dataset) -> None:
    alone = merge_datasets([a], name="alone")
    assert alone.name == "alone"
    assert alone.describe()["families"] == a.describe()["families"]


def test_two_are_united(a: Dataset, b: Dataset) -> None:
    both = merge_datasets([a, b], name="both")
    assert [one.problem for one in both.cases] == [SMALL, LARGE, HUGE]
    assert both.cases[0].sources == ("A/x", "B/y")
    assert both.configs == (CONFIGS[0], CONFIGS[1], CONFIGS[2])
    assert both.devices == (H200,)
    assert both.provenance["runs"] == a.provenance["runs"] | b.provenance["runs"]
    assert len(both.measurements) == len(a.measurements) + len(b.measurements)
    assert both.drift["problem"].tolist() == [0, 1, 2, 0]
    toy = both.describe()["families"]["toy"]
    assert (toy["problems"], toy["configs"], toy["measurements"]) == (3, 3, 18)


def test_every_row_says_the_same_as_before(a: Dataset, b: Dataset) -> None:
    def said(dataset: Dataset) -> set[tuple[Any, ...]]:
        return {
            (dataset.cases[row.problem].problem, dataset.configs[row.config], row.device, row.timing_pass, row.time_us)
            for row in dataset.measurements.itertuples()
        }

    assert said(merge_datasets([b, a], name="both")) == said(a) | said(b)


def test_of_a_cell_that_was_measured_differently_all_rows_stay_and_the_latest_run_wins(a: Dataset, b: Dataset) -> None:
    both = merge_datasets([b, a], name="both")
    place = [one.problem for one in both.cases].index(SMALL)
    scan = both.measurements.query(f"problem == {place} and timing_pass == 1")
    first, second = (scan[scan["config"] == both.configs.index(config)] for config in CONFIGS[:2])
    assert first["time_us"].tolist() == [10.0, 15.0]
    assert second["time_us"].tolist() == [11.0, 16.0]
    grid = both.grid("toy")
    row = [one.problem for one in grid.cases].index(SMALL)
    times = dict(zip(grid.configs, grid.times_us[row].tolist(), strict=True))
    scale = (10 / 15 + 11 / 16) / 2  # to the clock of the older run, which alone knows the last
    assert times == pytest.approx({CONFIGS[0]: 15 * scale, CONFIGS[1]: 16 * scale, CONFIGS[2]: 12.0})


def test_the_order_of_the_datasets_does_not_change_what_a_ranker_learns(a: Dataset, b: Dataset) -> None:
    one, other = merge_datasets([a, b], name="both"), merge_datasets([b, a], name="both")
    assert learned(one) == learned(other)
    assert np.isfinite(one.grid("toy").times_us).sum() == 3 + 3 + 2


def test_merging_in_steps_is_merging_at_once(a: Dataset, b: Dataset, tmp_path: Path) -> None:
    c = write(tmp_path / "c", "20261103-c", {case(LARGE): (5.0, 6.0)}, device=PART)
    steps = merge_datasets([merge_datasets([a, b], name="merged"), c], name="merged")
    assert sealed_files(steps, tmp_path / "steps") == sealed_files(
        merge_datasets([a, b, c], name="merged"), tmp_path / "once"
    )
    assert steps.devices == (H200, PART)


def test_a_run_that_two_have_in_part_is_one_run(a: Dataset) -> None:
    rows = a.measurements
    halves = [replace(a, measurements=half.reset_index(drop=True)) for half in (rows.iloc[:7], rows.iloc[4:])]
    whole = merge_datasets(halves, name="whole")
    pd.testing.assert_frame_equal(whole.measurements, rows, check_dtype=False)


def test_two_runs_of_one_id_are_refused(a: Dataset, tmp_path: Path) -> None:
    other = write(tmp_path / "other", "20261101-a", {case(LARGE): (5.0,)}, date="another day")
    with pytest.raises(DatasetError, match="other and a have different runs with the id 20261101-a"):
        merge_datasets([a, other], name="both")


def test_two_devices_of_one_name_are_refused_with_what_differs(a: Dataset, tmp_path: Path) -> None:
    larger = replace(H200, sm_count=144, clock_mhz=1000.0)
    other = write(tmp_path / "other", "20261105-x", {case(LARGE): (5.0,)}, device=larger)
    named = r"NVIDIA H200 has different specs in other and in a \(differing: sm_count 144 and 132, clock_mhz 1000.0 and"
    with pytest.raises(DatasetError, match=named):
        merge_datasets([a, other], name="both")


def test_another_kernel_is_refused_unless_told(a: Dataset, tmp_path: Path) -> None:
    other = write(tmp_path / "other", "20261105-x", {case(LARGE): (5.0,)}, kernel="k2")
    for pair, named in (((a, other), r"in a \(k1\) and in other \(k2\)"), ((other, a), r"in other \(k2\) and in a")):
        with pytest.raises(DatasetError, match=f"toy was measured with different kernel sources {named}"):
            merge_datasets(pair, name="both")
    both = merge_datasets([a, other], name="both", allow_other_sources=True)
    assert both.kernel_sources("toy") == {"k1", "k2"}
    assert merge_datasets([both, both], name="both").kernel_sources("toy") == {"k1", "k2"}


def test_hashes_of_one_kernel_from_before_and_after_they_had_a_second_part_merge(tmp_path: Path) -> None:
    first, second, other = "037307fb8c7f56d3", "037307fb8c7f56d3+4b1de3aa926b63df", "037307fb8c7f56d3+2263e89fede9aba3"
    sizes = {first: SMALL, second: LARGE, other: HUGE}
    by_kernel = {
        kernel: write(tmp_path / f"d{at}", f"2026110{at}-a", {case(sizes[kernel]): (10.0,)}, kernel=kernel)
        for at, kernel in enumerate(sizes)
    }
    both = merge_datasets([by_kernel[first], by_kernel[second]], name="both")
    assert both.kernel_sources("toy") == {first, second}
    with pytest.raises(DatasetError, match="different kernel sources"):
        merge_datasets([by_kernel[second], by_kernel[other]], name="both")
    log = write(tmp_path / "log", "20261105-x", {case(SMALL): (5.0,)}, kernel=first, plan=LOGGED)
    assert merge_datasets([by_kernel[second], log], name="both").kernel_sources("toy") == {first, second}


def test_what_was_logged_of_another_kernel_is_left_out_unless_told(a: Dataset, tmp_path: Path) -> None:
    """The log has times of a user's kernel with the family's knobs, and of the collected kernel."""
    folder = tmp_path / "log"
    write(folder, "20261105-x", {case(LARGE): (5.0,)}, kernel="k1", plan=LOGGED)
    log = write(folder, "20261105-y", {case(LARGE): (9.0,), case(HUGE): (9.0, 7.0)}, kernel="k2", plan=LOGGED)
    rows = {run: len(log.measurements[log.measurements["run_id"] == run]) for run in ("20261105-x", "20261105-y")}
    for pair in ((a, log), (log, a)):
        with pytest.warns(ForetuneWarning, match=rf"log: {rows['20261105-y']} logged times are left out.*toy \(k2\)"):
            both = merge_datasets(pair, name="both")
        assert both.kernel_sources("toy") == {"k1"}
        assert set(both.measurements["run_id"]) == {*a.measurements["run_id"], "20261105-x"}
        there = [both.cases[number].problem for number in both.measurements["problem"]]
        before = [one.cases[number].problem for one in (a, log) for number in one.measurements["problem"]]
        assert [there.count(one) for one in (SMALL, LARGE)] == [
            before.count(SMALL),
            before.count(LARGE) - 3,  # a scan and two confirming passes of one config
        ]
    told = merge_datasets([a, log], name="both", allow_other_sources=True)
    assert told.kernel_sources("toy") == {"k1", "k2"}
    assert merge_datasets([log], name="log").kernel_sources("toy") == {"k1", "k2"}  # nothing was collected


def test_where_no_sources_were_recorded_or_families_differ_there_is_nothing_to_refuse(
    a: Dataset, tmp_path: Path
) -> None:
    bare = write(tmp_path / "bare", "20261105-x", {case(LARGE): (5.0,)}, kernel=None)
    gelu = Case(Problem.of("gelu", n=5), ("random",))
    another = write(tmp_path / "another", "20261106-y", {gelu: (5.0,)}, family="gelu", kernel="k9")
    assert merge_datasets([a, bare, another], name="all").families == ("gelu", "toy")


def test_there_must_be_something_to_merge() -> None:
    with pytest.raises(DatasetError, match="mine: merging needs at least one dataset"):
        merge_datasets([], name="mine")


def test_what_is_merged_is_sealed_and_read_again(a: Dataset, b: Dataset, tmp_path: Path) -> None:
    both = merge_datasets([a, b], name="both")
    seal_dataset(both, tmp_path / "sealed", name="both")
    again = read(tmp_path / "sealed")
    assert again.describe() == both.describe()
    assert (again.cases, again.devices, again.provenance) == (both.cases, both.devices, both.provenance)
    assert learned(again) == learned(both)


def test_sealing_over_an_older_one_replaces_the_tables_and_keeps_the_card(
    a: Dataset, b: Dataset, tmp_path: Path
) -> None:
    target = tmp_path / "sealed"
    seal_dataset(a, target, name="mine")
    (target / "CARD.md").write_text("what it is")
    both = merge_datasets([a, b], name="mine")
    seal_dataset(both, target, name="mine")
    assert read(target).describe() == both.describe()
    assert (target / "CARD.md").read_text() == "what it is"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "sealed"]


@pytest.mark.parametrize("lost", ["measurements", "drift readings"])
def test_sealing_over_another_dataset_is_refused_and_leaves_it_as_it_was(
    a: Dataset, b: Dataset, tmp_path: Path, lost: str
) -> None:
    target = tmp_path / "sealed"
    seal_dataset(a, target, name="mine")
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    new, count = (b, len(a.measurements)) if lost == "measurements" else (replace(a, drift=a.drift[:0]), len(a.drift))
    said = f"sealed: {count} of its {count} {lost} are not in the new dataset and would be lost"
    with pytest.raises(DatasetError, match=said):
        seal_dataset(new, target, name="mine")
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    seal_dataset(a, target, name="again")  # of the same rows, it may be


@pytest.mark.parametrize("name", ["notes.txt", "measurements.parquet", "dataset.json"])
def test_sealing_into_a_folder_of_something_else_is_refused(a: Dataset, tmp_path: Path, name: str) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / name).write_text('{"name": "somebody else\'s"}')
    with pytest.raises(DatasetError, match="target"):
        seal_dataset(a, target, name="mine")
    assert [(path.name, path.read_text()) for path in target.iterdir()] == [(name, '{"name": "somebody else\'s"}')]


@pytest.mark.parametrize("folder", ["parts", "drift"])
def test_a_target_with_rows_of_its_own_is_refused(a: Dataset, tmp_path: Path, folder: str) -> None:
    shutil.copytree(tmp_path / "a" / folder, tmp_path / "target" / folder)
    with pytest.raises(DatasetError, match=f"target has unsealed {folder}: seal into another folder"):
        seal_dataset(a, tmp_path / "target", name="mine")


def test_a_dataset_is_not_sealed_into_itself(a: Dataset, tmp_path: Path) -> None:
    seal_dataset(a, tmp_path / "sealed", name="mine")
    with pytest.raises(DatasetError, match="sealed is the source itself"):
        seal_dataset(tmp_path / "sealed", tmp_path / "elsewhere" / ".." / "sealed", name="mine")


KILLED = """
import os, signal, sys
from foretune.datasets.store import read, seal_dataset, writer
from pathlib import Path
table, target = sys.argv[2], Path(sys.argv[3])
write = writer.write_table
def killed(content, path):
    if path.name == table:
        path.write_bytes(b"half a table")
        os.kill(os.getpid(), signal.SIGKILL)
    write(content, path)
writer.write_table = killed
seal_dataset(sys.argv[1], target, name="killed")
"""


@pytest.mark.parametrize("table", ["problems.parquet", "drift.parquet"])
@pytest.mark.parametrize("earlier", [False, True])
def test_a_kill_while_it_is_sealed_leaves_no_half_dataset(
    a: Dataset, tmp_path: Path, table: str, earlier: bool
) -> None:
    target = tmp_path / "sealed"
    if earlier:
        seal_dataset(a, target, name="before")
    command = [sys.executable, "-c", KILLED, str(tmp_path / "a"), table, str(target)]
    assert subprocess.run(command, timeout=60).returncode == -9
    if earlier:
        assert read(target).describe() == replace(a, name="before").describe()
    else:
        assert not target.exists()
    seal_dataset(a, target, name="after")
    assert read(target).name == "after"
