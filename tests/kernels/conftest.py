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
    from foretune.kernels.grouped_gemm.triton_kernels import (
        dw,
        dw_map,
        gemm,
        launches,
        rowwise,
        sorting,
        tiles,
        ungrouped,
    )
    from foretune.runtime.launching.launcher import Launcher

    launches.OVER_ROWS.made.clear()
    launches.OF_DW.made.clear()
    launches.summing.cache_clear()
    tiles._of_dw().forget()
    # (Gluon's is there only once something has launched it.)
    names = (f"{dw.__package__}.{name}" for name in ("specialized_gemm", "specialized_dw"))
    jobs = [sys.modules[name] for name in names if name in sys.modules]
    for module in (dw, dw_map, gemm, rowwise, sorting, tiles, ungrouped, *jobs):
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
    def kept(sizes, rows, *chunks):
        return build(torch.tensor(sizes, dtype=torch.int32), rows, *chunks)

    def built(sizes, rows, *chunks):
        if sizes.dim() == 2:  # a routing, which has its own map
            return build(sizes, rows, *chunks)
        return kept(tuple(sizes.tolist()), rows, *chunks)

    return built


@pytest.fixture(autouse=True)
def one_map_a_routing(request, monkeypatch):
    """The interpreter takes longer to make a map of a few groups than to multiply them."""
    if os.environ.get("TRITON_INTERPRET") == "1" and "test_tiles" not in request.path.name:
        from foretune.kernels.grouped_gemm.triton_kernels.tiles import TileMap

        monkeypatch.setattr(TileMap, "build", request.getfixturevalue("kept_maps"))


@pytest.fixture
def right_fp8(monkeypatch):
    """Convert bf16 to float32 and float32 to fp8 in Triton's interpreter as the hardware does.

    The interpreter (3.6 to 3.9) drops the carry into the exponent, so that 1.97 becomes 1 in fp8 instead of 2, and
    shifts subnormal numbers.
    """
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float
    rounded = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}

    def converted(data, source, target, mode):
        if source == tl.bfloat16 and target == tl.float32:
            return (np.asarray(data).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        if source != tl.float32 or target not in rounded:
            return convert(data, source, target, mode)
        numbers = torch.from_numpy(np.ascontiguousarray(data).view(np.float32).copy())
        return numbers.to(rounded[target]).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", converted)
