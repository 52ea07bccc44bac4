"""What the scaled GEMMs should give, by plain PyTorch, and how far from it fp8 tensor cores may be."""

from __future__ import annotations

import torch

from .kinds import BLOCKWISE, ROWWISE, SCALED

#: Products that one instruction of Hopper's tensor cores sums in fp8, and the bits after the point that it keeps of
#: their sum, once all are aligned to the largest (DeepSeek-V3's report, section 3.3.2, counts some 14 in all).
SUMMED, FRACTION_BITS = 32, 13


def dequantized_x(x: torch.Tensor, scale: torch.Tensor, kind: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """x (rows, K) times its scales, in `dtype`."""
    if kind == BLOCKWISE:
        scale = scale.repeat_interleave(SCALED, 1)[:, : x.shape[1]]
    return x.to(dtype) * scale.to(dtype)


def dequantized_weight(
    w: torch.Tensor, scale: torch.Tensor, kind: str, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """w (N, K) times its scales, in `dtype`; those of rows are (N,) or (N, 1)."""
    n, k = w.shape
    if kind == BLOCKWISE:
        scale = scale.repeat_interleave(SCALED, 0)[:n].repeat_interleave(SCALED, 1)[:, :k]
    elif kind == ROWWISE:
        scale = scale.reshape(n, 1)
    return w.to(dtype) * scale.to(dtype)


def error_bound(x: torch.Tensor, w: torch.Tensor, block_k: int = SCALED) -> torch.Tensor:
    """The most that each element of bf16(x @ w.T) may be off, (rows, N) float64, for dequantised x and w in float64.

    With p the products of one element, P = sum |p| of a step of `block_k` of them, and y the exact sum:

    - an instruction aligns `SUMMED` products and the sum so far to the largest of these, and drops what is below
      2^-FRACTION_BITS of it. No term is larger than P, so it drops (SUMMED + 1) 2^-FRACTION_BITS P at most, and a step
      has block_k / SUMMED instructions: at 128, 1.6 % of P. (Signs fall evenly, so it is usually a hundredth of that.)
    - adding up the steps, and their scales, takes steps + 3 roundings in float32: (steps + 3) 2^-24 (1.02 sum P).
    - bf16 rounds the result by 2^-9 of it, or in Triton's interpreter, which cuts off, by 2^-8.

    So without the sums in float32 a K of 4096 could lose 32 times as much: the first term grows with the length of
    what the tensor cores sum, here `block_k` at most.
    """
    total = x.abs() @ w.abs().T
    steps = -(-x.shape[1] // block_k)
    dropped = block_k / SUMMED * (SUMMED + 1) * 2.0**-FRACTION_BITS
    inner = dropped * total + (steps + 3) * 2.0**-24 * (1 + dropped) * total
    return inner + 2.0**-8 * ((x @ w.T).abs() + inner)
