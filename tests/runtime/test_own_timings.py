"""`OwnTimings`: which configs it searches, when it stops, and that only known times decide."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
from foretune.datasets import ForetuneError, KernelConfig, Problem
from foretune.runtime.tuning.gaussian_process import Predicted
from foretune.runtime.tuning.own_timings import OwnTimings

CONFIGS = tuple(
    KernelConfig.of(BLOCK=2**power, num_warps=warps, num_stages=stages)
    for power in range(4, 10)
    for warps in (1, 2, 4, 8)
    for stages in (2, 3)
)
ROWS = (256, 512, 384, 768, 1024, 640, 320, 896)


def cost(config, rows):
    """In us: the best block is near rows / 4, with a warp for each 64 of it; the third stage saves a little."""
    block, warps = math.log2(rows / 4 / config["BLOCK"]), math.log2(config["BLOCK"] / 64 / config.num_warps)
    return 10 * math.exp(0.3 * block**2 + 0.1 * warps**2) * (1.02 if config.num_stages == 2 else 1)


def problem(rows=256, family="toy", dtype="bf16", flags=(), **dims):
    return Problem.of(family, rows=rows, dtype=dtype, flags=flags, **dims)


def own_timings():
    return OwnTimings(SimpleNamespace(name="toy"))


def learned(rows=ROWS, configs=CONFIGS, cost=cost, **kind):
    own = own_timings()
    for size in rows:
        own.learn(problem(size, **kind), {config: cost(config, size) for config in configs})
    return own


def search(own, of, configs=CONFIGS, cost=cost, k="auto", **options):
    """The positions that a search times, and how much slower the best of them is than the best."""
    timed = []
    while new := own.advise(of, configs, k, **options).new:
        assert not {*new} & {*timed}
        own.learn(of, {configs[at]: cost(configs[at], of["rows"]) for at in new})
        timed += new
    times = [cost(config, of["rows"]) or math.inf for config in configs]
    return timed, min(times[at] for at in timed) / min(times)


def test_a_first_problem_takes_a_part_of_the_list():
    timed, slowdown = search(own_timings(), problem(400))
    assert len(timed) <= len(CONFIGS) / 2
    assert slowdown < 1.1
    assert timed[0] == 0


def test_later_problems_take_less_and_start_with_what_was_fast_nearby():
    own, counts = own_timings(), []
    for rows in ROWS:
        timed, slowdown = search(own, problem(rows))
        counts.append(len(timed))
        assert slowdown < 1.03
    assert 2 <= max(counts[4:]) < counts[0]
    start = own.advise(problem(650), CONFIGS).new
    best_nearby = own.advise(problem(640), CONFIGS).positions[0]
    assert start[0] == best_nearby


def test_the_search_stops_where_a_config_costs_more_than_it_is_expected_to_gain():
    counts = [len(search(own_timings(), problem(400), cost_s=seconds)[0]) for seconds in (1e-6, 0.1, 1e3)]
    assert counts[0] > counts[1] > counts[2] == 10 + 4  # a fifth of the list starts, and one round follows


def test_a_known_problem_of_which_all_is_timed_has_nothing_new():
    advice = learned().advise(problem(256), CONFIGS)
    assert advice.new == ()
    assert advice.positions[0] == min(range(len(CONFIGS)), key=lambda at: cost(CONFIGS[at], 256))
    assert sorted(advice.positions) == list(range(len(CONFIGS)))


def test_a_finished_search_is_not_taken_up_again():
    own = own_timings()
    timed, _ = search(own, problem(256), cost_s=1.0)
    assert own.advise(problem(256), CONFIGS, cost_s=1e-6).new
    own.finish(problem(256))
    advice = own.advise(problem(256), CONFIGS, cost_s=1e-6)
    assert (advice.new, sorted(advice.positions)) == ((), sorted(timed))
    assert own.advise(problem(256), CONFIGS[:1] if 0 not in timed else CONFIGS[1:2]).new  # another list of configs


@pytest.mark.parametrize("k", [1, 3, 7])
def test_a_length_is_the_largest_number_of_configs(k):
    for own in (own_timings(), learned()):
        assert len(search(own, problem(400), k=k)[0]) == k


def test_without_a_timing_it_is_not_sure():
    assert not own_timings().advise(problem(), CONFIGS).sure
    assert learned((512,)).advise(problem(), CONFIGS).sure
    assert not learned((512,)).advise(problem(columns=8), CONFIGS).sure  # other dimensions


@pytest.mark.parametrize("asked", [{"rows": 30_000}, {"rows": 8}, {"dtype": "fp16"}, {"flags": ("causal",)}])
def test_what_is_unlike_all_that_is_known_takes_more(asked):
    near, far = learned(), learned()
    assert len(search(far, problem(**{"rows": 400, **asked}))[0]) > len(search(near, problem(400))[0])


def test_a_config_that_failed_is_not_chosen_and_those_like_it_come_late():
    def fails(config, rows):
        return None if config["BLOCK"] >= 128 else cost(config, rows)

    timed, slowdown = search(own_timings(), problem(1024), cost=fails)
    assert slowdown < 1.03
    assert sum(CONFIGS[at]["BLOCK"] >= 128 for at in timed) < len(timed) / 2
    own = learned(cost=fails)
    advice = own.advise(problem(1000), CONFIGS)
    assert all(CONFIGS[at]["BLOCK"] < 128 for at in advice.new)


def test_a_config_that_failed_on_near_problems_is_not_tried_again():
    fastest, far = KernelConfig.of(BLOCK=128, num_warps=2, num_stages=3), 4 * max(ROWS)

    def fails(config, rows):
        return None if config == fastest and rows < far else cost(config, rows)

    def searched(own, *args, **kwargs):
        return CONFIGS.index(fastest) in search(own, *args, **kwargs)[0]

    assert searched(own_timings(), problem(512), cost=fails)
    own = own_timings()
    own.learn(problem(512), {fastest: None, CONFIGS[0]: cost(CONFIGS[0], 512)})
    assert not searched(own, problem(1024), k=len(CONFIGS), cost=fails)  # even if any number may be timed
    assert searched(own, problem(1025), k=len(CONFIGS), cost=fails)
    assert searched(own, problem(512, dtype="fp16"), k=len(CONFIGS), cost=fails)
    own.learn(problem(700), {fastest: 10.0})  # it does work there
    assert searched(own, problem(600), k=len(CONFIGS), cost=fails)
    only = learned((512,), (fastest,), fails)
    assert only.advise(problem(520), (fastest,)).new == (0,)  # nothing else is left


def test_where_all_failed_the_others_are_tried():
    own, of = own_timings(), problem()
    first = own.advise(of, CONFIGS).new
    own.learn(of, {CONFIGS[at]: None for at in first})
    second = own.advise(of, CONFIGS)
    assert second.new
    assert not {*first} & {*second.positions}
    own.learn(of, dict.fromkeys(CONFIGS))
    assert own.advise(of, CONFIGS).positions == ()


def test_times_that_nothing_predicts_take_more_configs():
    chance = random.Random(0)
    noise = {config: 10 * math.exp(chance.gauss(0, 0.3)) for config in CONFIGS}
    steady, _ = search(own_timings(), problem())
    odd, _ = search(own_timings(), problem(), cost=lambda config, rows: noise[config])
    assert len(odd) > len(steady)


def test_the_order_of_learning_changes_nothing():
    own, other = learned(), learned(reversed(ROWS), tuple(reversed(CONFIGS)))
    assert own.advise(problem(400), CONFIGS) == other.advise(problem(400), CONFIGS)


def test_knobs_that_are_texts_or_flags_or_missing_count():
    configs = tuple(
        KernelConfig.of(MODE=mode, FAST=fast, **extra)
        for mode in ("a", "b", "c")
        for fast in (True, False)
        for extra in ({}, {"PAD": -1}, {"PAD": 0}, {"PAD": 0.25})
    )

    def by_mode(config, rows):
        return {"a": 3.0, "b": 1.0, "c": 2.0}[config["MODE"]] * (1 if config["FAST"] else 1.2)

    assert search(own_timings(), problem(), configs, by_mode)[1] == 1.0


def test_one_config_and_many_measurements():
    own = own_timings()
    assert own.advise(problem(), CONFIGS[:1]).new == (0,)
    for rows in range(64, 600):
        own.learn(problem(rows), {config: cost(config, rows) for config in CONFIGS[::4]})
    assert search(own, problem(333))[1] < 1.03


def test_what_is_wrong_is_named():
    own = learned()
    with pytest.raises(ForetuneError, match="problem must be a problem of toy but is"):
        own.advise(problem(family="other"), CONFIGS)
    with pytest.raises(ForetuneError, match="problem must be a problem of toy but is 3"):
        own.learn(3, {})
    with pytest.raises(ForetuneError, match="problem must be a problem of toy but is 3"):
        own.finish(3)
    with pytest.raises(ForetuneError, match="at least one config"):
        own.advise(problem(), ())
    with pytest.raises(ForetuneError, match="k must be 'auto' or an integer >= 1 but got 'all'"):
        own.advise(problem(), CONFIGS, "all")


def searched(prior=None, k="auto", rows=400, own=None):
    """The configs that are timed on a problem, in order."""
    own, timed = own or OwnTimings(SimpleNamespace(name="toy")), []
    while new := own.advise(problem(rows), CONFIGS, k, prior=prior).new:
        own.learn(problem(rows), {CONFIGS[at]: cost(CONFIGS[at], rows) for at in new})
        timed += new
    return timed


def logs_of(rows):
    return np.log([cost(config, rows) for config in CONFIGS])


def test_a_prior_decides_what_is_timed_first():
    best = int(np.argmin(logs_of(400)))
    assert searched(k=2)[0] == 0  # without one: the first config and the farthest from it
    assert searched(0.7 * logs_of(400), k=2)[0] == best


def test_a_good_prior_finds_the_best_in_the_first_round_and_a_wrong_one_does_not_hide_it():
    best, start = int(np.argmin(logs_of(400))), math.ceil(0.2 * len(CONFIGS))
    usual, good, wrong = (searched(prior) for prior in (None, 0.7 * logs_of(400), -0.7 * logs_of(400)))
    assert good.index(best) < start <= usual.index(best)
    assert best in wrong


def test_most_configs_of_the_first_round_are_far_from_those_that_a_prior_selects():
    own, prior = OwnTimings(SimpleNamespace(name="toy")), logs_of(400)
    first = own.advise(problem(400), CONFIGS, prior=prior).new
    fastest = {*np.argsort(prior)[:3].tolist()}
    assert len(first) == math.ceil(0.2 * len(CONFIGS))
    assert fastest < {*first}
    assert prior[list({*first} - fastest)].mean() > np.median(prior)


def test_a_constant_in_the_prior_does_not_matter():
    prior = 0.7 * logs_of(400)
    assert searched(prior) == searched(prior + 5.0)


def test_problems_without_a_prior_count_too():
    own = learned(rows=(256, 512))
    timed = searched(0.7 * logs_of(400), own=own)
    assert int(np.argmin(logs_of(400))) in timed


def test_the_first_round_leaves_out_what_a_prior_predicts_to_be_slowest():
    prior = logs_of(400)
    slowest = {*np.argsort(prior)[-len(CONFIGS) // 4 :].tolist()}
    assert slowest & {*own_timings().advise(problem(400), CONFIGS).new}
    assert not slowest & {*own_timings().advise(problem(400), CONFIGS, prior=prior).new}


def test_what_a_prior_misses_on_one_problem_is_expected_on_distant_ones_too():
    far_apart, knobs, rows, log_times = np.array([[0.0], [9.0]]), np.array([[0.0], [1.0]]), [(0, 0), (0, 1)], [0.0, 1.0]
    alone, with_prior = (
        np.diff(Predicted(far_apart, knobs, rows, log_times, prior).mean)[0] for prior in (None, np.zeros((2, 2)))
    )
    assert 0 < alone < 0.2
    assert 0.4 < with_prior < 0.6
