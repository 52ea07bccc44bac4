"""`OwnTimings`: what it advises, when it is unsure, and that only what is known decides."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from foretune.datasets import ForetuneError, KernelConfig, Problem
from foretune.runtime.tuning.own_timings import OwnTimings

CONFIGS = tuple(KernelConfig.of(BLOCK=2**power) for power in range(4, 16))
ROWS = (256, 512, 384, 768, 1024, 640, 320, 896)


def cost(config, rows):
    """The best block is the nearest to rows / 4; every one has a twin that is as fast."""
    ratio = rows / 4 / config["BLOCK"]
    return 10 * max(ratio, 1 / ratio)


def problem(rows=256, family="toy", dtype="bf16", flags=(), **dims):
    return Problem.of(family, rows=rows, dtype=dtype, flags=flags, **dims)


def learned(rows=ROWS, configs=CONFIGS, cost=cost, **kind):
    own = OwnTimings(SimpleNamespace(name="toy"))
    for size in rows:
        own.learn(problem(size, **kind), {config: cost(config, size) for config in configs})
    return own


def test_the_best_of_what_is_near_comes_first():
    for rows, best in ((400, 128), (960, 256), (288, 64)):
        advice = learned().advise(problem(rows), CONFIGS)
        assert advice.sure
        assert best in [CONFIGS[at]["BLOCK"] for at in advice.positions]
        assert 2 <= len(advice.positions) <= 4


def test_it_says_how_sure_it_is():
    """What the known problems, each left out in turn, would have lost by lists of that length."""
    same = learned(cost=lambda config, rows: float(config["BLOCK"]))
    said = "learned from 8 problems; mean loss 0 % with each problem left out"
    assert same.advise(problem(400), CONFIGS, k=2).reason == said

    def odd(config, rows):
        return 1.0 if config == CONFIGS[ROWS.index(rows)] else 1.5

    other = learned(cost=odd).advise(problem(400), CONFIGS, k=1)
    assert other.sure
    assert other.reason == said.replace("0 %", "50 %")


@pytest.mark.parametrize("n", [0, 1, 7])
def test_before_the_eighth_it_is_unsure(n):
    advice = learned(ROWS[:n]).advise(problem(400), CONFIGS)
    assert advice.positions == tuple(range(len(CONFIGS)))
    assert not advice.sure
    assert advice.reason == f"{n} of the first 8 problems are known"


def test_what_was_tuned_in_part_is_not_a_problem_known():
    own = learned(ROWS[:7])
    own.learn(problem(400), {config: cost(config, 400) for config in CONFIGS[:5]})
    assert not own.advise(problem(500), CONFIGS).sure
    own.learn(problem(400), {CONFIGS[5]: cost(CONFIGS[5], 400)})
    assert own.advise(problem(500), CONFIGS).sure


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"rows": 3000}, "rows=3000 is far from the known sizes (256 to 1024)"),
        ({"rows": 100}, "rows=100 is far from the known sizes (256 to 1024)"),
        ({"dtype": "fp16"}, "dtype fp16 is new"),
        ({"flags": ("causal",)}, "causal is new"),
        ({"columns": 8}, "0 of the first 8 problems are known"),
    ],
)
def test_what_is_unlike_all_that_is_known_is_unsure(asked, why):
    advice = learned().advise(problem(**asked), CONFIGS)
    assert (advice.positions, advice.sure, advice.reason) == (tuple(range(len(CONFIGS))), False, why)


def test_to_be_without_a_flag_may_be_new_too():
    assert learned(flags=("causal",)).advise(problem(), CONFIGS).reason == "no known problem is without causal"


def test_times_that_nothing_predicts_leave_all_configs():
    chance = random.Random(0)
    own = learned(cost=lambda config, rows: 10 ** chance.uniform(0, 3))
    advice = own.advise(problem(400), CONFIGS)
    assert (len(advice.positions), advice.sure) == (len(CONFIGS), False)
    assert "half of the configs would not be enough" in advice.reason
    assert len(own.advise(problem(400), CONFIGS, 3).positions) == 3  # whoever asks for three gets three


def test_the_harder_it_is_to_tell_the_longer_the_list():
    def steady(config, rows):
        return 1.0 if config["BLOCK"] == 64 else 3.0

    def alternating(config, rows):
        return 1.0 if config["BLOCK"] == 16 * 2 ** (ROWS.index(rows) % 4) else 3.0

    lengths = [len(learned(cost=one).advise(problem(400), CONFIGS).positions) for one in (steady, alternating)]
    assert lengths[0] == 2
    assert lengths[1] >= 4


def test_the_second_of_a_list_is_no_twin_of_the_first():
    """Two that are always alike save nothing beside each other; the one that is fast where they are not does."""

    def with_twins(config, rows):
        slow = 1.3 if ROWS.index(rows) % 2 else 1.0
        return {16: slow, 32: slow, 64: 2.31 - slow}.get(config["BLOCK"], 3.0)

    advice = learned(cost=with_twins).advise(problem(600), CONFIGS, 2)
    assert {CONFIGS[at]["BLOCK"] for at in advice.positions} in ({16, 64}, {32, 64})


def test_a_config_that_failed_is_not_chosen_and_one_never_timed_is():
    own = learned(cost=lambda config, rows: None if config["BLOCK"] == 128 else cost(config, rows))
    new = KernelConfig.of(BLOCK=48)
    advice = own.advise(problem(500), (*CONFIGS, new))
    chosen = [(*CONFIGS, new)[at]["BLOCK"] for at in advice.positions]
    assert 128 not in chosen
    assert 48 in chosen


def test_a_shortlist_s_times_are_learned_without_mistaking_its_best_for_the_best():
    own = learned(cost=lambda config, rows: 1.0 if config["BLOCK"] == 64 else 2.0 if config["BLOCK"] < 64 else 4.0)
    own.learn(problem(400), {CONFIGS[0]: 2.0, CONFIGS[1]: 2.0})  # the best was not among them
    best = own.advise(problem(401), CONFIGS).positions[0]
    assert CONFIGS[best]["BLOCK"] == 64


def test_the_order_of_learning_changes_nothing():
    own, other = learned(), learned(reversed(ROWS), tuple(reversed(CONFIGS)))
    assert own.advise(problem(400), CONFIGS) == other.advise(problem(400), CONFIGS)


def test_a_short_list_may_be_cut_to_one():
    own = learned(configs=CONFIGS[:4], cost=lambda config, rows: 1.0 if config["BLOCK"] == 64 else 3.0)
    assert own.advise(problem(400), CONFIGS[:4]).positions == (2,)
    assert own.advise(problem(400), CONFIGS[:1]).positions == (0,)


def test_what_is_wrong_is_named():
    own = learned()
    with pytest.raises(ForetuneError, match="problem must be a problem of toy but is"):
        own.advise(problem(family="other"), CONFIGS)
    with pytest.raises(ForetuneError, match="problem must be a problem of toy but is 3"):
        own.learn(3, {})
    with pytest.raises(ForetuneError, match="at least one config"):
        own.advise(problem(), ())
    with pytest.raises(ForetuneError, match="k must be 'auto' or an integer >= 1 but got 'all'"):
        own.advise(problem(), CONFIGS, "all")
