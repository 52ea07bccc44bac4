"""The gated MLP keeps to the contract, and its kernel is right on every path."""

from __future__ import annotations

from dataclasses import replace

import pytest
from foretune.datasets import DeviceSpec, KernelConfig, Problem
from foretune.kernels.gated_mlp import GatedMlp
from foretune.kernels.gated_mlp.family import activation_of
from foretune.kernels.testing import FamilyContract

CPU = replace(DeviceSpec.named("h200"), backend="cpu", sm_count=2)


class TestGatedMlp(FamilyContract):
    family = GatedMlp
    compiled = 1

    def call(self, problem):
        sizes = {"M": problem["m"], "N8": problem["n"] // 8, "K8": problem["k"] // 8}
        saved = object() if "saves" in problem.flags else None
        x = type("Tensor", (), {"dtype": problem.dtype})
        return sizes | {"x_ptr": x, "saved_ptr": saved, "ACTIVATION": activation_of(problem)}


FAMILY = TestGatedMlp.family


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
