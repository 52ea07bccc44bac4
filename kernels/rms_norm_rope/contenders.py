"""Contenders for norm and rotation: plain PyTorch, the same under `torch.compile`, and Liger's two kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from ...datasets import Case, DeviceSpec, Measurable, Problem
from ...runtime.timing.compare import BestConfigs, Goal, LaunchPath, Row
from ..comparisons import judge_predicted
from ..workloads import load_dense_models
from .family import Inputs, RmsNormRopeForward, rotated

if TYPE_CHECKING:
    import torch

    from .launches import Rotation

#: Models that normalize each head, and one that does not. The latter has no backward problem: its gradient runs the
#: forward kernel.
NORMED, UNNORMED = ("Qwen3-0.6B", "Qwen3-8B", "Qwen3-32B", "Gemma-3-12B"), ("Llama-3.1-8B",)
#: Tokens per call, by phase.
PHASES = {"decode": 64, "mid": 1024, "training": 16384}


class RmsNormRopeComparison:
    """Contenders and goals, forward and backward; see `runtime.timing.compare.Comparison`."""

    others = ("eager", "liger", "compile")

    def suite(self, family: Measurable) -> Mapping[str, Case]:
        """Return the attention layers of real models in decode, medium and training batches."""
        forward = family.name == RmsNormRopeForward.name
        models = {model.model: model for model in load_dense_models()}
        cases = {}
        for name in (*NORMED, *UNNORMED * forward):
            model, flags = models[name], ("unnormed",) * (name in UNNORMED)
            for phase, tokens in PHASES.items():
                problem = Problem.of(
                    family.name,
                    flags=flags,
                    tokens=tokens,
                    q_heads=model.num_heads,
                    kv_heads=model.num_kv_heads,
                    head_dim=model.head_dim,
                )
                cases[f"{name}/qk {phase}"] = Case(problem, (f"{name}/qk",))
        return cases

    def contenders(
        self, family: Measurable, problem: Problem, inputs: Inputs, device: DeviceSpec, best: BestConfigs
    ) -> dict[str, Callable[[], Any]]:
        """Return the contenders by name, each a function that runs the layer once.

        They work on their own contiguous copies of q and k, as separate projections return them. Backward, each runs
        the backward pass of one recorded forward pass. `liger` is present only if it is installed and has the rotation.
        """
        functions = {"eager": _plain, "compile": _compiled(), "liger": _liger(problem, inputs)}
        ways = {name: function for name, function in functions.items() if function is not None}
        if inputs.dq is None:
            return {name: _forward_of(function, inputs) for name, function in ways.items()}
        return {name: _backward_of(function, inputs) for name, function in ways.items()}

    def launch_path(self, device: DeviceSpec) -> LaunchPath:
        """Time a call of the op and a bare launch of its kernel on a small problem."""
        from .launches import launch_forward
        from .op import rms_norm_rope

        family = RmsNormRopeForward()
        problem = Problem.of(family.name, tokens=64, q_heads=32, kv_heads=8, head_dim=128)
        i, config = family.inputs(problem, device), family.default(problem, device)
        tables = i.rotation[:4]
        return LaunchPath.timed(
            "foretune.rms_norm_rope",
            lambda: rms_norm_rope(i.q, i.k, *tables, config=config),
            lambda: launch_forward(i.q, i.k, i.parts[0], i.parts[1], i.rotation, config),
        )

    def goals(self, rows: Sequence[Row]) -> list[Goal]:
        """Return the goals: faster than each contender that can run the problem."""
        return judge_predicted(rows, dict.fromkeys(("eager", "compile", "liger"), (1.0,)))


#: `kernels.comparisons.comparison_of` looks up this name.
COMPARISON = RmsNormRopeComparison()

if TYPE_CHECKING:
    #: A function of q, k and the rotation that returns the new q and k.
    Way = Callable[[torch.Tensor, torch.Tensor, Rotation], tuple[torch.Tensor, torch.Tensor]]


def _forward_of(way: Way, inputs: Inputs) -> Callable[[], Any]:
    """Return a function that runs a contender forward, without gradients."""
    import torch

    q, k = inputs.q.contiguous(), inputs.k.contiguous()

    def call() -> None:
        with torch.no_grad():
            way(q, k, inputs.rotation)

    return call


def _backward_of(way: Way, inputs: Inputs) -> Callable[[], Any]:
    """Return a function that runs the backward pass of a contender; its forward pass runs once, on the first call."""
    import torch

    rotation = inputs.rotation
    given = (inputs.q.contiguous(), inputs.k.contiguous(), rotation.q_weight, rotation.k_weight)
    leaves = [tensor.detach().clone().requires_grad_() for tensor in given if tensor is not None]
    assert inputs.dq is not None
    assert inputs.dk is not None
    seeds = [inputs.dq.clone(), inputs.dk.clone()]

    @cache
    def graph() -> tuple[torch.Tensor, torch.Tensor]:
        return way(leaves[0], leaves[1], rotation._replace(q_weight=leaves[2], k_weight=leaves[3]))

    def call() -> None:
        torch.autograd.grad(graph(), leaves, seeds, retain_graph=True)

    return call


def _plain(q: torch.Tensor, k: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the eager contender: `rotated`."""
    return rotated(q, k, rotation)


def _compiled() -> Way:
    """Return `_plain` compiled for one problem.

    Dynamo is reset first; otherwise it compiles one dynamic-shape function after it has seen several shapes.
    """
    import torch
    import torch._functorch.config as functorch

    torch._dynamo.reset()
    compiled: Way = torch.compile(_plain, dynamic=False)

    def way(q: torch.Tensor, k: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        with functorch.patch(donated_buffer=False):  # the backward pass of one graph runs repeatedly
            return compiled(q, k, rotation)

    return way


def _liger(problem: Problem, inputs: Inputs) -> Way | None:
    """Return Liger's RMSNorm of q and of k, followed by its in-place rotation of both.

    None if Liger is not installed, or for interleaved pairs, which it does not support.
    """
    import torch

    try:
        from liger_kernel.ops import LigerRMSNormFunction, LigerRopeFunction
    except ImportError:
        return None
    if "interleaved" in problem.flags:
        return None
    # The layout that Liger expects: (1, tokens, head_dim), repeated for both halves.
    cos, sin = (torch.cat([table, table], -1)[None] for table in inputs.rotation[:2])

    def way(q: torch.Tensor, k: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        if rotation.q_weight is not None:
            q = LigerRMSNormFunction.apply(q, rotation.q_weight, rotation.eps, 0.0, "llama", False)
            k = LigerRMSNormFunction.apply(k, rotation.k_weight, rotation.eps, 0.0, "llama", False)
        q, k = LigerRopeFunction.apply(q[None].transpose(1, 2), k[None].transpose(1, 2), cos, sin)
        return q.transpose(1, 2)[0], k.transpose(1, 2)[0]

    return way
