"""Replays: what a plan is worth on data that were measured exhaustively; and what little is enough."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from fakes import DEVICE, FakeFamily, fake_dataset
from foretune.collect.plan import Adaptive, Exhaustive
from foretune.collect.replay import PlannedRanker, chosen, of_space, only, replay_plan
from foretune.datasets import KernelConfig
from foretune.model import EstimateRanker, LightGBMRanker, RandomRanker, Ranker
from rich.console import Console

FAMILY = FakeFamily()
DATASET = fake_dataset()
GRID = DATASET.grid("fake")
QUICK = partial(LightGBMRanker, trees=60, epochs=0)
FEW = partial(Adaptive, share=0.15, first=8, ranker=QUICK)


class FirstComesFirst(Ranker):
    """Finds the configs of the first places in the space the fastest; remembers what it was trained on."""

    def fit(self, grid, family):
        self.grid_ = grid
        return self

    def predict(self, family, problem, device, configs):
        space = family.space(device)
        return np.array([float(space.index(config)) for config in configs])


def test_a_replayed_plan_sees_only_what_it_asked_for():
    class Watching(FirstComesFirst):
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
    ranker = PlannedRanker(FEW, FirstComesFirst).fit(GRID, FAMILY)
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

    cells = chosen(two, FAMILY, make, FirstComesFirst)
    problem = GRID.cases[0].problem
    supported = {config for config in FAMILY.space(DEVICE) if FAMILY.supports(config, problem, DEVICE) is None}
    assert cells[:, [config in supported for config in GRID.configs]].all()
    (first, estimate), (second, learned) = plans
    assert (first, second) == (DEVICE, part)
    assert isinstance(estimate, EstimateRanker)
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


class Later(FakeFamily):
    """The fake family after its kernel got one more knob."""

    knobs = (*FakeFamily.knobs, "SPLIT")
    default_knobs = {"SPLIT": 1}

    def space(self, device=None):
        return tuple(KernelConfig.of(**config.to_json(), SPLIT=1) for config in super().space(device))


def test_the_shares_count_configs_that_lack_a_knob_which_was_added_later():
    shares = [replay_plan(DATASET, family, Exhaustive, ranker=RandomRanker) for family in (FAMILY, Later())]
    assert [one.configs for one in shares] == [pytest.approx(1.0, abs=0.02)] * 2
    assert shares[0].measurements == shares[1].measurements > 0.9


def test_a_grid_with_holes_trains_like_one_without_where_nothing_is_missing():
    cut = only(GRID, np.random.default_rng(0).random(GRID.first_us.shape) < 0.3)
    ranker = QUICK().fit(cut, FAMILY)
    scores = ranker.predict(FAMILY, GRID.cases[0].problem, DEVICE, GRID.configs)
    assert np.isfinite(scores).all()
    measured = GRID.slowdowns[0]
    fast = np.nanmedian(measured[np.argsort(scores)[:20]])
    assert fast < np.nanmedian(measured[np.argsort(scores)[-20:]]) / 2


def test_a_replay_shows_its_table(few):
    console = Console(file=io.StringIO(), width=200)
    console.print(few)
    told, shown = few.to_json(), console.file.getvalue()
    assert f"fake: % slower than the best config, over {told['problems']} problems (noise " in shown
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in shown.splitlines() if "│" in line]
    labels = [row[0] for row in rows]
    assert labels[0].startswith("everything: 100.0 % of the configs, 100.0 % of the measurements")
    assert labels[2].startswith("the plan: ")
    assert labels[1] == labels[3] == labels[6] == "sizes unknown"
    assert (labels[4], labels[5], labels[7]) == ("the plan loses", "95 % interval", "95 % interval")
    for place, key in ((0, "everything"), (2, "planned")):
        assert rows[place][1:] == [f"{100 * (one['geomean'] - 1):.1f}" for one in told[key]["regret"].values()]
    low, high = told["ratio"]["regret"]["1"]["ci95"]
    assert rows[5][1] == f"{100 * (low - 1):.1f}..{100 * (high - 1):.1f}"


def test_configs_that_the_space_has_lost_are_left_out():
    class Smaller(FakeFamily):
        def space(self, device=None):
            return super().space(device)[::2]

    space = set(Smaller().space())
    grid = of_space(DATASET, Smaller()).grid("fake")
    assert set(grid.configs) == space & set(GRID.configs) < set(GRID.configs)
    assert set(replay_plan(DATASET, Smaller(), Exhaustive, ranker=RandomRanker).everything.grid.configs) <= space
    assert of_space(DATASET, FAMILY).grid("fake").configs == GRID.configs
