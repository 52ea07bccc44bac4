"""`TuningSession`: the steps that every tuning has, on candidates that are texts."""

from __future__ import annotations

import math

import pytest
from foretune.datasets import ForetuneError, Status
from foretune.runtime.tuning import session as session_module
from foretune.runtime.tuning.session import Measured, TuningSession, checked_time, none_launched


class Memory(dict):
    """What is known, and in `kept` what is recorded."""

    def __init__(self, **times):
        super().__init__({name: Measured.of(time_us) for name, time_us in times.items()})
        self.kept = []

    def recall(self, candidates):
        return {one: self[one] for one in candidates if one in self}

    def record(self, candidate, measured, error):
        self.kept.append((candidate, measured.time_us, type(error)))


@pytest.fixture
def timed():
    return []


@pytest.fixture
def time_one(timed):
    """As many microseconds as the text is long; "bad" ones fail."""

    def time_one(candidate):
        timed.append(candidate)
        return KeyError(candidate) if candidate.startswith("bad") else Measured.of(float(len(candidate)))

    return time_one


def test_what_is_known_is_not_timed_and_all_else_is_recorded_at_once(timed, time_one):
    memory = Memory(aaa=3.0, b=None)
    session = TuningSession(memory, time_one)
    session.recall(["aaa", "b", "cc"])
    assert session.measure(["aaa", "b", "cc", "bad", "dd"]) == ""
    assert timed == ["cc", "bad", "dd"]
    assert memory.kept == [("cc", 2.0, type(None)), ("bad", None, KeyError), ("dd", 2.0, type(None))]
    assert (session.best, session.fastest(["dd", "cc", "aaa"]), session.n_timed) == (
        "cc",
        "dd",
        3,
    )  # of equals the first
    assert session.failed == {"b": "it failed before", "bad": "KeyError: 'bad'"}


def test_failures_alone_are_tried_again(timed, time_one):
    session = TuningSession(Memory(a=None), time_one)
    session.recall(["a"])
    session.measure(["a"])
    assert (timed, session.best) == (["a"], "a")


@pytest.mark.parametrize(
    ("limits", "needs_one", "over", "expected"),
    [
        ({"max_trials": 2}, False, "max_trials=2", ["bad1", "bad2"]),
        ({"max_trials": 2}, True, "max_trials=2", ["bad1", "bad2", "a"]),
        ({"budget_s": 2.5}, False, "budget_s=2.5", ["bad1", "bad2"]),
        ({"budget_s": 0.0}, True, "budget_s=0", ["bad1", "bad2", "a"]),
        ({}, False, "", ["bad1", "bad2", "a", "bb"]),
    ],
)
def test_a_limit_ends_it_and_may_wait_until_one_works(timed, time_one, limits, needs_one, over, expected):
    seconds = iter(range(100))
    session = TuningSession(Memory(), time_one, needs_one=needs_one, clock=lambda: float(next(seconds)), **limits)
    assert session.measure(["bad1", "bad2", "a", "bb"]) == over
    assert timed == expected


def test_all_ranks_go_on_as_long_as_all_have_time(timed, time_one):
    asked = []
    session = TuningSession(
        Memory(), time_one, budget_s=9.0, clock=lambda: 0.0, in_step=lambda mine: asked.append(mine) or len(asked) < 2
    )
    assert session.measure(["a", "bb"]) == "budget_s=9"
    assert (timed, asked) == (["a"], [True, True])


def test_what_does_not_compile_is_not_timed(timed, time_one, monkeypatch):
    batches = []

    def compile_ahead(jobs, workers):
        batches.append(len(jobs))
        return [job() for job in jobs]

    monkeypatch.setattr(session_module, "compile_ahead", compile_ahead)
    compile_one = {"a": None, "bb": ValueError("no"), "cc": None}.get
    memory = Memory()
    session = TuningSession(memory, time_one, compile_one=compile_one, workers=1)
    session.measure(["a", "bb", "cc"])
    assert (batches, timed) == ([2, 1], ["a", "cc"])
    assert memory.kept[1] == ("bb", None, ValueError)


def test_what_ends_the_session_is_raised_and_what_was_measured_stays(time_one):
    def interrupted(candidate):
        if candidate == "bb":
            raise KeyboardInterrupt
        return time_one(candidate)

    memory = Memory()
    session = TuningSession(memory, interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.measure(["a", "bb"])
    assert memory.kept == [("a", 1.0, type(None))]


def test_what_is_refused_counts_in_this_session_alone(time_one):
    memory, error = Memory(), RuntimeError("no launch")
    session = TuningSession(memory, time_one)
    session.refuse("a", error)
    assert (memory.kept, session.measured["a"].status) == ([], Status.LAUNCH_FAILED)
    failed = none_launched("kernel", session)
    assert failed.__cause__ is error
    assert str(failed) == "kernel: none of its 1 configs could be launched:\n  RuntimeError: no launch\n    a"


@pytest.mark.parametrize("time_us", [0.0, -1.0, math.inf, math.nan])
def test_a_time_that_is_none_is_refused_with_the_accepted_ones(time_us):
    with pytest.raises(ForetuneError, match=f"must be a positive finite number of microseconds but was {time_us}"):
        checked_time(time_us)
