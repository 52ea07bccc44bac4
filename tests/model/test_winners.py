"""Rankers that also learn from winners: what they learn, keep, and leave in a bundle."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from fakes import FakeFamily, fake_dataset
from foretune.datasets import DeviceSpec, Problem
from foretune.model import LightGBMRanker, geomean, load_bundle
from foretune.model.calibration.cross_fit import TREES, _smaller
from foretune.model.testing import ToyFamily, toy_grid
from foretune.model.train import Winner, WinnerRanker, train_bundle, winner_rows

FAMILY = ToyFamily()
PARAMS = {"trees": 40, "epochs": 0, "leaves": 15}
#: A card without measurements.
OTHER = replace(DeviceSpec.named("h200"), name="other", sm_count=40)


def scores(ranker, problem, device=OTHER):
    return ranker.predict(FAMILY, problem, device, FAMILY.space())


@pytest.fixture(scope="module")
def plain():
    return LightGBMRanker(**PARAMS).fit(toy_grid(), FAMILY)


#: Larger problems than any that was measured.
LARGE = [Problem.of(FAMILY.name, columns=30_000 + 1000 * more, rows=512, dtype="bf16") for more in range(24)]


def won_by(config):
    """The winners of the large problems, all the same config."""
    return {FAMILY.name: tuple(Winner(problem, OTHER, config, FAMILY.space()) for problem in LARGE)}


def slowest(ranker):
    """The config that a ranker puts last on a large problem."""
    return FAMILY.space()[int(scores(ranker, LARGE[0]).argmax())]


def test_without_winners_it_is_the_plain_ranker(plain):
    ranker = WinnerRanker({"another": ()}, **PARAMS).fit(toy_grid(), FAMILY)
    problem = toy_grid().cases[0].problem
    assert scores(ranker, problem).tolist() == scores(plain, problem).tolist()


def test_a_config_that_won_gets_a_better_place(plain):
    won = slowest(plain)
    ranker = WinnerRanker(won_by(won), **PARAMS).fit(toy_grid(), FAMILY)
    column = FAMILY.space().index(won)
    for problem in LARGE:
        before, after = ((one < one[column]).sum() for one in (scores(plain, problem), scores(ranker, problem)))
        assert after < before / 2


def test_the_order_of_what_was_measured_is_kept(plain):
    grid = toy_grid()
    ranker = WinnerRanker(won_by(slowest(plain)), **PARAMS).fit(grid, FAMILY)
    column_of = {config: column for column, config in enumerate(grid.configs)}
    lost = []
    for row, case in enumerate(grid.cases):
        ran = [config for config in FAMILY.space() if np.isfinite(grid.slowdowns[row, column_of[config]])]
        chosen = ran[int(ranker.predict(FAMILY, case.problem, grid.devices[row], ran).argmin())]
        lost.append(grid.slowdowns[row, column_of[chosen]])
    assert geomean(np.array(lost)) < 1.02


def test_rows_have_the_winner_and_other_configs_of_its_space():
    problem, space = LARGE[0], FAMILY.space()
    winners = [Winner(problem, OTHER, config, space) for config in (space[0], space[-1])]
    winners.append(Winner(problem, OTHER, space[1], space[:3]))
    rows = winner_rows(winners, FAMILY, seed=0)
    assert rows.query_sizes.tolist() == [min(33, len(space)), min(33, len(space)), 3]
    starts = np.cumsum(rows.query_sizes) - rows.query_sizes
    assert np.flatnonzero(rows.log_slowdown == 0).tolist() == starts.tolist()
    table = FAMILY.features(problem, OTHER, space)
    assert rows.features[starts].tolist() == table[[0, len(space) - 1, 1]].tolist()
    assert sorted(rows.features[-3:].tolist()) == sorted(table[:3].tolist())
    again = winner_rows(winners, FAMILY, seed=0)
    assert again.features.tolist() == rows.features.tolist()


def test_calibration_trains_a_smaller_ranker_with_the_same_winners():
    winners = won_by(FAMILY.space()[0])
    ranker = WinnerRanker(winners, trees=450, epochs=0)
    smaller = _smaller(ranker)
    assert (smaller.trees, smaller.winners_, ranker.trees) == (TREES, winners, 450)


def test_a_bundle_records_how_many_winners_there_were(tmp_path):
    family = FakeFamily()
    dataset = fake_dataset()
    space = family.space()
    problem = dataset.cases[0].problem
    winners = {family.name: [Winner(problem, OTHER, space[1], space)]}
    trained = train_bundle(dataset, {family.name: family}, partial(WinnerRanker, winners, **PARAMS))
    trained.save(tmp_path / "bundle")
    read = load_bundle(tmp_path / "bundle")
    assert read.trained[family.name].origin["winners"] == 1
    assert read.ranker(family.name).get_params() == LightGBMRanker(**PARAMS).get_params()
    ours, theirs = (one.ranker(family.name).predict(family, problem, OTHER, space).tolist() for one in (trained, read))
    assert ours == theirs
    plain = train_bundle(dataset, {family.name: family}, partial(LightGBMRanker, **PARAMS))
    assert "winners" not in plain.trained[family.name].origin
