"""The ranker's features of one dense product and a list of configs, one of them an analytic estimate of the time.

Everything is computed for all configs at once, and what depends only on the tile is computed once per distinct tile: a
prediction over the whole space takes about a millisecond.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...datasets import DeviceSpec, KernelConfig, Problem
from ...datasets.config import remembered
from ...datasets.feature_groups import FeatureGroup
from ..config_table import BLOCKS, L2_OVER_DRAM, TILE, TILING, ConfigTable, TiledWork, alignment, config_columns
from .space import FLAGS, LAYOUTS, output_dtype, row_lengths, smem_bytes

# float32 is multiplied as tf32, at half the rate of 16-bit dtypes on all tensor cores since Ampere.
_TF32_RATE = 0.5
# Fixed costs in microseconds: an empty kernel, a step of BLOCK_K at the latency of memory, and the second kernel of
# split-K. They are orders of magnitude that rank small problems.
_LAUNCH_US, _STEP_US, _SECOND_LAUNCH_US = 2.0, 0.8, 2.0
# The number of rows or columns of a tile at which multiplying takes as long as reading shared memory; an estimate.
_SMEM_BOUND = 15.0

_PROBLEM_FEATURES = (
    "log_batch",
    "log_m",
    "log_n",
    "log_k",
    "log_flops",
    "intensity",
    "fp16",
    "fp32",
    "int8",
    *FLAGS,
    "tf32_across",
    "sm_count",
    "flops_per_byte_limit",
    "a_alignment",
    "b_alignment",
    "y_alignment",
)
CONFIG_FEATURES = (
    *BLOCKS,
    "split_k",
    "programs_asked",
    "tma",
    "consumers",
    "pingpong",
    *TILE,
    "accumulator_registers",
    "in_flight_bytes_per_sm",
)
_MIXED_FEATURES = (
    *TILING,
    "m_tiles",
    "n_tiles",
    "busy_share",
    "log_compute_us",
    "log_dram_us",
    "log_l2_us",
    "log_partial_us",
    "l2_reuse",
    "band_over_l2",
    "estimate_us",
    "log_tiles_per_sm",
    "log_m_over_block_m",
    "log_n_over_block_n",
    "stages_over_steps",
)
#: Config columns that all other features depend on.
_DECIDING = (*BLOCKS, "split_k", "programs_per_sm", "num_stages")
FEATURE_NAMES = _PROBLEM_FEATURES + CONFIG_FEATURES + _MIXED_FEATURES


def feature_groups(problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]) -> tuple[FeatureGroup, ...]:
    """Return the features, in a group of columns for each of the call, the config and its tile.

    They are finite even if the problem has no rows.
    """
    space = _space(tuple(configs), problem.itemsize, device)
    batch, m, n, k = (max(problem[dim], 1) for dim in ("batch", "m", "n", "k"))
    out_itemsize = 4 if output_dtype(problem) == "int32" else problem.itemsize
    flops = 2.0 * batch * m * n * k
    read_bytes = float(batch) * (m + n) * k * problem.itemsize
    written_bytes = float(batch) * m * n * out_itemsize
    matrix_tflops = device.matrix_tflops_of(problem.dtype_name) * (_TF32_RATE if problem.dtype == "fp32" else 1.0)
    of_call = [
        np.log2(batch),
        np.log2(m),
        np.log2(n),
        np.log2(k),
        np.log2(flops),
        np.log2(flops / (read_bytes + written_bytes)),
        problem.dtype == "fp16",
        problem.dtype == "fp32",
        problem.dtype == "int8",
        *(flag in problem.flags for flag in FLAGS),
        # The number of operands that asynchronous products cannot read as stored: they take only 16-bit operands
        # transposed (PTX ISA, wgmma: imm-trans-a and imm-trans-b). Without this feature, trees would have to combine
        # three flags.
        sum(flag in problem.flags for flag in LAYOUTS) * (problem.dtype == "fp32"),
        device.sm_count,
        matrix_tflops * 1e3 / device.copy_bandwidth_gbs,
        *(alignment(problem[dim]) for dim in row_lengths(problem)),
    ]

    # Per distinct tile, (n_tiles,); there are a third as many as configs.
    block_m, block_n, block_k, group_m, splits, programs, stages = space.combinations
    m_tiles, n_tiles = np.ceil(m / block_m), np.ceil(n / block_n)
    all_steps = np.ceil(k / block_k)
    steps = np.maximum(np.ceil(all_steps / splits), 1.0)  # of one tile's part of K
    work = TiledWork(device, programs, batch * splits * m_tiles * n_tiles, steps)
    compute_us = work.compute_us(2.0 * block_m * block_n * block_k, matrix_tflops)
    dram_us = work.moved_us(read_bytes + written_bytes)
    busy = np.minimum(work.tiles / device.sm_count, 1.0)  # share of SMs with work
    loaded_bytes = work.tiles * steps * (block_m + block_n) * block_k * problem.itemsize
    l2_us = work.moved_us(loaded_bytes, L2_OVER_DRAM) / busy
    # Partial sums are written and read back in float32. A single SM does not use the whole bandwidth.
    partial_bytes = np.where(splits > 1, (2.0 * splits) * batch * m * n * 4, 0.0)
    partial_us = np.where(splits > 1, _SECOND_LAUNCH_US, 0.0) + work.moved_us(partial_bytes, L2_OVER_DRAM)
    # How many concurrent programs share a tile of b (M tiles adjacent in a band) or of a.
    sharing = np.minimum(group_m, m_tiles)
    wide = np.minimum(n_tiles, np.maximum(work.slots / np.maximum(sharing, 1), 1))
    reuse = sharing * block_m + wide * block_n
    # A tile reads each row and column of its operands from shared memory, whose bandwidth limits small tiles; products
    # of fewer than 64 rows are not asynchronous.
    slowed_us = compute_us * (1.0 + _SMEM_BOUND * (1.0 / block_m + 1.0 / block_n)) * np.where(block_m < 64, 1.6, 1.0)
    estimate_us = np.maximum(np.maximum(slowed_us, l2_us), dram_us / np.minimum(2 * busy, 1.0)) + partial_us
    # A program waits for its first step, and for every step that is loaded while too few are in flight.
    waiting_us = _LAUNCH_US + _STEP_US * (1.0 + work.rounds * steps / np.maximum(stages, 1.0) / 4)
    times_us = {"compute_us": compute_us, "dram_us": dram_us, "l2_us": l2_us, "partial_us": partial_us + 0.1}
    found = work.columns((m, n, k), (block_m, block_n, block_k), m_tiles, n_tiles, **times_us) | {
        "padding_k": all_steps * block_k / k,
        "busy_share": busy,
        "l2_reuse": np.log2(reuse),
        "band_over_l2": np.log2(reuse * k * problem.itemsize / device.l2_bytes),
        "estimate_us": estimate_us.astype(np.float32) + waiting_us,  # rounded first, as when rankers were trained
        "log_m_over_block_m": np.log2(m / block_m),
        "log_n_over_block_n": np.log2(n / block_n),
        "stages_over_steps": (1.0 / steps).astype(np.float32) * stages.astype(np.float32),  # rounded, too
    }
    return space.groups([of_call], [found[name] for name in _MIXED_FEATURES])


@remembered(maxsize=64)
def _space(configs: tuple[KernelConfig, ...], itemsize: int, device: DeviceSpec) -> ConfigTable:
    """Return the table of the feature columns that depend only on the configs, the dtype and the device."""
    smem = [smem_bytes(config.to_json(), itemsize, device) for config in configs]
    columns = config_columns(configs, smem, device, itemsize=itemsize)
    return ConfigTable(len(_PROBLEM_FEATURES), CONFIG_FEATURES, columns, _DECIDING)
