"""`TritonFamily`: a family made from the kernel itself. What it cannot know is declared, in a few lines."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..datasets import (
    BinaryFacts,
    Case,
    DeviceSpec,
    ForetuneError,
    KernelConfig,
    Measurable,
    Problem,
    dtype_of_tensor,
    roofline_us,
    torch_dtype,
)
from ..model.generic_features import GenericFeatures
from .launching.source_hash import hash_of_kernel

if TYPE_CHECKING:
    import numpy as np
    import torch
    import triton
    from numpy.typing import NDArray

#: Relative errors that count as right, by the dtype of the output: a few roundings of it.
TOLERANCES = {"fp64": 1e-12, "fp32": 1e-5, "fp16": 2e-3, "bf16": 1e-2, "fp8e4m3": 8e-2, "fp8e5m2": 0.15}


@dataclass(frozen=True)
class TritonInputs:
    """The arguments of one launch, by parameter name."""

    arguments: Mapping[str, Any]
    problem: Problem


class TritonFamily(Measurable):
    """A `triton.jit` kernel, or a `triton.autotune` of one, as a family that can be predicted, pruned and collected.

    A subclass at the top of a module (other processes import it by name) declares:

    - `name`, `kernel`, and `configs` (the autotuner's own where the kernel is one and they are left out);
    - `dims_from`: each dimension with the kernel's parameter that has its size; `dtype_from`: the tensor parameter
      that says the dtype (the first parameter if left out); `flags_from`: each flag with the parameter that switches it;
    - `arguments(problem, where)`: what a launch passes by name, tensors random and on the torch device `where`;
      `output`: which of them is the result; `grid(problem, config)`; `eager(arguments)`: the same by plain PyTorch.

    and may declare `tiles` (which knob divides which dimension: better features), `flops` and `bytes`, `ranges` (the
    sizes that `cases` draws each dimension from), `dtypes`, `bucketed`, and `supports` (what it passes must compile and
    compute the right result: say here that a block must cover a row, for example).

    Integers that the kernel specialises are taken for what they are: calls whose integers specialise alike share a
    binary, and each binary is compiled once. See `foretune.kernels.testing.FamilyContract` for tests, and the README of
    kernels/ for an example.
    """

    kernel: ClassVar[Any]
    configs: ClassVar[Sequence[KernelConfig | triton.Config] | None] = None
    dims_from: ClassVar[Mapping[str, str]]
    dtype_from: ClassVar[str | None] = None
    flags_from: ClassVar[Mapping[str, str]] = {}
    dtypes: ClassVar[tuple[str, ...]] = ("bf16", "fp16", "fp32")
    output: ClassVar[str]
    tiles: ClassVar[Mapping[str, str]] = {}
    ranges: ClassVar[Mapping[str, tuple[int, int]]] = {}
    reads_binaries = True

    def __init_subclass__(cls, **options: Any) -> None:
        """Raises `ForetuneError` for a declaration that cannot be."""
        super().__init_subclass__(**options)
        if not {"name", "kernel", "dims_from"} <= set(dir(cls)):
            return  # one more base class
        space = _space_of(cls)
        cls.dims, cls.flags = tuple(cls.dims_from), tuple(cls.flags_from)
        cls.knobs = tuple(dict.fromkeys(knob for config in space for knob in config.to_json() if knob != "num_ctas"))
        parameters = _jit(cls.kernel).arg_names
        cls.dtype_from = cls.dtype_from or parameters[0]
        wanted = [*cls.dims_from.values(), *cls.flags_from.values(), cls.dtype_from]
        if missing := [name for name in wanted if name not in parameters]:
            raise ForetuneError(f"{cls.name}: the kernel has no parameter {missing[0]}; it has {', '.join(parameters)}")
        for knob, dim in cls.tiles.items():
            if knob not in cls.knobs or dim not in cls.dims:
                raise ForetuneError(
                    f"{cls.name}: tiles must map knobs ({', '.join(cls.knobs)}) to dimensions ({', '.join(cls.dims)}) "
                    f"but has {knob!r}: {dim!r}"
                )
        cls._generic = GenericFeatures(cls.dims, cls.dtypes, cls.flags, cls.knobs, dict(cls.tiles))
        cls.feature_names = cls._generic.names

    _generic: ClassVar[GenericFeatures]

    # What a subclass says.

    def arguments(self, problem: Problem, where: str) -> Mapping[str, Any]:
        """All arguments of a launch but the knobs, by parameter name: random tensors on the torch device `where`
        ("meta" where only their types are asked for), and numbers. The seed of torch is set."""
        raise NotImplementedError(f"{type(self).__name__} must say what `arguments` a launch has")

    def grid(self, problem: Problem, config: KernelConfig) -> tuple[int, ...]:
        """The programs of a launch."""
        raise NotImplementedError(f"{type(self).__name__} must say what `grid` a launch has")

    def eager(self, arguments: Mapping[str, Any]) -> torch.Tensor:
        """What a launch with these arguments should leave in the output, by plain PyTorch."""
        raise NotImplementedError(f"{type(self).__name__} must say what it computes: `eager`")

    # What follows from that.

    def space(self, device: DeviceSpec | None = None) -> tuple[KernelConfig, ...]:
        return _space_of(type(self))

    def supports(self, config: KernelConfig, problem: Problem, device: DeviceSpec) -> str | None:
        if problem.dtype not in self.dtypes:
            return f"dtype {problem.dtype_name} is not one of {', '.join(self.dtypes)}"
        if unknown := [flag for flag in problem.flags if flag not in self.flags]:
            return f"flag {unknown[0]} is not one of {', '.join(self.flags) or 'none'}"
        return _wrong_knob(type(self), config)

    def features(
        self,
        problem: Problem,
        device: DeviceSpec,
        configs: Sequence[KernelConfig],
        binaries: Mapping[KernelConfig, BinaryFacts] | None = None,
    ) -> NDArray[np.float32]:
        programs = self._programs(problem, configs)
        flops, touched = self.flops(problem), self.bytes(problem)
        return self._generic.table(
            problem, device, configs, programs, binaries or {}, flops=flops, touched_bytes=touched
        )

    def estimate_us(self, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]) -> NDArray[np.float64]:
        """The roofline, where FLOPs or bytes are given, times how much the last wave of programs lacks."""
        import numpy as np

        waves = np.maximum(self._programs(problem, configs), 1.0) / device.sm_count
        return max(roofline_us(self, problem, device), 1.0) * np.ceil(waves) / waves

    def _programs(self, problem: Problem, configs: Sequence[KernelConfig]) -> NDArray[np.float64]:
        import numpy as np

        return np.array([float(math.prod(self.grid(problem, config))) for config in configs])

    def problem_from_call(self, arguments: Mapping[str, Any]) -> Problem:
        assert self.dtype_from is not None
        wanted = [*self.dims_from.values(), self.dtype_from]
        if missing := [name for name in wanted if name not in arguments]:
            raise ForetuneError(f"the call has no argument {', '.join(missing)}: {self.name} needs {', '.join(wanted)}")
        flags = tuple(flag for flag, name in self.flags_from.items() if arguments.get(name))
        dtype = dtype_of_tensor(self.dtype_from, arguments[self.dtype_from])
        dims = {dim: int(arguments[name]) for dim, name in self.dims_from.items()}
        return Problem(self.name, tuple(sorted(dims.items())), dtype, tuple(sorted(flags)))

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
        drawn: dict[Problem, Case] = {}
        source = np.random.default_rng(seed)
        for _ in range(random * 20):
            if len(drawn) == random:
                break
            dims = {dim: _drawn_size(source, *self.ranges[dim]) for dim in self.dims}
            problem = Problem.of(self.name, dtype=str(source.choice(self.dtypes)), **dims)
            if max_tflop is None or self.flops(problem) <= max_tflop * 1e12:
                drawn.setdefault(problem, Case(problem, ("random",)))
        return tuple(drawn.values())

    def flops(self, problem: Problem) -> float:
        """Floating-point operations of one launch; 0 = not said."""
        return 0.0

    def bytes(self, problem: Problem) -> float:
        """Bytes that one launch reads and writes at least; 0 = not said."""
        return 0.0

    def inputs(self, problem: Problem, device: DeviceSpec, *, seed: int = 0) -> TritonInputs:
        import torch

        where = "cpu" if device.backend == "cpu" else "cuda"
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            arguments = dict(self.arguments(problem, where))
        arguments[self.output].fill_(float("nan"))
        return TritonInputs(arguments, problem)

    def launch(self, inputs: TritonInputs, config: KernelConfig) -> torch.Tensor:
        _launchable(self.kernel)[self.grid(inputs.problem, config)](**inputs.arguments, **config.to_json())
        result: torch.Tensor = inputs.arguments[self.output]
        return result

    def reference(self, inputs: TritonInputs) -> torch.Tensor:
        return self.eager(inputs.arguments).float()

    def tolerance(self, problem: Problem) -> float:
        output = _types(type(self), problem)[self.output]
        return TOLERANCES.get(output[0], 1e-5)

    def compile(self, config: KernelConfig, problem: Problem) -> Any:
        given = {name: torch_dtype(dtype) if kind == "tensor" else value
                 for name, (dtype, kind, value) in _types(type(self), problem).items()}  # fmt: skip
        return _launchable(self.kernel).warmup(grid=self.grid(problem, config), **given, **config.to_json())

    def binary_key(self, config: KernelConfig, problem: Problem) -> Hashable:
        return config, _specialisation(type(self), problem)

    def source_hash(self) -> str:
        return hash_of_kernel(_jit(self.kernel))


def autotuned(
    family: TritonFamily,
    inputs: TritonInputs,
    configs: Sequence[triton.Config],
    early_config_prune: Callable[..., Any] | None = None,
) -> tuple[Any, Callable[[], torch.Tensor]]:
    """A new `triton.autotune` of the family's kernel over these configs, with nothing compiled in memory yet, and a
    function that calls it once on the inputs: what `timing.first_call` times."""
    import triton

    jit = _jit(family.kernel)
    fresh = triton.jit(do_not_specialize=_unspecialised(jit))(jit.fn)
    pruned_by = {"early_config_prune": early_config_prune} if early_config_prune else None
    tuner = triton.autotune(configs=list(configs), key=list(family.dims_from.values()), prune_configs_by=pruned_by)(
        fresh
    )

    def call() -> torch.Tensor:
        def grid(meta: Mapping[str, Any]) -> tuple[int, ...]:
            return family.grid(inputs.problem, KernelConfig.of(**{knob: meta[knob] for knob in meta if knob in knobs}))

        tuner[grid](**inputs.arguments)
        result: torch.Tensor = inputs.arguments[family.output]
        return result

    knobs = set(family.knobs)
    return tuner, call


def _launchable(kernel: Any) -> Any:
    """What takes a config's knobs at a launch: an autotuner's kernel, with its heuristics."""
    return kernel.fn if hasattr(kernel, "configs") and hasattr(kernel, "fn") else kernel


def _jit(kernel: Any) -> Any:
    """The `triton.jit` function, compiled or interpreted, below autotuners and heuristics."""
    while hasattr(kernel, "fn") and not callable(getattr(kernel.fn, "__code__", None)) and hasattr(kernel.fn, "fn"):
        kernel = kernel.fn
    return kernel


def _unspecialised(jit: Any) -> list[str]:
    return [p.name for p in getattr(jit, "params", ()) if p.do_not_specialize]


@lru_cache(maxsize=64)
def _space_of(family: type[TritonFamily]) -> tuple[KernelConfig, ...]:
    """Raises `ForetuneError` where there is none."""
    configs = family.configs if family.configs is not None else getattr(family.kernel, "configs", None)
    if not configs:
        raise ForetuneError(f"{family.name}: declare configs, or give a kernel under triton.autotune, which has some")
    values = (c if isinstance(c, KernelConfig) else KernelConfig.from_triton(c) for c in configs)
    return tuple(dict.fromkeys(values))


@lru_cache(maxsize=1 << 16)
def _wrong_knob(family: type[TritonFamily], config: KernelConfig) -> str | None:
    """The reason why a config is none of the family's: a knob or a value that its space does not have."""
    knobs, values = config.to_json(), _values_of(family)
    if unknown := sorted(knobs.keys() - values.keys()):
        return f"{unknown[0]} is no knob of {family.name}; it has {', '.join(values)}"
    if missing := sorted(values.keys() - knobs.keys()):
        return f"{missing[0]} is missing; {family.name} has the knobs {', '.join(values)}"
    for knob, value in knobs.items():
        if value not in values[knob]:
            return f"{knob} cannot be {value}: {', '.join(map(str, sorted(values[knob], key=str)))}"
    return None


@lru_cache(maxsize=64)
def _values_of(family: type[TritonFamily]) -> dict[str, frozenset[Any]]:
    space = [config.to_json() for config in _space_of(family)]
    return {
        knob: frozenset(config.get(knob) for config in space) for knob in dict.fromkeys(k for c in space for k in c)
    }


@lru_cache(maxsize=4096)
def _types(family: type[TritonFamily], problem: Problem) -> dict[str, tuple[str, str, Any]]:
    """(dtype, "tensor" or "number", value) of each argument of a launch, without any memory."""
    import torch

    with torch.random.fork_rng(devices=[]):
        arguments = family().arguments(problem.without_sizes(), "meta")
    return {
        name: (dtype_of_tensor(name, value), "tensor", None)
        if isinstance(value, torch.Tensor)
        else ("", "number", value)
        for name, value in arguments.items()
    }


@lru_cache(maxsize=4096)
def _specialisation(family: type[TritonFamily], problem: Problem) -> Hashable:
    """What Triton makes a binary of its own for: dtypes, and of each integer whether it is 1 or a multiple of 16 (and
    whether it needs 64 bits), unless the kernel does not specialise it; everything of a constant."""
    jit = _jit(family.kernel)
    plain = set(_unspecialised(jit))
    constants = {p.name for p in getattr(jit, "params", ()) if p.is_constexpr}
    key: list[Hashable] = []
    for name, (dtype, kind, value) in sorted(_types(family, problem).items()):
        if kind == "tensor" or name in constants or not isinstance(value, int) or isinstance(value, bool):
            key.append((name, dtype, value))
        elif name in plain:
            key.append((name, abs(value) >= 2**31))
        else:
            key.append((name, value == 1, value % 16 == 0, abs(value) >= 2**31))
    return tuple(key)


def _drawn_size(source: np.random.Generator, low: int, high: int) -> int:
    size = math.exp(source.uniform(math.log(low), math.log(high)))
    way = source.integers(3)
    if way == 0:
        size = 2 ** round(math.log2(size))
    elif way == 1 and size >= 64:
        size = round(size / 64) * 64
    return min(max(int(size), low), high)
