"""Plans: what they ask for is supported, new, promising, and the same whoever asks."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from fakes import DEVICE, FakeFamily, fake_dataset
from foretune.collect.plan import PLANS, Adaptive, Exhaustive, Sparse, _dissimilar, named
from foretune.collect.replay import chosen
from foretune.datasets import Case, ForetuneError, Problem
from foretune.model import EstimateRanker, LightGBMRanker, Ranker

FAMILY = FakeFamily()
DATASET = fake_dataset()
GRID = DATASET.grid("fake")
QUICK = partial(LightGBMRanker, trees=60, epochs=0)
FEW = partial(Adaptive, share=0.15, first=8, ranker=QUICK)


def supported(case):
    return {config for config in FAMILY.space(DEVICE) if FAMILY.supports(config, case.problem, DEVICE) is None}


@pytest.mark.parametrize("name", [name for name in PLANS if name != "outdated"])  # which asks for few: test_missing.py
def test_a_plan_asks_for_every_case_once_and_for_configs_of_the_space_alone(name):
    rows = DATASET.measurements
    known = replace(DATASET, measurements=rows[rows["config"] % 2 == 0]) if name == "missing" else None
    made, todo, asked = named(name, known)(FAMILY, DEVICE), list(GRID.cases), []
    measured = None
    while steps := made.next(todo, measured):
        for step in steps:
            todo.remove(step.case)  # raises for a case that is not to do
            asked.append(step.case)
            assert 0 < len(step.configs) == len(set(step.configs))
            assert set(step.configs) <= set(FAMILY.space(DEVICE))
        measured = GRID.select([GRID.cases.index(case) for case in asked])
    assert not todo
    assert made.next([], None) == made.next([], GRID) == []


def test_the_exhaustive_plan_asks_for_everything_at_once_the_analytically_fastest_first():
    steps = Exhaustive(FAMILY, DEVICE).next(GRID.cases, None)
    assert [step.case for step in steps] == list(GRID.cases)
    for step in steps:
        assert set(step.configs) == set(FAMILY.space(DEVICE))
        estimates = EstimateRanker().predict(FAMILY, step.case.problem, DEVICE, step.configs)
        assert (np.diff(estimates) >= 0).all()


@pytest.mark.parametrize("share", [0.05, 0.2, 1.0])
def test_the_adaptive_plan_tries_its_share(share):
    for measured in (None, GRID):
        for step in Adaptive(FAMILY, DEVICE, share=share, ranker=QUICK).next(GRID.cases[:3], measured):
            assert len(step.configs) == round(share * len(supported(step.case)))
            assert set(step.configs) <= supported(step.case)


def test_the_thin_plan_asks_for_all_cases_in_their_order_and_for_the_priors_first_and_others():
    prior = Backwards().fit(GRID, FAMILY)
    steps = Sparse(FAMILY, DEVICE, share=0.4, prior=prior).next(GRID.cases, None)
    assert [step.case for step in steps] == list(GRID.cases)
    firsts = 0
    for step in steps:
        space = FAMILY.space(DEVICE)
        able = sorted(supported(step.case), key=space.index, reverse=True)  # as Backwards ranks them
        tried = round(0.4 * len(able))
        assert len(step.configs) == tried
        first = tried - int(0.5 * tried)
        assert set(able[:first]) <= set(step.configs)
        firsts += set(step.configs) == set(able[:tried])
    assert firsts < len(steps)  # the others are drawn


def test_the_thin_plan_also_asks_for_the_familys_usual_configs():
    class WithUsual(FakeFamily):
        def usual(self, problem, device):
            return self.space(device)[::7]

    for steps in zip(
        *(Sparse(one, DEVICE, share=0.1).next(GRID.cases, None) for one in (FAMILY, WithUsual())), strict=True
    ):
        few, more = (set(step.configs) for step in steps)
        assert more == few | (set(FAMILY.space(DEVICE)[::7]) & supported(steps[0].case))
        assert len(steps[1].configs) == len(more)


def test_a_problem_that_no_config_can_run_gets_rows_that_say_why():
    class Unsupporting(FakeFamily):
        def supports(self, config, problem, device):
            return "no"

    (step,) = Adaptive(Unsupporting(), DEVICE).next(GRID.cases[:1], None)
    assert step.configs == FAMILY.space(DEVICE)


def test_at_least_one_config_is_tried():
    (step,) = Adaptive(FAMILY, DEVICE, share=0.001).next(GRID.cases[:1], None)
    assert len(step.configs) == 1


class Backwards(Ranker):
    """Finds the configs of the last places in the space the most promising ones."""

    def fit(self, grid, family):
        self.grid_ = grid
        return self

    def predict(self, family, problem, device, configs):
        space = family.space(device)
        return np.array([float(len(space) - space.index(config)) for config in configs])


def test_what_the_ranker_finds_promising_is_tried_and_others_are_drawn():
    space = FAMILY.space(DEVICE)
    drawn = []
    for case in GRID.cases[:6]:
        (step,) = Adaptive(FAMILY, DEVICE, share=0.2, explored=0.5, first=4, ranker=Backwards).next([case], GRID)
        places = [space.index(config) for config in step.configs]
        assert places == sorted(places, reverse=True)  # the most promising first
        ranked = sorted((space.index(config) for config in supported(case)), reverse=True)
        half = len(places) - int(0.5 * len(places))
        assert places[:half] == ranked[:half]
        drawn.append(tuple(places[half:]))
        assert drawn[-1] != tuple(ranked[half : len(places)])
        assert np.mean(drawn[-1]) > np.mean(ranked[half:])  # the promising more often
    assert len({*drawn}) == 6  # others for each problem
    (step,) = Adaptive(FAMILY, DEVICE, share=0.2, explored=0.0, first=4, ranker=Backwards).next([case], GRID)
    assert [space.index(config) for config in step.configs] == ranked[: len(step.configs)]


def test_batches_double_and_the_ranker_is_trained_once_for_each():
    fitted = []

    class Counting(Backwards):
        def fit(self, grid, family):
            fitted.append(len(grid))
            return super().fit(grid, family)

    asked = chosen(GRID, FAMILY, partial(Adaptive, first=6, ranker=Counting))
    assert asked.any(axis=1).all()
    assert len(GRID) == 39
    assert fitted == [6, 12, 24]


def told(steps):
    return [(step.case, step.configs) for step in steps]


def test_who_asks_again_is_told_the_same_and_the_order_of_measuring_does_not_matter():
    for measured, todo in ((None, GRID.cases), (GRID.select(range(10)), GRID.cases[10:])):
        steps = FEW(FAMILY, DEVICE).next(todo, measured)
        assert told(steps) == told(FEW(FAMILY, DEVICE).next(todo, measured))
        for step in steps:  # one asked for alone is asked the same
            assert told(FEW(FAMILY, DEVICE).next([step.case], measured)) == told([step])
        if measured is not None:
            mixed = measured.select(np.random.default_rng(0).permutation(len(measured)))
            turned = {"first_us": mixed.first_us[:, ::-1], "second_us": mixed.second_us[:, ::-1]}
            mixed = replace(mixed, configs=mixed.configs[::-1], **turned)
            assert told(steps) == told(FEW(FAMILY, DEVICE).next(todo, mixed))
        others = FEW(FAMILY, DEVICE, seed=1).next(todo, measured)
        assert [step.case for step in others] == [step.case for step in steps]
        assert all(one.configs != other.configs for one, other in zip(steps, others, strict=True))


def test_the_problems_that_are_least_like_the_known_ones_come_first():
    def case(n):
        return Case(Problem.of("f", m=8, n=n), ("random",), "uniform")

    cases = [case(n) for n in (1, 2, 60, 64, 70, 4000, 4096)]
    sizes = [one.problem["n"] for one in _dissimilar(cases, [], 4)]
    assert sizes == [64, 4096, 1, 2]  # the middle, the ends, and what is then furthest as a ratio
    assert [one.problem["n"] for one in _dissimilar(cases, [case(1), case(4096)], 1)] == [70]
    assert _dissimilar(cases, [], 99) != cases
    assert sorted(one.problem["n"] for one in _dissimilar(cases, [], 99)) == [1, 2, 60, 64, 70, 4000, 4096]
    assert len(_dissimilar([case(5)] * 3, [case(5)], 2)) == 2


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"share": 0.0}, "share must be between 0.001 and 1.0 but got 0.0"),
        ({"explored": 1.5}, "explored must be between 0.0 and 1.0 but got 1.5"),
        ({"first": 0}, "first must be an integer between 1 and"),
        ({"seed": -1}, "seed must be an integer between 0 and"),
    ],
)
def test_what_makes_no_sense_is_refused_by_value(options, named):
    with pytest.raises(ForetuneError, match=named):
        Adaptive(FAMILY, DEVICE, **options)


def test_an_unknown_plan_is_refused_with_the_known_ones():
    with pytest.raises(
        ForetuneError, match="must be one of exhaustive, adaptive, thin, missing, outdated but is 'greedy'"
    ):
        named("greedy")


def test_a_share_is_of_a_plan_that_tries_one():
    for name in ("adaptive", "thin"):
        (step,) = named(name, share=0.4)(FAMILY, DEVICE).next(GRID.cases[:1], None)
        assert len(step.configs) == round(0.4 * len(supported(step.case)))
        with pytest.raises(ForetuneError, match=r"share must be between 0\.001 and 1\.0 but got 1\.5"):
            named(name, share=1.5)
    for name in ("exhaustive", "missing", "outdated"):
        with pytest.raises(ForetuneError, match=f"share is only for the plans adaptive and thin, but plan is {name}$"):
            named(name, share=0.4)


def test_only_a_plan_that_trains_needs_lightgbm(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightgbm", None)  # as where it is not installed
    assert named("exhaustive") is Exhaustive
    with pytest.raises(ForetuneError, match="the adaptive plan trains a ranker, which needs lightgbm"):
        named("adaptive")
