"""What the ranker sees of one scaled GEMM call and a list of configs.

A dense call is one of one group. Everything is computed for all configs at once, and what their tiles decide once for
each kind of tile.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...datasets import DeviceSpec, KernelConfig, Problem
from ...datasets.feature_groups import FeatureGroup, joined
from ...model.configs_memo import remembered
from ..config_limits import accumulator_registers
from ..config_table import ConfigTable, Floats, alignment, resident_programs
from ..grouped_gemm.features import group_sizes_of, of_each, padded, tiles_of
from .scales import FLAGS, kind_of, scale_bytes
from .space import smem_bytes

# From asking for a step's operands to having them, under load: DRAM's latency on Hopper is 0.6 to 0.8 us without any.
_LATENCY_US = 1.0
# What L2 delivers over the copy bandwidth, at least: tiles of 64 x 128 at 1000 TFLOP/s read 11.7 TB/s (H200, 2026-11).
_L2_OVER_DRAM = 2.7
# float32 operations on 128 lanes an SM, twice a clock: what adding up the steps' products has (CUDA programming guide).
_LANES_PER_SM, _GHZ = 128, 1.8

_PROBLEM_FEATURES = (
    "log_rows",
    "log_n",
    "log_k",
    "log_groups",
    "log_active",
    "log_rows_per_active",
    "skew",
    "sizes_known",
    "log_flops",
    "intensity",
    *FLAGS,
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
    "split_k",
    "swap_ab",
    "tma_load",
    "tma_store",
    "consumers",
    "num_warps",
    "num_stages",
    "tile_area",
    "tile_aspect",
    "smem_bytes",
    "programs_per_sm",
    "programs_asked",
    "accumulators",
    "in_flight_bytes_per_sm",
)
_MIXED_FEATURES = (
    "log_tiles",
    "log_rounds",
    "round_efficiency",
    "padding_m",
    "padding_n",
    "padding_k",
    "steps_per_tile",
    "log_steps_per_program",
    "m_tiles_per_group",
    "n_tiles",
    "log_compute_us",
    "log_promotion_us",
    "log_dram_us",
    "log_l2_us",
    "l2_reuse",
    "roofline_us",
    "log_tiles_per_sm",
    "log_rows_per_group_over_block_m",
    "stages_over_steps",
    "latency_us",
)
FEATURE_NAMES = _PROBLEM_FEATURES + CONFIG_FEATURES + _MIXED_FEATURES


def feature_table(
    problem: Problem, rows_dim: str, device: DeviceSpec, configs: Sequence[KernelConfig]
) -> NDArray[np.float32]:
    """(n_configs, n_features), columns named by FEATURE_NAMES; finite for any problem, also one without rows."""
    return joined(feature_groups((problem,), rows_dim, device, configs))


def feature_groups(
    problems: Sequence[Problem], rows_dim: str, device: DeviceSpec, configs: Sequence[KernelConfig]
) -> tuple[FeatureGroup, ...]:
    """The columns of `feature_table` for several problems of the same flags: those of the call, of the config, and of
    its tile and stages."""
    space = _space(tuple(configs), kind_of(problems[0]), device)
    grouped = "groups" in dict(problems[0].dims)
    # Below, what a problem has is (n_problems, 1), and what it has on each kind of tile (n_problems, n_kinds).
    rows, n, k = of_each(problems, rows_dim, "n", "k")
    groups = of_each(problems, "groups")[0] if grouped else np.ones_like(rows)
    sizes = padded([group_sizes_of(one) if grouped else np.array([one[rows_dim]]) for one in problems])
    active = np.maximum((sizes > 0).sum(axis=1, keepdims=True), 1.0)
    largest = sizes.max(axis=1, initial=0, keepdims=True)
    flops = 2.0 * rows * n * k
    moved_bytes = active * n * k + rows * k + 2 * rows * n + scale_bytes(kind_of(problems[0]), rows, n, k, active)
    logs = np.log2(np.hstack([rows, n, k, groups, active, rows / active, flops, flops / moved_bytes]))
    of_calls = [
        [
            *log[:6],
            skew,
            problem.ragged is not None or not grouped,
            *log[6:],
            *(flag in problem.flags for flag in FLAGS),
            device.sm_count,
            device.matrix_tflops * 1e3 / device.copy_bandwidth_gbs,
            alignment(max(problem["n"], 1)),
            alignment(max(problem["k"], 1)),
        ]
        for problem, log, skew in zip(problems, logs.tolist(), (largest * groups / rows)[:, 0].tolist(), strict=True)
    ]

    # For each kind of tile, of which there are a fifth as many as configs.
    block_m, block_n, block_k, group_m, splits, programs, consumers, stages = space.kinds
    m_tiles = np.maximum(tiles_of(sizes, space.ms), 1.0).take(space.m, axis=1)
    n_tiles, tile_steps = np.ceil(n / block_n), np.ceil(np.ceil(k / block_k) / splits)
    tiles = m_tiles * n_tiles * splits
    slots = device.sm_count * programs
    rounds = np.ceil(tiles / slots)
    busiest_steps = np.minimum(rounds * programs, np.ceil(tiles / device.sm_count)) * tile_steps
    step_flops = 2.0 * block_m * block_n * block_k
    compute_us = busiest_steps * step_flops * device.sm_count / (device.matrix_tflops_of("fp8e4m3") * 1e6)
    promotion_us = busiest_steps * block_m * block_n / (_LANES_PER_SM * _GHZ * 1e3)
    # Parts of a split contraction are float32, written and read once.
    dram_us = (moved_bytes + 8 * rows * n * np.where(splits > 1, splits, 0)) / (device.copy_bandwidth_gbs * 1e3)
    loaded_bytes = tiles * tile_steps * (block_m + block_n) * block_k
    l2_us = loaded_bytes / (device.copy_bandwidth_gbs * 1e3 * _L2_OVER_DRAM)
    m_tiles_per_group = m_tiles / active
    # How many concurrent programs share w's tile (M tiles side by side in a band) or x's.
    sharing = np.minimum(group_m, m_tiles_per_group)
    waiting_us = (rounds * tile_steps * _LATENCY_US).astype(np.float32)  # over the stages that are in flight
    of_kinds = [
        np.log2(tiles),
        np.log2(rounds),
        tiles / (rounds * slots),
        m_tiles * block_m / rows,
        n_tiles * block_n / n,
        tile_steps * block_k / k,
        tile_steps,
        np.log2(rounds * tile_steps),
        m_tiles_per_group,
        n_tiles,
        np.log2(compute_us),
        np.log2(promotion_us),
        np.log2(dram_us),
        np.log2(l2_us),
        np.log2(sharing * block_m + np.minimum(n_tiles, slots / np.maximum(sharing, 1)) * block_n),
        # CONSUMERS add while others of them multiply; where all warps do the same, one comes after the other.
        np.maximum(
            np.maximum(np.where(consumers > 0, np.maximum(compute_us, promotion_us), compute_us + promotion_us), l2_us),
            dram_us,
        ),
        np.log2(tiles / device.sm_count),
        np.log2(rows / groups / block_m),
        # Both are quotients of rounded figures, as rankers learned them.
        (1 / tile_steps).astype(np.float32) * stages.astype(np.float32),
        waiting_us / np.maximum(stages - 1, 1).astype(np.float32),
    ]
    return space.groups(of_calls, of_kinds)


def estimated_us(table: NDArray[np.float32]) -> NDArray[np.float64]:
    """The time of each config, (n_configs,), from its features: the roofline, or what its loads wait for if longer."""
    columns = (table[:, FEATURE_NAMES.index(name)] for name in ("roofline_us", "latency_us"))
    return np.maximum(*columns).astype(np.float64)


@remembered(maxsize=64)
def _space(configs: tuple[KernelConfig, ...], kind: str, device: DeviceSpec) -> ConfigTable:
    """What depends only on the configs, the kind of scales and the device."""

    def knob(name: str) -> Floats:
        return np.array([config[name] for config in configs], dtype=np.float64)

    block_m, block_n, block_k = (knob(f"BLOCK_{axis}") for axis in "MNK")
    group_m, splits, consumers, stages = (knob(name) for name in ("GROUP_M", "SPLIT_K", "CONSUMERS", "num_stages"))
    warps = np.where(consumers > 0, 4 * consumers, knob("num_warps"))  # those that multiply
    smem = np.array([smem_bytes(c, device, kind) for c in configs], dtype=np.float64)
    accumulators = accumulator_registers(block_m, block_n, warps)
    programs = resident_programs(configs, smem, 2 * accumulators, device)
    columns = [
        block_m,
        block_n,
        block_k,
        group_m,
        splits,
        *(knob(name) for name in ("SWAP_AB", "TMA_LOAD", "TMA_STORE")),
        consumers,
        warps,
        stages,
        block_m * block_n,
        block_m / block_n,
        smem,
        programs,
        knob("PROGRAMS_PER_SM"),
        accumulators,
        programs * (stages - 1) * (block_m + block_n) * block_k,
    ]
    deciding = [block_m, block_n, block_k, group_m, splits, programs, consumers, stages]
    return ConfigTable(len(_PROBLEM_FEATURES), columns, deciding)
