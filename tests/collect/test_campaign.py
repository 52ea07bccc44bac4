"""A campaign: each (case, config) gets its rows, once, whatever happens on the way."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from fakes import DEVICE, FakeFamily, fake_cases
from faulty import CompiledFamily, FaultyGpu
from foretune.collect import campaign, outcomes, provenance, row_writer, worker
from foretune.collect.campaign import collect_on_gpus
from foretune.collect.case_tasks import DEATHS, FATAL_CASES, ROUNDS, TRIES
from foretune.collect.outcomes import LEADING_LEAST, LEADING_MOST, LEADING_SLOWDOWN, Outcomes, earlier
from foretune.collect.runner import DeviceLostError, LaunchFailedError, Outcome, OutOfMemoryError
from foretune.collect.supervisor import LOSSES, WINDOW
from foretune.datasets import DeviceSpec, ForetuneError, KernelConfig, Status, load
from replay import FAMILIES, EndOfProcess, ReplayGpu, ReplayPool, ReplayRunner, meeting, outcomes_of, rows_of, run
from waiting import until

FAMILY = FakeFamily()
SPACE = FAMILY.space()
CASES = fake_cases(models=2, tokens=(64, 512), randoms=1)[:4]
CASE = CASES[0]
VALID = [config for config in SPACE if FAMILY.supports(config, CASE.problem, DEVICE) is None]
TESTS = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def triton(monkeypatch):
    """No torch and no nvidia-smi, only to say where measurements come from; a Triton of any version."""
    triton = SimpleNamespace(version="3.9")
    monkeypatch.setattr(outcomes, "triton_version", lambda: triton.version)
    monkeypatch.setattr(
        row_writer,
        "run_provenance",
        lambda family, device: {
            "family": family.name,
            "kernel_source": family.source_hash(),
            "triton": triton.version,
        },
    )
    return triton


@pytest.fixture
def out(tmp_path):
    return tmp_path / "measured"


def check_complete(out, cases=CASES):
    """All rows are there, once each, and the leading configs have their three passes."""
    found = rows_of(out)
    assert set(found) == {(case.problem, config) for case in cases for config in SPACE}
    for case in cases:
        passes = {config: found[case.problem, config] for config in SPACE}
        times = sorted(row[1].time_us for row in passes.values() if row[1].time_us == row[1].time_us)
        near = sum(time_us <= LEADING_SLOWDOWN * times[0] for time_us in times)
        confirmed = [config for config in SPACE if len(passes[config]) == 3]
        assert len(confirmed) == min(max(near, LEADING_LEAST), LEADING_MOST)
        assert all(set(passes[config]) in ({1}, {1, 2, 3}) for config in SPACE)
        assert {passes[config][1].time_us for config in confirmed} <= set(times[: len(confirmed)])
    return found


def test_every_config_of_every_case_is_scanned_and_the_leading_ones_confirmed(out):
    summary = run(CASES, out)
    found = check_complete(out)
    assert (summary.cases, summary.complete, summary.skipped) == (4, True, ())
    assert summary.measurements == sum(map(len, found.values())) == sum(summary.statuses.values())
    assert summary.statuses == load(out).describe()["families"]["fake"]["statuses"]
    confirming = next(passes for passes in found.values() if 3 in passes)
    assert (confirming[2].samples, confirming[2].status) == (2 * ROUNDS, "ok")
    assert confirming[2].time_us != confirming[3].time_us
    assert load(out).provenance["runs"][confirming[1].run_id] == {
        "family": "fake",
        "kernel_source": "fake-source",
        "triton": "3.9",
        "plan": "exhaustive",
    }


def test_each_failure_is_a_row_of_its_own_status(out):
    uncompiled, wrong, resources, hopeless = VALID[:4]
    runner = ReplayRunner(
        outcomes={
            wrong: Outcome(Status.WRONG_RESULT, error="relative error 0.3"),
            resources: Outcome(Status.OUT_OF_RESOURCES, error="shared memory"),
            hopeless: Outcome(Status.HOPELESS, 1e5, 0.0, 1),
        }
    )
    pool = ReplayPool({uncompiled: "PTXASError: internal"})
    run([CASE], out, runner, pool=pool)
    found = {config: passes[1] for (_, config), passes in rows_of(out).items()}
    assert len(found) == len(SPACE)
    told = {config: (found[config].status, found[config].error) for config in (uncompiled, wrong, resources)}
    assert told == {
        uncompiled: ("compile_failed", "PTXASError: internal"),
        wrong: ("wrong_result", "relative error 0.3"),
        resources: ("out_of_resources", "shared memory"),
    }
    assert (found[hopeless].status, found[hopeless].time_us) == ("hopeless", 1e5)
    refused = set(SPACE) - set(VALID)
    assert {config for config, row in found.items() if row.status == "invalid"} == refused
    assert all("shared memory" in found[config].error for config in refused)
    assert refused.isdisjoint(pool.asked)  # nobody compiles what cannot run
    failing = [c for c in VALID[4:] if FAMILY.time_us(CASE.problem, c, timing_pass=1) is None]
    assert {found[config].status for config in failing} == {"launch_failed"}


def test_the_most_promising_configs_are_scanned_first(out):
    runner = ReplayRunner()
    run([CASE], out, runner)
    roofline = FAMILY.features(CASE.problem, DEVICE, runner.asked("scan"))[:, -1]
    assert (np.diff(roofline) >= 0).all()


class LatePool(ReplayPool):
    """What is requested is compiled a while later, some at a time, the last one first."""

    def __init__(self, errors, at_a_time):
        super().__init__(errors)
        self.at_a_time, self.requested, self.told = at_a_time, {}, []

    def request(self, binary, rank):
        if binary in self.told:
            return super().request(binary, rank)
        self.requested[binary] = None
        return None

    def check(self):
        for binary in list(self.requested)[-self.at_a_time :][::-1]:
            del self.requested[binary]
            self.told.append(binary)
            self.on_finished(binary, super().request(binary, 0))


def test_configs_are_scanned_as_they_are_compiled(out, monkeypatch):
    monkeypatch.setattr(campaign, "CHECK_SECONDS", 0.01)
    runner, pool = ReplayRunner(), LatePool({VALID[5]: "PTXASError: internal"}, at_a_time=50)
    assert run([CASE], out, runner, pool=pool).complete
    compiled = [binary.config for binary in pool.told]
    assert runner.asked("scan") == [config for config in compiled if config != VALID[5]]
    assert compiled != sorted(compiled, key=VALID.index)
    assert rows_of(out)[CASE.problem, VALID[5]][1].status == "compile_failed"
    check_complete(out, [CASE])


def test_a_case_ends_when_the_last_of_its_configs_cannot_be_compiled(out, monkeypatch):
    monkeypatch.setattr(campaign, "CHECK_SECONDS", 0.01)
    first = ReplayRunner()
    run([CASE], out.with_name("order"), first)
    late = first.asked("scan")[:10]  # those that are told last
    pool = LatePool(dict.fromkeys(late, "PTXASError: internal"), at_a_time=len(VALID) - 10)
    assert run([CASE], out, pool=pool).complete
    check_complete(out, [CASE])


def test_confirming_what_an_earlier_run_scanned_waits_for_the_compiler(out, monkeypatch):
    monkeypatch.setattr(campaign, "CHECK_SECONDS", 0.01)
    best = best_of(CASE)
    run([CASE], out, ReplayRunner(confirm_faults=interrupting([best])))
    assert set(load(out).measurements["timing_pass"]) == {1}
    runner = ReplayRunner()
    assert run([CASE], out, runner, pool=LatePool({best: "PTXASError: internal"}, at_a_time=7)).complete
    assert runner.asked("scan") == []
    passes = rows_of(out)[CASE.problem, best]
    assert [passes[p].status for p in (1, 2, 3)] == ["ok", "compile_failed", "compile_failed"]
    assert len(set(runner.asked("confirm"))) >= LEADING_LEAST - 1
    assert run([CASE], out, again := ReplayRunner()).complete
    assert again.calls == []


def test_confirming_passes_alternate_and_each_round_is_shuffled(out):
    runner = ReplayRunner()
    run([CASE], out, runner)
    turns = runner.asked("confirm")
    leading = set(turns)
    assert runner.calls[-len(turns) :] == [("confirm", config) for config in turns]  # after the scan
    rounds = [turns[i : i + len(leading)] for i in range(0, len(turns), len(leading))]
    assert len(rounds) == 2 * ROUNDS
    assert all(set(one) == leading for one in rounds)
    assert len(set(map(tuple, rounds))) == len(rounds)
    # Samples count up: those of pass 2 lie between those of pass 3.
    position = {config: [i for i, turn in enumerate(turns) if turn == config] for config in leading}
    assert all(min(p[1::2]) < max(p[::2]) for p in position.values())


def test_a_config_that_fails_while_confirming_gets_two_failed_rows_and_is_not_run_again(out):
    best = min(VALID, key=lambda config: FAMILY.time_us(CASE.problem, config, timing_pass=1) or 1e9)
    runner = ReplayRunner(confirm_faults={best: LaunchFailedError("invalid argument")})
    run([CASE], out, runner)
    passes = rows_of(out)[CASE.problem, best]
    assert [passes[p].status for p in (1, 2, 3)] == ["ok", "launch_failed", "launch_failed"]
    assert runner.asked("confirm").count(best) == 1
    again = ReplayRunner()
    assert run([CASE], out, again).complete
    assert again.calls == []


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


def ticking():
    """A clock that moves a second each time it is asked."""
    ticks = itertools.count()
    return lambda: float(next(ticks))


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


def interrupting(configs):
    """Faults that press Ctrl-C, which reaches the parent alone, at any of these configs; they are never over."""

    class Faults(dict):
        def __getitem__(self, config):
            os.kill(os.getpid(), signal.SIGINT)
            threading.Event().wait()

    return Faults.fromkeys(configs)


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


def best_of(case):
    return min(VALID, key=lambda config: FAMILY.time_us(case.problem, config, timing_pass=1) or 1e9)


ENDS = [DeviceLostError("illegal memory access"), EndOfProcess(-signal.SIGSEGV)]


@pytest.mark.parametrize("end", ENDS, ids=["illegal memory access", "segfault"])
def test_a_config_that_ends_its_process_in_the_scan_is_a_row_and_the_run_goes_on(out, end):
    config = VALID[40]
    runner = ReplayRunner({config: end})
    assert run([CASE], out, runner).complete
    row = rows_of(out)[CASE.problem, config][1]
    assert (row.status, row.error) == ("launch_failed", told(end))
    assert sorted(map(str, runner.asked("scan"))) == sorted(map(str, VALID))  # each once
    assert len(runner.asked("prepare")) == 2  # the new process makes its inputs anew
    check_complete(out, [CASE])


def test_a_config_that_ends_its_process_on_several_cases_is_not_run_on_the_others(out):
    config = VALID[40]
    runner = ReplayRunner({config: DeviceLostError("illegal memory access")})
    assert run(CASES, out, runner).complete
    assert runner.asked("scan").count(config) == FATAL_CASES
    errors = [rows_of(out)[case.problem, config][1].error for case in CASES]
    others = "not run, as it ended its process on 2 other problems: illegal memory access"
    assert errors == ["illegal memory access"] * FATAL_CASES + [others] * (len(CASES) - FATAL_CASES)
    assert {rows_of(out)[case.problem, config][1].status for case in CASES} == {"launch_failed"}
    check_complete(out)


class PerRowsFamily(FakeFamily):
    """Has a binary for each number of rows."""

    def binary_key(self, config, problem):
        return config, problem["rows"]


def test_a_config_that_ends_its_process_is_still_run_where_it_has_another_binary(out):
    config = VALID[40]
    runner = ReplayRunner({config: DeviceLostError("illegal memory access")})
    cases = fake_cases(models=3, tokens=(64, 512))[:12]
    assert run(cases, out, runner, families={"fake": PerRowsFamily()}).complete
    assert runner.asked("scan").count(config) == FATAL_CASES * 2
    ran = [case.problem["rows"] for case in cases if "not run" not in rows_of(out)[case.problem, config][1].error]
    assert ran == [64] * FATAL_CASES + [512] * FATAL_CASES


def test_what_did_not_compile_is_taken_to_fail_only_where_it_is_the_same_binary(out):
    config, families = VALID[3], {"fake": PerRowsFamily()}
    run(CASES[:1], out, pool=ReplayPool({config: "PTXASError: internal"}), families=families)
    run(CASES, out, pool=(pool := ReplayPool()), families=families)
    told = {case.problem["rows"]: rows_of(out)[case.problem, config][1].status for case in CASES}
    assert (told[64], told[512]) == ("compile_failed", "ok")
    assert {problem["rows"] for problem in (case.problem for case in CASES)} == {64, 512}
    assert pool.asked.count(config) == 2  # of 512 rows


def test_problems_of_a_family_that_the_run_does_not_have_are_refused(out):
    other = replace(CASE, problem=replace(CASE.problem, family="another"))
    with pytest.raises(ForetuneError, match="there are problems of another; collected is fake"):
        run([CASE, other], out)


def test_a_case_ends_with_a_config_that_is_not_run(out):
    order = ReplayRunner()
    run(CASES, out.with_name("order"), order)
    last = order.asked("scan")[-1]
    assert last == order.asked("scan")[len(VALID) - 1]
    assert run(CASES, out, ReplayRunner({last: DeviceLostError("illegal memory access")})).complete
    check_complete(out)


def told(end):
    return str(end) if isinstance(end, DeviceLostError) else "the measuring process ended with exit code -11"


@pytest.mark.parametrize("end", ENDS, ids=["illegal memory access", "segfault"])
def test_a_config_that_ends_its_process_while_confirming_is_not_met_again(out, end):
    best = best_of(CASE)
    runner = ReplayRunner(confirm_faults={best: end})
    assert run([CASE], out, runner).complete
    passes = rows_of(out)[CASE.problem, best]
    assert [passes[p].status for p in (1, 2, 3)] == ["ok", "launch_failed", "launch_failed"]
    assert passes[3].error == told(end)
    turns = runner.asked("confirm")
    again = turns[turns.index(best) + 1 :]  # all turns of the others, once more
    assert len(again) == 2 * ROUNDS * len(set(again))
    assert best not in again
    check_complete(out, [CASE])
    assert run([CASE], out, second := ReplayRunner()).complete
    assert second.calls == []


class KilledTimes:
    """A fault that strikes a config so many times: the system kills the process."""

    def __init__(self, config, times):
        self.config, self.left = config, times

    def __contains__(self, config):
        if config == self.config and self.left:
            self.left -= 1
            return True
        return False

    def __getitem__(self, config):
        return EndOfProcess(-signal.SIGKILL)


def test_a_process_that_the_system_kills_costs_nothing(out):
    run([CASE], out.with_name("undisturbed"))
    runner = ReplayRunner(KilledTimes(VALID[40], TRIES - 1), KilledTimes(best_of(CASE), TRIES - 1))
    assert run([CASE], out, runner).complete
    assert outcomes_of(out) == outcomes_of(out.with_name("undisturbed"))


def test_a_config_at_which_processes_are_killed_again_and_again_is_a_row(out):
    config = VALID[40]
    runner = ReplayRunner(KilledTimes(config, 100))
    assert run([CASE], out, runner).complete
    row = rows_of(out)[CASE.problem, config][1]
    assert (row.status, row.error) == ("launch_failed", "the measuring process ended with exit code -9")
    assert runner.asked("scan").count(config) == TRIES
    check_complete(out, [CASE])


def off_the_bus(problem):
    raise DeviceLostError("it fell off the bus")


def test_a_gpu_that_is_broken_is_given_up_and_the_others_measure_all(out):
    broken = ReplayRunner(prepare=off_the_bus)
    other = ReplayRunner(prepare=lambda problem: until(lambda: len(broken.asked("prepare")) == LOSSES))
    summary = run(CASES, out, broken, other)
    assert len(broken.asked("prepare")) == LOSSES
    assert summary.skipped == ("GPU 0: it fell off the bus",)
    assert (summary.cases, summary.complete) == (len(CASES), True)
    check_complete(out)


def test_when_no_gpu_is_left_the_run_says_what_was_the_matter_and_what_is_kept(out):
    prepare = ReplayRunner(prepare=lambda problem: problem == CASES[0].problem or off_the_bus(problem))
    with pytest.raises(DeviceLostError, match=r"no GPU is left.*off the bus\. .* kept in .*measured: run the same com"):
        run(CASES, out, prepare)
    ran = {problem for problem, passes in ((key[0], row) for key, row in rows_of(out).items()) if passes[1].samples}
    assert ran == {CASES[0].problem}
    assert run(CASES, out).complete
    check_complete(out)


def test_a_problem_whose_inputs_end_the_process_is_given_up_and_the_gpu_is_not(out):
    runner = ReplayRunner(prepare=lambda problem: problem != CASES[1].problem or off_the_bus(problem))
    summary = run(CASES, out, runner)
    assert summary.skipped == (f"{CASES[1].problem}: it fell off the bus",)
    assert (summary.cases, summary.complete) == (3, False)
    assert runner.asked("prepare").count(CASES[1].problem) == 2 * TRIES  # at the end once more: was it the GPU?


def test_a_case_on_which_every_config_ends_its_process_is_given_up(out):
    runner = ReplayRunner(dict.fromkeys(SPACE, DeviceLostError("illegal memory access")))
    summary = run([CASE], out, runner)
    assert summary.skipped == (f"{CASE.problem}: illegal memory access",)
    assert len(runner.asked("scan")) == len(set(runner.asked("scan"))) == 2 * DEATHS
    rows = load(out).measurements
    assert (rows["status"] == "launch_failed").sum() == 2 * DEATHS


def test_a_gpu_that_cannot_be_opened_is_given_up(out, monkeypatch):
    def broken(self):
        raise RuntimeError("no CUDA today")

    monkeypatch.setattr(ReplayGpu, "open", broken)
    with pytest.raises(DeviceLostError, match="RuntimeError: no CUDA today"):
        run(CASES, out)


def test_the_rows_are_the_same_whatever_the_number_of_gpus(out):
    barrier = threading.Barrier(3)
    runners = [ReplayRunner(prepare=meeting(barrier)) for _ in range(3)]
    assert run(CASES, out, *runners).complete
    assert run(CASES, out.with_name("one")).complete
    assert outcomes_of(out) == outcomes_of(out.with_name("one"))
    prepared = [runner.asked("prepare") for runner in runners]
    assert all(prepared)  # each has done something
    assert sorted(map(str, itertools.chain(*prepared))) == sorted(str(case.problem) for case in CASES)


def test_each_kind_of_card_measures_every_case(out):
    small = replace(DEVICE, name="small", sm_count=64)
    gpus = [ReplayGpu(ReplayRunner(), DEVICE), ReplayGpu(ReplayRunner(), small), ReplayGpu(ReplayRunner(), small)]
    summary = run(CASES, out, phases=[gpus])
    assert (summary.cases, summary.complete) == (2 * len(CASES), True)
    dataset = load(out)
    assert {spec.name for spec in dataset.devices} == {DEVICE.name, "small"}
    per_device = dataset.measurements.groupby(["device", "problem"]).size()
    assert len(per_device) == 2 * len(CASES)
    assert run(CASES, out, phases=[gpus]).measurements == 0


class PartRunner(ReplayRunner):
    """One of a part of a card: notes whether another part is at work."""

    at_work: ClassVar = []

    def __init__(self, sms):
        super().__init__(seconds=1e-4)
        self.sms = sms

    def scan(self, config, best_us):
        self.at_work.append(self.sms)
        return super().scan(config, best_us)


def parts_of_cards(*sizes, cards=1):
    return [[ReplayGpu(PartRunner(sms), DEVICE.with_sms(sms)) for _ in range(cards)] for sms in sizes]


def test_parts_of_cards_are_measured_one_after_the_other_each_as_a_device(out):
    PartRunner.at_work.clear()
    summary = run(CASES, out, phases=parts_of_cards(32, 64, cards=2))
    assert (summary.cases, summary.complete, summary.gpus) == (2 * len(CASES), True, 2)
    assert 0 < summary.gpu_busy_share <= 1
    assert PartRunner.at_work == sorted(PartRunner.at_work)  # never both at once
    dataset = load(out)
    assert set(dataset.devices) == {DEVICE.with_sms(32), DEVICE.with_sms(64)}
    rows = dataset.measurements
    assert rows[rows["timing_pass"] == 1].groupby("device").size().to_dict() == dict.fromkeys(
        ["NVIDIA H200 (32 SMs)", "NVIDIA H200 (64 SMs)"], len(CASES) * len(SPACE)
    )
    again = run(CASES, out, phases=parts_of_cards(64, 96))
    assert (again.cases, again.complete, again.measurements) == (2 * len(CASES), True, summary.measurements / 2)


def test_a_size_that_the_driver_rounds_to_another_is_that_one(out):
    twice = [*parts_of_cards(64), *parts_of_cards(64)]
    summary = run(CASES, out, phases=twice)
    assert (summary.cases, summary.complete) == (len(CASES), True)
    assert twice[1][0].runner.calls == []


def test_parts_that_the_budget_does_not_get_to_are_left_to_the_next_run(out):
    now, events = [0.0], []
    first = ReplayRunner(prepare=lambda problem: now.__setitem__(0, now[0] + 1))
    phases = [[ReplayGpu(first, DEVICE.with_sms(32))], *parts_of_cards(64)]
    summary = run(CASES, out, phases=phases, budget_s=2.5, clock=lambda: now[0], on_progress=events.append)
    assert (summary.cases, summary.complete) == (2, False)
    assert {event.total for event in events} == {2 * len(CASES)}
    assert phases[1][0].runner.calls == []
    assert run(CASES, out, phases=parts_of_cards(32, 64)).complete


def test_several_families_share_a_run_and_each_has_its_sources_noted(out):
    other = OtherFamily()
    cases = [*CASES[:2], *(replace(case, problem=replace(case.problem, family="other")) for case in CASES[:2])]
    assert run(cases, out, families={**FAMILIES, "other": other}).complete
    dataset = load(out)
    assert dataset.families == ("fake", "other")
    assert [(dataset.rows(name)["timing_pass"] == 1).sum() for name in dataset.families] == [2 * len(SPACE)] * 2
    noted = {run_id: (run["family"], run["kernel_source"]) for run_id, run in dataset.provenance["runs"].items()}
    assert sorted(noted.values()) == [("fake", "fake-source"), ("other", "other-source")]
    of_row = dataset.measurements["run_id"].map(lambda run_id: noted[run_id][0])
    of_problem = dataset.measurements["problem"].map(lambda problem: dataset.cases[problem].problem.family)
    assert (of_row == of_problem).all()


class OtherFamily(FakeFamily):
    name = "other"

    def source_hash(self):
        return "other-source"


def test_where_measurements_come_from_is_found_out_before_a_gpu_has_work(out, monkeypatch):
    events = []
    monkeypatch.setattr(provenance, "_first_gpu", lambda: events.append("nvidia-smi") or {})

    class Noted(FakeFamily):
        def source_hash(self):
            events.append("source hash")
            return super().source_hash()

    run(CASES[:1], out, ReplayRunner(prepare=events.append), families={FAMILY.name: Noted()})
    assert set(events[: events.index(CASES[0].problem)]) == {"source hash", "nvidia-smi"}


class HoggedRunner(ReplayRunner):
    """Another process takes half of the GPU while one problem is measured."""

    def probe(self, family, problem, config):
        self.calls.append(("probe", (problem, config)))
        return super().probe(family, problem, config) * (2 if self.problem == CASES[2].problem else 1)


def test_a_gpu_that_something_else_uses_shows_in_the_drift_probe_and_flags_the_case(out, monkeypatch):
    monkeypatch.setattr(worker, "PROBE_SECONDS", 0.0)
    runner = HoggedRunner()
    summary = run(CASES, out, runner)
    # And the case before: who knows when it began?
    assert summary.drifted == {str(case.problem): 2.0 for case in CASES[1:3]}
    dataset = load(out)
    assert dataset.drifted() == dict.fromkeys(CASES[1:3], 2.0)
    assert dataset.describe()["drifted"] == summary.drifted
    assert set(dataset.drift["problem"]) == set(range(len(CASES)))
    assert set(dataset.drift["run_id"]) == set(dataset.measurements["run_id"])
    assert len(dataset.drift) > 3 * len(CASES)  # also while a case is measured
    assert dataset.drift["at_s"].is_monotonic_increasing
    ((problem, config),) = set(runner.asked("probe"))
    assert problem in [case.problem for case in CASES]
    assert config == FAMILY.default(problem, DEVICE)


def test_a_probe_that_fails_is_done_without(out):
    class Failing(ReplayRunner):
        def probe(self, family, problem, config):
            self.calls.append(("probe", problem))
            raise LaunchFailedError("out of memory")

    runner = Failing()
    assert run(CASES, out, runner).complete
    assert len(runner.asked("probe")) == len(CASES)
    assert load(out).drift.empty
    assert load(out).drifted() == {}


def test_a_probe_that_ends_the_process_is_not_met_again(out):
    class Ending(ReplayRunner):
        def probe(self, family, problem, config):
            self.calls.append(("probe", problem))
            raise DeviceLostError("illegal memory access")

    runner = Ending()
    assert run(CASES[:2], out, runner).complete
    assert len(runner.asked("probe")) == 2
    check_complete(out, CASES[:2])


def test_no_more_tasks_are_out_than_a_pipe_holds(out):
    """A parent that waits for a full pipe would serve no other GPU."""
    import pickle

    from foretune.collect.worker import Scan

    space = KernelConfig.of(**{f"SOME_LONG_KNOB_{i}": 1024 for i in range(12)}, maxnreg=128)
    assert len(pickle.dumps([Scan(replace(space, num_warps=i)) for i in range(WINDOW)])) < 1 << 16


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


def test_the_stores_rounding_does_not_change_which_configs_lead():
    times = [100.0 + i * 1e-6 for i in range(200)]  # one float32 or another, in an order of their own
    configs = [KernelConfig.of(BLOCK_M=i) for i in range(200)]
    run_now, resumed = Outcomes(), Outcomes()
    for config, time_us in zip(configs, times, strict=True):
        run_now.add(config, 1, time_us)
    for config, time_us in reversed(list(zip(configs, times, strict=True))):
        resumed.add(config, 1, float(np.float32(time_us)))
    assert run_now.leading() == resumed.leading()
    assert run_now.best_us == resumed.best_us


def test_a_time_that_only_rounding_makes_near_leads_now_as_it_does_later():
    best = next(float(us) for us in range(100, 200) if float(np.float32(us * LEADING_SLOWDOWN)) < us * LEADING_SLOWDOWN)
    over = best * LEADING_SLOWDOWN * (1 + 1e-12)
    known = Outcomes()
    for i in range(LEADING_LEAST):
        known.add(KernelConfig.of(BLOCK_M=i), 1, best)
    known.add(KernelConfig.of(BLOCK_N=0), 1, over)
    assert len(known.leading()) == LEADING_LEAST + 1


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


def test_an_existing_dataset_is_refused_without_resume(out):
    run([CASE], out)
    before = len(load(out).measurements)
    with pytest.raises(ForetuneError, match="measured already holds a dataset; resume it, or choose another"):
        collect_on_gpus([FAMILY], [CASE], out, resume=False)
    assert len(load(out).measurements) == before


def test_collecting_takes_all_visible_gpus_or_as_many_as_wanted(out, monkeypatch):
    """With processes of its own: those that measure, and those that compile."""
    opened = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(campaign, "CudaGpu", lambda index, sms: opened.append((index, sms)) or FaultyGpu(seconds=0.002))
    summary = collect_on_gpus([CompiledFamily()], CASES[:3], out, compilers=1)
    assert (summary.gpus, summary.complete, opened) == (3, True, [(0, None), (1, None), (2, None)])
    assert summary.compile_s > 0
    check_complete(out, CASES[:3])
    assert collect_on_gpus([CompiledFamily()], CASES, out, gpus=1, compilers=1).gpus == 1
    for wanted in (0, 4):
        with pytest.raises(ForetuneError, match=f"gpus must be between 1 and 3, .* but got {wanted}"):
            collect_on_gpus([FAMILY], CASES, out, gpus=wanted)
    opened.clear()
    monkeypatch.setattr(DeviceSpec, "live", lambda index: DEVICE)
    assert collect_on_gpus([CompiledFamily()], CASES[:3], out, gpus=2, sms=[32, 64], compilers=1).complete
    assert opened == [(0, 32), (1, 32), (0, 64), (1, 64)]


def test_going_on_with_another_kernel_is_refused(out, monkeypatch):
    run([CASE], out)
    monkeypatch.setattr(type(FAMILY), "source_hash", lambda self: "changed")
    with pytest.raises(ForetuneError, match=r"other sources of fake \(fake-source; they are changed now\)"):
        run([CASE], out)


def test_another_devices_measurements_are_not_taken_for_this_ones(out):
    run([CASE], out)
    assert set(earlier(out, FAMILIES).outcomes) == {(DEVICE.name, CASE.problem)}
    other = ReplayRunner()
    assert run([CASE], out, phases=[[ReplayGpu(other, replace(DEVICE, name="another"))]]).complete
    assert len(other.asked("scan")) == len(VALID)
