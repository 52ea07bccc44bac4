"""Conversion between bf16 and fp8 with scales, in plain PyTorch: no synchronization, and `torch.compile` fuses it.

A scale is the largest magnitude of its block, row or tensor divided by the largest number of the fp8 dtype, so that
nothing overflows, or 1 if that is 0. `error_bound` says how far from the exact product fp8 tensor cores may be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from ...datasets import ForetuneError
from .space import BLOCKWISE, GRANULARITIES, ROWWISE, SCALED

FP8 = torch.float8_e4m3fn
#: The dtypes of gradients: e5m2 has a larger range and one bit less.
GRADIENTS = {"e4m3": FP8, "e5m2": torch.float8_e5m2}
#: The largest finite number of each dtype.
LARGEST = {dtype: float(torch.finfo(dtype).max) for dtype in GRADIENTS.values()}
#: An fp8 tensor and its float32 scales.
Quantized: TypeAlias = tuple[torch.Tensor, torch.Tensor]


def quantize_tensor(x: torch.Tensor, fp8: torch.dtype = FP8) -> Quantized:
    """Return x in fp8, and its scale, (1,): one for the whole tensor.

    >>> fp8, scale = quantize_tensor(torch.tensor([[1.0, -896.0]]))
    >>> fp8.float().tolist(), scale.tolist()
    ([[0.5, -448.0]], [2.0])
    """
    scale = scale_of_largest(x.abs().amax(), fp8) if x.numel() else x.new_ones((), dtype=torch.float32)
    return _divided(x, scale, fp8), scale.reshape(1)


def quantize_groups(w: torch.Tensor) -> Quantized:
    """Return weights (groups, N, K) in fp8, and their scales, (groups,): one per group.

    >>> quantize_groups(torch.full((2, 8, 16), 448.0))[1].tolist()
    [1.0, 1.0]
    """
    scale = scale_of_largest(w.abs().amax((1, 2)))
    return _divided(w, scale[:, None, None]), scale


def quantize_rows(x: torch.Tensor, fp8: torch.dtype = FP8) -> Quantized:
    """Return x, (..., rows, K), in fp8, and its scales, (..., rows, 1): one per row.

    >>> quantize_rows(torch.tensor([[448.0, 1.0], [0.0, 0.0]]))[1].tolist()
    [[1.0], [1.0]]
    """
    scale = scale_of_largest(x.abs().amax(-1, keepdim=True), fp8)
    return _divided(x, scale, fp8), scale


def quantize_rows_128(x: torch.Tensor, fp8: torch.dtype = FP8) -> Quantized:
    """Return x, (rows, K), in fp8, and its scales, (rows, blocks of K): one per 1x128, as DeepSeek's activations have.

    The scales are stored block by block (`stride()` is (1, rows)), as the kernel, cuBLAS and DeepGEMM read them.

    >>> fp8, scales = quantize_rows_128(torch.randn(3, 200))
    >>> scales.shape, scales.stride()
    (torch.Size([3, 2]), (1, 3))
    """
    rows, k = x.shape
    padded = _padded(x, 1, SCALED)
    blocks = padded.view(rows, padded.shape[1] // SCALED, SCALED)
    scale = scale_of_largest(blocks.abs().amax(-1), fp8)
    quantized = _divided(blocks, scale[:, :, None], fp8).view(padded.shape)[:, :k]
    return quantized.contiguous(), scale.t().contiguous().t()


def quantize_blocks_128(w: torch.Tensor) -> Quantized:
    """Return w, (..., N, K), in fp8, and its scales, (..., blocks of N, blocks of K): one per 128x128.

    DeepSeek's weights have such scales. The quantized transpose is the transpose of both results, so dX of a layer uses
    the same rounded weights as the forward pass.

    >>> fp8, scales = quantize_blocks_128(torch.randn(4, 256, 200))
    >>> fp8.shape, scales.shape
    (torch.Size([4, 256, 200]), torch.Size([4, 2, 2]))
    """
    *groups, n, k = w.shape
    padded = _padded(w, SCALED, SCALED)
    shape = (padded.shape[-2] // SCALED, SCALED, padded.shape[-1] // SCALED, SCALED)
    blocks = padded.view(*groups, *shape)
    scale = scale_of_largest(blocks.abs().amax((-3, -1)))
    fp8 = _divided(blocks, scale[..., :, None, :, None]).view(padded.shape)[..., :n, :k]
    return fp8.contiguous(), scale


def quantize_x(x: torch.Tensor, granularity: str, fp8: torch.dtype = FP8) -> Quantized:
    """Return activations or gradients (rows, K) in fp8, and their scales of this granularity."""
    ways: dict[str, Callable[[torch.Tensor, torch.dtype], Quantized]]
    ways = {BLOCKWISE: quantize_rows_128, ROWWISE: quantize_rows}
    return ways.get(granularity, quantize_tensor)(x, fp8)


def quantize_w(w: torch.Tensor, granularity: str) -> Quantized:
    """Return weights (N, K), or (groups, N, K), in fp8, and their scales of this granularity.

    Rowwise scales are (N, 1), or (groups, N).
    """
    if granularity == BLOCKWISE:
        return quantize_blocks_128(w)
    if granularity == ROWWISE:
        fp8, scale = quantize_rows(w)
        return fp8, scale if w.dim() == 2 else scale.squeeze(-1)
    return quantize_tensor(w) if w.dim() == 2 else quantize_groups(w)


def transposed(w: torch.Tensor, scale: torch.Tensor, granularity: str) -> Quantized:
    """Return quantized weights (..., N, K) as dX needs them, (..., K, N), contiguous, and their scales.

    Blockwise and tensorwise, the fp8 values stay the same. Rowwise scales lie along N, over which dX sums, so the
    weights are quantized again, by rows of K.
    """
    if granularity == ROWWISE:
        return quantize_w((w.float() * scale.reshape(*w.shape[:-1], 1)).transpose(-2, -1), granularity)
    return w.transpose(-2, -1).contiguous(), scale.transpose(-2, -1).contiguous() if granularity == BLOCKWISE else scale


def check_granularity(granularity: object) -> str:
    """Return `granularity` unchanged after checking it.

    Raises:
        ForetuneError: It is not one of `GRANULARITIES`.
    """
    if not isinstance(granularity, str) or granularity not in GRANULARITIES:
        raise ForetuneError(f"scales must be one of {', '.join(GRANULARITIES)} but is {granularity!r}")
    return granularity


def scale_of_largest(largest: torch.Tensor, fp8: torch.dtype = FP8) -> torch.Tensor:
    """Return the scale of a block, row or tensor from its largest magnitude."""
    scale = largest.float() * (1 / LARGEST[fp8])  # as PyTorch divides by a number on a GPU
    # A subnormal magnitude would give a scale of 0, or one so small that the division overflows.
    return torch.where(scale < torch.finfo(torch.float32).tiny, 1.0, scale)


def _divided(x: torch.Tensor, scale: torch.Tensor, fp8: torch.dtype = FP8) -> torch.Tensor:
    """Return x / scale in fp8, contiguous."""
    return (x.float() / scale).clamp(-LARGEST[fp8], LARGEST[fp8]).to(fp8).contiguous()


def _padded(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return x with its last two dimensions padded by zeros to multiples of `rows` and `columns`; contiguous."""
    *_, n, k = x.shape
    return torch.nn.functional.pad(x, (0, -k % columns, 0, -n % rows)).contiguous()


#: The number of fp8 products that one instruction of Hopper's tensor cores sums, and the fractional bits of their sum
#: that it keeps after aligning all to the largest (DeepSeek-V3's report, section 3.3.2, counts about 14 bits in all).
SUMMED, FRACTION_BITS = 32, 13


def dequantized_x(
    x: torch.Tensor, scale: torch.Tensor, granularity: str, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return fp8 activations x (rows, K) multiplied by their scales, in `dtype`."""
    if granularity == BLOCKWISE:
        scale = scale.repeat_interleave(SCALED, 1)[:, : x.shape[1]]
    return x.to(dtype) * scale.to(dtype)


def dequantized_columns(
    xt: torch.Tensor,
    scale: torch.Tensor,
    row: int,
    size: int,
    group: int,
    blockwise: bool,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Dequantize one group's part, (columns, size), of a transposed copy by `both_ways.quantize_both_ways`.

    Args:
        xt: The copy in fp8.
        scale: Its scales, or without `blockwise` the largest magnitudes.
        row: The group's first row.
        size: The number of its rows.
        group: Its index.
        blockwise: Whether each column has a scale per 128 rows of the group; otherwise it has a single one.
        dtype: The dtype of the result.
    """
    columns, first = len(xt), row // SCALED + group
    if blockwise:
        of_blocks = scale[first : first - (-size // SCALED), :columns]
        factors = of_blocks.t().repeat_interleave(SCALED, 1)[:, :size]
    else:
        factors = scale_of_largest(scale[group, :columns, None], xt.dtype)
    return xt[:, first * SCALED : first * SCALED + size].to(dtype) * factors.to(dtype)


def dequantized_weight(
    w: torch.Tensor, scale: torch.Tensor, granularity: str, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return fp8 weights w (N, K) multiplied by their scales, in `dtype`; rowwise scales are (N,) or (N, 1)."""
    n, k = w.shape
    if granularity == BLOCKWISE:
        scale = scale.repeat_interleave(SCALED, 0)[:n].repeat_interleave(SCALED, 1)[:, :k]
    elif granularity == ROWWISE:
        scale = scale.reshape(n, 1)
    return w.to(dtype) * scale.to(dtype)


def error_bound(x: torch.Tensor, w: torch.Tensor, block_k: int = SCALED) -> torch.Tensor:
    """Return an upper bound on the error of each element of bf16(x @ w.T), (rows, N) float64.

    x and w are the dequantized operands in float64.

    With p the products of one element, P = sum |p| over a step of `block_k` products, and y the exact sum:

    - An instruction aligns `SUMMED` products and the running sum to the largest of them, and drops what is below
      2^-FRACTION_BITS of it. No term is larger than P, so it drops at most (SUMMED + 1) 2^-FRACTION_BITS P, and a step
      has block_k / SUMMED instructions: 1.6 % of P at 128. (Signs are evenly distributed, so the usual error is about a
      hundredth of that.)
    - Adding up the steps and multiplying by the scales takes steps + 3 roundings in float32: (steps + 3) 2^-24 (1.02
      sum P).
    - bf16 rounds the result by 2^-9 of it; Triton's interpreter truncates, by 2^-8.

    The first term grows with the number of products that the tensor cores sum, here at most `block_k`. Without the sums
    in float32, K = 4096 could lose 32 times as much.
    """
    total = x.abs() @ w.abs().T
    steps = -(-x.shape[1] // block_k)
    dropped = block_k / SUMMED * (SUMMED + 1) * 2.0**-FRACTION_BITS
    inner = dropped * total + (steps + 3) * 2.0**-24 * (1 + dropped) * total
    return inner + 2.0**-8 * ((x @ w.T).abs() + inner)
