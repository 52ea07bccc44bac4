"""Gluon code that kernels with CONSUMERS share: Hopper's asynchronous copies and products, and barriers.

Loading warps and multiplying warps of a program synchronize by barriers. Gluon is experimental: its names and their
locations are collected here, and `config_limits.why_no_gluon` checks whether this module can be imported.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

__all__ = [
    "async_copy",
    "fence_async_shared",
    "halves",
    "load_scales",
    "load_tile",
    "mbarrier",
    "stage_barriers",
    "store_box",
    "store_tile",
    "tma",
    "turn_barriers",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]

# The names of copies since Triton 3.8 or 3.9, and before.
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
load_scales = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def stage_barriers(STAGES: gl.constexpr, READERS: gl.constexpr):
    """Return barriers (full, empty): full once a stage is loaded, empty once all READERS have read it."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=READERS)
    return full, empty


@gluon.jit
def turn_barriers():
    """Return a barrier for each of two warp groups that alternate; a group waits at its own until the other arrives."""
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for turn in gl.static_range(2):
        mbarrier.init(turns.index(turn), count=1)
    return turns


@gluon.jit
def halves(tile):
    """Return the left and the right half of a warp group's tile, by columns; every value stays in its thread."""
    ROWS: gl.constexpr = tile.shape[0]
    HALF: gl.constexpr = tile.shape[1] // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF, 16])
    left, right = tile.reshape((ROWS, 2, HALF)).permute((0, 2, 1)).split()
    left = gl.convert_layout(left, layout, assert_trivial=True)
    right = gl.convert_layout(right, layout, assert_trivial=True)
    return left, right


@gluon.jit
def store_box(tile, desc, held, matrix, row, col):
    """Store a warp group's tile by TMA, at (matrix, row, col) of a descriptor.

    It passes through `held`, shared memory of the tile's size.
    """
    tma.store_wait(0)  # until the previous content of `held` is stored
    held.store(tile)
    fence_async_shared()
    store_tile(desc, [matrix, row, col], held.reshape([1, tile.shape[0], tile.shape[1]]))
