"""The base class of families for Inductor's templates, and an analytic model of tiled, pipelined kernels.

The model estimates a kernel's time from its tiles, and ranks configs of ops that no bundle has learned. Needs neither
torch nor triton.

A problem is one call as Inductor lowers it, with Inductor's hints for its sizes; a config is one of the choices that
Inductor lists, with the knobs of its template. Each family describes the work of its configs (`loop`); estimates and
features follow from that.

The estimate is the roofline of one step of the inner loop (Williams, Waterman and Patterson, CACM 52(4), 2009), times
steps and waves: programs fill the device in whole waves (wave quantization, NVIDIA's "Matrix Multiplication Background
User's Guide"), and a load is hidden by as many steps as the pipeline is deep (Little's law). The constants are rounded
figures for Hopper; only the ratios between configs matter.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ...datasets import BinaryFacts, DeviceSpec, Family, ForetuneError, KernelConfig, Problem, wrong_knobs
from ...datasets.config import remembered
from ..config_limits import MOST_PROGRAMS, MOST_REGISTERS, MOST_THREADS, RESERVED_SMEM_BYTES, too_much_smem
from ..config_table import FEATURE_TEXTS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ...model.generic_features import GenericFeatures

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...datasets import DeviceSpec

    Column = NDArray[np.float64]

#: Registers of a thread for addresses, masks and the loop, in addition to its accumulators.
_OTHER_REGISTERS = 96
#: Microseconds: starting and ending a kernel, and the latency of memory.
_LAUNCH_US, _LATENCY_US = 2.0, 1.3
#: Microseconds of a step in addition to its products: barriers, and the start of matrix instructions.
_STEP_US = 0.09
#: The L2's bandwidth over that of a copy (H200: 7 TB/s read, 4.3 copied).
_L2_OVER_COPY = 1.6
#: With an operand tile of this many rows, matrix units reach half of the rate of an infinitely long one.
_HALF_BUSY_ROWS = 16.0
#: Tiles with fewer rows than a warp-group instruction use older instructions, at about this share of the rate.
_WARP_GROUP_ROWS, _OLDER_SHARE = 64, 0.4
#: The relative slowdown for each register that is spilled.
_SPILL = 0.02


@dataclass(frozen=True)
class TiledLoop:
    """The work of each config in one call, as arrays (n_configs,): `tiles` output tiles of `steps` inner-loop steps."""

    tiles: Column
    steps: Column
    rows: Column  # of one product of tiles
    columns: Column
    step_flops: Column
    step_bytes: Column  # loaded by a step
    tile_bytes: Column  # stored by a tile
    accumulators: Column  # 32-bit ones of one program
    smem_bytes: Column
    warps: Column
    stages: Column
    is_persistent: Column  # 1 if one program per SM loops over tiles


@dataclass(frozen=True)
class Prediction:
    """The analytic model's estimates for the configs of a `TiledLoop`, each (n_configs,)."""

    time_us: Column
    resident: Column  # programs that an SM holds
    rounds: Column  # tiles that the busiest SM computes one after the other
    fill: Column  # the share of the last round that has work
    registers: Column  # needed per thread; above the limit it spills


def predict(loop: TiledLoop, device: DeviceSpec, *, dtype: str, least_bytes: float) -> Prediction:
    """Estimate the time of each config on a device.

    Args:
        loop: The work of the configs.
        device: The device.
        dtype: The dtype that the matrix units multiply.
        least_bytes: The minimum number of bytes that a call moves through the device's memory.
    """
    sms, threads = device.sm_count, loop.warps * device.warp_size
    registers = loop.accumulators / threads + _OTHER_REGISTERS
    resident = np.minimum.reduce(
        [
            np.floor(device.smem_per_sm_bytes / (loop.smem_bytes + RESERVED_SMEM_BYTES)),
            np.floor(device.registers_per_sm / (np.minimum(registers, MOST_REGISTERS) * threads)),
            np.floor(MOST_THREADS / threads),
            np.full(len(threads), float(MOST_PROGRAMS)),
        ]
    )
    resident = np.where(loop.is_persistent > 0, 1.0, np.maximum(resident, 1.0))
    per_sm = np.ceil(loop.tiles / sms)
    sharing = np.minimum(resident, per_sm)  # programs that share an SM while all are busy
    rounds = np.ceil(per_sm / sharing)

    rate = matrix_flops_per_us(device, dtype) / sms
    busy = loop.rows / (loop.rows + _HALF_BUSY_ROWS) * loop.columns / (loop.columns + _HALF_BUSY_ROWS)
    busy = busy * np.where(loop.rows < _WARP_GROUP_ROWS, _OLDER_SHARE, 1.0)
    compute = loop.step_flops / (rate * busy) + _STEP_US
    l2 = loop.step_bytes * sms / (_L2_OVER_COPY * device.copy_bandwidth_gbs * 1e3)
    ahead = np.maximum(loop.stages - 1, 0.0)
    hidden = np.where(ahead > 0, _LATENCY_US / np.maximum(ahead, 1.0), _LATENCY_US + compute)
    step = sharing * (compute + l2) + hidden  # the sum ranked better than the maximum
    store = loop.tile_bytes * sms * sharing / (device.copy_bandwidth_gbs * 1e3)
    one_round = loop.steps * step + _LATENCY_US + store
    spilled = np.maximum(registers - MOST_REGISTERS, 0.0)
    time_us = _LAUNCH_US + np.maximum(rounds * one_round, least_bytes / (device.copy_bandwidth_gbs * 1e3))
    slots = sms * sharing
    return Prediction(
        time_us=time_us * (1 + _SPILL * spilled),
        resident=resident,
        rounds=rounds,
        fill=loop.tiles / (np.ceil(loop.tiles / slots) * slots),
        registers=registers,
    )


def matrix_flops_per_us(device: DeviceSpec, dtype: str) -> float:
    """Return the rate of the matrix units in floating-point operations per microsecond.

    It is the measured rate if the spec has it. Otherwise 8-bit types are twice as fast as bf16, TF32 is half as fast,
    and float32 without TF32 a sixteenth (H100 whitepaper: 1979, 990, 495 and 67 TFLOP/s).
    """
    known = dict(device.matrix_tflops_by_dtype).get(dtype)
    share = {"tf32": 1 / 2, "fp32": 1 / 16}.get(dtype, 1.0)
    return 1e6 * (device.matrix_tflops_of(dtype) * share if known is None else known)


#: The features from the analytic model, in addition to the generic ones.
OF_MODEL = ("model_log_us", "model_resident", "model_log_rounds", "model_fill", "model_registers", "model_smem")
_NO_CALL = "generated kernels have their sizes in their source, not in their arguments"


class InductorTemplate(Family):
    """Base class of families, each of which is one op that Inductor has Triton templates for."""

    values: ClassVar[Mapping[str, tuple[int, ...]]]  # of each knob
    tiles: ClassVar[Mapping[str, str]]  # the dimension that each knob tiles
    dtypes: ClassVar[tuple[str, ...]] = ("bf16", "fp16", "fp32", "fp8e4m3")
    ragged: ClassVar[Mapping[str, str]] = {}
    feature_texts = FEATURE_TEXTS
    _blocks: ClassVar[str]  # the knobs that shared memory grows with

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "values" in vars(cls):
            cls.knobs = tuple(cls.values)
            cls._blocks = ", ".join(knob for knob in cls.knobs if knob.startswith("BLOCK"))

    @abstractmethod
    def loop(self, problem: Problem, knobs: Mapping[str, Column]) -> TiledLoop:
        """Return the work (tiles, steps, bytes) of each config; `knobs` has the values of each knob, (n_configs,)."""

    @abstractmethod
    def flops(self, problem: Problem) -> float:
        """Return the floating-point operations of one call."""

    @abstractmethod
    def bytes(self, problem: Problem) -> float:
        """Return the minimum number of bytes that one call reads and writes: each operand once."""

    @abstractmethod
    def smem_bytes(self, config: KernelConfig, problem: Problem) -> int:
        """Return the shared memory that one program needs for its pipeline, in bytes."""

    def multiplied_as(self, problem: Problem) -> str:
        """Return the dtype that decides the speed of products: that of the operands, or "tf32"."""
        return problem.dtype_name

    def is_listed(self, config: KernelConfig) -> bool:
        """Return whether Inductor lists the config; some combinations of knobs are excluded."""
        return True

    def space(self, device: DeviceSpec | None = None) -> tuple[KernelConfig, ...]:
        """Return the choices that Inductor lists; with a device, only those that it can run for some problem."""
        space = _space(type(self))
        if device is None:
            return space
        return tuple(config for config in space if self.device_limit(config, device) is None)

    def device_limit(self, config: KernelConfig, device: DeviceSpec) -> str | None:
        """Return why the device cannot run the config for any problem, or None."""
        return None

    def supports(self, config: KernelConfig, problem: Problem, device: DeviceSpec) -> str | None:
        """Return why a config cannot run a problem on a device, or None."""
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
        """Return the work of each of these configs, as `loop` computes it from their knobs."""
        return self.loop(problem, columns_of(tuple(configs), self.knobs))

    def _predicted(self, problem: Problem, device: DeviceSpec, loop: TiledLoop) -> Prediction:
        """Return the analytic model's estimates for the work `loop` of each config."""
        return predict(loop, device, dtype=self.multiplied_as(problem), least_bytes=self.bytes(problem))

    def estimate_us(self, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]) -> NDArray[np.float64]:
        """Return the analytic estimate of each config's time in microseconds, (n_configs,)."""
        return self._predicted(problem, device, self.loop_of(problem, configs)).time_us

    @cached_property
    def _generic(self) -> GenericFeatures:
        from ...model.generic_features import GenericFeatures

        return GenericFeatures(self.dims, self.dtypes, self.flags, self.knobs, self.tiles)

    @property
    def feature_names(self) -> tuple[str, ...]:  # type: ignore[override]
        """The names of the features: the generic ones of any kernel, and the analytic model's estimates."""
        return (*self._generic.names, *OF_MODEL)

    def features(
        self,
        problem: Problem,
        device: DeviceSpec,
        configs: Sequence[KernelConfig],
        binaries: Mapping[KernelConfig, BinaryFacts] | None = None,
    ) -> NDArray[np.float32]:
        """Return the features, (n_configs, n_features)."""
        import numpy as np

        loop = self.loop_of(problem, configs)
        flops, touched = self.flops(problem), self.bytes(problem)
        generic = self._generic.table(problem, device, configs, loop.tiles, {}, flops=flops, touched_bytes=touched)
        return np.concatenate([generic, self.of_model(problem, device, loop)], axis=1)

    def of_model(self, problem: Problem, device: DeviceSpec, loop: TiledLoop) -> NDArray[np.float32]:
        """Return the analytic model's features for the work `loop` of each config, (n_configs, len(OF_MODEL))."""
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
        """Raise `ForetuneError`: generated kernels have their sizes in their source, not in their arguments."""
        raise ForetuneError(f"{self.name}: {_NO_CALL}; foretune.use('inductor') derives the problem of each choice")


@remembered(maxsize=64)
def columns_of(configs: tuple[KernelConfig, ...], knobs: tuple[str, ...]) -> dict[str, Column]:
    """Return by knob its value in each config, (n_configs,)."""
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
