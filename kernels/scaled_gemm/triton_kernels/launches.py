"""Launch the scaled GEMMs: choose the plain or the warp-specialized kernel, and add up the parts of SPLIT_K."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from ....runtime.launching.launcher import Launcher, launch_nothing, with_scratch
from ...grouped_gemm.triton_kernels.gemm_launches import grid_of
from ...matmul.triton_kernels.split_k import add_partials, compile_add_partials
from .product import scaled_gemm_kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from ....datasets import KernelConfig
    from ...grouped_gemm.triton_kernels.tiles import TileMap


def launch_scaled_gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    y: torch.Tensor,
    config: KernelConfig,
    sm_count: int,
    *,
    tile_map: TileMap | None = None,
    rowwise: bool = False,
    blockwise: bool = False,
) -> None:
    """Launch the product, without waiting for it.

    Args:
        x: (rows, K).
        w: (N, K); (groups, N, K) with a tile map.
        x_scale: As `scales.scale_shapes` says, contiguous; blockwise ones (rows, blocks of K) stored block by block.
        w_scale: As `scales.scale_shapes` says, contiguous.
        y: (rows, N).
        config: The config.
        sm_count: The number of the GPU's SMs.
        tile_map: The map of the group sizes; None if the product is dense.
        rowwise: The scales are rowwise.
        blockwise: The scales are blockwise.
    """
    groups = None if tile_map is None else tile_map.groups
    prepared = prepare_scaled_gemm(
        len(x), y.shape[1], x.shape[1], groups, config, sm_count, rowwise=rowwise, blockwise=blockwise
    )
    prepared((x, w, x_scale, w_scale, y, None if tile_map is None else tile_map.entries))


def prepare_scaled_gemm(
    rows: int,
    n: int,
    k: int,
    groups: int | None,
    config: KernelConfig,
    sm_count: int,
    *,
    rowwise: bool = False,
    blockwise: bool = False,
) -> Callable[[Sequence[torch.Tensor | None]], None]:
    """Return a function that launches the product on any tensors of these sizes.

    Its argument is (x, w, x_scale, w_scale, y, entries of a tile map), without a map (None) if there are no groups. The
    other arguments are those of `launch_scaled_gemm`.
    """
    splits = config["SPLIT_K"]
    grid = grid_of(splits * (-(-rows // config["BLOCK_M"]) + (groups or 0)), n, config, sm_count)
    if rows == 0 or grid == 0:
        return launch_nothing
    launcher = _launcher(config["CONSUMERS"] > 0)
    pdl = splits > 1 and launcher.has_dependent_launch
    launch: Callable[[Sequence[torch.Tensor | None]], None] = launcher.prepare(
        (grid, 1, 1), (rows, groups or 1, n // 16, k // 16), config, **_constants(config, rowwise, blockwise, pdl)
    )
    if config["TMA_LOAD"] or config["TMA_STORE"]:
        launch = with_scratch(launch)
    if splits == 1:
        return launch

    def launch_parts(tensors: Sequence[Any]) -> None:
        import torch

        *operands, y, entries = tensors
        partial = torch.empty((splits, 1, rows, n), dtype=torch.float32, device=y.device)
        launch((*operands, partial, entries))
        add_partials(partial, y[None], None, "none", True, pdl)

    return launch_parts


def compile_scaled_gemm(config: KernelConfig, *, grouped: bool, rowwise: bool, blockwise: bool) -> Any:
    """Compile what `launch_scaled_gemm` launches for such scales and the active driver's target, into Triton's cache.

    Returns:
        The binary of the product.
    """
    import torch

    out, launcher = torch.bfloat16, _launcher(config["CONSUMERS"] > 0)
    pdl = config["SPLIT_K"] > 1 and launcher.has_dependent_launch
    if config["SPLIT_K"] > 1:
        compile_add_partials(torch.float32, out, False, "none", True, pdl)
        out = torch.float32
    types = (torch.float8_e4m3fn,) * 2 + (torch.float32,) * 2 + (out, torch.int32 if grouped else None)
    constants = _constants(config, rowwise, blockwise, pdl)
    return launcher.kernel.warmup(*types, 1024, 8, 128, 128, grid=(1,), **constants, **config.to_json())


def _constants(config: KernelConfig, rowwise: bool, blockwise: bool, pdl: bool) -> dict[str, Any]:
    """Return the kernels' constexpr parameters that are not knobs."""
    return {
        "ROWWISE": rowwise,
        "BLOCKWISE": blockwise,
        "SPLIT": config["SPLIT_K"] > 1,
        "STAGES": config.num_stages,
        **({} if config["CONSUMERS"] else {"PDL": pdl}),
    }


@cache
def _launcher(specialized: bool) -> Launcher:
    """Return the launcher of the plain or of the warp-specialized kernel."""
    if not specialized:
        return Launcher(scaled_gemm_kernel)
    from .specialized import specialized_scaled_gemm_kernel  # imports Gluon, which other configs do not need

    return Launcher(specialized_scaled_gemm_kernel)
