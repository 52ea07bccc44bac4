"""How configs cut one call into tiles and steps: what the features of all three operations are computed from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...datasets import DeviceSpec, Problem
from .chunks import chunk_rows
from .operation import DW, Operation

Floats: TypeAlias = NDArray[np.float64]
Sizes: TypeAlias = NDArray[np.int64]


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
    operation: Operation, problem: Problem, device: DeviceSpec, sizes: Sizes, blocks: tuple[Floats, Floats, Floats]
) -> Work:
    """The work of a call with these group sizes, (groups,), for configs with these (BLOCK_M, BLOCK_N, BLOCK_K)."""
    return (_of_dw if operation is DW else _of_rows)(operation, problem, device, sizes, blocks)


def _of_rows(
    operation: Operation, problem: Problem, device: DeviceSpec, sizes: Sizes, blocks: tuple[Floats, Floats, Floats]
) -> Work:
    """Forward and dX: M tiles are ragged, and all tiles have equally many steps."""
    block_m, block_n, block_k = blocks
    columns, depth = max(problem[operation.columns], 1), max(problem[operation.depth], 1)
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
    operation: Operation, problem: Problem, device: DeviceSpec, sizes: Sizes, blocks: tuple[Floats, Floats, Floats]
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
