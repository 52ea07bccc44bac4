"""What Inductor's templates have in common as families: what predicting needs. Imports neither torch nor triton.

A problem is one call as Inductor lowers it, sizes as it hints them; a config is one of the choices that it lists, by
the knobs of its template. Each family says what a config's tiles are (`loop`); estimates and features follow from that.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

from ...datasets import BinaryFacts, DeviceSpec, Family, ForetuneError, KernelConfig, Problem, wrong_knobs
from ...model.configs_memo import remembered
from ..sm_limits import too_much_smem

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ...model.generic_features import GenericFeatures
    from .pipeline import Column, Prediction, TiledLoop

#: What the analytic model adds to the features that any kernel has.
OF_MODEL = ("model_log_us", "model_resident", "model_log_rounds", "model_fill", "model_registers", "model_smem")
_NO_CALL = "the kernels that Inductor generates have their sizes in their source, and no call says them"


class InductorTemplate(Family):
    """One op that Inductor has Triton templates for."""

    values: ClassVar[Mapping[str, tuple[int, ...]]]  # of each knob
    tiles: ClassVar[Mapping[str, str]]  # which knob divides which dimension
    dtypes: ClassVar[tuple[str, ...]] = ("bf16", "fp16", "fp32", "fp8e4m3")
    ragged: ClassVar[Mapping[str, str]] = {}
    _blocks: ClassVar[str]  # the knobs that shared memory grows with

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "values" in vars(cls):
            cls.knobs = tuple(cls.values)
            cls._blocks = ", ".join(knob for knob in cls.knobs if knob.startswith("BLOCK"))

    @abstractmethod
    def loop(self, problem: Problem, knobs: Mapping[str, Column]) -> TiledLoop:
        """The work of each config, from its knobs, each (n_configs,)."""

    @abstractmethod
    def flops(self, problem: Problem) -> float:
        """Floating-point operations of one call."""

    @abstractmethod
    def bytes(self, problem: Problem) -> float:
        """Bytes that one call reads and writes at least, each operand once."""

    @abstractmethod
    def smem_bytes(self, config: KernelConfig, problem: Problem) -> int:
        """Shared memory that one program needs: what is in flight."""

    def multiplied_as(self, problem: Problem) -> str:
        """The dtype that decides how fast products are: that of the operands, or "tf32"."""
        return problem.dtype_name

    def is_listed(self, config: KernelConfig) -> bool:
        """Whether Inductor lists the config, where knobs exclude each other."""
        return True

    def space(self, device: DeviceSpec | None = None) -> tuple[KernelConfig, ...]:
        space = _space(type(self))
        if device is None:
            return space
        return tuple(config for config in space if self.device_limit(config, device) is None)

    def device_limit(self, config: KernelConfig, device: DeviceSpec) -> str | None:
        """The reason why the device cannot run the config for any problem, or None."""
        return None

    def supports(self, config: KernelConfig, problem: Problem, device: DeviceSpec) -> str | None:
        if (wrong := wrong_knobs(self, config)) is not None:
            return wrong
        for knob, value in config.to_json().items():
            values = self.values.get(knob, (1,))
            if type(value) is not int or value not in values:
                return f"{knob} must be one of {', '.join(map(str, values))} but is {value!r}"
        if problem.dtype not in self.dtypes:
            return f"dtype {problem.dtype_name} is not one of {', '.join(self.dtypes)}"
        if (reason := self.device_limit(config, device)) is not None:
            return reason
        return too_much_smem(self.smem_bytes(config, problem), device, self._blocks)

    def loop_of(self, problem: Problem, configs: Sequence[KernelConfig]) -> TiledLoop:
        """`loop` of configs."""
        return self.loop(problem, columns_of(tuple(configs), self.knobs))

    def _predicted(self, problem: Problem, device: DeviceSpec, loop: TiledLoop) -> Prediction:
        """What the analytic model makes of each config."""
        from .pipeline import predict

        return predict(loop, device, dtype=self.multiplied_as(problem), least_bytes=self.bytes(problem))

    def estimate_us(self, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]) -> NDArray[np.float64]:
        return self._predicted(problem, device, self.loop_of(problem, configs)).time_us

    @cached_property
    def _generic(self) -> GenericFeatures:
        from ...model.generic_features import GenericFeatures

        return GenericFeatures(self.dims, self.dtypes, self.flags, self.knobs, self.tiles)

    @property
    def feature_names(self) -> tuple[str, ...]:  # type: ignore[override]
        return (*self._generic.names, *OF_MODEL)

    def features(
        self,
        problem: Problem,
        device: DeviceSpec,
        configs: Sequence[KernelConfig],
        binaries: Mapping[KernelConfig, BinaryFacts] | None = None,
    ) -> NDArray[np.float32]:
        import numpy as np

        loop = self.loop_of(problem, configs)
        flops, touched = self.flops(problem), self.bytes(problem)
        generic = self._generic.table(problem, device, configs, loop.tiles, {}, flops=flops, touched_bytes=touched)
        return np.concatenate([generic, self.of_model(problem, device, loop)], axis=1)

    def of_model(self, problem: Problem, device: DeviceSpec, loop: TiledLoop) -> NDArray[np.float32]:
        """What the analytic model adds to the features, (n_configs, len(OF_MODEL))."""
        import numpy as np

        found = self._predicted(problem, device, loop)
        columns = (
            np.log2(found.time_us),
            found.resident,
            np.log2(found.rounds),
            found.fill,
            found.registers,
            loop.smem_bytes,
        )
        return np.stack(columns, axis=1).astype(np.float32)

    def problem_from_call(self, arguments: Mapping[str, Any]) -> Problem:
        raise ForetuneError(f"{self.name}: {_NO_CALL}; foretune.use('inductor') knows the problem of each choice")


@remembered(maxsize=64)
def columns_of(configs: tuple[KernelConfig, ...], knobs: tuple[str, ...]) -> dict[str, Column]:
    """Each knob's values, (n_configs,)."""
    import numpy as np

    rows = [config.to_json() for config in configs]
    return {knob: np.array([row[knob] for row in rows], dtype=np.float64) for knob in knobs}


@cache
def _space(family: type[InductorTemplate]) -> tuple[KernelConfig, ...]:
    made, listed = family(), []
    for values in product(*family.values.values()):
        config = KernelConfig.of(**dict(zip(family.values, values, strict=True)))
        if made.is_listed(config):
            listed.append(config)
    return tuple(listed)
