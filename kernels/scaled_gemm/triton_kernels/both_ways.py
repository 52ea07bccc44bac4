"""Quantize a bf16 matrix sorted by group once along its rows and once along its columns, transposed, in one pass.

A training step multiplies the same activations (or gradients) twice: the forward pass (or dX) contracts over columns
and needs scales along rows; dW contracts over the rows of each group and needs scales along columns. Hopper's fp8
instructions read both operands along the contraction, so dW's copy is also transposed: (columns, rows), in the blocks
of `blocks.py`. Weights (groups, N, K) are needed twice as well, by the forward pass and transposed by dX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from ....runtime.launching.launcher import Launcher
from ...grouped_gemm.triton_kernels.tiles import chunk_capacity, load_tile, load_tile_count
from .blocks import PADDED, SCALED, block_of, padded_columns, scale_of

if TYPE_CHECKING:
    import torch

    from ...grouped_gemm.triton_kernels.tiles import TileMap

_OPTIONS: dict[str, Any] = {
    "num_warps": 8,
    "maxnreg": 128,
}  # two programs per SM; with 16 warps, or one program, it is slower


@triton.jit
def quantized(x, scale, fp8: tl.constexpr):
    """Return float32 values divided by their scale, in fp8; `scale` can be broadcast to x.

    It multiplies by the reciprocal, which may round to a neighbor of the quotient, because divisions would take longer
    than the memory accesses.
    """
    return (x * (1.0 / scale)).to(fp8)


@triton.jit(do_not_specialize=["rows", "groups", "N16"])
def quantize_both_ways_kernel(
    x_ptr,  # (rows, N) bf16, sorted by group
    x8_ptr,  # (rows, N) fp8; None if it is not needed
    row_scale_ptr,  # float32; BLOCKWISE: (cdiv(N, 128), rows), to be written; otherwise (rows,), given
    xt8_ptr,  # (N, 128 * blocks) fp8, where blocks = rows // 128 + groups; WEIGHTS: (groups, N, rows of a group)
    column_scale_ptr,  # float32; BLOCKWISE: (blocks, N padded), to be written; otherwise (groups, N padded): given
    map_ptr,  # a TileMap's entries
    rows,
    groups,
    N16,  # N // 16
    BLOCKWISE: tl.constexpr,  # one scale per 128 elements; otherwise one per row, and one per column of a group
    WEIGHTS: tl.constexpr,  # all groups have the same number of rows
    LARGEST: tl.constexpr,  # the largest fp8 number
):
    """Quantize 128 columns of one tile of 128 rows.

    Rows of a block past the group's end are written as zeros to the transposed copy. Without BLOCKWISE, column_scale
    has the largest magnitudes (`largest_kernel`), not the scales.
    """
    N = N16 * 16
    column_blocks = tl.cdiv(N, SCALED)
    tile = tl.program_id(0) // column_blocks
    column_block = tl.program_id(0) % column_blocks
    if tile < load_tile_count(map_ptr, SCALED):
        group, row, row_end = load_tile(map_ptr, tile, rows, groups, SCALED)
        block = block_of(row, group)
        offs_m = row + tl.arange(0, SCALED)
        offs_n = column_block * SCALED + tl.arange(0, SCALED)
        inside = (offs_m < row_end)[:, None] & (offs_n < N)[None, :]
        place = offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]
        x = tl.load(x_ptr + place, inside, other=0.0).to(tl.float32)
        column_scale_ptrs = column_scale_ptr + offs_n
        if BLOCKWISE:
            column_scale = scale_of(tl.max(tl.abs(x), 0), LARGEST)
            tl.store(column_scale_ptrs + block.to(tl.int64) * padded_columns(N), column_scale)
        else:
            column_scale = scale_of(tl.load(column_scale_ptrs + group.to(tl.int64) * padded_columns(N)), LARGEST)
        offs_t = tl.arange(0, SCALED)
        columns = offs_n.to(tl.int64)
        if WEIGHTS:
            depth = (rows // groups // 16 * 16).to(tl.int64)  # a multiple of 16, as the compiler must see
            columns += group.to(tl.int64) * N
            start = tl.multiple_of(row - group.to(tl.int64) * depth, 16)
        else:
            depth = chunk_capacity(rows, groups, SCALED).to(tl.int64) * SCALED
            start = block.to(tl.int64) * SCALED
        turned = columns[:, None] * depth + (start + offs_t)[None, :]
        xt8 = quantized(x, column_scale[None, :], xt8_ptr.dtype.element_ty)
        turned_inside = (offs_n < N)[:, None]
        if WEIGHTS:  # groups have a multiple of 16 rows; a mask that is alike for 16 keeps stores of 16 bytes
            turned_inside &= (offs_t // 16 < (row_end - row) // 16)[None, :]
        tl.store(xt8_ptr + turned, xt8.T, turned_inside)
        if x8_ptr is not None:
            if BLOCKWISE:
                row_scale = scale_of(tl.max(tl.abs(x), 1), LARGEST)
                tl.store(row_scale_ptr + column_block.to(tl.int64) * rows + offs_m, row_scale, offs_m < row_end)
            else:
                row_scale = tl.load(row_scale_ptr + offs_m, offs_m < row_end, other=1.0)
            x8 = quantized(x, row_scale[:, None], x8_ptr.dtype.element_ty)
            tl.store(x8_ptr + place, x8, inside)


@triton.jit(do_not_specialize=["rows", "groups", "N16"])
def largest_kernel(
    x_ptr,  # (rows, N) bf16, sorted by group
    row_scale_ptr,  # (rows,) float32, to be written
    largest_ptr,  # (groups, N padded) float32, zeros: the largest magnitude of each column of each group
    map_ptr,  # a TileMap's entries
    rows,
    groups,
    N16,  # N // 16
    LARGEST: tl.constexpr,
):
    """Compute the row scales of tile program_id(0), of 128 rows, and update the largest magnitude of each column."""
    tile = tl.program_id(0)
    if tile < load_tile_count(map_ptr, SCALED):
        N = N16 * 16
        group, row, row_end = load_tile(map_ptr, tile, rows, groups, SCALED)
        offs_m = row + tl.arange(0, SCALED)
        offs_n = tl.arange(0, SCALED)
        x_ptrs = x_ptr + offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]
        largest_ptrs = largest_ptr + group.to(tl.int64) * padded_columns(N) + offs_n
        of_rows = tl.zeros((SCALED,), tl.float32)
        for n in tl.range(0, N, SCALED):
            inside = (offs_m < row_end)[:, None] & (offs_n < N - n)[None, :]
            x = tl.abs(tl.load(x_ptrs + n, inside, other=0.0).to(tl.float32))
            of_rows = tl.maximum(of_rows, tl.max(x, 1))
            tl.atomic_max(largest_ptrs + n, tl.max(x, 0), sem="relaxed")
        tl.store(row_scale_ptr + offs_m, scale_of(of_rows, LARGEST), offs_m < row_end)


@triton.jit(do_not_specialize=["N16", "K16"])
def quantize_blocks_kernel(
    w_ptr,  # (groups, N, K) bf16
    w8_ptr,  # (groups, N, K) fp8
    scale_ptr,  # (groups, cdiv(N, 128), cdiv(K, 128)) float32
    wt8_ptr,  # (groups, K, N) fp8
    wt_scale_ptr,  # (groups, cdiv(K, 128), cdiv(N, 128)) float32
    N16,  # N // 16
    K16,  # K // 16
    LARGEST: tl.constexpr,
):
    """Quantize block number program_id(0) of 128x128 weights, and write it and its transpose."""
    N = N16 * 16
    K = K16 * 16
    n_blocks = tl.cdiv(N, SCALED)
    k_blocks = tl.cdiv(K, SCALED)
    block = tl.program_id(0)
    group = (block // (n_blocks * k_blocks)).to(tl.int64)
    n_block = block // k_blocks % n_blocks
    k_block = block % k_blocks
    offs_n = n_block * SCALED + tl.arange(0, SCALED)
    offs_k = k_block * SCALED + tl.arange(0, SCALED)
    inside = (offs_n < N)[:, None] & (offs_k < K)[None, :]
    place = (group * N + offs_n)[:, None] * K + offs_k[None, :]
    w = tl.load(w_ptr + place, inside, other=0.0).to(tl.float32)
    scale = scale_of(tl.max(tl.max(tl.abs(w), 1), 0), LARGEST)
    tl.store(scale_ptr + block, scale)
    tl.store(wt_scale_ptr + (group * k_blocks + k_block) * n_blocks + n_block, scale)
    w8 = quantized(w, scale, w8_ptr.dtype.element_ty)
    tl.store(w8_ptr + place, w8, inside)
    turned = (group * K + offs_k)[:, None] * N + offs_n[None, :]
    tl.store(wt8_ptr + turned, w8.T, (offs_k < K)[:, None] & (offs_n < N)[None, :])


_quantize, _largest, _blocks = (
    Launcher(kernel) for kernel in (quantize_both_ways_kernel, largest_kernel, quantize_blocks_kernel)
)


def quantize_both_ways(
    x: torch.Tensor, tile_map: TileMap, fp8: torch.dtype, *, blockwise: bool, with_rows: bool = True
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Launch the kernels that quantize x along its rows and its columns, without waiting for them.

    Args:
        x: (rows, N) bf16, sorted by group, contiguous, with N a multiple of 16; neither may be 0.
        tile_map: The map of the group sizes.
        fp8: The dtype of both results.
        blockwise: One scale per 128 elements; otherwise one per row, and one per column of each group.
        with_rows: Quantize along rows too.

    Returns:
        x in fp8 and its scales, as `quantize.quantize_rows_128` or `quantize_rows` return them, None without
        `with_rows`; then x transposed, (N, 128 * blocks), and its scales, (blocks, N padded), or without `blockwise`
        the columns' largest magnitudes, (groups, N padded). Rows that belong to no group are uninitialized.
    """
    import torch

    rows, n = x.shape
    groups, padded = tile_map.groups, -(-n // PADDED.value) * PADDED.value
    blocks, column_blocks = rows // SCALED.value + groups, -(-n // SCALED.value)
    largest = float(torch.finfo(fp8).max)
    sizes = rows, groups, n // 16
    x8 = torch.empty((rows, n), dtype=fp8, device=x.device) if with_rows else None
    xt8 = torch.empty((n, blocks * SCALED.value), dtype=fp8, device=x.device)
    if blockwise:
        of_rows = torch.empty((column_blocks, rows), dtype=torch.float32, device=x.device)
        of_columns = torch.empty((blocks, padded), dtype=torch.float32, device=x.device)
    else:
        of_rows = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
        of_columns = torch.zeros((groups, padded), dtype=torch.float32, device=x.device)
        _largest((blocks, 1, 1), (x, of_rows, of_columns, tile_map.entries), sizes, LARGEST=largest, **_OPTIONS)
    tensors = x, x8, of_rows, xt8, of_columns, tile_map.entries
    grid = (column_blocks * blocks, 1, 1)
    _quantize(grid, tensors, sizes, BLOCKWISE=blockwise, WEIGHTS=False, LARGEST=largest, **_OPTIONS)
    row_scale = of_rows.t() if blockwise else of_rows
    return x8, row_scale if with_rows else None, xt8, of_columns


def quantize_weights_both_ways(w: torch.Tensor, *, blockwise: bool) -> tuple[torch.Tensor, ...]:
    """Launch the kernels that quantize weights and their transpose, without waiting for them.

    Args:
        w: (groups, N, K) bf16, contiguous, with N and K multiples of 16; none may be 0.
        blockwise: One scale per 128x128 block, which the transpose shares; otherwise one per row of each.

    Returns:
        w in e4m3 and its scales, as `quantize.quantize_w` returns them, and those of its transpose, (groups, K, N).
    """
    import torch

    from ...grouped_gemm.triton_kernels.tiles import TileMap
    from ..quantize import scale_of_largest

    groups, n, k = w.shape
    w8, wt8 = (torch.empty((groups, *shape), dtype=torch.float8_e4m3fn, device=w.device) for shape in ((n, k), (k, n)))
    largest = float(torch.finfo(torch.float8_e4m3fn).max)
    column_blocks = -(-k // SCALED.value)
    if blockwise:
        blocks = -(-n // SCALED.value), column_blocks
        scale, wt_scale = (
            torch.empty((groups, *shape), dtype=torch.float32, device=w.device) for shape in (blocks, blocks[::-1])
        )
        grid = (groups * blocks[0] * blocks[1], 1, 1)
        _blocks(grid, (w, w8, scale, wt8, wt_scale), (n // 16, k // 16), LARGEST=largest, **_OPTIONS)
        return w8, scale, wt8, wt_scale
    rows = groups * n
    tile_map = TileMap.build(torch.full((groups,), n, dtype=torch.int32, device=w.device), rows)
    scale = torch.empty((groups, n), dtype=torch.float32, device=w.device)
    of_columns = torch.zeros((groups, -(-k // PADDED.value) * PADDED.value), dtype=torch.float32, device=w.device)
    tiles, sizes = rows // SCALED.value + groups, (rows, groups, k // 16)
    _largest((tiles, 1, 1), (w, scale, of_columns, tile_map.entries), sizes, LARGEST=largest, **_OPTIONS)
    tensors = w, w8, scale, wt8, of_columns, tile_map.entries
    grid = (column_blocks * tiles, 1, 1)
    _quantize(grid, tensors, sizes, BLOCKWISE=False, WEIGHTS=True, LARGEST=largest, **_OPTIONS)
    return w8, scale, wt8, scale_of_largest(of_columns[:, :k].contiguous())
