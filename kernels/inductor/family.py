"""What Inductor's templates have in common as families, without torch and triton: what predicting needs, and how long a
tiled, software-pipelined Triton kernel takes, from its tiles, which ranks while nothing is learned.

A problem is one call as Inductor lowers it, sizes as it hints them; a config is one of the choices that it lists, by
the knobs of its template. Each family says what a config's tiles are (`loop`); estimates and features follow from that.

The estimate is the roofline of one step of the inner loop (Williams, Waterman and Patterson, CACM 52(4), 2009), times
steps and waves: programs fill the device in whole waves (wave quantisation, NVIDIA's "Matrix Multiplication Background
User's Guide"), and a load is hidden by as many steps as the pipeline is deep (Little's law). The constants are rounded
figures of Hopper; only the ratios between configs count.
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
from ...model.configs_memo import remembered
from ..config_limits import MOST_PROGRAMS, MOST_REGISTERS, MOST_THREADS, RESERVED_SMEM_BYTES, too_much_smem

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ...model.generic_features import GenericFeatures

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...datasets import DeviceSpec

    Column = NDArray[np.float64]

#: Registers of a thread for addresses, masks and the loop, beside its accumulators.
_OTHER_REGISTERS = 96
#: What a kernel takes to start and to end, and what its memory takes to answer.
_LAUNCH_US, _LATENCY_US = 2.0, 1.3
#: What a step costs beside its products: barriers, and the start of the matrix instructions.
_STEP_US = 0.09
#: L2 delivers about this multiple of what a copy reaches (H200: 7 TB/s read, 4.3 copied).
_L2_OVER_COPY = 1.6
#: An operand tile of this many rows keeps the matrix units half as busy as an endless one.
_HALF_BUSY_ROWS = 16.0
#: Tiles of fewer rows than one warp-group instruction has take the older instructions, at about this share of the rate.
_WARP_GROUP_ROWS, _OLDER_SHARE = 64, 0.4
#: What spilling costs, for each register that does not fit.
_SPILL = 0.02


@dataclass(frozen=True)
class TiledLoop:
    """The work of each config, all (n_configs,): `tiles` output tiles, each of `steps` steps of the inner loop."""

    tiles: Column
    steps: Column
    rows: Column  # of one product, the smaller of what the two operands bring
    columns: Column
    step_flops: Column
    step_bytes: Column  # loaded by a step
    tile_bytes: Column  # stored by a tile
    accumulators: Column  # 32-bit ones of one program
    smem_bytes: Column
    warps: Column
    stages: Column
    is_persistent: Column  # 1 where a program does one tile after the other, a program an SM


@dataclass(frozen=True)
class Prediction:
    """The analytic model's estimates for the loop, each (n_configs,)."""

    time_us: Column
    resident: Column  # programs that an SM holds
    rounds: Column  # tiles that the busiest SM does one after the other
    fill: Column  # the share of the last round that has work
    registers: Column  # of a thread, more than there are where it spills


def predict(loop: TiledLoop, device: DeviceSpec, *, dtype: str, least_bytes: float) -> Prediction:
    """The time of each config on a device, whose matrix units work on `dtype`; `least_bytes` go through its memory."""
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
    step = sharing * (compute + l2) + hidden  # the sum ranked better than the slowest of them alone
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
    """The rate of the matrix units: measured where the spec has it, else 8-bit types twice as fast as bf16, TF32 half
    as fast, and float32 that is not rounded to it a sixteenth (H100 whitepaper: 1979, 990, 495 and 67 TFLOP/s)."""
    known = dict(device.matrix_tflops_by_dtype).get(dtype)
    share = {"tf32": 1 / 2, "fp32": 1 / 16}.get(dtype, 1.0)
    return 1e6 * (device.matrix_tflops_of(dtype) * share if known is None else known)


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
