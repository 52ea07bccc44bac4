"""Collecting by the adaptive plan: what is tried is what it asks for, wherever a run is cut, on any number of GPUs."""

from __future__ import annotations

import itertools
import threading
from functools import partial
from types import SimpleNamespace as Toy

import pytest
from fakes import DEVICE, FakeFamily, fake_cases
from foretune.collect import plan, row_writer
from foretune.collect.campaign import AHEAD
from foretune.collect.plan import Adaptive, Step
from foretune.collect.run_state import CaseQueue
from foretune.datasets import Case, Problem, load
from foretune.model import LightGBMRanker
from replay import ReplayPool, meeting, outcomes_of, rows_of, run
from replay_runner import ReplayRunner

FAMILY = FakeFamily()
SPACE = FAMILY.space()
CASES = fake_cases()[:14]
FIRST = 4
FEW = partial(Adaptive, share=0.15, first=FIRST, ranker=partial(LightGBMRanker, trees=30, epochs=0))


def replace_plan_and_origin(patch):
    told = {"family": FAMILY.name, "kernel_source": FAMILY.source_hash()}
    patch.setitem(plan.PLANS, "adaptive", FEW)
    patch.setattr(row_writer, "run_provenance", lambda family, device: told)


@pytest.fixture(autouse=True)
def few(monkeypatch):
    replace_plan_and_origin(monkeypatch)


adaptively = partial(run, CASES, plan="adaptive")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        replace_plan_and_origin(patch)
        out = tmp_path_factory.mktemp("undisturbed") / "measured"
        runner = ReplayRunner()
        assert adaptively(out, runner).complete
        return Toy(outcomes=outcomes_of(out), prepared=runner.asked("prepare"), out=out)


def test_each_batch_is_chosen_by_what_the_batches_before_it_showed(undisturbed):
    dataset = load(undisturbed.out)
    grid, tried = dataset.grid("fake"), {}
    for problem, config in rows_of(undisturbed.out):
        tried.setdefault(problem, set()).add(config)
    todo, measured, order = list(CASES), [], []
    while steps := FEW(FAMILY, DEVICE).next(todo, grid.select(measured) if measured else None):
        for step in steps:
            assert set(step.configs) == tried[step.case.problem]
            todo.remove(step.case)
        order += [step.case.problem for step in steps]
        measured = [row for row, case in enumerate(grid.cases) if case not in todo]
    assert undisturbed.prepared == order
    assert len(tried) == len(CASES)


def test_what_was_tried_is_a_share_and_the_leading_ones_are_confirmed(undisturbed):
    found = rows_of(undisturbed.out)
    valid = sum(FAMILY.supports(config, CASES[0].problem, DEVICE) is None for config in SPACE)
    for case in CASES:
        passes = [rows for (problem, _), rows in found.items() if problem == case.problem]
        assert len(passes) == round(0.15 * valid)
        assert sum(set(rows) == {1, 2, 3} for rows in passes) >= 20


def test_the_plan_is_noted(undisturbed, out):
    (facts,) = load(undisturbed.out).provenance["runs"].values()
    assert facts["plan"] == "adaptive"
    assert load(undisturbed.out).describe()["families"]["fake"]["plans"] == ["adaptive"]
    summary = adaptively(out, budget_s=0.0, clock=itertools.count().__next__)
    assert (summary.plan, summary.measurements) == ("adaptive", 0)


def test_another_share_is_tried_and_noted(out):
    assert run(CASES[:2], out, plan="thin", share=0.3).complete
    (facts,) = load(out).provenance["runs"].values()
    assert (facts["plan"], facts["share"]) == ("thin", 0.3)
    for case in CASES[:2]:
        valid = sum(FAMILY.supports(config, case.problem, DEVICE) is None for config in SPACE)
        assert sum(problem == case.problem for problem, _ in rows_of(out)) == round(0.3 * valid)


def test_the_same_is_tried_whatever_the_number_of_gpus(undisturbed, out):
    at_work = []
    barrier = threading.Barrier(3)
    runners = [ReplayRunner(prepare=meeting(barrier, at_work.append)) for _ in range(3)]
    assert adaptively(out, *runners).complete
    assert outcomes_of(out) == undisturbed.outcomes
    assert all(runner.asked("prepare") for runner in runners)
    for first, last in ((0, 4), (4, 8), (8, 14)):  # nobody is ahead of a batch
        assert set(at_work[first:last]) == set(undisturbed.prepared[first:last])


@pytest.mark.parametrize("budget_s", [1, *(pytest.param(s, marks=pytest.mark.slow) for s in (60, 150, 250, 300, 400))])
def test_a_run_that_was_cut_goes_on_as_if_it_had_not_been(undisturbed, out, budget_s):
    ticks = itertools.count()
    cut = adaptively(out, budget_s=budget_s, clock=lambda: float(next(ticks)))
    assert not cut.complete
    assert adaptively(out).complete
    assert outcomes_of(out) == undisturbed.outcomes
    assert adaptively(out, again := ReplayRunner()).complete
    assert again.calls == []


def test_an_exhaustive_run_completes_what_an_adaptive_one_left(undisturbed, out):
    adaptively(out)
    assert run(CASES, out).complete
    assert load(out).plans("fake") == {"adaptive", "exhaustive"}
    found = rows_of(out)
    assert set(found) == {(case.problem, config) for case in CASES for config in SPACE}
    for case in CASES:
        scanned = {config: found[case.problem, config][1].time_us for config in SPACE}
        ran = sorted((us, config) for config, us in scanned.items() if us == us)
        leading = [config for us, config in ran[:20]]
        assert all(set(found[case.problem, config]) == {1, 2, 3} for config in leading)
    assert (
        undisturbed.outcomes.items()
        <= {key: outcome for key, outcome in outcomes_of(out).items() if key in undisturbed.outcomes}.items()
    )
    again = ReplayRunner()
    assert adaptively(out, again).complete
    assert {name for name, _ in again.calls} <= {"prepare"}


class NotingPool(ReplayPool):
    """Notes what is compiled ahead of the GPUs."""

    def __init__(self, *, is_hungry):
        super().__init__()
        self.is_hungry, self.ahead = is_hungry, set()

    def request(self, binary, rank):
        if rank >= AHEAD:
            self.ahead.add((binary.problem, binary.config))
        return super().request(binary, rank)


@pytest.mark.parametrize("is_hungry", [True, False])
def test_only_what_the_plan_asks_for_is_compiled_ahead_and_only_by_a_pool_with_nothing_to_do(
    undisturbed, out, is_hungry
):
    pool = NotingPool(is_hungry=is_hungry)
    assert adaptively(out, ReplayRunner(seconds=1e-4), pool=pool).complete
    tried = {(problem.without_sizes(), config) for problem, config, _ in undisturbed.outcomes}
    assert pool.ahead <= tried
    assert bool(pool.ahead) == is_hungry


class Singly:
    """A plan of batches of one case."""

    learns = True

    def next(self, todo, measured):
        asked.append((todo[0].problem.family, measured))
        return [Step(todo[0], lambda: ())]


asked: list[tuple[str, object]] = []


def test_while_one_familys_batch_is_measured_the_others_are_handed_out():
    asked.clear()
    cases = {name: [Case(Problem.of(name, n=n), ("random",), "uniform") for n in (1, 2)] for name in ("a", "b")}
    queue = CaseQueue(
        [*cases["a"], *cases["b"]],
        dict.fromkeys("ab", Singly()),
        lambda family, todo: (len(todo), cases[family][0]),
        lambda case: 1.0,
        lambda case: case.problem.signature,
    )
    assert [queue.take().case for _ in "ab"] == [cases["a"][0], cases["b"][0]]
    assert queue.take() is None
    queue.over(cases["b"][0])
    assert queue.take().case == cases["b"][1]
    assert queue.take() is None
    queue.again(cases["a"][0])  # not over yet: no next batch
    assert queue.take().case == cases["a"][0]
    assert queue.take() is None
    queue.over(cases["a"][0])
    assert queue.take().case == cases["a"][1]
    assert [family for family, _ in asked] == ["a", "b", "b", "a"]
