"""The comparison of norm and rotation with plain PyTorch, `torch.compile`, and Liger's two kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from ...datasets import Case, DeviceSpec, Measurable, Problem
from ...runtime.timing.compare import BestConfigs, Goal, LaunchPath, Row
from ..registry import judge_predicted
from ..workloads import load_dense_models
from .family import Inputs, RmsNormRopeForward, rotated

if TYPE_CHECKING:
    import torch

    from .launches import Rotation

#: Models with a norm of each head, and one without, whose gradient needs no kernel of its own.
NORMED, UNNORMED = ("Qwen3-0.6B", "Qwen3-8B", "Qwen3-32B", "Gemma-3-12B"), ("Llama-3.1-8B",)
#: Tokens of one call, by phase.
PHASES = {"decode": 64, "mid": 1024, "training": 16384}


class RmsNormRopeComparison:
    """The comparison of both families with other implementations: problems, contenders and goals.

    It implements `runtime.timing.compare.Comparison`; `compare_kernels` times the contenders.
    """

    others = ("eager", "liger", "compile")

    def suite(self, family: Measurable) -> Mapping[str, Case]:
        """Return the problems of the comparison, by name."""
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
        """Return functions by contender that each compute the problem once.

        Each has tensors of its own, with q and k contiguous, as from separate projections. For the backward family,
        each repeats the backward pass of one forward pass. "liger" is included if it is installed and supports the
        layout.
        """
        functions = {"eager": _plain, "compile": _compiled(), "liger": _liger(problem, inputs)}
        ways = {name: function for name, function in functions.items() if function is not None}
        if inputs.dq is None:
            return {name: _forward_of(function, inputs) for name, function in ways.items()}
        return {name: _backward_of(function, inputs) for name, function in ways.items()}

    def launch_path(self, device: DeviceSpec) -> LaunchPath:
        """Measure the host time of a call of the op and of a bare launch of its kernel."""
        from .op import rms_norm_rope

        family = RmsNormRopeForward()
        problem = Problem.of(family.name, tokens=64, q_heads=32, kv_heads=8, head_dim=128)
        i, config = family.inputs(problem, device), family.default(problem, device)
        tables = i.rotation[:4]
        return LaunchPath.timed(
            "foretune.rms_norm_rope",
            lambda: rms_norm_rope(i.q, i.k, *tables, config=config),
            lambda: family.launch(i, config),
        )

    def goals(self, rows: Sequence[Row]) -> list[Goal]:
        """Return the goals, judged by measured `rows`: to be faster than every contender."""
        return judge_predicted(rows, dict.fromkeys(("eager", "compile", "liger"), (1.0,)))


#: Found by `kernels.registry.comparison_of`.
COMPARISON = RmsNormRopeComparison()

if TYPE_CHECKING:
    #: A function of q, k and the rotation that returns q and k.
    Implementation = Callable[[torch.Tensor, torch.Tensor, Rotation], tuple[torch.Tensor, torch.Tensor]]


def _forward_of(implementation: Implementation, inputs: Inputs) -> Callable[[], Any]:
    """Return a function that runs the forward pass of a contender's `implementation` once."""
    import torch

    q, k = inputs.q.contiguous(), inputs.k.contiguous()

    def call() -> None:
        with torch.no_grad():
            implementation(q, k, inputs.rotation)

    return call


def _backward_of(implementation: Implementation, inputs: Inputs) -> Callable[[], Any]:
    """Return a function that runs the backward pass of a contender's `implementation` once.

    The forward pass runs only in the first call.
    """
    import torch

    rotation = inputs.rotation
    given = (inputs.q.contiguous(), inputs.k.contiguous(), rotation.q_weight, rotation.k_weight)
    leaves = [tensor.detach().clone().requires_grad_() for tensor in given if tensor is not None]
    assert inputs.dq is not None
    assert inputs.dk is not None
    seeds = [inputs.dq.clone(), inputs.dk.clone()]

    @cache
    def graph() -> tuple[torch.Tensor, torch.Tensor]:
        return implementation(leaves[0], leaves[1], rotation._replace(q_weight=leaves[2], k_weight=leaves[3]))

    def call() -> None:
        torch.autograd.grad(graph(), leaves, seeds, retain_graph=True)

    return call


def _plain(q: torch.Tensor, k: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q and k, normalized and rotated with plain PyTorch."""
    return rotated(q, k, rotation)


def _compiled() -> Implementation:
    """Return `_plain` under `torch.compile`, which compiles it again for each problem.

    After many shapes, Dynamo would otherwise use one dynamic compilation for all of them.
    """
    import torch
    import torch._functorch.config as functorch

    torch._dynamo.reset()
    compiled: Implementation = torch.compile(_plain, dynamic=False)

    def implementation(q: torch.Tensor, k: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        with functorch.patch(donated_buffer=False):  # the graph is differentiated more than once
            return compiled(q, k, rotation)

    return implementation


def _liger(problem: Problem, inputs: Inputs) -> Implementation | None:
    """Return a function that applies Liger's RMSNorm to q and to k, and then its in-place rotation to both.

    None if Liger is not installed, or for interleaved pairs, which it does not support.
    """
    import torch

    try:
        from liger_kernel.ops import LigerRMSNormFunction, LigerRopeFunction
    except ImportError:
        return None
    if "interleaved" in problem.flags:
        return None
    # As its users pass them: repeated for both halves, with a batch of one.
    cos, sin = (torch.cat([table, table], -1)[None] for table in inputs.rotation[:2])

    def implementation(q: torch.Tensor, k: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        if rotation.q_weight is not None:
            q = LigerRMSNormFunction.apply(q, rotation.q_weight, rotation.eps, 0.0, "llama", False)
            k = LigerRMSNormFunction.apply(k, rotation.k_weight, rotation.eps, 0.0, "llama", False)
        q, k = LigerRopeFunction.apply(q[None].transpose(1, 2), k[None].transpose(1, 2), cos, sin)
        return q.transpose(1, 2)[0], k.transpose(1, 2)[0]

    return implementation
