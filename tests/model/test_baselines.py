"""The baselines that stand for what others do, each with the contract and what is its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fakes import FakeFamily, fake_dataset
from foretune.datasets import DeviceSpec, ForetuneError
from foretune.model.baselines import CKTileRanker, FlagTuneRanker, RegimeRanker, StaticRanker
from foretune.model.baselines import by_regime as regimes
from foretune.model.baselines.peer_table import all_rows
from foretune.model.testing import RankerContract, ToyFamily, toy_grid

FAMILY, GRID = FakeFamily(), fake_dataset().grid("fake")


def first_choices(ranker, grid, family):
    """The place in the grid of what a ranker puts first on each problem."""
    views = zip(grid.cases, grid.devices, strict=True)
    return [int(ranker.predict(family, case.problem, device, grid.configs).argmin()) for case, device in views]


class TestRegimes(RankerContract):
    def make(self):
        return RegimeRanker()

    def test_each_regime_has_the_list_of_its_own_problems(self):
        known = np.array([regimes.intensity(FAMILY, case.problem) for case in GRID.cases])
        ranker = RegimeRanker(regimes=2, size=4).fit(GRID, FAMILY)
        chosen = np.array(first_choices(ranker, GRID, FAMILY))
        high = known >= ranker.edges_[0]
        assert 0.3 < high.mean() < 0.7
        for part in (high, ~high):
            alone = StaticRanker(4).fit(GRID.select(np.flatnonzero(part)), FAMILY)
            assert chosen[part].tolist() == first_choices(alone, GRID.select(np.flatnonzero(part)), FAMILY)
        assert len(set(chosen)) == 2

    def test_what_the_host_does_not_know_decides_nothing(self):
        for case in GRID.cases:
            host = case.problem.without_sizes()
            assert regimes.intensity(FAMILY, case.problem) == regimes.intensity(FAMILY, host)

    def test_problems_that_are_all_alike_are_one_regime(self):
        ranker = RegimeRanker().fit(GRID.select([0, 0, 0]), FAMILY)
        assert len(ranker.lists_) == 1

    def test_a_family_that_says_no_work_goes_by_its_dimensions(self):
        small, large = (toy_grid().cases[row].problem for row in (0, 23))
        assert regimes.intensity(ToyFamily(), small) < regimes.intensity(ToyFamily(), large)


class TestCKTile(RankerContract):
    def make(self):
        return CKTileRanker(trees=40, leaves=15)

    def test_it_predicts_throughput(self, fitted):
        """1 / (1 + TFLOP/s), of families that say no operations in launches of 1 TFLOP."""
        grid = self.grid()
        logs = -np.log([self.scores(fitted, case=case) for case in grid.cases])
        ran = np.isfinite(grid.times_us)
        assert np.corrcoef(logs[ran], np.log1p(1e6 / grid.times_us[ran]))[0, 1] > 0.9


class Likely(FakeFamily):
    """Says what a call of unknown sizes is likely to be, as grouped GEMMs do, so that our own ranker learns from known
    ones alone."""

    def likely(self, problem):
        return ((1.0, GRID.cases[0].problem),)


def test_recipes_that_rank_a_call_as_it_is_learn_it_both_ways():
    ragged = [case.problem.ragged is not None for case in GRID.cases]
    rows = all_rows(GRID, Likely())
    assert rows.query_rows.tolist() == np.repeat(np.arange(len(ragged)), 1 + np.array(ragged)).tolist()
    assert len(rows.query_sizes) == len(GRID.cases) + sum(ragged) > len(GRID.cases)
    ranker = CKTileRanker(trees=2, leaves=4).fit(GRID, Likely())
    assert ranker.booster_.num_trees() == 2


class TestFlagTune(RankerContract):
    def make(self):
        pytest.importorskip("xgboost", reason="the recipe of a project that needs it")
        return FlagTuneRanker(trees=20)

    def test_each_device_and_dtype_has_a_model_and_others_are_answered_by_the_likest(self, fitted):
        grid, h200 = self.grid(), self.grid().devices[0]
        assert set(fitted.models_) == {(h200.name, "bf16"), (h200.name, "fp32")}
        other = replace(DeviceSpec.named("h200"), name="another")
        for case in grid.cases[:4]:
            there, here = (fitted.predict(self.family(), case.problem, on, grid.configs) for on in (other, h200))
            assert (there == here).all()


def test_without_xgboost_the_recipe_says_what_it_needs(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "xgboost", None)
    with pytest.raises(ForetuneError, match="FlagTune's recipe needs xgboost: pip install xgboost"):
        FlagTuneRanker().fit(toy_grid(), ToyFamily())
