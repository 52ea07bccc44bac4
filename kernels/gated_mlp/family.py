"""The gated MLP as a family: what predicting and pruning need. Imports neither torch nor triton."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ...datasets import BinaryFacts, DeviceSpec, Family, ForetuneError, KernelConfig, Problem, dtype_of_tensor
from ...datasets.feature_groups import FeatureGroup, stacked
from ..config_limits import TMA_ARCHS, too_much_smem
from .features import FEATURE_NAMES, FLAGS, feature_groups, feature_table, moved_bytes
from .space import SPACE, VALUES, full_space, smem_bytes, wrong_tile

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: What the gate goes through; each but the first is a flag of a problem.
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
#: Rows, columns and depth are 32 bits on the device.
MOST_ROWS, MOST_COLUMNS = 2**30, 2**30


class GatedMlpFamily(Family):
    """What predicting needs of h (m, n) = act(x @ gate.T) * (x @ up.T), with x (m, k) and one weight (2 n, k).

    Flags of a problem: "gelu" or "gelu_tanh" (silu without one), and "saves", where gate and up are stored for the
    backward pass.
    """

    name = "gated_mlp"
    dims = ("m", "n", "k")
    dtypes = ("bf16", "fp16", "fp32")
    flags = FLAGS
    knobs = tuple(SPACE)
    largest: ClassVar[Mapping[str, int]] = {"m": MOST_ROWS, "n": MOST_COLUMNS, "k": MOST_COLUMNS}
    ragged: ClassVar[Mapping[str, str]] = {}
    bucketed = ("m",)
    feature_names = FEATURE_NAMES

    def space(self, device: DeviceSpec | None = None) -> tuple[KernelConfig, ...]:
        space = full_space()
        return space if device is None else tuple(c for c in space if self._device_limit(c, 2, device) is None)

    def supports(self, config: KernelConfig, problem: Problem, device: DeviceSpec) -> str | None:
        if (wrong := VALUES.wrong(config.to_json())) is not None:
            return wrong
        if problem.dtype not in self.dtypes:
            return f"dtype {problem.dtype_name} is not one of {', '.join(self.dtypes)}"
        if unknown := [flag for flag in problem.flags if flag not in FLAGS]:
            return f"flag {unknown[0]} is not one of {', '.join(FLAGS)}"
        if {"gelu", "gelu_tanh"} <= set(problem.flags):
            return "gelu and gelu_tanh exclude each other"
        if (reason := wrong_widths(problem["n"], problem["k"])) is not None:
            return reason
        if (wrong := wrong_tile(config, problem.dtype_name)) is not None:
            return wrong
        return self._device_limit(config, problem.itemsize, device)

    def _device_limit(self, config: KernelConfig, itemsize: int, device: DeviceSpec) -> str | None:
        """The reason why the device cannot run the config for any problem, or None."""
        if config["TMA"] and device.arch not in TMA_ARCHS and device.backend != "cpu":  # the interpreter has it
            return f"TMA cannot be 1: {device.arch} has none"
        return too_much_smem(smem_bytes(config, itemsize, device.arch), device)

    def flops(self, problem: Problem) -> float:
        return 4.0 * problem["m"] * problem["n"] * problem["k"]

    def bytes(self, problem: Problem) -> float:
        return moved_bytes(problem)

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

        table = feature_table(problem, device, configs)
        return table[:, FEATURE_NAMES.index("roofline_us")].astype(np.float64)

    def problem_from_call(self, arguments: Mapping[str, Any]) -> Problem:
        needed = ("x_ptr", "M", "N8", "K8", "ACTIVATION")
        if missing := [name for name in needed if name not in arguments]:
            raise ForetuneError(f"the call has no argument {', '.join(missing)}: {self.name} needs {', '.join(needed)}")
        return Problem.of(
            self.name,
            dtype=dtype_of_tensor("x_ptr", arguments["x_ptr"]),
            flags=flags_of(arguments["ACTIVATION"], arguments.get("saved_ptr") is not None),
            m=int(arguments["M"]),
            n=8 * int(arguments["N8"]),
            k=8 * int(arguments["K8"]),
        )


def flags_of(activation: str, saves: bool) -> tuple[str, ...]:
    """The flags of a problem. Raises `ForetuneError` for an activation that there is not.

    >>> flags_of("gelu", saves=True)
    ('gelu', 'saves')
    """
    if activation not in ACTIVATIONS:
        raise ForetuneError(f"activation must be one of {', '.join(ACTIVATIONS)} but is {activation!r}")
    return (*(activation,) * (activation != ACTIVATIONS[0]), *("saves",) * saves)


def activation_of(problem: Problem) -> str:
    """The inverse of `flags_of`."""
    return next((flag for flag in problem.flags if flag in ACTIVATIONS), ACTIVATIONS[0])


def wrong_widths(n: int, k: int) -> str | None:
    """The reason why the kernel does not take such widths, or None."""
    if n % 8 or k % 8 or min(n, k) < 8:
        return f"N and K must be multiples of 8, and 8 at least, but are {n} and {k}"
    return None
