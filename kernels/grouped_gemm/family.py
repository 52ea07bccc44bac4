"""The grouped GEMMs as families: what predicting and pruning need. Imports neither torch nor triton.

What all three variants share is here once; what tells them apart is in `Variant`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from ...datasets import BinaryFacts, DeviceSpec, Family, ForetuneError, KernelConfig, Problem, dtype_of_tensor
from ...datasets.feature_groups import FeatureGroup
from ..config_limits import TMA_ARCHS, WITHOUT_CONSUMERS, no_consumers, too_much_smem
from .features import FEATURE_NAMES, feature_groups, feature_names, feature_table
from .group_sizes import likely_problems
from .space import Ranges, full_space, knobs_of, smem_bytes, values_of, wrong_tile
from .variants import DW, PERMUTATIONS, Variant

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DTYPES = ("bf16", "fp16", "fp32")
#: Ten times as many groups as any model has experts.
MOST_GROUPS = 65536
#: Row numbers are 32 bits on the device, and a TMA descriptor of ragged rows takes one bit more.
MOST_ROWS = 2**30 - 1
#: N and K are 32 bits there.
MOST_COLUMNS = 2**31 - 1
#: How likely which routing is held to be: as in the workload, whose hot one counts as zipf's.
_LIKELY, _UNIFORM = {"uniform": 0.4, "balanced": 0.2, "zipf": 0.4}, {"uniform": 1.0}


class GroupedGemmFamily(Family):
    """What predicting and pruning need, for all three variants.

    Problems have the LAYER's dimensions: w is (groups, n, k) in all three. Flags of a problem: "permute_x" (the layer
    gathers the rows of x while loading) or "permute_y" (it scatters the rows of y while storing); see `Variant` for
    what each means in the backward pass.
    """

    variant: ClassVar[Variant]
    dims = ("groups", "rows", "n", "k")
    dtypes = DTYPES
    flags = PERMUTATIONS
    largest: ClassVar[Mapping[str, int]] = {
        "groups": MOST_GROUPS,
        "rows": MOST_ROWS,
        "n": MOST_COLUMNS,
        "k": MOST_COLUMNS,
    }
    ragged: ClassVar[Mapping[str, str]] = {"rows": "groups"}
    bucketed = ("rows",)
    default_knobs: ClassVar[Mapping[str, Any]] = WITHOUT_CONSUMERS

    def __init__(self) -> None:
        self.name = self.variant.name  # type: ignore[misc]
        self.knobs = knobs_of(self.variant)  # type: ignore[misc]
        self.feature_names = feature_names(self.variant)  # type: ignore[misc]

    def space(self, device: DeviceSpec | None = None, **ranges: Sequence[int]) -> tuple[KernelConfig, ...]:
        """Every config worth declaring; with a device, those that some problem on it supports.

        `ranges` replace the values of a knob: block_m, block_n, block_k, num_warps, num_stages, tma (0 and 1),
        consumers (0 and 2).

        >>> from foretune.kernels import find_family
        >>> len(find_family("grouped_gemm_fwd").space(DeviceSpec.named("h200"), block_m=[64], tma=[1])) > 10
        True
        """
        space = full_space(self.variant.first_of_kernel, Ranges.of(self.variant, **ranges))
        if device is None:
            return space
        return tuple(c for c in space if _device_limit(self.variant, c, 2, device) is None)

    def supports(self, config: KernelConfig, problem: Problem, device: DeviceSpec) -> str | None:
        if (wrong := values_of(self.variant).wrong(config.to_json())) is not None:
            return wrong
        if problem.dtype not in self.dtypes:
            return f"dtype {problem.dtype_name} is not one of {', '.join(self.dtypes)}"
        unknown = [flag for flag in problem.flags if flag not in PERMUTATIONS]
        if unknown:
            return f"flag {unknown[0]} is not one of {', '.join(PERMUTATIONS)}"
        if len(problem.flags) > 1:
            return "permute_x and permute_y cannot both be fused into one GEMM"
        if min(problem["groups"], problem["n"], problem["k"]) < 1:
            return f"groups, N and K must be >= 1 but are {problem['groups']}, {problem['n']} and {problem['k']}"
        if problem["n"] % 8 or problem["k"] % 8:
            return f"N and K must be multiples of 8 but are {problem['n']} and {problem['k']}"
        for flag, knob in self.variant.permuted_by:
            if flag in problem.flags and config[knob]:
                return f"{knob}=1 with {flag}: TMA moves boxes of neighbouring rows, and these are permuted"
        return _wrong_size(self.variant, config, problem.dtype_name, problem.itemsize, device)

    def supports_by(self, problem: Problem) -> Hashable:
        sizes = problem["groups"], problem["n"], problem["k"]
        return problem.dtype, problem.flags, min(sizes) < 1, problem["n"] % 8, problem["k"] % 8

    def features(
        self,
        problem: Problem,
        device: DeviceSpec,
        configs: Sequence[KernelConfig],
        binaries: Mapping[KernelConfig, BinaryFacts] | None = None,
    ) -> NDArray[np.float32]:
        return feature_table(self.variant, problem, device, configs)

    def feature_groups(
        self,
        problems: Sequence[Problem],
        device: DeviceSpec,
        configs: Sequence[KernelConfig],
        binaries: Mapping[KernelConfig, BinaryFacts] | None = None,
    ) -> Sequence[FeatureGroup]:
        return feature_groups(self.variant, problems, device, configs)

    def likely(self, problem: Problem) -> Sequence[tuple[float, Problem]]:
        """Several routings where the group sizes are unknown: how many tiles ragged rows make depends on them. Of dW,
        whose tiles do not, the usual one."""
        return likely_problems(problem, _UNIFORM if self.variant is DW else _LIKELY)

    def estimate_us(self, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]) -> NDArray[np.float64]:
        import numpy as np

        if not len(configs):
            return np.empty(0)
        table = feature_table(self.variant, problem, device, configs)
        return table[:, FEATURE_NAMES.index("roofline_us")].astype(np.float64)

    def problem_from_call(self, arguments: Mapping[str, Any]) -> Problem:
        needed = (self.variant.dtype_argument, "rows", "groups", "N8", "K8")
        missing = [name for name in needed if name not in arguments]
        if missing:
            raise ForetuneError(
                f"the call has no argument {', '.join(missing)}: a kernel with other parameter names than "
                f"{self.name}'s needs prune(..., problem=a function of the arguments)"
            )
        sizes = dict(zip(self.variant.kernel_n_k, (8 * int(arguments["N8"]), 8 * int(arguments["K8"])), strict=True))
        return Problem.of(
            self.name,
            dtype=dtype_of_tensor(self.variant.dtype_argument, arguments[self.variant.dtype_argument]),
            flags=tuple(flag for flag, argument in self.variant.permuting if arguments.get(argument)),
            groups=int(arguments["groups"]),
            rows=int(arguments["rows"]),
            n=sizes["n"],
            k=sizes["k"],
        )


# Each choice asks whether its first configs can run, and the same ones come first again and again.
@lru_cache(maxsize=8192)
def _wrong_size(variant: Variant, config: KernelConfig, dtype: str, itemsize: int, device: DeviceSpec) -> str | None:
    """The reason why no problem of a dtype can run with a config, whose values are right, on the device, or None."""
    return wrong_tile(variant, config, dtype) or _device_limit(variant, config, itemsize, device)


def _device_limit(variant: Variant, config: KernelConfig, itemsize: int, device: DeviceSpec) -> str | None:
    """The reason why the device cannot run the config for any problem, or None."""
    has_tma = device.arch in TMA_ARCHS or device.backend == "cpu"  # the interpreter has
    if not has_tma and (through_tma := [knob for knob in variant.tma if config[knob]]):
        return f"{through_tma[0]} cannot be 1: {device.arch} has no TMA"
    if (reason := no_consumers(config.to_json(), device)) is not None:
        return reason
    return too_much_smem(smem_bytes(variant, config, itemsize, device), device)
