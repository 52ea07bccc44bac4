"""`Race` on simulated calls: what it finds, what it costs, and that drift and outliers do not change the choice."""

from __future__ import annotations

import math

import numpy as np
import pytest
from foretune.runtime.tuning.refine.race import CALLS, Race


def raced(predicted, actual, calls=CALLS, noise=0.01, drift=lambda call: 0.0, seed=0, **limit):
    """A race over calls of these slowdowns, and the mean slowdown of the calls."""
    random, race, spent = np.random.default_rng(seed), Race(predicted, **limit), 0.0
    for config in range(1, len(predicted)):
        race.join(config)
    call = 0
    while call < calls:
        planned, logs = race.plan(calls - call), []
        for config in planned:
            spent += actual[config]
            logs.append(math.log(100 * actual[config]) + drift(call) + random.normal(0, noise))
            call += 1
        race.see(planned, logs)
    return race, spent / calls / actual[0]


def planned(race, count):
    """The configs of the next calls, of which none is timed."""
    found = []
    while len(found) < count:
        found += race.plan(count - len(found))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_the_fastest_is_found_although_it_was_predicted_to_be_slower(seed):
    race, cost = raced([1.0, 1.01, 1.02, 1.03], [1.0, 1.02, 0.95, 1.0], seed=seed)
    assert race.best == 2
    assert cost < 1.0


def test_the_first_stays_if_no_config_is_faster_for_certain():
    """In all but one of 40 races; many comparisons of noisy times are right by chance only now and then."""
    races = [raced([1.0, 1.01, 1.02, 1.03], [1.0, 1.0, 1.001, 0.999], seed=seed) for seed in range(40)]
    assert sum(race.best != 0 for race, _ in races) <= 1
    assert max(cost for _, cost in races) < 1.01


def test_a_config_runs_once_until_it_has_been_timed():
    """Because it may be much slower than predicted."""
    race = Race([1.0, 1.001], max_cost=1.0)
    race.join(1)
    for calls in (1, 1):
        configs = race.plan()
        assert configs.count(1) == calls
        race.see(configs, [math.log((100.0, 101.0)[config]) for config in configs])
    assert race.plan().count(1) > 1


@pytest.mark.parametrize("seed", range(5))
def test_a_clock_that_drifts_does_not_replace_the_first(seed):
    """As a card that gets slower by 10 %, and then faster: later calls run other configs."""
    race, _ = raced([1.0, 1.01, 1.02], [1.0, 1.02, 1.03], drift=lambda call: 0.1 * math.sin(call / 30), seed=seed)
    assert race.best == 0


@pytest.mark.parametrize("seed", range(5))
def test_interrupted_calls_do_not_decide(seed):
    """Every seventh call takes three times as long, whichever config it runs."""
    late = {"drift": lambda call: math.log(3.0) if call % 7 == 3 else 0.0}
    assert raced([1.0, 1.01], [1.0, 1.03], seed=seed, **late)[0].best == 0
    assert raced([1.0, 1.01], [1.0, 0.85], seed=seed, **late)[0].best == 1


@pytest.mark.parametrize(("max_cost", "most"), [(0.01, 1.01), (0.03, 1.03), (0.0, 1.0)])
def test_exploring_costs_no_more_than_the_limit(max_cost, most):
    predicted = [1.0, *(1.02 + 0.01 * config for config in range(15))]
    race, cost = raced(predicted, predicted, max_cost=max_cost)
    assert race.best == 0
    assert 1.0 <= cost <= most


@pytest.mark.parametrize("seed", range(5))
def test_without_predictions_much_slower_configs_cost_no_more_than_the_limit(seed):
    """As for an attached kernel without a family; before, such a race cost 4 %."""
    actual = [1.0, *np.random.default_rng(seed).uniform(1.3, 2.0, 11)]
    race, cost = raced([1.0] * 12, actual, noise=0.02, seed=seed)
    assert race.best == 0
    assert 1.0 < cost <= 1.01
    assert raced([1.0] * 4, [1.0, 0.8, 1.5, 2.0], noise=0.02, seed=seed)[0].best == 1


def test_a_limit_in_seconds():
    predicted = [1.0, 1.2, 1.2]
    explored, _ = raced(predicted, predicted, max_s=1.0)
    kept, _ = raced(predicted, predicted, max_s=1e-9)
    assert explored.calls[1] > 1
    assert kept.calls.tolist() == [CALLS, 0, 0]


def test_candidates_alternate_with_the_choice_so_that_the_clock_affects_all():
    race = Race([1.0] * 4, max_cost=1.0)
    for config in range(1, 4):
        race.join(config)
    race.seen[:] = 2
    assert planned(race, 12) == [0, 1, 2, 0, 3, 0, 0, 1, 2, 0, 0, 3]  # one of each two calls, in either order


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("period", [2, 4])
def test_data_that_alternate_do_not_decide(seed, period):
    """As if layers with other data took turns."""
    turns = {"drift": lambda call: 0.1 * (call % period % 2)}
    assert raced([1.0, 1.01, 1.02], [1.0, 1.02, 1.03], seed=seed, **turns)[0].best == 0
    assert raced([1.0, 1.01, 1.02], [1.0, 0.9, 1.03], seed=seed, **turns)[0].best == 1
    turns = {"drift": lambda call: -0.1 * (call % period % 2)}
    assert raced([1.0, 1.01, 1.02], [1.0, 1.02, 1.03], seed=seed, **turns)[0].best == 0


def test_only_configs_whose_binary_is_ready_run_and_the_calls_count_once_all_have_joined():
    race = Race([1.0, 1.0, 1.0], max_cost=1.0)
    assert planned(race, CALLS + 10) == [0] * (CALLS + 10)
    race.join(2)
    race.seen[2] = 2
    assert planned(race, 4) == [0, 2, 0, 2]
    assert not race.is_over
    race.join(1)
    for _ in range(CALLS):
        assert not race.is_over
        race.plan(1)
    assert race.is_over


def test_calls_that_did_not_run_are_not_counted():
    race = Race([1.0, 1.0], max_cost=1.0)
    race.join(1)
    race.seen[1] = 2
    plan = race.plan()
    race.undo(plan[4:])
    assert race.calls.tolist() == [2, 2]


def test_a_dropped_config_runs_no_more_and_a_race_of_one_is_over():
    race = Race([1.0, 1.0])
    race.join(1)
    race.drop(1)
    assert race.is_over
    assert planned(race, 4) == [0] * 4


def test_what_an_earlier_process_found_is_where_it_starts():
    race = Race([1.0, 1.05])
    race.recall(1, 0.9, 0.005, 40)
    assert race.best == 0  # its binary is not ready
    race.join(1)
    assert race.best == 1
    slowdown, deviation = race.slowdown(1)
    assert (slowdown, deviation) == (pytest.approx(0.9), pytest.approx(0.005))


def test_times_of_other_configs_than_the_choice_may_be_read_first():
    race = Race([1.0, 1.0])
    race.join(1)
    race.see([1], [math.log(100.0)])
    assert race.time_us(0) == pytest.approx(100.0, rel=0.1)


@pytest.mark.parametrize("seed", range(3))
def test_a_first_call_that_waits_for_the_binary_does_not_count(seed):
    """It takes ten times as long, and neither the choice nor the cost is affected."""
    random, race, loaded = np.random.default_rng(seed), Race([1.0, 1.01, 1.02]), {0}
    race.join(1)
    race.join(2)
    while not race.is_over:
        configs, logs = race.plan(), []
        for config in configs:
            waited = 1.0 if config in loaded else 10.0
            loaded.add(config)
            logs.append(math.log(100 * waited * (1.0, 0.9, 1.1)[config]) + random.normal(0, 0.01))
        race.see(configs, logs)
    assert race.best == 1
    assert race.slowdown(1)[0] == pytest.approx(0.9, rel=0.01)
