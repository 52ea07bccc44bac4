"""Launch dW in fp8: choose the plain or the warp-specialized kernel, and add up the chunks of split groups."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from ....runtime.launching.launcher import Launcher, with_scratch
from ...grouped_gemm.triton_kernels.dw_launches import add_partials, partial_sums
from ...grouped_gemm.triton_kernels.gemm_launches import grid_of
from ...grouped_gemm.triton_kernels.tiles import TileMap
from .dw import scaled_dw_kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ....datasets import KernelConfig


def prepare_scaled_dw(
    rows: int,
    groups: int,
    chunk_rows: int,
    n: int,
    k: int,
    config: KernelConfig,
    sm_count: int,
    *,
    blockwise: bool,
    gradient: torch.dtype,
) -> Callable[[Sequence[torch.Tensor | None]], None]:
    """Return a function that launches dW's kernels, without waiting for them, on any tensors of these sizes.

    Its argument is (dy, x, scales of dy, scales of x, dw, entries of a tile map), where the operands and their scales
    are the transposed ones that `both_ways.quantize_both_ways` returns, and dw is (groups, N, K), all of which is
    written.

    Args:
        rows: The number of rows.
        groups: The number of groups.
        chunk_rows: The most rows that are summed in one chunk, as in the tile map.
        n: N.
        k: K.
        config: The config.
        sm_count: The number of the GPU's SMs.
        blockwise: The scales are blockwise.
        gradient: The dtype of dy; that of x is torch.float8_e4m3fn.
    """
    sizes = TileMap(None, rows, groups, chunk_rows)  # type: ignore[arg-type] # what every map of these sizes has
    grid = grid_of(sizes.most_chunks * -(-n // config["BLOCK_M"]), k, config, sm_count)
    numbers = rows, groups, max(sizes.slots, 1), n // 16, k // 16
    prepared: Callable[[Sequence[Any]], None] = _launcher(config["CONSUMERS"] > 0).prepare(
        (grid, 1, 1), numbers, config, **_constants(config, blockwise, gradient)
    )
    if config["TMA"]:
        prepared = with_scratch(prepared)

    def launch(tensors: Sequence[Any]) -> None:
        *operands, dw, entries = tensors
        tile_map = TileMap(entries, *sizes[1:])
        partial = partial_sums(dw, tile_map)
        prepared((*operands, dw, partial, entries))
        add_partials(partial, dw, tile_map)

    return launch


def compile_scaled_dw(config: KernelConfig, *, blockwise: bool, gradient: torch.dtype = torch.float8_e4m3fn) -> Any:
    """Compile the kernel of a config for the active driver's target, into Triton's cache, and return its binary."""
    launcher, e4m3 = _launcher(config["CONSUMERS"] > 0), torch.float8_e4m3fn
    types = gradient, e4m3, torch.float32, torch.float32, torch.bfloat16, torch.bfloat16, torch.int32
    constants = _constants(config, blockwise, gradient)
    return launcher.kernel.warmup(*types, 1024, 8, 1, 128, 128, grid=(1,), **constants, **config.to_json())


def _constants(config: KernelConfig, blockwise: bool, gradient: torch.dtype) -> dict[str, Any]:
    """Return the kernels' constexpr parameters that are not knobs."""
    largest = [float(torch.finfo(dtype).max) for dtype in (gradient, torch.float8_e4m3fn)]
    return {"BLOCKWISE": blockwise, "DY_LARGEST": largest[0], "X_LARGEST": largest[1], "STAGES": config.num_stages}


@cache
def _launcher(specialized: bool) -> Launcher:
    """Return the launcher of the plain or of the warp-specialized kernel."""
    if not specialized:
        return Launcher(scaled_dw_kernel)
    from .specialized_dw import specialized_scaled_dw_kernel  # imports Gluon, which other configs do not need

    return Launcher(specialized_scaled_dw_kernel)
