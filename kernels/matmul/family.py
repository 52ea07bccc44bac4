"""The dense GEMM as a family: what predicting and pruning need. Imports neither torch nor triton."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from ...datasets import BinaryFacts, DeviceSpec, Family, ForetuneError, KernelConfig, Problem, dtype_of_tensor
from ...datasets.feature_groups import FeatureGroup, stacked
from ..config_limits import TMA_ARCHS, WITHOUT_CONSUMERS, Knobs, no_consumers, too_much_smem
from .features import FEATURE_NAMES, feature_groups, feature_table
from .layouts import A_KM, ACTIVATIONS, B_KN, BIAS, DTYPES, FLAGS, call_dims, is_aligned
from .space import KNOBS, full_space, smem_bytes, wrong_knob

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: A tile's rows and columns are counted in 32 bits, and may reach past the end by a block.
MOST_SIZE = 2**30
#: Tiles are counted in 32 bits.
MOST_TILES = 2**31 - 1
#: 8 GiB of partial sums in float32. Where so much is to be kept there are tiles enough without cutting K; with 50 GiB
#: of them launches failed on an H200 (illegal memory accesses).
MOST_PARTIALS = 2**31 - 1


class MatmulFamily(Family):
    """y[i] = activation(a[i] @ b[i] + bias) for i < batch: a (M, K), b (K, N), y (M, N).

    A problem without flags is a linear layer's product, x (M, K) @ w.T: a is stored as (M, K) and b as (N, K), rows
    along K. Flags say what differs: "a_km" (a is stored as (K, M)), "b_kn" (b as (K, N)), "bias" (N,), and one of
    "relu", "gelu" (the exact one) and "silu". So the gradient of the layer's input, dy @ w, has "b_kn", and that of
    its weight, dy.T @ x, "a_km" and "b_kn".
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

    def space(self, device: DeviceSpec | None = None) -> tuple[KernelConfig, ...]:
        return full_space() if device is None else _space_of(device)

    def supports(self, config: KernelConfig, problem: Problem, device: DeviceSpec) -> str | None:
        knobs: Mapping[str, Any] = config.to_json()
        if (wrong := wrong_knob(knobs) or _wrong_problem(problem)) is not None:
            return wrong
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
        return device_limit(knobs, problem.itemsize, device)

    def supports_by(self, problem: Problem) -> Hashable:
        batch, m, n = problem["batch"], problem["m"], problem["n"]
        # However small the tiles: 16 x 16, in 64 parts.
        if _wrong_problem(problem) or batch * (m // 16 + 1) * (n // 16 + 1) > MOST_TILES // 64:
            return problem
        return problem.dtype, problem.flags, is_aligned(problem), min(MOST_PARTIALS // (batch * m * n), 64)

    def at_call_time(self, problem: Problem) -> Problem:
        return problem.without_sizes().rounded(*call_dims(problem))

    def features(
        self,
        problem: Problem,
        device: DeviceSpec,
        configs: Sequence[KernelConfig],
        binaries: Mapping[KernelConfig, BinaryFacts] | None = None,
    ) -> NDArray[np.float32]:
        return feature_table(problem, device, configs)

    def feature_groups(
        self,
        problems: Sequence[Problem],
        device: DeviceSpec,
        configs: Sequence[KernelConfig],
        binaries: Mapping[KernelConfig, BinaryFacts] | None = None,
    ) -> Sequence[FeatureGroup]:
        return stacked([feature_groups(problem, device, configs) for problem in problems])

    def estimate_us(self, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]) -> NDArray[np.float64]:
        import numpy as np

        if not len(configs):
            return np.empty(0)
        table = feature_table(problem, device, configs)
        return table[:, FEATURE_NAMES.index("estimate_us")].astype(np.float64)

    def problem_from_call(self, arguments: Mapping[str, Any]) -> Problem:
        needed = ("a_ptr", "batch", "M", "N", "K")
        if missing := [name for name in needed if name not in arguments]:
            raise ForetuneError(
                f"the call has no argument {', '.join(missing)}: a kernel with other parameter names than matmul's "
                "needs prune(..., problem=a function of the arguments)"
            )
        given = {A_KM: arguments.get("A_KM"), B_KN: arguments.get("B_KN"), BIAS: arguments.get("bias_ptr") is not None}
        flags = [flag for flag, is_set in given.items() if is_set]
        flags += [activation for activation in ACTIVATIONS if activation == arguments.get("ACTIVATION")]
        batch, m, n, k = (int(arguments[name]) for name in needed[1:])
        dtype = dtype_of_tensor("a_ptr", arguments["a_ptr"])
        return Problem.of(self.name, dtype=dtype, flags=tuple(flags), batch=batch, m=m, n=n, k=k)


@lru_cache(maxsize=16)
def _space_of(device: DeviceSpec) -> tuple[KernelConfig, ...]:
    """What a device runs of the space in the smallest elements."""
    return tuple(config for config in full_space() if device_limit(config, 1, device) is None)


def _wrong_problem(problem: Problem) -> str | None:
    """The reason why no config runs a problem, or None."""
    if problem.dtype not in DTYPES:
        return f"dtype {problem.dtype_name} is not one of {', '.join(DTYPES)}"
    if unknown := [flag for flag in problem.flags if flag not in FLAGS]:
        return f"flag {unknown[0]} is not one of {', '.join(FLAGS)}"
    after = [flag for flag in problem.flags if flag in (BIAS, *ACTIVATIONS)]
    if problem.dtype == "int8" and after:
        return f"int8 is summed in int32, which takes no {after[0]}"
    if len(activations := [flag for flag in after if flag != BIAS]) > 1:
        return f"one activation can follow, not {' and '.join(activations)}"
    for dim in MatmulFamily.dims:
        if not 1 <= problem[dim] <= MOST_SIZE:
            return f"{dim} must be between 1 and {MOST_SIZE} but is {problem[dim]}"
    return None


def device_limit(knobs: Knobs, itemsize: int, device: DeviceSpec) -> str | None:
    """The reason why the device cannot run the config with elements of so many bytes, or None."""
    if knobs["TMA"] and device.arch not in TMA_ARCHS and device.backend != "cpu":  # the interpreter has it
        return f"TMA cannot be {knobs['TMA']}: {device.arch} has none: 0"
    if (reason := no_consumers(knobs, device)) is not None:
        return reason
    return too_much_smem(smem_bytes(knobs, itemsize, device), device)
