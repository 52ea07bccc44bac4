"""Fixtures of the tests of kernels/ that compile."""

from __future__ import annotations

import pytest


@pytest.fixture
def compiles(own_cache):
    """(kernel, found on disk) of every binary that Triton makes or loads from here on, none being in memory."""
    import triton
    from foretune.kernels.grouped_gemm import dw, gemm, rowwise, tiles
    from foretune.kernels.grouped_gemm.launcher import Launcher

    for module in (dw, gemm, rowwise, tiles):
        for value in vars(module).values():
            if isinstance(value, Launcher):
                value.forget()
            elif isinstance(value, triton.JITFunction):
                value.device_caches.clear()
    seen, before = [], triton.knobs.compilation.listener
    triton.knobs.compilation.listener = lambda src, cache_hit, **_: seen.append((src.name, cache_hit))
    yield seen
    triton.knobs.compilation.listener = before
