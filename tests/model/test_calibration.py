"""How long a shortlist must be: what conformal prediction promises holds, and what is far from the data is seen so."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from fakes import DEVICE, FakeFamily, fake_cases, fake_dataset
from foretune.datasets import DeviceSpec, ForetuneError, Problem
from foretune.model import LightGBMRanker, TrainingSet, cross_validate, top_k_regret
from foretune.model.calibration import cross_fit
from foretune.model.calibration.conformal import COVERAGE, MOST_TRIED, Calibration, calibrate, needed_length
from foretune.model.calibration.cross_fit import FOLDS, Coverage, cross_fitted, within_distribution
from foretune.model.calibration.training_domain import Distance, TrainingDomain, distance_of
from foretune.model.metrics import growing_regret
from foretune.model.splits import split_sizes

FAMILY, DATASET = FakeFamily(), fake_dataset()
QUICK = partial(LightGBMRanker, trees=10, epochs=0)


def drawn(count, seed=0, configs=120, error=0.1):
    """Problems whose predictions are off by a normal error, each by its own."""
    random = np.random.default_rng(seed)
    problems = []
    for _ in range(count):
        times = np.exp(random.gamma(2, 0.15, configs))
        logs = np.log(times) + random.normal(0, error * random.random(), configs)
        problems.append((logs, times, times * random.normal(1, 0.001, configs)))
    return problems


def test_regrets_of_growing_lists_are_those_of_each_length():
    random = np.random.default_rng(0)
    for _ in range(20):
        choose, report = (np.where(random.random(12) < 0.8, random.random(12), np.nan) for _ in range(2))
        if not np.isfinite(choose + report).any():
            continue
        grown = growing_regret(choose, report)
        assert grown.tolist() == [float(top_k_regret(np.arange(12), choose, report, k)) for k in range(1, 13)]
    with pytest.raises(ForetuneError, match="no config ran"):
        growing_regret([np.nan], [1.0])
    with pytest.raises(ForetuneError, match="shapes must be equal"):
        growing_regret([1.0, 2.0], [1.0])


def test_new_problems_are_covered_as_promised():
    calibration = calibrate(drawn(400, seed=1))
    fresh = drawn(2000, seed=2)
    covered = Coverage.of(fresh, [calibration] * len(fresh), [1.0] * len(fresh))
    assert covered.covered.mean() == pytest.approx(COVERAGE, abs=0.02)
    assert 2 < covered.length.mean() < MOST_TRIED
    assert len(set(covered.length.tolist())) > 10  # each problem its own
    assert within_distribution(fresh[:400]).covered.mean() == pytest.approx(COVERAGE, abs=0.02)


def test_better_predictions_make_shorter_lists():
    lengths = []
    for error in (0.02, 0.1, 0.3):
        problems = drawn(200, error=error)
        calibration = calibrate(problems)
        lengths.append(Coverage.of(problems, [calibration] * 200, [1.0] * 200).length.mean())
    assert lengths == sorted(lengths)
    assert lengths[0] < 0.6 * lengths[1]


def test_where_too_few_problems_say_something_the_list_is_as_long_as_any():
    few = calibrate(drawn(18))
    assert few.threshold() == np.inf
    assert few.length(np.zeros(500)) == MOST_TRIED
    assert few.length([0.0, 3.0]) == 2


def test_problems_that_no_short_list_solves_count_against_the_cap():
    hopeless = (np.arange(200.0), np.linspace(2, 1, 200), np.linspace(2, 1, 200))
    easy = (np.arange(200.0), np.linspace(1, 2, 200), np.linspace(1, 2, 200))
    assert calibrate([easy] * 99 + [hopeless]).threshold() == 0.0
    assert calibrate([easy] * 80 + [hopeless] * 20).threshold() == np.inf


def tried_only(problem, tried):
    """The problem if only these of its configs had been tried."""
    logs, *passes = problem
    return logs, *(np.where(np.isin(np.arange(len(logs)), tried), times, np.nan) for times in passes)


@pytest.mark.parametrize(("configs", "share"), [(120, 0.5), (1200, 0.1)])
def test_where_few_configs_were_tried_lists_are_as_long_as_where_all_were(configs, share):
    """As a plan tries them: what is predicted to be fastest, by another ranker of the kind, and some others."""
    whole, random = drawn(300, seed=3, configs=configs), np.random.default_rng(0)
    thin = []
    for problem in whole:
        logs = problem[0]
        order = np.argsort(logs + random.normal(0, 0.03, len(logs)))
        half = round(share * len(logs) / 2)
        thin.append(tried_only(problem, np.append(order[:half], random.permutation(order[half:])[:half])))
    by_whole, by_thin = (calibrate(problems) for problems in (whole, thin))
    covered, by_all = (Coverage.of(whole, [one] * 300, [1.0] * 300) for one in (by_thin, by_whole))
    assert covered.covered.mean() >= COVERAGE - 0.02
    assert 0.8 < covered.length.mean() / by_all.length.mean() < 1.2


def test_a_share_of_the_configs_tells_of_all_lists():
    """Even one that nobody planned."""
    whole, random = drawn(300, seed=3), np.random.default_rng(0)
    thin = [tried_only(problem, random.permutation(len(problem[0]))[:60]) for problem in whole]
    by_whole, by_thin = (calibrate(problems) for problems in (whole, thin))
    covered = Coverage.of(whole, [by_thin] * 300, [1.0] * 300)
    assert covered.covered.mean() >= COVERAGE - 0.02
    assert covered.length.mean() < 3 * Coverage.of(whole, [by_whole] * 300, [1.0] * 300).length.mean()


def test_a_config_that_was_not_tried_takes_a_place_and_loses_nothing():
    problem = ([0.0, 0.01, 0.02, 0.9], [np.nan, 5.0, 4.0, 8.0], [np.nan, 5.0, 4.0, 8.0])
    calibration = calibrate([problem] * 30)
    assert calibration.threshold() == pytest.approx(np.log(3) + 0.2, abs=1e-4)  # the third is good
    assert calibration.regret[0] == pytest.approx(0.25)  # and the first that was tried is 25 % slower


def test_expected_regret_falls_and_is_less_behind_a_clear_winner():
    calibration = calibrate(drawn(200))
    among_many, winner = (calibration.expected_regret(logs) for logs in ([0.0, 0.001, 0.002], [0.0, 0.5, 0.6]))
    assert (np.diff(calibration.expected_regret(np.linspace(0, 0.4, 100))) <= 0).all()
    assert winner[0] < among_many[0]
    assert len(calibration.expected_regret(np.zeros(500))) == MOST_TRIED


def test_growth_makes_lists_longer_up_to_a_longer_cap():
    calibration = Calibration(40, (0.0,) * 20 + (2.0,) * 20, (0.1,) * 13)
    near = np.zeros(500)
    assert calibration.length(near) == 7
    assert calibration.length(near, growth=2.0) == 14
    assert calibrate(drawn(18)).length(near, growth=2.0) == 2 * MOST_TRIED


def test_needed_lengths():
    assert needed_length(np.array([0.0, 0.0])) == 1
    assert needed_length(np.array([0.02, 0.0])) == 2
    assert needed_length(np.array([0.0, 0.02, 0.0])) == 3  # the second config looked better, and was not


def test_distance_names_what_is_outside():
    domain = TrainingDomain.of([Problem.of("f", rows=rows, n=n) for rows in (16, 1024) for n in (64, 512)])
    h200 = DeviceSpec.named("h200")

    def far(device=h200, dtype="bf16", flags=(), learned=(h200,), **dims):
        return distance_of(Problem.of("f", dtype=dtype, flags=flags, **dims), device, domain, learned)

    assert far(rows=100, n=100) == Distance(0.0)
    assert far(rows=1070, n=512) == Distance(0.0)  # as call-time rounding may have it
    assert far(rows=12 * 1024, n=64).reason == "rows 12x above the data, n/rows 12x below the data"
    assert far(rows=2048, n=512).reason == "rows 2x above the data"
    assert far(rows=8, n=64).reason.startswith("rows 2x below the data")
    assert far(rows=0, n=64).octaves == pytest.approx(4.0)
    assert far(rows=100, n=100, dtype="fp8e4m3", flags=("a",)).reason == "fp8e4m3 a is not in the data"
    other_card = replace(h200, name="NVIDIA B300", arch="sm_103")
    assert "NVIDIA B300 is not in the data, sm_103 instead of sm_90" in far(device=other_card, rows=100, n=100).reason
    assert far(device=other_card, rows=100, n=100).growth > far(device=h200.with_sms(66), rows=100, n=100).growth > 1
    assert far(device=replace(h200, copy_bandwidth_gbs=h200.copy_bandwidth_gbs * 1.03), rows=100, n=100).octaves == 0
    assert far(rows=2**40, n=2**40).growth == 4.0  # and no more


def test_a_domain_of_other_dimensions_says_what_it_can():
    domain = TrainingDomain.of([Problem.of("f", rows=16, n=64)])
    assert domain.outside(Problem.of("f", columns=7, rows=64)) == [(2.0, "rows 4x above the data")]
    assert TrainingDomain.from_json(domain.to_json()) == domain


@pytest.fixture(scope="module")
def data():
    return TrainingSet.of(DATASET, FAMILY)


def test_the_same_training_is_calibrated_alike_whatever_runs_side_by_side(data):
    one, two = (cross_fitted(data, QUICK, jobs=jobs) for jobs in (1, 2))
    assert one == two
    assert Calibration.from_json(one.to_json()) == one


def test_folds_past_what_is_plenty_are_not_trained(data, monkeypatch):
    def trainings():
        made = []
        assert cross_fitted(data, lambda: made.append(1) or QUICK(), jobs=1) is not None
        return len(made)

    assert trainings() == FOLDS
    third = len(data) // FOLDS
    monkeypatch.setattr(cross_fit, "_PLENTY", third + 3)
    assert trainings() == 2
    monkeypatch.setattr(cross_fit, "_PLENTY", third - 3)
    assert trainings() == 1


def test_too_few_problems_or_one_model_are_not_calibrated(data):
    assert cross_fitted(data.select(np.arange(12)), QUICK) is None
    one = fake_dataset(fake_cases(models=1, tokens=tuple(range(16, 32)), randoms=0))
    alone = TrainingSet.of(one, FAMILY)
    assert len(alone) > 20
    assert cross_fitted(alone, QUICK) is None


def test_evaluation_reports_coverage_and_length():
    told = cross_validate(DATASET, FAMILY, QUICK).coverage
    assert told == {}  # 39 problems say too little of one in twenty
    more = fake_dataset(fake_cases(models=8, randoms=4))
    evaluation = cross_validate(more, FAMILY, QUICK)
    told = evaluation.to_json()["coverage"]
    assert list(told) == ["problems like those it learned from", "models it never saw"]
    for figures in told.values():
        assert figures["nominal"] == COVERAGE
        assert 0.8 <= figures["coverage"] <= 1.0
        assert 1 <= figures["mean_k"] <= MOST_TRIED
    assert 'Shortlists with k="auto", models it never saw: ' in evaluation.__rich__().below


def test_the_largest_sizes_are_held_out():
    cases = DATASET.cases
    fold, below = split_sizes(cases)
    for number, name in enumerate(("k", "n")):  # the most groups, and rows, a third of the problems has
        sizes = np.array([case.problem[name] for case in cases])
        assert sizes[below[number]].max() < sizes[fold == number].min()
    evaluation = cross_validate(DATASET, FAMILY, partial(LightGBMRanker, trees=2, epochs=0), split="size")
    assert len(evaluation.cases) == (fold >= 0).sum()
    assert DEVICE in evaluation.devices
    same = tuple(replace(case, problem=cases[0].problem) for case in cases)
    with pytest.raises(ForetuneError, match="all are of one size"):
        split_sizes(same)
