"""A case: each config gets its rows, once; what is compiled is scanned, and what leads confirmed."""

from __future__ import annotations

import numpy as np
import pytest
from fakes import DEVICE
from foretune.collect import campaign
from foretune.collect.case_tasks import MOST_ROUNDS, ROUNDS
from foretune.collect.cases import LEADING_LEAST
from foretune.collect.runner import LaunchFailedError, Trial
from foretune.datasets import Status, load
from replay import (
    CASE,
    CASES,
    FAMILY,
    SPACE,
    VALID,
    ReplayPool,
    best_of,
    check_complete,
    confirming_rounds,
    interrupting,
    rows_of,
    run,
)
from replay_runner import ReplayRunner

pytestmark = pytest.mark.usefixtures("triton")


def test_every_config_of_every_case_is_scanned_and_the_leading_ones_confirmed(out):
    summary = run(CASES, out)
    found = check_complete(out)
    assert (summary.cases, summary.complete, summary.skipped) == (4, True, ())
    assert summary.measurements == sum(map(len, found.values())) == sum(summary.statuses.values())
    assert summary.statuses == load(out).describe()["families"]["fake"]["statuses"]
    problem, confirming = next((problem, passes) for (problem, _), passes in found.items() if 3 in passes)
    assert (confirming[2].samples, confirming[2].status) == (2 * confirming_rounds(problem), "ok")
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
            wrong: Trial(Status.WRONG_RESULT, error="relative error 0.3"),
            resources: Trial(Status.OUT_OF_RESOURCES, error="shared memory"),
            hopeless: Trial(Status.EARLY_STOPPED, 1e5, 0.0, 1),
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


def test_the_configs_ranked_best_are_scanned_first(out):
    runner = ReplayRunner()
    run([CASE], out, runner)
    estimates = FAMILY.estimate_us(CASE.problem, DEVICE, runner.asked("scan"))
    assert (np.diff(estimates) >= 0).all()


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
    asked = runner.asked("confirm")
    leading = set(asked)
    assert runner.calls[-len(asked) :] == [("confirm", config) for config in asked]  # after the scan
    rounds = [asked[i : i + len(leading)] for i in range(0, len(asked), len(leading))]
    assert len(rounds) == 2 * confirming_rounds(CASE.problem)
    assert all(set(one) == leading for one in rounds)
    states = [runner.clean[i : i + len(leading)] for i in range(0, len(asked), len(leading))]
    assert [set(one) for one in states] == [{False}, {False}, {True}, {True}] * (confirming_rounds(CASE.problem) // 2)
    assert len(set(map(tuple, rounds))) == len(rounds)
    # Samples count up: those of pass 2 lie between those of pass 3.
    position = {config: [i for i, one in enumerate(asked) if one == config] for config in leading}
    assert all(min(p[1::2]) < max(p[::2]) for p in position.values())


def test_short_kernels_are_confirmed_in_more_rounds(out):
    short = VALID[0]
    runner = ReplayRunner(outcomes={short: Trial(Status.OK, 2.5, 0.0, 7)})
    run([CASE], out, runner)
    assert runner.asked("confirm").count(short) == 2 * MOST_ROUNDS > 2 * ROUNDS


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
