"""In which order a run's cases are handed out, to one GPU and to several."""

from __future__ import annotations

import heapq
import itertools
import time
from dataclasses import replace

import pytest
from fakes import DEVICE, FakeFamily, fake_cases
from foretune.collect.compiling import signature_of
from foretune.collect.run_state import LAST, WINDOW, RunState
from foretune.datasets import roofline_us
from replay import FAMILIES, outcomes_of, run
from replay_runner import ReplayRunner

CASES = fake_cases(models=20)
#: Kinds alternating, of cases that differ otherwise.
FLAGS = [(), ("a",), ("b",), ("a", "b")]
MIXED = [
    replace(case, problem=replace(case.problem, flags=flags))
    for case, flags in zip(CASES, itertools.cycle(FLAGS), strict=False)
]


@pytest.fixture
def state(tmp_path):
    return RunState(FAMILIES, MIXED, tmp_path / "measured")


def kind(case):
    return signature_of(FAMILIES["fake"], case.problem, DEVICE)


def take(state, met=()):
    """The next case; None where there is none."""
    step = state.take(DEVICE, met)
    return step and step.case


def test_who_has_met_nothing_takes_the_cases_as_they_come(state):
    assert [take(state) for _ in MIXED] == MIXED
    assert take(state) is None


def test_a_case_of_a_kind_that_was_met_comes_first_but_only_so_far_ahead(state):
    met, taken = {kind(MIXED[1])}, []
    while case := take(state, met):
        place, first = MIXED.index(case), next(i for i, case in enumerate(MIXED) if case not in taken)
        assert place < first + WINDOW
        assert kind(case) in met or place == first
        taken.append(case)
    assert sorted(map(MIXED.index, taken)) == list(range(len(MIXED)))
    ahead = WINDOW // len(FLAGS)
    assert taken[: ahead + 1] == [*MIXED[1 : WINDOW : len(FLAGS)], MIXED[0]]


def test_a_deadly_case_is_handed_out_once_more_after_all_others(state):
    met, deadly = {kind(MIXED[0])}, MIXED[0]
    assert take(state, met) == deadly
    state.given_up(deadly, DEVICE, "segfault", deadly=True)
    taken = [take(state, met) for _ in MIXED]
    assert set(taken) == set(MIXED)
    assert taken[-1] == deadly
    state.given_up(deadly, DEVICE, "segfault", deadly=True)
    assert take(state, met) is None
    assert state.skipped == [f"{deadly.problem}: segfault"]


class OtherFamily(FakeFamily):
    name = "other"


def of_other(case):
    return replace(case, problem=replace(case.problem, family="other"))


def test_families_take_turns_so_that_a_run_cut_short_has_measured_each(tmp_path):
    others = [of_other(case) for case in CASES[:3]]
    state = RunState({**FAMILIES, "other": OtherFamily()}, [*CASES[:5], *others], tmp_path / "measured")
    assert [take(state) for _ in range(8)] == [
        *(case for turn in zip(CASES[:3], others, strict=True) for case in turn),
        *CASES[3:5],
    ]


class SpecialisedFamily(FakeFamily):
    """Has a binary for each number of rows."""

    def binary_key(self, config, problem):
        return config, problem["rows"]


def test_problems_are_of_a_kind_where_they_share_their_binaries(tmp_path):
    state = RunState({"fake": SpecialisedFamily()}, CASES[:30], tmp_path / "measured")
    first = state.take(DEVICE)
    met = {signature_of(SpecialisedFamily(), first.case.problem, DEVICE)}
    rows = [state.take(DEVICE, met).case.problem["rows"] for _ in range(4)]
    assert set(rows) == {first.case.problem["rows"]}


def longest(cases):
    return max(cases, key=lambda case: roofline_us(FAMILIES["fake"], case.problem, DEVICE))


def test_the_last_cases_that_gpus_share_go_out_the_longest_first(state):
    shared = [state.take(DEVICE, gpus=2).case for _ in MIXED]
    assert shared[: -2 * LAST] == MIXED[: -2 * LAST]
    last = shared[-2 * LAST :]
    assert all(case == longest(last[place:]) for place, case in enumerate(last))
    assert last != MIXED[-2 * LAST :]
    assert state.take(DEVICE, gpus=2) is None


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_gpus_that_share_the_cases_end_together(tmp_path, gpus):
    """If each case takes as long as is expected of it, that is."""
    state, free, whole = RunState(FAMILIES, CASES, tmp_path / "measured"), [0.0] * gpus, 0.0
    while step := state.take(DEVICE, gpus=gpus):
        us = roofline_us(FAMILIES["fake"], step.case.problem, DEVICE)
        heapq.heapreplace(free, free[0] + us)
        whole += us
    assert whole / max(free) > 0.99 * gpus


def test_what_waits_is_looked_at_once_each_before_it_is_handed_out(state):
    first = take(state)
    seen = [step.case for step in iter(lambda: state.ahead(DEVICE), None)]
    assert [first, *seen] == MIXED[: WINDOW + 1] != MIXED
    while case := take(state):
        assert case in [first, *seen]
        seen += [step.case for step in iter(lambda: state.ahead(DEVICE), None)]
    assert [first, *seen] == MIXED


def test_each_gpu_stays_with_the_kinds_that_it_has_met(tmp_path):
    cases = [case for case in MIXED[:24] if case.problem.flags in FLAGS[:2]]
    runners = [ReplayRunner(seconds=1e-4) for _ in range(2)]
    assert run(cases, tmp_path / "two", *runners).complete
    for runner in runners:
        kinds = [problem.signature for problem in runner.asked("prepare")]
        assert sum(one != other for one, other in itertools.pairwise(kinds)) <= 1  # when its own are done
    assert run(cases, tmp_path / "one").complete
    assert outcomes_of(tmp_path / "two") == outcomes_of(tmp_path / "one")


def test_a_case_made_ready_for_a_gpu_that_is_busy_goes_to_one_that_is_not(tmp_path):
    quick = ReplayRunner()

    def wait(problem):
        while len(quick.asked("prepare")) < 3:
            time.sleep(0.001)

    assert run(CASES[:4], tmp_path / "measured", ReplayRunner(prepare=wait), quick).complete
