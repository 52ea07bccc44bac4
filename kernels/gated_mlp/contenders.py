"""Contenders for the gated MLP.

They are plain PyTorch, the same under `torch.compile`, two cuBLAS products with Liger's fused activation, and cuBLAS's
product alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...datasets import Case, DeviceSpec, Measurable, Problem
from ...runtime.timing.compare import BestConfigs, Goal, LaunchPath, Row
from ..comparisons import judge_predicted
from ..workloads import load_dense_models
from .family import GatedMlp, Inputs, activated, activation_of
from .space import flags_of

if TYPE_CHECKING:
    import torch

#: Layers: model and tensor-parallel degree.
LAYERS = (("Qwen3-1.7B", 1), ("Llama-3.1-8B", 1), ("Qwen3-32B", 4), ("Gemma-3-12B", 1), ("Qwen2.5-72B", 8))
#: Rows per call, by phase.
PHASES = {"decode": 16, "mid": 512, "training": 8192}


class GatedMlpComparison:
    """Contenders and goals of the gated MLP; see `runtime.timing.compare.Comparison`."""

    others = ("cublas", "eager", "liger", "compile")

    def suite(self, family: Measurable) -> Mapping[str, Case]:
        """Return the gate-up layers of five models in decode, medium and training batches."""
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
        """Return the contenders by name, each a function that runs the layer once.

        `cublas` is the product alone, without the activation. `liger` is present only if it is installed and has the
        activation.
        """
        import torch

        x, w, activation = inputs.x, inputs.w, activation_of(problem)
        torch._dynamo.reset()  # without it, Dynamo compiles one dynamic-shape function after it has seen several shapes
        compiled = torch.compile(gated, dynamic=False)
        ways: dict[str, Callable[[], Any]] = {
            "eager": lambda: gated(x, w, activation),
            "compile": lambda: compiled(x, w, activation),
            "cublas": lambda: torch.mm(x, w.t()),
        }
        if (liger := _liger(activation)) is not None:
            gate, up = w.chunk(2)
            ways["liger"] = lambda: liger(torch.mm(x, gate.t()), torch.mm(x, up.t()))
        return ways

    def launch_path(self, device: DeviceSpec) -> LaunchPath:
        """Time a call of the op and a bare launch of its kernel on a small problem."""
        from .launches import launch_gated
        from .op import gated_mlp

        family = GatedMlp()
        problem = Problem.of(family.name, m=64, n=256, k=256)
        i, config = family.inputs(problem, device), family.default(problem, device)
        return LaunchPath.timed(
            "foretune.gated_mlp",
            lambda: gated_mlp(i.x, i.w, config=config),
            lambda: launch_gated(i.x, i.w, i.h, None, config, device.sm_count, "silu"),
        )

    def goals(self, rows: Sequence[Row]) -> list[Goal]:
        """Return the goals: faster than each contender, and at least 0.9 times the speed of the product alone."""
        return judge_predicted(rows, {"eager": (1.0,), "compile": (1.0,), "liger": (1.0,), "cublas": (0.9,)})


#: `kernels.comparisons.comparison_of` looks up this name.
COMPARISON = GatedMlpComparison()


def gated(x: torch.Tensor, w: torch.Tensor, activation: str) -> torch.Tensor:
    """Compute act(x @ gate.T) * (x @ up.T) with plain PyTorch.

    Args:
        x: (M, K).
        w: (2 N, K), the rows of gate first.
        activation: "silu", "gelu" or "gelu_tanh".

    Returns:
        The output, (M, N).
    """
    gate, up = (x @ w.t()).chunk(2, -1)
    return activated(gate, activation) * up


def _liger(activation: str) -> Callable[..., Any] | None:
    """Return Liger's function for act(gate) * up; None if Liger is not installed or lacks the activation."""
    try:
        from liger_kernel.ops import LigerGELUMulFunction, LigerSiLUMulFunction
    except ImportError:
        return None
    ways: dict[str, Callable[..., Any]] = {"silu": LigerSiLUMulFunction.apply, "gelu_tanh": LigerGELUMulFunction.apply}
    return ways.get(activation)
