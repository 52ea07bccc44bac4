"""Problems and configs that cannot be a family's are refused by name, but a launch without work goes on."""

from __future__ import annotations

import warnings
from dataclasses import replace

import foretune
import numpy as np
import pytest
from fakes import FakeFamily, fake_cases, fake_dataset
from foretune.collect.cases import check_request
from foretune.datasets import (
    Case,
    DeviceSpec,
    Family,
    ForetuneError,
    ForetuneWarning,
    KernelConfig,
    Problem,
    check_problem_of,
    not_empty,
    wrong_knobs,
)
from foretune.kernels import find_family
from foretune.kernels.spaces import filter_valid
from foretune.model import TrainingSet
from foretune.runtime import choice, make_shortlist
from foretune.runtime.arguments import Mode
from foretune.runtime.prune import Pruner
from foretune.runtime.timing.flywheel import log_row

H200 = DeviceSpec.named("h200")
GROUPED = "grouped_gemm_fwd"


def layer(family=GROUPED, **changed):
    return Problem.of(family, **{"groups": 4, "rows": 64, "n": 64, "k": 64} | changed)


INVALID = [
    (layer(rows=0), "rows of grouped_gemm_fwd must be at least 1 but is 0"),
    (layer(groups=0), "groups of grouped_gemm_fwd must be at least 1 but is 0"),
    (layer(ragged={"rows": (32, 32)}), "there must be 4 sizes along rows, because groups=4, but there are 2"),
    (layer(ragged={"rows": (64,) + (0,) * 4}), "there must be 4 sizes along rows, because groups=4, but there are 5"),
    (layer(ragged={"n": (16,) * 4}), "grouped_gemm_fwd is ragged along rows, not along n"),
    (layer("grouped_gemm_dw", ragged={"k": (16,) * 4}), "grouped_gemm_dw is ragged along rows, not along k"),
    (layer("scaled_grouped_gemm_fwd", ragged={"rows": (64,)}, dtype="fp8e4m3"), "because groups=4, but there are 1"),
    (Problem.of("matmul", batch=1, m=0, n=64, k=64), "m of matmul must be at least 1 but is 0"),
    (Problem.of("matmul", batch=1, m=64, n=64, k=64, ragged={"m": (64,)}), "matmul is ragged along no dimension"),
]


@pytest.mark.parametrize(("problem", "said"), INVALID)
@pytest.mark.parametrize(
    "ask",
    [
        lambda family, problem: check_problem_of(family, problem),
        lambda family, problem: make_shortlist(family, problem, H200, k=2),
        lambda family, problem: filter_valid([], problem, "h200"),
        lambda family, problem: check_request({family.name: family}, [Case(problem, ("random",))]),
    ],
    ids=["check", "shortlist", "filter_valid", "collect"],
)
def test_a_problem_that_cannot_be_the_familys_is_refused(problem, said, ask):
    with pytest.raises(ForetuneError, match=said):
        ask(find_family(problem.family), problem)


def test_a_family_says_what_may_be_zero_and_is_not_asked_what_is_ragged():
    class Toy(Family):
        name, dims, dtypes = "toy", ("rows", "padding"), ("bf16",)
        smallest = {"padding": 0}
        space = supports = features = problem_from_call = None

    problem = Problem.of("toy", rows=8, padding=0, ragged={"rows": (8,)})
    check_problem_of(Toy(), problem)
    assert not_empty(Toy(), problem) is problem
    idle = not_empty(Toy(), Problem.of("toy", rows=0, padding=0))
    assert idle == Problem.of("toy", rows=1, padding=0)


class Typed(FakeFamily):
    """With a knob that is a truth value, and one that is a float."""

    knobs = ("BLOCK", "FAST", "SCALE")

    def space(self, device=None):
        return tuple(KernelConfig.of(BLOCK=64, FAST=fast, SCALE=1.0) for fast in (True, False))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, None),
        ({"BLOCK": 32}, None),
        ({"BLOCK": 64.0}, "BLOCK of fake must be an integer but is 64.0"),
        ({"BLOCK": True}, "BLOCK of fake must be an integer but is True"),
    ],
)
def test_a_value_that_equals_an_integer_is_none(changed, why):
    config = KernelConfig.of(**{"BLOCK": 64, "FAST": True, "SCALE": 1.0} | changed)
    assert wrong_knobs(Typed(), config) == why


@pytest.mark.parametrize(("knob", "value"), [("BLOCK_M", 64.0), ("GROUP_M", True)])
def test_no_shortlist_and_no_call_takes_it(knob, value):
    family = find_family(GROUPED)
    config = KernelConfig.of(**family.space(H200)[0].to_json() | {knob: value})
    said = f"{knob} of {GROUPED} must be an integer but is {value}"
    with pytest.raises(ForetuneError, match=said):
        make_shortlist(family, layer(), H200, configs=[config])
    with pytest.raises(ForetuneError, match=f"{knob} cannot be {value}"):
        choice.given(config, family, layer(), H200)


def test_a_launch_without_work_is_predicted_and_nobody_is_warned(monkeypatch):
    family = find_family(GROUPED)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = choice.choose(family, layer(rows=0), H200, Mode.PREDICT, lambda config: None)
        assert config == choice.choose(family, layer(rows=1), H200, Mode.PREDICT, lambda config: None)
        configs = tuple(one.to_triton() for one in family.space(H200)[:64])
        pruner = Pruner(family, 4, device="h200")
        assert pruner.positions(layer(rows=0), configs) == pruner.positions(layer(rows=1), configs)


def test_a_cover_asks_nothing_of_the_size_that_it_is_made_for():
    made = [
        foretune.cover(GROUPED, layer(rows=rows), "rows", (16, 64), k=1, sizes=[16, 64], device="h200")
        for rows in (0, 64)
    ]
    assert made[0].configs == made[1].configs
    with pytest.raises(ForetuneError, match="groups of grouped_gemm_fwd must be at least 1 but is 0"):
        foretune.cover(GROUPED, layer(groups=0), "rows", (16, 64), k=1, device="h200")


def test_a_launch_without_work_is_not_logged(monkeypatch, tmp_path):
    monkeypatch.setenv("FORETUNE_LOG", str(tmp_path / "log"))
    log_row(GROUPED, layer(rows=0), KernelConfig.of(BLOCK_M=64), 1.0, H200, timed="cold")
    assert not (tmp_path / "log").exists()


def test_problems_without_work_that_were_logged_before_are_left_out_of_training():
    cases = fake_cases(models=1, tokens=(64, 128), randoms=0)
    dataset, family = fake_dataset(cases), FakeFamily()
    first = dataset.cases[0].problem
    idle = replace(first, dims=tuple((dim, 0 if dim == "rows" else size) for dim, size in first.dims), ragged=None)
    odd = replace(dataset, cases=(Case(idle, ("production",)), *dataset.cases[1:]))
    with pytest.warns(ForetuneWarning, match="1 problems without work are left out, such as fake"):
        grid = TrainingSet.of(odd, family).grid
    assert len(grid) == len(TrainingSet.of(dataset, family).grid) - 1
    assert np.isfinite(grid.times_us).any(axis=1).all()
