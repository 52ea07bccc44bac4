"""What the families of this folder repeat, declared once: `DeclaredFamily` for any kernel, `GemmFamily` for tiled
products, and `MeasuredFamily` for what measuring needs.

A family declares the values of its knobs, the parameters of a launch that say its problem, and which knobs mean TMA; it
says by hooks what else a config or a problem cannot be, and what its features are. Imports neither torch nor triton.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from ..datasets import (
    BinaryFacts,
    Case,
    DeviceSpec,
    Family,
    ForetuneError,
    KernelConfig,
    Measurable,
    Problem,
    dtype_of_tensor,
)
from ..datasets.feature_groups import FeatureGroup, joined, stacked
from .config_limits import Knobs, no_consumers, no_tma, too_much_smem

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

Configs: TypeAlias = Sequence[KernelConfig]
Binaries: TypeAlias = Mapping[KernelConfig, BinaryFacts]
Groups: TypeAlias = Sequence[FeatureGroup]

#: The largest relative error of a float32 sum that is rounded once: about 2^-9 (bf16) or 2^-12 (fp16) at most, less on
#: average. float32 differs by the order of the sum: sqrt(depth) roundings of 2^-24.
ROUNDED_ONCE = {"bf16": 4e-3, "fp16": 5e-4, "fp32": 1e-5}
#: `launch_knobs` of kernels that take the number of M tiles in a band and the number of programs at a launch.
BANDS_AND_PROGRAMS = {"GROUP_M": (1, 1), "PROGRAMS_PER_SM": (1, 1)}


class GroupedFeatures(Family):
    """A family whose features are computed in groups, by what they depend on."""

    def call_features(self, problem: Problem, device: DeviceSpec, configs: Configs) -> Groups:
        """Return the features of one problem, by what they depend on."""
        raise NotImplementedError

    def grouped_features(
        self, problems: Sequence[Problem], device: DeviceSpec, configs: Configs, binaries: Binaries | None
    ) -> Groups:
        """Return the features of several problems of one dtype and the same flags: of each problem alone, unless a
        family has something in common to compute once."""
        return stacked([self.call_features(problem, device, configs) for problem in problems])

    def feature_groups(
        self,
        problems: Sequence[Problem],
        device: DeviceSpec,
        configs: Sequence[KernelConfig],
        binaries: Mapping[KernelConfig, BinaryFacts] | None = None,
    ) -> Sequence[FeatureGroup]:
        return self.grouped_features(problems, device, configs, binaries)

    def features(
        self,
        problem: Problem,
        device: DeviceSpec,
        configs: Sequence[KernelConfig],
        binaries: Mapping[KernelConfig, BinaryFacts] | None = None,
    ) -> NDArray[np.float32]:
        return joined(self.grouped_features((problem,), device, configs, binaries))


class DeclaredFamily(GroupedFeatures):
    """A family that declares the values of its knobs, and what of a launch says its problem."""

    #: The kernel's parameter that has the problem's dtype.
    dtype_argument: ClassVar[str]
    #: The kernel's parameter that says a dimension, and what it is counted in.
    dims_from: ClassVar[Mapping[str, tuple[str, int]]]
    #: Parameters that a launch must have besides.
    also_needed: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def wrong_knobs(self, knobs: Mapping[str, Any]) -> str | None:
        """Return why knobs, as `KernelConfig.to_json` has them, are no config of the kernel, whatever the problem."""

    def wrong_problem(self, problem: Problem) -> str | None:
        """Return why no config runs a problem whose dtype and flags the family has, or None."""
        return None

    def wrong_pair(self, config: KernelConfig, problem: Problem) -> str | None:
        """Return why a config of the kernel cannot run a problem on any device, or None."""
        return None

    def device_limit(self, config: KernelConfig, problem: Problem, device: DeviceSpec) -> str | None:
        """Return why a device cannot run a config for any problem of this dtype and these flags, or None."""
        return None

    def refused(self, problem: Problem) -> str | None:
        """Return why no config runs a problem, or None."""
        return wrong_signature(self, problem) or self.wrong_problem(problem)

    def supports(self, config: KernelConfig, problem: Problem, device: DeviceSpec) -> str | None:
        return (
            self.wrong_knobs(config.to_json())
            or self.refused(problem)
            or self.wrong_pair(config, problem)
            or self.device_limit(config, problem, device)
        )

    def flags_of_call(self, arguments: Mapping[str, Any]) -> Sequence[str]:
        """Return the flags that a launch's arguments mean."""
        return ()

    def problem_from_call(self, arguments: Mapping[str, Any]) -> Problem:
        sizes = {dim: (name, unit) for dim, (name, unit) in self.dims_from.items()}
        needed = (self.dtype_argument, *(name for name, _ in sizes.values()), *self.also_needed)
        check_call(self, arguments, needed)
        return Problem.of(
            self.name,
            dtype=dtype_of_tensor(self.dtype_argument, arguments[self.dtype_argument]),
            flags=tuple(self.flags_of_call(arguments)),
            ragged=None,
            **{dim: unit * int(arguments[name]) for dim, (name, unit) in sizes.items()},
        )


def wrong_signature(family: Family, problem: Problem) -> str | None:
    """Return why a family has no problem of this dtype or with these flags, or None."""
    if problem.dtype not in family.dtypes:
        return f"dtype {problem.dtype_name} is not one of {', '.join(family.dtypes)}"
    if unknown := [flag for flag in problem.flags if flag not in family.flags]:
        return f"flag {unknown[0]} is not one of {', '.join(family.flags)}"
    return None


def check_call(family: Family, arguments: Mapping[str, Any], needed: Sequence[str]) -> None:
    """Check that a launch has the arguments that say its problem.

    Raises:
        ForetuneError: Some are missing; the error names them.
    """
    if missing := [name for name in needed if name not in arguments]:
        raise ForetuneError(
            f"the call has no argument {', '.join(missing)}: a kernel with other parameter names than {family.name}'s "
            "needs prune(..., problem=a function of the arguments)"
        )


class GemmFamily(DeclaredFamily):
    """A family of tiled products. Shared memory depends on config, device and `elements_of` the problem."""

    tma: tuple[str, ...] = ("TMA",)  # the knobs that mean TMA
    #: What of a problem shared memory depends on, where that takes the least.
    least_elements: ClassVar[Any] = 2
    #: The features whose largest is the analytic estimate.
    estimated_by: ClassVar[tuple[str, ...]] = ("roofline_us",)

    def elements_of(self, problem: Problem) -> Any:
        """Return what of a problem shared memory depends on: the bytes of an element, unless a family has more."""
        return problem.itemsize

    @abstractmethod
    def smem_bytes(self, config: Knobs, elements: Any, device: DeviceSpec) -> int:
        """Return the shared memory of one program."""

    def limit_of(self, config: Knobs, elements: Any, device: DeviceSpec) -> str | None:
        """Return why a device cannot run a config for any problem of such elements, or None."""
        if (reason := no_tma(config, self.tma, device)) is not None:
            return reason
        if "CONSUMERS" in self.knobs and (reason := no_consumers(config, device)) is not None:
            return reason
        return too_much_smem(self.smem_bytes(config, elements, device), device)

    def device_limit(self, config: KernelConfig, problem: Problem, device: DeviceSpec) -> str | None:
        return self.limit_of(config, self.elements_of(problem), device)

    @abstractmethod
    def full_space(self) -> tuple[KernelConfig, ...]:
        """Return every config worth declaring."""

    def space(self, device: DeviceSpec | None = None) -> tuple[KernelConfig, ...]:
        return self.full_space() if device is None else _space_of(self, device)

    def able(self, space: Sequence[KernelConfig], device: DeviceSpec) -> tuple[KernelConfig, ...]:
        """Return what of a space some problem on the device can have."""
        return tuple(config for config in space if self.limit_of(config, self.least_elements, device) is None)

    def estimate_us(self, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]) -> NDArray[np.float64]:
        import numpy as np

        if not len(configs):
            return np.empty(0)
        table = joined(self.grouped_features((problem,), device, configs, None))
        places = [self.feature_names.index(name) for name in self.estimated_by]
        estimate: NDArray[np.float64] = table[:, places].max(axis=1).astype(np.float64)
        return estimate


@lru_cache(maxsize=64)
def _space_of(family: GemmFamily, device: DeviceSpec) -> tuple[KernelConfig, ...]:
    return family.able(family.full_space(), device)


class MeasuredFamily(Measurable):
    """What measuring any family of this folder needs alike."""

    #: The largest relative error that counts as right, by dtype.
    tolerances: ClassVar[Mapping[str, float]] = ROUNDED_ONCE
    #: Knobs that are arguments of a launch, and the smallest and largest value that binaries tell apart.
    launch_knobs: ClassVar[Mapping[str, tuple[int, int]]] = {}

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
        return self.draw(models, max_tflop, tokens=tokens, per_layer=per_layer, random=random, seed=seed)

    @abstractmethod
    def draw(self, models: Path | str | None, max_tflop: float | None, **drawn: Any) -> tuple[Case, ...]:
        """Return what `cases` draws from the models of a file, the shipped ones if None, within a limit, the family's
        own if None."""

    def tolerance(self, problem: Problem) -> float:
        return self.tolerances[problem.dtype_name]

    def binary_key(self, config: KernelConfig, problem: Problem) -> Hashable:
        if not self.launch_knobs:
            return super().binary_key(config, problem)
        # No runtime integer is specialised, so one binary serves every shape and every value of these knobs.
        knobs = config.to_json()
        same = {knob: min(max(knobs[knob], low), high) for knob, (low, high) in self.launch_knobs.items()}
        return KernelConfig.from_json(knobs | same), problem.signature


def seeded(device: DeviceSpec, seed: int) -> tuple[str, torch.Generator]:
    """Return the torch device of a spec, and a generator there."""
    import torch

    where = "cpu" if device.backend == "cpu" else "cuda"
    return where, torch.Generator(where).manual_seed(seed)
