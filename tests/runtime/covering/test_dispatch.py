"""Which configs cover a range of sizes, and where they change: against looking at everything."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from foretune.runtime.covering import dispatch
from foretune.runtime.covering.dispatch import LEAST_GAIN, Dispatch, best_dispatch


def path_of(found: Dispatch, sizes: int) -> np.ndarray:
    return np.repeat(found.columns, np.diff((*found.starts, sizes)))


def cost_of(losses: np.ndarray, weights: np.ndarray, path: np.ndarray) -> float:
    rows = np.arange(len(losses))
    return float((losses[rows, path] * weights).sum() / weights.mean() + LEAST_GAIN * (np.diff(path) != 0).sum())


def best_of_all(losses: np.ndarray, weights: np.ndarray, n: int, ranges: int) -> float:
    """By trying every config at every size."""
    sizes, configs = losses.shape
    paths = (np.array(path) for path in itertools.product(range(configs), repeat=sizes))
    allowed = (path for path in paths if len(set(path.tolist())) <= n and (np.diff(path) != 0).sum() < ranges)
    return min(cost_of(losses, weights, path) for path in allowed)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("n", "ranges"), [(1, 4), (2, 2), (2, 4), (3, 3)])
def test_no_other_dispatch_loses_less(seed, n, ranges):
    random = np.random.default_rng(seed)
    losses = random.exponential(0.05, (5, 4))
    losses -= losses.min(axis=1, keepdims=True)
    weights = random.integers(1, 4, 5).astype(float)
    found = best_dispatch(losses, weights, n, ranges)
    path = path_of(found, 5)
    assert len(set(found.columns)) <= n
    assert len(found.columns) <= ranges
    assert cost_of(losses, weights, path) == pytest.approx(best_of_all(losses, weights, n, ranges))


@pytest.mark.parametrize("seed", range(5))
def test_exchanging_finds_about_what_looking_at_all_sets_finds(seed, monkeypatch):
    random = np.random.default_rng(seed)
    losses = random.exponential(0.1, (24, 14))
    weights = np.ones(24)
    exact = cost_of(losses, weights, path_of(best_dispatch(losses, weights, 3, 8), 24))
    monkeypatch.setattr(dispatch, "MOST_SETS", 0)
    exchanged = path_of(best_dispatch(losses, weights, 3, 8), 24)
    near = cost_of(losses, weights, exchanged)
    assert exact <= near <= 1.05 * exact
    for old, new in itertools.product(set(exchanged.tolist()), range(14)):  # no exchange of one makes it better
        others = [new if one == old else one for one in sorted(set(exchanged.tolist()))]
        if len(set(others)) == 3:
            better = best_dispatch(losses[:, sorted(set(others))], weights, 3, 8)
            assert cost_of(losses[:, sorted(set(others))], weights, path_of(better, 24)) >= near - 1e-9


def test_what_cannot_run_is_left_out_and_a_gain_within_the_noise_is_no_range():
    losses = np.array([[0.0, np.inf, 0.003], [0.0, 0.0, 0.003], [np.inf, 0.0, 0.003]])
    assert best_dispatch(losses, np.ones(3), 2, 3).columns == (2,)  # 0.009 in all, and a change costs 0.01
    losses[:, 2] = 0.1
    assert best_dispatch(losses, np.ones(3), 2, 3) == Dispatch((0, 1), (0, 1))
    assert best_dispatch(losses, np.ones(3), 2, 1).columns == (2,)


def test_what_is_frequent_counts_for_more():
    losses = np.array([[0.0, 0.2], [0.2, 0.0]])
    assert best_dispatch(losses, np.array([3.0, 1.0]), 1, 1).columns == (0,)
    assert best_dispatch(losses, np.array([1.0, 3.0]), 1, 1).columns == (1,)
