"""What the ranker sees of one grouped GEMM call and a list of configs.

Everything is computed for all configs at once: one prediction over the space has 5 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ...datasets import DeviceSpec, KernelConfig, Problem
from .routing import typical_sizes
from .space import KNOBS, accumulator_registers, resident_programs, smem_bytes

# L2 delivers about this multiple of the copy bandwidth (H100/H200 microbenchmarks: 5.5-7 TB/s read against 3-4.3).
_L2_OVER_DRAM = 1.6

_CONFIG_FEATURES = (
    "block_m",
    "block_n",
    "block_k",
    "group_m",
    "use_tma",
    "num_warps",
    "num_stages",
    "tile_area",
    "tile_aspect",
    "smem_bytes",
    "programs_per_sm",
    "accumulator_registers",
    "in_flight_bytes_per_sm",
)
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
    "fp16",
    "sm_count",
    "flops_per_byte_limit",
)
_MIXED_FEATURES = (
    "log_tiles",
    "log_rounds",
    "round_efficiency",
    "padding_m",
    "padding_n",
    "padding_k",
    "k_steps",
    "log_steps_per_program",
    "rows_per_active_over_block_m",
    "m_tiles_per_group",
    "n_tiles",
    "largest_group_tiles",
    "log_compute_us",
    "log_dram_us",
    "log_l2_us",
    "l2_reuse",
    "roofline_us",
)
FEATURE_NAMES = _PROBLEM_FEATURES + _CONFIG_FEATURES + _MIXED_FEATURES


def group_sizes_of(problem: Problem) -> NDArray[np.int64]:
    """The sizes if they are known, else typical ones, (groups,)."""
    if problem.group_sizes is not None:
        return np.asarray(problem.group_sizes, dtype=np.int64)
    return typical_sizes(problem["rows"], max(problem["groups"], 1))


def features(problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]) -> NDArray[np.float32]:
    """(n_configs, n_features), columns named by FEATURE_NAMES; finite for any problem, also one without rows."""
    space = _space(tuple(configs), problem.itemsize, device)
    rows, n, k, groups = (max(problem[dim], 1) for dim in ("rows", "n", "k", "groups"))
    sizes = group_sizes_of(problem)
    active = max(int((sizes > 0).sum()), 1)
    flops = 2.0 * rows * n * k
    weight_bytes = float(active) * n * k * problem.itemsize
    row_bytes = float(rows) * (n + k) * problem.itemsize
    per_call = np.array(
        [
            np.log2(rows),
            np.log2(n),
            np.log2(k),
            np.log2(groups),
            np.log2(active),
            np.log2(rows / active),
            sizes.max(initial=0) * groups / rows,
            problem.group_sizes is not None,
            np.log2(flops),
            np.log2(flops / (weight_bytes + row_bytes)),
            problem.dtype == "fp16",
            device.sm_count,
            device.matrix_tflops * 1e3 / device.copy_bandwidth_gbs,
        ],
        dtype=np.float32,
    )

    # Tile counts, by the few distinct BLOCK_M.
    tiles_of = {m: max(int(((sizes + m - 1) // m).sum()), 1) for m in space.distinct_m}
    m_tiles = np.array([tiles_of[m] for m in space.distinct_m], dtype=np.float64)[space.which_m]
    n_tiles = np.ceil(n / space.block_n)
    k_steps = np.ceil(k / space.block_k)
    tiles = m_tiles * n_tiles
    slots = device.sm_count * space.programs
    rounds = np.ceil(tiles / slots)
    padded_k = k_steps * space.block_k

    # The SMs' time at the measured matrix rate: the busiest one does `rounds` tiles for each resident program.
    busiest = np.minimum(rounds * space.programs, np.ceil(tiles / device.sm_count))
    tile_flops = 2.0 * space.block_m * space.block_n * padded_k
    compute_us = busiest * tile_flops * device.sm_count / (device.matrix_tflops * 1e6)
    dram_us = (weight_bytes + row_bytes) / (device.copy_bandwidth_gbs * 1e3)
    loaded_bytes = tiles * (space.block_m + space.block_n) * padded_k * problem.itemsize
    l2_us = loaded_bytes / (device.copy_bandwidth_gbs * 1e3 * _L2_OVER_DRAM)
    # How many concurrent programs share a w tile (M tiles side by side in a band) or an x tile (N tiles).
    tiles_per_group = m_tiles / active
    sharing = np.minimum(space.group_m, tiles_per_group)
    mixed = np.stack(
        [
            np.log2(tiles),
            np.log2(rounds),
            tiles / (rounds * slots),
            m_tiles * space.block_m / rows,
            n_tiles * space.block_n / n,
            padded_k / k,
            k_steps,
            np.log2(rounds * k_steps),
            rows / active / space.block_m,
            tiles_per_group,
            n_tiles,
            np.ceil(sizes.max(initial=0) / space.block_m) * n_tiles / np.maximum(slots, 1),
            np.log2(compute_us),
            np.full(len(tiles), np.log2(dram_us)),
            np.log2(l2_us),
            np.log2(sharing * space.block_m + np.minimum(n_tiles, slots / np.maximum(sharing, 1)) * space.block_n),
            np.maximum(np.maximum(compute_us, l2_us), dram_us),
        ],
        axis=1,
    ).astype(np.float32)
    return np.concatenate([np.broadcast_to(per_call, (len(tiles), len(per_call))), space.columns, mixed], axis=1)


class _Space:
    """The arrays that depend only on the configs, the dtype and the device."""

    def __init__(self, configs: tuple[KernelConfig, ...], itemsize: int, device: DeviceSpec) -> None:
        table = np.array([[config[knob] for knob in KNOBS] for config in configs], dtype=np.float64)
        self.block_m, self.block_n, self.block_k, self.group_m, _, tma, warps, stages = table.T
        self.programs = np.array([resident_programs(c, itemsize, device) for c in configs], dtype=np.float64)
        smem = np.array([smem_bytes(c, itemsize, device) for c in configs], dtype=np.float64)
        accumulators = accumulator_registers(self.block_m, self.block_n, warps)
        in_flight = self.programs * (stages - 1) * (self.block_m + self.block_n) * self.block_k * itemsize
        self.columns = np.stack(
            [
                self.block_m,
                self.block_n,
                self.block_k,
                self.group_m,
                tma,
                warps,
                stages,
                self.block_m * self.block_n,
                self.block_m / self.block_n,
                smem,
                self.programs,
                accumulators,
                in_flight,
            ],
            axis=1,
        ).astype(np.float32)
        distinct, self.which_m = np.unique(self.block_m.astype(np.int64), return_inverse=True)
        self.distinct_m = [int(m) for m in distinct]


_space = lru_cache(maxsize=64)(_Space)
