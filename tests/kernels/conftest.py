"""Fixtures of the tests of kernels/ that compile."""

from __future__ import annotations

import pytest


@pytest.fixture
def compiles(own_cache):
    """(kernel, found on disk) of every binary that Triton makes or loads from here on, none being in memory."""
    import triton
    from foretune.kernels.grouped_gemm.forward import grouped_gemm_fwd_kernel
    from foretune.kernels.grouped_gemm.tiles import tile_map_kernel

    for kernel in (grouped_gemm_fwd_kernel, tile_map_kernel):
        kernel.device_caches.clear()
    seen, before = [], triton.knobs.compilation.listener
    triton.knobs.compilation.listener = lambda src, cache_hit, **_: seen.append((src.name, cache_hit))
    yield seen
    triton.knobs.compilation.listener = before
