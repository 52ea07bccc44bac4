"""The dense GEMM keeps to the contract of families."""

from __future__ import annotations

from types import SimpleNamespace

from foretune.kernels.matmul.space import activation_of
from foretune.kernels.testing import FamilyContract
from products import problem


class TestMatmul(FamilyContract):
    family = "matmul"
    compiled = 2
    launched = 2  # each takes seconds in the interpreter

    def problems(self):
        return [
            problem("bf16", ("bias", "gelu"), m=1, n=4096, k=1024),
            problem("fp16", ("a_km", "b_kn"), batch=1, m=8192, n=2048, k=5000),
            problem("fp32", ("b_kn",), m=300, n=1003, k=100),  # not aligned
            problem("int8", batch=1, m=16384, n=4096, k=4096),
        ]

    def mutations(self):
        """Each knob, of one problem: a compile takes a second, and `-m slow` compiles every layout and dtype."""
        last = self.problems()[-1]
        return (one for one in super().mutations() if one[1] == last)

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
