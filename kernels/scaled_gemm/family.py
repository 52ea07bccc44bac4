"""The scaled GEMMs as families: what predicting and pruning need. Imports neither torch nor triton."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ...datasets import BinaryFacts, DeviceSpec, Family, ForetuneError, KernelConfig, Problem, dtype_of_tensor
from ...datasets.feature_groups import FeatureGroup
from ..config_limits import TMA_ARCHS, no_consumers, too_much_smem
from ..grouped_gemm.family import MOST_COLUMNS, MOST_GROUPS, MOST_ROWS
from ..grouped_gemm.group_sizes import likely_problems
from .features import FEATURE_NAMES, estimated_us, feature_groups, feature_table
from .scales import BLOCKWISE, FLAGS, ROWWISE, SCALED, TENSORWISE, kind_of
from .space import KNOBS, Ranges, full_space, smem_bytes, values_of, wrong_tile

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: Of both operands; the output is bf16.
DTYPE = "fp8e4m3"
#: Archs whose compiler multiplies e4m3 as NVIDIA, ARM and Intel have it. (MI300X has another one, fp8e4m3fnuz.)
FP8_ARCHS = ("sm_89", "sm_90", "sm_100", "sm_103", "sm_120")
#: N and K are multiples of so many: rows of 16 bytes, which TMA and cuBLAS want too, of operands and their transposes.
STEP = 16
#: How likely which routing is held to be, as grouped_gemm holds it.
_LIKELY = {"uniform": 0.4, "balanced": 0.2, "zipf": 0.4}


class ScaledGemmFamily(Family):
    """What predicting and pruning need, dense and grouped.

    y = (x @ w.T) in fp8, times the scales of x and w, in bf16. Flags of a problem: "rowwise" (a scale for each row of x
    and of w) or "blockwise" (one for each 1x128 of x and each 128x128 of w); without one there is one a tensor.
    """

    dtypes = (DTYPE,)
    flags = FLAGS
    knobs = KNOBS
    default_knobs: ClassVar[Mapping[str, Any]] = {"CONSUMERS": 0}
    feature_names = FEATURE_NAMES
    rows: ClassVar[str]  # the dimension that is x's rows

    def space(self, device: DeviceSpec | None = None, **ranges: Sequence[int]) -> tuple[KernelConfig, ...]:
        """Every config worth declaring; with a device, those that some problem on it supports.

        `ranges` replace the values of a knob: block_m, block_n, block_k, num_warps, num_stages, programs_per_sm,
        split_k, consumers.

        >>> from foretune.kernels import find_family
        >>> len(find_family("scaled_gemm").space(DeviceSpec.named("h200"), block_m=[64])) > 10
        True
        """
        space = full_space(Ranges.of(**ranges), "groups" in self.dims)
        return space if device is None else tuple(c for c in space if _device_limit(c, device, TENSORWISE) is None)

    def supports(self, config: KernelConfig, problem: Problem, device: DeviceSpec) -> str | None:
        if (wrong := values_of(self.name).wrong(config.to_json())) is not None:
            return wrong
        if problem.dtype != DTYPE:
            return f"dtype {problem.dtype_name} is not {DTYPE}, which both operands must be"
        if unknown := [flag for flag in problem.flags if flag not in FLAGS]:
            return f"flag {unknown[0]} is not one of {', '.join(FLAGS)}"
        if len(problem.flags) > 1:
            return f"scales cannot be {ROWWISE} and {BLOCKWISE} at once"
        n, k = problem["n"], problem["k"]
        if min(n, k, _groups(problem)) < 1:
            return f"groups, N and K must be >= 1 but are {_groups(problem)}, {n} and {k}"
        if n % STEP or k % STEP:
            return f"N and K must be multiples of {STEP} but are {n} and {k}"
        if (wrong := wrong_tile(config)) is not None:
            return wrong
        if "groups" in self.dims:
            if config["SPLIT_K"] > 1:
                return f"SPLIT_K cannot be {config['SPLIT_K']} with groups: 1"
            if config["CONSUMERS"] == 3:
                return "CONSUMERS cannot be 3 with groups, whose tiles have a power of two of rows: 0 or 2"
        if config["CONSUMERS"] and SCALED % config["BLOCK_N"] and BLOCKWISE in problem.flags:
            return f"BLOCK_N cannot be {config['BLOCK_N']} with CONSUMERS and {BLOCKWISE} scales: a divisor of {SCALED}"
        return _device_limit(config, device, kind_of(problem))

    def supports_by(self, problem: Problem) -> Hashable:
        n, k = problem["n"], problem["k"]
        return problem.dtype, problem.flags, min(n, k, _groups(problem)) < 1, n % STEP, k % STEP

    def features(
        self,
        problem: Problem,
        device: DeviceSpec,
        configs: Sequence[KernelConfig],
        binaries: Mapping[KernelConfig, BinaryFacts] | None = None,
    ) -> NDArray[np.float32]:
        return feature_table(problem, self.rows, device, configs)

    def feature_groups(
        self,
        problems: Sequence[Problem],
        device: DeviceSpec,
        configs: Sequence[KernelConfig],
        binaries: Mapping[KernelConfig, BinaryFacts] | None = None,
    ) -> Sequence[FeatureGroup]:
        return feature_groups(problems, self.rows, device, configs)

    def estimate_us(self, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]) -> NDArray[np.float64]:
        import numpy as np

        if not len(configs):
            return np.empty(0)
        return estimated_us(feature_table(problem, self.rows, device, configs))

    def problem_from_call(self, arguments: Mapping[str, Any]) -> Problem:
        missing = [name for name in ("x_ptr", "rows", "groups", "N16", "K16") if name not in arguments]
        if missing:
            raise ForetuneError(
                f"the call has no argument {', '.join(missing)}: a kernel with other parameter names than "
                f"{self.name}'s needs prune(..., problem=a function of the arguments)"
            )
        dims = {self.rows: "rows", "n": "N16", "k": "K16"} | ({"groups": "groups"} if "groups" in self.dims else {})
        sizes = {dim: int(arguments[name]) * (16 if name.endswith("16") else 1) for dim, name in dims.items()}
        return Problem.of(
            self.name,
            dtype=dtype_of_tensor("x_ptr", arguments["x_ptr"]),
            flags=tuple(flag for flag in FLAGS if arguments.get(flag.upper())),
            ragged=None,
            **sizes,
        )


class ScaledGemmDense(ScaledGemmFamily):
    """x (m, k), w (n, k), y (m, n)."""

    name = "scaled_gemm"
    dims = ("m", "n", "k")
    rows = "m"
    largest: ClassVar[Mapping[str, int]] = {"m": MOST_ROWS, "n": MOST_COLUMNS, "k": MOST_COLUMNS}
    ragged: ClassVar[Mapping[str, str]] = {}
    bucketed = ("m",)


class ScaledGemmGrouped(ScaledGemmFamily):
    """x (rows, k) sorted by group, w (groups, n, k), y (rows, n)."""

    name = "scaled_grouped_gemm_fwd"
    dims = ("groups", "rows", "n", "k")
    rows = "rows"
    largest: ClassVar[Mapping[str, int]] = {
        "groups": MOST_GROUPS,
        "rows": MOST_ROWS,
        "n": MOST_COLUMNS,
        "k": MOST_COLUMNS,
    }
    ragged: ClassVar[Mapping[str, str]] = {"rows": "groups"}
    bucketed = ("rows",)

    def likely(self, problem: Problem) -> Sequence[tuple[float, Problem]]:
        """Several routings where the group sizes are unknown: how many tiles ragged rows make depends on them."""
        return likely_problems(problem, _LIKELY)


def _groups(problem: Problem) -> int:
    return dict(problem.dims).get("groups", 1)


def _device_limit(config: KernelConfig, device: DeviceSpec, kind: str) -> str | None:
    """The reason why the device cannot run the config for any problem of that kind, or None."""
    interpreted = device.backend == "cpu"
    if device.arch not in FP8_ARCHS and not interpreted:
        return f"{device.arch} has no products of {DTYPE}; {', '.join(FP8_ARCHS)} have"
    if device.arch not in TMA_ARCHS and not interpreted and (config["TMA_LOAD"] or config["TMA_STORE"]):
        return f"{'TMA_LOAD' if config['TMA_LOAD'] else 'TMA_STORE'} cannot be 1: {device.arch} has no TMA"
    if (reason := no_consumers(config, device)) is not None:
        return reason
    return too_much_smem(smem_bytes(config, device, kind), device)
