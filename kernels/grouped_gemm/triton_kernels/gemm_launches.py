"""Launch forward and dX: choose the plain or the warp-specialized kernel."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from ....runtime.launching.launcher import Launcher, launch_nothing, with_scratch
from .gemm import grouped_gemm_kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from ....datasets import KernelConfig
    from .tiles import TileMap

_launch = Launcher(grouped_gemm_kernel)


def launch_gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    tile_map: TileMap,
    config: KernelConfig,
    sm_count: int,
    *,
    transposed: bool = False,
    gather: torch.Tensor | None = None,
    divisor: int = 1,
    scatter: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> None:
    """Launch the kernel on explicit arguments, without waiting for it. At most one of `gather` and `scatter` is given.

    Args:
        x: (x_rows, K).
        w: (groups, N, K); (groups, K, N) with `transposed`.
        y: (rows, N).
        tile_map: The map of the group sizes.
        config: The config.
        sm_count: The number of the GPU's SMs.
        transposed: The layout of w.
        gather: (rows,); sorted row i is row gather[i] // divisor of x.
        divisor: See `gather`.
        scatter: (rows,); sorted row i is stored as row scatter[i] of y.
        scale: (rows,), the factors of the rows of y, indexed by `gather` or `scatter` if one is given.
        bias: (groups, N).
    """
    prepare_gemm(
        tile_map.rows,
        tile_map.groups,
        y.shape[1],
        x.shape[1],
        config,
        sm_count,
        x_rows=len(x),
        transposed=transposed,
        gathers=gather is not None,
        divisor=divisor,
        scatters=scatter is not None,
    )((x, w, y, tile_map.entries, gather if gather is not None else scatter, scale, bias))


def prepare_gemm(
    rows: int,
    groups: int,
    n: int,
    k: int,
    config: KernelConfig,
    sm_count: int,
    *,
    x_rows: int,
    transposed: bool = False,
    gathers: bool = False,
    divisor: int = 1,
    scatters: bool = False,
) -> Callable[[Sequence[torch.Tensor | None]], None]:
    """Return a function that launches the kernel on any tensors of these sizes.

    Its argument is (x, w, y, entries of a tile map, indices, scale, bias). The other arguments are those of
    `launch_gemm`.
    """
    grid = grid_of(-(-rows // config["BLOCK_M"]) + groups, n, config, sm_count)
    if rows == 0 or grid == 0:
        return launch_nothing
    sizes = (x_rows, rows, groups, n // 8, k // 8, divisor)
    flags = {"TRANSPOSED": transposed, "GATHER": gathers, "SCATTER": scatters}
    prepared = launcher_of(config).prepare((grid, 1, 1), sizes, config, **flags, **constants(config))
    return with_scratch(prepared) if config["TMA_X"] or config["TMA_W"] or config["TMA_Y"] else prepared


def grid_of(m_tiles: int, n: int, config: KernelConfig, sm_count: int) -> int:
    """Return the number of programs: PROGRAMS_PER_SM on each of `sm_count` SMs; if that knob is 0, one per tile.

    There are `m_tiles` tiles along M, and `n` columns.
    """
    tiles: int = m_tiles * -(-n // config["BLOCK_N"])  # triton.cdiv takes 1.5 us
    programs: int = sm_count * config["PROGRAMS_PER_SM"]
    return min(programs or tiles, tiles)


def arguments(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    tile_map: TileMap,
    indices: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    divisor: int = 1,
) -> tuple[Any, ...]:
    """Return the kernel's positional arguments, without the flags and the knobs."""
    shape = (len(x), tile_map.rows, tile_map.groups, y.shape[1] // 8, x.shape[1] // 8, divisor)
    return x, w, y, tile_map.entries, indices, scale, bias, *shape


def launcher_of(config: KernelConfig) -> Launcher:
    """Return the launcher of the kernel that a config runs."""
    return launcher_of_jobs() if config["CONSUMERS"] else _launch


@cache
def launcher_of_jobs() -> Launcher:
    """Return the launcher of the warp-specialized kernel; this imports Gluon, which other configs do not need."""
    from .specialized_gemm import specialized_gemm_kernel

    return Launcher(specialized_gemm_kernel)


def constants(config: KernelConfig) -> dict[str, int]:
    """Return the constexpr parameters that only the warp-specialized kernels have; the same for forward, dX and dW."""
    return {"STAGES": config.num_stages} if config["CONSUMERS"] else {}
