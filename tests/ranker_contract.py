"""What every `Ranker` keeps to. A test class inherits `RankerContract` and says how to make one."""

from __future__ import annotations

import numpy as np
import pytest
from fakes import DEVICE, FakeFamily, fake_dataset
from foretune.datasets import ForetuneError
from foretune.datasets.grid import Grid
from foretune.model import Ranker

FAMILY = FakeFamily()
DATASET = fake_dataset()
GRID: Grid = DATASET.grid("fake")


class RankerContract:
    def make(self) -> Ranker:
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def fitted(cls):
        return cls().make().fit(GRID, FAMILY)

    def scores(self, ranker, configs=GRID.configs, case=GRID.cases[0]):
        return ranker.predict(FAMILY, case.problem, DEVICE, configs)

    def test_fit_returns_itself(self):
        ranker = self.make()
        assert ranker.fit(GRID.select(range(8)), FAMILY) is ranker

    def test_one_finite_positive_float_per_config(self, fitted):
        for case in GRID.cases[::5]:
            for problem in (case.problem, case.problem.without_sizes()):
                scores = fitted.predict(FAMILY, problem, DEVICE, GRID.configs)
                assert scores.shape == (len(GRID.configs),)
                assert scores.dtype == np.float64
                assert np.isfinite(scores).all()
                assert (scores > 0).all()

    def test_same_call_same_scores(self, fitted):
        assert (self.scores(fitted) == self.scores(fitted)).all()

    def test_same_training_same_scores(self, fitted):
        assert (self.scores(fitted) == self.scores(self.make().fit(GRID, FAMILY))).all()

    def test_a_score_does_not_depend_on_the_other_configs(self, fitted):
        order = np.random.default_rng(0).permutation(len(GRID.configs))[:50]
        alone = self.scores(fitted, [GRID.configs[i] for i in order])
        assert (alone == self.scores(fitted)[order]).all()

    def test_takes_no_config_and_one_config(self, fitted):
        assert self.scores(fitted, ()).shape == (0,)
        assert self.scores(fitted, GRID.configs[:1]).shape == (1,)

    def test_takes_a_config_it_has_never_seen(self):
        ranker = self.make().fit(self._without(GRID.configs[7]), FAMILY)
        assert np.isfinite(self.scores(ranker)).all()

    def _without(self, config):
        keep = [i for i, other in enumerate(GRID.configs) if other != config]
        configs = tuple(GRID.configs[i] for i in keep)
        return Grid(GRID.family, GRID.cases, GRID.devices, configs, GRID.first_us[:, keep], GRID.second_us[:, keep])

    def test_parameters_make_the_same_ranker(self):
        ranker = self.make()
        assert type(ranker)(**ranker.get_params()).get_params() == ranker.get_params()

    def test_says_so_when_not_fitted(self):
        ranker = self.make()
        if ranker.learns:
            with pytest.raises(ForetuneError, match="call fit first"):
                self.scores(ranker)
