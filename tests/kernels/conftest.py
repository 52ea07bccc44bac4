"""Fixtures of the tests of kernels/."""

from __future__ import annotations

import os
import sys
from functools import cache

import pytest


@pytest.fixture
def compiles(own_cache):
    """(kernel, found on disk) of every binary that Triton makes or loads from here on, none being in memory."""
    import triton
    from foretune.kernels.grouped_gemm.triton_kernels import dw, gemm, launches, rowwise, sorting, tiles, ungrouped
    from foretune.runtime.launching.launcher import Launcher

    launches.OVER_ROWS.made.clear()
    launches.OF_DW.made.clear()
    launches.summing.cache_clear()
    # (Gluon's is there only once something has launched it.)
    names = (f"{dw.__package__}.specialized_{kind}" for kind in ("gemm", "dw"))
    jobs = [sys.modules[name] for name in names if name in sys.modules]
    for module in (dw, gemm, rowwise, sorting, tiles, ungrouped, *jobs):
        for value in vars(module).values():
            if isinstance(value, Launcher):
                value.forget()
            elif isinstance(value, triton.JITFunction):
                value.device_caches.clear()
    seen, before = [], triton.knobs.compilation.listener
    triton.knobs.compilation.listener = lambda src, cache_hit, **_: seen.append((src.name, cache_hit))
    yield seen
    triton.knobs.compilation.listener = before


@pytest.fixture(scope="session")
def kept_maps():
    """`TileMap.build`, which gives the map that it made of the same sizes before."""
    import torch
    from foretune.kernels.grouped_gemm.triton_kernels.tiles import TileMap

    build = TileMap.build

    @cache
    def kept(sizes, rows, chunk_rows):
        return build(torch.tensor(sizes, dtype=torch.int32), rows, chunk_rows)

    def built(sizes, rows, chunk_rows=None):
        if sizes.dim() == 2:  # a routing, which has its own map
            return build(sizes, rows, chunk_rows)
        return kept(tuple(sizes.tolist()), rows, chunk_rows)

    return built


@pytest.fixture(autouse=True)
def one_map_a_routing(request, monkeypatch):
    """The interpreter takes longer to make a map of a few groups than to multiply them."""
    if os.environ.get("TRITON_INTERPRET") == "1" and "test_tiles" not in request.path.name:
        from foretune.kernels.grouped_gemm.triton_kernels.tiles import TileMap

        monkeypatch.setattr(TileMap, "build", request.getfixturevalue("kept_maps"))
