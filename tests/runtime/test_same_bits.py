"""`same_bits` and `invariant`: what is chosen stays within one numerics class, wherever it is chosen."""

from __future__ import annotations

import warnings

import foretune
import numpy as np
import pytest
import triton
from fakes import FakeFamily
from foretune.datasets import DeviceSpec, FamilyError, ForetuneError, KernelConfig, Problem
from foretune.runtime import ForetuneWarning, Pruner, make_shortlist
from foretune.runtime.same_bits import is_restricted, keeping
from foretune.runtime.shortlist import Chooser

H200 = DeviceSpec.named("h200")
CALL = {"a_ptr": None, "M": 64, "N": 64, "K": 64}


@pytest.fixture
def family(toy):
    """The toy, whose bits BLOCK_K decides: 16, 32 or 128; for many rows the default is the only config of 128."""

    class Classed(toy.ToyFamily):
        numerics = ("BLOCK_K",)
        independent = ("rows",)

        def default(self, problem, device):
            many = [config for config in toy.CONFIGS if config["BLOCK_K"] == (32 if problem["rows"] > 64 else 16)]
            return many[0]

    return Classed()


def problem(rows=64):
    return Problem.of("toy", rows=rows, n=64, k=64, dtype="fp16")


def steps(configs):
    return {config["BLOCK_K"] for config in configs}


def test_without_a_request_a_family_is_itself(family, monkeypatch):
    assert keeping(family) is family
    assert keeping(family, same_bits=False) is family
    monkeypatch.setenv("FORETUNE_SAME_BITS", "0")
    assert keeping(family) is family


def test_a_restriction_is_made_once_and_changes_nothing_else(family):
    kept = keeping(family, same_bits=True)
    assert kept is keeping(family, same_bits=True)
    assert kept is keeping(kept, same_bits=True)
    assert is_restricted(kept)
    assert not is_restricted(family)
    assert isinstance(kept, type(family))
    assert kept.space() == family.space()
    assert family.supports(family.space()[-1], problem(), H200) is None


def test_the_class_is_that_of_the_default_config(family, toy):
    kept = keeping(family, same_bits=True)
    assert {c["BLOCK_K"] for c in toy.CONFIGS if kept.supports(c, problem(64), H200) is None} == {16}
    assert {c["BLOCK_K"] for c in toy.CONFIGS if kept.supports(c, problem(65), H200) is None} == {32}
    other = toy.CONFIGS[2]
    assert kept.supports(other, problem(64), H200) == (
        "its results may have other bits: its numerics class is (32,), but that of the default config is (16,)"
    )


@pytest.mark.parametrize("name", ["m", "rows"])
def test_invariant_keeps_one_class_at_all_sizes(family, toy, name):
    kept = keeping(family, invariant=name)
    for rows in (1, 64, 65, 65536):
        allowed = [config for config in toy.CONFIGS if kept.supports(config, problem(rows), H200) is None]
        assert steps(allowed) == {32}
        assert kept.default(problem(rows), H200) in allowed


@pytest.mark.parametrize("name", ["n", "columns", 3, ""])
def test_invariant_takes_an_independent_dimension_only(family, name):
    with pytest.raises(ForetuneError, match=f"dimension whose entries toy computes without each other, rows, .*{name}"):
        keeping(family, invariant=name)


def test_a_family_without_independent_dimensions_has_no_invariant(toy):
    with pytest.raises(ForetuneError, match="invariant must be None for toy but is 'm'"):
        keeping(toy.ToyFamily(), invariant="m")


@pytest.mark.parametrize("value", ["yes", "2", " "])
def test_another_value_of_the_variable_is_an_error(family, monkeypatch, value):
    monkeypatch.setenv("FORETUNE_SAME_BITS", value)
    with pytest.raises(ForetuneError, match=f"FORETUNE_SAME_BITS must be 0 or 1 but is '{value}'"):
        foretune.prune(family)


def test_the_option_must_be_a_flag(family):
    with pytest.raises(ForetuneError, match="same_bits must be true or false"):
        foretune.prune(family, same_bits="yes")


@pytest.mark.parametrize("how", ["option", "variable", "invariant"])
def test_a_shortlist_has_one_class(family, toy, monkeypatch, how):
    options = {"option": {"same_bits": True}, "variable": {}, "invariant": {"invariant": "m"}}[how]
    if how == "variable":
        monkeypatch.setenv("FORETUNE_SAME_BITS", "1")
    found = foretune.shortlist(family, problem(), "h200", k=6, bundle=toy.ToyBundle(), **options)
    assert found.predicted
    assert steps(found.configs) == ({32} if how == "invariant" else {16})
    assert len(found.configs) == (3 if how == "invariant" else 2)
    assert found.predicted_slowdown[0] == 1.0


def test_an_explanation_has_one_class(family, toy):
    found = foretune.explain(family, problem(), "h200", k=6, bundle=toy.ToyBundle(), same_bits=True)
    assert steps(one.config for one in found.configs) == {16}
    assert found.candidates == 2


def test_without_a_prediction_the_class_is_kept(family, toy):
    def fails(problem, configs):
        raise ValueError("no numbers")

    with pytest.warns(ForetuneWarning, match="no numbers"):
        found = foretune.shortlist(family, problem(), "h200", bundle=toy.ToyBundle(fails), same_bits=True)
    assert not found.predicted
    assert steps(found.configs) == {16}


def test_where_no_config_keeps_the_bits_a_shortlist_is_an_error(family, toy):
    with pytest.raises(ForetuneError, match=r"toy: none of the 3 configs keeps the same bits: .* class is \(32,\)"):
        foretune.shortlist(family, problem(), "h200", configs=toy.CONFIGS[2:5], bundle=toy.ToyBundle(), same_bits=True)


def test_what_no_config_supports_is_no_matter_of_bits(toy):
    class Refusing(toy.ToyFamily):
        numerics = ("BLOCK_K",)

        def default(self, problem, device):
            return toy.CONFIGS[0]

    kept = keeping(Refusing(lambda config, problem: "too small"), same_bits=True)
    found = Chooser(kept, H200, None, toy.ToyBundle()).choose(problem(), foretune.runtime.how_many.HowMany(2))
    assert "none of the configs can run this problem: too small" in found.reason


@pytest.mark.parametrize("mode", ["shortlist", "predict", "off"])
def test_a_prune_keeps_one_class_in_every_mode(family, toy, monkeypatch, mode):
    monkeypatch.setenv("FORETUNE_MODE", mode)
    prune = foretune.prune(family, 6, device="h200", bundle=toy.ToyBundle(), same_bits=True)
    kept = prune(toy.triton_configs(), CALL)
    assert {config.kwargs["BLOCK_K"] for config in kept} == {16}
    assert len(kept) == (1 if mode == "predict" else 2)


def test_a_launch_without_the_class_keeps_that_of_its_first_config(family, toy):
    prune = foretune.prune(family, 6, device="h200", bundle=toy.ToyBundle(), same_bits=True)
    configs = toy.triton_configs()[2:]
    with pytest.warns(ForetuneWarning, match="none of the 4 configs keeps the same bits.*first supported config is"):
        kept = prune(configs, CALL)
    assert {config.kwargs["BLOCK_K"] for config in kept} == {32}
    assert len(kept) == 3


def test_a_family_that_declares_nothing_keeps_its_default(toy):
    found = foretune.shortlist(toy.ToyFamily(), problem(), "h200", k=6, bundle=toy.ToyBundle(), same_bits=True)
    assert found.configs == (toy.CONFIGS[0],)


def test_a_cover_has_one_class_at_each_size(family, toy):
    def by_step(problem, configs):  # the first configs are best for few rows, the last for many
        return np.array([1.0 + abs(problem["rows"] // 200 - place) for place in range(len(configs))])

    def covered(**options):
        return foretune.cover(
            family, problem(), "rows", (1, 1024), 3, device="h200", bundle=toy.ToyBundle(by_step),
            sizes=(1, 64, 65, 500, 1024), **options,
        )  # fmt: skip

    assert steps(covered(invariant="m").configs) == {32}
    found = covered(same_bits=True)
    for size in (1, 64, 65, 1024):
        assert found.config_for(size)["BLOCK_K"] == (16 if size <= 64 else 32)
    assert len(steps(covered().configs)) > 1


def test_knobs_that_do_not_exist_are_said(toy):
    class Wrong(toy.ToyFamily):
        numerics = ("BLOCK_Q",)

    with pytest.raises(FamilyError, match=r"family toy: numerics\(\) raised .*BLOCK_Q"):
        Wrong().numerics(toy.CONFIGS[0], problem())


def test_a_class_must_be_hashable(toy):
    class Wrong(toy.ToyFamily):
        def numerics(self, config, problem):
            return [1]

    with pytest.raises(FamilyError, match=r"numerics\(\) must return"):
        Wrong().numerics(toy.CONFIGS[0], problem())


def test_independent_dimensions_must_exist():
    class Wrong(FakeFamily):
        independent = ("columns",)

    with pytest.raises(FamilyError, match=r"independent of family .* may only name its dims but has columns"):
        Pruner(Wrong())


def test_without_a_family_the_options_are_errors_and_the_variable_a_warning(toy, monkeypatch):
    configs = toy.triton_configs()
    for options, name in (({"same_bits": True}, "same_bits"), ({"invariant": "m"}, "invariant")):
        with pytest.raises(ForetuneError, match=f"{name} needs a family, but family is None"):
            foretune.autotune(configs, ["M"], **options)
    monkeypatch.setenv("FORETUNE_SAME_BITS", "1")
    monkeypatch.setattr("foretune.runtime.arguments._warned", set())
    kernel = triton.jit(toy.matmul_kernel)
    with pytest.warns(ForetuneWarning, match="FORETUNE_SAME_BITS is not applied to kernels without a family"):
        foretune.autotune(configs, ["M"])(kernel)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        foretune.autotune(configs, ["M"])(kernel)


def test_make_shortlist_leaves_restricting_to_its_caller(family, toy, monkeypatch):
    monkeypatch.setenv("FORETUNE_SAME_BITS", "1")
    assert len(make_shortlist(family, problem(), "h200", k=6, bundle=toy.ToyBundle()).configs) == 6
    assert isinstance(family.space()[0], KernelConfig)
