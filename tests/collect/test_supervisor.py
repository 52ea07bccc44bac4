"""Processes that end cost at most the config they ended at; and GPUs that are broken."""

from __future__ import annotations

import pickle
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fakes import DEVICE, FakeFamily, fake_cases
from foretune.collect import supervisor
from foretune.collect.case_tasks import DEATHS, FATAL_CASES, TRIES, CaseTasks
from foretune.collect.cases import CaseState
from foretune.collect.runner import DeviceLostError, Trial
from foretune.collect.supervisor import LOSSES, WINDOW, Limits, Supervisor
from foretune.collect.worker import Scan
from foretune.datasets import KernelConfig, load
from replay import (
    CASE,
    CASES,
    FAMILY,
    SPACE,
    VALID,
    EndOfProcess,
    ReplayGpu,
    ReplayPool,
    best_of,
    check_complete,
    confirming_rounds,
    outcomes_of,
    rows_of,
    run,
)
from replay_runner import ReplayRunner
from waiting import until

pytestmark = pytest.mark.usefixtures("triton")


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
    others = "not run because it ended its process on 2 other problems: illegal memory access"
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
    asked = runner.asked("confirm")
    again = asked[asked.index(best) + 1 :]  # all rounds of the others, once more
    assert len(again) == 2 * confirming_rounds(CASE.problem) * len(set(again))
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


def test_no_more_tasks_are_out_than_a_pipe_holds(out):
    """A parent that waits for a full pipe would serve no other GPU."""
    space = KernelConfig.of(**{f"SOME_LONG_KNOB_{i}": 1024 for i in range(12)}, maxnreg=128)
    assert len(pickle.dumps([Scan(replace(space, num_stages=i)) for i in range(WINDOW)])) < 1 << 16


class Silent:
    """A child that is sent tasks and says nothing, and a watch over it."""

    def send(self, tasks):
        pass

    def add(self, child, on_message, on_end):
        self.say = on_message

    def kill(self, child):
        self.killed = True


def test_a_process_that_says_nothing_for_longer_than_its_task_may_take_is_killed(monkeypatch):
    now, told = [0.0], []
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: now[0]))
    limits = Limits(open_s=100.0, prepare_s=10.0, task_s=1.0)

    def silent_for(seconds, *messages, work=True):
        """Whether it is killed when it has said nothing for so long after these messages."""
        child = Silent()
        child.killed = False
        owner = SimpleNamespace(idle=told.append, done=None, read=None, retired=None)
        one = Supervisor(lambda: child, child, owner, limits)
        for message in messages:
            child.say(message)
            if message is DEVICE and work:
                one.give(CaseTasks(FAMILY, CASE, DEVICE, VALID[:5], CaseState(), ReplayPool(), lambda rows: None))
        now[0] += seconds
        one.check()
        return child.killed

    ready, prepared = DEVICE, Trial(seconds=0.1)
    assert [silent_for(seconds) for seconds in (99.0, 101.0)] == [False, True]  # it opens its GPU
    assert [silent_for(seconds, ready) for seconds in (9.0, 11.0)] == [False, True]  # it makes inputs
    assert [silent_for(seconds, ready, prepared) for seconds in (0.9, 1.1)] == [False, True]  # it runs a config
    assert not silent_for(1e6, ready, work=False)  # it has nothing to do
