"""The contract of a tunable kernel: `Family` to predict and prune, `Measurable` to collect as well.

Also the checks of what a family declares, and of problems and configs against it.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakValueDictionary

from .config import OPTIONS, KernelConfig
from .device import DeviceSpec
from .errors import (
    MOST_NAMES,
    FamilyError,
    ForetuneError,
    abridged,
    check_flag,
    check_integer,
    check_word,
    check_words,
    printable,
    reason_of,
    shown,
)
from .feature_groups import FeatureGroup
from .guard import guard_methods, name_of
from .measurement import BinaryFacts, Case
from .problem import Problem, Ragged

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray


class Family(ABC):
    """One tunable kernel, as far as predicting and pruning go. model/ and runtime/ take nothing else.

    Whoever also wants to measure it makes it a `Measurable`. `foretune.TritonFamily` has a default for nearly all of
    both, from the kernel itself. `foretune.kernels.testing.FamilyContract` tests one.
    """

    name: ClassVar[str]  # of letters, digits and _ . : + -, as all names here
    dims: ClassVar[tuple[str, ...]]  # the dimensions a Problem of this family has
    dtypes: ClassVar[tuple[str, ...]]  # the dtypes it takes, in their short form
    knobs: ClassVar[tuple[str, ...]]  # the knobs a KernelConfig of this family has
    feature_names: ClassVar[tuple[str, ...]]
    flags: ClassVar[tuple[str, ...]] = ()  # the layout flags a Problem of it may have
    #: What a dimension is where a person leaves it out.
    default_dims: ClassVar[Mapping[str, int]] = {}
    #: What a knob is of a kernel whose configs do not name it: one that came later, or that most kernels lack.
    default_knobs: ClassVar[Mapping[str, Any]] = {}
    #: The largest size of a dimension, where that is less than `Problem` has room for.
    largest: ClassVar[Mapping[str, int]] = {}
    #: The smallest size of a dimension, where that is not 1.
    smallest: ClassVar[Mapping[str, int]] = {}
    #: The dimensions that may be ragged, and the dimension that counts the segments of each; None = not known.
    ragged: ClassVar[Mapping[str, str] | None] = None
    #: Dimensions that are rounded at call time, because every call has another size: see `Problem.rounded`.
    bucketed: ClassVar[tuple[str, ...]] = ()
    #: Whether `features` looks at what the binaries say: then a bundle keeps that, by config.
    reads_binaries: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        """Guard the methods of the class: what they raise, or return that they must not, is a `FamilyError`."""
        super().__init_subclass__(**options)
        guard_methods(cls, Family)

    @abstractmethod
    def space(self, device: DeviceSpec | None = None) -> tuple[KernelConfig, ...]:
        """Every config worth declaring; with a device, only those that some problem on it supports."""

    @abstractmethod
    def supports(self, config: KernelConfig, problem: Problem, device: DeviceSpec) -> str | None:
        """None where the config can run the problem on the device, else the reason why not.

        The only statement of validity: collect, model and runtime all ask here. What it passes compiles; what it
        refuses for a knob's value it refuses with the knob's name and the values that would do.
        """

    def supports_by(self, problem: Problem) -> Hashable:
        """What `supports` makes its answers depend on: it is called for one of the problems that
        have the same here. The problem itself, unless a family knows that less decides."""
        return problem

    @abstractmethod
    def features(
        self,
        problem: Problem,
        device: DeviceSpec,
        configs: Sequence[KernelConfig],
        binaries: Mapping[KernelConfig, BinaryFacts] | None = None,
    ) -> NDArray[np.float32]:
        """What the ranker sees: (n_configs, n_features), columns named by `feature_names`. Finite.

        A config's row does not depend on the other configs. `binaries` is what is known of the configs' binaries; it
        is only given where `reads_binaries` asks for it.
        """

    def feature_groups(
        self,
        problems: Sequence[Problem],
        device: DeviceSpec,
        configs: Sequence[KernelConfig],
        binaries: Mapping[KernelConfig, BinaryFacts] | None = None,
    ) -> Sequence[FeatureGroup]:
        """The `features` of several problems of one dtype, by what they depend on: a ranker takes them in this form. A
        family that knows what repeats makes predictions quicker, and no different."""
        import numpy as np

        arguments = (device, configs, binaries) if self.reads_binaries else (device, configs)
        tables = np.stack([self.features(problem, *arguments) for problem in problems])
        return (FeatureGroup(tuple(range(tables.shape[2])), tables, np.arange(len(configs))),)

    @abstractmethod
    def problem_from_call(self, arguments: Mapping[str, Any]) -> Problem:
        """The problem that a launch of the kernel with these arguments (by parameter name) solves, from what
        the host knows. Raises `ForetuneError` naming an argument that is missing or odd. Never waits for the device."""

    def at_call_time(self, problem: Problem) -> Problem:
        """What stands for this problem when a config is chosen: what the host knows of it (not the sizes of ragged
        work, which are on the device), with the dimensions in `bucketed` rounded. Doing so twice changes nothing."""
        return problem.without_sizes().rounded(*self.bucketed)

    def likely(self, problem: Problem) -> Sequence[tuple[float, Problem]]:
        """What a problem may turn out to be where its ragged sizes are unknown, each with its share of 1: a ranker
        takes the mean of what it predicts for them. The problem itself, unless a family knows better."""
        return ((1.0, problem),)

    def estimate_us(self, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]) -> NDArray[np.float64]:
        """An analytic estimate of each config's time in microseconds, (n_configs,): ranks while nothing is learned.
        One and the same for all where the family has none."""
        import numpy as np

        return np.ones(len(configs))


class Measurable(Family):
    """A family that can be collected: it also makes inputs, launches, checks and compiles, and owns its workload."""

    @abstractmethod
    def cases(
        self,
        *,
        models: Path | str | None = None,
        tokens: Sequence[int] | None = None,
        per_layer: int = 2,
        random: int = 40,
        max_tflop: float | None = None,
        seed: int = 0,
    ) -> Sequence[Case]:
        """The problems worth measuring, shuffled by `seed`: the same arguments give the same ones.

        `models` is a file of models in the family's own format (its shipped ones if left out) and `tokens` the token
        counts to draw from; `per_layer` problems of each layer of these models, and `random` shapes besides, none of
        more than `max_tflop` x 1e12 floating-point operations (the family's own limit if left out).

        Raises `ForetuneError` for what the family has no use for.
        """

    @abstractmethod
    def flops(self, problem: Problem) -> float:
        """Floating-point operations of one launch."""

    @abstractmethod
    def bytes(self, problem: Problem) -> float:
        """Bytes that one launch reads and writes at least, each operand once."""

    @abstractmethod
    def inputs(self, problem: Problem, device: DeviceSpec, *, seed: int = 0) -> Any:
        """Random inputs on the live device (the CPU for a spec with backend "cpu"), output poisoned with NaN;
        typical sizes where those of ragged work are unknown."""

    def reset(self, inputs: Any) -> None:
        """Put inputs back as `inputs` made them, before each launch and outside of the time that is measured.

        Does nothing by default: it is for kernels that update a tensor in place.
        """

    @abstractmethod
    def launch(self, inputs: Any, config: KernelConfig) -> torch.Tensor:
        """Launches the kernel once, without waiting, and returns its output tensor."""

    @abstractmethod
    def reference(self, inputs: Any) -> torch.Tensor:
        """What `launch` should return, in float32, by plain PyTorch."""

    @abstractmethod
    def tolerance(self, problem: Problem) -> float:
        """The largest ||y - reference|| / ||reference|| that counts as right."""

    @abstractmethod
    def compile(self, config: KernelConfig, problem: Problem) -> Any:
        """Compiles one config for the active Triton driver's target, into Triton's cache; returns the binary, which
        is the one that `launch` uses for this problem."""

    @abstractmethod
    def source_hash(self) -> str:
        """A hash of the kernel's source: a dataset measured with another one is another dataset."""

    def check_problem(self, config: KernelConfig, problem: Problem) -> Problem:
        """What a config's result is checked on before it is timed on `problem`: one that the config supports and runs
        with the same binary (else `problem` is taken after all). The problem itself, unless a family has one that
        exercises every mask."""
        return problem

    def binary_key(self, config: KernelConfig, problem: Problem) -> Hashable:
        """What decides on the binary that `compile` makes, beside the device's arch: calls of one key share a binary.
        Every problem its own, unless a family knows better."""
        return config, problem.without_sizes()

    def default(self, problem: Problem, device: DeviceSpec) -> KernelConfig:
        """A config that `supports` accepts, for when nothing is known. Raises `ForetuneError` where there is none."""
        reason: str | None = "its space has none"
        for config in self.space(device):
            if (reason := self.supports(config, problem, device)) is None:
                return config
        raise ForetuneError(f"no config of {self.name} can run {problem} on {device.name}: {reason}")


def roofline_us(family: Measurable, problem: Problem, device: DeviceSpec) -> float:
    """The longer of the problem's FLOPs at the device's matrix rate for its dtype and its bytes at the device's
    bandwidth."""
    memory_us = family.bytes(problem) / (device.copy_bandwidth_gbs * 1e3)
    return max(compute_us(family, problem, device), memory_us)


def compute_us(family: Measurable, problem: Problem, device: DeviceSpec) -> float:
    """The problem's FLOPs at the device's matrix rate for its dtype."""
    return family.flops(problem) / (device.matrix_tflops_of(*problem.dtypes) * 1e6)


#: What a family, dimension, knob or flag may be called: they stand in commands, tables and logs.
_NAME = re.compile(r"\w[\w.:+-]*")
#: More features than any family has, and more dimensions, knobs or flags.
_MOST_FEATURES, _MOST_DECLARED = 10_000, 4 * MOST_NAMES
#: Launch options that no config has unless somebody sets them.
_UNUSUAL = ("maxnreg", "ir_override")


def check_name(name: str, value: Any) -> str:
    """Check that a value can be a name: letters, digits and `_ . : + -`, of which the first is no sign.

    >>> check_name("the family", "row_softmax")
    'row_softmax'
    """
    if not _NAME.fullmatch(check_word(name, value)):
        raise ForetuneError(f"{name} must be of letters, digits and _ . : + - but is {shown(value)}")
    return str(value)


_sound: WeakValueDictionary[int, Family] = WeakValueDictionary()


def check_attributes(family: Family) -> None:
    """Check what a family declares: names, dimensions, dtypes, knobs and flags.

    Raises:
        ForetuneError: An attribute is missing, cannot be read, or is not what it must be.
    """
    if _sound.get(id(family)) is family:
        return
    what = type(family).__name__
    if missing := [name for name in ("name", "dims", "dtypes", "knobs") if not _has(family, name)]:
        raise FamilyError(f"{what} must say its {', '.join(missing)}: see foretune.Family")
    check_name(f"the name of {what}", _read(family, "name"))
    of = f"of family {family.name}"
    for name in ("dims", "dtypes", "knobs", "flags", "bucketed"):
        for word in (words := check_words(f"{name} {of}", _read(family, name), _MOST_DECLARED)):
            check_name(f"each of {name} {of}", word)
        if not isinstance(_read(family, name), (tuple, list)) or len(set(words)) < len(words):
            raise FamilyError(f"{name} {of} must be a tuple of different names but is {shown(words)}")
        if not words and name in ("dims", "dtypes"):
            raise FamilyError(f"{name} {of} must not be empty")
    if _has(family, "feature_names"):
        check_words(f"feature_names {of}", _read(family, "feature_names"), _MOST_FEATURES)
    for name, names in (("default_dims", "dims"), ("largest", "dims"), ("default_knobs", "knobs")):
        values = _read(family, name)
        if not isinstance(values, Mapping):
            raise FamilyError(f"{name} {of} must be a mapping but is {shown(values)}")
        if unknown := [key for key in values if key not in getattr(family, names)]:
            raise FamilyError(f"{name} {of} must be of its {names} but has {shown(unknown[0])}")
        for key, value in values.items() if names == "dims" else ():
            check_integer(f"{name} {of}: {key}", value, 1)
    if unknown := [dim for dim in family.bucketed if dim not in family.dims]:
        raise FamilyError(f"bucketed {of} must be of its dims but has {unknown[0]}")
    check_flag(f"reads_binaries {of}", _read(family, "reads_binaries"))
    _sound[id(family)] = family


def _has(family: Family, name: str) -> bool:
    try:
        return hasattr(family, name)
    except (Exception, SystemExit):  # noqa: BLE001 - there is something, and it fails
        return True


def _read(family: Family, name: str) -> Any:
    try:
        return getattr(family, name)
    except (Exception, SystemExit) as error:
        raise FamilyError(f"family {name_of(family)}: {name} raised {printable(abridged(reason_of(error)))}") from error


def check_problem_of(family: Family, problem: Problem) -> None:
    """Raises `ForetuneError` for a problem that is not the family's: of another one, of other dimensions, smaller than
    the family's `smallest` or larger than its `largest`, ragged otherwise than it says, or with a dtype or flag that it
    lacks. (Whether it takes a dtype for each operand, its `supports` says.)"""
    if not isinstance(problem, Problem):
        raise ForetuneError(f"a problem of {family.name} must be a Problem but is {shown(problem)}")
    if problem.family != family.name:
        raise ForetuneError(f"a problem of {family.name} was due but this one is of {problem.family}: {problem}")
    dims = dict(problem.dims)
    if dims.keys() != set(family.dims):
        usual = ", ".join(f"{dim}={size}" for dim, size in family.default_dims.items() if dim not in dims)
        raise ForetuneError(
            f"a problem of {family.name} has the dimensions {', '.join(family.dims)} but this one has "
            f"{', '.join(dims) or 'none'}" + (f" ({usual} is usual)" if usual else "")
        )
    for dim, size in problem.dims:
        if size < (least := family.smallest.get(dim, 1)):
            raise ForetuneError(f"{dim} of {family.name} must be at least {least} but is {size}")
    if problem.ragged is not None and family.ragged is not None:
        _check_ragged(family, problem, problem.ragged)
    for dim, most in family.largest.items():
        if dims[dim] > most:
            raise ForetuneError(f"{dim} of {family.name} must be at most {most} but is {dims[dim]}")
    if isinstance(problem.dtype, str) and problem.dtype not in family.dtypes:
        raise ForetuneError(f"dtype of {family.name} must be one of {', '.join(family.dtypes)} but is {problem.dtype}")
    if unknown := [flag for flag in problem.flags if flag not in family.flags]:
        raise ForetuneError(f"{unknown[0]} is no flag of {family.name}; it has {', '.join(family.flags) or 'none'}")


def _check_ragged(family: Family, problem: Problem, ragged: Ragged) -> None:
    known = family.ragged or {}
    if ragged.dim not in known:
        raise ForetuneError(
            f"{family.name} is ragged along {', '.join(known) or 'no dimension'}, not along {ragged.dim}"
        )
    counted = known[ragged.dim]
    if len(ragged.sizes) != problem[counted]:
        raise ForetuneError(
            f"there must be as many sizes along {ragged.dim} as {counted}={problem[counted]} but there are "
            f"{len(ragged.sizes)}"
        )


def not_empty(family: Family, problem: Problem) -> Problem:
    """Return the problem that stands for a launch without work: sizes of 0 are raised to the family's `smallest`.

    A launch may have nothing to do, as where no token came to a rank. It must not fail or warn, and any config will do.
    """
    if all(size or not family.smallest.get(dim, 1) for dim, size in problem.dims):
        return problem
    dims = tuple((dim, max(size, family.smallest.get(dim, 1))) for dim, size in problem.dims)
    return Problem(problem.family, dims, problem.dtype, problem.flags)


def with_defaults(family: Family, config: KernelConfig) -> KernelConfig:
    """The config with the family's `default_knobs` for those of them that it does not name; itself where it names
    all."""
    named = config.to_json()
    missing = {knob: value for knob, value in family.default_knobs.items() if knob not in named}
    return KernelConfig.of(**named, **missing) if missing else config


def wrong_knobs(family: Family, config: KernelConfig) -> str | None:
    """The reason why a config is none of the family's, whatever its values: it has a knob that the family lacks, or
    lacks one that all configs of the family's space have, or a value like 64.0 or True where they have 64 or 1, which
    are equal but compile to something else; else None."""
    named = {name for name, _ in config.meta} | {name for name in _UNUSUAL if getattr(config, name) is not None}
    unknown = sorted(named - set(family.knobs))
    missing = [knob for knob in family.knobs if knob not in named and knob not in OPTIONS]
    missing = [knob for knob in missing if all(knob in dict(one.meta) for one in family.space())]
    if not unknown and not missing:
        return _odd_value(family, config)
    parts = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"has {', '.join(unknown)}"] * bool(unknown)
    return f"the knobs of {family.name} are {', '.join(family.knobs)}, but a config {' and '.join(parts)}"


def _odd_value(family: Family, config: KernelConfig) -> str | None:
    """The reason why the type of a value is wrong: all configs of the family's space have an integer there."""
    for knob, value in config.meta:
        if isinstance(value, (bool, float)) and value == int(value):
            kinds = {type(dict(one.meta).get(knob, value)) for one in family.space()}
            if kinds == {int}:
                return f"{knob} of {family.name} must be an integer but is {value!r}"
    return None
