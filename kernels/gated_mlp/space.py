"""The tuning space of the gated MLP, the resources that a config needs on a device, and the ranker's features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from ...datasets import DeviceSpec, ForetuneError, KernelConfig, Problem
from ...datasets.config import remembered
from ...datasets.feature_groups import FeatureGroup
from ..config_limits import Knobs, KnobValues, programs_that_fit, spilled
from ..config_table import BLOCKS, L2_OVER_DRAM, TILE, ConfigTable, TiledWork, alignment, config_columns

#: Knobs and their values. A tile is BLOCK_M x BLOCK_N elements of the output, and needs 2 BLOCK_N rows of the weights.
SPACE: Mapping[str, Sequence[int]] = {
    "BLOCK_M": [16, 32, 64, 128, 256],
    "BLOCK_N": [16, 32, 64, 128],
    "BLOCK_K": [32, 64, 128],
    "GROUP_M": [1, 8],  # M tiles in a band, for reuse in L2; a runtime argument
    "PROGRAMS_PER_SM": [0, 1, 2],  # of a persistent grid; 0: one program per tile; a runtime argument
    "TMA": [0, 1],
    "num_warps": [4, 8],
    "num_stages": [2, 3, 4, 5, 6],
}
#: Checks the knobs of a config against `SPACE`.
VALUES = KnobValues("gated_mlp", SPACE)
#: The most float32 accumulators per thread, of its 255 registers. With more, a kernel spills, and compiling takes up
#: to minutes.
_MOST_ACCUMULATORS = 128
#: The fewest bytes of loads in flight per program. With fewer, a config never hides the latency of memory.
_LEAST_BYTES_IN_FLIGHT = 16 * 1024
#: The largest BLOCK_M x BLOCK_N and BLOCK_K in float32. They are small because float32 products run without tensor
#: cores, and the compiler unrolls every step of them.
_MOST_FP32_TILE, _MOST_FP32_BLOCK_K = 32 * 32, 32
#: Shared memory in bytes and number of registers of the SMs that the space is designed for (sm_90, sm_100).
_SM_SMEM_BYTES, _SM_REGISTERS = 228 * 1024, 65536


@lru_cache
def full_space() -> tuple[KernelConfig, ...]:
    """Return all combinations of knob values in `SPACE`, except those that cannot be fast.

    Configs are left out if they spill registers, leave warps idle, have too few loads in flight, or ask for more
    programs per SM than fit, or if a band of GROUP_M tiles has fewer than 64 rows.
    """
    return tuple(VALUES.grid(_is_useful))


def _is_useful(knobs: Mapping[str, int]) -> bool:
    """Return whether a config may be fast for some problem on an SM with `_SM_SMEM_BYTES` and `_SM_REGISTERS`."""
    m, n, k, warps = knobs["BLOCK_M"], knobs["BLOCK_N"], knobs["BLOCK_K"], knobs["num_warps"]
    in_flight = (knobs["num_stages"] - 1) * (m + 2 * n) * k * 2
    return (
        accumulators_per_thread(knobs) <= _MOST_ACCUMULATORS
        and (warps == 4 or m >= 128)  # with fewer rows, several warps would share a row
        and (k == 64 or (k == 32) == (m * n >= 128 * 64))  # 32 for tiles from 128 x 64 on, 128 for smaller ones
        and in_flight >= _LEAST_BYTES_IN_FLIGHT
        and smem_bytes(knobs, 2) <= _SM_SMEM_BYTES
        and knobs["PROGRAMS_PER_SM"] <= _resident(knobs)
        and (knobs["GROUP_M"] == 1 or m >= 64)
    )


def _resident(knobs: Mapping[str, int]) -> int:
    """Return the number of programs that fit on one SM at the same time, for 2-byte operands."""
    taken = smem_bytes(knobs, 2), accumulators_per_thread(knobs), knobs["num_warps"]
    return programs_that_fit(*taken, _SM_SMEM_BYTES, _SM_REGISTERS)


def accumulators_per_thread(config: Knobs) -> float:
    """Return the number of float32 accumulators of a thread, for gate and up together."""
    return float(2 * config["BLOCK_M"] * config["BLOCK_N"] / (32 * config["num_warps"]))


def smem_bytes(config: Knobs, itemsize: int, arch: str = "sm_90") -> int:
    """Return an upper bound on one program's shared memory in bytes, which tests compare with compiled binaries.

    It is the sum of three parts: the operands of all stages, a buffer that converts the output's layout, and barriers.

    If one warp holds whole rows of the product, gate and up of an element are in the same thread, and only the 16-bit
    output goes through the buffer. This holds for wgmma on sm_90, where a warp has 16 rows. Otherwise up must first
    move to gate's thread, through the buffer and in float32.

    Args:
        config: The knobs of a config.
        itemsize: The size of an operand's element in bytes.
        arch: The device's architecture, such as "sm_90".
    """
    m, n, k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    loaded = (m + 2 * n) * k * itemsize
    operands = loaded * max(config["num_stages"], 1)
    if itemsize == 4:
        operands += loaded  # copied to another layout for the product without tensor cores
    warps_hold_rows = arch == "sm_90" and itemsize == 2 and m >= max(16 * config["num_warps"], 64)
    return int(operands + m * n * (2 if warps_hold_rows else 4) + 16 * config["num_stages"] + 64)


def wrong_tile(config: KernelConfig, dtype: str) -> str | None:
    """Return why the blocks of a config cannot be combined for a dtype, or None; each knob alone must be valid."""
    m, n = config["BLOCK_M"], config["BLOCK_N"]
    if dtype == "fp32" and (m * n > _MOST_FP32_TILE or config["BLOCK_K"] > _MOST_FP32_BLOCK_K):
        return (
            f"BLOCK_M x BLOCK_N x BLOCK_K cannot be {m} x {n} x {config['BLOCK_K']} in fp32: BLOCK_M x BLOCK_N can be "
            f"at most {_MOST_FP32_TILE}, and BLOCK_K at most {_MOST_FP32_BLOCK_K}"
        )
    return spilled(m, n, config.num_warps, _MOST_ACCUMULATORS // 2)  # gate and up have as many each


#: The activations of the gate. Each but the first, the default, is a flag of a problem.
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
#: The flags of a problem: the activation (silu if none is given), and "saves" if gate and up are stored.
FLAGS = (*ACTIVATIONS[1:], "saves")

#: Names of the features of the problem and the device alone.
_PROBLEM_FEATURES = (
    "log_m",
    "log_n",
    "log_k",
    "log_flops",
    "intensity",
    "fp16",
    "fp32",
    "gelu",
    "saves",
    "sm_count",
    "flops_per_byte_limit",
    "n_alignment",
    "k_alignment",
)
#: Names of the features of the config on the device, in any problem of one dtype size.
CONFIG_FEATURES = (
    *BLOCKS,
    "programs_asked",
    "tma",
    *TILE,
    "accumulators_per_thread",
    "in_flight_bytes_per_sm",
)
#: Names of the features that depend on both problem and config.
_MIXED_FEATURES = (
    "log_tiles",
    "log_tiles_per_sm",
    "log_rounds",
    "round_efficiency",
    "padding_m",
    "padding_n",
    "padding_k",
    "steps_per_tile",
    "log_steps_per_program",
    "stages_over_steps",
    "m_tiles",
    "n_tiles",
    "log_compute_us",
    "log_dram_us",
    "log_l2_us",
    "log_l2_footprint",
    "roofline_us",
)
#: The values of a config that the mixed features depend on; configs with equal values share them.
_DECIDING = (*BLOCKS, "programs_per_sm", "num_stages")
#: The names of all features, in the order of the columns.
FEATURE_NAMES = _PROBLEM_FEATURES + CONFIG_FEATURES + _MIXED_FEATURES


def moved_bytes(problem: Problem) -> float:
    """Return the bytes of x, both weights, h, and gate and up if they are saved, each counted once."""
    m, n, k = (problem[dim] for dim in "mnk")
    written = 3 if "saves" in problem.flags else 1
    return float(problem.itemsize) * (m * k + 2 * n * k + written * m * n)


def feature_groups(problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]) -> tuple[FeatureGroup, ...]:
    """Return the features of a problem for each config, in three groups; all are finite, even if M is 0.

    The groups depend on the problem, on the config, and on both. The last group has one row for each distinct
    combination of the values named in `_DECIDING`; configs with equal values share a row.
    """
    space = _space(tuple(configs), problem.itemsize, device)
    m, n, k = (max(problem[dim], 1) for dim in "mnk")
    flops, touched = 4.0 * m * n * k, max(moved_bytes(problem), 1.0)
    of_call = [
        np.log2(m),
        np.log2(n),
        np.log2(k),
        np.log2(flops),
        np.log2(flops / touched),
        problem.dtype == "fp16",
        problem.dtype == "fp32",
        "gelu" in problem.flags or "gelu_tanh" in problem.flags,
        "saves" in problem.flags,
        device.sm_count,
        device.matrix_tflops * 1e3 / device.copy_bandwidth_gbs,
        alignment(n),
        alignment(k),
    ]

    # Arrays of one entry per combination of `_DECIDING` values; there are a quarter as many of these as configs.
    block_m, block_n, block_k, group_m, programs, stages = space.combinations
    m_tiles, n_tiles, steps = np.ceil(m / block_m), np.ceil(n / block_n), np.ceil(k / block_k)
    work = TiledWork(device, programs, m_tiles * n_tiles, steps)
    compute_us = work.compute_us(4.0 * block_m * block_n * block_k, device.matrix_tflops)
    dram_us = work.moved_us(touched)
    l2_us = work.moved_us(work.tiles * steps * (block_m + 2 * block_n) * block_k * problem.itemsize, L2_OVER_DRAM)
    # The number of programs running at the same time that share a tile of the weights: the M tiles in a band.
    sharing = np.minimum(group_m, m_tiles)
    times_us = {"compute_us": compute_us, "dram_us": dram_us, "l2_us": l2_us}
    found = work.columns((m, n, k), (block_m, block_n, block_k), m_tiles, n_tiles, **times_us) | {
        "stages_over_steps": stages / steps,
        "log_l2_footprint": np.log2(sharing * block_m + 2 * np.minimum(n_tiles, work.slots / sharing) * block_n),
        "roofline_us": np.maximum(np.maximum(compute_us, l2_us), dram_us),
    }
    return space.groups([of_call], [found[name] for name in _MIXED_FEATURES])


@remembered(maxsize=64)
def _space(configs: tuple[KernelConfig, ...], itemsize: int, device: DeviceSpec) -> ConfigTable:
    """Return the part of the features that depends only on the configs, the element size and the device; cached."""
    smem = [smem_bytes(config, itemsize, device.arch) for config in configs]
    columns = config_columns(configs, smem, device, itemsize=itemsize, rights=2)
    return ConfigTable(len(_PROBLEM_FEATURES), CONFIG_FEATURES, columns, _DECIDING)


def flags_of(activation: str, saves: bool) -> tuple[str, ...]:
    """Return the flags of a problem with an activation, which saves gate and up for the backward pass or does not.

    Raises:
        ForetuneError: `activation` is none of `ACTIVATIONS`.

    >>> flags_of("gelu", saves=True)
    ('gelu', 'saves')
    """
    if activation not in ACTIVATIONS:
        raise ForetuneError(f"activation must be one of {', '.join(ACTIVATIONS)} but is {activation!r}")
    return (*(activation,) * (activation != ACTIVATIONS[0]), *("saves",) * saves)
