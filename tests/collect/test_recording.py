"""Replays of recorded times: what they store, what they say of themselves, and what they are never mixed with."""

from __future__ import annotations

import json
from dataclasses import replace

import commands
import foretune
import numpy as np
import pytest
from fakes import DEVICE, FakeFamily, fake_dataset
from foretune.collect import row_writer
from foretune.collect.campaign import collect_replayed
from foretune.collect.cases import CONFIRMING, SCAN
from foretune.collect.recording import Recording
from foretune.collect.runner import LaunchFailedError, ReplayRunner
from foretune.datasets import Case, DatasetError, ForetuneError, Problem, load
from foretune.datasets.contents import replayed_from
from foretune.datasets.merge import merge_datasets
from foretune.datasets.store import seal_dataset
from replay import CASES, check_complete, rows_of, run

FAMILY = FakeFamily()
FACTS = {"family": "fake", "kernel_source": "older", "triton": "3.4", "driver": "1", "plan": "adaptive", "share": 0.5}
RUNS = {"fake-run": FACTS}


def noted(dataset, **runs):
    return replace(dataset, provenance={"runs": RUNS | runs})


@pytest.fixture(scope="module")
def recorded():
    return noted(fake_dataset(CASES))


@pytest.fixture(autouse=True)
def no_gpu_is_asked(monkeypatch):
    def asked(*arguments):
        raise AssertionError("a replay asks no GPU, and takes no provenance from this machine")

    for name in ("run_provenance", "_first_gpu", "prepare"):
        monkeypatch.setattr(row_writer, name, asked)


def recorded_rows(dataset):
    frame = dataset.measurements
    return {
        (dataset.cases[row.problem].problem, dataset.configs[row.config], row.timing_pass): row
        for row in frame.itertuples()
    }


def test_every_recorded_result_is_replayed_as_it_is(recorded, tmp_path):
    summary = collect_replayed([FAMILY], None, tmp_path / "again", recorded)
    assert (summary.cases, summary.complete, summary.replay_of) == (len(CASES), True, "fake")
    rows, before = check_complete(tmp_path / "again"), recorded_rows(recorded)
    for (problem, config), passes in rows.items():
        for timing_pass, row in passes.items():
            then = before[problem, config, timing_pass]
            assert (row.device, row.status) == (DEVICE.name, then.status)
            np.testing.assert_array_equal(np.float32(row.time_us), np.float32(then.time_us))
    replayed, original = load(tmp_path / "again").grid(FAMILY), recorded.grid(FAMILY)
    place = [replayed.cases.index(case) for case in original.cases]
    columns = [replayed.configs.index(config) for config in original.configs]
    both = replayed.select(place).select_configs(columns)
    best = np.nanargmin(original.times_us, axis=1), np.nanargmin(both.times_us, axis=1)
    np.testing.assert_array_equal(*best)


def test_a_replay_says_what_it_is(recorded, tmp_path):
    collect_replayed([FAMILY], CASES[:1], tmp_path / "again", recorded, plan="thin", share=0.1)
    again = load(tmp_path / "again")
    (facts,) = again.provenance["runs"].values()
    assert facts == {
        "family": "fake",
        "device": DEVICE.name,
        "kernel_source": "older",
        "triton": "3.4",
        "driver": "1",
        "plan": "thin (replay)",
        "share": 0.1,
        "replay_of": {"dataset": "fake", "runs": ["fake-run"]},
    }
    assert replayed_from(again.provenance) == ("fake",)
    assert again.plans("fake") == {"thin (replay)"}
    assert again.drift.empty, "no drift probe was read"
    assert again.measurements["compile_ms"].isna().all()
    seal_dataset(again, tmp_path / "sealed", name="sealed")
    assert replayed_from(load(tmp_path / "sealed").provenance) == ("fake",)


def test_only_what_the_recorded_runs_agree_on_is_known_of_a_replay(recorded):
    frame = recorded.measurements
    ids = np.where(frame["problem"] == 0, "other-run", "fake-run")
    two = replace(recorded, measurements=frame.assign(run_id=ids))
    two = noted(two, **{"other-run": FACTS | {"triton": "3.5"}})
    facts = Recording(two, [FAMILY]).provenance(FAMILY, DEVICE)
    assert "triton" not in facts
    assert facts["kernel_source"] == "older"
    assert facts["replay_of"]["runs"] == ["fake-run", "other-run"]


def test_a_replay_goes_on_where_it_was(recorded, tmp_path):
    out = tmp_path / "again"
    assert collect_replayed([FAMILY], CASES[:2], out, recorded).measurements
    again = collect_replayed([FAMILY], CASES, out, recorded)
    assert (again.cases, again.complete) == (len(CASES), True)
    assert collect_replayed([FAMILY], CASES, out, recorded).measurements == 0
    check_complete(out)
    with pytest.raises(ForetuneError, match="already holds a dataset"):
        collect_replayed([FAMILY], CASES, out, recorded, resume=False)


def test_families_of_one_dataset_may_be_replayed_into_one_folder_one_after_the_other(recorded):
    of_other_families = Recording(recorded, [])
    assert of_other_families.is_of({"dataset": "fake", "runs": ["fake-run"]})
    assert not of_other_families.is_of({"dataset": "fake", "runs": ["fake-run", "unknown"]})


def test_measured_and_replayed_times_do_not_go_into_one_folder(recorded, tmp_path, monkeypatch):
    collect_replayed([FAMILY], CASES[:1], tmp_path / "again", recorded)
    with pytest.raises(ForetuneError, match="again has times that were replayed from fake: measure into another fol"):
        run(CASES, tmp_path / "again")
    other = replace(recorded, name="other")
    with pytest.raises(ForetuneError, match="again has times that were not replayed from other: replay into another"):
        collect_replayed([FAMILY], CASES, tmp_path / "again", other)
    monkeypatch.undo()
    monkeypatch.setattr(row_writer, "run_provenance", lambda *of: {"family": "fake", "kernel_source": "fake-source"})
    monkeypatch.setattr(row_writer, "triton_version", lambda: "3.9")
    run(CASES[:1], tmp_path / "measured")
    with pytest.raises(ForetuneError, match="measured has times that were not replayed from fake: replay into ano"):
        collect_replayed([FAMILY], CASES, tmp_path / "measured", recorded)


def test_replayed_times_are_not_merged_with_others(recorded, tmp_path):
    collect_replayed([FAMILY], CASES[:1], tmp_path / "again", recorded)
    again = load(tmp_path / "again")
    with pytest.raises(
        DatasetError,
        match=r"was collected with --replay: its times are copies of .*named fake .* alone, or leave .*again out",
    ):
        merge_datasets([recorded, again], name="both")
    assert len(merge_datasets([again], name="alone").measurements) == len(again.measurements)


def test_a_config_without_a_recorded_result_gets_no_row(recorded, tmp_path):
    frame = recorded.measurements
    some = replace(recorded, measurements=frame[(frame["config"] % 3 == 0) | (frame["problem"] != 0)])
    assert collect_replayed([FAMILY], CASES, tmp_path / "again", some).complete
    found = rows_of(tmp_path / "again")
    of_first = {config for problem, config in found if problem == some.cases[0].problem}
    assert of_first == set(some.configs[::3])
    assert len({config for problem, config in found if problem == some.cases[1].problem}) == len(some.configs)


def test_neither_the_family_nor_the_compiler_is_asked(recorded, tmp_path):
    class Changed(FakeFamily):
        """Today it supports nothing, and fails to say what decides its binaries."""

        def supports(self, config, problem, device):
            return "not any more"

        def binary_key(self, config, problem):
            raise ForetuneError("there is no torch here")

    collect_replayed([Changed()], CASES[:1], tmp_path / "again", recorded)
    statuses = load(tmp_path / "again").measurements["status"].value_counts()
    first = recorded.measurements[recorded.measurements["problem"] == 0]
    scanned = first[first["timing_pass"] == SCAN]["status"].value_counts()
    assert statuses["invalid"] == scanned["invalid"]
    assert statuses["launch_failed"] == scanned["launch_failed"]
    assert "compile_failed" not in statuses[statuses > 0]


def test_each_device_is_replayed_with_its_own_problems(recorded, tmp_path):
    small = DEVICE.with_sms(64)
    frame = recorded.measurements
    names = np.where(frame["problem"] == 0, small.name, DEVICE.name)
    two = replace(recorded, devices=(DEVICE, small), measurements=frame.assign(device=names))
    summary = collect_replayed([FAMILY], None, tmp_path / "again", two)
    assert (summary.complete, summary.skipped) == (True, ())
    rows = load(tmp_path / "again").measurements
    on = {str(device): len(of_it["problem"].unique()) for device, of_it in rows.groupby("device", observed=True)}
    assert on == {small.name: 1, DEVICE.name: len(CASES) - 1}


def test_the_adaptive_plan_learns_as_it_replays(tmp_path):
    recorded = noted(fake_dataset())
    summary = collect_replayed([FAMILY], None, tmp_path / "again", recorded, plan="adaptive", share=0.1)
    assert (summary.complete, summary.skipped) == (True, ())
    grid, everything = load(tmp_path / "again").grid(FAMILY), recorded.grid(FAMILY)
    assert 0.05 < np.isfinite(grid.times_us).mean() * grid.times_us.size / np.isfinite(everything.times_us).sum() < 0.15


def test_a_config_that_was_not_confirmed_has_its_scanned_time_on_the_confirming_clock(recorded):
    frame = recorded.measurements.copy()
    confirming = frame["timing_pass"].isin(CONFIRMING)
    frame.loc[confirming, "time_us"] = 2.0 * frame.loc[frame["timing_pass"] == SCAN, "time_us"].to_numpy().repeat(2)
    one = frame[frame["time_us"].notna()].iloc[0]["config"]
    some = replace(recorded, measurements=frame[~(confirming & (frame["config"] == one))])
    recording = Recording(some, [FAMILY])
    runner, config = ReplayRunner(recording.on(DEVICE)), some.configs[one]
    runner.prepare(FAMILY, CASES[0].problem)
    scanned = runner.scan(config, 1e-9)
    assert scanned.status == "ok", "a recorded result does not depend on what was best so far"
    assert runner.confirm(config, 1.0) == [pytest.approx(2 * scanned.time_us, rel=0.05)]


def test_the_rounds_of_the_confirming_passes_alternate(recorded):
    runner, before = ReplayRunner(Recording(recorded, [FAMILY]).on(DEVICE)), recorded_rows(recorded)
    problem = CASES[1].problem
    for _ in range(2):  # they begin anew with the next problem
        runner.prepare(FAMILY, problem)
        for config in recorded.configs[:20]:
            times = [before[problem, config, timing_pass].time_us for timing_pass in (*CONFIRMING, *CONFIRMING)]
            if np.isnan(times[0]):
                with pytest.raises(LaunchFailedError, match="it failed in the recorded run"):
                    runner.confirm(config, 1.0)
            else:
                assert [runner.confirm(config, 1.0)[0] for _ in times] == times


def test_what_production_logged_is_not_replayed(recorded):
    logged = noted(recorded, **{"fake-run": FACTS | {"timed": "warm"}})
    assert Recording(logged, [FAMILY]).devices == ()


def test_what_was_not_recorded_is_named(recorded, tmp_path):
    foreign = Case(Problem.of("fake", groups=1, rows=8, n=8, k=8), ("mine",))
    with pytest.raises(ForetuneError, match=r"fake has no times of fake .*n=8.* to replay"):
        collect_replayed([FAMILY], [foreign], tmp_path / "again", recorded)
    runner = ReplayRunner(Recording(recorded, [FAMILY]).on(DEVICE))
    with pytest.raises(ForetuneError, match=f"fake has no times of .* on {DEVICE.name} to replay"):
        runner.prepare(FAMILY, foreign.problem)
    with pytest.raises(LaunchFailedError, match="a replay has no drift probe"):
        runner.probe(FAMILY, foreign.problem, FAMILY.space()[0])
    with pytest.raises(ForetuneError, match="no measurements of 'other'"):
        Recording(recorded, [type("Other", (FakeFamily,), {"name": "other"})()])
    assert not (tmp_path / "again").exists()


# As users call it.


def test_python_replays_a_shipped_dataset(tmp_path):
    cases = [case for case in load("h200_rms_norm_rope").cases if case.problem.family == "rms_norm_rope_bwd"][:2]
    replayed = {"out": tmp_path / "again", "replay": "h200_rms_norm_rope", "cases": cases, "progress": False}
    summary = foretune.collect_dataset("rms_norm_rope_bwd", **replayed)
    assert (summary.cases, summary.complete, summary.replay_of) == (2, True, "h200_rms_norm_rope")
    with pytest.raises(ForetuneError, match="a replay uses no GPU: leave gpus out"):
        foretune.collect_dataset("rms_norm_rope_bwd", **replayed, gpus=1)


def call(line):
    return commands.call(f"collect {line}")


def test_the_command_replays_the_problems_of_its_data(tmp_path):
    options = f"rms_norm_rope_bwd --replay h200_rms_norm_rope --limit 2 --out {tmp_path / 'again'}"
    result = call(options)
    assert result.exit_code == 0, result.output
    assert "The times were replayed from h200_rms_norm_rope: no GPU was used" in result.stdout
    assert "GPUs:" not in result.stdout
    told = json.loads(call(f"{options} --json").stdout)
    assert (told["replay_of"], told["cases"], told["measurements"]) == ("h200_rms_norm_rope", 2, 0)
    again = load(tmp_path / "again")
    assert set(again.cases) <= set(load("h200_rms_norm_rope").cases)


@pytest.mark.parametrize("option", ["--gpus 2", "--sms 64", "--scheduler tcp://h:1", "--tokens 16", "--like h100"])
def test_options_that_a_replay_has_no_use_for_are_refused(option, tmp_path):
    result = call(f"rms_norm_rope_bwd --replay h200_rms_norm_rope {option} --out {tmp_path / 'again'}")
    assert result.exit_code == 2
    assert "a replay uses no GPU, and has the problems of its data" in result.stderr
    assert not (tmp_path / "again").exists()
