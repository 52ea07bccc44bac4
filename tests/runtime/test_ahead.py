"""Compiling ahead in threads: one job a key, waited for however it ends; nobody waits for what a fork left behind."""

from __future__ import annotations

import gc
import os
from concurrent.futures import Future
from threading import Event, get_ident
from typing import ClassVar

import pytest
from foretune.runtime.launching import ahead


@pytest.fixture(autouse=True)
def nothing_underway(monkeypatch):
    monkeypatch.setattr(ahead._jobs, "underway", {})


def test_a_job_runs_in_another_thread_once_for_each_key_until_it_is_waited_for():
    ran = []
    ahead.compile_ahead_of("a", lambda: ran.append(get_ident()))
    ahead.compile_ahead_of("a", lambda: ran.append("twice"))
    ahead.wait_for("a")
    assert len(ran) == 1
    assert ran[0] != get_ident()
    ahead.compile_ahead_of("a", lambda: ran.append("again"))
    ahead.wait_for("a")
    assert ran[1:] == ["again"]


def test_a_job_that_fails_is_waited_for_and_its_error_kept_to_itself():
    ahead.compile_ahead_of("a", lambda: 1 / 0)
    ahead.wait_for("a")
    ahead.wait_for("a")
    ahead.wait_for("what nobody compiles")


def test_the_block_is_over_at_its_end_also_when_it_fails():
    assert not ahead.is_only_compiling()
    seen = []

    def fail():
        seen.append(bool(ahead.is_only_compiling()))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), ahead.only_compiling():
        fail()
    assert seen == [True]
    assert not ahead.is_only_compiling()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_process_waits_for_no_job_of_its_parent_and_runs_its_own():
    started, go_on = Event(), Event()
    ahead.compile_ahead_of("a", lambda: (started.set(), go_on.wait()))
    started.wait()
    ahead._jobs.underway["b"] = Future()  # that nobody will ever run
    child = os.fork()
    if child == 0:
        ran = []
        ahead.wait_for("a")
        ahead.wait_for("b")
        ahead.compile_ahead_of("a", lambda: ran.append(1))
        ahead.wait_for("a")
        os._exit(0 if ran == [1] else 1)
    go_on.set()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


class Binary:
    """As Triton's `CompiledKernel`, which looks loaded as soon as it has `_run`."""

    module = function = _run = None
    unloaded: ClassVar[list[str]] = []

    def _init_handles(self):
        self._run = "launcher"
        self.while_loading()
        self.module, self.function = "module", "function"

    def while_loading(self):
        pass

    def __del__(self):
        if self.module is not None:
            self.unloaded.append(self.module)


def test_a_binary_gets_all_its_handles_at_once():
    """Another call may launch it while it is loaded, and must not find a launcher without a function."""
    binary, seen = Binary(), []
    binary.while_loading = lambda: seen.append((binary._run, binary.function))
    Binary.unloaded.clear()
    ahead.load_binary(binary)
    ahead.load_binary(binary)
    ahead.load_binary(None)
    assert seen == [(None, None)]  # loaded once
    assert (binary._run, binary.module, binary.function) == ("launcher", "module", "function")
    gc.collect()
    assert Binary.unloaded == []


def test_a_binary_that_cannot_be_loaded_is_left_as_it_is():
    binary = Binary()
    binary.while_loading = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        ahead.load_binary(binary)
    assert (binary._run, binary.module) == (None, None)
