"""The baselines that stand for what others do, each with the contract and what is its own."""

from __future__ import annotations

import numpy as np
from fakes import FakeFamily, fake_dataset
from foretune.model.baselines import RegimeRanker, StaticRanker, intensity
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
        known = np.array([intensity(FAMILY, case.problem) for case in GRID.cases])
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
            assert intensity(FAMILY, case.problem) == intensity(FAMILY, host)

    def test_problems_that_are_all_alike_are_one_regime(self):
        ranker = RegimeRanker().fit(GRID.select([0, 0, 0]), FAMILY)
        assert len(ranker.lists_) == 1

    def test_a_family_that_says_no_work_goes_by_its_dimensions(self):
        small, large = (toy_grid().cases[row].problem for row in (0, 23))
        assert intensity(ToyFamily(), small) < intensity(ToyFamily(), large)
