"""In which order configs are tried: `diversified_order`."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from foretune.datasets import KernelConfig
from foretune.model.calibration.conformal import AMONG, diversified_order, diversified_places, knob_table

SPACE = tuple(
    KernelConfig.of(BLOCK_M=m, BLOCK_N=n, GROUP_M=group, num_warps=warps, num_stages=stages)
    for m, n, group, warps, stages in itertools.product((64, 128, 256), (64, 128, 256), (1, 8), (4, 8), (3, 4, 5))
)
TABLE = knob_table(SPACE)


def greedy(logs, chosen=16, among=AMONG):
    """The same in plain Python."""
    ranked = sorted(range(len(logs)), key=lambda at: (logs[at], at))
    left, order = {at: logs[at] for at in ranked[:among]}, []
    while left and len(order) < chosen:
        best = min(left, key=left.__getitem__)
        del left[best]
        order.append(best)
        for at in left:
            left[at] += 0.08 / 2 ** sum(SPACE[at][knob] != SPACE[best][knob] for knob in SPACE[at].to_json())
    return order + [at for at in ranked if at not in order]


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 31, 32, 33, len(SPACE)])
def test_the_order_is_what_is_said_of_it(count):
    logs = np.random.default_rng(count).exponential(0.05, count)
    assert diversified_order(logs, TABLE[:count]).tolist() == greedy(logs.tolist())


def test_the_first_is_the_one_that_is_predicted_fastest_and_none_is_lost():
    for seed in range(20):
        logs = np.random.default_rng(seed).choice([0.0, 0.01, 0.02, 0.5], len(SPACE))
        order = diversified_order(logs, TABLE)
        assert order[0] == logs.argmin()
        assert sorted(order.tolist()) == list(range(len(SPACE)))


def test_what_configs_that_are_alike_are_misjudged_by_costs_a_short_list_less():
    """Predictions and their errors are each mostly the tile's, and a little the config's."""
    random, lost = np.random.default_rng(0), []
    tiles = np.array([[config["BLOCK_M"] // 64, config["BLOCK_N"] // 64] for config in SPACE]) @ [1, 5]
    for _ in range(300):
        logs = random.exponential(0.05, tiles.max() + 1)[tiles] + random.exponential(0.02, len(SPACE))
        true = logs + random.normal(0, 0.05, tiles.max() + 1)[tiles] + random.normal(0, 0.02, len(SPACE))
        orders = np.argsort(logs, kind="stable"), diversified_order(logs, TABLE)
        lost.append([[true[order[:k]].min() - true.min() for k in (1, 2, 4, 8)] for order in orders])
    plain, spread = np.mean(lost, axis=0)
    assert spread[0] == plain[0]
    assert (spread[1:] < 0.95 * plain[1:]).all()


def test_configs_may_have_other_knobs():
    configs = (KernelConfig.of(BLOCK=16), KernelConfig.of(BLOCK=16, SPLIT="rows"), KernelConfig.of(BLOCK=32, SPLIT=2))
    assert diversified_order([0.0, 0.01, 0.011], knob_table(configs)).tolist() == [0, 2, 1]


def test_what_is_no_candidate_has_no_place():
    scores = np.array([[1.2, np.nan, 1.0, 0.0], [np.nan, np.nan, np.nan, np.nan]])
    places = diversified_places(scores, SPACE[:4])
    assert places[0, 3] == 0.0
    assert sorted(places[0, [0, 2]].tolist()) == [1.0, 2.0]
    assert np.isnan(places[0, 1])
    assert np.isnan(places[1]).all()
