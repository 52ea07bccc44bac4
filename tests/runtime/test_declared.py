"""What is wrong is refused where a kernel is declared or a shortlist asked for; a launch is only warned, once, by its
line, and gets all configs."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import triton
from fakes import FakeFamily
from foretune.datasets import DeviceSpec, ForetuneError, KernelConfig, Problem
from foretune.runtime import ForetuneWarning, Pruner, make_shortlist

PROBLEM = Problem.of("toy", rows=64, n=64, k=64, dtype="fp16")
CALL = {"a_ptr": None, "M": 64, "N": 64, "K": 64}


@pytest.mark.parametrize("k", [1.5, float("nan"), "8", True, None, 0, -1])
def test_the_length_must_be_a_positive_integer(toy, k):
    for declare in (
        lambda: Pruner(toy.ToyFamily(), k),
        lambda: make_shortlist(toy.ToyFamily(), PROBLEM, toy.H200, k=k, bundle=toy.ToyBundle()),
    ):
        with pytest.raises(ForetuneError, match=r"length k must be ('auto' or )?an integer >= 1 but got "):
            declare()


def test_numpys_integers_are_integers(toy):
    assert len(make_shortlist(toy.ToyFamily(), PROBLEM, toy.H200, k=np.int64(2), bundle=toy.ToyBundle()).configs) == 2


#: Problems that are none of the toy's, and what is said of them.
OTHERS = {
    "family": (replace(PROBLEM, family="fake"), "the problem must be one of toy but is one of fake"),
    "missing": (Problem.of("toy", rows=64, n=64), "must have the dimensions rows, n, k but this one has n, rows"),
    "unknown": (
        Problem.of("toy", rows=64, n=64, k=64, m=1),
        "must have the dimensions rows, n, k but this one has k, m, n,",
    ),
    "dtype": (replace(PROBLEM, dtype="int8"), "dtype of toy must be one of bf16, fp16 but is int8"),
    "flag": (replace(PROBLEM, flags=("fused",)), "fused is not a flag of toy, whose flags are: none"),
    "size": (
        replace(PROBLEM, dims=(("k", 64), ("n", 64), ("rows", 2**20))),
        "rows of toy must be at most 65536 but is",
    ),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_problem_that_is_not_the_familys_is_refused_and_a_launch_goes_on(toy, other):
    problem, said = OTHERS[other]
    bundle, configs = toy.ToyBundle(), toy.triton_configs()
    with pytest.raises(ForetuneError, match=said):
        make_shortlist(toy.ToyFamily(), problem, toy.H200, bundle=bundle)
    pruner = Pruner(toy.ToyFamily(), 1, problem=lambda arguments: problem, device=toy.H200, bundle=bundle)
    with pytest.warns(ForetuneWarning, match=f"toy: no prediction .*{said}.*: all 6 configs go through"):
        assert pruner(configs, {}) == configs
    assert bundle.predicted == []


def test_a_wrong_name_that_problem_reads_is_explained(toy):
    pruner = Pruner(toy.ToyFamily(), problem=lambda call: call["ROWZ"], device=toy.H200, bundle=toy.ToyBundle())
    with pytest.warns(ForetuneWarning, match=r"problem= reads 'ROWZ' \(did you mean 'ROWS'\?\); the launch has ROWS"):
        assert len(pruner(toy.triton_configs(), {"ROWS": 8})) == 6


def test_a_knob_that_no_config_has_is_refused(toy):
    own, configs = {"ROWZ": toy.ToyFamily.knobs[0]}, toy.triton_configs()
    with pytest.raises(ForetuneError, match=r"knobs: no config has 'ROWZ'.*; they have "):
        Pruner(toy.ToyFamily(), knobs=own, configs=configs, device=toy.H200, bundle=toy.ToyBundle())


def test_what_is_made_of_a_launch_must_be_a_problem(toy):
    pruner = Pruner(toy.ToyFamily(), problem=lambda arguments: None, device=toy.H200, bundle=toy.ToyBundle())
    with pytest.warns(ForetuneWarning, match="the launch's problem must be a Problem but is None"):
        assert len(pruner(toy.triton_configs(), CALL)) == 6


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"bundle": "nowhere"}, r"nowhere.*: no such file"),
        ({"bundle": 5}, "bundle must be a Bundle or the path of its folder, but is 5"),
        ({"device": {}}, "unknown device {}; known: .*h200"),
        ({"device": "h300"}, "unknown device 'h300'"),
        ({"device": Path("nowhere.json")}, "nowhere.json: cannot be read"),
    ],
)
def test_a_device_or_a_bundle_that_is_none_is_refused_at_once(toy, wrong, said):
    with pytest.raises(ForetuneError, match=said):
        Pruner(toy.ToyFamily(), **wrong)
    with pytest.raises(ForetuneError, match=said):
        make_shortlist(toy.ToyFamily(), PROBLEM, **{"device": toy.H200, "bundle": toy.ToyBundle()} | wrong)


def test_a_device_and_a_bundle_may_be_paths(toy, tmp_path, monkeypatch):
    toy.H200.save(tmp_path / "mine.json")
    loaded = toy.ToyBundle()
    monkeypatch.setattr("foretune.model.load_bundle", lambda path: loaded)
    for device, bundle in ((tmp_path / "mine.json", tmp_path), (str(tmp_path / "mine.json"), str(tmp_path))):
        pruner = Pruner(toy.ToyFamily(), 1, device=device, bundle=bundle)
        assert (pruner.device, pruner.bundle) == (toy.H200, loaded)
        assert make_shortlist(toy.ToyFamily(), PROBLEM, device, k=1, bundle=bundle).positions == (5,)


def test_a_card_that_nothing_was_learned_on_is_told_so_but_no_launch_is_warned(toy):
    h100, part = DeviceSpec.named("h100"), toy.H200.with_sms(64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reasons = [make_shortlist(toy.ToyFamily(), PROBLEM, d, bundle=toy.ToyBundle()).reason for d in (h100, part)]
    assert ", which learned on NVIDIA H200 only; " in reasons[0]
    assert "learned on" not in reasons[1]


def test_an_arch_that_no_bundle_knows_is_told_in_one_line_with_what_makes_it_known(toy):
    family = toy.ToyFamily(lambda config, problem: "no" if config["BLOCK_M"] == 16 else None)
    answer = make_shortlist(family, PROBLEM, replace(toy.H200, name="A100", arch="sm_80"), bundle=toy.ToyBundle())
    assert answer.positions == (5, 4, 3, 1)
    assert answer.predicted
    assert "\n" not in answer.reason
    assert answer.reason.startswith("no measurement of sm_80: predicted from the analytic model")
    assert "`foretune collect toy --plan adaptive --budget 5m --out small` on it" in answer.reason
    assert "`foretune adapt --data small --out my-bundle`" in answer.reason


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (KernelConfig.of(BLOCK_M=16, BLOCK_N=16, BLOCK_K=16, FOO=3), "a config has FOO"),
        (KernelConfig.of(BLOCK_M=16), "a config lacks BLOCK_N, BLOCK_K"),
        (KernelConfig.of(BLOCK_M=16, BLOCK_N=16, BLOCK_K=16, maxnreg=64), "a config has maxnreg"),
        ({"BLOCK_M": 16}, "each of configs must be a KernelConfig"),
    ],
)
def test_a_config_with_other_knobs_is_refused(toy, config, said):
    with pytest.raises(ForetuneError, match=said):
        make_shortlist(toy.ToyFamily(), PROBLEM, toy.H200, configs=[*toy.CONFIGS, config], bundle=toy.ToyBundle())


# A kernel of its own words.

OWN = {"BM": "BLOCK_M", "BN": "BLOCK_N"}


def own_configs(toy, **more):
    return [
        triton.Config({"BM": c["BLOCK_M"], "BN": c["BLOCK_N"], **more}, num_warps=c.num_warps, num_stages=c.num_stages)
        for c in toy.CONFIGS
    ]


def test_a_kernels_own_knobs_are_mapped_to_the_familys(toy):
    asked = []
    family, configs = toy.ToyFamily(lambda config, problem: asked.append(config)), own_configs(toy)
    pruner = Pruner(
        family, 2, knobs=OWN, fixed={"BLOCK_K": 32}, configs=configs, device=toy.H200, bundle=toy.ToyBundle()
    )
    assert pruner(configs, CALL) == [configs[5], configs[4]]
    assert asked[0] == KernelConfig.of(BLOCK_M=64, BLOCK_N=32, BLOCK_K=32, num_warps=4, num_stages=2)


@pytest.mark.parametrize(
    ("fixed", "named", "counts"), [(None, {}, 32), ({"BLOCK_K": 16}, {}, 16), (None, {"BLOCK_K": 16}, 16)], ids=str
)
def test_a_knob_that_configs_do_not_name_is_what_the_family_says(toy, fixed, named, counts):
    class Grown(toy.ToyFamily):
        default_knobs = {"BLOCK_K": 32}

    asked = []
    family, configs = Grown(lambda config, problem: asked.append(config["BLOCK_K"])), own_configs(toy, **named)
    pruner = Pruner(family, 2, knobs=OWN, fixed=fixed, configs=configs, device=toy.H200, bundle=toy.ToyBundle())
    assert pruner(configs, CALL) == [configs[5], configs[4]]
    assert set(asked) == {counts}


@pytest.mark.parametrize("family", ["matmul", "grouped_gemm_dw", "scaled_gemm"])
def test_kernels_without_warps_of_one_job_each_are_pruned_as_they_are(family):
    from foretune.kernels import find_family

    family, jobs = find_family(family), ("CONSUMERS", "PINGPONG")
    space = [config for config in family.space(DeviceSpec.named("h200")) if not config["CONSUMERS"]][::200]
    plain = [{knob: config[knob] for knob in config.to_json() if knob not in jobs} for config in space]
    configs = [KernelConfig.from_json(knobs).to_triton() for knobs in plain]
    pruner = Pruner(family, 1, configs=configs, device="h200")
    assert pruner.own_knobs.usable(configs) == (tuple(range(len(space))), tuple(space))


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ({"knobs": {"BM": "BLOCK_X"}}, "'BLOCK_X' is no knob of toy; it has BLOCK_M, BLOCK_N"),
        ({"knobs": {"BM": 5}}, "each of knobs must be a non-empty string of printable characters but is 5"),
        ({"knobs": {"BM": "BLOCK_M", "BN": "BLOCK_M"}}, "BLOCK_M is given more than once"),
        ({"knobs": {"BM": "BLOCK_M"}, "fixed": {"BLOCK_M": 8}}, "BLOCK_M is given more than once"),
        ({"fixed": {"FOO": 8}}, "'FOO' is no knob of toy"),
        ({"fixed": {"BLOCK_K": None}}, "config knob BLOCK_K must be a number or a string but got None"),
        ({"fixed": {"BLOCK_K": "a"}}, "fixed: BLOCK_K must be a value of the type of .* but is 'a'"),
        ({"knobs": "BM"}, "knobs must be a mapping of knob names but is 'BM'"),
    ],
)
def test_a_mapping_that_cannot_be_is_refused_at_once(toy, declared, said):
    with pytest.raises(ForetuneError, match=said):
        Pruner(toy.ToyFamily(), **declared)


@pytest.mark.parametrize(
    ("declared", "more", "said"),
    [
        ({}, {}, "lacks BLOCK_M, BLOCK_N, BLOCK_K and has BM, BN"),
        ({"knobs": OWN}, {}, "a config lacks BLOCK_K"),
        ({"knobs": OWN, "fixed": {"BLOCK_K": 32}}, {"FOO": 1}, "a config has FOO"),
        ({"knobs": OWN, "fixed": {"BLOCK_K": 32}}, {"BLOCK_K": 16}, "BLOCK_K is given more than once"),
    ],
)
def test_configs_that_are_not_the_familys_are_refused_at_once_or_told_in_a_launch(toy, declared, more, said):
    configs = own_configs(toy, **more)
    with pytest.raises(ForetuneError, match=said):
        Pruner(toy.ToyFamily(), **declared, configs=configs)
    pruner = Pruner(toy.ToyFamily(), **declared, device=toy.H200, bundle=toy.ToyBundle())
    with pytest.warns(ForetuneWarning, match=f"{said}.*: all 6 configs go through"):
        assert pruner(configs, CALL) == configs


def test_what_is_no_triton_config_is_refused_at_once(toy):
    for configs in ([], "configs", [KernelConfig.of(BLOCK_M=16)], [5]):
        with pytest.raises(ForetuneError, match=r"triton\.Config"):
            Pruner(toy.ToyFamily(), configs=configs)


def test_a_config_that_is_none_costs_the_others_no_prediction(toy):
    configs = [*toy.triton_configs(), triton.Config({"BLOCK_M": 16}), triton.Config({"BLOCK_M": None}, num_warps=3)]
    pruner = Pruner(toy.ToyFamily(), 2, device=toy.H200, bundle=toy.ToyBundle())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pruner([*configs[6:], *configs[:6]], CALL) == [configs[5], configs[4]]


# What is kept, and where a warning points.


def test_kernels_that_share_a_pruner_are_predicted_once_each(toy):
    bundle = toy.ToyBundle()
    pruner = Pruner(toy.ToyFamily(), 1, device=toy.H200, bundle=bundle)
    lists = [toy.triton_configs()[:size] for size in (6, 5, 4)]
    for _ in range(3):
        assert [pruner(configs, CALL) for configs in lists] == [[configs[-1]] for configs in lists]
    assert len(bundle.predicted) == len(lists)


def test_a_shipped_device_is_read_once(monkeypatch):
    first = DeviceSpec.find("h200")
    monkeypatch.setattr(Path, "read_text", None)
    monkeypatch.setattr(Path, "iterdir", None)
    assert DeviceSpec.find("h200") is DeviceSpec.named("h200") is first
    assert "h200" in DeviceSpec.names()


def test_a_warning_points_at_the_line_of_the_shortlist(toy):
    with pytest.warns(ForetuneWarning) as caught:
        make_shortlist(toy.ToyFamily(), PROBLEM, toy.H200, bundle=toy.ToyBundle([1.0]))
    assert (caught[0].filename, caught[0].lineno) == (__file__, inspect.currentframe().f_lineno - 1)


def test_a_bundle_for_other_families_goes_through_with_its_reason():
    fake = FakeFamily()
    problem = Problem.of("fake", groups=2, rows=64, n=64, k=64)
    with pytest.warns(ForetuneWarning, match="fake: no prediction .the bundle has no family 'fake'"):
        assert not make_shortlist(fake, problem, "h200").predicted
