"""dW in fp8 as a family: prediction, pruning and measurement.

torch and triton are imported when they are needed; prediction needs neither.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ...datasets import Case, DeviceSpec, KernelConfig, Problem
from ...datasets.family import KernelChange
from ..config_limits import TMA_ARCHS, Knobs, why_no_gluon
from ..gemm_family import BANDS_AND_PROGRAMS, Binaries, Configs, Groups, saved_by_descriptors, seeded
from ..grouped_gemm.family import DW_KERNELS, UNIFORM, MeasuredOverGroups
from ..grouped_gemm.features import group_sizes_of
from ..grouped_gemm.space import chunk_rows
from ..numerics import instruction_of
from ..workloads import Draws, load_models
from . import workload
from .family import FP8Family
from .features import DW_FEATURES, dw_feature_groups
from .space import BLOCKWISE, DTYPE, DW_KNOBS, DW_VALUES, SCALED, dw_smem_bytes, full_dw_space, wrong_dw_tile

if TYPE_CHECKING:
    import torch

    from ..grouped_gemm.triton_kernels.tiles import TileMap


@dataclass(frozen=True)
class DWInputs:
    """The tensors of one launch of dW (the gradient of w) in fp8, on the device."""

    dy: torch.Tensor  # (N, 128 * blocks) fp8, transposed; see `both_ways`
    x: torch.Tensor  # (K, 128 * blocks) fp8
    dy_scale: torch.Tensor
    x_scale: torch.Tensor
    out: torch.Tensor  # (groups, N, K) bf16, filled with NaN
    group_sizes: torch.Tensor  # (groups,) int32
    tile_map: TileMap
    problem: Problem
    device: DeviceSpec


class ScaledGroupedGemmDW(MeasuredOverGroups, FP8Family):
    """The family of w's gradient in fp8, dw[e] = dy[rows of e].T @ x[rows of e], in bf16.

    dy (rows, N) and x (rows, K) are sorted by group, and dw is (groups, N, K), zero for empty groups. Both operands are
    transposed copies, quantized along the rows: with the flag "blockwise" there is one scale per column of every 128
    rows of a group, otherwise one per column of a group. The dtype is that of x; dy may be e5m2, which takes as long.

    >>> from foretune.datasets import DeviceSpec
    >>> family, h200 = ScaledGroupedGemmDW(), DeviceSpec.named("h200")
    >>> problem = Problem.of(family.name, dtype="fp8e4m3", flags=("blockwise",), groups=32, rows=65536, n=4096, k=7168)
    >>> family.supports(family.default(problem, h200), problem, h200) is None
    True
    """

    name = "scaled_grouped_gemm_dw"
    dtypes = (DTYPE,)
    flags = (BLOCKWISE,)
    knobs, values = DW_KNOBS, DW_VALUES
    feature_names = DW_FEATURES
    independent: ClassVar[tuple[str, ...]] = ()  # it sums over the rows
    routings = UNIFORM  # the number of tiles hardly depends on the routing
    dtype_argument = "x_ptr"
    dims_from: ClassVar[Mapping[str, tuple[str, int]]] = {
        "rows": ("rows", 1),
        "groups": ("groups", 1),
        "n": ("N16", 16),
        "k": ("K16", 16),
    }
    least_elements = False
    # Rounding the sum to bf16; see `ScaledGemmFamily.tolerances`.
    tolerances: ClassVar[Mapping[str, float]] = {DTYPE: 4e-3}
    launch_knobs = BANDS_AND_PROGRAMS
    kernel_modules = (
        *DW_KERNELS,
        *(f"scaled_gemm.triton_kernels.{name}" for name in ("blocks", "dw", "specialized_dw")),
    )
    kernel_changes = (
        # Code was removed that no config ran (`specialized_dw` of the grouped GEMM).
        KernelChange("0b40afff814e8fc3+e806781e125725d1", "d65ffbd1efed4425+b477f100839ad3f5", None),
        KernelChange(
            "d65ffbd1efed4425+b477f100839ad3f5", "1e5a80951c5c21b2+e40b071609c9635b", None, saved_by_descriptors
        ),
        KernelChange("1e5a80951c5c21b2+e40b071609c9635b", "cb2725a9f50a2f0e+6541844c9d014df6", None),
        KernelChange("cb2725a9f50a2f0e+6541844c9d014df6", "17fe1ac2d7c6599b+4213f2a07b303b5b", None),
        KernelChange("17fe1ac2d7c6599b+4213f2a07b303b5b", "82a8336f3258e665+efc073a181ceeb80", None),
        # Programs get tiles from a queue: times became 1 to 4 % shorter.
        KernelChange(
            before="82a8336f3258e665+efc073a181ceeb80",
            after="1e238bfea2bb2f23+795187be35b89934",
            knobs={"CONSUMERS": 2},
            keeps_times=True,
        ),
        # Scales are loaded early, and a second buffer for what is stored: rowwise times became 9 % shorter.
        KernelChange(
            before="1e238bfea2bb2f23+795187be35b89934",
            after="8dc963b01e4d5c75+d91f4ae097faa886",
            knobs={"CONSUMERS": 2},
            keeps_times=True,
        ),
    )
    descriptors: ClassVar[Mapping[str, Sequence[int]]] = {"TMA": (0, 4)}
    off_blocks = (400, 656)  # multiples of no block size

    def full_space(self) -> tuple[KernelConfig, ...]:
        """Return every config worth measuring, for all devices."""
        return full_dw_space()

    def elements_of(self, problem: Problem) -> bool:
        """Return the property of a problem that decides its shared memory: whether its scales are blockwise."""
        return BLOCKWISE in problem.flags

    def smem_bytes(self, config: Knobs, elements: Any, device: DeviceSpec) -> int:
        """Return the shared memory of one program, in bytes; `elements` is whether scales are blockwise."""
        return dw_smem_bytes(config, elements)

    def wrong_pair(self, config: KernelConfig, problem: Problem) -> str | None:
        """Return why a config cannot run a problem on any device, or None."""
        if config["CONSUMERS"] and config["IN_FLIGHT"] > 1 and BLOCKWISE not in problem.flags:
            why = "registers hold the scales of rows and columns"
            return f"IN_FLIGHT must be 1 without {BLOCKWISE} scales but is {config['IN_FLIGHT']}: {why}"
        return wrong_dw_tile(config)

    def numerics(self, config: KernelConfig, problem: Problem) -> Hashable:
        """Return the class of configs with identical bits: the instruction, as all add steps of 128 in float32."""
        return instruction_of(config["BLOCK_M"], config.num_warps)

    def grouped_features(
        self, problems: Sequence[Problem], device: DeviceSpec, configs: Configs, binaries: Binaries | None
    ) -> Groups:
        """Return the features of problems with the same dtype and flags, grouped by what the columns depend on."""
        return dw_feature_groups(problems, device, configs)

    def draw(self, models: Path | str | None, max_tflop: float | None, **drawn: Any) -> tuple[Case, ...]:
        """Draw the problems that `cases` returns for these arguments: layers of models, and random shapes."""
        cases = workload.draw_grouped(self.name, load_models(models), Draws(max_tflop, **drawn))
        # Layers with one scale per tensor have one scale per column of a group here.
        kept = [tuple(flag for flag in case.problem.flags if flag in self.flags) for case in cases]
        return tuple(
            replace(case, problem=replace(case.problem, flags=flags)) for case, flags in zip(cases, kept, strict=True)
        )

    def bytes(self, problem: Problem) -> float:
        """Return the minimum number of bytes that a problem must read and write."""
        rows, n, k, groups = (problem[dim] for dim in ("rows", "n", "k", "groups"))
        scales = 4 * (-(-rows // SCALED) if BLOCKWISE in problem.flags else groups)
        return float(2 * groups * n * k + (rows + scales) * (n + k))

    def default(self, problem: Problem, device: DeviceSpec) -> KernelConfig:
        """Return the config to run when nothing was measured or predicted."""
        if device.arch == "sm_90" and device.backend != "cpu" and why_no_gluon() is None:
            return KernelConfig.of(
                BLOCK_M=128,
                BLOCK_N=128,
                BLOCK_K=SCALED,
                GROUP_M=8,
                PROGRAMS_PER_SM=1,
                TMA=1,
                CONSUMERS=2,
                IN_FLIGHT=2 if BLOCKWISE in problem.flags else 1,
                num_warps=4,
                num_stages=5,
            )
        # 4 stages of (128 + 128) x 128, scales and an output tile; smaller SMs have 2 of a smaller tile.
        roomy = device.smem_per_block_bytes >= 192 * 1024
        return KernelConfig.of(
            BLOCK_M=128 if roomy else 64,
            BLOCK_N=128,
            BLOCK_K=SCALED,
            GROUP_M=8,
            PROGRAMS_PER_SM=1,
            TMA=int(device.arch in TMA_ARCHS),
            CONSUMERS=0,
            IN_FLIGHT=1,
            num_warps=8 if roomy else 4,
            num_stages=4 if roomy else 2,
        )

    def inputs(self, problem: Problem, device: DeviceSpec, *, seed: int = 0) -> DWInputs:
        """Return random tensors of a problem on a device, quantized, with the output filled with NaN."""
        import torch

        from ..grouped_gemm.triton_kernels.tiles import TileMap
        from .triton_kernels.both_ways import quantize_both_ways

        where, generator = seeded(device, seed)
        rows, n, k, groups = (problem[dim] for dim in ("rows", "n", "k", "groups"))
        sizes = torch.tensor(group_sizes_of(problem), dtype=torch.int32, device=where)
        tile_map = TileMap.build(sizes, rows, chunk_rows(rows, n, k, device.sm_count))

        def operand(columns: int) -> tuple[torch.Tensor, torch.Tensor]:
            made = torch.randn((rows, columns), generator=generator, device=where, dtype=torch.bfloat16)
            fp8, blockwise = torch.float8_e4m3fn, BLOCKWISE in problem.flags
            return quantize_both_ways(made, tile_map, fp8, blockwise=blockwise, with_rows=False)[2:]

        dy, dy_scale = operand(n)
        x, x_scale = operand(k)
        out = torch.full((groups, n, k), float("nan"), dtype=torch.bfloat16, device=where)
        return DWInputs(dy, x, dy_scale, x_scale, out, sizes, tile_map, problem, device)

    def launch(self, inputs: DWInputs, config: KernelConfig) -> torch.Tensor:
        """Launch the kernels with a config, and return the output without waiting for it."""
        from .triton_kernels.launches import prepare_scaled_dw

        i = inputs
        of_map = i.tile_map
        _, n, k = i.out.shape
        blockwise = BLOCKWISE in i.problem.flags
        run = prepare_scaled_dw(
            of_map.rows,
            of_map.groups,
            of_map.chunk_rows,
            n,
            k,
            config,
            i.device.sm_count,
            blockwise=blockwise,
            gradient=i.dy.dtype,
        )
        run((i.dy, i.x, i.dy_scale, i.x_scale, i.out, of_map.entries))
        return i.out

    def reference(self, inputs: DWInputs) -> torch.Tensor:
        """Return the correct output in float32, computed by PyTorch."""
        import torch

        from .quantize import dequantized_columns

        i, blockwise = inputs, BLOCKWISE in inputs.problem.flags
        out = torch.zeros(i.out.shape, device=i.out.device)
        start = 0
        for group, size in enumerate(i.group_sizes.tolist()):
            place = start, size, group, blockwise
            out[group] = dequantized_columns(i.dy, i.dy_scale, *place) @ dequantized_columns(i.x, i.x_scale, *place).T
            start += size
        return out

    def compile(self, config: KernelConfig, problem: Problem) -> Any:
        """Compile the kernel of a config, and return its binary."""
        from .triton_kernels.launches import compile_scaled_dw

        return compile_scaled_dw(config, blockwise=BLOCKWISE in problem.flags)
