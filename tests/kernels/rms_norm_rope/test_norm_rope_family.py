"""Both families of RMSNorm with rotary embedding keep to the contract, and their kernels are right on every path."""

from __future__ import annotations

from dataclasses import replace

import pytest
from foretune.datasets import DeviceSpec, ForetuneError, KernelConfig, Problem
from foretune.kernels.rms_norm_rope import RmsNormRopeBackward, RmsNormRopeForward
from foretune.kernels.testing import FamilyContract

CPU = replace(DeviceSpec.named("h200"), backend="cpu", sm_count=4)


class NormRopeContract(FamilyContract):
    compiled = 1
    launched = 2  # each takes seconds in the interpreter

    def problems(self):
        odd = {"tokens": 100, "q_heads": 6, "kv_heads": 3, "head_dim": 80}
        usual = {"tokens": 4096, "q_heads": 32, "kv_heads": 8, "head_dim": 128}
        name, flags = self.family.name, self.family.flags
        return [Problem.of(name, **usual), Problem.of(name, dtype="fp16", flags=flags, **odd)]

    def call(self, problem):
        names = {"tokens": "tokens", "q_heads": "q_heads", "kv_heads": "k_heads", "head_dim": "HEAD_DIM"}
        sizes = {argument: problem[dim] for dim, argument in names.items()}
        weight = None if "unnormed" in problem.flags else object()
        return sizes | {
            "q_ptr": type("Tensor", (), {"dtype": problem.dtype}),
            "q_weight_ptr": weight,
            "INTERLEAVED": "interleaved" in problem.flags,
        }


class TestForward(NormRopeContract):
    family = RmsNormRopeForward


class TestBackward(NormRopeContract):
    family = RmsNormRopeBackward


FORWARD, BACKWARD = TestForward.family, TestBackward.family
WAYS = [(family, flags) for family in (FORWARD, BACKWARD) for flags in ((), ("interleaved",))]


@pytest.mark.parametrize("family", [FORWARD, BACKWARD], ids=lambda family: family.name)
def test_the_workload_has_the_heads_of_models_on_every_rank(family):
    cases = family.cases()
    heads = {
        (case.problem["q_heads"], case.problem["kv_heads"])
        for case in cases
        if "Qwen3-8B/qk" in case.sources and case.problem["head_dim"] == 128
    }
    assert heads == {(32, 8), (16, 4), (8, 2), (4, 1)}
    assert not any("unnormed" in case.problem.flags for case in cases if "Qwen3-8B/qk" in case.sources)
    assert {case.problem["tokens"] for case in family.cases(tokens=[7], random=2)} == {7}
    with pytest.raises(ForetuneError, match="token counts"):
        family.cases(tokens=[0])


def error(family, inputs, config):
    expected, out = family.reference(inputs), family.launch(inputs, config).float()
    return float((out - expected).norm() / expected.norm())


@pytest.mark.interpret
@pytest.mark.parametrize(("family", "flags"), [*WAYS, (FORWARD, ("unnormed",))])
@pytest.mark.parametrize("head_dim", [16, 48])
def test_a_tile_off_every_block_is_right(family, flags, head_dim):
    knobs = {"ROWS": 4, "HEADS": 2, "num_warps": 1} | ({"STEPS": 4} if family is BACKWARD else {})
    problem = Problem.of(family.name, dtype="fp32", flags=flags, tokens=18, q_heads=3, kv_heads=1, head_dim=head_dim)
    assert error(family, family.inputs(problem, CPU), KernelConfig.of(**knobs)) < 1e-6


@pytest.mark.parametrize("family", [FORWARD, BACKWARD], ids=lambda family: family.name)
def test_the_default_takes_any_head(family):
    for head_dim in range(16, 513, 16):
        problem = Problem.of(family.name, tokens=8, q_heads=4, kv_heads=1, head_dim=head_dim)
        assert family.supports(family.default(problem, CPU), problem, CPU) is None


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"head_dim": 72}, "head_dim must be a multiple of 16 between 16 and 512 but is 72"),
        ({"kv_heads": 0}, "q_heads and kv_heads must be >= 1 but are 4 and 0"),
    ],
)
def test_heads_that_cannot_be_are_refused(changed, reason):
    problem = Problem.of(FORWARD.name, **{"tokens": 8, "q_heads": 4, "kv_heads": 1, "head_dim": 64} | changed)
    assert FORWARD.supports(FORWARD.space()[0], problem, CPU) == reason
