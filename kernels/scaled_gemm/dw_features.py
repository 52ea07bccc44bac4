"""The ranker's features of dW in fp8 and a list of configs, computed for all configs at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...datasets import DeviceSpec, KernelConfig, Problem
from ...datasets.config import remembered
from ...datasets.feature_groups import FeatureGroup
from ..config_table import BLOCKS, TILE, TILING, ConfigTable, TiledWork, alignment, config_columns
from ..grouped_gemm.features import OVER_GROUPS, group_sizes_of, of_each
from ..grouped_gemm.variants import chunk_rows
from .dw_space import dw_smem_bytes
from .features import _GHZ, _L2_OVER_DRAM, _LANES_PER_SM
from .scales import BLOCKWISE, DTYPE, SCALED

_PROBLEM_FEATURES = (*OVER_GROUPS, BLOCKWISE, "sm_count", "flops_per_byte_limit", "n_alignment", "k_alignment")
CONFIG_FEATURES = (
    *BLOCKS,
    "tma",
    "consumers",
    "in_flight",
    *TILE,
    "programs_asked",
    "accumulators",
    "in_flight_bytes_per_sm",
)
_MIXED_FEATURES = (
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
#: Config columns that all other features depend on.
_DECIDING = (*BLOCKS, "programs_per_sm", "consumers", "num_stages")
DW_FEATURES = _PROBLEM_FEATURES + CONFIG_FEATURES + _MIXED_FEATURES


def dw_feature_groups(
    problems: Sequence[Problem], device: DeviceSpec, configs: Sequence[KernelConfig]
) -> tuple[FeatureGroup, ...]:
    """Return the features of problems with the same flags, grouped by what the columns depend on.

    There is a group for each of the call, the config, and its tile and stages. Features are finite even if a problem
    has no rows.
    """
    blockwise = BLOCKWISE in problems[0].flags
    space = _space(tuple(configs), blockwise, device)
    # Values per problem are (n_problems, 1), and values per problem and distinct tile are (n_problems, n_tiles).
    rows, n, k, groups = of_each(problems, "rows", "n", "k", "groups")
    active, largest, chunks, steps, longest = np.array(
        [_over_groups(problem, device) for problem in problems], np.float64
    ).T[:, :, None]
    flops = 2.0 * rows * n * k
    scale_bytes = 4.0 * (n + k) * (steps if blockwise else groups)
    moved_bytes = SCALED * steps * (n + k) + 2 * groups * n * k + scale_bytes
    logs = np.log2(np.hstack([rows, n, k, groups, active, rows / active, flops, flops / moved_bytes]))
    of_calls = [
        [
            *log[:6],
            skew,
            problem.ragged is not None,
            *log[6:],
            blockwise,
            device.sm_count,
            device.matrix_tflops * 1e3 / device.copy_bandwidth_gbs,
            alignment(max(problem["n"], 1)),
            alignment(max(problem["k"], 1)),
        ]
        for problem, log, skew in zip(problems, logs.tolist(), (largest * groups / rows)[:, 0].tolist(), strict=True)
    ]

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
    return space.groups(of_calls, [found[name] for name in _MIXED_FEATURES])


def _over_groups(problem: Problem, device: DeviceSpec) -> tuple[float, ...]:
    """Return five figures of a call's groups.

    They are the number of groups with rows, the rows of the largest group, the chunks of all groups, the steps of all
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
def _space(configs: tuple[KernelConfig, ...], blockwise: bool, device: DeviceSpec) -> ConfigTable:
    """Return the table of the columns that depend only on the configs, the kind of scales and the device."""
    smem = [dw_smem_bytes(config, blockwise) for config in configs]
    columns = config_columns(configs, smem, device, itemsize=1, sums=2)
    return ConfigTable.of(len(_PROBLEM_FEATURES), CONFIG_FEATURES, columns, _DECIDING)
