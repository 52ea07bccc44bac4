"""The products as a `Measurable` family: what runs is the kernel that Inductor generates for one config. torch and
triton are imported when they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...datasets import Case, DeviceSpec, KernelConfig, Measurable, Problem
from .matmul import TF32, InductorMMFamily

if TYPE_CHECKING:
    import torch

#: Products of TF32 that the tensor cores add up at once (PTX ISA, mma and wgmma: k8).
_TF32_STEP = 8


@dataclass(frozen=True)
class Inputs:
    """The tensors of one call, on the device."""

    operands: dict[str, torch.Tensor]  # in the op's order
    y: torch.Tensor  # poisoned with NaN
    problem: Problem


class InductorMM(InductorMMFamily, Measurable):
    """Inductor's mm, addmm, bmm, baddbmm and scaled_mm, as `foretune collect inductor:mm` measures them.

    >>> from foretune.kernels import find_family
    >>> family, h200 = find_family("inductor:mm"), DeviceSpec.named("h200")
    >>> problem = Problem.of("inductor_mm", batch=1, m=4096, n=4096, k=4096)
    >>> sum(family.supports(config, problem, h200) is None for config in family.space(h200))
    2105
    """

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
        from ..dense_llms import load_dense_models
        from .workload import draw

        return draw(
            load_dense_models(models),
            tokens=tokens,
            per_layer=per_layer,
            random=random,
            most_tflop=max_tflop,
            seed=seed,
        )

    def default(self, problem: Problem, device: DeviceSpec) -> KernelConfig:
        # The config that Inductor has listed first since it has lists, where that is not too large for the problem.
        for m, n, k in (
            (64, 64, 32),
            (64, 32, 32),
            (32, 64, 32),
            (32, 32, 32),
            (16, 32, 32),
            (32, 16, 32),
            (16, 16, 32),
        ):
            config = KernelConfig.of(
                BLOCK_M=m,
                BLOCK_N=n,
                BLOCK_K=k,
                GROUP_M=8,
                PERSISTENT_TMA=0,
                num_warps=min(4, m * n // 256),
                num_stages=2,
            )
            if self.supports(config, problem, device) is None:
                return config
        return super().default(problem, device)

    def inputs(self, problem: Problem, device: DeviceSpec, *, seed: int = 0) -> Inputs:
        import torch

        from .generated import operands_of

        where = "cpu" if device.backend == "cpu" else "cuda"
        generator = torch.Generator(where).manual_seed(seed)
        made = {}
        for name, (shape, strides, dtype) in operands_of(problem).items():
            if name == "y":
                continue
            drawn = torch.randn(*shape, generator=generator, device=where)
            if name.startswith("scale"):
                drawn = drawn.abs() + 0.5
            tensor = torch.empty_strided(shape, strides, dtype=dtype, device=where)
            if 0 in strides:  # a bias: one row for all
                row = drawn[(0,) * (drawn.ndim - 1)].to(dtype)
                tensor = row.expand(shape)
            else:
                tensor.copy_(drawn)
            made[name] = tensor
        shape, _, dtype = operands_of(problem)["y"]
        return Inputs(made, torch.full(shape, float("nan"), dtype=dtype, device=where), problem)

    def launch(self, inputs: Inputs, config: KernelConfig) -> torch.Tensor:
        from ...runtime.launching.launcher import ensure_allocator
        from .generated import generate

        if config["PERSISTENT_TMA"]:
            ensure_allocator()
        made = generate(inputs.problem, config)
        made.kernel.launch(made.grid, made.arguments(tuple(inputs.operands.values()), inputs.y))
        return inputs.y

    def reference(self, inputs: Inputs) -> torch.Tensor:
        given = {name: tensor.float() for name, tensor in inputs.operands.items()}
        y: torch.Tensor = given["a"] @ given["b"]
        if "scale_a" in given:
            y = y * given["scale_a"] * given["scale_b"]
        return y + given["bias"] if "bias" in given else y

    def tolerance(self, problem: Problem) -> float:
        # Rounding the float32 sum once: a relative error of about 2^-9 (bf16) or 2^-12 (fp16) at most, less on average.
        # float32 differs by the order of the sum; operands in TF32 are rounded to 2^-11 each, or cut off, which is
        # twice as far. The tensor cores also cut their sum off, by half a bit of 24 a step on average: after 151,936
        # products an H200 was off by 1.1e-3 (torch 2.11). Of float8 they keep about 14 bits of partial sums.
        cut_off = problem["k"] / _TF32_STEP * 2.0**-25
        known = {"bf16": 4e-3, "fp16": 5e-4, "fp32": 1e-5, TF32: 1e-3 + cut_off, "fp8e4m3": 8e-3}
        return known[self.multiplied_as(problem)]

    def compile(self, config: KernelConfig, problem: Problem) -> Any:
        import torch

        from .generated import generate, operands_of

        made = generate(problem, config)
        *operands, y = (
            torch.empty_strided(shape, strides, dtype=dtype, device="meta")
            for shape, strides, dtype in operands_of(problem).values()
        )
        return made.kernel.compile(made.grid, made.arguments(operands, y))

    def source_hash(self) -> str:
        """Of Inductor's templates, which another torch may have changed."""
        from torch._inductor.kernel import bmm, mm

        from ...runtime.launching.source_hash import digest_of

        templates = (
            mm.mm_template,
            mm.persistent_tma_mm_template,
            mm.scaled_mm_device_tma_epilogue_scaling_template,
            bmm.bmm_template,
        )
        return digest_of(str(template.src_hash) for template in templates)
