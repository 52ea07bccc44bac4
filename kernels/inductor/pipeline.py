"""How long a tiled, software-pipelined Triton kernel takes, from its tiles: what ranks while nothing is learned.

The roofline of one step of the inner loop (Williams, Waterman and Patterson, CACM 52(4), 2009), times steps and waves:
programs fill the device in whole waves (wave quantisation, NVIDIA's "Matrix Multiplication Background User's Guide"),
and a load is hidden by as many steps as the pipeline is deep (Little's law). The constants are rounded figures of
Hopper; only the ratios between configs count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..sm_limits import MOST_PROGRAMS, MOST_REGISTERS, MOST_THREADS, RESERVED_SMEM_BYTES

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
    """What the loop comes to, all (n_configs,)."""

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
