"""The scaled GEMMs as families: prediction, pruning and measurement.

torch and triton are imported when they are needed; prediction needs neither.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ...datasets import Case, DeviceSpec, KernelConfig, Problem
from ...datasets.family import KernelChange
from ..config_limits import TMA_ARCHS, Knobs
from ..gemm_family import (
    BANDS_AND_PROGRAMS,
    Binaries,
    Configs,
    Groups,
    MeasuredFamily,
    RangedFamily,
    SteppedFamily,
    groups_of,
    saved_by_descriptors,
    seeded,
)
from ..grouped_gemm.family import KERNELS, MOST_COLUMNS, MOST_ROWS, MeasuredOverGroups
from ..grouped_gemm.features import group_sizes_of
from ..numerics import instruction_of, padded
from ..workloads import Draws, load_dense_models, load_models
from . import workload
from .features import FEATURE_NAMES, feature_groups
from .space import (
    BLOCKWISE,
    DTYPE,
    FLAGS,
    KNOBS,
    SCALED,
    STEP,
    TENSORWISE,
    Ranges,
    full_space,
    granularity_of,
    scale_bytes,
    scale_shapes,
    smem_bytes,
    values_of,
    wrong_tile,
)

if TYPE_CHECKING:
    import torch

    from ..grouped_gemm.triton_kernels.tiles import TileMap

#: Architectures with products of e4m3 as NVIDIA, ARM and Intel define it. (MI300X has another format, fp8e4m3fnuz.)
FP8_ARCHS = ("sm_89", "sm_90", "sm_100", "sm_103", "sm_120")


@dataclass(frozen=True)
class Inputs:
    """The tensors of one launch of a scaled GEMM, dense or grouped, on the device."""

    x: torch.Tensor  # (rows, K) fp8
    w: torch.Tensor  # (N, K) fp8, or (groups, N, K)
    x_scale: torch.Tensor  # float32; see `space.scale_shapes`
    w_scale: torch.Tensor
    out: torch.Tensor  # (rows, N) bf16, filled with NaN
    group_sizes: torch.Tensor | None  # (groups,) int32
    tile_map: TileMap | None
    problem: Problem
    device: DeviceSpec


def fp8_limit(device: DeviceSpec) -> str | None:
    """Return why a device cannot compute with fp8, or None if it can."""
    if device.arch in FP8_ARCHS or device.backend == "cpu":
        return None
    return f"{device.arch} does not support {DTYPE}; {', '.join(FP8_ARCHS)} do"


class FP8Family(SteppedFamily):
    """Base class of the families of fp8 products; the flag of a problem names its scales."""

    width_step = STEP

    def limit_of(self, config: Knobs, elements: Any, device: DeviceSpec) -> str | None:
        """Return why a device cannot run a config for scales like these (`elements`), or None if it can."""
        return fp8_limit(device) or super().limit_of(config, elements, device)

    def flags_of_call(self, arguments: Mapping[str, Any]) -> Sequence[str]:
        """Return the flags of the problem that a launch's arguments describe."""
        return [flag for flag in self.flags if arguments.get(flag.upper())]


class ScaledGemmFamily(FP8Family, RangedFamily, MeasuredFamily):
    """Base class of the dense and the grouped family of scaled GEMMs.

    They compute y = (x @ w.T) in fp8, times the scales of x and w, in bf16. Flags of a problem: "rowwise" (one scale
    per row of x and of w) or "blockwise" (one per 1x128 of x and per 128x128 of w); without a flag there is one per
    tensor.
    """

    dtypes = (DTYPE,)
    flags = FLAGS
    knobs = KNOBS
    default_knobs: ClassVar[Mapping[str, Any]] = {"CONSUMERS": 0}
    feature_names = FEATURE_NAMES
    rows: ClassVar[str]  # the dimension of x's rows
    dtype_argument = "x_ptr"
    tma = ("TMA_LOAD", "TMA_STORE")
    least_elements = TENSORWISE
    estimated_by = ("roofline_us", "latency_us")  # the larger of the roofline and of the time that loads wait
    # Rounding the sum to bf16 gives at most 2^-9, and 2^-8 in the interpreter, which truncates. Hopper's tensor cores
    # drop a tenth of that from sums of 128 products; see `quantize.error_bound`.
    tolerances: ClassVar[Mapping[str, float]] = {DTYPE: 4e-3}
    launch_knobs = BANDS_AND_PROGRAMS | {"SPLIT_K": (1, 2)}
    kernel_modules = (
        *KERNELS,
        "dependent_launch",
        "matmul.triton_kernels.split_k",
        "matmul.triton_kernels.tile_order",
        "scaled_gemm.triton_kernels.product",
        "scaled_gemm.triton_kernels.specialized",
    )
    descriptors: ClassVar[Mapping[str, Sequence[int]]] = {"TMA_LOAD": (0, 2), "TMA_STORE": (0, 1)}
    kernel_changes = (
        KernelChange(
            "16e3bf502cfe8bb0+a8441b0ae25c4ecd", "dc965dcd466ca044+70ac2585ed465221", None, saved_by_descriptors
        ),
        # In grouped products, bands of tiles end where a group ends: times became a little shorter, and are kept.
        KernelChange("dc965dcd466ca044+70ac2585ed465221", "e7aedfbb00f10104+6020b32d5b997ea8", None),
        KernelChange("e7aedfbb00f10104+6020b32d5b997ea8", "77c725895fc530df+94175e40cbb139c6", None),
        KernelChange("77c725895fc530df+94175e40cbb139c6", "49c4e858fcf356e5+eed64c857d931911", None),
        # Programs with CONSUMERS get tiles from a queue: times became up to 2 % shorter, and are kept.
        KernelChange("49c4e858fcf356e5+eed64c857d931911", "ba54fdf1969024d0+5e2bf228eee39a78", None),
        # Two steps at a time in tiles of two parts, and scales loaded early: rowwise times became 3 % shorter.
        KernelChange(
            before="ba54fdf1969024d0+5e2bf228eee39a78",
            after="1a9f7c4bdcb1a407+287a6af81a146b7b",
            knobs={"CONSUMERS": 2},
            keeps_times=True,
        ),
    )

    def ranged_space(self, **ranges: Sequence[int]) -> tuple[KernelConfig, ...]:
        """Return every config worth measuring, for all devices; `ranges` replace the default values of knobs."""
        return full_space(Ranges.of(**ranges), "groups" in self.dims)

    def elements_of(self, problem: Problem) -> str:
        """Return the property of a problem that decides its shared memory: the granularity of its scales."""
        return granularity_of(problem)

    def smem_bytes(self, config: Knobs, elements: Any, device: DeviceSpec) -> int:
        """Return the shared memory of one program, in bytes; `elements` is the granularity of the scales."""
        return smem_bytes(config, device, elements)

    def refused(self, problem: Problem) -> str | None:
        """Return why no config can run a problem, or None."""
        if problem.dtype != DTYPE:
            return f"dtype must be {DTYPE} (of both operands) but is {problem.dtype_name}"
        return super().refused(problem)

    def wrong_pair(self, config: KernelConfig, problem: Problem) -> str | None:
        """Return why a config cannot run a problem on any device, or None."""
        if (wrong := wrong_tile(config)) is not None:
            return wrong
        if "groups" in self.dims:
            if config["SPLIT_K"] > 1:
                return f"SPLIT_K must be 1 for grouped products but is {config['SPLIT_K']}"
            if config["CONSUMERS"] == 3:
                return "CONSUMERS must be 0 or 2 for grouped products, whose BLOCK_M is a power of two, but is 3"
        if config["CONSUMERS"] and SCALED % config["BLOCK_N"] and BLOCKWISE in problem.flags:
            return f"BLOCK_N must divide {SCALED} with CONSUMERS and {BLOCKWISE} scales but is {config['BLOCK_N']}"
        return None

    def numerics(self, config: KernelConfig, problem: Problem) -> Hashable:
        """Return the numerics class: configs of equal classes compute identical bits.

        It is the matrix instruction, BLOCK_K (the sums of steps are added in float32), and the parts of SPLIT_K.
        SWAP_AB transposes a tile, which changes no sum; the tile's rows are then those of w.
        """
        rows = config["BLOCK_N"] if config["SWAP_AB"] else config["BLOCK_M"]
        step, parts = config["BLOCK_K"], config["SPLIT_K"]
        found = instruction_of(rows, config.num_warps), step
        if parts == 1:
            return found
        return *found, parts, padded(-(-padded(problem["k"], step) // parts), step)  # the length of a part

    def grouped_features(
        self, problems: Sequence[Problem], device: DeviceSpec, configs: Configs, binaries: Binaries | None
    ) -> Groups:
        """Return the features of problems with the same dtype and flags, grouped by what the columns depend on."""
        return feature_groups(problems, self.rows, device, configs)

    def flops(self, problem: Problem) -> float:
        """Return the number of floating-point operations of a problem."""
        return 2.0 * problem[self.rows] * problem["n"] * problem["k"]

    def bytes(self, problem: Problem) -> float:
        """Return the minimum number of bytes that a problem must read and write."""
        rows, n, k = problem[self.rows], problem["n"], problem["k"]
        # Only the weights of groups with rows are read.
        groups = groups_of(problem) if problem.ragged is None else problem.ragged.active
        return float(groups * n * k + rows * (k + 2 * n) + scale_bytes(granularity_of(problem), rows, n, k, groups))

    def default(self, problem: Problem, device: DeviceSpec) -> KernelConfig:
        """Return the config to run when nothing was measured or predicted."""
        tma = int(device.arch in TMA_ARCHS)
        rows = problem[self.rows] / max(groups_of(problem), 1)
        block_m = 16 if rows <= 16 else 64 if rows <= 64 else 128
        large = block_m >= 64
        roomy = device.smem_per_block_bytes >= 192 * 1024  # enough for 4 stages of (128 + 128) x 128 and an output tile
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
        """Return random tensors of a problem on a device, with the output filled with NaN."""
        import torch

        from ..grouped_gemm.triton_kernels.tiles import TileMap

        where, generator = seeded(device, seed)
        granularity, rows, n, k = granularity_of(problem), problem[self.rows], problem["n"], problem["k"]
        groups = dict(problem.dims).get("groups")

        def operand(*shape: int) -> torch.Tensor:
            # Made in bf16 and converted group by group: float32 weights of many groups would not fit in memory.
            made = torch.empty(shape, dtype=torch.float8_e4m3fn, device=where)
            for part in made if len(shape) == 3 else made[None]:
                part.copy_(torch.randn(shape[-2:], generator=generator, device=where, dtype=torch.bfloat16))
            return made

        def scale(*shape: int) -> torch.Tensor:
            return torch.rand(shape, generator=generator, device=where) + 0.5

        x_shape, w_shape = scale_shapes(granularity, rows, n, k, groups)
        sizes = None
        if groups is not None:
            sizes = torch.tensor(group_sizes_of(problem), dtype=torch.int32, device=where)
        return Inputs(
            x=operand(rows, k),
            w=operand(n, k) if groups is None else operand(groups, n, k),
            x_scale=scale(*reversed(x_shape)).t() if granularity == BLOCKWISE else scale(*x_shape),
            w_scale=scale(*w_shape),
            out=torch.full((rows, n), float("nan"), dtype=torch.bfloat16, device=where),
            group_sizes=sizes,
            tile_map=None if sizes is None else TileMap.build(sizes, rows),
            problem=problem,
            device=device,
        )

    def launch(self, inputs: Inputs, config: KernelConfig) -> torch.Tensor:
        """Launch the kernel with a config, and return the output without waiting for it."""
        from .triton_kernels.launches import prepare_scaled_gemm

        i = inputs
        (rows, n), tile_map = i.out.shape, i.tile_map
        groups, entries = (None, None) if tile_map is None else (tile_map.groups, tile_map.entries)
        flags = {flag: flag in i.problem.flags for flag in FLAGS}
        launch = prepare_scaled_gemm(rows, n, i.x.shape[1], groups, config, i.device.sm_count, **flags)
        launch((i.x, i.w, i.x_scale, i.w_scale, i.out, entries))
        return i.out

    def reference(self, inputs: Inputs) -> torch.Tensor:
        """Return the correct output in float32, computed by PyTorch."""
        from .quantize import dequantized_weight, dequantized_x

        granularity, i = granularity_of(inputs.problem), inputs
        x = dequantized_x(i.x, i.x_scale, granularity)
        if i.group_sizes is None:
            return x @ dequantized_weight(i.w, i.w_scale, granularity).T
        out = i.out.float().fill_(float("nan"))
        start = 0
        for group, size in enumerate(i.group_sizes.tolist()):
            if size:
                w = dequantized_weight(
                    i.w[group], i.w_scale[group : group + 1].reshape(i.w_scale.shape[1:]), granularity
                )
                out[start : start + size] = x[start : start + size] @ w.T
            start += size
        return out

    def compile(self, config: KernelConfig, problem: Problem) -> Any:
        """Compile the kernel of a config, and return its binary."""
        from .triton_kernels.launches import compile_scaled_gemm

        flags = {flag: flag in problem.flags for flag in FLAGS}
        return compile_scaled_gemm(config, grouped="groups" in self.dims, **flags)


class ScaledGemm(ScaledGemmFamily):
    """The family of dense fp8 products: y = x @ w.T with x (m, k) and w (n, k) in e4m3, times their scales, in bf16.

    >>> from foretune.datasets import DeviceSpec
    >>> family, h200 = ScaledGemm(), DeviceSpec.named("h200")
    >>> problem = Problem.of(family.name, dtype="fp8e4m3", flags=("blockwise",), m=4096, n=7168, k=2048)
    >>> family.supports(family.default(problem, h200), problem, h200) is None
    True
    """

    name = "scaled_gemm"
    values = values_of(name)
    dims = ("m", "n", "k")
    rows = "m"
    largest: ClassVar[Mapping[str, int]] = {"m": MOST_ROWS, "n": MOST_COLUMNS, "k": MOST_COLUMNS}
    bucketed = ("m",)
    independent = ("m",)
    dims_from: ClassVar[Mapping[str, tuple[str, int]]] = {"m": ("rows", 1), "n": ("N16", 16), "k": ("K16", 16)}
    also_needed = ("groups",)  # which is 1 here

    def draw(self, models: Path | str | None, max_tflop: float | None, **drawn: Any) -> tuple[Case, ...]:
        """Draw the problems that `cases` returns for these arguments: layers of models, and random shapes."""
        draws, dense = Draws(max_tflop, **drawn), load_dense_models(models)
        return workload.draw_dense(self.name, dense, draws, with_deepseek=models is None)

    def check_problem(self, config: KernelConfig, problem: Problem) -> Problem:
        """Return a small problem, with no size a multiple of a block size, to check a config's results on."""
        # Multiples of no block: M = 256 + 37, N = 256 + 144, and K = 8 x 128 + 80, more steps than there are stages.
        return Problem.of(self.name, dtype=problem.dtype_name, flags=problem.flags, m=293, n=400, k=1104)


class ScaledGroupedGemmForward(MeasuredOverGroups, ScaledGemmFamily):
    """The family of grouped fp8 products: y[rows of e] = x[rows of e] @ w[e].T in e4m3, times the scales, in bf16.

    x (rows, K) is sorted by group, and w is (groups, N, K). dX is the same kernel on w's transpose: blocks of 128x128
    and their scales, and one scale per tensor, transpose unchanged. dW sums over rows and so needs other scales:
    `ScaledGroupedGemmDW` is its family.

    >>> from foretune.datasets import DeviceSpec
    >>> family, h200 = ScaledGroupedGemmForward(), DeviceSpec.named("h200")
    >>> problem = Problem.of(family.name, dtype="fp8e4m3", flags=("blockwise",), groups=256, rows=8192, n=4096, k=7168)
    >>> family.supports(family.default(problem, h200), problem, h200) is None
    True
    """

    name = "scaled_grouped_gemm_fwd"
    values = values_of(name)
    rows = "rows"
    dims_from: ClassVar[Mapping[str, tuple[str, int]]] = {
        "rows": ("rows", 1),
        "groups": ("groups", 1),
        "n": ("N16", 16),
        "k": ("K16", 16),
    }
    off_blocks = (400, 1104)  # as in ScaledGemm.check_problem

    def draw(self, models: Path | str | None, max_tflop: float | None, **drawn: Any) -> tuple[Case, ...]:
        """Draw the problems that `cases` returns for these arguments: layers of models, and random shapes."""
        return workload.draw_grouped(self.name, load_models(models), Draws(max_tflop, **drawn))
