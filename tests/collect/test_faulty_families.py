"""What is wrong with a family costs the rows it concerns, each of which says so, and never the run."""

from __future__ import annotations

import pytest
import torch
from fakes import FakeFamily, FakeTimer
from foretune.collect import runner as runners
from foretune.collect.compiling import signature_of
from foretune.collect.plan import Exhaustive, Sparse
from foretune.datasets import ForetuneWarning
from foretune.runtime.timing import timer
from fuzz import families as faulty
from replay import CASES, DEVICE, SPACE, VALID, rows_of, run

ODD = VALID[3]


class Theirs(FakeFamily):
    """Fails at one config."""

    def supports(self, config, problem, device):
        if config == ODD:
            raise RuntimeError("no")
        return super().supports(config, problem, device)


class Unkeyed(FakeFamily):
    def binary_key(self, config, problem):
        if config == ODD:
            raise SystemExit(3)
        return super().binary_key(config, problem)


@pytest.mark.parametrize(
    ("family", "status", "error"),
    [
        (Theirs(), "invalid", "family fake: supports() raised RuntimeError: no"),
        (Unkeyed(), "compile_failed", "family fake: binary_key() raised SystemExit: 3"),
    ],
)
@pytest.mark.parametrize("plan", ["exhaustive", "thin"])
def test_a_fault_at_a_config_is_its_row(family, status, error, plan, tmp_path):
    options = {"share": 1.0} if plan == "thin" else {}
    summary = run(CASES[:2], tmp_path / "out", families={"fake": family}, plan=plan, **options)
    assert summary.skipped == ()
    rows = rows_of(tmp_path / "out")
    for case in CASES[:2]:
        row = rows[case.problem, ODD][1]
        assert (row.status, row.error) == (status, error)
    healthy = {at for at, passes in rows.items() if passes[1].status in ("ok", "hopeless")}
    assert healthy == {(case.problem, config) for case in CASES[:2] for config in VALID if config != ODD} - {
        at for at, passes in rows.items() if passes[1].status == "launch_failed"
    }


def test_a_run_goes_on_where_a_family_failed(tmp_path):
    for _ in range(2):  # the second has nothing to do
        summary = run(CASES[:1], tmp_path / "out", families={"fake": Unkeyed()})
    assert (summary.measurements, summary.skipped) == (0, ())


def test_a_problem_whose_space_cannot_be_had_is_skipped_and_the_others_are_measured(tmp_path):
    class Late(FakeFamily):
        def estimate_us(self, problem, device, configs):
            if problem == CASES[0].problem:
                raise RuntimeError("not this one")
            return super().estimate_us(problem, device, configs)

    family = Late()
    assert Sparse(family, DEVICE, share=0.1).next(CASES[1:2], None)[0].configs
    summary = run(CASES[:2], tmp_path / "out", families={"fake": family}, plan="thin", share=0.1)
    (skipped,) = summary.skipped
    assert skipped.startswith(f"{CASES[0].problem}: family fake: estimate_us() raised RuntimeError: not this one")
    assert {problem for problem, _ in rows_of(tmp_path / "out")} == {CASES[1].problem}


def test_the_whole_space_is_measured_in_its_order_where_it_cannot_be_ranked():
    class Unranked(FakeFamily):
        def estimate_us(self, problem, device, configs):
            return [-1.0] * len(configs)

    (step,) = Exhaustive(Unranked(), DEVICE).next(CASES[:1], None)
    with pytest.warns(ForetuneWarning, match=r"estimate_us\(\) must return a time .* in the order of its space"):
        assert step.configs == SPACE


def test_problems_are_of_one_kind_where_the_family_cannot_say():
    class Failing(FakeFamily):
        def binary_key(self, config, problem):
            raise RuntimeError("no")

    assert signature_of(Failing(), CASES[0].problem, DEVICE) == ("fake", None)


@pytest.mark.parametrize(("result", "shown"), [(None, "None"), (torch.ones(1), r"a tensor of shape (1,)")])
def test_a_result_of_another_shape_is_no_right_one(result, shown, monkeypatch):
    """A tensor of one element would be broadcast, and equal all of the reference."""

    class Short(faulty.Sound):
        def launch(self, inputs, config):
            return result

    monkeypatch.setattr(runners, "_device_answers", lambda: True)
    monkeypatch.setattr(timer, "Timer", FakeTimer)
    runner = runners.GpuRunner(DEVICE)
    runner.prepare(Short(), CASES[0].problem)
    outcome = runner.scan(VALID[0], float("inf"))
    assert outcome.status == "launch_failed"
    told = f"launch() must return a tensor of shape (4,), as reference() but returned {shown}"
    assert outcome.error == f"FamilyError: family fake: {told}"
