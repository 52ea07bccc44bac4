"""Progress of long computations in a log and on a terminal."""

from __future__ import annotations

import io
import time
from typing import NamedTuple

import pytest
from foretune.datasets import progress as progress_bar
from foretune.datasets.progress import advance, showing, showing_steps, time_left
from waiting import until


@pytest.fixture
def log(monkeypatch):
    """Return what is written to a console that is not a terminal."""
    console = pytest.importorskip("rich.console")
    text = io.StringIO()
    made = console.Console
    monkeypatch.setattr(console, "Console", lambda **options: made(file=text, width=200, quiet=options["quiet"]))
    return text


def test_how_long_it_will_take_is_said_first(log):
    with showing("training on [red]", 300.0):
        assert log.getvalue() == "training on [red]: about 5 min on two idle cores\n"


def test_what_is_soon_over_says_nothing(log):
    with showing("training", 1.9):
        advance(0.5)
    assert log.getvalue() == ""


def test_now_and_then_a_line_says_how_far_it_is(log, monkeypatch):
    monkeypatch.setattr(progress_bar, "_EVERY_S", 0.001)
    with showing("training") as say:
        advance(0.25)
        until(lambda: "training: 25%, about 1 s left\n" in log.getvalue())
        say("judging")
        advance(0.5)
        until(lambda: "judging: 75%" in log.getvalue())
    lines = log.getvalue()
    advance(1.0)  # after the block
    assert log.getvalue() == lines


def test_whoever_wants_none_sees_none(log):
    with showing_steps(shown=False) as show:
        show(Step(1, 2))
    assert log.getvalue() == ""


def test_what_was_thought_beforehand_gives_way_to_what_is_seen():
    seen = [time_left(share, 100.0, 1000.0) for share in (0.0, 0.02, 0.05, 0.1, 0.5)]
    assert seen == pytest.approx([900.0, 0.2 * 4900 + 0.8 * 980, 0.5 * 1900 + 0.5 * 950, 900.0, 100.0])


class Step(NamedTuple):
    done: int
    total: int

    def __str__(self):
        return f"step {self.done}"


def test_a_log_has_a_line_for_each_tenth_of_the_steps(log, monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    with showing_steps() as show:
        for done in range(65):
            show(Step(done, 64))
    lines = log.getvalue().splitlines()
    assert (lines[0], lines[1], lines[-1]) == ("0/64 step 0", "7/64 step 7", "64/64 step 64")
    assert len(lines) == 11


def test_a_log_of_slow_steps_has_a_line_every_half_minute(log, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with showing_steps() as show:
        for _ in range(7):
            show(Step(1, 1000))
            now[0] += 10.0
    assert len(log.getvalue().splitlines()) == 3  # at 0, 30 and 60 seconds
