"""The grouped GEMMs as families: prediction and pruning. Imports neither torch nor triton.

Everything that forward, dX and dW share is here; `Variant` holds the differences.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from ...datasets import Case, DeviceSpec, Family, KernelConfig, Problem
from ..config_limits import WITHOUT_CONSUMERS, Knobs
from ..gemm_family import Binaries, Configs, Groups, MeasuredFamily, RangedFamily
from ..numerics import instruction_of, product_class
from .features import feature_groups, feature_names
from .group_sizes import plausible_problems
from .space import (
    DW,
    PERMUTATIONS,
    Ranges,
    Variant,
    full_space,
    knobs_of,
    smem_bytes,
    values_of,
    wrong_tile,
)

DTYPES = ("bf16", "fp16", "fp32")
#: The largest number of groups that is accepted; no known model has a tenth as many experts.
MOST_GROUPS = 65536
#: The largest number of rows: row numbers have 32 bits on the device, and TMA descriptors of ragged rows use one of
#: them.
MOST_ROWS = 2**30 - 1
#: The largest N and K, which have 32 bits on the device.
MOST_COLUMNS = 2**31 - 1
#: The weight of each routing when group sizes are unknown: the workload's shares, with those of "hot" added to "zipf".
_ROUTING_SHARES, UNIFORM = {"uniform": 0.4, "balanced": 0.2, "zipf": 0.4}, {"uniform": 1.0}
#: Modules with the kernels of all products over groups, and those with dW's, for `MeasuredFamily.kernel_modules`.
KERNELS = ("warp_jobs", *(f"grouped_gemm.triton_kernels.{name}" for name in ("ragged", "ragged_boxes", "tiles")))
DW_KERNELS = (*KERNELS, "grouped_gemm.triton_kernels.dw", "grouped_gemm.triton_kernels.specialized_dw")


class OverGroups(Family):
    """Base class of families that multiply rows, sorted by group, with one weight matrix (n, k) per group."""

    dims = ("groups", "rows", "n", "k")
    largest: ClassVar[Mapping[str, int]] = {
        "groups": MOST_GROUPS,
        "rows": MOST_ROWS,
        "n": MOST_COLUMNS,
        "k": MOST_COLUMNS,
    }
    ragged: ClassVar[Mapping[str, str]] = {"rows": "groups"}
    bucketed = ("rows",)
    independent: ClassVar[tuple[str, ...]] = ("rows",)
    #: The weight of each routing when it is unknown; the number of tiles of ragged rows depends on the routing.
    routings: Mapping[str, float] = _ROUTING_SHARES

    def plausible(self, problem: Problem) -> Sequence[tuple[float, Problem]]:
        """Return (weight, problem) pairs over plausible group sizes; (1, problem) alone if the sizes are known."""
        return plausible_problems(problem, self.routings)


class MeasuredOverGroups(OverGroups, MeasuredFamily):
    """Base class of grouped families that can also be measured: it draws cases and makes a check problem."""

    #: N and K of the check problem, multiples of no block size.
    off_blocks: ClassVar[tuple[int, int]]

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
        """Return the problems to measure: layers of real models, random shapes and synthetic layers.

        The arguments are those of `Measurable.cases`.
        """
        drawn = {"tokens": tokens, "per_layer": per_layer, "random": random, "invented": invented, "seed": seed}
        return self.draw(models, max_tflop, **drawn)

    def flops(self, problem: Problem) -> float:
        """Return the number of floating-point operations of a problem."""
        return 2.0 * problem["rows"] * problem["n"] * problem["k"]

    def check_problem(self, config: KernelConfig, problem: Problem) -> Problem:
        """Return a small problem, with no size a multiple of a block size, to check a config's results on."""
        # Groups of 0 and of 1 row, and one with more rows than any BLOCK_M.
        sizes = (37, 0, 1, 300, 0, 16, 129, 5)
        n, k = self.off_blocks
        dims = {"groups": len(sizes), "rows": sum(sizes), "n": n, "k": k}
        flags, dtype = problem.flags, problem.dtype_name
        return Problem.of(self.name, dtype=dtype, flags=flags, ragged={"rows": sizes}, **dims)


class GroupedGemmFamily(OverGroups, RangedFamily):
    """Base class of the grouped GEMMs' families: all that prediction and pruning need, for all three variants.

    A problem has the dimensions of the layer: w is (groups, n, k) in all three. Flags: "permute_x" (the layer gathers
    the rows of x while loading) or "permute_y" (it scatters the rows of y while storing); `Variant` documents what each
    means in the backward pass.
    """

    variant: ClassVar[Variant]
    dtypes = DTYPES
    flags = PERMUTATIONS  # of which only one side can be permuted
    width_step = 8
    default_knobs: ClassVar[Mapping[str, Any]] = WITHOUT_CONSUMERS

    def __init__(self) -> None:
        variant = self.variant
        self.name = variant.name  # type: ignore[misc]
        self.knobs, self.values = knobs_of(variant), values_of(variant)  # type: ignore[misc]
        self.feature_names = feature_names(variant)  # type: ignore[misc]
        self.tma = variant.tma
        self.dtype_argument = variant.dtype_argument  # type: ignore[misc]
        n, k = variant.kernel_n_k
        self.dims_from = {"rows": ("rows", 1), "groups": ("groups", 1), n: ("N8", 8), k: ("K8", 8)}  # type: ignore[misc]
        if variant is DW:  # the number of dW's tiles hardly depends on the routing
            self.routings = UNIFORM
            self.independent = ()  # type: ignore[misc] # it sums over the rows

    def ranged_space(self, **ranges: Sequence[int]) -> tuple[KernelConfig, ...]:
        """Return every config worth measuring, for all devices; `ranges` replace the default values of knobs."""
        return full_space(self.variant.first_of_kernel, Ranges.of(self.variant, **ranges))

    def smem_bytes(self, config: Knobs, elements: Any, device: DeviceSpec) -> int:
        """Return the bytes of shared memory of one program; `elements` is the size of an element of x and w."""
        return smem_bytes(self.variant, config, elements, device)

    def wrong_pair(self, config: KernelConfig, problem: Problem) -> str | None:
        """Return why a config cannot run a problem on any device, or None."""
        for flag, knob in self.variant.permuted_by:
            if flag in problem.flags and config[knob]:
                return f"{knob} must be 0 with {flag}: TMA moves adjacent rows only, and these are permuted"
        return None

    def device_limit(self, config: KernelConfig, problem: Problem, device: DeviceSpec) -> str | None:
        """Return why a device cannot run a config for problems of this dtype, or None."""
        return _wrong_size(self, config, problem.dtype_name, problem.itemsize, device)

    def numerics(self, config: KernelConfig, problem: Problem) -> Hashable:
        """Return the numerics class of a config: configs of equal classes compute identical bits.

        It is the `product_class` of the tile. For dW it is the matrix instruction, and whether programs take tiles from
        a counter (CONSUMERS), because these kernels sum longer chunks of rows.
        """
        rows, warps, step = config["BLOCK_M"], config.num_warps, config["BLOCK_K"]
        if self.variant is DW:
            return "fma" if problem.dtype == "fp32" else instruction_of(rows, warps), config["CONSUMERS"] > 0
        return product_class(rows, warps, step, problem[self.variant.depth], problem.dtype_name, DTYPES)

    def grouped_features(
        self, problems: Sequence[Problem], device: DeviceSpec, configs: Configs, binaries: Binaries | None
    ) -> Groups:
        """Return the features of problems with the same dtype and flags, grouped by what the columns depend on."""
        return feature_groups(self.variant, problems, device, configs)

    def flags_of_call(self, arguments: Mapping[str, Any]) -> Sequence[str]:
        """Return the flags of the problem that a launch's arguments describe."""
        return [flag for flag, argument in self.variant.permuting if arguments.get(argument)]


# Every choice checks its first configs, and these are the same few configs again and again.
@lru_cache(maxsize=8192)
def _wrong_size(
    family: GroupedGemmFamily, config: KernelConfig, dtype: str, itemsize: int, device: DeviceSpec
) -> str | None:
    """Return why a config with valid knobs cannot run any problem of a dtype on a device, or None if it can."""
    return wrong_tile(family.variant, config, dtype) or family.limit_of(config, itemsize, device)
