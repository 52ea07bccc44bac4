"""RMSNorm and rotary embedding as `Measurable` families: inputs, launches, references and the workload. torch and
triton are imported when they are needed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...datasets import Case, DeviceSpec, ForetuneError, KernelConfig, Measurable, Problem, torch_dtype
from ..workloads import load_dense_models
from . import workload
from .family import RmsNormRopeFamily
from .space import block_constants

if TYPE_CHECKING:
    import torch

    from .launches import Rotation

#: The constant of the norm in all models so far, or near it.
EPS = 1e-6


@dataclass(frozen=True)
class Inputs:
    """The tensors of one call, on the device. All that a launch writes lies in `out`, one after another, poisoned with
    NaN: q's part, k's part, and of the backward pass the gradients of both weights."""

    q: torch.Tensor  # (tokens, q_heads, head_dim)
    k: torch.Tensor
    dq: torch.Tensor | None  # gradients of what the forward pass gives; None forward
    dk: torch.Tensor | None
    rotation: Rotation
    out: torch.Tensor
    parts: tuple[torch.Tensor, ...]
    problem: Problem


class RmsNormRope(RmsNormRopeFamily, Measurable):
    """What measuring needs, forward and backward."""

    def cases(
        self,
        *,
        models: Path | str | None = None,
        tokens: Sequence[int] | None = None,
        per_layer: int = 2,
        random: int = 40,
        max_tflop: float | None = None,
        seed: int = 0,
    ) -> tuple[Case, ...]:
        most = float(workload.MOST_ELEMENTS)
        if max_tflop is not None:
            if not max_tflop > 0:
                raise ForetuneError(f"max_tflop must be more than 0 but is {max_tflop}")
            most = min(most, max_tflop * 1e12 / (3.5 * self.moved))
        drawn = load_dense_models(models)
        return workload.draw(
            self.name, drawn, tokens=tokens, per_layer=per_layer, random=random, most_elements=most, seed=seed
        )

    def inputs(self, problem: Problem, device: DeviceSpec, *, seed: int = 0) -> Inputs:
        import torch

        where = "cpu" if device.backend == "cpu" else "cuda"
        generator = torch.Generator(where).manual_seed(seed)
        return self._made(problem, where, generator)

    def _made(self, problem: Problem, where: str, generator: Any) -> Inputs:
        import torch

        from .launches import Rotation

        dtype = torch_dtype(problem.dtype_name)
        tokens, q_heads, kv_heads, head_dim = (problem[dim] for dim in self.dims)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=where, dtype=dtype)

        shapes = [(tokens, q_heads, head_dim), (tokens, kv_heads, head_dim), *[(head_dim,)] * 2 * self._has_gradients]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        out = torch.full((sum(sizes),), float("nan"), device=where, dtype=dtype)
        parts = tuple(part.view(shape) for part, shape in zip(torch.split(out, sizes), shapes, strict=True))
        # As in models: q and k side by side in one projection.
        q, k = torch.split(random(tokens, q_heads + kv_heads, head_dim), [q_heads, kv_heads], 1)
        dq, dk = (random(*shapes[0]), random(*shapes[1])) if self._has_gradients else (None, None)
        angles = torch.arange(tokens, device=where)[:, None] * 1e4 ** -torch.linspace(0, 1, head_dim // 2, device=where)
        weights = None if "unnormed" in problem.flags else (1 + random(head_dim) / 8, 1 + random(head_dim) / 8)
        rotation = Rotation(
            cos=angles.cos().to(dtype),
            sin=angles.sin().to(dtype),
            q_weight=weights and weights[0],
            k_weight=weights and weights[1],
            eps=EPS,
            weight_offset=0.0,
            interleaved="interleaved" in problem.flags,
        )
        return Inputs(q, k, dq, dk, rotation, out, parts, problem)

    @property
    def _has_gradients(self) -> bool:
        return "STEPS" in self.knobs

    def tolerance(self, problem: Problem) -> float:
        # Rounded once from float32: a relative error of about 2^-9 (bf16) or 2^-12 (fp16) at most, less on average.
        return {"bf16": 4e-3, "fp16": 5e-4, "fp32": 1e-5}[problem.dtype_name]

    def check_problem(self, config: KernelConfig, problem: Problem) -> Problem:
        # Off every block: 37 tokens, 5 and 3 heads.
        dims = {"tokens": 37, "q_heads": 5, "kv_heads": 3, "head_dim": problem["head_dim"]}
        return replace(problem, dims=tuple(dims.items()))

    def binary_key(self, config: KernelConfig, problem: Problem) -> Hashable:
        # No runtime number is specialised, STEPS among them.
        knobs = {knob: value for knob, value in config.to_json().items() if knob != "STEPS"}
        return tuple(knobs.items()), problem.kind, problem["head_dim"]

    @abstractmethod
    def kernel(self) -> Any:
        """The kernel."""

    def source_hash(self) -> str:
        from ...runtime.launching.source_hash import hash_of_modules
        from . import triton_kernels

        return hash_of_modules(triton_kernels)

    def compile(self, config: KernelConfig, problem: Problem) -> Any:
        knobs = config.to_json() | block_constants(problem["head_dim"])
        return self.kernel().warmup(*self.arguments(problem), grid=(1,), **self.constants(problem), **knobs)

    @abstractmethod
    def arguments(self, problem: Problem) -> tuple[Any, ...]:
        """The kernel's positional arguments for a compile: dtypes for tensors, and numbers."""

    def constants(self, problem: Problem) -> dict[str, bool]:
        """The kernel's constants beside the knobs and the head's size."""
        return {"INTERLEAVED": "interleaved" in problem.flags}


class RmsNormRopeForward(RmsNormRope):
    """q and k normed by head (unless "unnormed") and rotated, in one launch.

    >>> from foretune.datasets import DeviceSpec
    >>> family, h200 = RmsNormRopeForward(), DeviceSpec.named("h200")
    >>> problem = Problem.of(family.name, tokens=4096, q_heads=32, kv_heads=8, head_dim=128)
    >>> family.supports(family.default(problem, h200), problem, h200) is None
    True
    """

    name = "rms_norm_rope_fwd"
    flags = ("interleaved", "unnormed")
    dtype_argument = "q_ptr"
    moved = 2

    def default(self, problem: Problem, device: DeviceSpec) -> KernelConfig:
        # Eight heads of 128 elements are 8 elements a thread; larger heads are fewer.
        heads = max(8 * 128 // (2 * block_constants(problem["head_dim"])["BLOCK"]), 1)
        return KernelConfig.of(ROWS=1, HEADS=min(heads, 32), num_warps=4, num_stages=3)

    def launch(self, inputs: Inputs, config: KernelConfig) -> torch.Tensor:
        from .launches import launch_forward

        launch_forward(inputs.q, inputs.k, inputs.parts[0], inputs.parts[1], inputs.rotation, config)
        return inputs.out

    def reference(self, inputs: Inputs) -> torch.Tensor:
        import torch

        from .plain import rotated

        both = rotated(inputs.q.float(), inputs.k.float(), inputs.rotation)
        return torch.cat([part.flatten() for part in both])

    def kernel(self) -> Any:
        from .triton_kernels import rms_norm_rope_kernel

        return rms_norm_rope_kernel

    def arguments(self, problem: Problem) -> tuple[Any, ...]:
        element = torch_dtype(problem.dtype_name)
        weight = None if "unnormed" in problem.flags else element
        return *[element] * 6, weight, weight, 37, 8, 8, 1024, 1024, 37, 8, EPS, 0.0

    def constants(self, problem: Problem) -> dict[str, bool]:
        return super().constants(problem) | {"INVERSE": False}


class RmsNormRopeBackward(RmsNormRope):
    """The gradients of q, k and both weights, from those of what `RmsNormRopeForward` gives.

    >>> from foretune.datasets import DeviceSpec
    >>> family, h200 = RmsNormRopeBackward(), DeviceSpec.named("h200")
    >>> len(family.space(h200)) > 100
    True
    """

    name = "rms_norm_rope_bwd"
    dtype_argument = "q_ptr"
    moved = 3

    def default(self, problem: Problem, device: DeviceSpec) -> KernelConfig:
        heads = max(4 * 128 // (2 * block_constants(problem["head_dim"])["BLOCK"]), 1)
        return KernelConfig.of(ROWS=1, HEADS=min(heads, 16), STEPS=4, num_warps=4, num_stages=1)

    def launch(self, inputs: Inputs, config: KernelConfig) -> torch.Tensor:
        from .launches import launch_backward

        i = inputs
        assert i.dq is not None
        assert i.dk is not None
        launch_backward(i.dq, i.dk, i.q, i.k, i.parts, i.rotation, config)
        return i.out

    def reference(self, inputs: Inputs) -> torch.Tensor:
        import torch

        from .plain import rotated

        rotation = inputs.rotation
        assert rotation.q_weight is not None
        assert rotation.k_weight is not None
        given = (inputs.q, inputs.k, rotation.q_weight, rotation.k_weight)
        leaves = [tensor.detach().float().requires_grad_() for tensor in given]
        with torch.enable_grad():
            both = rotated(leaves[0], leaves[1], rotation._replace(q_weight=leaves[2], k_weight=leaves[3]))
            grads = torch.autograd.grad(both, leaves, [inputs.dq.float(), inputs.dk.float()])  # type: ignore[union-attr]
        return torch.cat([grad.flatten() for grad in grads])

    def kernel(self) -> Any:
        from .triton_kernels import rms_norm_rope_backward_kernel

        return rms_norm_rope_backward_kernel

    def arguments(self, problem: Problem) -> tuple[Any, ...]:
        import torch

        element = torch_dtype(problem.dtype_name)
        tensors = (*[element] * 6, torch.float32, *[element] * 4)
        return *tensors, 37, 8, 8, 1024, 1024, 1024, 1024, 37, 8, EPS, 0.0
