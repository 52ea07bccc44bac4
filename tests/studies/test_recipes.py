"""The recipes of other projects, each with the contract and what is its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fakes import FakeFamily, fake_dataset
from foretune.datasets import DeviceSpec, ForetuneError
from foretune.model.testing import RankerContract, ToyFamily, toy_grid
from studies.recipes import CKTileRanker, FlagTuneRanker, all_rows

GRID = fake_dataset().grid("fake")


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

    def plausible(self, problem):
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
