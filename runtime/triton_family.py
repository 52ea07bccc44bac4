"""`TritonFamily`: a family made from a Triton kernel and a few declarations."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..datasets import (
    BinaryFacts,
    Case,
    DeviceSpec,
    FamilyError,
    ForetuneError,
    KernelConfig,
    Measurable,
    Problem,
    dtype_of_tensor,
    roofline_us,
)
from ..datasets.feature_groups import FeatureGroup, joined, stacked
from ..model.generic_features import GenericFeatures
from .launching.kernel import Kernel
from .launching.results import TOLERANCES, Outputs, described, one_or_all, outputs_of, poison
from .triton_declaration import (
    REQUIRED,
    Sizes,
    Source,
    check_names,
    check_ranges,
    check_types,
    checked_arguments,
    checked_grid,
    drawn_size,
    found,
    is_on,
    size_of,
    space_of,
    why_not_in_space,
)

if TYPE_CHECKING:
    import numpy as np
    import torch
    import triton
    from numpy.typing import NDArray

#: The devices for which `cases` asks `supports`. They are fixed, so that the same arguments give the same cases on
#: every machine.
_DRAWN_FOR = ("h200", "h100")
#: How many problems `cases` draws at most for each one that it is to return: small ranges have few, and `supports` may
#: refuse many.
_DRAWS_PER_CASE = 20


@dataclass(frozen=True)
class TritonInputs:
    """The arguments of one launch, by parameter name.

    Attributes:
        arguments: The arguments that the kernel is called with, without the knobs.
        problem: The problem that the launch solves.
        fresh: Copies of the tensors that the kernel updates in place, as they were before the first launch.
    """

    arguments: Mapping[str, Any]
    problem: Problem
    fresh: Mapping[str, torch.Tensor] = field(default_factory=dict)


class TritonFamily(Measurable):
    """A `triton.jit` kernel, with any decorators, as a family that can be predicted, pruned and collected.

    Declare a subclass at the top level of a module, because other processes import it by name. It must declare:

    - `name`, and `kernel`, the `triton.jit` function with its decorators.
    - `configs`, unless the kernel is under a `triton.autotune` that has them.
    - `dims_from`: for each dimension the kernel's parameter that holds its size, or a function of a launch's arguments
      (`lambda call: call["x_ptr"].shape[0]`).
    - `arguments(problem, where)`: a launch's arguments by parameter name, random tensors on the torch device `where`.
    - `output`: the parameter of the tensor that the kernel writes its result to, or a tuple of several. Every tensor
      that the kernel writes must be here or in `in_place`. Before a launch, outputs are filled with NaN, or with an
      unlikely integer, so that elements that the kernel does not write are found.
    - `grid(problem, config)`: the grid of a launch, a tuple of one to three integers.
    - `eager(arguments)`: the same result, computed by plain PyTorch: a tensor, or a tuple with one for each output.
    - `ranges`, unless it defines `cases`: the sizes of each dimension that are drawn, as `(1, 4096)` or `{64, 128}`.
      Other sizes are predicted, too; without measurements, `reason` of the shortlist names them. To refuse sizes,
      override `supports`.

    It may declare:

    - `in_place`: the parameters of tensors that the kernel reads and overwrites. Before each launch, and outside of the
      time that is measured, they get their first contents again. An `output` among them is not filled. Autotuners of
      the kernel need `restore_value` for them, also if they are pruned by Foretune; without it, one warning says so.
    - `flags_from`: for each flag a parameter or a function; the flag is on unless its value is None or false.
    - `dtype_from`: the tensor parameter whose dtype is the problem's (by default the kernel's first parameter).
    - `dtypes`: the dtypes that the kernel takes.
    - `most_bytes`: the size of the largest problem that `cases` draws.
    - `tiles`: which knob is the tile size along which dimension. It gives better features.
    - `flops(problem)` and `bytes(problem)`: the work of one launch. They give better features too.
    - `bucketed`: the dimensions that are rounded before a prediction.
    - `numerics`: the knobs that decide the bits of a result, for `same_bits`, as a tuple or as a method of a config and
      a problem. `independent`: the dimensions whose entries are computed without each other, for `invariant`.
    - `tolerance(problem)`: the largest relative error of the result, or a tuple with one for each output. By default it
      depends on the dtypes of the outputs, and integers must be equal. Override it if rounding may differ by one.
    - `supports(config, problem, device)`: None, or the reason why a config cannot run a problem. Every config that it
      accepts must compile and compute the correct result. If a block must cover a row, say so here. Call
      `super().supports` first.

    Problems whose integer arguments Triton specializes in the same way share a binary, which is compiled once.
    `foretune.kernels.testing.FamilyContract` tests a family.

    Raises:
        ForetuneError: At the declaration of a subclass, where something is missing or wrong.

    >>> import triton
    >>> import triton.language as tl
    >>> from foretune.datasets import torch_dtype
    >>> @triton.jit
    ... def double(x_ptr, n, BLOCK: tl.constexpr):
    ...     at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ...     tl.store(x_ptr + at, 2 * tl.load(x_ptr + at, mask=at < n), mask=at < n)
    >>> class Double(TritonFamily):
    ...     name, kernel, output, in_place = "double", double, "x_ptr", ("x_ptr",)
    ...     configs = [triton.Config({"BLOCK": block}, num_warps=4) for block in (128, 256, 512)]
    ...     dims_from, ranges = {"n": "n"}, {"n": (1024, 1 << 20)}
    ...
    ...     def arguments(self, problem, where):
    ...         import torch
    ...         x = torch.randn(problem["n"], device=where, dtype=torch_dtype(problem.dtype_name))
    ...         return {"x_ptr": x, "n": problem["n"]}
    ...
    ...     def grid(self, problem, config):
    ...         return (triton.cdiv(problem["n"], config["BLOCK"]),)
    ...
    ...     def eager(self, arguments):
    ...         return 2 * arguments["x_ptr"]
    >>> len(Double().cases(random=5)), Double().knobs
    (5, ('BLOCK', 'num_warps', 'num_stages'))
    """

    kernel: ClassVar[Any]
    configs: ClassVar[Sequence[KernelConfig | triton.Config] | None] = None
    dims_from: ClassVar[Mapping[str, Source]]
    flags_from: ClassVar[Mapping[str, Source]] = {}
    dtype_from: ClassVar[str | None] = None
    dtypes: ClassVar[tuple[str, ...]] = ("bf16", "fp16", "fp32")
    output: ClassVar[str | Sequence[str]]
    in_place: ClassVar[Sequence[str]] = ()
    tiles: ClassVar[Mapping[str, str]] = {}
    ranges: ClassVar[Mapping[str, Sizes]] = {}
    most_bytes: ClassVar[float] = 2.0**31
    reads_binaries = True

    _kernel: ClassVar[Kernel]
    _outputs: ClassVar[tuple[str, ...]]
    _space: ClassVar[tuple[KernelConfig, ...]]
    _members: ClassVar[frozenset[str]]  # the `repr` of each config in the space
    _values: ClassVar[Mapping[str, frozenset[Any]]]  # the values of each knob in the space
    _generic: ClassVar[GenericFeatures]
    if TYPE_CHECKING:
        numerics: Any  # also a tuple

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not hasattr(cls, "name") and not hasattr(cls, "kernel"):
            return  # a base class of several families
        for what, meaning in REQUIRED.items():
            if getattr(cls, what, None) is getattr(TritonFamily, what, None):
                raise ForetuneError(f"{cls.__name__} must declare `{what}`: {meaning}")
        check_types(cls)
        cls._kernel = Kernel(cls.kernel)
        cls._outputs = (cls.output,) if isinstance(cls.output, str) else tuple(cls.output)
        cls._space = space_of(cls)
        cls._members = frozenset(map(repr, cls._space))
        knobs = [config.to_json() for config in cls._space]
        names = [knob for knob in dict.fromkeys(k for config in knobs for k in config) if knob != "num_ctas"]
        cls._values = {knob: frozenset(config.get(knob) for config in knobs) for knob in (*names, "num_ctas")}
        cls.knobs, cls.dims, cls.flags = tuple(names), tuple(cls.dims_from), tuple(cls.flags_from)
        cls.dtype_from = cls.dtype_from or cls._kernel.parameters[0]
        check_names(cls)
        if cls.cases is TritonFamily.cases:
            check_ranges(cls)
        cls._generic = GenericFeatures(cls.dims, tuple(cls.dtypes), cls.flags, cls.knobs, dict(cls.tiles))
        cls.feature_names = cls._generic.names

    # What a subclass defines.

    def arguments(self, problem: Problem, where: str) -> Mapping[str, Any]:
        """Return all arguments of a launch except the knobs, by parameter name.

        Args:
            problem: The problem to launch.
            where: The torch device of the tensors. On "meta" only their types and shapes are needed.

        Returns:
            Tensors, which are random where the kernel reads them, and numbers. The random seed is already set.
        """
        raise NotImplementedError

    def grid(self, problem: Problem, config: KernelConfig) -> tuple[int, ...]:
        """Return the grid of a launch: the number of programs along one to three axes."""
        raise NotImplementedError

    def eager(self, arguments: Mapping[str, Any]) -> Outputs:
        """Return the results that a launch with these arguments must write to its outputs, using plain PyTorch."""
        raise NotImplementedError

    def flops(self, problem: Problem) -> float:
        """Return the floating-point operations of one launch; 0 if not declared."""
        return 0.0

    def bytes(self, problem: Problem) -> float:
        """Return the minimum number of bytes that one launch must read and write; 0 if not declared."""
        return 0.0

    def supports(self, config: KernelConfig, problem: Problem, device: DeviceSpec) -> str | None:
        """Return None if the config can run the problem on the device, else the reason why not.

        By default every config of the space can run every problem of the declared dtypes and flags.
        """
        if problem.dtype not in self.dtypes:
            return f"dtype {problem.dtype_name} is not one of {', '.join(self.dtypes)}"
        if unknown := [flag for flag in problem.flags if flag not in self.flags]:
            return f"flag {unknown[0]} is not one of {', '.join(self.flags) or 'none'}"
        return why_not_in_space(type(self), config)

    # What is derived from it to predict and prune: see `Family`.

    def space(self, device: DeviceSpec | None = None) -> tuple[KernelConfig, ...]:
        """Return the declared configs, on every device."""
        return self._space

    def features(
        self,
        problem: Problem,
        device: DeviceSpec,
        configs: Sequence[KernelConfig],
        binaries: Mapping[KernelConfig, BinaryFacts] | None = None,
    ) -> NDArray[np.float32]:
        """Return each config's features: of the problem, the config, and its binary if known, (n_configs, n)."""
        return joined(self._groups(problem, device, configs, binaries))

    def feature_groups(
        self,
        problems: Sequence[Problem],
        device: DeviceSpec,
        configs: Sequence[KernelConfig],
        binaries: Mapping[KernelConfig, BinaryFacts] | None = None,
    ) -> Sequence[FeatureGroup]:
        """Return the features of several problems in groups: of the problem, the config (and binary), and of both."""
        if type(self).features is not TritonFamily.features:  # a subclass has features of its own
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
        """Estimate each config's time in microseconds, (n_configs,).

        It is the roofline time (1 us if neither `flops` nor `bytes` is declared), divided by the share of the GPU's SMs
        that the programs use on average over all waves.
        """
        import numpy as np

        waves = np.maximum(self._programs(problem, configs), 1.0) / device.sm_count
        return max(roofline_us(self, problem, device), 1.0) * np.ceil(waves) / waves

    def _programs(self, problem: Problem, configs: Sequence[KernelConfig]) -> NDArray[np.float64]:
        """Return how many programs each config launches, (n_configs,)."""
        import numpy as np

        return np.array([math.prod(self._grid(problem, config)) for config in configs], float)

    def _grid(self, problem: Problem, config: KernelConfig) -> tuple[int, ...]:
        """Call `grid` and return the checked result. Raises `FamilyError` if it is not a valid grid."""
        return checked_grid(self.name, self.grid(problem, config), config)

    def problem_from_call(self, arguments: Mapping[str, Any]) -> Problem:
        """Return the problem (sizes, dtype and flags) that a launch with these arguments, given by name, solves.

        Raises:
            ForetuneError: An argument that a dimension, a flag or the dtype is taken from is missing, or is wrong.
        """
        sources = (*self.dims_from.values(), *self.flags_from.values(), self.dtype_from)
        wanted = [source for source in sources if isinstance(source, str)]
        if missing := [name for name in wanted if name not in arguments and name not in self._kernel.defaults]:
            raise ForetuneError(f"the call has no argument {', '.join(missing)}: {self.name} needs {', '.join(wanted)}")
        given = self._kernel.defaults | dict(arguments)
        dtype = dtype_of_tensor(str(self.dtype_from), given[str(self.dtype_from)])
        dims = {dim: size_of(self.name, dim, source, given) for dim, source in self.dims_from.items()}
        flags = [flag for flag, source in self.flags_from.items() if is_on(found(source, given))]
        return Problem(self.name, tuple(sorted(dims.items())), dtype, tuple(sorted(flags)))

    # What is derived from it to collect: see `Measurable`.

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
        """Draw problems from `ranges` that at least one config supports on an H200 or H100.

        Sizes within a range are drawn evenly on a logarithmic scale; a third of them are rounded to powers of two and a
        third to multiples of 64. Sizes of a set are drawn evenly.

        Args:
            models: Not accepted: a kernel of this kind has no models.
            tokens: Not accepted either.
            per_layer: Has no effect.
            random: How many problems to draw. There may be fewer if the ranges are small or `supports` refuses many.
            max_tflop: Draw none of more than this many TFLOP.
            seed: The random seed. The same arguments give the same cases.

        Raises:
            ForetuneError: A dimension has no range, `models` or `tokens` is given, or `supports` refuses everything.
        """
        import numpy as np

        if models is not None or tokens is not None:
            raise ForetuneError(f"{self.name} draws its shapes from its ranges: it takes no models and no tokens")
        check_ranges(type(self))
        limit = math.inf if max_tflop is None else max_tflop * 1e12
        drawn: dict[Problem, Case] = {}
        refused: str | None = None
        source = np.random.default_rng(seed)
        for _ in range(random * _DRAWS_PER_CASE):
            if len(drawn) == random:
                break
            dims = [(dim, drawn_size(source, self.ranges[dim])) for dim in self.dims]
            flags = [flag for flag in self.flags if source.integers(2)]
            dtype = str(source.choice(self.dtypes))
            problem = Problem(self.name, tuple(sorted(dims)), dtype, tuple(sorted(flags)))
            if problem in drawn or self.flops(problem) > limit or self.bytes(problem) > self.most_bytes:
                continue
            if (reason := self._why_unsupported(problem)) is None:
                drawn[problem] = Case(problem, ("random",))
            else:
                refused = reason
        if refused is not None and not drawn:
            raise ForetuneError(
                f"{self.name}: its supports() refuses all configs for every problem drawn from ranges: {refused}"
            )
        return tuple(drawn.values())

    def _why_unsupported(self, problem: Problem) -> str | None:
        """Return None if some config can run the problem on one of the known devices, else a reason why none can."""
        reason: str | None = None
        for device in _known_devices():
            for config in self._space:
                if (reason := self.supports(config, problem, device)) is None:
                    return None
        return reason

    def inputs(self, problem: Problem, device: DeviceSpec, *, seed: int = 0) -> TritonInputs:
        """Make the arguments of a launch, with each output filled by `poison` unless it is updated in place.

        Args:
            problem: The problem to launch.
            device: The live device; the tensors are on the CPU if its backend is "cpu".
            seed: The random seed.

        Raises:
            ForetuneError: An output, or what is updated in place, is no tensor.
        """
        import torch

        where = "cpu" if device.backend == "cpu" else "cuda"
        with torch.random.fork_rng([torch.cuda.current_device()] if where == "cuda" else []):
            torch.manual_seed(seed)
            arguments = checked_arguments(type(self), self.arguments(problem, where), where)
        for name in self._outputs:
            if name not in self.in_place:
                poison(arguments[name])
        return TritonInputs(arguments, problem, {name: arguments[name].clone() for name in self.in_place})

    def reset(self, inputs: TritonInputs) -> None:
        """Restore the tensors that the kernel updates in place to their contents before the first launch."""
        for name, fresh in inputs.fresh.items():
            inputs.arguments[name].copy_(fresh)

    def launch(self, inputs: TritonInputs, config: KernelConfig) -> Outputs:
        """Launch the kernel once, without waiting, and return its output, or a tuple of several.

        A kernel that updates tensors in place reads what the launch before left there, unless `reset` is called.
        """
        arguments = {**inputs.arguments, **config.to_json()}
        self._kernel.launch(self._grid(inputs.problem, config), arguments)
        return one_or_all(tuple(inputs.arguments[name] for name in self._outputs))

    def reference(self, inputs: TritonInputs) -> Outputs:
        """Return the result of `eager`, computed from the inputs as they were before the first launch.

        Floats are returned in float32.
        """
        fresh = {name: tensor.clone() for name, tensor in inputs.fresh.items()}  # `eager` may update them, too
        results = outputs_of(self.eager({**inputs.arguments, **fresh}))
        if len(results) != len(self._outputs):
            wanted = f"one tensor for each output ({', '.join(self._outputs)})"
            raise FamilyError(f"family {self.name}: eager() must return {wanted} but returned {described(results)}")
        return one_or_all(tuple(one.float() if one.is_floating_point() else one for one in results))

    def tolerance(self, problem: Problem) -> float | tuple[float, ...]:
        """Return the largest relative error that counts as correct, by the dtype of each output; 0 for integers."""
        outputs = [(name, _without_memory(self, problem)[name]) for name in self._outputs]
        floats = (TOLERANCES[dtype_of_tensor(*output)] if output[1].is_floating_point() else 0.0 for output in outputs)
        return one_or_all(tuple(floats))

    def compile(self, config: KernelConfig, problem: Problem) -> Any:
        """Compile one config for the active Triton driver's target, and return the binary."""
        arguments = {**_without_memory(self, problem), **config.to_json()}
        return self._kernel.compile(self._grid(problem, config), arguments)

    def binary_key(self, config: KernelConfig, problem: Problem) -> Hashable:
        """Return a key that is equal for launches that run the same binary on devices of the same architecture."""
        return config, self._kernel.specialisation({**_without_memory(self, problem), **config.to_json()})

    def source_hash(self) -> str:
        """Return a hash of the kernel's source and of every function that it calls."""
        return self._kernel.source_hash()


@lru_cache(maxsize=4096)
def _without_memory(family: TritonFamily, problem: Problem) -> Mapping[str, Any]:
    """Return the arguments of a launch with meta tensors, which have a shape and a dtype but no memory."""
    return checked_arguments(type(family), family.arguments(problem.without_sizes(), "meta"), "meta")


@cache
def _known_devices() -> tuple[DeviceSpec, ...]:
    """Return the specs of the devices that `cases` draws problems for (`_DRAWN_FOR`)."""
    return tuple(map(DeviceSpec.named, _DRAWN_FOR))
