"""Launch the grouped products: forward and dX, or dW, whose split groups are added up by a second kernel."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from ....runtime.launching.descriptors import Descriptor
from ....runtime.launching.launcher import Launcher, launch_nothing
from ...boxes import ragged, stack
from ...launchers import Launchers, programs_of
from .tiles import TileMap

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from ....datasets import KernelConfig
    from ...launchers import Launch

OVER_ROWS = Launchers(__package__, ".gemm:grouped_gemm_kernel", ".specialized_gemm:specialized_gemm_kernel")
OF_DW = Launchers(__package__, ".dw:grouped_gemm_dw_kernel", ".specialized_dw:specialized_dw_kernel")
_SUM_BLOCK = 4096


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
) -> Launch:
    """Return a function that launches forward or dX, without waiting for it, on any tensors of these sizes.

    Its argument is (x, w, y, entries of a tile map, indices, scale, bias): x (x_rows, K), w (groups, N, K),
    y (rows, N), indices (rows,) or None, scale (rows,), the factors of the rows of y, or None, and bias (groups, N) or
    None. The scale is indexed by `indices` if they are given.

    Args:
        rows: The number of rows.
        groups: The number of groups.
        n: N.
        k: K.
        config: The config.
        sm_count: The number of the GPU's SMs.
        x_rows: The number of rows of x.
        transposed: w is (groups, K, N).
        gathers: Sorted row i is row indices[i] // divisor of x. At most one of `gathers` and `scatters` is true.
        divisor: See `gathers`.
        scatters: Sorted row i is stored as row indices[i] of y.
    """
    grid = grid_of(-(-rows // config["BLOCK_M"]) + groups, n, config, sm_count)
    if rows == 0 or groups == 0 or grid == 0:
        return launch_nothing
    sizes = (x_rows, rows, groups, n // 8, k // 8, divisor)
    flags = {"TRANSPOSED": transposed, "GATHER": gathers, "SCATTER": scatters}
    boxes = gemm_descriptors(x_rows, groups, n, k, config, transposed)
    launch: Launch = OVER_ROWS.of(config).prepare((grid, 1, 1), sizes, config, boxes, **flags, **constants(config))
    return launch


def gemm_descriptors(
    x_rows: int, groups: int, n: int, k: int, config: KernelConfig, transposed: bool
) -> tuple[Descriptor | None, ...]:
    """Return the TMA descriptors of x, w and y that a config's kernel of forward or dX takes."""
    rows, columns, step, stored, bits = _box_sizes(config)
    shape, box = ((k, n), (step, columns)) if transposed else ((n, k), (columns, step))
    return (
        Descriptor(0, (x_rows, k), (k, 1), (rows, step), bits) if config["TMA_X"] else None,
        stack(1, groups, *shape, box, bits=bits) if config["TMA_W"] else None,
        ragged(2, n, stored, bits=bits) if config["TMA_Y"] else None,
    )


def prepare_dw(of_map: TileMap, n: int, k: int, config: KernelConfig, sm_count: int) -> Launch:
    """Return a function that launches dW's kernels, without waiting for them, on any tensors of these sizes.

    Its argument is (dy, x, dw, entries of a tile map): dy (rows, N) and x (rows, K), sorted by group, and dw
    (groups, N, K), all of which is written, with zeros for groups without rows.

    Args:
        of_map: A tile map of these sizes; its entries are not read.
        n: N.
        k: K.
        config: The config.
        sm_count: The number of the GPU's SMs.
    """
    rows, is_second = of_map.rows, config["CONSUMERS"] > 0
    of_map = of_map._replace(entries=None)  # type: ignore[arg-type] # which the function below must not keep alive
    assert of_map.long_rows or not is_second
    sizes = of_map._replace(chunk_rows=of_map.long_rows) if is_second else of_map
    grid = grid_of(sizes.most_chunks * -(-n // config["BLOCK_M"]), k, config, sm_count)

    def launch(tensors: Sequence[Any]) -> None:
        dy, x, dw, entries = tensors
        if rows == 0:  # no memory that a descriptor could point to
            dw.zero_()
        elif grid:
            tile_map = of_map.second(entries) if is_second else of_map._replace(entries=entries)
            partial = partial_sums(dw, tile_map)
            prepared((dy, x, dw, partial, tile_map.entries))
            add_partials(partial, dw, tile_map)

    slots = max(sizes.slots, 1)
    numbers = (rows, of_map.groups, slots, n // 8, k // 8)
    prepared: Launch = OF_DW.of(config).prepare(
        (grid, 1, 1), numbers, config, dw_descriptors(of_map.groups, slots, n, k, config), **constants(config)
    )
    return launch


def dw_descriptors(groups: int, slots: int, n: int, k: int, config: KernelConfig) -> tuple[Descriptor | None, ...]:
    """Return the TMA descriptors of dy, x, dw and the partial sums that a config's kernel of dW takes."""
    rows, columns, step, stored, bits = _box_sizes(config)
    return (
        ragged(0, n, (step, rows), bits=bits) if config["TMA_DY"] else None,
        ragged(1, k, (step, columns), bits=bits) if config["TMA_X"] else None,
        *(outputs(2, groups, slots, n, k, stored, bits) if config["TMA_DW"] else (None, None)),
    )


def _box_sizes(config: KernelConfig) -> tuple[int, int, int, tuple[int, int], int]:
    """Return the rows, columns and step of a config's boxes, the box that is stored, and `Descriptor.bits`."""
    rows, columns, step, consumers = (config[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "CONSUMERS"))
    if not consumers:
        return rows, columns, step, (rows, columns), 0
    from .ragged_boxes import STORED  # needs Gluon

    rows //= 1 if config["PINGPONG"] else consumers
    return rows, columns, step, (int(STORED.value), int(STORED.value)), 16


def outputs(
    dw: int, groups: int, slots: int, n: int, k: int, box: tuple[int, int], bits: int
) -> tuple[Descriptor, Descriptor]:
    """Return the TMA descriptors of dw, and of the partial sums, which are the launch's next tensor.

    There are two matrices of partial sums per slot, as for 16-bit dtypes; float32 uses half of them.
    """
    return stack(dw, groups, n, k, box, bits=bits), stack(dw + 1, 2 * slots, n, k, box, bits=bits)


def grid_of(m_tiles: int, n: int, config: KernelConfig, sm_count: int) -> int:
    """Return the number of programs (see `programs_of`) for an output of `m_tiles` tiles along M and `n` columns."""
    return programs_of(m_tiles * -(-n // config["BLOCK_N"]), config, sm_count)  # triton.cdiv takes 1.5 us


def constants(config: KernelConfig) -> dict[str, int]:
    """Return the constexpr parameters that only the warp-specialized kernels have; the same for forward, dX and dW."""
    return {"STAGES": config.num_stages} if config["CONSUMERS"] else {}


def partial_sums(dw: torch.Tensor, tile_map: TileMap) -> torch.Tensor:
    """Return memory for the partial sums of `dw`, (slots, words, N, K): float32 values stored as words of dw's dtype.

    If no group can be split, return dw itself, because a TMA descriptor needs a valid address.
    """
    import torch

    if not tile_map.slots:
        return dw
    return torch.empty((tile_map.slots, 4 // dw.itemsize, *dw.shape[1:]), dtype=dw.dtype, device=dw.device)


def add_partials(partial: torch.Tensor, dw: torch.Tensor, tile_map: TileMap) -> None:
    """Launch the kernel that adds up the partial sums of split groups into `dw`, if any group can be split."""
    _, n, k = dw.shape
    if tile_map.most_splits:
        summing()(
            (-(-n * k // _SUM_BLOCK), tile_map.most_splits, 1),
            (partial, dw, tile_map.entries),
            (tile_map.rows, tile_map.groups, tile_map.chunk_rows, n * k // 8),
            BLOCK=_SUM_BLOCK,
            num_warps=8,
        )


@cache
def summing() -> Launcher:
    """Return the launcher of the kernel that adds the partial sums of split groups into dW."""
    from .dw import sum_partials_kernel

    return Launcher(sum_partials_kernel)
