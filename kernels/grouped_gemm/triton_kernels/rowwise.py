"""Small kernels around the products: scale and add up rows, and compute the gradients of weights and bias.

Each reads its operands once, adds in float32 in a fixed order, and does not synchronize. PyTorch's own operations would
make float32 copies of whole activations, or add atomically.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from ....runtime.launching.launcher import Launcher
from ..space import cdiv
from .sorting import load_permuted
from .tiles import load_tile, load_tile_count

if TYPE_CHECKING:
    from .tiles import TileMap

_ROWS, _COLUMNS = 16, 128  # the block of one program
_DOT_TILE, _BIAS_TILE = 16, 256  # the heights of the map's M tiles that one program handles


@triton.jit(do_not_specialize=["rows", "width8", "topk"])
def sum_rows_kernel(
    x_ptr,  # (rows * topk, width)
    scale_ptr,  # (rows * topk,), or None
    y_ptr,  # (rows, width)
    rows,
    width8,  # width // 8
    topk,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Add up `topk` rows, each times its scale."""
    width = width8 * 8
    column_blocks = tl.cdiv(width, BLOCK_COLUMNS)
    row = tl.program_id(0) // column_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(0) % column_blocks * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    within = (row < rows)[:, None] & (column < width)[None, :]
    acc = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for i in range(0, topk):
        source = row.to(tl.int64) * topk + i
        x = tl.load(x_ptr + source[:, None] * width + column[None, :], within, other=0.0).to(tl.float32)
        if scale_ptr is not None:
            x *= tl.load(scale_ptr + source, row < rows, other=0.0).to(tl.float32)[:, None]
        acc += x
    y_ptrs = y_ptr + row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), within)


@triton.jit(do_not_specialize=["rows", "groups", "N8", "K8", "topk"])
def weight_grads_kernel(
    dx_ptr,  # (rows, K), unweighted; permuted if PERMUTE_X
    x_ptr,  # (rows, K), or (rows / topk, K) if PERMUTE_X
    dy_ptr,  # (rows, N); permuted if PERMUTE_Y
    bias_ptr,  # (groups, N), or None
    map_ptr,  # a TileMap's entries
    indices_ptr,  # (rows,), or None
    scale_ptr,  # (rows,), permuted as the weights are, or None: what dx is multiplied by
    grads_ptr,  # (rows,), permuted as the weights are
    rows,
    groups,
    N8,
    K8,
    topk,
    PERMUTE_X: tl.constexpr,
    PERMUTE_Y: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Compute the gradient of topk_weights for one M tile of 16 rows, and multiply the rows of dx by their scales.

    A row of y is weight * (x @ w.T + bias), so the gradient of its weight is dy . (x @ w.T + bias) = dx . x + dy .
    bias.
    """
    tile = tl.program_id(0)
    if tile < load_tile_count(map_ptr, BLOCK_ROWS):
        group, first, row_end = load_tile(map_ptr, tile, rows, groups, BLOCK_ROWS)
        row = first + tl.arange(0, BLOCK_ROWS)
        columns = tl.arange(0, BLOCK_COLUMNS)
        permuted, inside = load_permuted(indices_ptr, row, row < row_end, rows)
        sorted_row = row.to(tl.int64)
        dx_row = permuted if PERMUTE_X else sorted_row
        x_row = permuted // topk if PERMUTE_X else sorted_row
        acc = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
        if scale_ptr is not None:
            scale = tl.load(scale_ptr + permuted, inside, other=0.0).to(tl.float32)[:, None]
        K = K8 * 8
        for k in range(0, K, BLOCK_COLUMNS):
            column = k + columns
            within = inside[:, None] & (column < K)[None, :]
            dx_ptrs = dx_ptr + dx_row[:, None] * K + column[None, :]
            dx = tl.load(dx_ptrs, within, other=0.0).to(tl.float32)
            x = tl.load(x_ptr + x_row[:, None] * K + column[None, :], within, other=0.0)
            acc += dx * x.to(tl.float32)
            if scale_ptr is not None:
                tl.store(dx_ptrs, (dx * scale).to(dx_ptr.dtype.element_ty), within)
        if bias_ptr is not None:
            dy_row = permuted if PERMUTE_Y else sorted_row
            N = N8 * 8
            for n in range(0, N, BLOCK_COLUMNS):
                column = n + columns
                within = inside[:, None] & (column < N)[None, :]
                dy = tl.load(dy_ptr + dy_row[:, None] * N + column[None, :], within, other=0.0)
                bias = tl.load(bias_ptr + group.to(tl.int64) * N + column, column < N, other=0.0)
                acc += dy.to(tl.float32) * bias.to(tl.float32)[None, :]
        tl.store(grads_ptr + permuted, tl.sum(acc, 1).to(grads_ptr.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["rows", "groups", "N8"])
def bias_partials_kernel(
    dy_ptr,  # (rows, N); permuted if PERMUTE_Y
    scale_ptr,  # (rows,), or None: permuted if there are indices
    indices_ptr,  # (rows,), or None
    map_ptr,  # a TileMap's entries
    partial_ptr,  # (M tiles, N) float32
    rows,
    groups,
    N8,
    PERMUTE_Y: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Add up the rows of dy in one M tile, so that a program's work is bounded, however long the group is."""
    N = N8 * 8
    column_blocks = tl.cdiv(N, BLOCK_COLUMNS)
    tile = tl.program_id(0) // column_blocks
    if tile < load_tile_count(map_ptr, TILE):
        _, first, row_end = load_tile(map_ptr, tile, rows, groups, TILE)
        column = tl.program_id(0) % column_blocks * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        acc = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
        for start in range(0, TILE, BLOCK_ROWS):
            row = first + start + tl.arange(0, BLOCK_ROWS)
            permuted, inside = load_permuted(indices_ptr, row, row < row_end, rows)
            dy_row = permuted if PERMUTE_Y else row.to(tl.int64)
            within = inside[:, None] & (column < N)[None, :]
            dy = tl.load(dy_ptr + dy_row[:, None] * N + column[None, :], within, other=0.0).to(tl.float32)
            if scale_ptr is not None:
                dy *= tl.load(scale_ptr + permuted, inside, other=0.0).to(tl.float32)[:, None]
            acc += dy
        tl.store(partial_ptr + tile.to(tl.int64) * N + column, tl.sum(acc, 0), column < N)


@triton.jit(do_not_specialize=["rows", "groups", "N8"])
def bias_grads_kernel(
    partial_ptr,  # (M tiles, N) float32
    map_ptr,  # a TileMap's entries
    grads_ptr,  # (groups, N)
    rows,
    groups,
    N8,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Add up the partial sums of the M tiles of one group, in order: the gradient of its bias."""
    N = N8 * 8
    column_blocks = tl.cdiv(N, BLOCK_COLUMNS)
    group = tl.program_id(0) // column_blocks
    column = tl.program_id(0) % column_blocks * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    # Limited to the number of partial sums: sizes that sum to more than `rows` would have more tiles.
    m_tiles = tl.minimum(load_tile_count(map_ptr, TILE), tl.cdiv(rows, TILE) + groups)
    first = tl.zeros((), tl.int32)
    end = tl.zeros((), tl.int32)
    for start in range(0, m_tiles, LANES):
        tiles = start + tl.arange(0, LANES)
        owner, _, _ = load_tile(map_ptr, tl.minimum(tiles, m_tiles - 1), rows, groups, TILE)
        first += tl.sum(((tiles < m_tiles) & (owner < group)).to(tl.int32))
        end += tl.sum(((tiles < m_tiles) & (owner <= group)).to(tl.int32))
    acc = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for start in range(first, end, BLOCK_ROWS):
        tile = start + tl.arange(0, BLOCK_ROWS)
        within = (tile < end)[:, None] & (column < N)[None, :]
        acc += tl.load(partial_ptr + tile.to(tl.int64)[:, None] * N + column[None, :], within, other=0.0)
    tl.store(grads_ptr + group.to(tl.int64) * N + column, tl.sum(acc, 0).to(grads_ptr.dtype.element_ty), column < N)


_sum_rows, _weight_grads = Launcher(sum_rows_kernel), Launcher(weight_grads_kernel)
_bias_partials, _bias_grads = Launcher(bias_partials_kernel), Launcher(bias_grads_kernel)


def sum_rows(x: torch.Tensor, topk: int = 1, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Return y[t] = the sum of x[t * topk + i] over i < topk, each row times its scale.

    Args:
        x: (rows * topk, width), width a multiple of 8.
        topk: The number of rows per sum.
        scale: (rows * topk,), or None.

    Returns:
        y, (rows, width).
    """
    rows, width = x.shape[0] // topk, x.shape[1]
    y = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows:
        _sum_rows(
            (cdiv(rows, _ROWS) * cdiv(width, _COLUMNS), 1, 1),
            (x, scale, y),
            (rows, width // 8, topk),
            BLOCK_ROWS=_ROWS,
            BLOCK_COLUMNS=_COLUMNS,
        )
    return y


def weight_grads(
    dx: torch.Tensor,
    x: torch.Tensor,
    dy: torch.Tensor,
    bias: torch.Tensor | None,
    tile_map: TileMap,
    indices: torch.Tensor | None,
    weights: torch.Tensor,
    topk: int,
    permute_x: bool,
    permute_y: bool,
) -> torch.Tensor:
    """Return the gradient of topk_weights, (rows,), zero for rows that belong to no group; multiply dx by the weights.

    With `permute_x`, dx does not change, because its rows are added up later.

    Args:
        dx: (rows, K), the gradient of x as if all weights were 1, before it is added up over topk.
        x: As in the forward pass.
        dy: (rows, N).
        bias: (groups, N), or None.
        tile_map: The map of the group sizes.
        indices: (rows,), or None.
        weights: The topk_weights, (rows,).
        topk: The number of rows per token.
        permute_x: As in the forward pass.
        permute_y: As in the forward pass.
    """
    grads = torch.zeros_like(weights)
    _weight_grads(
        (cdiv(tile_map.rows, _DOT_TILE) + tile_map.groups, 1, 1),
        (dx, x, dy, bias, tile_map.entries, indices, None if permute_x else weights, grads),
        (tile_map.rows, tile_map.groups, dy.shape[1] // 8, x.shape[1] // 8, topk),
        PERMUTE_X=permute_x,
        PERMUTE_Y=permute_y,
        BLOCK_ROWS=_DOT_TILE,
        BLOCK_COLUMNS=_COLUMNS,
    )
    return grads


def bias_grads(
    dy: torch.Tensor,
    scale: torch.Tensor | None,
    tile_map: TileMap,
    indices: torch.Tensor | None,
    permute_y: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the gradient of the bias, (groups, N): the sum of each group's rows of dy, times their scales.

    Args:
        dy: (rows, N), in the permuted order if `permute_y`.
        scale: (rows,), or None; in the permuted order if there are `indices`, else sorted by group.
        tile_map: The map of the group sizes.
        indices: (rows,): the place of each sorted row in the permuted order. None if nothing is permuted.
        permute_y: Whether the forward pass stored y in the permuted order, and so dy has it.
        dtype: The dtype of the result.
    """
    n, groups = dy.shape[1], tile_map.groups
    m_tiles = cdiv(tile_map.rows, _BIAS_TILE) + groups
    partial = torch.empty((m_tiles, n), dtype=torch.float32, device=dy.device)
    grads = torch.empty((groups, n), dtype=dtype, device=dy.device)
    sizes = (tile_map.rows, groups, n // 8)
    _bias_partials(
        (m_tiles * cdiv(n, _COLUMNS), 1, 1),
        (dy, scale, indices, tile_map.entries, partial),
        sizes,
        PERMUTE_Y=permute_y,
        TILE=_BIAS_TILE,
        BLOCK_ROWS=_ROWS,
        BLOCK_COLUMNS=_COLUMNS,
    )
    _bias_grads(
        (groups * cdiv(n, _COLUMNS), 1, 1),
        (partial, tile_map.entries, grads),
        sizes,
        TILE=_BIAS_TILE,
        LANES=1024,
        BLOCK_ROWS=_ROWS,
        BLOCK_COLUMNS=_COLUMNS,
    )
    return grads
