"""What a run knows: one that was cut goes on where it was, and says how far it has come."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace

import pytest
from fakes import DEVICE
from foretune.collect.campaign import collect_on_gpus
from foretune.collect.cases import earlier
from foretune.collect.cluster import collect_on_cluster
from foretune.collect.run_state import folder_of_run
from foretune.collect.runner import OutOfMemoryError
from foretune.datasets import ForetuneError, Status, load
from replay import (
    CASE,
    CASES,
    FAMILIES,
    FAMILY,
    SPACE,
    VALID,
    ReplayGpu,
    ReplayPool,
    best_of,
    check_complete,
    interrupting,
    outcomes_of,
    rows_of,
    run,
    ticking,
)
from replay_runner import ReplayRunner

pytestmark = pytest.mark.usefixtures("triton")


def test_a_second_run_has_nothing_to_do(out):
    run(CASES, out)
    before = sorted(path.name for path in (out / "parts").iterdir())
    runner, pool = ReplayRunner(), ReplayPool()
    summary = run(CASES, out, runner, pool=pool)
    assert (runner.calls, pool.asked) == ([], [])
    assert (summary.cases, summary.measurements, summary.complete) == (4, 0, True)
    assert sorted(path.name for path in (out / "parts").iterdir()) == before


def test_what_an_earlier_run_could_not_compile_is_not_compiled_again_by_the_same_triton(out, triton):
    config = VALID[3]
    run(CASES[:1], out, pool=ReplayPool({config: "PTXASError: internal"}))
    pool = ReplayPool()
    run(CASES[:2], out, pool=pool)
    assert config not in pool.asked
    row = rows_of(out)[CASES[1].problem, config][1]
    assert (row.status, row.error) == ("compile_failed", "PTXASError: internal")
    triton.version = "4.0"
    run(CASES[:3], out, pool=(pool := ReplayPool()))
    assert config in pool.asked
    assert rows_of(out)[CASES[2].problem, config][1].status != "compile_failed"


@pytest.mark.parametrize("budget_s", [1, 50, 250, 350, 600])
def test_a_budget_ends_a_run_cleanly_and_the_next_one_goes_on(out, budget_s):
    summary = run(CASES, out, budget_s=budget_s, clock=ticking())
    assert not summary.complete
    assert summary.cases < len(CASES)
    found = rows_of(out) if summary.measurements else {}
    assert sum(map(len, found.values())) == summary.measurements
    whole = [case for case in CASES if sum(problem == case.problem for problem, _ in found) == len(SPACE)]
    assert summary.cases in (len(whole), len(whole) - 1)  # the last may be scanned and not confirmed
    assert run(CASES, out).complete
    check_complete(out)


def test_what_the_budget_just_allows_is_complete(out):
    now = [0.0]
    runner = ReplayRunner(prepare=lambda problem: now.__setitem__(0, now[0] + 1))
    assert run(CASES, out, runner, budget_s=4.0, clock=lambda: now[0]).complete


@pytest.mark.parametrize("where", [0, 1, 90, len(VALID) - 1])
def test_an_interrupted_scan_is_a_clean_stop_and_the_next_run_goes_on(out, where):
    order = ReplayRunner()
    run(CASES[1:2], out.with_name("other"), order)
    config = order.asked("scan")[where]
    summary = run(CASES[1:2], out, ReplayRunner(interrupting([config])))
    assert (summary.interrupted, summary.complete, summary.cases) == (True, False, 0)
    assert len(load(out).measurements) == summary.measurements
    known = sum(status != Status.INVALID.value for status in load(out).measurements["status"])
    assert known <= where
    again = ReplayRunner()
    assert run(CASES[1:2], out, again).complete
    assert again.asked("scan") == order.asked("scan")[known:]
    assert outcomes_of(out) == outcomes_of(out.with_name("other"))


def test_an_interrupted_confirmation_is_done_again_as_a_whole(out):
    assert run([CASE], out, ReplayRunner(confirm_faults=interrupting([best_of(CASE)]))).interrupted
    assert set(load(out).measurements["timing_pass"]) == {1}
    again = ReplayRunner()
    run([CASE], out, again)
    assert again.asked("scan") == []
    check_complete(out, [CASE])


def test_problems_of_a_family_that_the_run_does_not_have_are_refused(out):
    other = replace(CASE, problem=replace(CASE.problem, family="another"))
    with pytest.raises(ForetuneError, match="each case must be of one of the families fake but one is of another"):
        run([CASE, other], out)


def test_progress_counts_up_and_says_when_it_will_be_over(out):
    events = []
    run(CASES, out, on_progress=events.append, clock=ticking())
    assert [event.case for event in events] == [*CASES, CASES[-1]]  # at the start of each, and at the end
    assert [(event.done, event.total) for event in events] == [(i, len(CASES)) for i in range(len(CASES) + 1)]
    assert events[0].eta_s is None
    assert events[0].measurements < len(SPACE) - len(VALID) + 1  # what cannot run is known at once
    assert all(a.measurements < b.measurements for a, b in itertools.pairwise(events))
    assert all(event.rate_per_s > 0 and event.eta_s > 0 for event in events[1:-1])
    assert events[-1].eta_s == 0
    etas = [event.eta_s for event in events[1:]]
    assert etas == sorted(etas, reverse=True)


def test_cases_that_were_measured_before_do_not_make_the_rest_look_quick(out):
    run(CASES[:2], out)
    events = []
    run(CASES, out, on_progress=events.append, clock=ticking())
    assert [event.case for event in events] == [*CASES[2:], CASES[-1]]
    assert [event.eta_s is None for event in events] == [True, False, False]


def test_going_on_with_another_kernel_is_refused(out, monkeypatch):
    run([CASE], out)
    monkeypatch.setattr(type(FAMILY), "source_hash", lambda self: "changed")
    with pytest.raises(
        ForetuneError, match=r"another version of fake's kernel \(source hash fake-source; now changed\)"
    ):
        run([CASE], out)


def test_a_folder_whose_hashes_had_one_part_is_gone_on_with(out, monkeypatch):
    monkeypatch.setattr(type(FAMILY), "source_hash", lambda self: "037307fb8c7f56d3")
    run([CASE], out)
    monkeypatch.setattr(type(FAMILY), "source_hash", lambda self: "037307fb8c7f56d3+4b1de3aa926b63df")
    assert set(earlier(out, FAMILIES).states) == {(DEVICE.name, CASE.problem)}
    assert run([CASE], out).complete


def test_another_devices_measurements_are_not_taken_for_this_ones(out):
    run([CASE], out)
    assert set(earlier(out, FAMILIES).states) == {(DEVICE.name, CASE.problem)}
    other = ReplayRunner()
    assert run([CASE], out, phases=[[ReplayGpu(other, replace(DEVICE, name="another"))]]).complete
    assert len(other.asked("scan")) == len(VALID)


def test_a_problem_that_does_not_fit_is_skipped_and_taken_up_when_it_does(out):
    def prepare(problem):
        if problem == CASES[1].problem:
            raise OutOfMemoryError("tried to allocate 12 GiB")

    summary = run(CASES, out, ReplayRunner(prepare=prepare))
    assert (summary.cases, summary.complete) == (3, False)
    (told,) = summary.skipped
    assert told == f"{CASES[1].problem}: tried to allocate 12 GiB"
    assert CASES[1].problem not in {problem for problem, config in rows_of(out) if config in VALID}
    assert run(CASES, out).complete
    check_complete(out)


@pytest.mark.parametrize("collect", [collect_on_gpus, collect_on_cluster])
def test_a_folder_is_one_runs_at_a_time(out, collect):
    """Which is said before any GPU or scheduler is looked for."""
    with folder_of_run(out):
        with pytest.raises(ForetuneError, match=f"measured is being written by process {os.getpid()} on .*, since 20"):
            collect([FAMILY], CASES, out, **({} if collect is collect_on_gpus else {"scheduler": "tcp://nowhere:1"}))
        run(CASES[:1], out)
    assert len(load(out).cases) == 1
    with folder_of_run(out):
        pass


def test_a_folder_that_was_made_for_nothing_goes_and_one_that_was_there_stays(out):
    for is_there in (False, True):
        if is_there:
            out.mkdir()
        with pytest.raises(ForetuneError, match="no GPU"), folder_of_run(out):
            raise ForetuneError("no GPU")
        assert out.exists() == is_there


def test_what_killed_runs_left_half_written_is_removed_when_the_next_goes_on(out):
    run(CASES[:1], out)
    written = {path.name for path in out.rglob("*")}
    for folder in (out, out / "parts", out / "drift"):
        (folder / f".x.{'0a' * 8}.tmp").write_text("half")
    (out / ".notes.tmp").write_text("somebody's")
    with folder_of_run(out):
        assert {path.name for path in out.rglob("*")} - written == {".notes.tmp", ".collecting"}


def test_what_a_dataset_cannot_be_written_to_is_refused_and_named(out):
    with pytest.raises(ForetuneError, match="/dev/null is a file: name a folder"), folder_of_run("/dev/null"):
        pass
    out.mkdir()
    (out / "bundle.npz").write_text("")
    with pytest.raises(ForetuneError, match="measured is the folder of a bundle: name one"), folder_of_run(out):
        pass
