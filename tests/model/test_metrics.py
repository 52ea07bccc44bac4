"""Regret by hand-computed examples."""

from __future__ import annotations

import numpy as np
import pytest
from foretune.datasets import ForetuneError
from foretune.model import geomean, noise_floor, summarise, top_k_regret

NAN = np.nan
# The first pass takes c for the fastest; the second shows that it was luck.
CHOOSE = [10.0, 12.0, 9.0, 20.0]
REPORT = [10.0, 12.0, 11.0, 20.0]


@pytest.mark.parametrize(
    ("scores", "k", "regret"),
    [
        ([1, 2, 3, 4], 1, 1.0),
        ([1, 2, 3, 4], 2, 1.0),
        ([1, 2, 3, 4], 3, 1.1),  # c joins, and wins the first pass
        ([4, 3, 2, 1], 1, 2.0),
        ([4, 3, 2, 1], 2, 1.1),
        ([4, 1, 2, 3], 1, 1.2),
        ([1, 2, 3, 4], 99, 1.1),
        ([5, 5, 5, 5], 1, 1.0),  # the first among equals
        ([5, 5, 5, 1], 1, 2.0),
        ([NAN, 2, NAN, 4], 1, 1.2),  # a and c are no candidates
        ([NAN, 2, NAN, 4], 3, 1.2),
        ([np.inf, np.inf, np.inf, 1], 2, 1.0),
    ],
)
def test_regret_by_hand(scores, k, regret):
    assert top_k_regret(scores, CHOOSE, REPORT, k) == pytest.approx(regret)


@pytest.mark.parametrize(
    ("scores", "k", "regret"),
    [
        ([1, 2, 3], 1, 4.0),  # the only one failed: as slow as the slowest that ran
        ([1, 2, 3], 2, 4.0),
        ([1, 3, 2], 2, 1.0),
        ([1, NAN, NAN], 3, 4.0),
        ([NAN, NAN, NAN], 3, 4.0),
    ],
)
def test_failures_are_lost(scores, k, regret):
    assert top_k_regret(scores, [NAN, 8.0, 2.0], [NAN, 8.0, 2.0], k) == pytest.approx(regret)


def test_a_config_that_failed_in_one_pass_counts_as_failed():
    assert top_k_regret([1, 2, 3], [1.0, 3.0, 4.0], [NAN, 3.0, 3.5], k=2) == pytest.approx(1.0)
    assert top_k_regret([1, 2, 3], [NAN, 3.0, 4.0], [1.0, 3.0, 3.5], k=2) == pytest.approx(1.0)


def test_many_problems_at_once():
    scores = np.array([[1, 2, 3, 4], [4, 3, 2, 1], [4, 1, 2, 3]])
    regret = top_k_regret(scores, [CHOOSE] * 3, [REPORT] * 3, k=1)
    assert regret.tolist() == [1.0, 2.0, 1.2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0], [1.0], [1.0], 0), "k must be >= 1 but got 0"),
        (([1.0, 2.0], [1.0], [1.0], 1), "shapes differ"),
        (([[1.0], [1.0]], [[1.0], [NAN]], [[1.0], [1.0]], 1), "no config ran on problem 1"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ForetuneError, match=message):
        top_k_regret(*arguments)


def test_noise_floor_is_what_the_full_search_scores():
    assert noise_floor([CHOOSE, CHOOSE], [REPORT, CHOOSE]) == pytest.approx(np.sqrt(1.1))
    assert noise_floor([NAN, 2.0], [NAN, 3.0]) == 1.0


def test_summary_by_hand():
    summary = summarise([1.0, 4.0, 2.0])
    assert summary.geomean == pytest.approx(2.0) == geomean([1.0, 4.0, 2.0])
    assert summary.max == pytest.approx(4.0)
    assert summary.p95 == pytest.approx(3.8)
    assert 1.0 <= summary.ci95[0] < 2.0 < summary.ci95[1] <= 4.0
    assert summary.to_json() == {"geomean": 2.0, "p95": 3.8, "max": 4.0, "ci95": list(summary.to_json()["ci95"])}


def test_the_interval_is_reproducible_and_covers_the_truth():
    random = np.random.default_rng(1)
    covered = 0
    for seed in range(100):
        summary = summarise(np.exp(random.normal(0.1, 0.05, 60)), seed=seed)
        covered += summary.ci95[0] <= np.exp(0.1) <= summary.ci95[1]
    assert 88 <= covered <= 100
    assert summarise([1.0, 2.0, 3.0], seed=7) == summarise([1.0, 2.0, 3.0], seed=7)


def test_problems_of_one_group_are_drawn_together():
    regrets = np.repeat([1.0, 1.2, 1.1, 1.4], 25)
    narrow, wide = summarise(regrets), summarise(regrets, np.repeat(["a", "b", "c", "d"], 25))
    assert wide.geomean == narrow.geomean
    assert np.diff(wide.ci95) > 3 * np.diff(narrow.ci95)
