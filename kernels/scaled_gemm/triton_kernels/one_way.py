"""Quantize a bf16 matrix along its rows, for products that need no transposed copy.

Both kernels compute the bits of `quantize.py` on a GPU, so it does not matter which of them quantizes: they divide with
IEEE rounding, which takes no longer than memory does, and a NaN makes its whole block, row or tensor NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from ....runtime.launching.launcher import Launcher
from ...grouped_gemm.space import cdiv
from .blocks import _TINY, SCALED

if TYPE_CHECKING:
    import torch

_OPTIONS: dict[str, Any] = {"num_warps": 8}
_ROWS, _COLUMNS = 2, 1024  # what a program of `quantize_rows_kernel` reads at a time
_BLOCK_ROWS = 32  # the rows of a program that has one scale per 1x128


@triton.jit
def magnitude_bits(x):
    """Return the bits of |x| for bf16 numbers, as int16. They have the order of the magnitudes, and NaN is largest."""
    return x.to(tl.int16, bitcast=True) & 0x7FFF


@triton.jit
def scale_of_bits(bits, RECIPROCAL: tl.constexpr):
    """Return the scale for a largest magnitude, given as `magnitude_bits`, as `quantize.scale_of_largest` does."""
    scale = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True) * RECIPROCAL
    return tl.where(scale < _TINY, 1.0, scale)


@triton.jit
def divided(x, scale, fp8: tl.constexpr):
    """Return bf16 numbers divided by their scale, in fp8. No quotient exceeds the largest fp8 number by a rounding."""
    return tl.div_rn(x.to(tl.float32), scale).to(fp8)


@triton.jit(do_not_specialize=["rows", "K16"])
def quantize_blocks_of_kernel(
    x_ptr,  # (groups, rows, K) bf16
    x8_ptr,  # the same in fp8
    scale_ptr,  # float32; SQUARE: (groups, cdiv(rows, 128), cdiv(K, 128)), otherwise (cdiv(K, 128), rows), of 1 group
    rows,
    K16,  # K // 16
    ROWS: tl.constexpr,  # of a tile; 128 if SQUARE
    SQUARE: tl.constexpr,  # one scale per 128x128, otherwise one per 1x128
    RECIPROCAL: tl.constexpr,  # of the largest fp8 number
):
    """Quantize tile number program_id(0) of ROWS x 128."""
    K = K16 * 16
    k_blocks = tl.cdiv(K, SCALED)
    row_blocks = tl.cdiv(rows, ROWS)
    tile = tl.program_id(0)
    k_block = tile % k_blocks
    offs_m = tile // k_blocks % row_blocks * ROWS + tl.arange(0, ROWS)
    offs_k = k_block * SCALED + tl.arange(0, SCALED)
    group = (tile // (k_blocks * row_blocks)).to(tl.int64)
    inside = (offs_m < rows)[:, None] & (offs_k < K)[None, :]
    place = (group * rows + offs_m)[:, None] * K + offs_k[None, :]
    x = tl.load(x_ptr + place, inside, other=0.0)
    largest = tl.max(magnitude_bits(x), 1)
    if SQUARE:
        scale = scale_of_bits(tl.max(largest, 0), RECIPROCAL)
        tl.store(scale_ptr + tile, scale)
        tl.store(x8_ptr + place, divided(x, scale, x8_ptr.dtype.element_ty), inside)
    else:
        row_scale = scale_of_bits(largest, RECIPROCAL)
        tl.store(scale_ptr + k_block.to(tl.int64) * rows + offs_m, row_scale, offs_m < rows)
        tl.store(x8_ptr + place, divided(x, row_scale[:, None], x8_ptr.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["rows", "rows_per_scale", "K16"])
def quantize_rows_kernel(
    x_ptr,  # (rows, K) bf16
    x8_ptr,  # the same in fp8
    scale_ptr,  # float32; ROWWISE: (rows,), to be written; otherwise (cdiv(rows, rows_per_scale),), given
    rows,
    rows_per_scale,
    K16,  # K // 16
    ROWWISE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RECIPROCAL: tl.constexpr,  # of the largest fp8 number
):
    """Quantize rows [ROWS * program_id(0), ROWS * (program_id(0) + 1))."""
    K = K16 * 16
    offs_m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offs_k = tl.arange(0, BLOCK_K)
    place = offs_m.to(tl.int64)[:, None] * K + offs_k[None, :]
    if ROWWISE:
        bits = tl.zeros((ROWS, BLOCK_K), tl.int16)
        for k in tl.range(0, K, BLOCK_K):
            inside = (offs_m < rows)[:, None] & (offs_k < K - k)[None, :]
            bits = tl.maximum(bits, magnitude_bits(tl.load(x_ptr + place + k, inside, other=0.0)))
        scale = scale_of_bits(tl.max(bits, 1), RECIPROCAL)
        tl.store(scale_ptr + offs_m, scale, offs_m < rows)
    else:
        scale = tl.load(scale_ptr + offs_m // rows_per_scale, offs_m < rows, other=1.0)
    for k in tl.range(0, K, BLOCK_K):
        inside = (offs_m < rows)[:, None] & (offs_k < K - k)[None, :]
        x = tl.load(x_ptr + place + k, inside, other=0.0)  # if ROWWISE, the L1 cache still has most of it
        tl.store(x8_ptr + place + k, divided(x, scale[:, None], x8_ptr.dtype.element_ty), inside)


_blocks, _rows = Launcher(quantize_blocks_of_kernel), Launcher(quantize_rows_kernel)


def quantize_in_blocks(x: torch.Tensor, fp8: torch.dtype, *, square: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel that quantizes with one scale per 128x128 (`square`) or 1x128, without waiting for it.

    Args:
        x: (..., rows, K) bf16, or (rows, K) unless `square`; contiguous, K a multiple of 16, not empty.
        fp8: The dtype of the result.
        square: The kind of scales.

    Returns:
        What `quantize.quantize_blocks_128` or `quantize_rows_128` returns.
    """
    import torch

    *groups, rows, k = x.shape
    blocks, k_blocks = cdiv(rows, SCALED.value), cdiv(k, SCALED.value)
    tile_rows, tiles = (SCALED.value, blocks) if square else (_BLOCK_ROWS, cdiv(rows, _BLOCK_ROWS))
    shape = (*groups, blocks, k_blocks) if square else (k_blocks, rows)
    x8 = torch.empty(x.shape, dtype=fp8, device=x.device)
    scale = torch.empty(shape, dtype=torch.float32, device=x.device)
    _blocks(
        (x.numel() // (rows * k) * tiles * k_blocks, 1, 1),
        (x, x8, scale),
        (rows, k // 16),
        ROWS=tile_rows,
        SQUARE=square,
        RECIPROCAL=1 / float(torch.finfo(fp8).max),
        **_OPTIONS,
    )
    return x8, scale if square else scale.t()


def quantize_along_rows(
    x: torch.Tensor, fp8: torch.dtype, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel that quantizes with one scale per row, or with given scales, without waiting for it.

    Args:
        x: (..., K) bf16, contiguous, K a multiple of 16, not empty.
        fp8: The dtype of the result.
        scale: (n,) float32, one for each of n equal, contiguous parts of the rows; None to compute one for each row.

    Returns:
        x in fp8, and its scales: `scale`, or (..., 1), as `quantize.quantize_rows` returns them.
    """
    import torch

    k = x.shape[-1]
    rows = x.numel() // k
    x8 = torch.empty(x.shape, dtype=fp8, device=x.device)
    made = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device) if scale is None else scale
    _rows(
        (cdiv(rows, _ROWS), 1, 1),
        (x, x8, made),
        (rows, 1 if scale is None else rows // len(scale), k // 16),
        ROWWISE=scale is None,
        ROWS=_ROWS,
        BLOCK_K=_COLUMNS,
        RECIPROCAL=1 / float(torch.finfo(fp8).max),
        **_OPTIONS,
    )
    return x8, made
