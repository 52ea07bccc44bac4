"""What the ranker sees of one grouped GEMM call and a list of configs.

Everything is computed for all configs at once, and what their tiles decide once for each kind of tile: one prediction
over the space has a millisecond.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...datasets import DeviceSpec, KernelConfig, Problem
from ...model.configs_memo import remembered
from .chunks import chunk_rows
from .group_sizes import typical_sizes
from .space import accumulator_registers, resident_programs, smem_bytes
from .variants import DW, PERMUTATIONS, Variant

Floats: TypeAlias = NDArray[np.float64]
Sizes: TypeAlias = NDArray[np.int64]

# L2 delivers about this multiple of the copy bandwidth (H100/H200 microbenchmarks: 5.5-7 TB/s read against 3-4.3).
_L2_OVER_DRAM = 1.6

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
    space = _space(tuple(configs), variant, problem.itemsize, device)
    rows, n, k, groups = (max(problem[dim], 1) for dim in ("rows", "n", "k", "groups"))
    sizes = group_sizes_of(problem)
    active = max(int((sizes > 0).sum()), 1)
    flops = 2.0 * rows * n * k
    # dW writes all of its groups, the others read those that have rows.
    weight_bytes = float(groups if variant is DW else active) * n * k * problem.itemsize
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
            problem.ragged is not None,
            np.log2(flops),
            np.log2(flops / (weight_bytes + row_bytes)),
            problem.dtype == "fp16",
            problem.dtype == "fp32",
            *(flag in problem.flags for flag in PERMUTATIONS),
            device.sm_count,
            device.matrix_tflops * 1e3 / device.copy_bandwidth_gbs,
            _alignment(n),
            _alignment(k),
        ],
        dtype=np.float32,
    )

    # For each kind of tile, (n_kinds,), of which there are a tenth as many as configs.
    block_m, block_n, block_k, group_m, programs = space.kinds
    work = work_of(variant, problem, device, sizes, (block_m, block_n, block_k))
    slots = device.sm_count * programs
    rounds = np.ceil(work.tiles / slots)
    share = work.steps / device.sm_count  # of one SM, in steps

    # The SMs' time at the measured matrix rate: the busiest one does `rounds` tiles for each resident program.
    busiest = np.minimum(rounds * programs, np.ceil(work.tiles / device.sm_count))
    step_flops = 2.0 * block_m * block_n * block_k
    busiest_steps = np.maximum(busiest * work.steps / work.tiles, work.longest)
    compute_us = busiest_steps * step_flops * device.sm_count / (device.matrix_tflops * 1e6)
    dram_us = (weight_bytes + row_bytes) / (device.copy_bandwidth_gbs * 1e3)
    loaded_bytes = work.steps * (block_m + block_n) * block_k * problem.itemsize
    l2_us = loaded_bytes / (device.copy_bandwidth_gbs * 1e3 * _L2_OVER_DRAM)
    # How many concurrent programs share the columns' operand (M tiles side by side in a band) or the rows' one.
    sharing = np.minimum(group_m, work.m_tiles)
    mixed = np.stack(
        [
            np.log2(work.tiles),
            np.log2(rounds),
            work.tiles / (rounds * slots),
            work.padding_m,
            work.padding_n,
            work.padding_k,
            work.steps / work.tiles,
            np.log2(rounds * work.steps / work.tiles),
            work.m_tiles,
            work.n_tiles,
            work.depth_per_group / block_k,
            work.longest / share,
            np.log2(compute_us),
            np.full(len(rounds), np.log2(dram_us)),
            np.log2(l2_us),
            np.log2(sharing * block_m + np.minimum(work.n_tiles, slots / np.maximum(sharing, 1)) * block_n),
            np.maximum(np.maximum(compute_us, l2_us), dram_us),
            np.log2(work.tiles / device.sm_count),
            np.log2(rows / groups / block_m),
            work.tiles / work.steps,  # times the stages, below
        ],
        axis=1,
    ).astype(np.float32)
    table = np.empty((len(space.kind), len(FEATURE_NAMES)), np.float32)
    table[:, : len(_PROBLEM_FEATURES)] = per_call
    table[:, len(_PROBLEM_FEATURES) : -len(_MIXED_FEATURES)] = space.columns
    table[:, -len(_MIXED_FEATURES) :] = mixed.take(space.kind, axis=0)
    table[:, -1] *= space.stages
    return table


def _alignment(size: int) -> int:
    """The largest power of two that divides a size, as its exponent, 9 at most: what a TMA store of rows depends on."""
    return min((size & -size).bit_length() - 1, 9)


class _Space:
    """What depends only on the configs, the dtype and the device.

    `columns` is the table of the features that do, (n_configs, n_features), `stages` num_stages, (n_configs,), `kinds`
    the distinct combinations of (block_m, block_n, block_k, group_m, programs), (5, n_kinds), which is what the other
    features look at, and `kind` the one of each config, (n_configs,).
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
        self.columns = np.stack(
            [
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
            ],
            axis=1,
        ).astype(np.float32)
        self.stages = stages.astype(np.float32)
        tiles = np.stack([block_m, block_n, block_k, group_m, programs])
        self.kinds, kind = np.unique(tiles, axis=1, return_inverse=True)
        self.kind = kind.ravel()  # NumPy 2.0 gives it two axes


_space = remembered(maxsize=64)(_Space)


@dataclass(frozen=True)
class Work:
    """The tiles of one call for each config, and their steps of BLOCK_K; all are (n_configs,) and at least 1."""

    tiles: Floats
    steps: Floats  # of all tiles together
    longest: Floats  # steps of the longest tile
    padding_m: Floats  # rows, columns and depth that are computed, over those asked for
    padding_n: Floats
    padding_k: Floats
    m_tiles: Floats  # of one group, on average
    n_tiles: Floats
    depth_per_group: Floats  # the contraction's length, on average


def work_of(
    variant: Variant, problem: Problem, device: DeviceSpec, sizes: Sizes, blocks: tuple[Floats, Floats, Floats]
) -> Work:
    """The work of a call with these group sizes, (groups,), for configs with these (BLOCK_M, BLOCK_N, BLOCK_K)."""
    return (_of_dw if variant is DW else _of_rows)(variant, problem, device, sizes, blocks)


def _of_rows(
    variant: Variant, problem: Problem, device: DeviceSpec, sizes: Sizes, blocks: tuple[Floats, Floats, Floats]
) -> Work:
    """Forward and dX: M tiles are ragged, and all tiles have equally many steps."""
    block_m, block_n, block_k = blocks
    columns, depth = max(problem[variant.columns], 1), max(problem[variant.depth], 1)
    m_tiles = _for_each(block_m, lambda m: max(np.ceil(sizes / m).sum(), 1.0))
    n_tiles, tile_steps = np.ceil(columns / block_n), np.ceil(depth / block_k)
    return Work(
        tiles=m_tiles * n_tiles,
        steps=m_tiles * n_tiles * tile_steps,
        longest=tile_steps,
        padding_m=m_tiles * block_m / max(problem["rows"], 1),
        padding_n=n_tiles * block_n / columns,
        padding_k=tile_steps * block_k / depth,
        m_tiles=m_tiles / max(int((sizes > 0).sum()), 1),
        n_tiles=n_tiles,
        depth_per_group=np.full(len(block_m), float(depth)),
    )


def _of_dw(
    variant: Variant, problem: Problem, device: DeviceSpec, sizes: Sizes, blocks: tuple[Floats, Floats, Floats]
) -> Work:
    """dW: tiles are N x K, the same for every chunk of rows, and a tile has as many steps as its chunk is long."""
    block_m, block_n, block_k = blocks
    rows, n, k = (max(problem[dim], 1) for dim in ("rows", "n", "k"))
    longest_chunk = chunk_rows(rows, n, k, device.sm_count)
    counts = np.maximum(np.ceil(sizes / longest_chunk), 1)
    lengths = sizes / counts
    steps = _for_each(block_k, lambda b: (np.maximum(np.ceil(lengths / b), 1) * counts).sum())
    m_tiles, n_tiles = np.ceil(n / block_m), np.ceil(k / block_n)
    return Work(
        tiles=counts.sum() * m_tiles * n_tiles,
        steps=steps * m_tiles * n_tiles,
        longest=np.maximum(np.ceil(lengths.max(initial=0) / block_k), 1),
        padding_m=m_tiles * block_m / n,
        padding_n=n_tiles * block_n / k,
        padding_k=steps * block_k / rows,
        m_tiles=m_tiles,
        n_tiles=n_tiles,
        depth_per_group=np.full(len(block_m), rows / max(int((sizes > 0).sum()), 1)),
    )


def _for_each(values: Floats, figure: Callable[[int], float]) -> Floats:
    """The figure of each value, computed once for each of the few that there are."""
    distinct, which = np.unique(values.astype(np.int64), return_inverse=True)
    return np.array([figure(int(value)) for value in distinct], dtype=np.float64)[which]
