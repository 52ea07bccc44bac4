"""Progress of long computations, and ending those whose result is not needed."""

from __future__ import annotations

import threading

import pytest
from foretune.datasets.progress import AbandonedError, advance, reporting, share_of, side_by_side


def told_by(work):
    told = []
    with reporting(told.append):
        work()
    return [round(share, 6) for share in told]


def test_shares_of_shares_add_up_to_the_whole():
    def work():
        with share_of(0.5):
            advance(0.5)
            with share_of(0.5):
                advance(0.5)
        advance(0.25)

    assert told_by(work) == [0.25, 0.375, 0.5, 0.75, 1.0]


def test_nobody_can_do_more_than_a_task_has():
    def work():
        with share_of(0.5):
            advance(3.0)
        assert told[-1] == 0.5

    told = []
    with reporting(told.append):
        work()
    assert told == [0.5, 1.0]


def test_what_counts_for_nothing_is_not_told():
    def work():
        with share_of(0.0):
            advance(0.5)

    assert told_by(work) == [1.0]


def test_without_anybody_who_wants_to_know_nothing_happens():
    with share_of(0.5):
        advance(0.5)


def test_threads_advance_the_task_that_started_them():
    def part():
        with share_of(0.25):
            advance(0.5)

    told = told_by(lambda: side_by_side([part] * 4, jobs=2))
    assert told == sorted(told)
    assert told[-1] == 1.0
    assert len(told) == 8


def test_results_come_in_the_order_of_the_calls():
    later = threading.Event()

    def first():
        assert later.wait(60)
        return 1

    def second():
        later.set()
        return 2

    assert side_by_side([first, second], jobs=2) == [1, 2]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_when_one_fails_the_others_end_at_their_next_step(error):
    working, ended = threading.Event(), threading.Event()

    def endless():
        try:
            while True:
                working.set()
                advance(0.0)
        except AbandonedError:
            ended.set()
            raise

    def fails():
        assert working.wait(60)
        raise error

    with pytest.raises(error):
        side_by_side([lambda: side_by_side([endless], jobs=1), fails], jobs=2)
    assert ended.wait(60)


def test_what_comes_after_is_not_abandoned():
    def fails():
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011 - ours, two lines above
        side_by_side([fails], jobs=1)
    advance(0.5)
