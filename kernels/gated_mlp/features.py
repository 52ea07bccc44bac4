"""What the ranker sees of one gated MLP call and a list of configs, for all configs at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...datasets import DeviceSpec, KernelConfig, Problem
from ...datasets.feature_groups import FeatureGroup, joined
from ...model.configs_memo import remembered
from ..config_table import L2_OVER_DRAM, ConfigTable, Floats, alignment, resident_programs
from .space import accumulators_per_thread, smem_bytes

#: Flags of a problem; without one of the first two the activation is silu.
FLAGS = ("gelu", "gelu_tanh", "saves")

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
CONFIG_FEATURES = (
    "block_m",
    "block_n",
    "block_k",
    "group_m",
    "programs_asked",
    "tma",
    "num_warps",
    "num_stages",
    "tile_area",
    "tile_aspect",
    "smem_bytes",
    "programs_per_sm",
    "accumulators_per_thread",
    "in_flight_bytes_per_sm",
)
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
FEATURE_NAMES = _PROBLEM_FEATURES + CONFIG_FEATURES + _MIXED_FEATURES


def moved_bytes(problem: Problem) -> float:
    """Bytes of x, both weights, h, and gate and up where they are saved, each once."""
    m, n, k = (problem[dim] for dim in "mnk")
    written = 3 if "saves" in problem.flags else 1
    return float(problem.itemsize) * (m * k + 2 * n * k + written * m * n)


def feature_table(problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]) -> NDArray[np.float32]:
    """(n_configs, n_features), columns named by FEATURE_NAMES; finite for any problem, also one without rows."""
    return joined(feature_groups(problem, device, configs))


def feature_groups(problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]) -> tuple[FeatureGroup, ...]:
    """The columns of `feature_table`: those of the call, of the config, and of its tile and stages."""
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

    # For each kind of tile, (n_kinds,), of which there are a quarter as many as configs.
    block_m, block_n, block_k, group_m, programs, stages = space.kinds
    m_tiles, n_tiles, steps = np.ceil(m / block_m), np.ceil(n / block_n), np.ceil(k / block_k)
    tiles, slots = m_tiles * n_tiles, device.sm_count * programs
    rounds = np.ceil(tiles / slots)
    # The SMs' time at the measured matrix rate: the busiest one does `rounds` tiles for each resident program.
    busiest = np.minimum(rounds * programs, np.ceil(tiles / device.sm_count))
    compute_us = busiest * steps * 4.0 * block_m * block_n * block_k * device.sm_count / (device.matrix_tflops * 1e6)
    dram_us = touched / (device.copy_bandwidth_gbs * 1e3)
    loaded = tiles * steps * (block_m + 2 * block_n) * block_k * problem.itemsize
    l2_us = loaded / (device.copy_bandwidth_gbs * 1e3 * L2_OVER_DRAM)
    # How many programs that run at one time share tiles of the weights (M tiles side by side in a band), or of x.
    sharing = np.minimum(group_m, m_tiles)
    footprint = sharing * block_m + 2 * np.minimum(n_tiles, slots / sharing) * block_n
    of_kinds = [
        np.log2(tiles),
        np.log2(tiles / device.sm_count),
        np.log2(rounds),
        tiles / (rounds * slots),
        m_tiles * block_m / m,
        n_tiles * block_n / n,
        steps * block_k / k,
        steps,
        np.log2(rounds * steps),
        stages / steps,
        m_tiles,
        n_tiles,
        np.log2(compute_us),
        np.log2(dram_us),
        np.log2(l2_us),
        np.log2(footprint),
        np.maximum(np.maximum(compute_us, l2_us), dram_us),
    ]
    return space.groups([of_call], of_kinds)


@remembered(maxsize=64)
def _space(configs: tuple[KernelConfig, ...], itemsize: int, device: DeviceSpec) -> ConfigTable:
    """What depends only on the configs, the dtype's size and the device."""

    def knob(name: str) -> Floats:
        return np.array([config[name] for config in configs], dtype=np.float64)

    block_m, block_n, block_k = (knob(f"BLOCK_{axis}") for axis in "MNK")
    group_m, warps, stages = knob("GROUP_M"), knob("num_warps"), knob("num_stages")
    smem = [smem_bytes(config, itemsize, device.arch) for config in configs]
    accumulators = [accumulators_per_thread(config) for config in configs]
    programs = resident_programs(configs, smem, accumulators, device)
    columns = [
        block_m,
        block_n,
        block_k,
        group_m,
        knob("PROGRAMS_PER_SM"),
        knob("TMA"),
        warps,
        stages,
        block_m * block_n,
        block_m / block_n,
        np.array(smem, dtype=np.float64),
        programs,
        np.array(accumulators, dtype=np.float64),
        programs * (stages - 1) * (block_m + 2 * block_n) * block_k * itemsize,
    ]
    return ConfigTable(len(_PROBLEM_FEATURES), columns, [block_m, block_n, block_k, group_m, programs, stages])
