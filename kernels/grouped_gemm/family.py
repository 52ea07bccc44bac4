"""The grouped GEMMs as families: what predicting and pruning need. Imports neither torch nor triton.

What all three variants share is here once; what tells them apart is in `Variant`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from ...datasets import Case, DeviceSpec, Family, KernelConfig, Problem
from ..config_limits import WITHOUT_CONSUMERS, Knobs
from ..gemm_family import Binaries, Configs, GemmFamily, Groups, MeasuredFamily
from .features import feature_groups, feature_names
from .group_sizes import likely_problems
from .space import Ranges, full_space, knobs_of, smem_bytes, values_of, wrong_tile
from .variants import DW, PERMUTATIONS, Variant

DTYPES = ("bf16", "fp16", "fp32")
#: Ten times as many groups as any model has experts.
MOST_GROUPS = 65536
#: Row numbers are 32 bits on the device, and a TMA descriptor of ragged rows takes one bit more.
MOST_ROWS = 2**30 - 1
#: N and K are 32 bits there.
MOST_COLUMNS = 2**31 - 1
#: How likely each routing is taken to be: as in the workload, whose hot one counts as zipf's.
_LIKELY, _UNIFORM = {"uniform": 0.4, "balanced": 0.2, "zipf": 0.4}, {"uniform": 1.0}


class OverGroups(Family):
    """A product of rows that are sorted by group, with a matrix of weights (n, k) for each group."""

    dims = ("groups", "rows", "n", "k")
    largest: ClassVar[Mapping[str, int]] = {
        "groups": MOST_GROUPS,
        "rows": MOST_ROWS,
        "n": MOST_COLUMNS,
        "k": MOST_COLUMNS,
    }
    ragged: ClassVar[Mapping[str, str]] = {"rows": "groups"}
    bucketed = ("rows",)
    #: How likely each routing is where it is unknown: how many tiles ragged rows make depends on it.
    routings: Mapping[str, float] = _LIKELY

    def likely(self, problem: Problem) -> Sequence[tuple[float, Problem]]:
        return likely_problems(problem, self.routings)


class MeasuredOverGroups(OverGroups, MeasuredFamily):
    """Such a product, drawn and checked."""

    #: N and K that are off every block.
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
        drawn = {"tokens": tokens, "per_layer": per_layer, "random": random, "invented": invented, "seed": seed}
        return self.draw(models, max_tflop, **drawn)

    def check_problem(self, config: KernelConfig, problem: Problem) -> Problem:
        # Groups of 0 and 1 row, and one over every BLOCK_M.
        sizes = (37, 0, 1, 300, 0, 16, 129, 5)
        n, k = self.off_blocks
        dims = {"groups": len(sizes), "rows": sum(sizes), "n": n, "k": k}
        flags, dtype = problem.flags, problem.dtype_name
        return Problem.of(self.name, dtype=dtype, flags=flags, ragged={"rows": sizes}, **dims)


class GroupedGemmFamily(OverGroups, GemmFamily):
    """What predicting and pruning need, for all three variants.

    Problems have the LAYER's dimensions: w is (groups, n, k) in all three. Flags of a problem: "permute_x" (the layer
    gathers the rows of x while loading) or "permute_y" (it scatters the rows of y while storing); see `Variant` for
    what each means in the backward pass.
    """

    variant: ClassVar[Variant]
    dtypes = DTYPES
    flags = PERMUTATIONS
    default_knobs: ClassVar[Mapping[str, Any]] = WITHOUT_CONSUMERS

    def __init__(self) -> None:
        variant = self.variant
        self.name = variant.name  # type: ignore[misc]
        self.knobs = knobs_of(variant)  # type: ignore[misc]
        self.feature_names = feature_names(variant)  # type: ignore[misc]
        self.tma = variant.tma
        self.dtype_argument = variant.dtype_argument  # type: ignore[misc]
        n, k = variant.kernel_n_k
        self.dims_from = {"rows": ("rows", 1), "groups": ("groups", 1), n: ("N8", 8), k: ("K8", 8)}  # type: ignore[misc]
        if variant is DW:  # whose tiles do not depend on the routing
            self.routings = _UNIFORM

    def wrong_knobs(self, knobs: Mapping[str, Any]) -> str | None:
        return values_of(self.variant).wrong(knobs)

    def full_space(self) -> tuple[KernelConfig, ...]:
        return full_space(self.variant.first_of_kernel, Ranges.of(self.variant))

    def space(self, device: DeviceSpec | None = None, **ranges: Sequence[int]) -> tuple[KernelConfig, ...]:
        """Every config worth declaring; with a device, those that some problem on it supports.

        `ranges` replace the values of a knob: block_m, block_n, block_k, num_warps, num_stages, tma (0 and 1),
        consumers (0 and 2).

        >>> from foretune.kernels import find_family
        >>> len(find_family("grouped_gemm_fwd").space(DeviceSpec.named("h200"), block_m=[64], tma=[1])) > 10
        True
        """
        if not ranges:
            return super().space(device)
        space = full_space(self.variant.first_of_kernel, Ranges.of(self.variant, **ranges))
        return space if device is None else self.able(space, device)

    def smem_bytes(self, config: Knobs, elements: Any, device: DeviceSpec) -> int:
        return smem_bytes(self.variant, config, elements, device)

    def wrong_problem(self, problem: Problem) -> str | None:
        if len(problem.flags) > 1:
            return "permute_x and permute_y cannot both be fused into one GEMM"
        if min(problem["groups"], problem["n"], problem["k"]) < 1:
            return f"groups, N and K must be >= 1 but are {problem['groups']}, {problem['n']} and {problem['k']}"
        if problem["n"] % 8 or problem["k"] % 8:
            return f"N and K must be multiples of 8 but are {problem['n']} and {problem['k']}"
        return None

    def wrong_pair(self, config: KernelConfig, problem: Problem) -> str | None:
        for flag, knob in self.variant.permuted_by:
            if flag in problem.flags and config[knob]:
                return f"{knob}=1 with {flag}: TMA moves boxes of neighbouring rows, and these are permuted"
        return None

    def device_limit(self, config: KernelConfig, problem: Problem, device: DeviceSpec) -> str | None:
        return _wrong_size(self, config, problem.dtype_name, problem.itemsize, device)

    def supports_by(self, problem: Problem) -> Hashable:
        sizes = problem["groups"], problem["n"], problem["k"]
        return problem.dtype, problem.flags, min(sizes) < 1, problem["n"] % 8, problem["k"] % 8

    def grouped_features(
        self, problems: Sequence[Problem], device: DeviceSpec, configs: Configs, binaries: Binaries | None
    ) -> Groups:
        return feature_groups(self.variant, problems, device, configs)

    def flags_of_call(self, arguments: Mapping[str, Any]) -> Sequence[str]:
        return [flag for flag, argument in self.variant.permuting if arguments.get(argument)]


# Each choice asks whether its first configs can run, and the same ones come first again and again.
@lru_cache(maxsize=8192)
def _wrong_size(
    family: GroupedGemmFamily, config: KernelConfig, dtype: str, itemsize: int, device: DeviceSpec
) -> str | None:
    """Return why no problem of a dtype can run with a config, whose values are right, on the device, or None."""
    return wrong_tile(family.variant, config, dtype) or family.limit_of(config, itemsize, device)
