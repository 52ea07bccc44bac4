"""Launch dW: choose the plain or the warp-specialized kernel, and add up the chunks of split groups."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from ....runtime.launching.launcher import Launcher, with_scratch
from .dw import grouped_gemm_dw_kernel, sum_partials_kernel
from .gemm_launches import constants, grid_of
from .tiles import TileMap

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from ....datasets import KernelConfig

_SUM_BLOCK = 4096
_launch, _launch_sum = Launcher(grouped_gemm_dw_kernel), Launcher(sum_partials_kernel)


def launch_dw(
    dy: torch.Tensor,
    x: torch.Tensor,
    dw: torch.Tensor,
    tile_map: TileMap,
    config: KernelConfig,
    sm_count: int,
) -> None:
    """Launch dW's kernels on explicit arguments, without waiting for them.

    Args:
        dy: (rows, N), sorted by group.
        x: (rows, K), sorted by group.
        dw: (groups, N, K). All of it is written, with zeros for groups without rows.
        tile_map: The map of the group sizes, built with dW's chunks.
        config: The config.
        sm_count: The number of the GPU's SMs.
    """
    entries, rows, groups, chunk_rows = tile_map
    _, n, k = dw.shape
    prepare_dw(rows, groups, chunk_rows, n, k, config, sm_count)((dy, x, dw, entries))


def prepare_dw(
    rows: int, groups: int, chunk_rows: int, n: int, k: int, config: KernelConfig, sm_count: int
) -> Callable[[Sequence[torch.Tensor | None]], None]:
    """Return a function that launches the kernels on any (dy, x, dw, entries of a tile map) of these sizes.

    The arguments are those of `launch_dw`.
    """
    sizes = TileMap(None, rows, groups, chunk_rows)  # type: ignore[arg-type] # what every map of these sizes has
    grid = grid_of(sizes.most_chunks * -(-n // config["BLOCK_M"]), k, config, sm_count)

    def launch(tensors: Sequence[Any]) -> None:
        dy, x, dw, entries = tensors
        if rows == 0:  # no memory that a descriptor could point to
            dw.zero_()
        elif grid:
            tile_map = TileMap(entries, *sizes[1:])
            partial = partial_sums(dw, tile_map)
            prepared((dy, x, dw, partial, entries))
            add_partials(partial, dw, tile_map)

    numbers = (rows, groups, max(sizes.slots, 1), n // 8, k // 8)
    prepared: Callable[[Sequence[torch.Tensor | None]], None] = launcher_of(config).prepare(
        (grid, 1, 1), numbers, config, **constants(config)
    )
    if config["TMA_DY"] or config["TMA_X"] or config["TMA_DW"]:
        prepared = with_scratch(prepared)
    return launch


def partial_sums(dw: torch.Tensor, tile_map: TileMap) -> torch.Tensor:
    """Return memory for the partial sums of `dw`, (slots, words, N, K): float32 values stored as words of dw's dtype.

    If no group can be split, return dw itself, because a TMA descriptor needs a valid address.
    """
    import torch

    if not tile_map.slots:
        return dw
    return torch.empty((tile_map.slots, 4 // dw.itemsize, *dw.shape[1:]), dtype=dw.dtype, device=dw.device)


def add_partials(partial: torch.Tensor, dw: torch.Tensor, tile_map: TileMap) -> None:
    """Launch the sum of the partial sums of split groups into `dw`, if any group can be split."""
    _, n, k = dw.shape
    if tile_map.most_splits:
        _launch_sum(
            (-(-n * k // _SUM_BLOCK), tile_map.most_splits, 1),
            (partial, dw, tile_map.entries),
            (tile_map.rows, tile_map.groups, tile_map.chunk_rows, n * k // 8),
            BLOCK=_SUM_BLOCK,
            num_warps=8,
        )


def arguments(
    dy: torch.Tensor, x: torch.Tensor, dw: torch.Tensor, partial: torch.Tensor, tile_map: TileMap
) -> tuple[Any, ...]:
    """Return the kernel's positional arguments, without the flags and the knobs."""
    _, n, k = dw.shape
    return dy, x, dw, partial, tile_map.entries, tile_map.rows, tile_map.groups, max(tile_map.slots, 1), n // 8, k // 8


def launcher_of(config: KernelConfig) -> Launcher:
    """Return the launcher of the kernel that a config runs."""
    return launcher_of_jobs() if config["CONSUMERS"] else _launch


@cache
def launcher_of_jobs() -> Launcher:
    """Return the launcher of the warp-specialized kernel; this imports Gluon, which other configs do not need."""
    from .specialized_dw import specialized_dw_kernel

    return Launcher(specialized_dw_kernel)
