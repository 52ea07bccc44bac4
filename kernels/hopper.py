"""What kernels in Gluon use of Hopper: copies of tiles that barriers count, and products that run beside them.

Gluon is experimental: this is where it may have moved (`consumers.py` asks), and what its names are now.
"""

from __future__ import annotations

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
    "load_scales",
    "load_tile",
    "mbarrier",
    "store_tile",
    "tma",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]

# What copies are called from Triton 3.8 or 3.9 on, and before.
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
load_scales = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
