"""What the ranker sees of one gated MLP call and a list of configs, for all configs at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...datasets import DeviceSpec, KernelConfig, Problem
from ...datasets.feature_groups import FeatureGroup
from ...model.configs_memo import remembered
from ..config_table import BLOCKS, L2_OVER_DRAM, TILE, ConfigTable, TiledWork, alignment, config_columns
from .space import smem_bytes

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
    *BLOCKS,
    "programs_asked",
    "tma",
    *TILE,
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
#: What of a config decides on all other features.
_DECIDING = (*BLOCKS, "programs_per_sm", "num_stages")
FEATURE_NAMES = _PROBLEM_FEATURES + CONFIG_FEATURES + _MIXED_FEATURES


def moved_bytes(problem: Problem) -> float:
    """Bytes of x, both weights, h, and gate and up where they are saved, each once."""
    m, n, k = (problem[dim] for dim in "mnk")
    written = 3 if "saves" in problem.flags else 1
    return float(problem.itemsize) * (m * k + 2 * n * k + written * m * n)


def feature_groups(problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]) -> tuple[FeatureGroup, ...]:
    """The features, finite also without rows: those of the call, of the config, and of its tile and stages."""
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
    work = TiledWork(device, programs, m_tiles * n_tiles, steps)
    compute_us = work.compute_us(4.0 * block_m * block_n * block_k, device.matrix_tflops)
    dram_us = work.moved_us(touched)
    l2_us = work.moved_us(work.tiles * steps * (block_m + 2 * block_n) * block_k * problem.itemsize, L2_OVER_DRAM)
    # How many programs that run at one time share tiles of the weights (M tiles side by side in a band), or of x.
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
    """What depends only on the configs, the dtype's size and the device."""
    smem = [smem_bytes(config, itemsize, device.arch) for config in configs]
    columns = config_columns(configs, smem, device, itemsize=itemsize, rights=2)
    return ConfigTable.of(len(_PROBLEM_FEATURES), CONFIG_FEATURES, columns, _DECIDING)
