"""`TritonFamily`: a family made from the kernel itself. What it cannot know is declared, in a few lines."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from ..datasets import (
    DTYPES,
    BinaryFacts,
    Case,
    DeviceSpec,
    ForetuneError,
    KernelConfig,
    Measurable,
    Problem,
    dtype_of_tensor,
    roofline_us,
)
from ..datasets.errors import abridged, check_between, check_integer, check_word, check_words, shown
from ..datasets.feature_groups import FeatureGroup, joined, stacked
from ..datasets.problem import MOST_SIZE
from ..model.generic_features import GenericFeatures
from .launching.kernel import Kernel, poison

if TYPE_CHECKING:
    import numpy as np
    import torch
    import triton
    from numpy.typing import NDArray

#: Relative errors that count as right, by the dtype of the output: a few roundings of it. (Of fp32 a few of TF32, which
#: `tl.dot` multiplies with unless it is told not to.)
TOLERANCES = {"fp64": 1e-12, "fp32": 2e-3, "fp16": 2e-3, "bf16": 1e-2, "fp8e4m3": 8e-2, "fp8e5m2": 0.15}
#: What a subclass must say, and what that is.
_DECLARED = {
    "name": "what the family is called",
    "kernel": "the triton.jit function, with its decorators",
    "dims_from": "each dimension with the kernel's parameter that has its size",
    "output": "the parameter that the kernel writes its result to",
    "arguments": "what a launch passes, by parameter name",
    "grid": "the programs of a launch",
    "eager": "the same by plain PyTorch",
}

#: Launch options that a config may have among its meta-parameters: those of AMD's compiler.
_OPTIONS = ("waves_per_eu", "matrix_instr_nonkdim", "kpack", "schedule_hint")

#: A parameter's name, or what to compute from a launch's arguments by parameter name.
Source: TypeAlias = "str | Callable[[Mapping[str, Any]], Any]"


@dataclass(frozen=True)
class TritonInputs:
    """The arguments of one launch, by parameter name."""

    arguments: Mapping[str, Any]
    problem: Problem


class TritonFamily(Measurable):
    """A `triton.jit` kernel, under whatever decorators, as a family that can be predicted, pruned and collected.

    A subclass at the top of a module (other processes import it by name) declares:

    - `name`, `kernel`, and `configs`, unless the kernel is under a `triton.autotune` that has them;
    - `dims_from`: each dimension with the kernel's parameter that has its size, or with a function of a launch's
      arguments (`lambda call: call["x_ptr"].shape[0]`); `flags_from` likewise: a flag is on where that is neither None
      nor false; `dtype_from`: the tensor parameter that says the dtype (the first parameter if left out);
    - `arguments(problem, where)`: what a launch passes by parameter name, tensors random and on the torch device
      `where`; `output`: which of them, of floats, the kernel writes and does not read; `grid(problem, config)`;
      `eager(arguments)`: what it should have written, by plain PyTorch.

    and may declare `tiles` (which knob divides which dimension: better features), `flops` and `bytes`, `dtypes`,
    `ranges` (the sizes that `cases` draws each dimension from) and `most_bytes` (it draws no larger problems),
    `bucketed`, and `supports`: what that passes must compile and compute the right result, so if a block must cover a
    row, say so there, and ask `super().supports` first.

    Kernels may specialise their integers: calls that specialise alike share a binary, and each binary is compiled once.
    `foretune.kernels.testing.FamilyContract` tests a family; the README of kernels/ has an example.

    Raises `ForetuneError` where the class is declared and something is missing or cannot be.
    """

    kernel: ClassVar[Any]
    configs: ClassVar[Sequence[KernelConfig | triton.Config] | None] = None
    dims_from: ClassVar[Mapping[str, Source]]
    flags_from: ClassVar[Mapping[str, Source]] = {}
    dtype_from: ClassVar[str | None] = None
    dtypes: ClassVar[tuple[str, ...]] = ("bf16", "fp16", "fp32")
    output: ClassVar[str]
    tiles: ClassVar[Mapping[str, str]] = {}
    ranges: ClassVar[Mapping[str, tuple[int, int]]] = {}
    most_bytes: ClassVar[float] = 2.0**31
    reads_binaries = True

    _kernel: ClassVar[Kernel]
    _space: ClassVar[tuple[KernelConfig, ...]]
    _members: ClassVar[frozenset[str]]  # the space's configs
    _values: ClassVar[Mapping[str, frozenset[Any]]]  # of each knob
    _generic: ClassVar[GenericFeatures]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not hasattr(cls, "name") and not hasattr(cls, "kernel"):
            return  # one more base class
        for what, meaning in _DECLARED.items():
            if getattr(cls, what, None) is getattr(TritonFamily, what, None):
                raise ForetuneError(f"{cls.__name__} must declare `{what}`: {meaning}")
        _check_declared(cls)
        cls._kernel = Kernel(cls.kernel)
        cls._space = _space_of(cls)
        cls._members = frozenset(map(repr, cls._space))
        knobs = [config.to_json() for config in cls._space]
        names = [knob for knob in dict.fromkeys(k for config in knobs for k in config) if knob != "num_ctas"]
        cls._values = {knob: frozenset(config.get(knob) for config in knobs) for knob in (*names, "num_ctas")}
        cls.knobs, cls.dims, cls.flags = tuple(names), tuple(cls.dims_from), tuple(cls.flags_from)
        cls.dtype_from = cls.dtype_from or cls._kernel.parameters[0]
        _check(cls)
        cls._generic = GenericFeatures(cls.dims, tuple(cls.dtypes), cls.flags, cls.knobs, dict(cls.tiles))
        cls.feature_names = cls._generic.names

    # What a subclass says.

    def arguments(self, problem: Problem, where: str) -> Mapping[str, Any]:
        """All arguments of a launch but the knobs, by parameter name: tensors on the torch device `where`, random where
        the kernel reads them, and numbers. The seed is set. On "meta", where only types are asked for, tensors have no
        values to look at."""
        raise NotImplementedError

    def grid(self, problem: Problem, config: KernelConfig) -> tuple[int, ...]:
        """The programs of a launch, along up to three axes."""
        raise NotImplementedError

    def eager(self, arguments: Mapping[str, Any]) -> torch.Tensor:
        """What a launch with these arguments should leave in the output, by plain PyTorch."""
        raise NotImplementedError

    def flops(self, problem: Problem) -> float:
        """Floating-point operations of one launch; 0 = not said."""
        return 0.0

    def bytes(self, problem: Problem) -> float:
        """Bytes that one launch reads and writes at least; 0 = not said."""
        return 0.0

    def supports(self, config: KernelConfig, problem: Problem, device: DeviceSpec) -> str | None:
        if problem.dtype not in self.dtypes:
            return f"dtype {problem.dtype_name} is not one of {', '.join(self.dtypes)}"
        if unknown := [flag for flag in problem.flags if flag not in self.flags]:
            return f"flag {unknown[0]} is not one of {', '.join(self.flags) or 'none'}"
        return _other_space(type(self), config)

    # What follows from that: to predict and prune.

    def space(self, device: DeviceSpec | None = None) -> tuple[KernelConfig, ...]:
        return self._space

    def features(
        self,
        problem: Problem,
        device: DeviceSpec,
        configs: Sequence[KernelConfig],
        binaries: Mapping[KernelConfig, BinaryFacts] | None = None,
    ) -> NDArray[np.float32]:
        return joined(self._groups(problem, device, configs, binaries))

    def feature_groups(
        self,
        problems: Sequence[Problem],
        device: DeviceSpec,
        configs: Sequence[KernelConfig],
        binaries: Mapping[KernelConfig, BinaryFacts] | None = None,
    ) -> Sequence[FeatureGroup]:
        if type(self).features is not TritonFamily.features:  # a subclass has others
            return super().feature_groups(problems, device, configs, binaries)
        return stacked([self._groups(problem, device, configs, binaries) for problem in problems])

    def _groups(
        self,
        problem: Problem,
        device: DeviceSpec,
        configs: Sequence[KernelConfig],
        binaries: Mapping[KernelConfig, BinaryFacts] | None,
    ) -> Sequence[FeatureGroup]:
        programs, flops, touched = self._programs(problem, configs), self.flops(problem), self.bytes(problem)
        return self._generic.groups(problem, device, configs, programs, binaries, flops=flops, touched_bytes=touched)

    def estimate_us(self, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]) -> NDArray[np.float64]:
        """The roofline, where FLOPs or bytes are given, times how much the last wave of programs lacks."""
        import numpy as np

        waves = np.maximum(self._programs(problem, configs), 1.0) / device.sm_count
        return max(roofline_us(self, problem, device), 1.0) * np.ceil(waves) / waves

    def _programs(self, problem: Problem, configs: Sequence[KernelConfig]) -> NDArray[np.float64]:
        """The size of each config's grid, (n_configs,)."""
        import numpy as np

        return np.array([math.prod(self.grid(problem, config)) for config in configs], float)

    def problem_from_call(self, arguments: Mapping[str, Any]) -> Problem:
        sources = (*self.dims_from.values(), *self.flags_from.values(), self.dtype_from)
        wanted = [source for source in sources if isinstance(source, str)]
        if missing := [name for name in wanted if name not in arguments and name not in self._kernel.defaults]:
            raise ForetuneError(f"the call has no argument {', '.join(missing)}: {self.name} needs {', '.join(wanted)}")
        given = self._kernel.defaults | dict(arguments)
        dtype = dtype_of_tensor(str(self.dtype_from), given[str(self.dtype_from)])
        dims = {dim: int(_found(source, given)) for dim, source in self.dims_from.items()}
        flags = [flag for flag, source in self.flags_from.items() if _is_on(_found(source, given))]
        return Problem(self.name, tuple(sorted(dims.items())), dtype, tuple(sorted(flags)))

    # And to collect.

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
        """Shapes drawn from `ranges`, evenly in their logs: a third are powers of two, a third multiples of 64."""
        import numpy as np

        if models is not None or tokens is not None:
            raise ForetuneError(f"{self.name} draws its shapes from its ranges: it takes no models and no tokens")
        if missing := [dim for dim in self.dims if dim not in self.ranges]:
            raise ForetuneError(f"{self.name} has no range to draw {missing[0]} from: declare ranges, or give cases")
        limit = math.inf if max_tflop is None else max_tflop * 1e12
        drawn: dict[Problem, Case] = {}
        source = np.random.default_rng(seed)
        for _ in range(random * 20):  # small ranges may not have so many
            if len(drawn) == random:
                break
            dims = [(dim, _drawn_size(source, *self.ranges[dim])) for dim in self.dims]
            flags = [flag for flag in self.flags if source.integers(2)]
            dtype = str(source.choice(self.dtypes))
            problem = Problem(self.name, tuple(sorted(dims)), dtype, tuple(sorted(flags)))
            if self.flops(problem) <= limit and self.bytes(problem) <= self.most_bytes:
                drawn.setdefault(problem, Case(problem, ("random",)))
        return tuple(drawn.values())

    def inputs(self, problem: Problem, device: DeviceSpec, *, seed: int = 0) -> TritonInputs:
        import torch

        where = "cpu" if device.backend == "cpu" else "cuda"
        with torch.random.fork_rng([torch.cuda.current_device()] if where == "cuda" else []):
            torch.manual_seed(seed)
            arguments = dict(self.arguments(problem, where))
        output = arguments[self.output]
        if not output.is_floating_point():
            raise ForetuneError(
                f"{self.name}: the output {self.output} must be a tensor of floats but is {output.dtype}"
            )
        poison(output)
        return TritonInputs(arguments, problem)

    def launch(self, inputs: TritonInputs, config: KernelConfig) -> torch.Tensor:
        arguments = {**inputs.arguments, **config.to_json()}
        self._kernel.launch(self.grid(inputs.problem, config), arguments)
        result: torch.Tensor = inputs.arguments[self.output]
        return result

    def reference(self, inputs: TritonInputs) -> torch.Tensor:
        return self.eager(inputs.arguments).float()

    def tolerance(self, problem: Problem) -> float:
        output = _without_memory(self, problem)[self.output]
        return TOLERANCES[dtype_of_tensor(self.output, output)]

    def compile(self, config: KernelConfig, problem: Problem) -> Any:
        arguments = {**_without_memory(self, problem), **config.to_json()}
        return self._kernel.compile(self.grid(problem, config), arguments)

    def binary_key(self, config: KernelConfig, problem: Problem) -> Hashable:
        arguments = {**_without_memory(self, problem), **config.to_json()}
        return config, self._kernel.specialisation(arguments)

    def source_hash(self) -> str:
        return self._kernel.source_hash()


def _space_of(family: type[TritonFamily]) -> tuple[KernelConfig, ...]:
    """The configs as values. Raises `ForetuneError` where there are none, and for those with code of their own."""
    configs = family._kernel.configs if family.configs is None else family.configs
    if not configs:
        raise ForetuneError(f"{family.name}: declare `configs`, or give a kernel under a triton.autotune that has some")
    if any(getattr(config, "pre_hook", None) for config in configs):
        raise ForetuneError(f"{family.name}: a config with a pre_hook cannot be kept as values: declare `configs`")
    values = (config if isinstance(config, KernelConfig) else KernelConfig.from_triton(config) for config in configs)
    return tuple(dict.fromkeys(values))


def _check(family: type[TritonFamily]) -> None:
    """Raises `ForetuneError` for a declaration that names what there is not."""
    parameters, dims = family._kernel.parameters, family.dims
    named = [*family.dims_from.values(), *family.flags_from.values(), family.dtype_from, family.output]
    meta = [name for config in family._space for name, _ in config.meta if name not in _OPTIONS]
    wrong = [
        *((name, "parameter", parameters) for name in [*named, *meta] if isinstance(name, str)),
        *((dim, "dimension", dims) for dim in (*family.tiles.values(), *family.ranges, *family.bucketed)),
        *((knob, "knob", family.knobs) for knob in family.tiles),
        *((dtype, "dtype", DTYPES) for dtype in family.dtypes),
    ]
    for name, what, there in wrong:
        if name not in there:
            raise ForetuneError(
                f"{family.name}: there is no {what} {abridged(name, 100)}; there are {', '.join(there)}"
            )
    for dim, (low, high) in family.ranges.items():
        if not 1 <= low <= high:
            raise ForetuneError(f"{family.name}: ranges must be 1 <= low <= high but {dim} has {low} to {high}")


def _other_space(family: type[TritonFamily], config: KernelConfig) -> str | None:
    """The reason why a config is none of the family's: nobody knows what another one does, or how long it compiles."""
    if repr(config) in family._members:  # not equality: 64 equals 64.0, and compiles to something else
        return None
    knobs = config.to_json()
    if unknown := [knob for knob in knobs if knob not in family._values]:
        return f"{unknown[0]} is no knob of {family.name}; it has {', '.join(family.knobs)}"
    for knob, allowed in family._values.items():
        value = knobs.get(knob)
        if not any(value == one and type(value) is type(one) for one in allowed):
            values = ", ".join(sorted(map(str, allowed), key=lambda value: (len(value), value)))
            return f"{knob} must be one of {values} but is {value!r}"
    return f"no config of {family.name} has {config}"


@lru_cache(maxsize=4096)
def _without_memory(family: TritonFamily, problem: Problem) -> Mapping[str, Any]:
    """The arguments of a launch, tensors without memory."""
    return family.arguments(problem.without_sizes(), "meta")


def _found(source: Source, arguments: Mapping[str, Any]) -> Any:
    return arguments[source] if isinstance(source, str) else source(arguments)


def _is_on(value: Any) -> bool:
    return value is not None and (hasattr(value, "dtype") or bool(value))


def _drawn_size(source: np.random.Generator, low: int, high: int) -> int:
    size = math.exp(source.uniform(math.log(low), math.log(high)))
    way = source.integers(3)
    if way == 0:
        size = 2 ** round(math.log2(size))
    elif way == 1 and size >= 64:
        size = round(size / 64) * 64
    return min(max(int(size), low), high)


# What a class declares, of the types that it must be; whether there is what it names, `_check` finds out.


def _check_declared(family: type[Any]) -> None:
    """Raises `ForetuneError` naming an attribute of a family's class that is not what it must be."""
    name = family.name
    if set(check_word("name", name)) & set(": ,"):
        raise ForetuneError(f"name must be one word but is {shown(name)}")
    for what, check in _CHECKS.items():
        try:
            check(what, getattr(family, what))
        except ForetuneError as error:  # noqa: PERF203 - a dozen
            raise ForetuneError(f"{name}: {error}") from None


def _sources(what: str, value: Any) -> None:
    for source in _mapping(what, value).values():
        if not callable(source):
            check_word(f"each parameter in {what}", source)


def _dims(what: str, value: Any) -> None:
    _sources(what, value)
    if not value:
        raise ForetuneError(f"{what} must name a dimension but is {shown(value)}")


def _dtypes(what: str, value: Any) -> None:
    if not check_words(what, value):
        raise ForetuneError(f"{what} must name a dtype but is {shown(value)}")


def _tiles(what: str, value: Any) -> None:
    for dim in _mapping(what, value).values():
        check_word(f"each dimension in {what}", dim)


def _ranges(what: str, value: Any) -> None:
    for dim, sizes in _mapping(what, value).items():
        if not isinstance(sizes, (tuple, list)) or len(sizes) != 2:
            raise ForetuneError(f"{what} must have two sizes of {dim} but has {shown(sizes)}")
        for size in sizes:
            check_integer(f"{what} of {dim}", size, 0, MOST_SIZE)


def _configs(what: str, value: Any) -> None:
    if value is not None and (isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Collection)):
        raise ForetuneError(f"{what} must be a list of configs but is {shown(value)}")


def _parameter(what: str, value: Any) -> None:
    if value is not None:
        check_word(what, value)


def _mapping(what: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ForetuneError(f"{what} must be a mapping but is {shown(value)}")
    check_words(f"what {what} names", value)
    return value


_CHECKS: dict[str, Callable[[str, Any], object]] = {
    "dims_from": _dims,
    "flags_from": _sources,
    "dtype_from": _parameter,
    "dtypes": _dtypes,
    "output": check_word,
    "configs": _configs,
    "tiles": _tiles,
    "ranges": _ranges,
    "most_bytes": lambda what, value: check_between(what, value, 0.0, 1e18),
    "bucketed": check_words,
}
