"""Plans: what they ask for is supported, new, promising, and the same whoever asks; and what little is enough."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from fakes import DEVICE, FakeFamily, fake_dataset
from foretune.collect.plan import PLANS, Adaptive, Exhaustive, _unlike, named
from foretune.collect.replay import PlannedRanker, chosen, only, replay_plan
from foretune.datasets import Case, ForetuneError, Problem
from foretune.model import EstimateRanker, LightGBMRanker, RandomRanker, Ranker

FAMILY = FakeFamily()
DATASET = fake_dataset()
GRID = DATASET.grid("fake")
QUICK = partial(LightGBMRanker, trees=60)
FEW = partial(Adaptive, share=0.15, first=8, ranker=QUICK)


def supported(case):
    return {config for config in FAMILY.space(DEVICE) if FAMILY.supports(config, case.problem, DEVICE) is None}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_asks_for_every_case_once_and_for_configs_of_the_space_alone(name):
    made, todo, asked = named(name)(FAMILY, DEVICE), list(GRID.cases), []
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
    sizes = [one.problem["n"] for one in _unlike(cases, [], 4)]
    assert sizes == [64, 4096, 1, 2]  # the middle, the ends, and what is then furthest as a ratio
    assert [one.problem["n"] for one in _unlike(cases, [case(1), case(4096)], 1)] == [70]
    assert _unlike(cases, [], 99) != cases
    assert sorted(one.problem["n"] for one in _unlike(cases, [], 99)) == [1, 2, 60, 64, 70, 4000, 4096]
    assert len(_unlike([case(5)] * 3, [case(5)], 2)) == 2


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"share": 0.0}, "share must be between 0.001 and 1.0 but got 0.0"),
        ({"explored": 1.5}, "explored must be between 0.0 and 1.0 but got 1.5"),
        ({"first": 0}, "first must be between 1 and"),
        ({"seed": -1}, "seed must be between 0 and"),
    ],
)
def test_what_makes_no_sense_is_refused_by_value(options, named):
    with pytest.raises(ForetuneError, match=named):
        Adaptive(FAMILY, DEVICE, **options)


def test_an_unknown_plan_is_refused_with_the_known_ones():
    with pytest.raises(ForetuneError, match="plan must be one of exhaustive, adaptive but is 'greedy'"):
        named("greedy")


def test_only_a_plan_that_trains_needs_lightgbm(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightgbm", None)  # as where it is not installed
    assert named("exhaustive") is Exhaustive
    with pytest.raises(ForetuneError, match="the adaptive plan trains as it measures, and needs lightgbm"):
        named("adaptive")


def test_a_replayed_plan_sees_only_what_it_asked_for():
    class Watching(Backwards):
        def fit(self, grid, family):
            seen.append(grid)
            return super().fit(grid, family)

    seen = []
    cells = chosen(GRID, FAMILY, partial(Adaptive, share=0.15, first=8, ranker=Watching))
    for grid in seen:
        there = np.ix_([GRID.cases.index(case) for case in grid.cases], [*map(GRID.configs.index, grid.configs)])
        asked = cells[there] & np.isfinite(GRID.times_us[there])
        np.testing.assert_array_equal(np.isfinite(grid.first_us), asked)
        np.testing.assert_array_equal(grid.second_us[asked], GRID.second_us[there][asked])
    ranker = PlannedRanker(FEW, Backwards).fit(GRID, FAMILY)
    np.testing.assert_array_equal(
        np.isfinite(ranker.ranker_.grid_.times_us), ranker.cells_ & np.isfinite(GRID.times_us)
    )


def test_each_device_has_a_plan_of_its_own_that_starts_from_what_is_known_of_those_before():
    part = DEVICE.with_sms(64)
    two = replace(
        GRID,
        cases=(*GRID.cases[:8], *GRID.cases[:9]),
        devices=(part,) * 8 + (DEVICE,) * 9,
        first_us=GRID.first_us[[*range(8), *range(9)]],
        second_us=GRID.second_us[[*range(8), *range(9)]],
    )
    plans = []

    def make(family, device, *, prior):
        plans.append((device, prior))
        return Exhaustive(family, device, prior=prior)

    cells = chosen(two, FAMILY, make, Backwards)
    assert cells[:, [config in supported(GRID.cases[0]) for config in GRID.configs]].all()
    (first, roofline), (second, learned) = plans
    assert (first, second) == (DEVICE, part)
    assert isinstance(roofline, EstimateRanker)
    assert learned.grid_.devices == (DEVICE,) * 9


def test_problems_of_which_nothing_is_left_are_left_out():
    cells = np.zeros(GRID.first_us.shape, bool)
    cells[[3, 5], :10] = True
    assert only(GRID, cells).cases == (GRID.cases[3], GRID.cases[5])
    assert only(GRID, cells, [5]).cases == (GRID.cases[5],)


@pytest.fixture(scope="module")
def few():
    """The replay of a plan that tries 15 % of the configs."""
    return replay_plan(DATASET, FAMILY, FEW, ranker=QUICK)


def test_a_share_of_the_measurements_is_nearly_as_good_as_all(few):
    report = json.loads(json.dumps(few.to_json()))
    assert report["planned"]["configs"] == pytest.approx(0.15, abs=0.02)
    assert report["planned"]["measurements"] == pytest.approx(0.15, abs=0.02)
    for k in ("2", "4", "8"):
        regret = {who: report[who]["regret"][k]["geomean"] for who in ("everything", "planned")}
        assert regret["planned"] < few.planned.to_json()["baselines"]["random"][k]["geomean"]
        assert regret["planned"] - 1 < 2 * (regret["everything"] - 1) + 0.02


class AtRandom(Adaptive):
    """Takes any configs."""

    def __init__(self, family, device, *, prior, **options):
        super().__init__(family, device, prior=RandomRanker(), ranker=RandomRanker, **options)


def test_the_plan_beats_as_many_configs_drawn_at_random(few):
    at_random = replay_plan(DATASET, FAMILY, partial(AtRandom, share=0.15, first=8, explored=0.0), ranker=QUICK)
    drawn = at_random.to_json()["planned"]
    assert drawn["configs"] == pytest.approx(few.configs, abs=0.01)
    planned = few.to_json()["planned"]
    # With four and more choices both are within 2 % of the best, and seeds differ by as much as they do.
    assert planned["regret"]["2"]["geomean"] < drawn["regret"]["2"]["geomean"]


def test_a_plan_that_tries_everything_loses_nothing():
    all_of_it = replay_plan(DATASET, FAMILY, Exhaustive, ranker=QUICK).to_json()
    assert all_of_it["planned"]["configs"] == pytest.approx(1.0, abs=0.02)
    assert all_of_it["everything"]["regret"] == all_of_it["planned"]["regret"]
    for regrets in all_of_it["ratio"].values():
        assert all(one == {"geomean": 1.0, "ci95": [1.0, 1.0]} for one in regrets.values())


def test_a_grid_with_holes_trains_like_one_without_where_nothing_is_missing():
    cut = only(GRID, np.random.default_rng(0).random(GRID.first_us.shape) < 0.3)
    ranker = QUICK().fit(cut, FAMILY)
    scores = ranker.predict(FAMILY, GRID.cases[0].problem, DEVICE, GRID.configs)
    assert np.isfinite(scores).all()
    measured = GRID.slowdowns[0]
    fast = np.nanmedian(measured[np.argsort(scores)[:20]])
    assert fast < np.nanmedian(measured[np.argsort(scores)[-20:]]) / 2
