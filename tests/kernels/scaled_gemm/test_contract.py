"""The scaled GEMMs keep to the contract."""

from __future__ import annotations

from types import SimpleNamespace

from foretune.datasets import Problem
from foretune.kernels.scaled_gemm.kinds import FLAGS
from foretune.kernels.testing import FamilyContract


class ScaledGemmContract(FamilyContract):
    compiled = 2

    def problems(self):
        drawn = {case.problem.kind: case.problem for case in self.family.cases(random=10, per_layer=1)}
        return list(drawn.values())  # one of each kind of scales

    def small_problem(self):
        # What is launched in its place is the same for all problems.
        problem = self.problems()[0]
        return Problem.of(self.family.name, dtype=problem.dtype, flags=("blockwise",), **dict(problem.dims))

    def call(self, problem):
        flags = {flag.upper(): flag in problem.flags for flag in FLAGS}
        tensor = SimpleNamespace(dtype=problem.dtype)
        rows, groups = problem[self.family.rows], dict(problem.dims).get("groups", 1)
        sizes = {"rows": rows, "groups": groups, "N16": problem["n"] // 16, "K16": problem["k"] // 16}
        return {"x_ptr": tensor} | sizes | flags


class TestScaledGemm(ScaledGemmContract):
    family = "scaled_gemm"


class TestScaledGroupedGemmForward(ScaledGemmContract):
    family = "scaled_grouped_gemm_fwd"
