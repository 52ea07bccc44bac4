"""The scaled GEMMs as `Measurable` families: inputs, launches, references and the workload. torch and triton are
imported when they are needed."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...datasets import Case, DeviceSpec, KernelConfig, Measurable, Problem
from ...runtime.launching.source_hash import hash_of_modules
from ..config_limits import TMA_ARCHS
from ..grouped_gemm.features import group_sizes_of
from ..workloads import load_dense_models, load_models
from . import workload
from .family import ScaledGemmDense, ScaledGemmFamily, ScaledGemmGrouped
from .scales import BLOCKWISE, FLAGS, ROWWISE, kind_of, scale_bytes, scale_shapes

if TYPE_CHECKING:
    import torch

    from ..grouped_gemm.triton_kernels.tiles import TileMap


@dataclass(frozen=True)
class Inputs:
    """The tensors of one call, on the device."""

    x: torch.Tensor  # (rows, K) fp8
    w: torch.Tensor  # (N, K) fp8, or (groups, N, K)
    x_scale: torch.Tensor  # float32; see `kinds.scale_shapes`
    w_scale: torch.Tensor
    out: torch.Tensor  # (rows, N) bf16, poisoned with NaN
    group_sizes: torch.Tensor | None  # (groups,) int32
    tile_map: TileMap | None
    problem: Problem
    device: DeviceSpec


class MeasurableScaledGemm(ScaledGemmFamily, Measurable):
    """What measuring needs, dense and grouped."""

    def flops(self, problem: Problem) -> float:
        return 2.0 * problem[self.rows] * problem["n"] * problem["k"]

    def bytes(self, problem: Problem) -> float:
        rows, n, k, groups = problem[self.rows], problem["n"], problem["k"], self._active(problem)
        return float(groups * n * k + rows * (k + 2 * n) + scale_bytes(kind_of(problem), rows, n, k, groups))

    def _active(self, problem: Problem) -> int:
        """Groups whose weights are read."""
        return 1

    def default(self, problem: Problem, device: DeviceSpec) -> KernelConfig:
        tma = int(device.arch in TMA_ARCHS)
        rows = problem[self.rows] / max(dict(problem.dims).get("groups", 1), 1)
        block_m = 16 if rows <= 16 else 64 if rows <= 64 else 128
        large = block_m >= 64
        roomy = device.smem_per_block_bytes >= 192 * 1024  # for 4 stages of (128 + 128) x 128 and an output tile
        return KernelConfig.of(
            BLOCK_M=block_m,
            BLOCK_N=128 if roomy or not large else 64,
            BLOCK_K=128,
            GROUP_M=8 if large else 1,
            SPLIT_K=1,
            PROGRAMS_PER_SM=1 if large else 2,
            SWAP_AB=int(not large),
            TMA_LOAD=tma,
            TMA_STORE=tma if large else 0,
            CONSUMERS=0,
            num_warps=8 if block_m == 128 else 4,
            num_stages=4 if roomy else 2,
        )

    def inputs(self, problem: Problem, device: DeviceSpec, *, seed: int = 0) -> Inputs:
        import torch

        from ..grouped_gemm.triton_kernels.tiles import TileMap

        where = "cpu" if device.backend == "cpu" else "cuda"
        kind, rows, n, k = kind_of(problem), problem[self.rows], problem["n"], problem["k"]
        groups = dict(problem.dims).get("groups")
        generator = torch.Generator(where).manual_seed(seed)

        def operand(*shape: int) -> torch.Tensor:
            # Made in bf16 and converted piece by piece: weights of many groups in float32 would not fit.
            made = torch.empty(shape, dtype=torch.float8_e4m3fn, device=where)
            for part in made if len(shape) == 3 else made[None]:
                part.copy_(torch.randn(shape[-2:], generator=generator, device=where, dtype=torch.bfloat16))
            return made

        def scale(*shape: int) -> torch.Tensor:
            return torch.rand(shape, generator=generator, device=where) + 0.5

        x_shape, w_shape = scale_shapes(kind, rows, n, k, groups)
        sizes = None
        if groups is not None:
            sizes = torch.tensor(group_sizes_of(problem), dtype=torch.int32, device=where)
        return Inputs(
            x=operand(rows, k),
            w=operand(n, k) if groups is None else operand(groups, n, k),
            x_scale=scale(*reversed(x_shape)).t() if kind == BLOCKWISE else scale(*x_shape),
            w_scale=scale(*w_shape),
            out=torch.full((rows, n), float("nan"), dtype=torch.bfloat16, device=where),
            group_sizes=sizes,
            tile_map=None if sizes is None else TileMap.build(sizes, rows),
            problem=problem,
            device=device,
        )

    def launch(self, inputs: Inputs, config: KernelConfig) -> torch.Tensor:
        from .triton_kernels.launches import launch_scaled_gemm

        i = inputs
        launch_scaled_gemm(
            i.x,
            i.w,
            i.x_scale,
            i.w_scale,
            i.out,
            config,
            i.device.sm_count,
            tile_map=i.tile_map,
            rowwise=ROWWISE in i.problem.flags,
            blockwise=BLOCKWISE in i.problem.flags,
        )
        return i.out

    def reference(self, inputs: Inputs) -> torch.Tensor:
        from .quantize import dequantized_weight, dequantized_x

        kind, i = kind_of(inputs.problem), inputs
        x = dequantized_x(i.x, i.x_scale, kind)
        if i.group_sizes is None:
            return x @ dequantized_weight(i.w, i.w_scale, kind).T
        out = i.out.float().fill_(float("nan"))
        start = 0
        for group, size in enumerate(i.group_sizes.tolist()):
            if size:
                w = dequantized_weight(i.w[group], i.w_scale[group : group + 1].reshape(i.w_scale.shape[1:]), kind)
                out[start : start + size] = x[start : start + size] @ w.T
            start += size
        return out

    def tolerance(self, problem: Problem) -> float:
        # Rounding the sum to bf16: 2^-9 at most, 2^-8 in the interpreter, which cuts off. What Hopper's tensor cores
        # drop of 128 products is a tenth of that: see `reference.error_bound`.
        return 4e-3

    def compile(self, config: KernelConfig, problem: Problem) -> Any:
        from .triton_kernels.launches import compile_scaled_gemm

        flags = {flag: flag in problem.flags for flag in FLAGS}
        return compile_scaled_gemm(config, grouped="groups" in self.dims, **flags)

    def binary_key(self, config: KernelConfig, problem: Problem) -> Hashable:
        # No runtime integer is specialised, so one binary serves every shape, band, and number of programs and parts.
        splits = min(config["SPLIT_K"], 2)
        same = {"GROUP_M": 1, "PROGRAMS_PER_SM": 1, "SPLIT_K": splits}
        return KernelConfig.from_json(config.to_json() | same), problem.kind

    def source_hash(self) -> str:
        from .. import dependent_launch, warp_jobs
        from ..grouped_gemm.triton_kernels import ragged, ragged_boxes, tiles
        from ..matmul.triton_kernels import split_k, tile_order
        from .triton_kernels import product, specialized

        return hash_of_modules(
            tiles, ragged, ragged_boxes, product, specialized, warp_jobs, split_k, dependent_launch, tile_order
        )


class ScaledGemm(ScaledGemmDense, MeasurableScaledGemm):
    """y = x @ w.T with x (m, k) and w (n, k) in fp8 (e4m3), times their scales, in bf16.

    >>> from foretune.datasets import DeviceSpec
    >>> family, h200 = ScaledGemm(), DeviceSpec.named("h200")
    >>> problem = Problem.of(family.name, dtype="fp8e4m3", flags=("blockwise",), m=4096, n=7168, k=2048)
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
        return workload.draw_dense(
            self.name,
            load_dense_models(models),
            tokens=tokens,
            per_layer=per_layer,
            random=random,
            most_tflop=workload.MOST_TFLOP if max_tflop is None else max_tflop,
            seed=seed,
            with_deepseek=models is None,
        )

    def check_problem(self, config: KernelConfig, problem: Problem) -> Problem:
        # Off every block: M = 256 + 37, N = 256 + 144, K = 8 x 128 + 80, which is more steps than there are stages.
        return Problem.of(self.name, dtype=problem.dtype_name, flags=problem.flags, m=293, n=400, k=1104)


class ScaledGroupedGemmForward(ScaledGemmGrouped, MeasurableScaledGemm):
    """y[rows of e] = x[rows of e] @ w[e].T with x (rows, K) sorted by group and w (groups, N, K) in fp8 (e4m3), times
    their scales, in bf16.

    dX is the same kernel on w's transpose: blocks of 128x128 and their scales, and one scale a tensor, transpose as
    they are. dW is not here: it sums over rows, each of which has scales of its own.

    >>> from foretune.datasets import DeviceSpec
    >>> family, h200 = ScaledGroupedGemmForward(), DeviceSpec.named("h200")
    >>> problem = Problem.of(family.name, dtype="fp8e4m3", flags=("blockwise",), groups=256, rows=8192, n=4096, k=7168)
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
        invented: int = 0,
        max_tflop: float | None = None,
        seed: int = 0,
    ) -> tuple[Case, ...]:
        return workload.draw_grouped(
            self.name,
            load_models(models),
            tokens=tokens,
            per_layer=per_layer,
            random=random,
            invented=invented,
            most_tflop=workload.MOST_TFLOP if max_tflop is None else max_tflop,
            seed=seed,
        )

    def _active(self, problem: Problem) -> int:
        return problem["groups"] if problem.ragged is None else problem.ragged.active

    def check_problem(self, config: KernelConfig, problem: Problem) -> Problem:
        # Off every block, as above; groups of 0 and 1 row, one over every BLOCK_M.
        sizes = (37, 0, 1, 300, 0, 16, 129, 5)
        dims = {"groups": len(sizes), "rows": sum(sizes), "n": 400, "k": 1104}
        flags, dtype = problem.flags, problem.dtype_name
        return Problem.of(self.name, dtype=dtype, flags=flags, ragged={"rows": sizes}, **dims)
