"""The ranker's features of each config in a list, for one scaled GEMM call or one dW in fp8.

A dense call counts as one with a single group. Everything is computed for all configs at once, and what depends only on
the tile is computed once per distinct tile.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...datasets import DeviceSpec, KernelConfig, Problem
from ...datasets.config import remembered
from ...datasets.feature_groups import FeatureGroup
from ..config_table import BLOCKS, TILE, TILING, ConfigTable, TiledWork, config_columns
from ..grouped_gemm.features import OVER_GROUPS, call_columns, group_sizes_of, of_each, padded, tiles_of
from ..grouped_gemm.space import chunk_rows
from .space import BLOCKWISE, DTYPE, FLAGS, SCALED, dw_smem_bytes, granularity_of, scale_bytes, smem_bytes

# Microseconds from requesting a step's operands to their arrival, under load; without load, Hopper's DRAM has a latency
# of 0.6 to 0.8 us.
_LATENCY_US = 1.0
# The bandwidth of L2 divided by the copy bandwidth, a lower bound: tiles of 64 x 128 at 1000 TFLOP/s read 11.7 TB/s
# (H200, 2026-11).
_L2_OVER_DRAM = 2.7
# float32 lanes of an SM, and the clock in GHz: the rate of adding up the steps' products (CUDA programming guide).
_LANES_PER_SM, _GHZ = 128, 1.8

_PROBLEM_FEATURES = (
    *OVER_GROUPS,
    *FLAGS,
    "sm_count",
    "flops_per_byte_limit",
    "n_alignment",
    "k_alignment",
)
CONFIG_FEATURES = (
    *BLOCKS,
    "split_k",
    "swap_ab",
    "tma_load",
    "tma_store",
    "consumers",
    *TILE,
    "programs_asked",
    "accumulators",
    "in_flight_bytes_per_sm",
)
_MIXED_FEATURES = (
    *TILING,
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
#: Config columns that all other features depend on.
_DECIDING = (
    *BLOCKS,
    "split_k",
    "programs_per_sm",
    "consumers",
    "num_stages",
)
FEATURE_NAMES = _PROBLEM_FEATURES + CONFIG_FEATURES + _MIXED_FEATURES

_DW_PROBLEM_FEATURES = (*OVER_GROUPS, BLOCKWISE, "sm_count", "flops_per_byte_limit", "n_alignment", "k_alignment")
DW_CONFIG_FEATURES = (
    *BLOCKS,
    "tma",
    "consumers",
    "in_flight",
    *TILE,
    "programs_asked",
    "accumulators",
    "in_flight_bytes_per_sm",
)
_DW_MIXED_FEATURES = (
    *TILING,
    "m_tiles",
    "n_tiles",
    "longest_over_share",
    "log_compute_us",
    "log_promotion_us",
    "log_dram_us",
    "log_l2_us",
    "l2_reuse",
    "roofline_us",
    "log_tiles_per_sm",
    "log_groups_at_once",
    "group_left",
    "stages_over_steps",
)
_DW_DECIDING = (*BLOCKS, "programs_per_sm", "consumers", "num_stages")
DW_FEATURES = _DW_PROBLEM_FEATURES + DW_CONFIG_FEATURES + _DW_MIXED_FEATURES


def feature_groups(
    problems: Sequence[Problem], rows_dim: str, device: DeviceSpec, configs: Sequence[KernelConfig]
) -> tuple[FeatureGroup, ...]:
    """Return the features of problems with the same flags, grouped by what the columns depend on.

    There is a group for each of the call, the config, and its tile and stages. Features are finite even if a problem
    has no rows. `rows_dim` is the name of the dimension of x's rows.
    """
    space = _space(tuple(configs), granularity_of(problems[0]), device)
    grouped = "groups" in dict(problems[0].dims)
    # Below, values per problem are (n_problems, 1), and values per problem and distinct tile are (n_problems, n_tiles).
    rows, n, k = of_each(problems, rows_dim, "n", "k")
    groups = of_each(problems, "groups")[0] if grouped else np.ones_like(rows)
    sizes = padded([group_sizes_of(one) if grouped else np.array([one[rows_dim]]) for one in problems])
    active = np.maximum((sizes > 0).sum(axis=1, keepdims=True), 1.0)
    largest = sizes.max(axis=1, initial=0, keepdims=True)
    flops = 2.0 * rows * n * k
    moved_bytes = (
        active * n * k + rows * k + 2 * rows * n + scale_bytes(granularity_of(problems[0]), rows, n, k, active)
    )
    figures = np.hstack([rows, n, k, groups, active, rows / active, flops, flops / moved_bytes])
    own = [flag in problems[0].flags for flag in FLAGS]
    of_calls = call_columns(problems, device, figures, (largest * groups / rows)[:, 0], own)

    # Per distinct tile; there are a fifth as many as configs.
    block_m, block_n, block_k, group_m, splits, programs, consumers, stages = space.combinations
    m_tiles = np.maximum(tiles_of(sizes, space.ms), 1.0).take(space.m, axis=1)
    n_tiles, tile_steps = np.ceil(n / block_n), np.ceil(np.ceil(k / block_k) / splits)
    work = TiledWork(device, programs, m_tiles * n_tiles * splits, tile_steps)
    compute_us = work.compute_us(2.0 * block_m * block_n * block_k, device.matrix_tflops_of(DTYPE))
    promotion_us = work.most_tiles * tile_steps * block_m * block_n / (_LANES_PER_SM * _GHZ * 1e3)
    # Partial sums are float32, written and read once.
    dram_us = work.moved_us(moved_bytes + 8 * rows * n * np.where(splits > 1, splits, 0))
    l2_us = work.moved_us(work.tiles * tile_steps * (block_m + block_n) * block_k, _L2_OVER_DRAM)
    m_tiles_per_group = m_tiles / active
    # How many concurrent programs share a tile of w (M tiles adjacent in a band) or of x.
    sharing = np.minimum(group_m, m_tiles_per_group)
    waiting_us = (work.rounds * tile_steps * _LATENCY_US).astype(np.float32)  # divided below by the stages in flight
    # With CONSUMERS > 0, groups add while others multiply; else all warps multiply, then add.
    busy_us = np.where(consumers > 0, np.maximum(compute_us, promotion_us), compute_us + promotion_us)
    times_us = {"compute_us": compute_us, "promotion_us": promotion_us, "dram_us": dram_us, "l2_us": l2_us}
    found = work.columns((rows, n, k), (block_m, block_n, block_k), m_tiles, n_tiles, **times_us) | {
        "m_tiles_per_group": m_tiles_per_group,
        "l2_reuse": np.log2(
            sharing * block_m + np.minimum(n_tiles, work.slots / np.maximum(sharing, 1)) * block_n,
        ),
        "roofline_us": np.maximum(np.maximum(busy_us, l2_us), dram_us),
        "log_rows_per_group_over_block_m": np.log2(rows / groups / block_m),
        # Both are quotients of rounded figures, as when rankers were trained.
        "stages_over_steps": (1 / tile_steps).astype(np.float32) * stages.astype(np.float32),
        "latency_us": waiting_us / np.maximum(stages - 1, 1).astype(np.float32),
    }
    return space.groups(of_calls, [found[name] for name in _MIXED_FEATURES])


@remembered(maxsize=64)
def _space(configs: tuple[KernelConfig, ...], granularity: str, device: DeviceSpec) -> ConfigTable:
    """Return the table of the columns that depend only on the configs, the granularity of the scales and the device."""
    smem = [smem_bytes(config, device, granularity) for config in configs]
    columns = config_columns(configs, smem, device, itemsize=1, sums=2)
    return ConfigTable(len(_PROBLEM_FEATURES), CONFIG_FEATURES, columns, _DECIDING)


def dw_feature_groups(
    problems: Sequence[Problem], device: DeviceSpec, configs: Sequence[KernelConfig]
) -> tuple[FeatureGroup, ...]:
    """Return the features of problems with the same flags, grouped by what the columns depend on.

    There is a group for each of the call, the config, and its tile and stages. Features are finite even if a problem
    has no rows.
    """
    blockwise = BLOCKWISE in problems[0].flags
    space = _dw_space(tuple(configs), blockwise, device)
    # Values per problem are (n_problems, 1), and values per problem and distinct tile are (n_problems, n_tiles).
    rows, n, k, groups = of_each(problems, "rows", "n", "k", "groups")
    active, largest, chunks, steps, longest = np.array(
        [_over_groups(problem, device) for problem in problems], np.float64
    ).T[:, :, None]
    flops = 2.0 * rows * n * k
    scale_bytes = 4.0 * (n + k) * (steps if blockwise else groups)
    moved_bytes = SCALED * steps * (n + k) + 2 * groups * n * k + scale_bytes
    figures = np.hstack([rows, n, k, groups, active, rows / active, flops, flops / moved_bytes])
    of_calls = call_columns(problems, device, figures, (largest * groups / rows)[:, 0], [blockwise])

    block_m, block_n, block_k, group_m, programs, consumers, stages = space.combinations
    m_tiles, n_tiles = np.ceil(n / block_m), np.ceil(k / block_n)
    tiles = chunks * m_tiles * n_tiles
    work = TiledWork(device, programs, tiles, steps / chunks)
    # The busiest SM computes its share of all steps, or the longest tile.
    busiest = np.maximum(work.most_tiles * work.steps, longest)
    step_flops = 2.0 * block_m * block_n * block_k
    compute_us = busiest * step_flops * device.sm_count / (device.matrix_tflops_of(DTYPE) * 1e6)
    promotion_us = busiest * block_m * block_n * (1 + blockwise) / (_LANES_PER_SM * _GHZ * 1e3)
    dram_us = work.moved_us(moved_bytes)
    l2_us = work.moved_us(tiles * work.steps * (block_m + block_n) * block_k, _L2_OVER_DRAM)
    sharing = np.minimum(group_m, m_tiles)
    at_once = work.slots / (m_tiles * n_tiles)
    # With CONSUMERS > 0, groups add while others multiply; else all warps multiply, then add.
    busy_us = np.where(consumers > 0, np.maximum(compute_us, promotion_us), compute_us + promotion_us)
    times_us = {"compute_us": compute_us, "promotion_us": promotion_us, "dram_us": dram_us, "l2_us": l2_us}
    found = work.columns((n, k, rows), (block_m, block_n, block_k * chunks), m_tiles, n_tiles, **times_us) | {
        "longest_over_share": longest / (tiles * work.steps / device.sm_count),
        "l2_reuse": np.log2(
            sharing * block_m + np.minimum(n_tiles, work.slots / np.maximum(sharing, 1)) * block_n,
        ),
        "roofline_us": np.maximum(np.maximum(busy_us, l2_us), dram_us),
        "log_groups_at_once": np.log2(at_once),
        "group_left": at_once % 1,
        "stages_over_steps": stages / work.steps,
    }
    return space.groups(of_calls, [found[name] for name in _DW_MIXED_FEATURES])


def _over_groups(problem: Problem, device: DeviceSpec) -> tuple[float, ...]:
    """Return five numbers that describe a call's groups.

    These are the number of groups with rows, the rows of the largest group, the chunks of all groups, the steps of all
    chunks, and the steps of the longest one; each at least 1 except for the rows.
    """
    sizes = group_sizes_of(problem)
    most = chunk_rows(problem["rows"], problem["n"], problem["k"], device.sm_count)
    counts = np.maximum(np.ceil(sizes / most), 1)
    steps = np.ceil(sizes / counts / SCALED)
    return (
        max(int((sizes > 0).sum()), 1),
        sizes.max(initial=0),
        counts.sum(),
        max(steps @ counts, 1),
        max(steps.max(initial=0), 1),
    )


@remembered(maxsize=64)
def _dw_space(configs: tuple[KernelConfig, ...], blockwise: bool, device: DeviceSpec) -> ConfigTable:
    """Return the table of the columns that depend only on the configs, the granularity of the scales and the device."""
    smem = [dw_smem_bytes(config, blockwise) for config in configs]
    columns = config_columns(configs, smem, device, itemsize=1, sums=2)
    return ConfigTable(len(_DW_PROBLEM_FEATURES), DW_CONFIG_FEATURES, columns, _DW_DECIDING)
