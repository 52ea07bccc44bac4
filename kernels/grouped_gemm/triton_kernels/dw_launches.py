"""What launches dW: which of the two kernels a config means, and the sum of what long groups are cut into."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from ....runtime.launching.launcher import Launcher, ensure_allocator
from .dw import grouped_gemm_dw_kernel, sum_partials_kernel
from .gemm_launches import constants, grid_of

if TYPE_CHECKING:
    import torch

    from ....datasets import KernelConfig
    from .tiles import TileMap

_TENSORS = 5  # of the arguments, come first
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
    if tile_map.rows == 0:  # nothing that a descriptor could point to
        dw.zero_()
        return
    _, n, k = dw.shape
    grid = grid_of(tile_map.most_chunks * -(-n // config["BLOCK_M"]), k, config, sm_count)
    if grid == 0:
        return
    if config["TMA_DY"] or config["TMA_X"] or config["TMA_DW"]:
        ensure_allocator()
    partial = partial_sums(dw, tile_map)
    given = arguments(dy, x, dw, partial, tile_map)
    launch = launcher_of(config)
    launch((grid, 1, 1), given[:_TENSORS], given[_TENSORS:], config, **constants(config))
    add_partials(partial, dw, tile_map)


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
    """What launches the one of CONSUMERS. Imports Gluon: for who needs it."""
    from .specialized_dw import specialized_dw_kernel

    return Launcher(specialized_dw_kernel)
