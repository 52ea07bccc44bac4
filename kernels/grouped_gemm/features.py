"""The ranker's features of one grouped GEMM call and a list of configs.

Everything is computed for all configs at once, and what depends only on the tile is computed once per distinct tile: a
prediction over the whole space takes about a millisecond.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...datasets import DeviceSpec, KernelConfig, Problem
from ...datasets.config import remembered
from ...datasets.feature_groups import FeatureGroup, joined
from ...datasets.problem import Ragged
from ..config_table import (
    BLOCKS,
    L2_OVER_DRAM,
    TILE,
    TILING,
    ConfigTable,
    Floats,
    TiledWork,
    alignment,
    config_columns,
    distinct,
)
from .group_sizes import typical_sizes
from .space import DW, PERMUTATIONS, Variant, chunk_rows, smem_bytes

Sizes: TypeAlias = NDArray[np.int64]

#: Features of a call that all products over groups have.
OVER_GROUPS = (
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
)
_PROBLEM_FEATURES = (
    *OVER_GROUPS,
    "fp16",
    "fp32",
    *PERMUTATIONS,
    "sm_count",
    "flops_per_byte_limit",
    "n_alignment",
    "k_alignment",
)
CONFIG_FEATURES = (
    *BLOCKS,
    "tma_left",
    "tma_right",
    "tma_out",
    "consumers",
    "pingpong",
    *TILE,
    "programs_asked",
    "accumulator_registers",
    "in_flight_bytes_per_sm",
)
_MIXED_FEATURES = (
    *TILING,
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
#: Config columns that all other features depend on.
_DECIDING = (*BLOCKS, "programs_per_sm")
_SIDES = ("left", "right", "out")
FEATURE_NAMES = _PROBLEM_FEATURES + CONFIG_FEATURES + _MIXED_FEATURES
#: Features of dW only: how many bands of M tiles, and how many groups, the programs that run at once cover, and the
#: fraction left of the last one. Where dW waits for its writes, they distinguish tiles of equal size. Forward and dX
#: gain nothing from them (model/NOTES.md).
_WRITE_FEATURES = ("log_bands_at_once", "log_groups_at_once", "band_left", "group_left")
_OF_WRITES = tuple(range(len(FEATURE_NAMES), len(FEATURE_NAMES) + len(_WRITE_FEATURES)))
_OF_DEPTH = (len(FEATURE_NAMES) - 1,)


def group_sizes_of(problem: Problem) -> Sizes:
    """Return the group sizes, (groups,), or those expected under uniform routing if they are unknown."""
    return typical_sizes(problem["rows"], max(problem["groups"], 1)) if problem.ragged is None else problem.ragged.array


def feature_names(variant: Variant) -> tuple[str, ...]:
    """Return the names of a variant's columns in `feature_table`, in order."""
    return FEATURE_NAMES + _WRITE_FEATURES if variant is DW else FEATURE_NAMES


def feature_table(
    variant: Variant, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]
) -> NDArray[np.float32]:
    """Return the features, (n_configs, n_features), with the columns `feature_names`; finite even without rows."""
    return joined(feature_groups(variant, (problem,), device, configs))


def feature_groups(
    variant: Variant, problems: Sequence[Problem], device: DeviceSpec, configs: Sequence[KernelConfig]
) -> tuple[FeatureGroup, ...]:
    """Return the columns of `feature_table` for several problems of one dtype, grouped by what they depend on.

    There is a group of columns for each of: the call, the config, its tile, its (BLOCK_K, num_stages), and, for dW,
    the matrices that concurrent programs write.
    """
    itemsize = problems[0].itemsize
    space = _space(tuple(configs), variant.first_of_kernel, itemsize, device)
    all_sizes = [group_sizes_of(problem) for problem in problems]
    calls = np.array([_call(variant, problem, itemsize) for problem in problems])
    own = [problems[0].dtype == "fp16", problems[0].dtype == "fp32"]
    own += [flag in problems[0].flags for flag in PERMUTATIONS]
    of_calls = call_columns(problems, device, calls[:, :8], calls[:, 8], own)
    # Below, values per problem are (n_problems, 1), and values per problem and distinct tile are (n_problems, n_tiles).
    rows, n, k, groups, active, *_, moved_bytes = calls.T[:, :, None]

    # Per distinct tile; there are a tenth as many as configs.
    block_m, block_n, block_k, group_m, programs = space.combinations
    work_of = _work_of_dw if variant is DW else _work_of_rows
    work = work_of(variant, (rows, n, k), device, all_sizes, active, space)
    tiled = TiledWork(device, programs, work.tiles, work.steps / work.tiles)
    # Time at the measured matrix rate: the busiest SM computes `rounds` tiles for each resident program.
    busiest_steps = np.maximum(tiled.most_tiles * work.steps / work.tiles, work.longest)
    compute_us = busiest_steps * space.step_flops * device.sm_count / (device.matrix_tflops * 1e6)
    dram_us = tiled.moved_us(moved_bytes)
    l2_us = tiled.moved_us(work.steps * space.step_bytes, L2_OVER_DRAM)
    # How many concurrent programs share a tile of the right operand (M tiles adjacent in a band) or of the left one.
    sharing = np.minimum(group_m, work.m_tiles)
    reuse = sharing * block_m + np.minimum(work.n_tiles, tiled.slots / np.maximum(sharing, 1)) * block_n
    found = {
        "log_tiles": np.log2(work.tiles),
        "log_rounds": np.log2(tiled.rounds),
        "round_efficiency": work.tiles / (tiled.rounds * tiled.slots),
        "padding_m": work.padding_m,
        "padding_n": work.padding_n,
        "padding_k": work.padding_k,
        "steps_per_tile": tiled.steps,
        "log_steps_per_program": np.log2(tiled.rounds * work.steps / work.tiles),
        "m_tiles_per_group": work.m_tiles,
        "n_tiles": work.n_tiles,
        "depth_per_group_over_block_k": work.depth_per_group / block_k,
        "longest_over_share": work.longest / (work.steps / device.sm_count),
        "log_compute_us": np.log2(compute_us),
        "log_dram_us": np.log2(dram_us),
        "log_l2_us": np.log2(l2_us),
        "l2_reuse": np.log2(reuse),
        "roofline_us": np.maximum(np.maximum(compute_us, l2_us), dram_us),
        "log_tiles_per_sm": np.log2(work.tiles / device.sm_count),
        "log_rows_per_group_over_block_m": np.log2(rows / groups / block_m),
    }
    of_depth = work.tiles_per_step.astype(np.float32).take(space.depth, axis=1) * space.stages
    table = (
        *space.groups(of_calls, [found[name] for name in _MIXED_FEATURES[:-1]]),
        FeatureGroup(_OF_DEPTH, of_depth[:, :, None], space.depth_kind),
    )
    if variant is not DW:
        return table
    bands = tiled.slots / (sharing * work.n_tiles)
    groups_at_once = tiled.slots / (work.m_tiles * work.n_tiles)
    writes = [np.log2(bands), np.log2(groups_at_once), bands % 1, groups_at_once % 1]
    of_writes = FeatureGroup(_OF_WRITES, np.stack(writes, axis=2).astype(np.float32), space.row_of_config)
    return *table, of_writes


class _Space(ConfigTable):
    """The feature columns, and the indices into them, that depend only on the configs, the dtype and the device.

    Most features depend only on (block_m, block_n, block_k, group_m, programs). Each distinct combination of these is
    called a distinct tile. The last feature depends only on (BLOCK_K, num_stages); each distinct pair is a depth.

    Attributes:
        step_flops: The floating-point operations of one BLOCK_K step, for each distinct tile, (n_tiles,).
        step_bytes: The bytes loaded by one BLOCK_K step, for each distinct tile, (n_tiles,).
        ks: The distinct values of BLOCK_K; `ms` has those of BLOCK_M.
        k: For each distinct tile, the index of its BLOCK_K in `ks`, (n_tiles,); `m` has that of its BLOCK_M in `ms`.
        depth: For each depth, the index of its BLOCK_K in `ks`, (n_depths,).
        stages: For each depth, its num_stages, (n_depths,).
        depth_kind: For each config, the index of its depth, (n_configs,).
    """

    def __init__(self, configs: tuple[KernelConfig, ...], variant: Variant, itemsize: int, device: DeviceSpec) -> None:
        smem = [smem_bytes(variant, config, itemsize, device) for config in configs]
        columns = config_columns(configs, smem, device, itemsize=itemsize)
        columns |= {f"tma_{side}": columns[knob.lower()] for side, knob in zip(_SIDES, variant.tma, strict=True)}
        super().__init__(len(_PROBLEM_FEATURES), CONFIG_FEATURES, columns, _DECIDING)
        m, n, k = self.combinations[:3]
        self.step_flops, self.step_bytes = 2.0 * m * n * k, (m + n) * k * itemsize
        self.ks, self.k = np.unique(k, return_inverse=True)
        (depth, of_depth), self.depth_kind = distinct(columns["block_k"], columns["num_stages"])
        self.depth, self.stages = self.ks.searchsorted(depth), of_depth.astype(np.float32)


_space = remembered(maxsize=64)(_Space)


class Work(NamedTuple):
    """The numbers of tiles, of their BLOCK_K steps and of their padding in each call; counts are at least 1.

    Shapes are (n_problems, n_tiles), where n_tiles counts the distinct tiles of the space. An axis on which a value
    does not depend has length 1. `tiles_per_step` is (n_problems, number of distinct BLOCK_K).
    """

    tiles: Floats
    steps: Floats  # of all tiles together
    longest: Floats  # steps of the longest tile
    padding_m: Floats  # rows, columns and depth that are computed, divided by those of the problem
    padding_n: Floats
    padding_k: Floats
    m_tiles: Floats  # of one group, on average
    n_tiles: Floats
    depth_per_group: Floats  # the contraction's length, on average
    tiles_per_step: Floats


def _work_of_rows(
    variant: Variant,
    dims: Sequence[Floats],
    device: DeviceSpec,
    all_sizes: Sequence[Sizes],
    active: Floats,
    space: _Space,
) -> Work:
    """Return the work of forward and dX: M tiles end where groups end, and all tiles have the same number of steps.

    Args:
        variant: The product.
        dims: Rows, N and K of the problems, each (n_problems, 1).
        device: Not used; `_work_of_dw` needs it.
        all_sizes: The group sizes of each problem.
        active: The number of groups with rows, (n_problems, 1).
        space: The distinct tiles.
    """
    block_m, block_n, block_k = space.combinations[:3]
    rows, n, k = dims
    columns, depth = (n, k) if variant.columns == "n" else (k, n)
    m_tiles = np.maximum(tiles_of(padded(all_sizes), space.ms), 1.0).take(space.m, axis=1)
    n_tiles, k_steps = np.ceil(columns / block_n), np.ceil(depth / space.ks)
    tiles, tile_steps = m_tiles * n_tiles, k_steps.take(space.k, axis=1)
    return Work(
        tiles=tiles,
        steps=tiles * tile_steps,
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
    dims: Sequence[Floats],
    device: DeviceSpec,
    all_sizes: Sequence[Sizes],
    active: Floats,
    space: _Space,
) -> Work:
    """Return the work of dW: every chunk of rows has the same N x K tiles, which contract over the chunk's rows.

    The arguments are those of `_work_of_rows`.
    """
    block_m, block_n, block_k = space.combinations[:3]
    rows, n, k = dims
    chunks, longest = np.empty((2, len(all_sizes), 1))
    steps = np.empty((len(all_sizes), len(space.ks)))
    sizes = np.hstack(dims).astype(np.int64).tolist()
    for place, (known, (its_rows, its_n, its_k)) in enumerate(zip(all_sizes, sizes, strict=True)):
        counts = np.maximum(np.ceil(known / chunk_rows(its_rows, its_n, its_k, device.sm_count)), 1)
        lengths = known / counts
        chunks[place], longest[place] = counts.sum(), lengths.max(initial=0)
        steps[place] = np.maximum(np.ceil(lengths / space.ks[:, None]), 1) @ counts
    m_tiles, n_tiles = np.ceil(n / block_m), np.ceil(k / block_n)
    of_tile = steps.take(space.k, axis=1)
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


def _call(variant: Variant, problem: Problem, itemsize: int) -> tuple[float, ...]:
    """Return ten numbers of a call: eight whose logarithms are features, the skew of its groups, and the bytes moved.

    The skew is the largest group's size divided by the mean size.
    """
    rows, n, k, groups = [float(max(problem[dim], 1)) for dim in ("rows", "n", "k", "groups")]
    ragged = problem.ragged or Ragged("rows", tuple(group_sizes_of(problem).tolist()))
    active = float(max(ragged.active, 1))
    flops = 2.0 * rows * n * k
    # dW writes the weights of all groups; the others read those of groups with rows.
    weight_bytes = (groups if variant is DW else active) * n * k * itemsize
    moved_bytes = weight_bytes + rows * (n + k) * itemsize
    skew = ragged.max * groups / rows
    return rows, n, k, groups, active, rows / active, flops, flops / moved_bytes, skew, moved_bytes


def call_columns(
    problems: Sequence[Problem], device: DeviceSpec, figures: Floats, skew: Floats, own: Sequence[float]
) -> list[list[float]]:
    """Return the features of calls: of sizes and groups, a family's `own`, of the device, and alignments of N and K.

    Args:
        problems: The problems, all with the same dtype and flags.
        device: The device.
        figures: Rows, N, K, groups, groups with rows, rows for each of these, FLOPs and intensity, (n_problems, 8).
        skew: The largest group's size divided by the mean size, (n_problems,).
        own: Features of the family that are the same for all of these problems.
    """
    is_grouped = "groups" in dict(problems[0].dims)
    limit = device.matrix_tflops * 1e3 / device.copy_bandwidth_gbs
    return [
        [
            *log[:6],
            skewed,
            problem.ragged is not None or not is_grouped,
            *log[6:],
            *own,
            device.sm_count,
            limit,
            alignment(max(problem["n"], 1)),
            alignment(max(problem["k"], 1)),
        ]
        for problem, log, skewed in zip(problems, np.log2(figures).tolist(), skew.tolist(), strict=True)
    ]


def of_each(problems: Sequence[Problem], *dims: str) -> Floats:
    """Return the named dimensions of each problem, (n_dims, n_problems, 1), with 1 in place of 0."""
    return np.array([[[max(problem[dim], 1)] for problem in problems] for dim in dims], np.float64)


def padded(all_sizes: Sequence[Sizes]) -> Floats:
    """Return the group sizes of each problem, (n_problems, groups), padded with zeros to the largest group count."""
    sizes = np.zeros((len(all_sizes), max(map(len, all_sizes))))
    for row, known in zip(sizes, all_sizes, strict=True):
        row[: len(known)] = known
    return sizes


def tiles_of(sizes: Floats, blocks: Floats) -> Floats:
    """Return the number of tiles that cover each problem's groups, for each tile height, (n_problems, n_blocks).

    Args:
        sizes: The group sizes, from `padded`.
        blocks: The heights of tiles, in rows.

    >>> tiles_of(padded([np.array([64, 65, 0]), np.array([200])]), np.array([64.0, 128.0])).tolist()
    [[3.0, 2.0], [4.0, 2.0]]
    """
    tiles: Floats = np.ceil(sizes[:, None] / blocks[:, None]).sum(axis=2)
    return tiles
