"""Launch the products in fp8: y, with the sum of the parts of SPLIT_K, and dW, with the sum of split groups' chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ....runtime.launching.descriptors import Descriptor
from ....runtime.launching.launcher import launch_nothing
from ...boxes import ragged, stack
from ...grouped_gemm.triton_kernels.launches import add_partials as add_partial_sums
from ...grouped_gemm.triton_kernels.launches import grid_of, outputs, partial_sums
from ...grouped_gemm.triton_kernels.tiles import TileMap
from ...launchers import Launchers
from ...matmul.triton_kernels.split_k import add_partials, compile_add_partials
from ..space import SCALED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ....datasets import KernelConfig
    from ...launchers import Launch

LAUNCHERS = Launchers(__package__, ".product:scaled_gemm_kernel", ".specialized:specialized_scaled_gemm_kernel")
OF_DW = Launchers(__package__, ".dw:scaled_dw_kernel", ".specialized_dw:specialized_scaled_dw_kernel")


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
) -> Launch:
    """Return a function that launches the product, without waiting for it, on any tensors of these sizes.

    Its argument is (x, w, x_scale, w_scale, y, entries of a tile map): x (rows, K), w (N, K), or (groups, N, K), and
    y (rows, N). The scales are contiguous, with the shapes of `space.scale_shapes`, blockwise ones of x stored block
    by block. The map is None if there are no groups.

    Args:
        rows: The number of rows.
        n: N.
        k: K.
        groups: The number of groups; None if the product is dense.
        config: The config.
        sm_count: The number of the GPU's SMs.
        rowwise: The scales are rowwise.
        blockwise: The scales are blockwise.
    """
    splits = config["SPLIT_K"]
    grid = grid_of(splits * (-(-rows // config["BLOCK_M"]) + (groups or 0)), n, config, sm_count)
    if rows == 0 or groups == 0 or grid == 0:
        return launch_nothing
    launcher = LAUNCHERS.of(config)
    pdl = splits > 1 and launcher.has_dependent_launch
    launch: Launch = launcher.prepare(
        (grid, 1, 1),
        (rows, groups or 1, n // 16, k // 16),
        config,
        _descriptors(rows, groups or 1, n, k, config),
        **_constants(config, rowwise, blockwise, pdl),
    )
    if splits == 1:
        return launch

    def launch_parts(tensors: Sequence[Any]) -> None:
        *operands, y, entries = tensors
        partial = torch.empty((splits, 1, rows, n), dtype=torch.float32, device=y.device)
        launch((*operands, partial, entries))
        add_partials(partial, y[None], None, "none", True, pdl)

    return launch_parts


def compile_scaled_gemm(config: KernelConfig, *, grouped: bool, rowwise: bool, blockwise: bool) -> Any:
    """Compile what `prepare_scaled_gemm` launches for such scales and the active driver's target, into Triton's cache.

    Returns:
        The binary of the product.
    """
    out, launcher = torch.bfloat16, LAUNCHERS.of(config)
    pdl = config["SPLIT_K"] > 1 and launcher.has_dependent_launch
    if config["SPLIT_K"] > 1:
        compile_add_partials(torch.float32, out, False, "none", True, pdl)
        out = torch.float32
    types = (torch.float8_e4m3fn,) * 2 + (torch.float32,) * 2 + (out, torch.int32 if grouped else None)
    constants = _constants(config, rowwise, blockwise, pdl)
    return launcher.compile(types, 4, config, _descriptors(64, 1, 64, 64, config), **constants)


def _descriptors(rows: int, groups: int, n: int, k: int, config: KernelConfig) -> tuple[Descriptor | None, ...]:
    """Return the TMA descriptors of a config's kernel: of x, w and y, and of the rest of w's columns if specialized."""
    m, columns, step, consumers = (config[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "CONSUMERS"))
    loads, stores = config["TMA_LOAD"], config["TMA_STORE"]
    wide, bits = columns, 0
    if consumers:
        from .specialized import WIDEST  # needs Gluon

        m, wide, bits = m // consumers, min(columns, int(WIDEST.value)), 8
    rest = columns - wide

    def w(columns: int) -> Descriptor:
        return stack(1, groups, n, k, (columns, step), bits=bits)

    x = Descriptor(0, (rows, k), (k, 1), (m, step), bits) if loads else None
    y = ragged(4, n, (m, rest or wide), bits=2 * bits) if stores else None
    usual = x, w(wide) if loads else None, y
    return (*usual, w(rest) if rest else None) if consumers else usual


def _constants(config: KernelConfig, rowwise: bool, blockwise: bool, pdl: bool) -> dict[str, Any]:
    """Return the kernels' constexpr parameters that are not knobs."""
    return {
        "ROWWISE": rowwise,
        "BLOCKWISE": blockwise,
        "SPLIT": config["SPLIT_K"] > 1,
        "STAGES": config.num_stages,
        **({} if config["CONSUMERS"] else {"PDL": pdl}),
    }


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
) -> Launch:
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
    if grid == 0:
        return launch_nothing
    slots = max(sizes.slots, 1)
    prepared: Launch = OF_DW.of(config).prepare(
        (grid, 1, 1),
        (rows, groups, n // 16, k // 16),
        config,
        _dw_descriptors(rows, groups, slots, n, k, config),
        **_dw_constants(config, blockwise, gradient),
    )

    def launch(tensors: Sequence[Any]) -> None:
        *operands, dw, entries = tensors
        tile_map = TileMap(entries, *sizes[1:])
        partial = partial_sums(dw, tile_map)
        prepared((*operands, dw, partial, entries))
        add_partial_sums(partial, dw, tile_map)

    return launch


def compile_scaled_dw(config: KernelConfig, *, blockwise: bool, gradient: torch.dtype = torch.float8_e4m3fn) -> Any:
    """Compile dW's kernel for the active driver's target, into Triton's cache, and return its binary.

    `gradient` is the dtype of dy.
    """
    launcher, e4m3 = OF_DW.of(config), torch.float8_e4m3fn
    types = gradient, e4m3, torch.float32, torch.float32, torch.bfloat16, torch.bfloat16, torch.int32
    constants = _dw_constants(config, blockwise, gradient)
    return launcher.compile(types, 4, config, _dw_descriptors(64, 1, 1, 64, 64, config), **constants)


def _dw_descriptors(
    rows: int, groups: int, slots: int, n: int, k: int, config: KernelConfig
) -> tuple[Descriptor | None, ...]:
    """Return the TMA descriptors of dy, x, dw and the partial sums that a config's kernel of dW takes."""
    if not config["TMA"]:
        return (None,) * 4
    m, columns, step = (config[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    held, bits = columns, 0
    if config["CONSUMERS"]:
        from .specialized_dw import ROWS, STORED  # needs Gluon

        m, held, bits = int(ROWS.value), int(STORED.value), 8
    depth = (rows // SCALED + groups) * SCALED  # of the transposed operands
    return (
        Descriptor(0, (n, depth), (depth, 1), (m, step), bits),
        Descriptor(1, (k, depth), (depth, 1), (columns, step), bits),
        *outputs(4, groups, slots, n, k, (m, held), 2 * bits),
    )


def _dw_constants(config: KernelConfig, blockwise: bool, gradient: torch.dtype) -> dict[str, Any]:
    """Return the constexpr parameters of dW's kernels that are not knobs; `gradient` is the dtype of dy."""
    largest = [float(torch.finfo(dtype).max) for dtype in (gradient, torch.float8_e4m3fn)]
    return {"BLOCKWISE": blockwise, "DY_LARGEST": largest[0], "X_LARGEST": largest[1], "STAGES": config.num_stages}
