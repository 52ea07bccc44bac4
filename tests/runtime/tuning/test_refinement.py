"""`Refinement` with a clock, jobs and ranks of the test's own: no call waits, and what is chosen and stored."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from foretune.datasets import DeviceSpec, ForetuneError, ForetuneWarning, KernelConfig, Problem, load
from foretune.runtime.timing import flywheel
from foretune.runtime.tuning.cache.cache_folder import refined_contents
from foretune.runtime.tuning.cache.kernel_cache import ChoiceCache
from foretune.runtime.tuning.refine import calls, refinement
from foretune.runtime.tuning.refine.race import CALLS
from foretune.runtime.tuning.refine.refinement import Refinement, Store
from waiting import at_once

H200 = DeviceSpec.named("h200")
CONFIGS = [KernelConfig.of(BLOCK=size) for size in (16, 32, 64, 128)]
PROBLEM = Problem.of("toy", rows=64)


class World:
    """Calls of an op: what each config takes, which jobs have ended, and what has been launched."""

    def __init__(self):
        self.times = dict(zip(CONFIGS, (100.0, 101.0, 90.0, 120.0), strict=True))
        self.jobs, self.launched, self.timed, self.running = {}, [], [], []
        self.has_completed, self.compiles, self.is_busy = True, True, True

    # The stopwatch.
    def begin(self):
        return object()

    def end(self, mark, about):
        config, size = self.launched[-1]
        self.running.append((about, self.times[config] * size if self.is_busy else 0.0))

    def cancel(self, mark):
        pass

    def read(self):
        while self.has_completed and self.running:
            self.timed.append(self.running[0])
            yield self.running.pop(0)

    # The op.
    def compile_one(self, config):
        self.jobs[config] = job = Future()
        if self.compiles:
            job.set_result(None)
        return [job]

    def call(self, refined, size=1.0):
        def launch(config):
            self.launched.append((config, size))
            if isinstance(self.times[config], Exception):
                raise self.times[config]
            return config

        return refined.run(launch, self.compile_one, size)

    def refined(self, configs=CONFIGS, **options):
        options = {"limit": {"max_cost": 0.01}} | options
        return Refinement("toy", PROBLEM, configs, [1.0, 1.01, 1.02, 1.03][: len(configs)], watch=self, **options)


@pytest.fixture
def world():
    return World()


@pytest.fixture(autouse=True)
def jobs_at_once(monkeypatch):
    """Run what would run in a thread at once."""

    monkeypatch.setattr(refinement, "in_background", at_once)


def run(world, refined, calls=CALLS + 20):
    return [world.call(refined) for _ in range(calls)]


def test_the_first_call_runs_the_prediction_and_the_fastest_is_chosen(world, caplog):
    caplog.set_level(logging.INFO, "foretune")
    refined = world.refined()
    ran = run(world, refined)
    assert ran[0] == CONFIGS[0]
    assert set(ran) >= set(CONFIGS[:3])
    assert refined.final == ran[-1] == CONFIGS[2]
    assert [line for line in caplog.messages if "toy rows=64" in line] == caplog.messages[:1]
    assert "BLOCK=64" in caplog.text
    assert "10.0 %" in caplog.text
    assert "faster than predicted" in caplog.text


def test_once_decided_nothing_is_timed(world):
    refined = world.refined()
    run(world, refined)
    count = len(world.timed)
    run(world, refined, 10)
    assert len(world.timed) == count
    assert world.running == []


def test_no_call_waits_for_a_compilation(world):
    world.compiles = False
    refined = world.refined()
    assert set(run(world, refined, 2 * CALLS)) == {CONFIGS[0]}
    assert list(world.jobs) == CONFIGS[1:3]  # few at a time
    assert refined.final is None
    world.jobs[CONFIGS[1]].set_result(None)
    assert set(run(world, refined, 20)) == set(CONFIGS[:2])
    assert list(world.jobs) == CONFIGS[1:]


def test_no_call_waits_for_the_device(world):
    """Events that have not completed are not read, and at most a few calls are timed at once."""
    world.has_completed = False
    refined = world.refined()
    run(world, refined, 50)
    assert 0 < len(world.running) <= 32
    assert world.timed == []
    world.has_completed = True
    assert run(world, refined)[-1] == CONFIGS[2]


def test_no_call_waits_for_another_thread(world):
    refined = world.refined()
    with refined._lock:
        assert run(world, refined, 3) == [CONFIGS[0]] * 3
    assert world.running == world.timed == []


def test_a_config_that_cannot_be_compiled_takes_no_part(world):
    def compile_one(config):
        job = Future()
        if config == CONFIGS[1]:
            raise ForetuneError("no stand-in")
        job.set_exception(RuntimeError("ptxas")) if config == CONFIGS[2] else job.set_result(None)
        return [job]

    world.compile_one = compile_one
    ran = run(world, refined := world.refined())
    assert set(ran) <= {CONFIGS[0], CONFIGS[3]}
    assert refined.final == CONFIGS[0]


def test_a_config_that_fails_is_replaced_in_the_same_call(world):
    world.times[CONFIGS[1]] = RuntimeError("out of resources")
    refined = world.refined()
    with pytest.warns(ForetuneWarning, match="BLOCK=32.* failed .*out of resources.*: it is not tried again"):
        ran = run(world, refined)
    assert [config for config, _ in world.launched].count(CONFIGS[1]) == 1
    assert CONFIGS[1] not in ran
    assert refined.final == CONFIGS[2]


def test_an_error_that_every_config_has_is_the_callers(world):
    good, world.times = world.times, dict.fromkeys(CONFIGS, RuntimeError("bad argument"))
    refined = world.refined()
    for _ in range(5):
        with pytest.raises(RuntimeError, match="bad argument"):
            world.call(refined)
    world.times = good
    assert run(world, refined)[-1] == CONFIGS[2]  # no config was dropped


def test_times_of_different_sizes_are_compared_by_what_is_predicted_for_them(world):
    """The faster config meets the large calls only."""
    world.times[CONFIGS[2]] = 95.0
    refined = world.refined()
    for call in range(CALLS + 20):
        world.call(refined, size=1.0 if call % 2 == 0 else 3.0)
    assert refined.final == CONFIGS[2]


def test_a_capture_runs_the_best_so_far_and_touches_no_event(world, monkeypatch):
    refined = world.refined()
    run(world, refined, 40)
    best = refined.candidates[refined.race.best]
    assert best == CONFIGS[2]
    monkeypatch.setattr(refinement, "is_capturing", lambda: True)
    count = len(world.timed) + len(world.running)
    world.read = None  # would raise
    assert run(world, refined, 5) == [best] * 5
    assert len(world.timed) + len(world.running) == count


@pytest.mark.parametrize(
    ("why", "patch"),
    [
        ("choices are pinned", lambda patch: patch.setenv("FORETUNE_PIN", "foretune.lock")),
        ("within foretune.agree", lambda patch: patch.setattr(calls, "may_tune", lambda: False)),
        (
            "use_deterministic_algorithms is on",
            lambda patch: patch.setattr("torch.are_deterministic_algorithms_enabled", lambda: True),
        ),
    ],
)
def test_nothing_is_explored_where_it_must_not_and_one_line_says_why(world, why, patch, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "foretune")
    refined = world.refined()
    with monkeypatch.context() as context:
        patch(context)
        assert set(run(world, refined)) == {CONFIGS[0]}
    assert [why in line for line in caplog.messages] == [True]
    assert run(world, refined)[-1] == CONFIGS[2]


def test_deterministic_algorithms_stop_exploring_at_the_next_call(world, monkeypatch):
    refined = world.refined()
    while world.call(refined) == CONFIGS[0]:
        pass
    counted = int(refined.race.calls.sum())
    monkeypatch.setattr("torch.are_deterministic_algorithms_enabled", lambda: True)
    assert set(run(world, refined, 50)) == {CONFIGS[0]}
    assert int(refined.race.calls.sum()) <= counted  # what was planned did not run


def test_conditions_and_times_are_looked_up_between_plans_only(world, monkeypatch):
    looked_up = []
    monkeypatch.setattr(refinement, "why_paused", lambda: looked_up.append(1) or "")
    run(world, world.refined(), CALLS)
    assert len(looked_up) <= CALLS / 8 + 5


def test_a_call_that_plans_is_not_timed(world, monkeypatch):
    """It takes the host longer, so the device may have nothing to do meanwhile."""
    refined, planned = world.refined(), []
    review = refined._review
    monkeypatch.setattr(refined, "_review", lambda compile_one: (planned.append(1), review(compile_one)))
    for _ in range(100):
        before, plans, is_resting = len(world.timed) + len(world.running), len(planned), refined._resting > 0
        world.call(refined)
        is_timed = len(world.timed) + len(world.running) > before
        assert is_timed == (len(planned) == plans and not is_resting)


def test_while_the_device_waits_for_the_host_nothing_is_explored(world):
    """The times would be the host's, and a slower config would change nothing. A few calls tell when that ends."""
    refined = world.refined()
    world.is_busy = False
    run(world, refined, 30)
    count = len(world.timed)
    assert set(run(world, refined, 2 * CALLS)) == {CONFIGS[0]}
    assert 0 < len(world.timed) - count <= CALLS / 4
    assert not refined.race.seen.any()
    assert refined.final is None
    world.is_busy = True
    assert run(world, refined, 2 * CALLS)[-1] == CONFIGS[2]


def test_without_a_prediction_more_configs_take_part(world):
    configs = [KernelConfig.of(BLOCK=16 + at) for at in range(60)]
    many = {"limit": {"max_cost": 0.01}, "watch": world}
    assert len(Refinement("toy", PROBLEM, configs, [1.0] * 60, **many).candidates) == refinement.UNPREDICTED
    predicted = Refinement("toy", PROBLEM, configs, [1 + 0.01 * at for at in range(60)], **many)
    assert predicted.candidates == tuple(configs[: refinement.CANDIDATES])


def test_the_source_is_hashed_once(world):
    hashed = []
    opened = lambda: hashed.append(1) or ChoiceCache.of("toy", "a1b2", H200)  # noqa: E731
    store = Store(PROBLEM, opened, {}, lambda *given: None, lambda: "bundle")
    run(world, world.refined(store=store))
    assert hashed == [1]


def test_a_device_that_is_far_behind_gets_no_further_events(world):
    """Calls rest until some have completed, and none is lost."""
    world.has_completed = False
    refined = world.refined()
    run(world, refined, 100)
    count = len(world.running)
    assert run(world, refined, 20) == [CONFIGS[0]] * 20
    assert len(world.running) == count
    world.has_completed = True
    assert run(world, refined, 2 * CALLS)[-1] == CONFIGS[2]


def test_refining_shows_calls_times_and_what_is_saved(world, monkeypatch):
    monkeypatch.setattr(refinement, "_all", {})
    refined = refinement.refinement_of("key", world.refined)
    assert refinement.refinement_of("key", world.refined) is refined
    run(world, refined)
    rows = refinement.refining().rows
    assert [row["config"] for row in rows] == [str(config) for config in CONFIGS]
    chosen = rows[2]
    assert (chosen["state"], chosen["kernel"], chosen["problem"]) == ("chosen", "toy", str(PROBLEM))
    assert chosen["mean_us"] == pytest.approx(90.0, rel=0.01)
    assert chosen["saved_us"] == pytest.approx(10.0, rel=0.05)
    low, high = map(float, chosen["interval_us"].split("-"))
    assert low <= chosen["mean_us"] <= high
    assert {row["state"] for row in rows if row is not chosen} == {"dropped"}
    assert sum(row["calls"] for row in rows) == len(world.timed)


def stored(logged, configs=CONFIGS):
    return Store(
        PROBLEM,
        lambda: ChoiceCache.of("toy", "a1b2", H200),
        {config: config for config in configs},
        lambda config, time_us: logged.append((config, time_us)),
        lambda: "bundle",
    )


def test_results_are_stored_and_the_next_process_starts_from_them(world):
    logged = []
    run(world, world.refined(store=stored(logged)))
    assert dict(logged)[CONFIGS[2]] == pytest.approx(90.0, rel=0.01)
    cache = ChoiceCache.of("toy", "a1b2", H200)
    assert cache.choice(PROBLEM, "bundle") == CONFIGS[2]
    assert cache.refined(PROBLEM).decided == CONFIGS[2]
    assert cache.times(PROBLEM) == {}  # they are not times of single launches
    shown = refined_contents("toy").rows
    assert [row["state"] for row in shown if row["config"] == str(CONFIGS[2])] == ["chosen"]
    world.jobs.clear()
    again = world.refined(store=stored([]))
    ran = run(world, again, 5)
    assert ran[0] == CONFIGS[0]  # no call waits for the file or for a binary
    assert again.final == ran[-1] == CONFIGS[2]
    assert list(world.jobs) == [CONFIGS[2]]


def test_the_mean_times_are_logged_with_their_method_at_the_decision(world, monkeypatch, tmp_path):
    monkeypatch.setenv(flywheel.VARIABLE, str(tmp_path / "log"))
    store = stored([])
    store.log = lambda config, time_us: flywheel.log_row("toy", PROBLEM, config, time_us, H200, timed="refined")
    run(world, refined := world.refined(store=store))
    logged = load(tmp_path / "log")
    assert [run["timed"] for run in logged.provenance["runs"].values()] == ["refined"]
    times = {logged.configs[row.config]: row.time_us for row in logged.measurements.itertuples()}
    assert times == {one: pytest.approx(time.mean_us) for one, time in refined.times().items()}


def test_a_process_that_ends_early_has_stored_what_it_timed(world):
    run(world, world.refined(store=stored([])), 70)
    refined = ChoiceCache.of("toy", "a1b2", H200).refined(PROBLEM)
    assert refined.decided is None
    assert 50 <= sum(time.calls for time in refined.times.values()) <= 70
    again = world.refined(store=stored([]))
    run(world, again, 2)
    assert again.race.seen[1:].sum() >= 10


def test_an_unknown_choice_of_an_earlier_process_is_not_taken(world):
    run(world, world.refined(store=stored([])))
    assert run(world, world.refined(CONFIGS[:2], store=stored([])), 5)[-1] in CONFIGS[:2]


@pytest.fixture
def ranks(monkeypatch):
    """Two ranks that call in step. `meet` is what `agreed` does on both of them."""
    monkeypatch.setattr(refinement, "scope", lambda: 1)
    monkeypatch.setattr(refinement, "choose_together", lambda: True)
    worlds = World(), World()
    posted = []

    def agreed(times, kernel, problem, configs):
        posted.append((problem, times))
        return times

    monkeypatch.setattr(refinement, "agreed", agreed)
    return worlds, posted


def test_ranks_run_the_same_configs_at_the_same_calls_until_they_meet(ranks):
    """Although they measure different times, and the binaries of one are late."""
    (here, there), posted = ranks
    there.times = dict(zip(CONFIGS, (100.0, 80.0, 150.0, 90.0), strict=True))
    there.compiles = False
    both = [here.refined(), there.refined()]
    run(here, both[0], CALLS)
    run(there, both[1], CALLS)
    assert both[0].race.calls.tolist() == both[1].race.calls.tolist()
    assert {config for config, _ in there.launched} == {CONFIGS[0]}
    assert {config for config, _ in here.launched} >= set(CONFIGS[:3])
    assert posted == []


def test_ranks_switch_together_to_what_is_fastest_on_the_slowest(ranks, monkeypatch):
    """Each rank is a thread here, and meets the other one at the same call."""
    worlds, _ = ranks
    worlds[0].times[CONFIGS[1]] = 94.0
    worlds[1].times = dict(zip(CONFIGS, (100.0, 95.0, 150.0, 120.0), strict=True))
    met, everyones = threading.Barrier(2), []

    def agreed(times, kernel, problem, configs):
        everyones.append((problem, times))
        met.wait(timeout=60)
        (about, mine), (about_other, theirs) = everyones
        assert about == about_other == f"{PROBLEM} after {CALLS} calls"
        return [None if None in pair else max(pair) for pair in zip(mine, theirs, strict=True)]

    monkeypatch.setattr(refinement, "agreed", agreed)
    both = [world.refined() for world in worlds]
    with ThreadPoolExecutor(2) as pool:
        ran = list(pool.map(lambda world, refined: run(world, refined, CALLS + 1), worlds, both))
    assert ran[0] == ran[1]
    assert both[0].final == both[1].final == ran[0][-1] == CONFIGS[1]


def test_ranks_that_do_not_agree_run_the_prediction(ranks, monkeypatch):
    (here, _), _ = ranks
    monkeypatch.setattr(refinement, "agreed", lambda times, *about: [None] * 4)
    refined = here.refined()
    run(here, refined, CALLS + 1)
    assert refined.final == CONFIGS[0]


@pytest.mark.parametrize("value", ["fast", -0.1, 1.5, "2m", True, "nan"])
def test_an_invalid_limit_is_refused(value, monkeypatch):
    with pytest.raises(ForetuneError, match="max_cost must be a share from 0 to 1, or seconds"):
        calls.check_cost(value)
    monkeypatch.setenv(calls.VARIABLE, str(value))
    if value is not True:
        with pytest.raises(ForetuneError, match="FORETUNE_MAX_COST must be a share"):
            calls.check_cost()


def test_the_limit_of_the_environment(monkeypatch):
    assert calls.check_cost() == {"max_cost": 0.01}
    monkeypatch.setenv(calls.VARIABLE, "1.5s")
    assert calls.check_cost() == {"max_s": 1.5}


def test_without_a_gpu_there_is_no_stopwatch():
    assert calls.stopwatch() is None


def test_events_are_reused_and_read_only_when_they_have_completed(monkeypatch):
    """The pool of CUDA events, with events of the test's own."""
    made = []

    class Event:
        def __init__(self, enable_timing):
            self.is_done = False
            made.append(self)

        def record(self, stream):
            self.is_done, self.stream = False, stream

        def query(self):
            return self.is_done

        def elapsed_time(self, other):
            return 0.25

    monkeypatch.setattr("torch.cuda.Event", Event)
    streams = iter([SimpleNamespace(device_index=index) for index in (0, 0, 1, 0, 1)])
    monkeypatch.setattr("torch.cuda.current_stream", lambda: next(streams))
    monkeypatch.setattr(calls.CudaEvents, "free", {})
    events = calls.CudaEvents()
    for call in range(3):
        events.end(events.begin(), call)
    assert [event.stream.device_index for event in made] == [0, 0, 0, 0, 1, 1]
    made[1].is_done = made[5].is_done = True
    assert list(events.read()) == [(0, 250.0)]  # in the order of the calls
    made[3].is_done = True
    assert [about for about, _ in events.read()] == [1, 2]
    others = calls.CudaEvents()
    assert others.begin()[0] is made[2]
    others.cancel(others.begin())
    assert len(made) == 6
    assert len(calls.CudaEvents.free[1]) == 1


@pytest.mark.parametrize(
    ("reached", "launch_us", "time_us"),
    [(False, 100.0, 250.0), (True, 4.0, 250.0), (True, 6.0, 0.0)],
    ids=["busy device", "short launch", "long launch"],
)
def test_a_time_does_not_count_if_the_device_may_have_waited_for_the_host(reached, launch_us, time_us, monkeypatch):
    made, clock = [], iter([1.0, 1.0 + launch_us * 1e-6])

    class Event:
        def __init__(self, enable_timing):
            made.append(self)

        def record(self, stream):
            pass

        def query(self):
            return reached if self is made[0] else True

        def elapsed_time(self, other):
            return 0.25

    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda.current_stream", lambda: SimpleNamespace(device_index=0))
    monkeypatch.setattr(calls.CudaEvents, "free", {})
    monkeypatch.setattr(calls.time, "perf_counter", lambda: next(clock, 2.0))
    events = calls.CudaEvents()
    events.end(events.begin(), "call")
    assert list(events.read()) == [("call", time_us)]
