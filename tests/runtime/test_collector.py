"""The garbage collector's rest: as long as any thread wants it, and not a moment longer."""

from __future__ import annotations

import gc
import os
from threading import Event, Thread

import pytest
from foretune.runtime.launching.collector import collecting_later


@pytest.fixture(autouse=True)
def switched_on():
    gc.enable()
    yield
    gc.enable()


def test_it_rests_within_blocks_and_works_after_the_outermost():
    with collecting_later():
        with collecting_later():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_works_again_after_an_error():
    with pytest.raises(ZeroDivisionError), collecting_later():
        raise ZeroDivisionError
    assert gc.isenabled()


def test_where_it_was_off_it_stays_off():
    gc.disable()
    with collecting_later():
        pass
    assert not gc.isenabled()


def in_a_block(inside, leave):
    with collecting_later():
        inside.set()
        leave.wait()


@pytest.fixture
def another():
    """Another thread in a block; call it to have it leave."""
    inside, leave = Event(), Event()
    thread = Thread(target=in_a_block, args=(inside, leave))
    thread.start()
    inside.wait()

    def end():
        leave.set()
        thread.join()

    yield end
    end()


def test_it_rests_until_the_last_thread_leaves(another):
    with collecting_later():
        pass
    assert not gc.isenabled()
    another()
    assert gc.isenabled()


def exit_code_of_a_fork(says):
    child = os.fork()
    if child == 0:
        os._exit(0 if says() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_process_does_not_wait_for_the_blocks_of_threads_that_it_has_not(another):
    assert exit_code_of_a_fork(gc.isenabled) == 0


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_process_that_is_forked_within_a_block_is_in_it(another):
    def leaves():
        inside = not gc.isenabled()
        block.__exit__(None, None, None)
        return inside and gc.isenabled()

    block = collecting_later()
    with block:
        assert exit_code_of_a_fork(leaves) == 0
