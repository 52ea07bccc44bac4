"""The dense GEMM as a `Measurable` family: inputs, launches, references and the workload. torch and triton are
imported when they are needed."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...datasets import Case, DeviceSpec, KernelConfig, Measurable, Problem, torch_dtype
from ...runtime.launching.kernel import poison
from ...runtime.launching.source_hash import hash_of_modules
from ..dense_llms import load_dense_models
from ..sm_limits import TMA_ARCHS
from . import workload
from .family import MatmulFamily, device_limit
from .layouts import A_KM, ALIGNMENT_BYTES, B_KN, BIAS, activation_of, is_aligned, output_dtype

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Inputs:
    """The tensors of one call, on the device, stored as the problem's flags say."""

    a: torch.Tensor  # (batch, M, K) or (batch, K, M)
    b: torch.Tensor  # (batch, N, K) or (batch, K, N)
    bias: torch.Tensor | None  # (N,)
    y: torch.Tensor  # (batch, M, N); poisoned with NaN, or with the least int32
    problem: Problem
    device: DeviceSpec


class Matmul(MatmulFamily, Measurable):
    """The dense GEMM, to be collected as well.

    >>> family, h200 = Matmul(), DeviceSpec.named("h200")
    >>> problem = Problem.of("matmul", batch=1, m=8192, n=4096, k=4096, flags=("bias", "gelu"))
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

    def flops(self, problem: Problem) -> float:
        return 2.0 * problem["batch"] * problem["m"] * problem["n"] * problem["k"]

    def bytes(self, problem: Problem) -> float:
        batch, m, n, k = (problem[dim] for dim in ("batch", "m", "n", "k"))
        out_itemsize = 4 if output_dtype(problem) == "int32" else problem.itemsize
        return float(batch) * (problem.itemsize * (m + n) * k + out_itemsize * m * n)

    def default(self, problem: Problem, device: DeviceSpec) -> KernelConfig:
        m = problem["m"]
        block_m, block_n, block_k = (16, 64, 128) if m <= 16 else (64, 64, 64) if m <= 64 else (128, 128, 64)
        tma = int(device.arch in TMA_ARCHS and is_aligned(problem))
        for stages in (4, 3, 2, 1):
            config = KernelConfig.of(
                BLOCK_M=block_m,
                BLOCK_N=block_n,
                BLOCK_K=block_k * 2 // max(problem.itemsize, 2),
                GROUP_M=8 if block_m >= 64 else 1,
                SPLIT_K=1,
                PROGRAMS_PER_SM=0,
                TMA=tma,
                CONSUMERS=0,
                PINGPONG=0,
                num_warps=4,
                num_stages=stages,
            )
            if device_limit(config, problem.itemsize, device) is None:
                break
        return config

    def inputs(self, problem: Problem, device: DeviceSpec, *, seed: int = 0) -> Inputs:
        import torch

        where = "cpu" if device.backend == "cpu" else "cuda"
        dtype, out_dtype = torch_dtype(problem.dtype_name), torch_dtype(output_dtype(problem))
        batch, m, n, k = (problem[dim] for dim in ("batch", "m", "n", "k"))
        generator = torch.Generator(where).manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            if dtype == torch.int8:
                return torch.randint(-128, 128, shape, generator=generator, device=where, dtype=dtype)
            return torch.randn(*shape, generator=generator, device=where, dtype=dtype)

        return Inputs(
            a=random(batch, k, m) if A_KM in problem.flags else random(batch, m, k),
            b=random(batch, k, n) if B_KN in problem.flags else random(batch, n, k),
            bias=random(n) if BIAS in problem.flags else None,
            y=poison(torch.empty((batch, m, n), dtype=out_dtype, device=where)),
            problem=problem,
            device=device,
        )

    def launch(self, inputs: Inputs, config: KernelConfig) -> torch.Tensor:
        from .triton_kernels.launches import launch_matmul

        flags = inputs.problem.flags
        launch_matmul(
            inputs.a,
            inputs.b,
            inputs.y,
            config,
            inputs.device.sm_count,
            a_km=A_KM in flags,
            b_kn=B_KN in flags,
            bias=inputs.bias,
            activation=activation_of(inputs.problem),
        )
        return inputs.y

    def reference(self, inputs: Inputs) -> torch.Tensor:
        import torch
        from torch.nn import functional

        flags = inputs.problem.flags
        # Sums of products of int8 are no float32, and float64 holds them all.
        wide = torch.float64 if inputs.a.dtype == torch.int8 else torch.float32
        a = inputs.a.mT if A_KM in flags else inputs.a
        b = inputs.b if B_KN in flags else inputs.b.mT
        y = a.to(wide) @ b.to(wide)
        if inputs.bias is not None:
            y += inputs.bias.to(wide)
        activation = activation_of(inputs.problem)
        return (y if activation == "none" else getattr(functional, activation)(y)).float()

    def tolerance(self, problem: Problem) -> float:
        # Rounding the float32 sum once: a relative error of about 2^-9 (bf16) or 2^-12 (fp16) at most, less on average.
        # Operands in tf32 are rounded to 2^-11 each, or cut off, which is twice as far. int32 is exact.
        return {"bf16": 4e-3, "fp16": 5e-4, "fp32": 1e-3, "int8": 1e-6}[problem.dtype_name]

    def check_problem(self, config: KernelConfig, problem: Problem) -> Problem:
        # Two matrices, and sizes off every block: over one of 256 and short of two.
        m, n, k = 331, 301, 461
        if is_aligned(problem):
            unit = ALIGNMENT_BYTES // problem.itemsize
            n, k = n // unit * unit, k // unit * unit
            m = m // unit * unit if A_KM in problem.flags else m
        return Problem.of(self.name, dtype=problem.dtype_name, flags=problem.flags, batch=2, m=m, n=n, k=k)

    def compile(self, config: KernelConfig, problem: Problem) -> Any:
        from .triton_kernels.launches import compile_matmul

        return compile_matmul(
            torch_dtype(problem.dtype_name),
            torch_dtype(output_dtype(problem)),
            config,
            a_km=A_KM in problem.flags,
            b_kn=B_KN in problem.flags,
            bias=BIAS in problem.flags,
            activation=activation_of(problem),
            aligned=is_aligned(problem),
        )

    def binary_key(self, config: KernelConfig, problem: Problem) -> Hashable:
        # No runtime integer is specialised, so one binary serves every aligned shape, band, and number of splits or
        # programs beyond one.
        free = {
            "GROUP_M": 1,
            "SPLIT_K": min(config["SPLIT_K"], 2),
            "PROGRAMS_PER_SM": min(config["PROGRAMS_PER_SM"], 1),
        }
        return KernelConfig.from_json(config.to_json() | free), problem.kind, is_aligned(problem)

    def source_hash(self) -> str:
        from .. import dependent_launch, warp_jobs
        from .triton_kernels import epilogue, gemm, specialized, split_k, tile_order

        return hash_of_modules(gemm, specialized, warp_jobs, split_k, dependent_launch, tile_order, epilogue)
