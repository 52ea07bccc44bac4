"""The dense GEMM as a family: what predicting, pruning and measuring need. torch and triton are imported when they are
needed: a prediction needs neither."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ...datasets import Case, DeviceSpec, KernelConfig, Problem, torch_dtype
from ...runtime.launching.kernel import poison
from ...runtime.launching.source_hash import hash_of_modules
from ..config_limits import TMA_ARCHS, WITHOUT_CONSUMERS, Knobs
from ..gemm_family import BANDS_AND_PROGRAMS, ROUNDED_ONCE, Configs, GemmFamily, Groups, MeasuredFamily, seeded
from ..workloads import load_dense_models
from . import workload
from .features import FEATURE_NAMES, feature_groups
from .layouts import (
    A_KM,
    ACTIVATIONS,
    ALIGNMENT_BYTES,
    B_KN,
    BIAS,
    DTYPES,
    FLAGS,
    activation_of,
    call_dims,
    is_aligned,
    output_dtype,
)
from .space import KNOBS, full_space, smem_bytes, wrong_knob

if TYPE_CHECKING:
    import torch

#: A tile's rows and columns are counted in 32 bits, and may reach past the end by a block.
MOST_SIZE = 2**30
#: Tiles are counted in 32 bits.
MOST_TILES = 2**31 - 1
#: 8 GiB of partial sums in float32. Where so much is to be kept there are tiles enough without cutting K; with 50 GiB
#: of them launches failed on an H200 (illegal memory accesses).
MOST_PARTIALS = 2**31 - 1


@dataclass(frozen=True)
class Inputs:
    """The tensors of one call, on the device, stored as the problem's flags say."""

    a: torch.Tensor  # (batch, M, K) or (batch, K, M)
    b: torch.Tensor  # (batch, N, K) or (batch, K, N)
    bias: torch.Tensor | None  # (N,)
    y: torch.Tensor  # (batch, M, N); poisoned with NaN, or with the least int32
    problem: Problem
    device: DeviceSpec


class Matmul(GemmFamily, MeasuredFamily):
    """y[i] = activation(a[i] @ b[i] + bias) for i < batch: a (M, K), b (K, N), y (M, N).

    A problem without flags is a linear layer's product, x (M, K) @ w.T: a is stored as (M, K) and b as (N, K), rows
    along K. Flags say what differs: "a_km" (a is stored as (K, M)), "b_kn" (b as (K, N)), "bias" (N,), and one of
    "relu", "gelu" (the exact one) and "silu". So the gradient of the layer's input, dy @ w, has "b_kn", and that of
    its weight, dy.T @ x, "a_km" and "b_kn".

    >>> family, h200 = Matmul(), DeviceSpec.named("h200")
    >>> problem = Problem.of("matmul", batch=1, m=8192, n=4096, k=4096, flags=("bias", "gelu"))
    >>> family.supports(family.default(problem, h200), problem, h200) is None
    True
    """

    name = "matmul"
    dims = ("batch", "m", "n", "k")
    dtypes = DTYPES
    knobs = KNOBS
    default_knobs: ClassVar[Mapping[str, Any]] = WITHOUT_CONSUMERS
    flags = FLAGS
    default_dims: ClassVar[Mapping[str, int]] = {"batch": 1}
    largest: ClassVar[Mapping[str, int]] = dict.fromkeys(dims, MOST_SIZE)
    ragged: ClassVar[Mapping[str, str]] = {}
    bucketed = ("m", "k")  # one of them at a time: see `call_dims`
    feature_names = FEATURE_NAMES
    dtype_argument = "a_ptr"
    dims_from: ClassVar[Mapping[str, tuple[str, int]]] = {
        "batch": ("batch", 1),
        "m": ("M", 1),
        "n": ("N", 1),
        "k": ("K", 1),
    }
    least_elements = 1
    estimated_by = ("estimate_us",)
    # Operands in tf32 are rounded to 2^-11 each, or cut off, which is twice as far. int32 is exact.
    tolerances: ClassVar[Mapping[str, float]] = ROUNDED_ONCE | {"fp32": 1e-3, "int8": 1e-6}
    launch_knobs = BANDS_AND_PROGRAMS | {"SPLIT_K": (1, 2), "PROGRAMS_PER_SM": (0, 1)}

    def full_space(self) -> tuple[KernelConfig, ...]:
        return full_space()

    def smem_bytes(self, config: Knobs, elements: Any, device: DeviceSpec) -> int:
        return smem_bytes(config, elements, device)

    def wrong_knobs(self, knobs: Mapping[str, Any]) -> str | None:
        return wrong_knob(knobs)

    def wrong_problem(self, problem: Problem) -> str | None:
        after = [flag for flag in problem.flags if flag in (BIAS, *ACTIVATIONS)]
        if problem.dtype == "int8" and after:
            return f"int8 is summed in int32, which takes no {after[0]}"
        if len(activations := [flag for flag in after if flag != BIAS]) > 1:
            return f"one activation can follow, not {' and '.join(activations)}"
        for dim in self.dims:
            if not 1 <= problem[dim] <= MOST_SIZE:
                return f"{dim} must be between 1 and {MOST_SIZE} but is {problem[dim]}"
        return None

    def wrong_pair(self, config: KernelConfig, problem: Problem) -> str | None:
        knobs: Mapping[str, Any] = config.to_json()
        if knobs["TMA"] and not is_aligned(problem):
            return f"TMA cannot be {knobs['TMA']}: rows of this problem do not begin at multiples of 16 bytes: 0"
        if knobs["CONSUMERS"] and problem.itemsize != 2:
            return f"CONSUMERS cannot be {knobs['CONSUMERS']} in {problem.dtype_name}: its kernel is of 16 bits; 0"
        if problem.dtype == "int8" and knobs["BLOCK_K"] < 32:
            return f"BLOCK_K cannot be {knobs['BLOCK_K']} in int8: at least 32"
        tiles = problem["batch"] * knobs["SPLIT_K"]
        tiles *= -(-problem["m"] // knobs["BLOCK_M"]) * -(-problem["n"] // knobs["BLOCK_N"])
        if tiles > MOST_TILES:
            return f"{tiles} tiles are more than 32 bits count: BLOCK_M or BLOCK_N must be larger, or SPLIT_K smaller"
        partials = problem["batch"] * knobs["SPLIT_K"] * problem["m"] * problem["n"]
        if knobs["SPLIT_K"] > 1 and partials > MOST_PARTIALS:
            return f"SPLIT_K = {knobs['SPLIT_K']} of this problem would keep {partials} partial sums in memory: 1"
        return None

    def supports_by(self, problem: Problem) -> Hashable:
        batch, m, n = problem["batch"], problem["m"], problem["n"]
        # However small the tiles: 16 x 16, in 64 parts.
        if self.refused(problem) or batch * (m // 16 + 1) * (n // 16 + 1) > MOST_TILES // 64:
            return problem
        return problem.dtype, problem.flags, is_aligned(problem), min(MOST_PARTIALS // (batch * m * n), 64)

    def at_call_time(self, problem: Problem) -> Problem:
        return problem.without_sizes().rounded(*call_dims(problem))

    def call_features(self, problem: Problem, device: DeviceSpec, configs: Configs) -> Groups:
        return feature_groups(problem, device, configs)

    def flags_of_call(self, arguments: Mapping[str, Any]) -> Sequence[str]:
        given = {A_KM: arguments.get("A_KM"), B_KN: arguments.get("B_KN"), BIAS: arguments.get("bias_ptr") is not None}
        flags = [flag for flag, is_set in given.items() if is_set]
        return flags + [activation for activation in ACTIVATIONS if activation == arguments.get("ACTIVATION")]

    def draw(self, models: Path | str | None, max_tflop: float | None, **drawn: Any) -> tuple[Case, ...]:
        most_tflop = workload.MOST_TFLOP if max_tflop is None else max_tflop
        return workload.draw(load_dense_models(models), most_tflop=most_tflop, **drawn)

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
            if self.device_limit(config, problem, device) is None:
                break
        return config

    def inputs(self, problem: Problem, device: DeviceSpec, *, seed: int = 0) -> Inputs:
        import torch

        where, generator = seeded(device, seed)
        dtype, out_dtype = torch_dtype(problem.dtype_name), torch_dtype(output_dtype(problem))
        batch, m, n, k = (problem[dim] for dim in ("batch", "m", "n", "k"))

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
        return super().binary_key(config, problem), is_aligned(problem)

    def source_hash(self) -> str:
        from .. import dependent_launch, warp_jobs
        from .triton_kernels import epilogue, gemm, specialized, split_k, tile_order

        return hash_of_modules(gemm, specialized, warp_jobs, split_k, dependent_launch, tile_order, epilogue)
