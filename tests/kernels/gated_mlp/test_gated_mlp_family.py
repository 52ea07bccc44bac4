"""The gated MLP keeps to the contract, and its kernel is right on every path."""

from __future__ import annotations

from dataclasses import replace

import pytest
from foretune.datasets import DeviceSpec, ForetuneError, KernelConfig, Problem
from foretune.kernels.gated_mlp import GatedMlp
from foretune.kernels.gated_mlp.family import activation_of
from foretune.kernels.testing import FamilyContract
from grouped import A10, A100, B200, MI300X

CPU = replace(DeviceSpec.named("h200"), backend="cpu", sm_count=2)


class TestGatedMlp(FamilyContract):
    family = GatedMlp
    compiled = 1
    launched = 2  # each takes seconds in the interpreter

    def problems(self):
        dims = {"m": 100, "n": 328, "k": 1024}
        return [Problem.of("gated_mlp", **dims), Problem.of("gated_mlp", dtype="fp16", flags=("gelu", "saves"), **dims)]

    def call(self, problem):
        sizes = {"M": problem["m"], "N8": problem["n"] // 8, "K8": problem["k"] // 8}
        saved = object() if "saves" in problem.flags else None
        x = type("Tensor", (), {"dtype": problem.dtype})
        return sizes | {"x_ptr": x, "saved_ptr": saved, "ACTIVATION": activation_of(problem)}


FAMILY = TestGatedMlp.family


def test_the_workload_has_models_on_every_rank_and_random_shapes_from_decode_to_training():
    cases = FAMILY.cases()
    widths = {(case.problem["n"], case.problem["k"]) for case in cases if "Llama-3.1-8B/gate_up" in case.sources}
    assert widths == {(14336 // degree, 4096) for degree in (1, 2, 4, 8)}
    assert sum(case.sources == ("random",) for case in cases) == 40
    rows = [case.problem["m"] for case in cases]
    assert (min(rows), max(rows)) == (1, 16384)
    gemmas = [case.problem.flags for case in cases if case.sources[0].startswith("Gemma")]
    assert gemmas
    assert all("gelu_tanh" in flags for flags in gemmas)
    assert {case.problem["m"] for case in FAMILY.cases(tokens=[5], random=0)} == {5}


@pytest.mark.parametrize("device", [A10, A100, B200, MI300X], ids=lambda one: one.arch)
@pytest.mark.parametrize("dtype", FAMILY.dtypes)
def test_the_default_runs_on_other_devices_too(dtype, device):
    for rows in (1, 64, 4096):
        problem = Problem.of("gated_mlp", dtype=dtype, m=rows, n=4096, k=4096)
        assert FAMILY.supports(FAMILY.default(problem, device), problem, device) is None


@pytest.mark.parametrize(("told", "named"), [({"seed": -1}, "seed must be >= 0"), ({"tokens": [0]}, "token counts")])
def test_a_workload_that_cannot_be_is_refused(told, named):
    with pytest.raises(ForetuneError, match=named):
        FAMILY.cases(**told)


def small(**knobs):
    blocks = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 32, "GROUP_M": 1, "PROGRAMS_PER_SM": 0, "TMA": 0}
    return KernelConfig.of(**blocks | {"num_warps": 4, "num_stages": 2} | knobs)


@pytest.mark.interpret
@pytest.mark.parametrize("tma", [0, 1])
@pytest.mark.parametrize(
    ("flags", "persistent"), [((), 0), (("saves",), 1), (("gelu",), 0), (("gelu_tanh", "saves"), 1)]
)
def test_every_path_is_right_off_every_block(tma, flags, persistent):
    problem = Problem.of("gated_mlp", dtype="fp16", flags=flags, m=21, n=24, k=40)
    inputs = FAMILY.inputs(problem, CPU)
    expected = FAMILY.reference(inputs)
    out = FAMILY.launch(inputs, small(TMA=tma, PROGRAMS_PER_SM=persistent, GROUP_M=1 + 7 * persistent)).float()
    assert float((out - expected).norm() / expected.norm()) < FAMILY.tolerance(problem)
