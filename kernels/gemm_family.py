"""Base classes of this package's families: `DeclaredFamily`, `GemmFamily` and `MeasuredFamily`.

`DeclaredFamily` is for any kernel, `GemmFamily` for tiled products, and `MeasuredFamily` adds what measuring needs. A
family declares the values of its knobs, the launch parameters that state the problem, and the knobs that mean TMA; it
overrides hooks for further limits and for its features. Imports neither torch nor triton.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
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
from ..datasets.config import remembered
from ..datasets.feature_groups import FeatureGroup, joined, stacked
from ..runtime.launching.source_hash import hash_of_modules
from .config_limits import Knobs, KnobValues, no_consumers, no_tma, too_much_smem
from .config_table import FEATURE_TEXTS

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
#: `launch_knobs` of kernels to which GROUP_M and the number of programs are passed at launch.
BANDS_AND_PROGRAMS = {"GROUP_M": (1, 1), "PROGRAMS_PER_SM": (1, 1)}
#: How long a program waits for a TMA descriptor that it makes itself, in microseconds (one H100, `python
#: tests/kernels/descriptors_on_gpu.py`).
_DESCRIPTOR_US = 0.9
#: Columns of tiles that are loaded in two parts, each with a descriptor.
_IN_TWO = (144, 160, 192)


class GroupedFeatures(Family):
    """Base class of families whose features are computed in groups of columns.

    The columns of a group depend on the same inputs, such as the config alone, and are computed once for equal inputs.
    """

    def call_features(self, problem: Problem, device: DeviceSpec, configs: Configs) -> Groups:
        """Return the feature groups of one problem."""
        raise NotImplementedError

    def grouped_features(
        self, problems: Sequence[Problem], device: DeviceSpec, configs: Configs, binaries: Binaries | None
    ) -> Groups:
        """Return the feature groups of several problems of the same dtype and flags.

        The default computes each problem separately; a family overrides this to compute common parts once.
        """
        return stacked([self.call_features(problem, device, configs) for problem in problems])

    def feature_groups(
        self,
        problems: Sequence[Problem],
        device: DeviceSpec,
        configs: Sequence[KernelConfig],
        binaries: Mapping[KernelConfig, BinaryFacts] | None = None,
    ) -> Sequence[FeatureGroup]:
        """Return the feature groups of several problems, as `Family.feature_groups` defines them."""
        return self.grouped_features(problems, device, configs, binaries)

    def features(
        self,
        problem: Problem,
        device: DeviceSpec,
        configs: Sequence[KernelConfig],
        binaries: Mapping[KernelConfig, BinaryFacts] | None = None,
    ) -> NDArray[np.float32]:
        """Return one problem's features, (n_configs, n_features)."""
        return joined(self.grouped_features((problem,), device, configs, binaries))


class DeclaredFamily(GroupedFeatures):
    """Base class of families that declare their knobs' values and the launch parameters that state the problem."""

    feature_texts = FEATURE_TEXTS
    #: The valid values of each knob.
    values: KnobValues
    ragged: ClassVar[Mapping[str, str]] = {}
    #: The kernel's parameter whose dtype is the problem's.
    dtype_argument: ClassVar[str]
    #: For each dimension: the kernel's parameter, and the factor from its unit to elements.
    dims_from: ClassVar[Mapping[str, tuple[str, int]]]
    #: Further parameters that a launch must have.
    also_needed: ClassVar[tuple[str, ...]] = ()

    def wrong_knobs(self, knobs: Mapping[str, Any]) -> str | None:
        """Return why knobs are not a valid config of the kernel for any problem, or None.

        Args:
            knobs: The knobs as `KernelConfig.to_json` returns them.
        """
        return self.values.wrong(knobs)

    def wrong_problem(self, problem: Problem) -> str | None:
        """Return why no config can run a problem whose dtype and flags are valid, or None."""
        return None

    def wrong_pair(self, config: KernelConfig, problem: Problem) -> str | None:
        """Return why a valid config cannot run a problem on any device, or None."""
        return None

    def device_limit(self, config: KernelConfig, problem: Problem, device: DeviceSpec) -> str | None:
        """Return why a device cannot run a config for any problem of this dtype and these flags, or None."""
        return None

    def refused(self, problem: Problem) -> str | None:
        """Return why no config can run a problem, considering its dtype and flags too, or None."""
        if problem.dtype not in self.dtypes:
            return f"dtype {problem.dtype_name} is not one of {', '.join(self.dtypes)}"
        if unknown := [flag for flag in problem.flags if flag not in self.flags]:
            return f"flag {unknown[0]} is not one of {', '.join(self.flags)}"
        return self.wrong_problem(problem)

    def supports(self, config: KernelConfig, problem: Problem, device: DeviceSpec) -> str | None:
        """Return why a config cannot run a problem on a device, or None."""
        return (
            self.wrong_knobs(config.to_json())
            or self.refused(problem)
            or self.wrong_pair(config, problem)
            or self.device_limit(config, problem, device)
        )

    def flags_of_call(self, arguments: Mapping[str, Any]) -> Sequence[str]:
        """Return the flags of the problem that a launch's arguments state."""
        return ()

    def check_call(self, arguments: Mapping[str, Any], needed: Sequence[str]) -> None:
        """Check that a launch has the `needed` arguments, which state its problem.

        Raises:
            ForetuneError: Arguments are missing; the message names them.
        """
        if missing := [name for name in needed if name not in arguments]:
            raise ForetuneError(
                f"the call has no argument {', '.join(missing)}: a kernel with other parameter names than "
                f"{self.name}'s needs prune(..., problem=a function of the arguments)"
            )

    def problem_from_call(self, arguments: Mapping[str, Any]) -> Problem:
        """Return the problem that a launch's arguments state.

        Raises:
            ForetuneError: An argument is missing, or a dtype is unknown.
        """
        sizes = {dim: (name, unit) for dim, (name, unit) in self.dims_from.items()}
        needed = (self.dtype_argument, *(name for name, _ in sizes.values()), *self.also_needed)
        self.check_call(arguments, needed)
        return Problem.of(
            self.name,
            dtype=dtype_of_tensor(self.dtype_argument, arguments[self.dtype_argument]),
            flags=tuple(self.flags_of_call(arguments)),
            ragged=None,
            **{dim: unit * int(arguments[name]) for dim, (name, unit) in sizes.items()},
        )


class GemmFamily(DeclaredFamily):
    """Base class of tiled products, whose shared memory depends on config, device and `elements_of(problem)`."""

    tma: tuple[str, ...] = ("TMA",)  # the knobs that select TMA
    #: The value of `elements_of` for which shared memory is smallest.
    least_elements: ClassVar[Any] = 2
    #: The features whose maximum is the analytic estimate.
    estimated_by: ClassVar[tuple[str, ...]] = ("roofline_us",)

    def elements_of(self, problem: Problem) -> Any:
        """Return the property of a problem that decides its shared memory: the itemsize, unless overridden."""
        return problem.itemsize

    @abstractmethod
    def smem_bytes(self, config: Knobs, elements: Any, device: DeviceSpec) -> int:
        """Return the shared memory of one program in bytes; `elements` is `elements_of` the problem."""

    def limit_of(self, config: Knobs, elements: Any, device: DeviceSpec) -> str | None:
        """Return why a device cannot run a config for any problem whose `elements_of` is `elements`, or None."""
        if (reason := no_tma(config, self.tma, device)) is not None:
            return reason
        if "CONSUMERS" in self.knobs and (reason := no_consumers(config, device)) is not None:
            return reason
        return too_much_smem(self.smem_bytes(config, elements, device), device)

    def device_limit(self, config: KernelConfig, problem: Problem, device: DeviceSpec) -> str | None:
        """Return why a device cannot run a config for problems like this one, or None."""
        return self.limit_of(config, self.elements_of(problem), device)

    @abstractmethod
    def full_space(self) -> tuple[KernelConfig, ...]:
        """Return every config worth measuring, for all devices."""

    def space(self, device: DeviceSpec | None = None) -> tuple[KernelConfig, ...]:
        """Return every config worth measuring; with a device, only those that can run some problem on it."""
        return self.full_space() if device is None else _space_of(self, device)

    def able(self, space: Sequence[KernelConfig], device: DeviceSpec) -> tuple[KernelConfig, ...]:
        """Return the configs of a space that can run some problem on the device."""
        return tuple(config for config in space if self.limit_of(config, self.least_elements, device) is None)

    def estimate_us(self, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]) -> NDArray[np.float64]:
        """Return the analytic estimate of each config's time in microseconds, (n_configs,)."""
        import numpy as np

        if not len(configs):
            return np.empty(0)
        table = joined(self.grouped_features((problem,), device, configs, None))
        places = [self.feature_names.index(name) for name in self.estimated_by]
        estimate: NDArray[np.float64] = table[:, places].max(axis=1).astype(np.float64)
        return estimate


class SteppedFamily(GemmFamily):
    """Base class of tiled products; N and K must be multiples of `width_step`, and a problem has at most one flag."""

    width_step: ClassVar[int]

    def wrong_problem(self, problem: Problem) -> str | None:
        """Return why no config can run a problem, or None."""
        if len(problem.flags) > 1:
            return f"a problem cannot have both flags {' and '.join(problem.flags)}"
        n, k, groups, step = problem["n"], problem["k"], groups_of(problem), self.width_step
        if min(n, k, groups) < 1:
            return f"groups, N and K must be >= 1 but are {groups}, {n} and {k}"
        if n % step or k % step:
            return f"N and K must be multiples of {step} but are {n} and {k}"
        return None

    def supports_by(self, problem: Problem) -> Hashable:
        """Return a key: `supports` gives the same answers for two problems with equal keys."""
        n, k, step = problem["n"], problem["k"], self.width_step
        return problem.dtype, problem.flags, min(n, k, groups_of(problem)) < 1, n % step, k % step


def groups_of(problem: Problem) -> int:
    """Return the number of groups, 1 if the problem is dense."""
    return dict(problem.dims).get("groups", 1)


class RangedFamily(SteppedFamily):
    """Base class of tiled products whose space is built from ranges of values, which a caller may replace."""

    @abstractmethod
    def ranged_space(self, **ranges: Sequence[int]) -> tuple[KernelConfig, ...]:
        """Return every config worth measuring, for all devices; `ranges` replace the default values of knobs."""

    def full_space(self) -> tuple[KernelConfig, ...]:
        """Return every config worth measuring, for all devices."""
        return self.ranged_space()

    def space(self, device: DeviceSpec | None = None, **ranges: Sequence[int]) -> tuple[KernelConfig, ...]:
        """Return every config worth measuring; with a device, only those that can run some problem on it.

        Args:
            device: The GPU, or None for the whole space.
            **ranges: Values that replace those of a range, a field of `Ranges` in the family's module `space`, such as
                block_m, num_warps or consumers.

        Raises:
            ForetuneError: A range does not exist or cannot have a value.

        >>> from foretune.kernels import find_family
        >>> len(find_family("grouped_gemm_fwd").space(DeviceSpec.named("h200"), block_m=[64], tma=[1])) > 10
        True
        """
        if not ranges:
            return super().space(device)
        space = self.ranged_space(**ranges)
        return space if device is None else self.able(space, device)


@lru_cache(maxsize=64)
def _space_of(family: GemmFamily, device: DeviceSpec) -> tuple[KernelConfig, ...]:
    return family.able(family.full_space(), device)


class MeasuredFamily(Measurable):
    """Base class with the parts of `Measurable` that the families of this package share."""

    #: The modules of the kernels that a launch runs, relative to this package, for `source_hash`.
    kernel_modules: ClassVar[tuple[str, ...]] = ()
    #: The largest relative error of a correct result, by dtype.
    tolerances: ClassVar[Mapping[str, float]] = ROUNDED_ONCE
    #: Knobs that are run-time arguments of a launch, with the smallest and largest value that change the binary.
    launch_knobs: ClassVar[Mapping[str, tuple[int, int]]] = {}
    #: How many TMA descriptors a launch has, by knob and its value.
    descriptors: ClassVar[Mapping[str, Sequence[int]]] = {}

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
        """Draw problems: layers of real models, and random shapes.

        Args:
            models: A CSV file of models; the shipped one if None.
            tokens: The token counts to draw from; the family's own if None.
            per_layer: Problems per layer of each model.
            random: The number of random shapes.
            max_tflop: The largest problem, in 1e12 floating-point operations; the family's own limit if None.
            seed: The random seed.
        """
        return self.draw(models, max_tflop, tokens=tokens, per_layer=per_layer, random=random, seed=seed)

    @abstractmethod
    def draw(self, models: Path | str | None, max_tflop: float | None, **drawn: Any) -> tuple[Case, ...]:
        """Return the cases that `cases` draws; `drawn` has its other arguments.

        Args:
            models: A CSV file of models; the shipped one if None.
            max_tflop: The maximum size of a problem, in 1e12 floating-point operations; the family's own if None.
            **drawn: `tokens`, `per_layer`, `random`, `seed`, and for some families `invented`.
        """

    def tolerance(self, problem: Problem) -> float:
        """Return the maximum relative error that a correct result may have."""
        return self.tolerances[problem.dtype_name]

    def source_hash(self) -> str:
        """Return a hash of the source of all kernels that a launch runs."""
        return hash_of_modules(*(import_module(f"{__package__}.{name}") for name in self.kernel_modules))

    def binary_key(self, config: KernelConfig, problem: Problem) -> Hashable:
        """Return a key that is equal for two configs and problems if they run the same compiled binary."""
        if not self.launch_knobs:
            return super().binary_key(config, problem)
        # No run-time integer is specialized, so one binary serves every shape and every value of these knobs.
        knobs = config.to_json()
        same = {knob: min(max(knobs[knob], low), high) for knob, (low, high) in self.launch_knobs.items()}
        return KernelConfig.from_json(knobs | same), problem.signature


def saved_by_descriptors(
    family: MeasuredFamily, problem: Problem, device: DeviceSpec, configs: Configs
) -> NDArray[np.floating]:
    """Return by how many microseconds each config became faster when the host began to make TMA descriptors.

    The result is (n_configs,).

    Before, each program made its own when it began: a persistent program once, others in every round of programs.

    Args:
        family: The family; it has the knob PROGRAMS_PER_SM, 0 for programs that are not persistent, and the feature
            "log_rounds".
        problem: The problem.
        device: The device.
        configs: The configs.
    """
    import numpy as np

    of_knobs = tuple((knob, tuple(of_knob)) for knob, of_knob in family.descriptors.items())
    counts, places, in_rounds = _descriptors_of(tuple(configs), of_knobs)
    rounds = np.ones(len(counts))
    if in_rounds:
        found = family.features(problem, device, in_rounds)[:, family.feature_names.index("log_rounds")]
        rounds[places] = np.exp2(found)
    return _DESCRIPTOR_US * counts * rounds


@remembered(maxsize=16)
def _descriptors_of(
    configs: tuple[KernelConfig, ...], of_knobs: tuple[tuple[str, tuple[int, ...]], ...]
) -> tuple[NDArray[np.integer], NDArray[np.integer], tuple[KernelConfig, ...]]:
    """Return the numbers of descriptors, (n_configs,), and the positions and configs of programs not persistent.

    Configs without descriptors are left out of the last two. `of_knobs` is `MeasuredFamily.descriptors`.
    """
    import numpy as np

    counts = np.array(
        [sum(counts[config[knob]] for knob, counts in of_knobs) + (config["BLOCK_N"] in _IN_TWO) for config in configs]
    )
    places = [place for place, config in enumerate(configs) if counts[place] and not config["PROGRAMS_PER_SM"]]
    return counts, np.array(places, np.intp), tuple(configs[place] for place in places)


def seeded(device: DeviceSpec, seed: int) -> tuple[str, torch.Generator]:
    """Return the torch device of a spec, and a seeded generator on it."""
    import torch

    where = "cpu" if device.backend == "cpu" else "cuda"
    return where, torch.Generator(where).manual_seed(seed)
