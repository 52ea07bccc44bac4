"""Which cases a run measures."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace as Toy

import pytest
from fakes import FakeFamily, fake_cases
from foretune.collect.cases import cases_like, draw_cases, first_cases
from foretune.datasets import Case, ForetuneError, Problem

FAMILY = FakeFamily()
CASES = fake_cases()
OTHERS = tuple(Case(Problem.of("other", n=n), ("random",)) for n in (1, 2))


def tflop(case):
    return FAMILY.flops(case.problem) / 1e12


def test_like_another_dataset_has_its_problems_of_the_family_shuffled_by_the_seed():
    dataset = Toy(cases=(*CASES, *OTHERS))
    found = cases_like(dataset, "fake")
    assert sorted(map(str, found)) == sorted(map(str, CASES))
    assert found == cases_like(dataset, "fake") != cases_like(dataset, "fake", seed=1)
    assert set(cases_like(dataset, "other")) == set(OTHERS)
    assert cases_like(dataset, "third") == ()


def test_the_first_are_each_of_their_own_and_not_too_large():
    most = sorted(map(tflop, CASES))[len(CASES) // 2]
    small = tuple(case for case in CASES if tflop(case) <= most)
    assert 0 < len(small) < len(CASES)
    assert first_cases(FAMILY, (*CASES, *CASES)) == CASES
    assert first_cases(FAMILY, CASES, max_tflop=most) == small
    assert first_cases(FAMILY, (*small[:3], *CASES), 5, max_tflop=most) == small[:5]
    assert first_cases(FAMILY, CASES, max_tflop=0.0) == ()


def test_those_of_some_dtypes_alone_are_taken():
    two = FakeFamily()
    two.dtypes = ("bf16", "fp32")
    exact = tuple(Case(replace(case.problem, dtype="fp32"), case.sources) for case in CASES[:3])
    mixed = (*CASES, *exact)
    assert first_cases(two, mixed, dtypes=("fp32",)) == exact
    assert first_cases(two, mixed, 2, dtypes=["fp32", "fp16"]) == exact[:2]
    assert first_cases(two, mixed, dtypes=("bf16", "fp32")) == mixed
    with pytest.raises(ForetuneError, match="dtype must be one of bf16, fp32 for fake but is fp64, int8"):
        first_cases(two, mixed, dtypes=("fp64", "int8"))


def test_a_family_that_counts_no_operations_is_limited_by_none():
    class Copies(FakeFamily):
        def flops(self, problem):
            return 0.0

    assert first_cases(Copies(), CASES, max_tflop=1e-9) == CASES


@pytest.mark.parametrize("flops", [-1.0, float("nan"), float("inf")])
def test_a_number_of_operations_that_cannot_be_is_named(flops):
    class Wrong(FakeFamily):
        def flops(self, problem):
            return flops

    told = rf"family fake: flops\(\) must return a finite number >= 0 but returned {flops}"
    with pytest.raises(ForetuneError, match=told):
        first_cases(Wrong(), CASES)


def test_a_family_draws_its_cases_with_the_options_that_are_given():
    assert draw_cases(FAMILY) == fake_cases()
    assert draw_cases(FAMILY, random=1, tokens=None) == fake_cases(randoms=1)


@pytest.mark.parametrize(
    ("drawn", "told"),
    [
        (KeyError("hidden_size"), r"family fake: cases\(\) raised KeyError: 'hidden_size'"),
        (ForetuneError("no such model"), "no such model"),
        (
            OTHERS,
            r"family fake: cases\(\) must return Cases whose problems are of this family but returned Case.*other",
        ),
        (
            [CASES[0].problem],
            r"family fake: cases\(\) must return Cases whose problems are of this family but returned Problem",
        ),
    ],
)
def test_cases_that_cannot_be_drawn_or_are_none_are_told_in_one_line(drawn, told):
    class Wrong(FakeFamily):
        def cases(self, **options):
            if isinstance(drawn, Exception):
                raise drawn
            return drawn

    with pytest.raises(ForetuneError, match=told):
        draw_cases(Wrong())
