"""Which launch is repeated through a run, and what its times say."""

from __future__ import annotations

import numpy as np
import pytest
from fakes import DEVICE, FakeFamily, fake_cases
from foretune.collect import worker
from foretune.collect.runner import DeviceLostError, LaunchFailedError
from foretune.collect.worker import PROBE_US, choose_probe
from foretune.datasets import load, roofline_us
from replay import CASES, FAMILIES, FAMILY, check_complete, run
from replay_runner import ReplayRunner

MANY = fake_cases()
pytestmark = pytest.mark.usefixtures("triton")


def test_it_is_a_launch_of_middling_length_of_a_config_that_runs():
    chosen = choose_probe(FAMILIES, MANY, DEVICE)
    family = FAMILIES["fake"]
    assert chosen.config == family.default(chosen.problem, DEVICE)
    assert family.supports(chosen.config, chosen.problem, DEVICE) is None
    times = {case.problem: roofline_us(family, case.problem, DEVICE) for case in MANY}
    assert abs(times[chosen.problem] - PROBE_US) == np.abs(np.array([*times.values()]) - PROBE_US).min()


def test_it_does_not_depend_on_the_order_of_the_cases():
    assert choose_probe(FAMILIES, MANY[::-1], DEVICE) == choose_probe(FAMILIES, MANY, DEVICE)


def test_there_is_none_where_no_default_runs_and_where_there_is_no_case():
    class Unsupporting(FakeFamily):
        def supports(self, config, problem, device):
            return "no"

    assert choose_probe({"fake": Unsupporting()}, MANY, DEVICE) is None
    assert choose_probe(FAMILIES, (), DEVICE) is None


class HoggedRunner(ReplayRunner):
    """Another process takes half of the GPU while one problem is measured."""

    def probe(self, family, problem, config):
        self.calls.append(("probe", (problem, config)))
        return super().probe(family, problem, config) * (2 if self.times.problem == CASES[2].problem else 1)


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
