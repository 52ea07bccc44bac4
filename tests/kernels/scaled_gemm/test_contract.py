"""The scaled GEMMs keep to the contract."""

from __future__ import annotations

from types import SimpleNamespace

from foretune.kernels.scaled_gemm.space import FLAGS
from foretune.kernels.testing import FamilyContract


class ScaledGemmContract(FamilyContract):
    compiled = 1

    def problems(self):
        drawn = {case.problem.signature: case.problem for case in self.family.cases(random=10, per_layer=1)}
        return list(drawn.values())  # one of each kind of scales

    def small_problems(self):
        return []  # test_scaled_gemm_interpreted.py launches smaller ones than results are checked on

    def call(self, asked):
        flags = {flag.upper(): flag in asked.flags for flag in FLAGS}
        tensor = SimpleNamespace(dtype=asked.dtype)
        rows, groups = asked[self.family.rows], dict(asked.dims).get("groups", 1)
        sizes = {"rows": rows, "groups": groups, "N16": asked["n"] // 16, "K16": asked["k"] // 16}
        return {"x_ptr": tensor} | sizes | flags


class TestScaledGemm(ScaledGemmContract):
    family = "scaled_gemm"


class TestScaledGroupedGemmForward(ScaledGemmContract):
    family = "scaled_grouped_gemm_fwd"


class TestScaledGroupedGemmDW(ScaledGemmContract):
    family = "scaled_grouped_gemm_dw"

    def call(self, asked):
        flags = {flag.upper(): flag in asked.flags for flag in self.family.flags}
        sizes = {"rows": asked["rows"], "groups": asked["groups"], "N16": asked["n"] // 16, "K16": asked["k"] // 16}
        return {"x_ptr": SimpleNamespace(dtype=asked.dtype)} | sizes | flags
