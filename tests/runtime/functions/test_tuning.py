"""What `foretune.tune` does with a call: measures, chooses, remembers, gives up, and is interrupted."""

from __future__ import annotations

import threading
import unittest.mock
from concurrent.futures import Future
from types import SimpleNamespace

import foretune
import pytest
from foretune import ForetuneError, ForetuneWarning, KernelConfig, Problem, TuningFailed
from foretune.datasets import Status
from foretune.runtime.tuning.functions import TunedFunction, config_cache
from foretune.runtime.tuning.functions.config_space import Candidate
from foretune.runtime.tuning.session import Measured, TuningSession


def slow_tiles(watch, calls=None, fails=()):
    """A function that takes as many microseconds as its tile has."""

    def function(x, tile):
        if calls is not None:
            calls.append(tile)
        if tile in fails:
            raise RuntimeError(f"no {tile}")
        watch.spend(tile)
        return x, tile

    return function


def test_the_first_call_of_a_key_measures_and_the_next_ones_run_the_fastest(watch):
    calls = []
    tuned = foretune.tune({"tile": [5, 2, 3]}, n_warmup=2, n_repeat=3, cache=False, timer=watch)(
        slow_tiles(watch, calls)
    )
    assert tuned(7) == (7, 2)
    assert calls == [5] * 5 + [2] * 5 + [3] * 5 + [2]
    calls.clear()
    assert (tuned(7), calls) == ((7, 2), [2])
    tuned(8)
    assert len(calls) == 17


def test_of_equals_the_first_is_chosen_and_one_config_is_not_measured(watch):
    tuned = foretune.tune({"tile": [5, 2], "other": [1, 0]}, cache=False, timer=watch)(
        lambda tile, other: watch.spend(tile) or (tile, other)
    )
    assert tuned() == (2, 1)
    alone = foretune.tune({"tile": [5]}, cache=False, timer=watch)(slow_tiles(watch, calls := []))
    assert (alone(1), calls) == ((1, 5), [5])


def test_without_autotune_the_best_known_runs_or_the_first_and_nothing_is_measured(watch):
    tuned = foretune.tune({"tile": [5, 2]}, prune=lambda config, x: config["tile"] != 9, cache=False, timer=watch)(
        slow_tiles(watch)
    )
    assert tuned(1, autotune=False) == (1, 5)
    assert watch.samples == 0
    tuned(1)
    assert tuned(1, autotune=False) == (1, 2)
    with pytest.raises(ForetuneError, match="autotune must be true or false but is 1"):
        tuned(1, autotune=1)


def test_in_mode_off_the_first_config_runs_and_nothing_is_measured(watch, monkeypatch):
    tuned = foretune.tune({"tile": [5, 2]}, cache=False, timer=watch)(slow_tiles(watch))
    monkeypatch.setenv("FORETUNE_MODE", "off")
    assert tuned(1) == (1, 5)
    assert watch.samples == 0
    monkeypatch.delenv("FORETUNE_MODE")
    assert tuned(1) == (1, 2)
    monkeypatch.setenv("FORETUNE_MODE", "off")
    assert tuned(1) == (1, 5)  # known times do not count, either


def test_a_config_that_fails_is_one_config_less_and_is_told(watch):
    tuned = foretune.tune({"tile": [1, 5, 2]}, cache=False, timer=watch)(slow_tiles(watch, fails=[1]))
    assert tuned(0) == (0, 2)
    first = tuned.tune(0).trials[0]
    assert (first.status, first.time_us, first.error) == (Status.LAUNCH_FAILED, None, "RuntimeError: no 1")


def test_where_all_fail_the_error_says_why_of_each(watch):
    import pickle

    def function(x, tile):
        raise (RuntimeError if tile == 1 else KeyError)(f"no {tile}")

    tuned = foretune.tune({"tile": [1, 2]}, prune=lambda config, x: x < 5 or "x is large", cache=False, timer=watch)(
        function
    )
    with pytest.raises(TuningFailed) as failed:
        tuned(0)
    assert "none of the 2 configs of" in str(failed.value)
    assert "tile=1: launch_failed: RuntimeError: no 1\n  tile=2: launch_failed: KeyError: 'no 2'" in str(failed.value)
    assert repr(failed.value.__cause__) == "RuntimeError('no 1')"
    assert str(pickle.loads(pickle.dumps(failed.value))) == str(failed.value)
    assert [trial.config for trial in failed.value.trials] == [{"tile": 1}, {"tile": 2}]
    with pytest.raises(TuningFailed, match="tile=1: invalid: x is large"):
        tuned(7)


def test_where_all_fail_of_one_type_that_is_raised_with_its_traceback(watch):
    import sys
    import traceback

    tuned = foretune.tune({"tile": [1, 2]}, cache=False, timer=watch)(slow_tiles(watch, fails=[1, 2]))
    with pytest.raises(RuntimeError, match="no 1") as failed:
        tuned(0)
    assert not isinstance(failed.value, TuningFailed)
    assert traceback.extract_tb(failed.value.__traceback__)[-1].name == "function"
    if sys.version_info >= (3, 11):
        assert "tile=2: launch_failed: RuntimeError: no 2" in failed.value.__notes__[0]


def test_exceptions_that_are_kept_keep_no_tensor_alive(watch):
    import gc
    import weakref

    class Large:
        pass

    alive = []

    def function(tile):
        large = Large()
        alive.append(weakref.ref(large))
        try:
            raise KeyError(tile)
        except KeyError as error:
            raise RuntimeError("no memory") from error

    failures = foretune.runtime.tuning.session.Failures()
    for tile in range(2):
        with pytest.raises(RuntimeError) as raised:
            function(tile)
        raised.value.__cause__.__cause__ = raised.value  # a cycle ends, too
        failures.add(raised.value)
        del raised
    gc.collect()
    assert [one() for one in alive] == [None, None]
    assert str(failures.error(TuningFailed("none"))) == "no memory"


def test_a_failure_has_its_status():
    class OutOfResources(Exception):  # noqa: N818 - as Triton's
        pass

    class CompilationError(Exception):
        pass

    found = [Measured.failed(error).status for error in (OutOfResources(), CompilationError("x"), ValueError("\x1b"))]
    assert found == [Status.OUT_OF_RESOURCES, Status.COMPILE_FAILED, Status.LAUNCH_FAILED]
    assert Measured.failed(ValueError("\x1b")).error == "ValueError: \\x1b"


def test_prune_sees_the_config_and_the_call_and_may_change_neither(watch):
    seen = []

    def prune(config, x, scale=1):
        seen.append((config.pop("tile"), x, scale))
        return seen[-1][0] * x * scale < 50

    tuned = foretune.tune({"tile": [100, 3, 2]}, prune=prune, cache=False, timer=watch)(
        lambda x, scale=1, tile=0: watch.spend(tile) or tile
    )
    assert tuned(10, scale=2) == 2
    assert seen[:3] == [(100, 10, 2), (3, 10, 2), (2, 10, 2)]
    assert next((trial.status, trial.error) for trial in tuned.tune(10, scale=2).trials) == (
        Status.INVALID,
        "refused by prune",
    )


def test_a_prune_that_fails_refuses_and_one_that_says_nothing_is_wrong(watch):
    tuned = foretune.tune({"tile": [0, 1]}, prune=lambda config, x: 1 / config["tile"] > 0, cache=False, timer=watch)(
        slow_tiles(watch)
    )
    assert tuned(0) == (0, 1)
    assert "prune raised ZeroDivisionError" in tuned.tune(0).trials[0].error
    silent = foretune.tune({"tile": [0, 1]}, prune=lambda config, x: None, cache=False)(slow_tiles(watch))
    with pytest.raises(
        ForetuneError, match="prune must return True, or False or the reason why not, but returned None"
    ):
        silent(0)


def test_ctrl_c_keeps_what_was_measured(watch):
    calls, space = [], {"tile": [5, 2, 3]}

    def function(x, tile):
        calls.append(tile)
        if calls.count(3) == 1 and tile == 3:
            raise KeyboardInterrupt
        watch.spend(tile)
        return tile

    with pytest.raises(KeyboardInterrupt):
        foretune.tune(space, timer=watch)(function)(0)
    calls.append(3)
    calls[:] = [3]
    assert foretune.tune(space, timer=watch)(function)(0) == 2
    assert set(calls[1:-1]) == {3}  # the others were known, from the disk


def test_another_list_of_configs_measures_only_what_is_new(watch):
    calls = []
    function = slow_tiles(watch, calls)
    assert foretune.tune({"tile": [5, 3]}, timer=watch)(function)(0) == (0, 3)
    calls.clear()
    assert foretune.tune({"tile": [5, 4, 3, 2]}, timer=watch)(function)(0) == (0, 2)
    assert set(calls) == {4, 2}
    calls.clear()
    assert foretune.tune({"tile": [5, 4]}, timer=watch)(function)(0) == (0, 4)
    assert calls == [4]


def test_a_budget_ends_it_with_the_best_so_far(watch):
    seconds = iter(range(1000))
    tiles = list(range(20, 0, -1))
    few = foretune.tune({"tile": tiles}, max_trials=4, cache=False, timer=watch)(slow_tiles(watch))
    result = few.tune(0)
    assert (len(result.trials), result.untried) == (4, 16)
    assert result.best_time_us == min(trial.time_us for trial in result.trials)
    assert "ended by max_trials=4" in result.reason
    tried = [trial.config["tile"] for trial in result.trials]
    assert 20 in tried  # what comes first in a space
    assert tried != tiles[:4]  # a sample of it, not a corner
    from foretune.runtime.tuning.functions import TunedFunction

    timed = TunedFunction(
        slow_tiles(watch), {"tile": tiles}, budget_s=10, cache=False, timer=watch, clock=lambda: float(next(seconds))
    )
    assert 1 <= len(timed.tune(0).trials) < 10
    assert "ended by budget_s=10" in timed.tune(0, force=True).reason
    nothing = foretune.tune({"tile": tiles}, budget_s=0.0, cache=False, timer=watch)(slow_tiles(watch))
    assert len(nothing.tune(0).trials) == 1


def test_a_budget_is_not_over_before_something_works(watch):
    tiles = list(range(20))
    tuned = foretune.tune({"tile": tiles}, max_trials=1, cache=False, timer=watch)(slow_tiles(watch, fails=tiles[:-1]))
    assert tuned(0) == (0, 19)


class Adviser:
    """Advises the fastest two of the last key."""

    def __init__(self):
        self.learned = []

    def learn(self, problem, times):
        self.learned.append((problem, dict(times)))

    def advise(self, problem, configs, k):
        assert k == "auto"
        assert all(isinstance(config, KernelConfig) for config in configs)
        positions = range(len(configs))
        if self.learned:
            times = self.learned[-1][1]
            positions = sorted(positions, key=lambda at: times.get(configs[at]) or 1e9)[:2]

        class Advice:
            sure, reason = bool(self.learned), "the last key"

        Advice.positions = tuple(positions)
        return Advice


def test_a_guided_search_measures_what_is_advised_and_learns_from_every_key(watch):
    adviser, space = Adviser(), {"tile": [5, 2, 3, 9]}
    function = slow_tiles(watch)
    tuned = foretune.tune(space, search=adviser, timer=watch)(function)
    assert (len(tuned.tune(64).trials), len(tuned.tune(128).trials)) == (4, 2)
    assert [problem.dims for problem, _ in adviser.learned] == [(("x", 64),), (("x", 128),)]
    assert "2 of 4 configs advised: the last key" in tuned.tune(256).reason
    later = Adviser()  # another process, which learns from the disk
    assert len(foretune.tune(space, search=later, timer=watch)(function).tune(512).trials) == 2
    assert {problem["x"] for problem, _ in later.learned} == {64, 128, 256, 512}


def test_a_search_with_the_model_measures_a_part_and_less_once_it_has_seen_other_keys(watch, monkeypatch):
    monkeypatch.setattr(TuningSession, "cost_s", 0.1)
    space = {"tile": list(range(1, 17)), "unroll": [True, False]}

    def function(x, tile, unroll):
        watch.spend(10 + abs(tile - 5) + unroll)

    tuned = foretune.tune(space, search="model", cache=False, timer=watch)(function)
    found = [tuned.tune(rows) for rows in range(64, 128, 4)]
    counts = [len(result.trials) for result in found]
    assert counts[0] <= 16
    assert max(counts[8:]) <= 4
    assert all(result.best_config == {"tile": 5, "unroll": False} for result in found)
    assert "learned from 15 other problems" in found[-1].reason


def test_advice_that_all_fails_is_not_the_last_word_and_a_broken_adviser_costs_time_alone(watch):
    class Wrong(Adviser):
        def advise(self, problem, configs, k):
            return type("Advice", (), {"positions": (0,), "reason": ""})

    assert foretune.tune({"tile": [1, 5]}, search=Wrong(), cache=False, timer=watch)(slow_tiles(watch, fails=[1]))(
        0
    ) == (0, 5)

    class Broken(Adviser):
        def advise(self, problem, configs, k):
            raise KeyError("x")

    with pytest.warns(ForetuneWarning, match=r"no advice on which configs to measure \(KeyError: 'x'\): all are"):
        assert foretune.tune({"tile": [1, 5]}, search=Broken(), cache=False, timer=watch)(slow_tiles(watch))(0) == (
            0,
            1,
        )


def test_nested_functions_tune_themselves_before_the_outer_one_is_timed(watch):
    inner = foretune.tune({"tile": [50, 1]}, cache=False, timer=watch)(slow_tiles(watch))
    outer = foretune.tune({"step": [20, 10]}, cache=False, timer=watch)(
        lambda x, step: (watch.spend(step) or inner(x), step)
    )
    assert outer(0) == ((0, 1), 10)
    assert [trial.time_us for trial in outer.tune(0).trials] == [21.0, 11.0]


def test_a_function_that_calls_itself_runs_what_is_on_trial(watch):
    met = []

    @foretune.tune({"tile": [3, 1]}, key=lambda n: "all", cache=False, timer=watch)
    def down(n, tile):
        watch.spend(tile)
        if n:
            met.append((tile, down(n - 1)))
        return tile

    assert down(3) == 1
    assert {one for one, other in met} == {1, 3}
    assert all(one == other for one, other in met)


def test_many_threads_tune_a_key_once_and_get_the_same(watch):
    calls, threads, results = [], [], []
    tuned = foretune.tune({"tile": [5, 2]}, n_warmup=1, n_repeat=1, cache=False, timer=watch)(slow_tiles(watch, calls))
    barrier = threading.Barrier(16)

    def run():
        barrier.wait(10)
        results.append(tuned(0))

    threads = [threading.Thread(target=run) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == [(0, 2)] * 16
    assert calls.count(5) == 2  # warm-up and sample, once


def test_functions_that_call_each_other_in_two_threads_end(watch):
    meet = threading.Barrier(2)
    first = {"f": True, "g": True}

    def body(name, other, depth):
        if first[name]:
            first[name] = False
            meet.wait(10)  # both are on trial now, and each wants the other
        return other()(depth - 1) if depth else 0

    f = foretune.tune({"tile": [1, 2]}, key=lambda depth: "f", cache=False, timer=watch)(
        lambda depth, tile: body("f", lambda: g, depth)
    )
    g = foretune.tune({"tile": [1, 2]}, key=lambda depth: "g", cache=False, timer=watch)(
        lambda depth, tile: body("g", lambda: f, depth)
    )
    threads = [threading.Thread(target=one, args=(2,), daemon=True) for one in (f, g)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)


class Disk:
    """A function that fails until its disk is mounted, a clock, and each process's tuned function."""

    def __init__(self, watch, tiles=(5, 2), fails=(5, 2)):
        self.watch, self.tiles, self.fails, self.now, self.calls = watch, list(tiles), set(fails), 1000.0, []

    def __reduce__(self):
        return "disk"  # the same in every process

    def function(self, x, tile):
        self.calls.append(tile)
        if tile in self.fails:
            raise OSError("disk not mounted yet")
        self.watch.spend(tile)
        return tile

    def process(self):
        config_cache._opened.cache_clear()
        return TunedFunction(
            lambda x, tile: self.function(x, tile), {"tile": self.tiles}, timer=self.watch, now=self.time
        )

    def time(self):
        return self.now


@pytest.mark.parametrize("is_another_process", [False, True])
def test_where_all_failed_the_next_call_tries_again(watch, is_another_process):
    disk = Disk(watch)
    tuned = disk.process()
    for _ in range(2):
        with pytest.raises(OSError, match="disk not mounted yet"):
            tuned(1)
    assert disk.calls == [5, 2, 5, 2]
    disk.fails.clear()
    assert (disk.process() if is_another_process else tuned)(1) == 2


def test_a_failure_that_may_pass_is_tried_again_after_a_day(watch):
    disk = Disk(watch, tiles=[5, 4, 2], fails=[2, 4])
    assert disk.process()(1) == 5
    disk.fails.clear()
    disk.calls.clear()
    disk.now += config_cache.FAILURES_LAST_S - 1
    assert (disk.process()(1), disk.calls) == (5, [5])
    disk.now += 2
    assert disk.process()(1) == 2
    assert 5 not in disk.calls[1:]  # what has a time is not measured again
    disk.calls.clear()
    disk.now += 2 * config_cache.FAILURES_LAST_S
    assert (disk.process()(1), disk.calls) == (2, [2])


def test_what_the_compiler_or_the_device_refused_stays_refused():
    failures = [
        Measured(Status.LAUNCH_FAILED, error="OSError: disk not mounted yet"),
        Measured(Status.OUT_OF_RESOURCES, error="OutOfMemoryError: CUDA out of memory."),
        Measured(Status.COMPILE_FAILED, error="CompilationError: at 3:4"),
        Measured(Status.OUT_OF_RESOURCES, error="OutOfResources: out of resource: shared memory"),
        Measured(Status.LAUNCH_FAILED, error="RuntimeError: Triton Error [CUDA]: an illegal memory access"),
    ]
    assert [config_cache.may_pass(one) for one in failures] == [True, True, False, False, False]
    named = [Candidate({}, f"{at}") for at in range(len(failures) + 1)]
    times = dict(zip("01234", failures, strict=True)) | {"5": Measured(Status.OK, 1.0, 0.0, 1)}
    record = config_cache.KeyRecord(None, {}, dict(times), "5", "all", failed_at=0.0)
    record.retry_failures(named, now=2 * config_cache.FAILURES_LAST_S)
    assert (list(record.measured), record.done, record.failed_at) == (["2", "3", "4", "5"], "", None)
    record.retry_failures(named[:-1], now=0.0)  # of these none has a time
    assert list(record.measured) == ["5"]
    earlier = config_cache.KeyRecord(None, {}, dict(times), "5", "all").to_json()
    del earlier["failed_at"]  # as earlier versions wrote it: what they finished stays
    record = config_cache.KeyRecord.from_json(earlier)
    record.retry_failures(named, now=1e12)
    assert (record.measured, record.done) == (times, "all")


def coroutine():
    async def later():
        """Do the work."""

    return later()


def asynchronous():
    async def generator():
        yield 1

    return generator()


def thread():
    return threading.Thread(target=print)


class Task:
    """As what `asyncio` has in place of a thread."""

    def __await__(self):
        return iter(())


class Collective:
    """As torch's `Work`."""

    def wait(self):
        """Wait for the ranks."""

    def is_completed(self):
        return False


@pytest.mark.parametrize(
    "returned",
    [
        coroutine,
        asynchronous,
        lambda: (one for one in [1]),
        lambda: map(str, [1]),
        Future,
        Task,
        thread,
        lambda: (1.0, Collective()),
    ],
)
@pytest.mark.parametrize("within", [False, True])
def test_a_result_whose_work_is_done_later_is_refused_with_what_to_do(watch, returned, within):
    part = foretune.tune({"tile": [5, 2]}, cache=False, timer=watch)

    if within:
        inner = part(lambda tile: tile)
        tuned = foretune.contextual_autotune(cache=False, timer=watch)(lambda: (inner(), returned())[1])
    else:
        tuned = part(lambda tile: returned())
    for call in (tuned, tuned.tune):
        with pytest.raises(ForetuneError, match=r"returned .*, whose work is done after the call.*: tune the function"):
            call()
    assert watch.samples == 0


def test_dask_collections_are_results_whose_work_is_done_later(watch):
    delayed = pytest.importorskip("dask.delayed").delayed(sum)([1, 2])
    tuned = foretune.tune({"tile": [5, 2]}, cache=False, timer=watch)(lambda tile: delayed)
    with pytest.raises(ForetuneError, match="returned an object of type Delayed, whose work"):
        tuned()


@pytest.mark.parametrize("returned", [[1, 2], iter([1]), {"x": 1}, unittest.mock.MagicMock(), threading.Lock(), None])
def test_other_results_are_no_trouble(watch, returned):
    tuned = foretune.tune({"tile": [5, 2]}, cache=False, timer=watch)(lambda tile: returned)
    assert tuned() is returned


WRONG_TIMES = [-1.0, float("nan"), float("inf"), "5", None, True, 10**400, 1j]


@pytest.mark.parametrize("wrong", WRONG_TIMES, ids=lambda value: repr(value)[:10])
def test_a_time_that_no_clock_gives_is_a_failure_of_that_config(wrong):
    class Timer:
        def sample(self, call, samples, undo):
            return [3.0, wrong if call() == 2 else 4.0]

    tuned = foretune.tune({"tile": [5, 2]}, cache=False, timer=Timer())(lambda tile: tile)
    assert tuned() == 5
    failed = tuned.tune().trials[1]
    assert (failed.status, failed.time_us) == (Status.LAUNCH_FAILED, None)
    assert "the timer must return finite numbers of microseconds >= 0 but returned " in failed.error


@pytest.mark.parametrize("wrong", [[], None, 5.0])
def test_a_timer_that_returns_no_times_is_told_so(wrong):
    timer = SimpleNamespace(sample=lambda call, samples, undo: wrong)
    tuned = foretune.tune({"tile": [5, 2]}, cache=False, timer=timer)(lambda tile: tile)
    with pytest.raises(ForetuneError, match="the timer must return a list of times but returned"):
        tuned()


def test_a_clock_that_stands_still_is_allowed():
    timer = SimpleNamespace(sample=lambda call, samples, undo: [0.0])
    assert foretune.tune({"tile": [5, 2]}, cache=False, timer=timer)(lambda tile: tile)() == 5


def test_reset_and_restore_undo_every_run_and_are_not_timed(watch):
    import numpy as np

    log = []

    def accumulate(x, out, tile):
        watch.spend(tile)
        log.append((x[0], out.sum()))
        x[0] += 1
        out += x[0]
        return tile

    def reset(x, out):
        watch.spend(1000)
        out[:] = 0

    tuned = foretune.tune(
        {"tile": [3, 2]}, key=lambda x, out: "", reset=reset, restore=["x"], cache=False, timer=watch
    )(accumulate)
    x, out = [5], np.zeros(2)
    assert tuned(x, out) == 2
    assert set(log) == {(5, 0.0)}
    assert (x, out.tolist()) == ([6], [6.0, 6.0])  # once
    assert [trial.time_us for trial in tuned.tune([5], out).trials] == [3.0, 2.0]


def test_restore_takes_tensors_and_says_what_it_does_not_take(watch):
    torch = pytest.importorskip("torch")

    def add(x, bias=None, tile=1):
        watch.spend(tile)
        x += 1

    options = {"cache": False, "timer": watch}
    tuned = foretune.tune({"tile": [3, 2]}, restore=["x", "bias"], **options)(add)
    x = torch.zeros(3, requires_grad=False)
    tuned(x)
    assert x.tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(ForetuneError, match="restore cannot put back x, which is 3 of type int: use reset"):
        tuned(3)
    with pytest.raises(ForetuneError, match="restore names 'z', but the call's arguments are x, bias"):
        foretune.tune({"tile": [3, 2]}, restore=["z"], **options)(add)(x)


def test_a_family_refuses_what_it_does_not_support_and_knows_the_problem_and_its_work(watch):
    from fakes import DEVICE, FakeFamily

    class Family(FakeFamily):
        def problem_from_call(self, arguments):
            return Problem.of("fake", groups=1, rows=arguments["rows"], n=256, k=64)

    space = [{"BLOCK_M": m, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3} for m in (16, 32, 64, 256)]
    tuned = foretune.tune(space, family=Family(), device=DEVICE, cache=False, timer=watch)(
        lambda rows, BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages: watch.spend(300 - BLOCK_M) or BLOCK_M
    )
    result = tuned.tune(1000)
    assert tuned(1000) == result.best_config["BLOCK_M"] == 64
    assert "shared memory" in result.trials[-1].error
    assert result.problem["rows"] == 1000
    assert result.trials[0].metrics["tflops"] == pytest.approx(2 * 1000 * 256 * 64 / 284 / 1e6)
    assert tuned.tune(1001).tuned_s == 0.0  # rows are bucketed
    bare = foretune.tune(space, family=Family(), cache=False)(lambda rows, **knobs: 0)
    with pytest.raises(ForetuneError, match="pass one, as device='h200'"):
        bare(1000)


def test_the_face_takes_a_familys_name():
    with pytest.raises(ForetuneError, match="'nothing'; known: "):
        foretune.tune({"tile": [1]}, family="nothing")


def test_the_example_of_the_readme_runs(monkeypatch):
    import re
    from pathlib import Path

    readme = (Path(foretune.__file__).parent / "runtime" / "tuning" / "functions" / "README.md").read_text()
    (example,) = [code for code in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "foretune.tune" in code]
    space = {"__name__": "example"}
    exec(compile(example, "README.md", "exec"), space)
    assert space["result"].best.metrics["bandwidth_gbs"] > 0
    assert space["total"](range(100_000)) == sum(range(100_000))
