"""The interface of a tunable kernel: `Family` for predicting and pruning, `Measurable` for collecting as well."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from .config import KernelConfig
from .device import DeviceSpec
from .errors import (
    ForetuneError,
)
from .feature_groups import FeatureGroup
from .guard import guard_methods
from .measurement import BinaryFacts, Case
from .problem import Problem

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray


class KernelChange(NamedTuple):
    """A change of a family's kernels, after which recorded times still apply to all configs but some.

    Attributes:
        before: The source hash (`Measurable.source_hash`) before the change.
        after: The source hash after it.
        knobs: Values of knobs. Times of configs that have all of these values are outdated; None if no times are, for
            example because only dead code was removed.
        saved_us: A function of (family, problem, device, configs) that returns by how many microseconds each config has
            become faster, (n_configs,). Recorded times are reduced by as much, at most by half, and not below the
            problem's roofline. None if none became faster.
        keeps_times: Whether outdated times still count, because they are nearly right, until these configs are measured
            again (`collect --plan outdated`).
    """

    before: str
    after: str
    knobs: Mapping[str, Any] | None
    saved_us: Callable[[Any, Problem, DeviceSpec, Sequence[KernelConfig]], NDArray[np.floating]] | None = None
    keeps_times: bool = False


class Family(ABC):
    """A tunable kernel, described well enough to predict and prune its configs.

    The packages model and runtime use a kernel only through this interface. Subclass `Measurable` to collect
    measurements as well. `foretune.TritonFamily` derives nearly all of both interfaces from a Triton kernel, and
    `foretune.kernels.testing.FamilyContract` is the test suite for an implementation.

    >>> import numpy as np
    >>> class RowSum(Family):
    ...     name, dims, dtypes = "row_sum", ("rows", "columns"), ("bf16", "fp32")
    ...     knobs, feature_names = ("BLOCK", "num_warps"), ("columns", "block")
    ...
    ...     def space(self, device=None):
    ...         return tuple(KernelConfig.of(BLOCK=block, num_warps=4) for block in (256, 1024, 4096))
    ...
    ...     def supports(self, config, problem, device):
    ...         fits = config["BLOCK"] >= problem["columns"]
    ...         return None if fits else f"BLOCK={config['BLOCK']} must be at least columns={problem['columns']}"
    ...
    ...     def features(self, problem, device, configs, binaries=None):
    ...         return np.array([[problem["columns"], config["BLOCK"]] for config in configs], np.float32)
    ...
    ...     def problem_from_call(self, arguments):
    ...         x = arguments["x_ptr"]
    ...         return Problem.of("row_sum", rows=x.shape[0], columns=x.shape[1])
    >>> family, h200 = RowSum(), DeviceSpec.named("h200")
    >>> family.supports(family.space()[0], Problem.of("row_sum", rows=8, columns=500), h200)
    'BLOCK=256 must be at least columns=500'
    """

    #: The family's name. All names here consist of letters, digits and _ . : + -
    name: ClassVar[str]
    #: The dimensions that each of its problems has.
    dims: ClassVar[tuple[str, ...]]
    #: The dtypes that it accepts if all operands have the same one.
    dtypes: ClassVar[tuple[str, ...]]
    #: The knobs of its configs.
    knobs: ClassVar[tuple[str, ...]]
    #: The name of each column of `features`.
    feature_names: ClassVar[tuple[str, ...]]
    #: One line on some of these columns, by name, for `foretune.explain`.
    feature_texts: ClassVar[Mapping[str, str]] = {}
    #: The layout flags that its problems may have.
    flags: ClassVar[tuple[str, ...]] = ()
    #: Sizes of dimensions that a user leaves out on the command line.
    default_dims: ClassVar[Mapping[str, int]] = {}
    #: Values of knobs that a config does not name, e.g. because the kernel got the knob after the config was measured.
    default_knobs: ClassVar[Mapping[str, Any]] = {}
    #: Changes of the kernels, oldest first, that left times of other configs valid; see `Dataset.of_family`.
    kernel_changes: ClassVar[Sequence[KernelChange]] = ()
    #: The largest size of a dimension; left out, the limit of `Problem`.
    largest: ClassVar[Mapping[str, int]] = {}
    #: The smallest size of a dimension; left out, 1.
    smallest: ClassVar[Mapping[str, int]] = {}
    #: Each dimension that may be ragged -> the dimension that counts its segments; None if that is not declared.
    ragged: ClassVar[Mapping[str, str] | None] = None
    #: Dimensions that are rounded at call time, because they differ at every call; see `Problem.rounded`.
    bucketed: ClassVar[tuple[str, ...]] = ()
    #: Whether `features` uses its argument `binaries`. A bundle then stores the facts of each config's binary.
    reads_binaries: ClassVar[bool] = False
    #: Dimensions whose entries are computed without each other, such as the rows of a product: `invariant` takes them.
    independent: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        """Wrap the methods of a new subclass, so that errors and wrong return values become a `FamilyError`."""
        super().__init_subclass__(**options)
        if isinstance(knobs := vars(cls).get("numerics"), (tuple, list)):
            cls.numerics = _numerics_by(tuple(knobs))  # type: ignore[method-assign, assignment]
        guard_methods(cls, Family)

    @abstractmethod
    def space(self, device: DeviceSpec | None = None) -> tuple[KernelConfig, ...]:
        """Return all configs of the kernel; with a device, only those that can run some problem on it."""

    @abstractmethod
    def supports(self, config: KernelConfig, problem: Problem, device: DeviceSpec) -> str | None:
        """Return None if the config can run the problem on the device, else the reason why not.

        This is the only definition of validity; all packages call it. An accepted config must compile. A reason that
        concerns a knob names the knob and the accepted values.
        """

    def numerics(self, config: KernelConfig, problem: Problem) -> Hashable:
        """Return a config's numerics class: configs of equal classes compute identical bits for this problem.

        With the options `same_bits` and `invariant` (`runtime.same_bits`), all chosen configs are of one class. The
        class must not depend on the sizes of the dimensions in `independent`. A subclass may declare the knobs that
        decide the bits instead of a method: `numerics = ("BLOCK_K", "SPLIT_K")`; no knobs put all configs into one
        class. The default is the config itself, so each config is a class of its own, because nothing is known about
        its bits.
        """
        return config

    def supports_by(self, problem: Problem) -> Hashable:
        """Return a key of the problem such that `supports` gives the same answers for problems of equal keys.

        `supports` is then called for only one problem of each key. The default is the problem itself; override it if
        only some properties of the problem matter.
        """
        return problem

    @abstractmethod
    def features(
        self,
        problem: Problem,
        device: DeviceSpec,
        configs: Sequence[KernelConfig],
        binaries: Mapping[KernelConfig, BinaryFacts] | None = None,
    ) -> NDArray[np.float32]:
        """Return the ranker's input: finite numbers, (n_configs, n_features), with columns `feature_names`.

        The row of a config must not depend on the other configs.

        Args:
            problem: A problem of this family.
            device: The device that it runs on.
            configs: The configs to describe.
            binaries: The `BinaryFacts` of configs, as far as known; passed only if the family sets `reads_binaries`.
        """

    def feature_groups(
        self,
        problems: Sequence[Problem],
        device: DeviceSpec,
        configs: Sequence[KernelConfig],
        binaries: Mapping[KernelConfig, BinaryFacts] | None = None,
    ) -> Sequence[FeatureGroup]:
        """Return the `features` of several problems of one dtype as `FeatureGroup`s, the form that rankers read.

        The default calls `features` for each problem. Override it to compute columns that repeat only once, which makes
        predictions faster and must not change them.
        """
        import numpy as np

        arguments = (device, configs, binaries) if self.reads_binaries else (device, configs)
        tables = np.stack([self.features(problem, *arguments) for problem in problems])
        return (FeatureGroup(tuple(range(tables.shape[2])), tables, np.arange(len(configs))),)

    @abstractmethod
    def problem_from_call(self, arguments: Mapping[str, Any]) -> Problem:
        """Return the problem that a launch with these arguments solves, without waiting for the device.

        Args:
            arguments: The kernel's arguments by parameter name.

        Raises:
            ForetuneError: An argument is missing or wrong. The message names it.
        """

    def at_call_time(self, problem: Problem) -> Problem:
        """Return `problem` as predictions see it at a launch: with only what the host knows, and rounded.

        The segment sizes are removed, because they are on the device, and the dimensions in `bucketed` are rounded. The
        method is idempotent.
        """
        return problem.without_sizes().rounded(*self.bucketed)

    def plausible(self, problem: Problem) -> Sequence[tuple[float, Problem]]:
        """Return variants, with plausible segment sizes, of a problem that has none, as (weight, variant) pairs.

        The weights sum to 1. A ranker predicts the weighted mean over the variants. The default is the problem itself.
        """
        return ((1.0, problem),)

    def default(self, problem: Problem, device: DeviceSpec) -> KernelConfig:
        """Return a config to use when no prediction is available; raise `ForetuneError` if no config can run."""
        reason: str | None = "its space is empty"
        for config in self.space(device):
            if (reason := self.supports(config, problem, device)) is None:
                return config
        raise ForetuneError(f"no config of {self.name} can run {problem} on {device.name}: {reason}")

    def same_bits_config(self, problem: Problem, device: DeviceSpec) -> KernelConfig:
        """Return the config that sets the `numerics` class for the options `same_bits` and `invariant`.

        With these options, only configs of its class are chosen. The method returns the default config. Override it if
        no config of the space has the default's class, or if another class is faster.
        """
        return self.default(problem, device)

    def estimate_us(self, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]) -> NDArray[np.float64]:
        """Return an analytic estimate of each config's time in microseconds, (n_configs,).

        It ranks configs while no trained ranker exists. The default is the same value for all configs.
        """
        import numpy as np

        return np.ones(len(configs))


def _numerics_by(knobs: tuple[str, ...]) -> Callable[[Family, KernelConfig, Problem], Hashable]:
    """Return a method `numerics` for a family in which the values of these knobs decide the bits of results."""

    def numerics(self: Family, config: KernelConfig, problem: Problem) -> Hashable:
        named = config.to_json()
        return tuple(named[knob] for knob in knobs)

    numerics.knobs = knobs  # type: ignore[attr-defined]  # for checks of the names
    return numerics


class Measurable(Family):
    """A family that can also be measured: it has a workload, makes inputs, compiles, launches and checks results."""

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
        """Return the problems to measure, in random order. The same arguments give the same list.

        Args:
            models: A file of models in the family's own format; None selects the family's shipped file.
            tokens: The token counts to sample from; None selects the family's own.
            per_layer: Number of problems for each layer of these models.
            random: Number of random shapes in addition.
            max_tflop: Upper limit of a problem's floating-point operations, in units of 1e12; None selects the family's
                own.
            seed: Seed of the sampling and of the order.

        Raises:
            ForetuneError: The family cannot use one of the arguments.
        """

    @abstractmethod
    def flops(self, problem: Problem) -> float:
        """Return the number of floating-point operations of one launch."""

    @abstractmethod
    def bytes(self, problem: Problem) -> float:
        """Return the bytes that one launch reads and writes if it touches each operand once."""

    @abstractmethod
    def inputs(self, problem: Problem, device: DeviceSpec, *, seed: int = 0) -> Any:
        """Return random inputs, drawn with `seed`, on the current GPU, or on the CPU if the spec's backend is "cpu".

        Outputs are filled with NaN, or with an unlikely integer, unless the kernel updates them in place. If the
        segment sizes of ragged work are unknown, typical ones are chosen.
        """

    def reset(self, inputs: Any) -> None:
        """Put inputs back as `inputs` made them, before each launch and outside of the time that is measured.

        Does nothing by default: it is for kernels that update a tensor in place.
        """

    @abstractmethod
    def launch(self, inputs: Any, config: KernelConfig) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Launch the kernel once, without waiting for it, and return its output tensor, or a tuple of several."""

    @abstractmethod
    def reference(self, inputs: Any) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Return the correct result of `launch`, computed with PyTorch; floats in float32."""

    @abstractmethod
    def tolerance(self, problem: Problem) -> float | tuple[float, ...]:
        """Return the largest accepted error ||y - reference|| / ||reference|| of all outputs, or one for each.

        With 0, integers and booleans must be equal.
        """

    @abstractmethod
    def compile(self, config: KernelConfig, problem: Problem) -> Any:
        """Compile one config for the active Triton driver's target and return the binary.

        The binary goes into Triton's cache, and is the one that `launch` uses for this problem.
        """

    @abstractmethod
    def source_hash(self) -> str:
        """Return a hash of the kernel's source. Times measured with different sources are not comparable."""

    def usual(self, problem: Problem, device: DeviceSpec) -> Sequence[KernelConfig]:
        """Return configs to measure on every problem, even in a sparse run, to compare predictions with them.

        Examples are the choice of a heuristic, or a short list that others autotune. The default is none.
        """
        return ()

    def check_problem(self, config: KernelConfig, problem: Problem) -> Problem:
        """Return the problem on which a config's result is checked before the config is timed on `problem`.

        The config must support it and run it with the same binary, otherwise `problem` is used. The default is
        `problem`; override it to check on a shape that exercises every mask of the kernel.
        """
        return problem

    def binary_key(self, config: KernelConfig, problem: Problem) -> Hashable:
        """Return a key such that configs and problems of equal keys share the binary that `compile` makes on one arch.

        The default gives every config and problem its own key.
        """
        return config, problem.without_sizes()


def roofline_us(family: Measurable, problem: Problem, device: DeviceSpec) -> float:
    """Return the roofline time of a problem in microseconds: the larger of its compute and its memory time.

    >>> from foretune.kernels import find_family
    >>> problem = Problem.of("matmul", batch=1, m=4096, n=4096, k=4096)
    >>> round(roofline_us(find_family("matmul"), problem, DeviceSpec.named("h200")))
    175
    """
    memory_us = family.bytes(problem) / (device.copy_bandwidth_gbs * 1e3)
    return max(compute_us(family, problem, device), memory_us)


def compute_us(family: Measurable, problem: Problem, device: DeviceSpec) -> float:
    """Return the time in microseconds that the problem's FLOPs take at the device's matrix rate for its dtypes."""
    return family.flops(problem) / (device.matrix_tflops_of(*problem.dtypes) * 1e6)
