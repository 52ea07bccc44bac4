"""The contenders that the gated MLP is compared with.

They are plain PyTorch, the same under `torch.compile`, two products with Liger's fused activation, and cuBLAS's product
without the activation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...datasets import Case, DeviceSpec, Measurable, Problem
from ...runtime.timing.compare import BestConfigs, Goal, LaunchPath, Row
from ..registry import judge_predicted
from ..workloads import load_dense_models
from .family import GatedMlp, Inputs, activated, activation_of
from .space import flags_of

if TYPE_CHECKING:
    import torch

#: The layers of the comparison: model, and tensor-parallel degree.
LAYERS = (("Qwen3-1.7B", 1), ("Llama-3.1-8B", 1), ("Qwen3-32B", 4), ("Gemma-3-12B", 1), ("Qwen2.5-72B", 8))
#: The number of rows (tokens) of one call, by phase.
PHASES = {"decode": 16, "mid": 512, "training": 8192}


class GatedMlpComparison:
    """The comparison of the gated MLP with other implementations: problems, contenders and goals.

    It implements `runtime.timing.compare.Comparison`; `compare_kernels` times the contenders.
    """

    others = ("cublas", "eager", "liger", "compile")

    def suite(self, family: Measurable) -> Mapping[str, Case]:
        """Return the cases to compare, by name: each layer of `LAYERS` with the number of rows of each of `PHASES`."""
        models = {model.model: model for model in load_dense_models()}
        cases = {}
        for name, degree in LAYERS:
            n, k = models[name].intermediate_size // degree, models[name].hidden_size
            activation = "gelu_tanh" if name.startswith("Gemma") else "silu"
            for phase, rows in PHASES.items():
                problem = Problem.of(family.name, flags=flags_of(activation, saves=False), m=rows, n=n, k=k)
                cases[f"{name}/gate_up {phase}"] = Case(problem, (f"{name}/gate_up",))
        return cases

    def contenders(
        self, family: Measurable, problem: Problem, inputs: Inputs, device: DeviceSpec, best: BestConfigs
    ) -> dict[str, Callable[[], Any]]:
        """Return the contenders by name, each a function that runs the problem once.

        "cublas" is the product alone, without the activation. "liger" is missing if liger-kernel is not installed, or
        lacks the problem's activation.
        """
        import torch

        x, w, activation = inputs.x, inputs.w, activation_of(problem)
        # Without this, Dynamo would stop compiling `gated` for exact sizes after some number of shapes.
        torch._dynamo.reset()
        compiled = torch.compile(gated, dynamic=False)
        functions: dict[str, Callable[[], Any]] = {
            "eager": lambda: gated(x, w, activation),
            "compile": lambda: compiled(x, w, activation),
            "cublas": lambda: torch.mm(x, w.t()),
        }
        if (liger := _liger(activation)) is not None:
            gate, up = w.chunk(2)
            functions["liger"] = lambda: liger(torch.mm(x, gate.t()), torch.mm(x, up.t()))
        return functions

    def launch_path(self, device: DeviceSpec) -> LaunchPath:
        """Measure the host time of a call of `foretune.gated_mlp` and of a bare launch of its kernel."""
        from .op import gated_mlp

        family = GatedMlp()
        problem = Problem.of(family.name, m=64, n=256, k=256)
        i, config = family.inputs(problem, device), family.default(problem, device)
        return LaunchPath.timed(
            "foretune.gated_mlp",
            lambda: gated_mlp(i.x, i.w, config=config),
            lambda: family.launch(i, config),
        )

    def goals(self, rows: Sequence[Row]) -> list[Goal]:
        """Return the goals, judged by `rows`: to beat the other implementations, and reach 0.9 of cuBLAS's speed."""
        return judge_predicted(rows, {"eager": (1.0,), "compile": (1.0,), "liger": (1.0,), "cublas": (0.9,)})


#: The object that `kernels.registry.comparison_of` looks up by this name.
COMPARISON = GatedMlpComparison()


def gated(x: torch.Tensor, w: torch.Tensor, activation: str) -> torch.Tensor:
    """Return act(x @ gate.T) * (x @ up.T), (M, N), with plain PyTorch; x is (M, K), w (2 N, K), gate's rows first."""
    gate, up = (x @ w.t()).chunk(2, -1)
    return activated(gate, activation) * up


def _liger(activation: str) -> Callable[..., Any] | None:
    """Return Liger's function of (gate, up) that computes act(gate) * up, or None if there is none."""
    try:
        from liger_kernel.ops import LigerGELUMulFunction, LigerSiLUMulFunction
    except ImportError:
        return None
    functions: dict[str, Callable[..., Any]] = {
        "silu": LigerSiLUMulFunction.apply,
        "gelu_tanh": LigerGELUMulFunction.apply,
    }
    return functions.get(activation)
