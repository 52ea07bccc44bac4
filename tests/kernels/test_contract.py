"""Our families keep to the contract, and the contract sees what is wrong with one."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from foretune.datasets import Family, FamilyError, ForetuneError, KernelConfig
from foretune.kernels.grouped_gemm import GroupedGemmForward
from foretune.kernels.testing import FamilyContract
from grouped import DW, DX, FORWARD


class GroupedGemmContract(FamilyContract):
    compiled = 2  # one of each corner is in test_compile.py
    launched = 2  # each takes seconds in the interpreter

    def problems(self):
        drawn = {case.problem.signature: case.problem for case in self.family.cases(random=30)}
        return list(drawn.values())  # one of each dtype and permutation

    def call(self, problem):
        if self.family is DW and problem.flags:
            return None  # its kernel never sees a permutation
        variant = self.family.variant
        n, k = (problem[dim] for dim in variant.kernel_n_k)
        tensor = {variant.dtype_argument: SimpleNamespace(dtype=problem.dtype)}
        sizes = {"rows": problem["rows"], "groups": problem["groups"], "N8": n // 8, "K8": k // 8}
        return tensor | sizes | self.family.constants(problem)


class TestForward(GroupedGemmContract):
    family = FORWARD


class TestDX(GroupedGemmContract):
    family = DX

    @pytest.mark.slow  # compiles the forward kernels
    def test_what_supports_passes_compiles(self):
        super().test_what_supports_passes_compiles()


class TestDW(GroupedGemmContract):
    family = DW


def shuffled_by_count(self, problem, device, configs, binaries=None):
    table = GroupedGemmForward.features(self, problem, device, configs)
    return table + np.float32(len(configs))


def hasty(self, config, problem, device):
    if "NO_SUCH_KNOB" in config.to_json():
        return "NO_SUCH_KNOB is no knob"
    return None if config["BLOCK_M"] > 0 else "BLOCK_M is too small"


def longer(problem):
    return replace(problem, dims=tuple((dim, size + (dim == "rows")) for dim, size in problem.dims))


def lenient(self, config, problem, device):
    values = {knob: value for knob, value in config.to_json().items() if knob in (*self.knobs, "num_ctas")}
    return GroupedGemmForward.supports(self, KernelConfig.of(**values), problem, device)


FORGOT = {
    "a space with twins": ({"space": lambda self, device=None: FORWARD.space()[:1] * 2}, "no_repeats", "config twice"),
    "no space": ({"space": lambda self, device=None: ()}, "no_repeats", "at least one KernelConfig"),
    "a knob too few": ({"knobs": FORWARD.knobs[1:]}, "no_repeats", "knobs are"),
    "an unknown knob passes": ({"supports": lenient}, "wrong_knob", "must refuse a config with NO_SUCH_KNOB"),
    "supports fails": ({"supports": hasty}, "wrong_knob", "must answer for any config, but raised KeyError"),
    "a reason without the knob": (
        {"supports": lambda *call: GroupedGemmForward.supports(*call) and "no"},
        "wrong_knob",
        "does not name NO_SUCH_KNOB: no",
    ),
    "an empty reason": ({"supports": lambda *call: ""}, "why_not", "a non-empty reason but returned ''"),
    "nothing supported": ({"supports": lambda *call: "never"}, "why_not", "no config supports .*: never"),
    "features of 64 bits": (
        {"features": lambda *call: GroupedGemmForward.features(*call).astype(np.float64)},
        "finite_float32",
        "must be float32 but are float64",
    ),
    "features that are not finite": (
        {"features": lambda *call: np.full_like(GroupedGemmForward.features(*call), np.nan)},
        "finite_float32",
        "must be finite, but .*block_m",
    ),
    "features of the whole list": ({"features": shuffled_by_count}, "on_the_others", "must be its own"),
    "an estimate of 0": (
        {"estimate_us": lambda self, problem, device, configs: np.zeros(len(configs))},
        "estimates",
        "must return a time above 0",
    ),
    "sizes at call time": ({"at_call_time": lambda self, problem: problem}, "at_call_time", "must forget ragged sizes"),
    "a grid without end": (
        {"at_call_time": lambda self, problem: longer(problem.without_sizes())},
        "at_call_time",
        "twice must be as once",
    ),
    "cases that ignore the seed": (
        {"cases": lambda self, seed=0, **more: GroupedGemmForward.cases(self, **more)},
        "cases",
        "another seed must draw others",
    ),
    "cases over the limit": (
        {"cases": lambda self, max_tflop=None, **more: GroupedGemmForward.cases(self, **more)},
        "cases",
        "of more than max_tflop",
    ),
    "no work": ({"bytes": lambda self, problem: -1.0}, "work", r"bytes\(\) must return a finite number >= 0"),
    "a default that cannot run": (
        {"default": lambda self, problem, device: KernelConfig.of(BLOCK_M=64)},
        "the_default",
        "is not supported for .*: BLOCK_N is missing",
    ),
    "a check that cannot run": (
        {"check_problem": lambda self, config, problem: replace(problem, dims=(("groups", 0), *problem.dims[1:]))},
        "is_checked",
        "a problem it does not support: groups, N and K must be >= 1",
    ),
    "a binary for each time": (
        {"binary_key": lambda self, config, problem: object()},
        "share_a_binary",
        "must be the same for equal calls",
    ),
    "another problem than was launched": (
        {"problem_from_call": lambda *call: longer(GroupedGemmForward.problem_from_call(*call))},
        "says_its_problem",
        "was taken for one of",
    ),
}


@pytest.mark.parametrize("name", FORGOT)
def test_the_contract_sees(name):
    changed, check, why = FORGOT[name]

    class Contract(GroupedGemmContract):
        family = type("Broken", (GroupedGemmForward,), changed)()

    if "knobs" in changed:
        Contract.family.knobs = changed["knobs"]
    (method,) = [method for method in dir(Contract) if method.startswith("test_") and check in method]
    with pytest.raises((AssertionError, FamilyError), match=why):  # some is seen before the contract asks
        getattr(Contract(), method)()


def test_a_contract_names_its_family_in_any_way():
    class ByName(FamilyContract):
        family = "grouped_gemm_dx"

    class ByClass(FamilyContract):
        family = GroupedGemmForward

    assert ByName.family is DX
    assert ByClass.family is FORWARD
    with pytest.raises(ForetuneError, match="must be a Family"):
        type("Wrong", (FamilyContract,), {"family": 7})


def test_a_family_that_only_predicts_is_told_what_to_override():
    bare = {name: getattr(GroupedGemmForward, name) for name in ("space", "supports", "features", "problem_from_call")}
    family = type("Bare", (Family,), bare | {"name": "bare", "variant": FORWARD.variant})()

    class Contract(FamilyContract):
        pass

    Contract.family = family
    with pytest.raises(AssertionError, match="override `problems`"):
        Contract().problems()
    with pytest.raises(pytest.skip.Exception, match="the family only predicts"):
        Contract().test_the_source_hash_is_stable()
