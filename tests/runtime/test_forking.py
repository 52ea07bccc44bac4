"""A process that is forked while another thread tunes has nobody who would let go of that thread's locks."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager

import foretune
import pytest
from foretune.datasets import KernelConfig, Problem, load
from foretune.runtime import use_stub_driver
from foretune.runtime.timing import flywheel
from foretune.runtime.tuning import attach
from foretune.runtime.tuning.own_timings import OwnTimings
from remembered import CONFIGS, H200, KERNEL, problem

#: Of a child that waits for ever; none that goes on takes as long.
_STUCK_S = 60


def in_a_fork(does):
    """What a forked process exits with that does this: True or False, as 0 or 1; -14 for one that waited for ever."""
    child = os.fork()
    if child == 0:
        signal.alarm(_STUCK_S)
        os._exit(0 if does() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@contextmanager
def in_another_thread(call, is_inside, may_end):
    """`call` sets `is_inside` when it is where it waits for `may_end`."""
    thread = threading.Thread(target=call)
    thread.start()
    is_inside.wait()
    try:
        yield
    finally:
        may_end.set()
        thread.join()


@pytest.fixture
def inside():
    return threading.Event(), threading.Event()


@pytest.fixture
def waits(inside):
    """Does nothing in a child, and waits in its parent."""
    parent, (is_inside, may_end) = os.getpid(), inside

    def wait():
        if os.getpid() == parent:
            is_inside.set()
            may_end.wait()

    return wait


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_function_that_is_being_tuned_runs_in_a_child(is_whole, waits, inside):
    @foretune.tune({"tile": [1, 2]}, n_warmup=1, n_repeat=1, cache=False)
    def scale(count, tile):
        waits()
        return 2 * count

    tuned = scale
    if is_whole:

        @foretune.contextual_autotune(n_warmup=1, n_repeat=1, cache=False)
        def tuned(count):
            return scale(count) + 1

    with in_another_thread(lambda: tuned(3), *inside):
        assert in_a_fork(lambda: tuned(3) == 6 + is_whole) == 0


@pytest.mark.compile
@pytest.mark.usefixtures("own_cache", "disk")
def test_a_kernel_that_is_being_tuned_and_is_attached_launches_in_a_child(elsewhere, toy, waits, inside):
    def cost(config, n):
        waits()
        return elsewhere.usual_cost(config, n)

    kernel = elsewhere.kernel(elsewhere.Bench(cost))
    with use_stub_driver(toy.H200), foretune.attached([kernel]):

        def launch():
            elsewhere.launch(kernel, 1024)
            return kernel.best_config.kwargs["BLOCK"] == 64

        with in_another_thread(launch, *inside):
            assert in_a_fork(launch) == 0
        assert launch()


@pytest.mark.parametrize(("owner", "name"), [(attach._changing, "lock"), (flywheel, "_guard")])
def test_a_lock_of_a_module_is_free_in_a_child(owner, name):
    with getattr(owner, name):
        assert in_a_fork(lambda: getattr(owner, name).acquire(blocking=False)) == 0


def test_what_is_learned_goes_on_in_a_child():
    class Family:
        name = "toy"

    own, problem = OwnTimings(Family()), Problem.of("toy", rows=64)
    with own._lock:
        assert in_a_fork(lambda: own.learn(problem, {KernelConfig.of(BLOCK=16): 1.0}) is None) == 0


def test_a_benchmark_is_logged_in_a_child_while_another_thread_logs(tmp_path, monkeypatch, waits, inside):
    def log(rows):
        flywheel.log_row(KERNEL, problem(rows), CONFIGS[0], 1.0, H200, timed="cold")

    def write(handle, line):
        waits()
        return os_write(handle, line)

    os_write = os.write
    monkeypatch.setenv(flywheel.VARIABLE, str(tmp_path / "log"))
    monkeypatch.setattr(flywheel.os, "write", write)
    with in_another_thread(lambda: log(64), *inside):
        assert in_a_fork(lambda: log(65) is None) == 0
    assert sorted(case.problem["rows"] for case in load(tmp_path / "log").cases) == [64, 65]


def test_what_is_yet_to_be_read_from_an_autotuner_is_its_own_process_to_log(monkeypatch):
    monkeypatch.setattr(flywheel, "_pending", [object()])
    assert in_a_fork(lambda: not flywheel._pending) == 0
    assert flywheel._pending
