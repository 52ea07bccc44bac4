"""What launches dW: which of the two kernels a config means, and the sum of what long groups are cut into."""

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
    """Launches the kernels with explicit arguments and does not wait for them.

    dy (rows, N) and x (rows, K), sorted by group; dw (groups, N, K), all of it written, with zeros where no rows are.
    """
    entries, rows, groups, chunk_rows = tile_map
    _, n, k = dw.shape
    prepare_dw(rows, groups, chunk_rows, n, k, config, sm_count)((dy, x, dw, entries))


def prepare_dw(
    rows: int, groups: int, chunk_rows: int, n: int, k: int, config: KernelConfig, sm_count: int
) -> Callable[[Sequence[torch.Tensor | None]], None]:
    """What launches the kernels on (dy, x, dw, the entries of a tile map) of these sizes, again and again. All as in
    `launch_dw`."""
    sizes = TileMap(None, rows, groups, chunk_rows)  # type: ignore[arg-type] # of every map
    grid = grid_of(sizes.most_chunks * -(-n // config["BLOCK_M"]), k, config, sm_count)

    def launch(tensors: Sequence[Any]) -> None:
        dy, x, dw, entries = tensors
        if rows == 0:  # nothing that a descriptor could point to
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
    """Room for the partial sums, (slots, words, N, K), float32 as words of dw's dtype; dw itself where there are none,
    because a descriptor needs an address."""
    import torch

    if not tile_map.slots:
        return dw
    return torch.empty((tile_map.slots, 4 // dw.itemsize, *dw.shape[1:]), dtype=dw.dtype, device=dw.device)


def add_partials(partial: torch.Tensor, dw: torch.Tensor, tile_map: TileMap) -> None:
    """Adds up the partial sums of split groups, if there can be any."""
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
    """The kernel's positional arguments, less the flags and the knobs."""
    _, n, k = dw.shape
    return dy, x, dw, partial, tile_map.entries, tile_map.rows, tile_map.groups, max(tile_map.slots, 1), n // 8, k // 8


def launcher_of(config: KernelConfig) -> Launcher:
    """What launches the kernel that a config means."""
    return launcher_of_jobs() if config["CONSUMERS"] else _launch


@cache
def launcher_of_jobs() -> Launcher:
    """What launches the one of CONSUMERS. It imports Gluon, which other configs do not need."""
    from .specialized_dw import specialized_dw_kernel

    return Launcher(specialized_dw_kernel)
