"""The gated MLP as a `Measurable` family: inputs, launches, the reference and the workload. torch and triton are
imported when they are needed."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...datasets import Case, DeviceSpec, KernelConfig, Measurable, Problem, torch_dtype
from ..config_limits import TMA_ARCHS
from ..workloads import load_dense_models
from . import workload
from .family import GatedMlpFamily, activation_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Inputs:
    """The tensors of one call, on the device."""

    x: torch.Tensor  # (m, k)
    w: torch.Tensor  # (2 n, k)
    out: torch.Tensor  # (m, n), or with "saves" (3, m, n) flat: h, then the rows of gate and up; poisoned with NaN
    problem: Problem
    device: DeviceSpec

    @property
    def h(self) -> torch.Tensor:
        """The output proper, (m, n)."""
        m, n = self.problem["m"], self.problem["n"]
        return self.out[: m * n].view(m, n)

    @property
    def saved(self) -> torch.Tensor | None:
        """Gate and up, (m, 2 n), where they are saved."""
        m, n = self.problem["m"], self.problem["n"]
        return self.out[m * n :].view(m, 2 * n) if "saves" in self.problem.flags else None


class GatedMlp(GatedMlpFamily, Measurable):
    """h = act(x @ gate.T) * (x @ up.T), with x (m, k) and w (2 n, k), gate's rows first.

    >>> from foretune.datasets import DeviceSpec
    >>> family, h200 = GatedMlp(), DeviceSpec.named("h200")
    >>> problem = Problem.of("gated_mlp", m=4096, n=14336, k=4096)
    >>> family.supports(family.default(problem, h200), problem, h200) is None
    True
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
        most_tflop = workload.MOST_TFLOP if max_tflop is None else max_tflop
        drawn = load_dense_models(models)
        return workload.draw(drawn, tokens=tokens, per_layer=per_layer, random=random, most_tflop=most_tflop, seed=seed)

    def default(self, problem: Problem, device: DeviceSpec) -> KernelConfig:
        many, smem = problem["m"] > 64, device.smem_per_block_bytes
        block_m, block_n, block_k = (128 if many else 16 if problem["m"] <= 16 else 64), 64, 64
        if smem < 96 * 1024:  # 64 KiB on CDNA
            block_m, block_n = min(block_m, 64), 32
        if problem.dtype == "fp32":
            block_m, block_n, block_k = 32, 32, 32
        return KernelConfig.of(
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            GROUP_M=8 if many else 1,
            PROGRAMS_PER_SM=0,
            TMA=int(device.arch in TMA_ARCHS),
            num_warps=4,
            # 2-byte operands, 4 stages of (128 + 2 x 64) x 64 and a tile: 144 KiB; less where there is less.
            num_stages=4 if smem >= 160 * 1024 else 2,
        )

    def inputs(self, problem: Problem, device: DeviceSpec, *, seed: int = 0) -> Inputs:
        import torch

        where = "cpu" if device.backend == "cpu" else "cuda"
        dtype = torch_dtype(problem.dtype_name)
        m, n, k = (problem[dim] for dim in self.dims)
        generator = torch.Generator(where).manual_seed(seed)
        parts = 3 if "saves" in problem.flags else 1
        return Inputs(
            x=torch.randn(m, k, generator=generator, device=where, dtype=dtype),
            # So that gate and up are of the size that an activation is about.
            w=torch.randn(2 * n, k, generator=generator, device=where, dtype=dtype).div_(k**0.5),
            out=torch.full((parts * m * n,), float("nan"), dtype=dtype, device=where),
            problem=problem,
            device=device,
        )

    def launch(self, inputs: Inputs, config: KernelConfig) -> torch.Tensor:
        from .launches import launch_gated

        activation = activation_of(inputs.problem)
        launch_gated(inputs.x, inputs.w, inputs.h, inputs.saved, config, inputs.device.sm_count, activation)
        return inputs.out

    def reference(self, inputs: Inputs) -> torch.Tensor:
        import torch

        from .plain import activated

        both = inputs.x.float() @ inputs.w.float().t()
        gate, up = both.chunk(2, -1)
        h = activated(gate, activation_of(inputs.problem)) * up
        return torch.cat([h.flatten(), *[both.flatten()] * ("saves" in inputs.problem.flags)])

    def tolerance(self, problem: Problem) -> float:
        # Rounding once: a relative error of about 2^-9 (bf16) or 2^-12 (fp16) at most, less on average. float32 differs
        # by the order of the sums.
        return {"bf16": 4e-3, "fp16": 5e-4, "fp32": 1e-5}[problem.dtype_name]

    def check_problem(self, config: KernelConfig, problem: Problem) -> Problem:
        # Off every block: M = 256 + 37, N = 2 x 128 + 72, K = 2 x 128 + 72.
        return replace(problem, dims=(("m", 293), ("n", 328), ("k", 328)))

    def compile(self, config: KernelConfig, problem: Problem) -> Any:
        from .triton_kernels import gated_mlp_kernel

        element = torch_dtype(problem.dtype_name)
        saved = element if "saves" in problem.flags else None
        return gated_mlp_kernel.warmup(
            element,
            element,
            element,
            saved,
            1024,
            128,
            128,
            grid=(1,),
            ACTIVATION=activation_of(problem),
            **config.to_json(),
        )

    def binary_key(self, config: KernelConfig, problem: Problem) -> Hashable:
        # No runtime integer is specialised, so one binary serves every shape, band and number of programs.
        return KernelConfig.from_json(config.to_json() | {"GROUP_M": 1, "PROGRAMS_PER_SM": 1}), problem.kind

    def source_hash(self) -> str:
        from ...runtime.launching.source_hash import hash_of_kernel
        from .triton_kernels import gated_mlp_kernel

        return hash_of_kernel(gated_mlp_kernel)
