"""What the ranker sees of one grouped GEMM call and a list of configs.

Everything is computed for all configs at once, and what their tiles decide once for each kind of tile: one prediction
over the space has a millisecond.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...datasets import DeviceSpec, KernelConfig, Problem
from ...datasets.feature_groups import FeatureGroup, joined
from ...model.configs_memo import remembered
from ..config_table import L2_OVER_DRAM, ConfigTable, Floats, alignment, distinct
from ..sm_limits import accumulator_registers
from .chunks import chunk_rows
from .group_sizes import typical_sizes
from .space import resident_programs, smem_bytes
from .variants import DW, PERMUTATIONS, Variant

Sizes: TypeAlias = NDArray[np.int64]

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
    "fp32",
    *PERMUTATIONS,
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
    "tma_left",
    "tma_right",
    "tma_out",
    "num_warps",
    "num_stages",
    "tile_area",
    "tile_aspect",
    "smem_bytes",
    "programs_per_sm",
    "programs_asked",
    "accumulator_registers",
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
    "depth_per_group_over_block_k",
    "longest_over_share",
    "log_compute_us",
    "log_dram_us",
    "log_l2_us",
    "l2_reuse",
    "roofline_us",
    "log_tiles_per_sm",
    "log_rows_per_group_over_block_m",
    "stages_over_steps",
)
#: Which of these are logarithms.
_LOGS = (0, 1, 7, 12, 13, 14, 15, 17, 18)
FEATURE_NAMES = _PROBLEM_FEATURES + CONFIG_FEATURES + _MIXED_FEATURES


def group_sizes_of(problem: Problem) -> Sizes:
    """The sizes if they are known, else typical ones, (groups,)."""
    if problem.ragged is not None:
        return np.asarray(problem.ragged.sizes, dtype=np.int64)
    return typical_sizes(problem["rows"], max(problem["groups"], 1))


def feature_table(
    variant: Variant, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]
) -> NDArray[np.float32]:
    """(n_configs, n_features), columns named by FEATURE_NAMES; finite for any problem, also one without rows."""
    return joined(feature_groups(variant, (problem,), device, configs))


def feature_groups(
    variant: Variant, problems: Sequence[Problem], device: DeviceSpec, configs: Sequence[KernelConfig]
) -> tuple[FeatureGroup, ...]:
    """The columns of `feature_table` for several problems of one dtype: those of the call, of the config, of its tile,
    and the last one, of its tile's depth and its stages."""
    space = _space(tuple(configs), variant, problems[0].itemsize, device)
    # Below, what a problem has is (n_problems, 1), and what it has on each kind of tile (n_problems, n_kinds).
    rows, n, k, groups = of_each(problems, "rows", "n", "k", "groups")
    all_sizes = [group_sizes_of(problem) for problem in problems]
    active = np.array([[max(np.count_nonzero(sizes), 1)] for sizes in all_sizes], np.float64)
    flops = 2.0 * rows * n * k
    # dW writes all of its groups, the others read those that have rows.
    weight_bytes = (groups if variant is DW else active) * n * k * problems[0].itemsize
    row_bytes = rows * (n + k) * problems[0].itemsize
    limit = device.matrix_tflops * 1e3 / device.copy_bandwidth_gbs
    logs = np.log2(np.hstack([rows, n, k, groups, active, rows / active, flops, flops / (weight_bytes + row_bytes)]))
    per_call = np.empty((len(problems), 1, len(_PROBLEM_FEATURES)), np.float32)
    for of_it, log, problem, sizes in zip(per_call[:, 0], logs.tolist(), problems, all_sizes, strict=True):
        of_it[:] = (
            *log[:6],
            int(sizes.max(initial=0)) * max(problem["groups"], 1) / max(problem["rows"], 1),
            problem.ragged is not None,
            *log[6:],
            problem.dtype == "fp16",
            problem.dtype == "fp32",
            *(flag in problem.flags for flag in PERMUTATIONS),
            device.sm_count,
            limit,
            alignment(max(problem["n"], 1)),
            alignment(max(problem["k"], 1)),
        )

    # For each kind of tile, of which there are a tenth as many as configs.
    block_m, block_n, block_k, group_m, programs = space.kinds
    work = (_work_of_dw if variant is DW else _work_of_rows)(variant, problems, device, all_sizes, active, space)
    slots = device.sm_count * programs
    rounds = np.ceil(work.tiles / slots)
    share = work.steps / device.sm_count  # of one SM, in steps
    tiles_per_sm = work.tiles / device.sm_count

    # The SMs' time at the measured matrix rate: the busiest one does `rounds` tiles for each resident program.
    busiest = np.minimum(rounds * programs, np.ceil(tiles_per_sm))
    step_flops = 2.0 * block_m * block_n * block_k
    busiest_steps = np.maximum(busiest * work.steps / work.tiles, work.longest)
    compute_us = busiest_steps * step_flops * device.sm_count / (device.matrix_tflops * 1e6)
    dram_us = (weight_bytes + row_bytes) / (device.copy_bandwidth_gbs * 1e3)
    loaded_bytes = work.steps * (block_m + block_n) * block_k * problems[0].itemsize
    l2_us = loaded_bytes / (device.copy_bandwidth_gbs * 1e3 * L2_OVER_DRAM)
    # How many concurrent programs share the columns' operand (M tiles side by side in a band) or the rows' one.
    sharing = np.minimum(group_m, work.m_tiles)
    reuse = sharing * block_m + np.minimum(work.n_tiles, slots / np.maximum(sharing, 1)) * block_n
    mixed = np.empty((len(_MIXED_FEATURES) - 1, len(problems), len(block_m)))
    for column, figure in zip(
        mixed,
        (
            work.tiles,
            rounds,
            work.tiles / (rounds * slots),
            work.padding_m,
            work.padding_n,
            work.padding_k,
            work.steps / work.tiles,
            rounds * work.steps / work.tiles,
            work.m_tiles,
            work.n_tiles,
            work.depth_per_group / block_k,
            work.longest / share,
            compute_us,
            dram_us,
            l2_us,
            reuse,
            np.maximum(np.maximum(compute_us, l2_us), dram_us),
            tiles_per_sm,
            rows / groups / block_m,
        ),
        strict=True,
    ):
        column[:] = figure
    mixed[_LOGS, :] = np.log2(mixed[_LOGS, :])
    per_tile = np.ascontiguousarray(mixed.transpose(1, 2, 0), np.float32)
    of_depth = work.tiles_per_step.astype(np.float32)[:, space.depth] * space.stages
    first, second = len(_PROBLEM_FEATURES), len(_PROBLEM_FEATURES) + len(CONFIG_FEATURES)
    last = len(FEATURE_NAMES) - 1
    return (
        FeatureGroup(tuple(range(first)), per_call, space.one_kind),
        space.own,
        FeatureGroup(tuple(range(second, last)), per_tile, space.kind),
        FeatureGroup((last,), of_depth[:, :, None], space.depth_kind),
    )


class _Space(ConfigTable):
    """What depends only on the configs, the dtype and the device. What most other features look at is (block_m,
    block_n, block_k, group_m, programs).

    `ks` are the distinct values of BLOCK_K, and `k` those of each kind, (n_kinds,), as `ms` and `m` are of BLOCK_M. The
    last feature looks at num_stages and BLOCK_K: `stages` and `depth`, a place in `ks`, are those of its kinds,
    (n_depth_kinds,), and `depth_kind` is the one of each config.
    """

    def __init__(self, configs: tuple[KernelConfig, ...], variant: Variant, itemsize: int, device: DeviceSpec) -> None:
        def knob(name: str) -> Floats:
            return np.array([config[name] for config in configs], dtype=np.float64)

        block_m, block_n, block_k = (knob(f"BLOCK_{axis}") for axis in "MNK")
        group_m, warps, stages = knob("GROUP_M"), knob("num_warps"), knob("num_stages")
        programs = np.array([resident_programs(variant, c, itemsize, device) for c in configs], dtype=np.float64)
        smem = np.array([smem_bytes(variant, c, itemsize, device) for c in configs], dtype=np.float64)
        accumulators = accumulator_registers(block_m, block_n, warps)
        in_flight = programs * (stages - 1) * (block_m + block_n) * block_k * itemsize
        columns = [
            block_m,
            block_n,
            block_k,
            group_m,
            *(knob(name) for name in variant.tma),
            warps,
            stages,
            block_m * block_n,
            block_m / block_n,
            smem,
            programs,
            knob("PROGRAMS_PER_SM"),
            accumulators,
            in_flight,
        ]
        super().__init__(len(_PROBLEM_FEATURES), columns, [block_m, block_n, block_k, group_m, programs])
        self.ks, self.k = np.unique(self.kinds[2], return_inverse=True)
        (depth, of_depth), self.depth_kind = distinct(block_k, stages)
        self.depth, self.stages = self.ks.searchsorted(depth), of_depth.astype(np.float32)


_space = remembered(maxsize=64)(_Space)


@dataclass(frozen=True)
class Work:
    """The tiles of a call, and their steps of BLOCK_K, at least 1: (n_problems, n_kinds), or with 1 for what does not
    depend on one of them; `tiles_per_step` (n_problems, len(space.ks))."""

    tiles: Floats
    steps: Floats  # of all tiles together
    longest: Floats  # steps of the longest tile
    padding_m: Floats  # rows, columns and depth that are computed, over those asked for
    padding_n: Floats
    padding_k: Floats
    m_tiles: Floats  # of one group, on average
    n_tiles: Floats
    depth_per_group: Floats  # the contraction's length, on average
    tiles_per_step: Floats


def _work_of_rows(
    variant: Variant,
    problems: Sequence[Problem],
    device: DeviceSpec,
    all_sizes: Sequence[Sizes],
    active: Floats,
    space: _Space,
) -> Work:
    """Forward and dX: M tiles are ragged, and all tiles have equally many steps."""
    block_m, block_n, block_k = space.kinds[:3]
    rows, columns, depth = of_each(problems, "rows", variant.columns, variant.depth)
    m_tiles = np.maximum(tiles_of(all_sizes, space.ms), 1.0)[:, space.m]
    n_tiles, k_steps = np.ceil(columns / block_n), np.ceil(depth / space.ks)
    tile_steps = k_steps[:, space.k]
    return Work(
        tiles=m_tiles * n_tiles,
        steps=m_tiles * n_tiles * tile_steps,
        longest=tile_steps,
        padding_m=m_tiles * block_m / rows,
        padding_n=n_tiles * block_n / columns,
        padding_k=tile_steps * block_k / depth,
        m_tiles=m_tiles / active,
        n_tiles=n_tiles,
        depth_per_group=depth,
        tiles_per_step=1 / k_steps,
    )


def _work_of_dw(
    variant: Variant,
    problems: Sequence[Problem],
    device: DeviceSpec,
    all_sizes: Sequence[Sizes],
    active: Floats,
    space: _Space,
) -> Work:
    """dW: tiles are N x K, the same for every chunk of rows, and a tile has as many steps as its chunk is long."""
    block_m, block_n, block_k = space.kinds[:3]
    rows, n, k = of_each(problems, "rows", "n", "k")
    chunks, longest = np.empty((2, len(problems), 1))
    steps = np.empty((len(problems), len(space.ks)))
    for place, (problem, sizes) in enumerate(zip(problems, all_sizes, strict=True)):
        its_rows, its_n, its_k = (max(problem[dim], 1) for dim in ("rows", "n", "k"))
        counts = np.maximum(np.ceil(sizes / chunk_rows(its_rows, its_n, its_k, device.sm_count)), 1)
        lengths = sizes / counts
        chunks[place], longest[place] = counts.sum(), lengths.max(initial=0)
        steps[place] = np.maximum(np.ceil(lengths / space.ks[:, None]), 1) @ counts
    m_tiles, n_tiles = np.ceil(n / block_m), np.ceil(k / block_n)
    of_tile = steps[:, space.k]
    return Work(
        tiles=chunks * m_tiles * n_tiles,
        steps=of_tile * m_tiles * n_tiles,
        longest=np.maximum(np.ceil(longest / block_k), 1),
        padding_m=m_tiles * block_m / n,
        padding_n=n_tiles * block_n / k,
        padding_k=of_tile * block_k / rows,
        m_tiles=m_tiles,
        n_tiles=n_tiles,
        depth_per_group=rows / active,
        tiles_per_step=chunks / steps,
    )


def of_each(problems: Sequence[Problem], *dims: str) -> Floats:
    """Dimensions of each problem, at least 1: (n_dims, n_problems, 1)."""
    return np.array([[[max(problem[dim], 1)] for problem in problems] for dim in dims], np.float64)


def tiles_of(all_sizes: Sequence[Sizes], blocks: Floats) -> Floats:
    """Tiles of so many rows that hold the groups of each problem, (n_problems, n_blocks).

    >>> tiles_of([np.array([64, 65, 0]), np.array([200])], np.array([64.0, 128.0])).tolist()
    [[3.0, 2.0], [4.0, 2.0]]
    """
    sizes = np.zeros((len(all_sizes), 1, max(map(len, all_sizes))))
    for padded, known in zip(sizes[:, 0], all_sizes, strict=True):
        padded[: len(known)] = known
    tiles: Floats = np.ceil(sizes / blocks[:, None]).sum(axis=2)
    return tiles
