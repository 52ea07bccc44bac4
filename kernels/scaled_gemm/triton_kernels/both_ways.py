"""Quantize a bf16 matrix sorted by group once along its rows and once along its columns, transposed, in one pass.

A training step multiplies the same activations (or gradients) twice: the forward pass (or dX) contracts over columns
and needs scales along rows; dW contracts over the rows of each group and needs scales along columns. Hopper's fp8
instructions read both operands along the contraction, so dW's copy is also transposed: (columns, rows).

The transposed copy is padded so that 128 of its columns, a block, never hold rows of two groups. Rows [row, row + 128)
of a group, where row is a multiple of 128 rows from the group's first one, are block row // 128 + group. Blocks of two
groups never coincide, because a group of s rows from row r on takes ceil(s / 128) blocks, at most the number from
r // 128 up to (r + s) // 128 + 1, and the next group's first block comes one further. So the position depends on the
row and the group alone, and rows // 128 + groups blocks are enough for any group sizes. Blocks in between are never
written nor read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from ....runtime.launching.launcher import Launcher
from ...grouped_gemm.triton_kernels.tiles import chunk_capacity, load_tile, load_tile_count

if TYPE_CHECKING:
    import torch

    from ...grouped_gemm.triton_kernels.tiles import TileMap

SCALED = tl.constexpr(128)  # rows, or columns, that share a scale
PADDED = tl.constexpr(256)  # the scales of columns are stored in rows of a multiple of this many
_TINY = tl.constexpr(1.1754943508222875e-38)  # the smallest normal float32
_OPTIONS = {"num_warps": 8}


@triton.jit
def scale_of(largest, LARGEST: tl.constexpr):
    """Return the scale of values of at most this magnitude, so that the scaled ones reach LARGEST; see quantize.py."""
    scale = largest / LARGEST
    return tl.where(scale < _TINY, 1.0, scale)


@triton.jit
def quantized(x, scale, fp8: tl.constexpr):
    """Return float32 values divided by their scale, in fp8; `scale` can be broadcast to x.

    It multiplies by the reciprocal, which may round to a neighbor of the quotient: divisions would take longer than
    memory does.
    """
    return (x * (1.0 / scale)).to(fp8)


@triton.jit
def block_of(row, group):
    """Return the block of the transposed copy that has these rows of a group; see the module's docstring."""
    return row // SCALED + group


@triton.jit
def padded_columns(N):
    """Return the length of one row of the columns' scales."""
    return tl.cdiv(N, PADDED) * PADDED


@triton.jit(do_not_specialize=["rows", "groups", "N16"])
def quantize_both_ways_kernel(
    x_ptr,  # (rows, N) bf16, sorted by group
    x8_ptr,  # (rows, N) fp8; None if it is not needed
    row_scale_ptr,  # float32; BLOCKWISE: (cdiv(N, 128), rows), to be written; otherwise (rows,), given
    xt8_ptr,  # (N, 128 * blocks) fp8, where blocks = rows // 128 + groups
    column_scale_ptr,  # float32; BLOCKWISE: (blocks, N padded), to be written; otherwise (groups, N padded): given
    map_ptr,  # a TileMap's entries
    rows,
    groups,
    N16,  # N // 16
    BLOCKWISE: tl.constexpr,  # one scale per 128 elements; otherwise one per row, and one per column of a group
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
        blocks = chunk_capacity(rows, groups, SCALED).to(tl.int64)
        turned = offs_n.to(tl.int64)[:, None] * (blocks * SCALED) + (block.to(tl.int64) * SCALED + offs_t)[None, :]
        xt8 = quantized(x, column_scale[None, :], xt8_ptr.dtype.element_ty)
        tl.store(xt8_ptr + turned, xt8.T, (offs_n < N)[:, None])
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
    """Compute the row scales of tile number program_id(0) of 128 rows, and its part of the columns' magnitudes."""
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
    _quantize(grid, tensors, sizes, BLOCKWISE=blockwise, LARGEST=largest, **_OPTIONS)
    row_scale = of_rows.t() if blockwise else of_rows
    return x8, row_scale if with_rows else None, xt8, of_columns


def quantize_blocks_both_ways(w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Launch the kernel that quantizes weights, without waiting for it.

    Args:
        w: (groups, N, K) bf16, contiguous, with N and K multiples of 16; none may be 0.

    Returns:
        w in e4m3 and its scales, as `quantize.quantize_blocks_128` returns them, and their transposes, contiguous.
    """
    import torch

    groups, n, k = w.shape
    blocks = -(-n // SCALED.value), -(-k // SCALED.value)
    w8, wt8 = (torch.empty((groups, *shape), dtype=torch.float8_e4m3fn, device=w.device) for shape in ((n, k), (k, n)))
    scale, wt_scale = (
        torch.empty((groups, *shape), dtype=torch.float32, device=w.device) for shape in (blocks, blocks[::-1])
    )
    grid = (groups * blocks[0] * blocks[1], 1, 1)
    largest = float(torch.finfo(torch.float8_e4m3fn).max)
    _blocks(grid, (w, w8, scale, wt8, wt_scale), (n // 16, k // 16), LARGEST=largest, **_OPTIONS)
    return w8, scale, wt8, wt_scale
