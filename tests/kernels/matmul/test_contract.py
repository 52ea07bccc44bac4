"""The dense GEMM keeps to the contract of families."""

from __future__ import annotations

from types import SimpleNamespace

from foretune.kernels.matmul.layouts import activation_of
from foretune.kernels.testing import FamilyContract


class TestMatmul(FamilyContract):
    family = "matmul"

    def problems(self):
        drawn = {(case.problem.kind, case.problem["batch"] > 1): case.problem for case in self.family.cases(random=30)}
        some = {problem.dtype: problem for problem in drawn.values()}
        return list({*some.values(), *list(drawn.values())[:6]})

    def call(self, problem):
        flags = problem.flags
        return {
            "a_ptr": SimpleNamespace(dtype=problem.dtype),
            "bias_ptr": SimpleNamespace() if "bias" in flags else None,
            "A_KM": "a_km" in flags,
            "B_KN": "b_kn" in flags,
            "ACTIVATION": activation_of(problem),
            **{dim if dim == "batch" else dim.upper(): problem[dim] for dim in self.family.dims},
        }
