"""Each ranker keeps the contract, and what is its own."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from fakes import DEVICE, FakeFamily, fake_dataset
from foretune.collect.plan import Adaptive, Exhaustive, Prior
from foretune.collect.replay import PlannedRanker
from foretune.datasets import BundleError, Family, ForetuneError, KernelConfig, Problem
from foretune.model import EstimateRanker, LightGBMRanker, NearestRanker, RandomRanker, StaticRanker, top_k_regret
from foretune.model.ranker import trust_in_estimate
from foretune.model.rows import TrainingRows, training_rows
from foretune.model.scoring.training import MOST_ROWS, TreeTraining, dealt
from foretune.model.testing import RankerContract, ToyFamily, toy_grid

FAMILY, GRID = FakeFamily(), fake_dataset().grid("fake")


class OnFakes(RankerContract):
    """The contract on a family that is larger, and harder to learn, than the contract's own."""

    def family(self):
        return FAMILY

    def grid(self):
        return GRID


class TestRandom(OnFakes):
    def make(self):
        return RandomRanker(seed=3)

    def test_another_seed_is_another_order(self, fitted):
        assert not (self.scores(fitted) == self.scores(RandomRanker(seed=4))).any()

    def test_is_uniform(self, fitted):
        scores = self.scores(fitted)
        assert 1.4 < scores.mean() < 1.6
        assert abs(np.corrcoef(scores, np.arange(len(scores)))[0, 1]) < 0.2


class TestStatic(OnFakes):
    def make(self):
        return StaticRanker()

    def test_greedy_choice_by_hand(self):
        # c is never best, but the best single one; a and b are best on one problem each; b adds most to c.
        a, b, c = (KernelConfig.of(BLOCK_M=size) for size in (1, 2, 3))
        times = np.array([[1.0, 9.0, 2.0], [9.0, 1.0, 2.1]])
        grid = type(GRID)("fake", GRID.cases[:2], GRID.devices[:2], (a, b, c), times, times)
        ranker = StaticRanker(size=2).fit(grid, FAMILY)
        assert [config["BLOCK_M"] for config in ranker.order_] == [3, 2, 1]

    def test_a_failing_config_is_not_chosen_first(self):
        times = np.array([[np.nan, 2.0], [1.0, 1.9], [1.0, 2.0]])
        times[0, 1] = 1.0
        slow = np.array([[50.0], [1.9], [2.0]])
        grid_configs = tuple(KernelConfig.of(BLOCK_M=size) for size in (1, 2, 3))
        times = np.hstack([times, slow])
        grid = type(GRID)("fake", GRID.cases[:3], GRID.devices[:3], grid_configs, times, times)
        order = StaticRanker(size=1).fit(grid, FAMILY).order_
        assert min(order, key=order.get)["BLOCK_M"] == 2


class TestNearest(OnFakes):
    def make(self):
        return NearestRanker()

    def test_a_problem_it_knows_gets_its_own_times(self, fitted):
        case, slowdown = GRID.cases[4], GRID.slowdowns[4]
        ran = np.isfinite(slowdown)
        assert (self.scores(fitted, case=case)[ran] == slowdown[ran]).all()

    def test_another_dtype_is_further_than_any_shape(self):
        near = Problem.of("fake", groups=1, rows=8, n=8, k=8, dtype="fp16")
        far = Problem.of("fake", groups=256, rows=1 << 20, n=8192, k=8192)
        cases = tuple(type(GRID.cases[0])(problem, ("random",), "uniform") for problem in (near, far))
        times = np.array([[1.0, 2.0], [2.0, 1.0]])
        ranker = NearestRanker().fit(
            type(GRID)("fake", cases, GRID.devices[:2], GRID.configs[:2], times, times), FAMILY
        )
        asked = Problem.of("fake", groups=1, rows=8, n=8, k=8)
        assert ranker.predict(FAMILY, asked, DEVICE, GRID.configs[:2]).tolist() == [2.0, 1.0]


class TestEstimate(OnFakes):
    def make(self):
        return EstimateRanker()

    def test_is_the_familys_estimate(self, fitted):
        estimate = FAMILY.estimate_us(GRID.cases[0].problem, DEVICE, GRID.configs)
        assert (self.scores(fitted) == estimate).all()


class LightGBMContract(OnFakes):
    objective: str

    def make(self):
        return LightGBMRanker(self.objective, trees=40)

    def test_learns(self, fitted):
        scores = np.stack([self.scores(fitted, case=case) for case in GRID.cases])
        regret = top_k_regret(scores, GRID.first_us, GRID.second_us, k=4)
        assert np.exp(np.log(regret).mean()) < 1.06

    def test_changed_features_mean_retrain(self, fitted):
        class Changed(FakeFamily):
            feature_names = (*FakeFamily.feature_names[:-1], "other")

        with pytest.raises(BundleError, match=r"other, roofline_us.*retrain"):
            fitted.predict(Changed(), GRID.cases[0].problem, DEVICE, GRID.configs)


class TestRegression(LightGBMContract):
    objective = "regression"

    def test_predicts_slowdowns_not_just_an_order(self, fitted):
        scores = np.stack([self.scores(fitted, case=case) for case in GRID.cases])
        ran = np.isfinite(GRID.slowdowns) & (GRID.slowdowns < 2)
        assert abs(np.log(scores[ran] / GRID.slowdowns[ran])).mean() < 0.25


class TestLambdarank(LightGBMContract):
    objective = "lambdarank"


class TestBlend(LightGBMContract):
    objective = "blend"


@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_an_estimate_is_trusted_as_far_as_times_follow_it(share):
    """Where other things decide as well, which the estimate does not know, and less so far from the best."""
    random = np.random.default_rng(0)
    estimates = np.stack([FAMILY.estimate_us(case.problem, DEVICE, GRID.configs) for case in GRID.cases])
    times = estimates**share * random.uniform(1, 1.01, estimates.shape)
    times[3] = np.nan  # a problem on which nothing ran
    trust = trust_in_estimate(replace(GRID, first_us=times, second_us=times), FAMILY)
    assert trust == pytest.approx(share, abs=0.02)
    against = replace(GRID, first_us=1 / times, second_us=1 / times)
    assert trust_in_estimate(against, FAMILY) == pytest.approx(0, abs=0.02)


def test_a_family_without_an_estimate_has_none_to_trust():
    class Without(FakeFamily):
        estimate_us = Family.estimate_us

    assert trust_in_estimate(GRID, Without()) == 0.0


class TestPrior(RankerContract):
    """On a family that the shipped bundle does not know: its estimate."""

    def make(self):
        return Prior()

    def test_is_the_estimate_of_a_family_that_nobody_learned(self, fitted):
        grid = toy_grid()
        estimate = ToyFamily().estimate_us(grid.cases[0].problem, grid.devices[0], grid.configs)
        assert (self.scores(fitted) == estimate).all()


class TestPlanned(RankerContract):
    def make(self):
        return PlannedRanker(_few, _quick)

    def test_learns_from_what_the_plan_would_have_measured(self, fitted):
        assert 0.4 < fitted.cells_.mean() < 0.6
        whole = PlannedRanker(Exhaustive, _quick).fit(self.grid(), self.family())
        everything = _quick().fit(self.grid(), self.family())
        assert (self.scores(whole) == self.scores(everything)).all()
        assert (self.scores(fitted) != self.scores(everything)).any()


_quick = partial(LightGBMRanker, trees=10, epochs=0)
_few = partial(Adaptive, share=0.6, first=8, ranker=_quick)


class TestOnTheToy(RankerContract):
    """What a third party sees who inherits the contract as it is."""

    def make(self):
        return LightGBMRanker(trees=30, epochs=0)

    def test_the_toy_can_be_learned(self, fitted):
        grid = self.grid()
        scores = np.stack([self.scores(fitted, case=case) for case in grid.cases])
        learned, blind = (
            np.log(top_k_regret(ranked, grid.first_us, grid.second_us, k=1)).mean()
            for ranked in (scores, np.random.default_rng(0).random(scores.shape))
        )
        assert learned < blind / 4


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        ({"predict": lambda *_: np.ones(3)}, "test_every_config_has_one_finite_positive_score_with_sizes_and_without"),
        (
            {"predict": lambda *a: np.argsort([str(config) for config in a[-1]]) + 1.0},
            "test_a_score_does_not_depend_on_the_other_configs_nor_on_their_order",
        ),
        ({"predict": lambda *a: np.random.random(len(a[-1]))}, "test_the_same_call_gives_the_same_scores"),  # noqa: NPY002
        ({"fit": lambda *_: None}, "test_fit_returns_the_ranker_itself"),
    ],
)
def test_the_contract_finds_who_breaks_it(broken, test):
    ranker = type("Broken", (EstimateRanker,), broken)

    class Contract(RankerContract):
        def make(self):
            return ranker()

    arguments = [ranker()] if "fit_" not in test else []
    with pytest.raises(AssertionError):
        getattr(Contract(), test)(*arguments)


@pytest.mark.parametrize(
    ("name", "value"),
    [("trees", 0), ("leaves", 33), ("learning_rate", 0.0), ("emphasis", -1.0), ("clip", 1.0)],
)
def test_a_bad_parameter_is_named(name, value):
    with pytest.raises(ForetuneError, match=f"{name} must be between .* but got {value}"):
        LightGBMRanker(**{name: value})


def test_a_bad_objective_lists_the_good_ones():
    with pytest.raises(ForetuneError, match="regression, lambdarank, blend but got 'mse'"):
        LightGBMRanker("mse")


def test_training_rows_see_each_problem_with_and_without_sizes():
    rows = training_rows(GRID.select([0]), FAMILY, slow=1e6, keep_slow=0.0, seed=0)
    ran = int(np.isfinite(GRID.slowdowns[0]).sum())
    assert 0 < ran < len(GRID.configs)  # some failed, and are left out
    assert rows.query_sizes.tolist() == [ran, ran]
    known = rows.features[:, FAMILY.feature_names.index("sizes_known")]
    assert known.tolist() == [1.0] * ran + [0.0] * ran
    assert rows.log_slowdown[:ran].min() == 0.0


def test_problems_with_one_time_each_have_nothing_to_compare():
    tried = np.arange(len(GRID.configs)) == int(np.isfinite(GRID.first_us).sum(axis=0).argmax())
    with pytest.raises(ForetuneError, match="no problem of fake has times of two configs or more"):
        LightGBMRanker(trees=2).fit(replace(GRID, first_us=np.where(tried, GRID.first_us, np.nan)), FAMILY)


def test_training_rows_thin_out_the_hopeless():
    everything = training_rows(GRID, FAMILY, slow=2.0, keep_slow=1.0, seed=0).log_slowdown
    some = training_rows(GRID, FAMILY, slow=2.0, keep_slow=0.25, seed=0).log_slowdown
    slow = np.log(2.0)
    assert (some <= slow).sum() == (everything <= slow).sum()
    assert 0.2 < (some > slow).sum() / (everything > slow).sum() < 0.3


def test_where_little_was_tried_nothing_of_it_is_thinned_out():
    """A share of all that there would be: a tenth of the configs, of which the slow ones were to be a quarter."""
    tried = np.random.default_rng(0).random(GRID.first_us.shape) < 0.1
    few = replace(GRID, first_us=np.where(tried, GRID.first_us, np.nan))
    rows = training_rows(few, FAMILY, slow=1.0, keep_slow=0.25, seed=0)
    assert rows.query_sizes.sum() == 2 * np.isfinite(few.times_us).sum()
    half = replace(GRID, first_us=np.where(np.arange(len(GRID.configs)) % 2 == 0, GRID.first_us, np.nan))
    kept = training_rows(half, FAMILY, slow=1.0, keep_slow=0.25, seed=0).query_sizes.sum()
    assert kept / (2 * np.isfinite(half.times_us).sum()) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("known", [False, True])
def test_a_problem_of_more_configs_than_lightgbm_ranks_at_once_is_learned(known):
    block = np.arange(MOST_ROWS + 1.0)
    slowdown = np.abs(block - 7000) / 4000  # logarithms
    rows = TrainingRows(block[:, None].astype(np.float32), slowdown, np.array([len(block)]), np.array([0]))
    training = TreeTraining(rows, slowdown, {"learning_rate": 0.3, "num_leaves": 15, "seed": 0})
    forest, slope, _ = training.lambdarank(10, share=1.0, known=-slowdown if known else None)
    scores = forest.predict(rows.features) - slowdown * known
    assert slope < 0.0
    assert abs(block[scores.argmax()] - 7000) < 500


def test_queries_that_are_too_long_are_dealt_and_others_stay():
    order, sizes = dealt(np.array([3, 2 * MOST_ROWS + 1, 2]))
    assert sizes.tolist() == [3, 6667, 6667, 6667, 2]
    assert sorted(order.tolist()) == list(range(2 * MOST_ROWS + 6))
    assert order[:3].tolist() == [0, 1, 2]
    assert order[3:6].tolist() == [3, 6, 9]
    assert dealt(np.array([MOST_ROWS, 0]))[1].tolist() == [MOST_ROWS, 0]
