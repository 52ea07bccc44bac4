"""`Family`: all that Foretune needs to know of one tunable kernel, in one object."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from .config import KernelConfig
from .device import DeviceSpec
from .problem import Problem

if TYPE_CHECKING:
    import numpy as np
    import torch
    import triton
    from numpy.typing import NDArray


class Family(ABC):
    """The contract between a kernel and everything else. Adding a kernel to Foretune = one such object.

    collect/, model/ and runtime/ take a `Family` and never know which kernel it is.
    """

    name: ClassVar[str]
    dims: ClassVar[tuple[str, ...]]  # the dimensions a Problem of this family has
    dtypes: ClassVar[tuple[str, ...]]
    knobs: ClassVar[tuple[str, ...]]  # the knobs a KernelConfig of this family has
    feature_names: ClassVar[tuple[str, ...]]

    @abstractmethod
    def space(self, device: DeviceSpec | None = None) -> tuple[KernelConfig, ...]:
        """Every config worth declaring; with a device, only those that some problem on it supports."""

    @abstractmethod
    def default(self, problem: Problem, device: DeviceSpec) -> KernelConfig:
        """A config that `supports` accepts and that is never far off, for when nothing is known."""

    @abstractmethod
    def supports(self, config: KernelConfig, problem: Problem, device: DeviceSpec) -> str | None:
        """None where the config can run the problem on the device, else the reason why not.

        The only statement of validity: collect, model and runtime all ask here.
        """

    @abstractmethod
    def features(self, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]) -> NDArray[np.float32]:
        """What the ranker sees: (n_configs, n_features), columns named by `feature_names`. Finite.

        One column is named "roofline_us": an analytic estimate of the kernel's time in microseconds.
        """

    @abstractmethod
    def problem_from_call(self, arguments: Mapping[str, Any]) -> Problem:
        """The problem that a launch of the kernel with these arguments (by parameter name) solves, from what
        the host knows. Raises `ForetuneError` naming an argument that is missing or odd. Never waits for the device."""

    @abstractmethod
    def inputs(self, problem: Problem, device: DeviceSpec, *, seed: int = 0) -> Any:
        """Random inputs on the live device (the CPU for a spec with backend "cpu"), output poisoned with NaN;
        typical group sizes where the problem's are unknown."""

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
    def check_problem(self, problem: Problem) -> Problem:
        """A small problem of the same dtype and flags that exercises every mask: ragged, empty groups, sizes off
        every block."""

    @abstractmethod
    def compile(self, config: KernelConfig, problem: Problem) -> Any:
        """Compiles one config for the active Triton driver's target, into Triton's cache; returns the binary.

        The binary is the one that `launch` uses for every problem of that dtype and those flags, whatever its sizes.
        """

    @abstractmethod
    def autotuner(self, configs: Sequence[triton.Config], early_config_prune: Callable[..., Any] | None = None) -> Any:
        """A new `triton.autotune` of the kernel over these configs, as a user would declare it, with nothing
        compiled in memory yet."""

    @abstractmethod
    def launch_autotuned(self, autotuner: Any, inputs: Any) -> torch.Tensor:
        """Calls a kernel from `autotuner` once, without waiting, and returns its output tensor."""

    def binary_of(self, config: KernelConfig) -> KernelConfig:
        """The config to compile for this one: several share a binary where a knob is a runtime argument."""
        return config

    @abstractmethod
    def source_hash(self) -> str:
        """A hash of the kernel's source: a dataset measured with another one is another dataset."""
