"""What launches forward and dX: which of the two kernels a config means."""

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
    """Launches the kernel with explicit arguments and does not wait for it.

    x (x_rows, K), w (groups, N, K) or, `transposed`, (groups, K, N); y (rows, N). `gather`: the sorted row i is row
    gather[i] // divisor of x. `scatter`: it is stored as row scatter[i] of y. One of the two at most. `scale` (rows,)
    is indexed by them where they are given. `bias` (groups, N).
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
    """What launches the kernel on (x, w, y, a tile map's entries, indices, scale, bias) of these sizes, again and
    again. All as in `launch_gemm`."""
    grid = grid_of(-(-rows // config["BLOCK_M"]) + groups, n, config, sm_count)
    if rows == 0 or grid == 0:
        return launch_nothing
    sizes = (x_rows, rows, groups, n // 8, k // 8, divisor)
    flags = {"TRANSPOSED": transposed, "GATHER": gathers, "SCATTER": scatters}
    prepared = launcher_of(config).prepare((grid, 1, 1), sizes, config, **flags, **constants(config))
    return with_scratch(prepared) if config["TMA_X"] or config["TMA_W"] or config["TMA_Y"] else prepared


def grid_of(m_tiles: int, n: int, config: KernelConfig, sm_count: int) -> int:
    """Programs to launch: PROGRAMS_PER_SM on each SM, or one a tile where that is 0."""
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
    """The kernel's positional arguments, less the flags and the knobs."""
    shape = (len(x), tile_map.rows, tile_map.groups, y.shape[1] // 8, x.shape[1] // 8, divisor)
    return x, w, y, tile_map.entries, indices, scale, bias, *shape


def launcher_of(config: KernelConfig) -> Launcher:
    """What launches the kernel that a config means."""
    return launcher_of_jobs() if config["CONSUMERS"] else _launch


@cache
def launcher_of_jobs() -> Launcher:
    """What launches the one of CONSUMERS. It imports Gluon, which other configs do not need."""
    from .specialized_gemm import specialized_gemm_kernel

    return Launcher(specialized_gemm_kernel)


def constants(config: KernelConfig) -> dict[str, int]:
    """What the kernels of CONSUMERS need besides the knobs, dW's as well."""
    return {"STAGES": config.num_stages} if config["CONSUMERS"] else {}
