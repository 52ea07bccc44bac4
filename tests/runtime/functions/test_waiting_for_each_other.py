"""Tunings end that run code in other threads which need the same tuning."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.pool import ThreadPool

import foretune
import pytest
from foretune import ForetuneError
from foretune.runtime.tuning.functions import in_step

#: A test that takes longer hangs.
HANGS_S = 60.0


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(in_step, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(in_step, "_PATIENCE_S", 0.03)


def ended(call):
    """What a call returns, made in a thread that is left behind where it hangs."""
    future = Future()

    def run():
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised again where it is asked for
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result(HANGS_S)


def in_executor(call):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def in_thread_pool(call):
    with ThreadPool(1) as pool:
        return pool.apply(call)


def in_thread(call):
    future = Future()
    thread = threading.Thread(target=lambda: future.set_result(call()), daemon=True)
    thread.start()
    thread.join()
    return future.result(0)


def in_event_loop(call):
    async def main():
        return await asyncio.to_thread(call)

    return asyncio.run(main())


def by_bare_lock(call):
    """Waits where nobody can see it."""
    results, done = [], threading.Lock()
    done.acquire()
    threading.Thread(target=lambda: (results.append(call()), done.release()), daemon=True).start()
    done.acquire()
    return results[0]


WAYS = [in_executor, in_thread_pool, in_thread, in_event_loop, by_bare_lock]


@pytest.mark.parametrize("elsewhere", WAYS)
def test_a_function_that_reaches_its_own_key_in_another_thread(watch, elsewhere, monkeypatch):
    if elsewhere is by_bare_lock:
        monkeypatch.setattr(in_step, "_LONG_PATIENCE_S", 0.05)

    @foretune.tune({"tile": [3, 1]}, key=lambda n: "all", n_warmup=1, n_repeat=1, cache=False, timer=watch)
    def total(n, tile):
        watch.spend(tile)
        return n + elsewhere(lambda: total(n - 1)) if n else 0

    assert ended(lambda: total(3)) == 6
    assert total.tune(3).best_config == {"tile": 1}
    assert (in_step.is_on_trial(), in_step.context_now()) == (False, None)


def test_a_tuning_that_was_asked_for_in_another_thread_is_refused(watch):
    @foretune.tune({"tile": [3, 1]}, key=lambda n: "all", cache=False, timer=watch)
    def total(n, tile):
        return n and in_executor(lambda: total.tune(n - 1))

    with pytest.raises(ForetuneError, match=r"is already being tuned for .* by an outer call"):
        ended(lambda: total(1))


def test_two_functions_that_call_each_other_in_pools(watch):
    meet = threading.Barrier(2)
    first = {"f": True, "g": True}

    def body(name, other, depth):
        if first[name]:
            first[name] = False
            meet.wait(HANGS_S)  # both are on trial now, and each wants the other
        return in_executor(lambda: other()(depth - 1)) if depth else name

    options = {"n_warmup": 1, "n_repeat": 1, "cache": False, "timer": watch}
    f = foretune.tune({"tile": [1, 2]}, key=lambda depth: "f", **options)(
        lambda depth, tile: body("f", lambda: g, depth)
    )
    g = foretune.tune({"tile": [1, 2]}, key=lambda depth: "g", **options)(
        lambda depth, tile: body("g", lambda: f, depth)
    )
    with ThreadPoolExecutor(2) as pool:
        results = [pool.submit(ended, lambda one=one: one(1)) for one in (f, g)]
        assert [one.result() for one in results] == ["g", "f"]


@pytest.mark.parametrize("elsewhere", WAYS[:4])
def test_a_contextual_function_that_runs_another_one_in_another_thread(watch, elsewhere):
    options = {"n_warmup": 1, "n_repeat": 1, "cache": False, "timer": watch}

    def part():
        return foretune.tune({"tile": [3, 1]}, **options)(lambda x, tile: watch.spend(tile) or x + tile)

    first, second = part(), part()
    inner = foretune.contextual_autotune(**options)(lambda x: second(x))
    outer = foretune.contextual_autotune(**options)(lambda x: (first(x), elsewhere(lambda: inner(x)))[0])
    assert ended(lambda: outer(0)) == 1
    assert inner(0) == 1
    assert [one.best_config for one in outer.tune(0)] == [{"tile": 1}]
    assert in_step.context_now() is None


def test_a_contextual_tuning_that_is_asked_for_in_another_thread_is_refused(watch):
    part = foretune.tune({"tile": [3, 1]}, cache=False, timer=watch)(lambda tile: watch.spend(tile))
    inner = foretune.contextual_autotune(cache=False, timer=watch)(lambda: part())
    outer = foretune.contextual_autotune(cache=False, timer=watch)(lambda: part() or in_executor(inner.tune))
    with pytest.raises(ForetuneError, match="is run by a function that is being tuned as a whole"):
        ended(outer)


def test_a_contextual_function_that_runs_itself_in_a_pool(watch):
    options = {"n_warmup": 1, "n_repeat": 1, "cache": False, "timer": watch}
    part = foretune.tune({"tile": [3, 1]}, **options)(lambda x, tile: watch.spend(tile))

    @foretune.contextual_autotune(key=lambda x: "all", **options)
    def layer(x):
        part(0)
        return x + in_executor(lambda: layer(x - 1)) if x else 0

    assert ended(lambda: layer(2)) == 3


def test_who_waits_for_a_tuning_that_goes_on_waits_however_long_it_takes(watch, monkeypatch):
    looks, tuning, looked = [], threading.Event(), threading.Event()

    def function(tile):
        tuning.set()
        while not looked.is_set():  # works for as long as a hundred looks
            pass
        watch.spend(tile)
        return tile

    is_waiting = in_step._is_waiting

    def count(frame):
        looks.append(1)
        if len(looks) == 100:
            looked.set()
        return is_waiting(frame)

    monkeypatch.setattr(in_step, "_LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(in_step, "_is_waiting", count)
    tuned = foretune.tune({"tile": [3, 1]}, n_warmup=1, n_repeat=1, cache=False, timer=watch)(function)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(tuned)
        tuning.wait(HANGS_S)
        assert (ended(tuned), first.result()) == (1, 1)
