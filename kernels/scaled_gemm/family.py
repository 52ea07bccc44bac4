"""The scaled GEMMs as families: what predicting, pruning and measuring need. torch and triton are imported when they
are needed: a prediction needs neither."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ...datasets import Case, DeviceSpec, KernelConfig, Problem
from ...runtime.launching.source_hash import hash_of_modules
from ..config_limits import TMA_ARCHS, Knobs
from ..gemm_family import BANDS_AND_PROGRAMS, Binaries, Configs, GemmFamily, Groups, MeasuredFamily, seeded
from ..grouped_gemm.family import MOST_COLUMNS, MOST_ROWS, MeasuredOverGroups
from ..grouped_gemm.features import group_sizes_of
from ..workloads import load_dense_models, load_models
from . import workload
from .features import FEATURE_NAMES, feature_groups
from .scales import BLOCKWISE, DTYPE, FLAGS, ROWWISE, SCALED, STEP, TENSORWISE, kind_of, scale_bytes, scale_shapes
from .space import KNOBS, Ranges, full_space, smem_bytes, values_of, wrong_tile

if TYPE_CHECKING:
    import torch

    from ..grouped_gemm.triton_kernels.tiles import TileMap

#: Archs whose compiler multiplies e4m3 as NVIDIA, ARM and Intel have it. (MI300X has another one, fp8e4m3fnuz.)
FP8_ARCHS = ("sm_89", "sm_90", "sm_100", "sm_103", "sm_120")


@dataclass(frozen=True)
class Inputs:
    """The tensors of one call, on the device."""

    x: torch.Tensor  # (rows, K) fp8
    w: torch.Tensor  # (N, K) fp8, or (groups, N, K)
    x_scale: torch.Tensor  # float32; see `scales.scale_shapes`
    w_scale: torch.Tensor
    out: torch.Tensor  # (rows, N) bf16, poisoned with NaN
    group_sizes: torch.Tensor | None  # (groups,) int32
    tile_map: TileMap | None
    problem: Problem
    device: DeviceSpec


class ScaledGemmFamily(GemmFamily, MeasuredFamily):
    """What dense and grouped products share.

    y = (x @ w.T) in fp8, times the scales of x and w, in bf16. Flags of a problem: "rowwise" (a scale for each row of x
    and of w) or "blockwise" (one for each 1x128 of x and each 128x128 of w); without one there is one a tensor.
    """

    dtypes = (DTYPE,)
    flags = FLAGS
    knobs = KNOBS
    default_knobs: ClassVar[Mapping[str, Any]] = {"CONSUMERS": 0}
    feature_names = FEATURE_NAMES
    rows: ClassVar[str]  # the dimension that is x's rows
    dtype_argument = "x_ptr"
    tma = ("TMA_LOAD", "TMA_STORE")
    least_elements = TENSORWISE
    estimated_by = ("roofline_us", "latency_us")  # or what its loads wait for, if longer
    # Rounding the sum to bf16: 2^-9 at most, 2^-8 in the interpreter, which cuts off. What Hopper's tensor cores drop
    # of 128 products is a tenth of that: see `quantize.error_bound`.
    tolerances: ClassVar[Mapping[str, float]] = {DTYPE: 4e-3}
    launch_knobs = BANDS_AND_PROGRAMS | {"SPLIT_K": (1, 2)}

    def wrong_knobs(self, knobs: Mapping[str, Any]) -> str | None:
        return values_of(self.name).wrong(knobs)

    def full_space(self) -> tuple[KernelConfig, ...]:
        return full_space(Ranges.of(), "groups" in self.dims)

    def space(self, device: DeviceSpec | None = None, **ranges: Sequence[int]) -> tuple[KernelConfig, ...]:
        """Every config worth declaring; with a device, those that some problem on it supports.

        `ranges` replace the values of a knob: block_m, block_n, block_k, num_warps, num_stages, programs_per_sm,
        split_k, consumers.

        >>> from foretune.kernels import find_family
        >>> len(find_family("scaled_gemm").space(DeviceSpec.named("h200"), block_m=[64])) > 10
        True
        """
        if not ranges:
            return super().space(device)
        space = full_space(Ranges.of(**ranges), "groups" in self.dims)
        return space if device is None else self.able(space, device)

    def elements_of(self, problem: Problem) -> str:
        return kind_of(problem)

    def smem_bytes(self, config: Knobs, elements: Any, device: DeviceSpec) -> int:
        return smem_bytes(config, device, elements)

    def limit_of(self, config: Knobs, elements: Any, device: DeviceSpec) -> str | None:
        if device.arch not in FP8_ARCHS and device.backend != "cpu":
            return f"{device.arch} has no products of {DTYPE}; {', '.join(FP8_ARCHS)} have"
        return super().limit_of(config, elements, device)

    def refused(self, problem: Problem) -> str | None:
        if problem.dtype != DTYPE:
            return f"dtype {problem.dtype_name} is not {DTYPE}, which both operands must be"
        return super().refused(problem)

    def wrong_problem(self, problem: Problem) -> str | None:
        if len(problem.flags) > 1:
            return f"scales cannot be {ROWWISE} and {BLOCKWISE} at once"
        n, k, groups = problem["n"], problem["k"], _groups(problem)
        if min(n, k, groups) < 1:
            return f"groups, N and K must be >= 1 but are {groups}, {n} and {k}"
        if n % STEP or k % STEP:
            return f"N and K must be multiples of {STEP} but are {n} and {k}"
        return None

    def wrong_pair(self, config: KernelConfig, problem: Problem) -> str | None:
        if (wrong := wrong_tile(config)) is not None:
            return wrong
        if "groups" in self.dims:
            if config["SPLIT_K"] > 1:
                return f"SPLIT_K cannot be {config['SPLIT_K']} with groups: 1"
            if config["CONSUMERS"] == 3:
                return "CONSUMERS cannot be 3 with groups, whose tiles have a power of two of rows: 0 or 2"
        if config["CONSUMERS"] and SCALED % config["BLOCK_N"] and BLOCKWISE in problem.flags:
            return f"BLOCK_N cannot be {config['BLOCK_N']} with CONSUMERS and {BLOCKWISE} scales: a divisor of {SCALED}"
        return None

    def supports_by(self, problem: Problem) -> Hashable:
        n, k = problem["n"], problem["k"]
        return problem.dtype, problem.flags, min(n, k, _groups(problem)) < 1, n % STEP, k % STEP

    def grouped_features(
        self, problems: Sequence[Problem], device: DeviceSpec, configs: Configs, binaries: Binaries | None
    ) -> Groups:
        return feature_groups(problems, self.rows, device, configs)

    def flags_of_call(self, arguments: Mapping[str, Any]) -> Sequence[str]:
        return [flag for flag in FLAGS if arguments.get(flag.upper())]

    def flops(self, problem: Problem) -> float:
        return 2.0 * problem[self.rows] * problem["n"] * problem["k"]

    def bytes(self, problem: Problem) -> float:
        rows, n, k = problem[self.rows], problem["n"], problem["k"]
        # Of the weights those groups that have rows.
        groups = _groups(problem) if problem.ragged is None else problem.ragged.active
        return float(groups * n * k + rows * (k + 2 * n) + scale_bytes(kind_of(problem), rows, n, k, groups))

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

        where, generator = seeded(device, seed)
        kind, rows, n, k = kind_of(problem), problem[self.rows], problem["n"], problem["k"]
        groups = dict(problem.dims).get("groups")

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

    def compile(self, config: KernelConfig, problem: Problem) -> Any:
        from .triton_kernels.launches import compile_scaled_gemm

        flags = {flag: flag in problem.flags for flag in FLAGS}
        return compile_scaled_gemm(config, grouped="groups" in self.dims, **flags)

    def source_hash(self) -> str:
        from .. import dependent_launch, warp_jobs
        from ..grouped_gemm.triton_kernels import ragged, ragged_boxes, tiles
        from ..matmul.triton_kernels import split_k, tile_order
        from .triton_kernels import product, specialized

        return hash_of_modules(
            tiles, ragged, ragged_boxes, product, specialized, warp_jobs, split_k, dependent_launch, tile_order
        )


class ScaledGemm(ScaledGemmFamily):
    """y = x @ w.T with x (m, k) and w (n, k) in fp8 (e4m3), times their scales, in bf16.

    >>> from foretune.datasets import DeviceSpec
    >>> family, h200 = ScaledGemm(), DeviceSpec.named("h200")
    >>> problem = Problem.of(family.name, dtype="fp8e4m3", flags=("blockwise",), m=4096, n=7168, k=2048)
    >>> family.supports(family.default(problem, h200), problem, h200) is None
    True
    """

    name = "scaled_gemm"
    dims = ("m", "n", "k")
    rows = "m"
    largest: ClassVar[Mapping[str, int]] = {"m": MOST_ROWS, "n": MOST_COLUMNS, "k": MOST_COLUMNS}
    ragged: ClassVar[Mapping[str, str]] = {}
    bucketed = ("m",)
    dims_from: ClassVar[Mapping[str, tuple[str, int]]] = {"m": ("rows", 1), "n": ("N16", 16), "k": ("K16", 16)}
    also_needed = ("groups",)  # which are 1

    def draw(self, models: Path | str | None, max_tflop: float | None, **drawn: Any) -> tuple[Case, ...]:
        drawn["most_tflop"] = workload.MOST_TFLOP if max_tflop is None else max_tflop
        return workload.draw_dense(self.name, load_dense_models(models), with_deepseek=models is None, **drawn)

    def check_problem(self, config: KernelConfig, problem: Problem) -> Problem:
        # Off every block: M = 256 + 37, N = 256 + 144, K = 8 x 128 + 80, which is more steps than there are stages.
        return Problem.of(self.name, dtype=problem.dtype_name, flags=problem.flags, m=293, n=400, k=1104)


class ScaledGroupedGemmForward(MeasuredOverGroups, ScaledGemmFamily):
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

    name = "scaled_grouped_gemm_fwd"
    rows = "rows"
    dims_from: ClassVar[Mapping[str, tuple[str, int]]] = {
        "rows": ("rows", 1),
        "groups": ("groups", 1),
        "n": ("N16", 16),
        "k": ("K16", 16),
    }
    off_blocks = (400, 1104)  # as above

    def draw(self, models: Path | str | None, max_tflop: float | None, **drawn: Any) -> tuple[Case, ...]:
        drawn["most_tflop"] = workload.MOST_TFLOP if max_tflop is None else max_tflop
        return workload.draw_grouped(self.name, load_models(models), **drawn)


def _groups(problem: Problem) -> int:
    return dict(problem.dims).get("groups", 1)
