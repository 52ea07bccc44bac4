"""Between bf16 and fp8 with scales, in plain PyTorch: nothing waits for the device, and `torch.compile` fuses it.

Each scale is the largest magnitude of what it is for over the largest e4m3 number, so that nothing overflows. Where
that is 0 the scale is 1. `error_bound` says how far from the exact product fp8 tensor cores may be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from ...datasets import ForetuneError
from .scales import BLOCKWISE, KINDS, ROWWISE, SCALED

FP8 = torch.float8_e4m3fn
#: The largest finite e4m3 number.
LARGEST = 448.0
#: An fp8 tensor and its float32 scales.
Quantized: TypeAlias = tuple[torch.Tensor, torch.Tensor]


def quantize_tensor(x: torch.Tensor) -> Quantized:
    """(fp8, scale (1,)) of a whole tensor.

    >>> fp8, scale = quantize_tensor(torch.tensor([[1.0, -896.0]]))
    >>> fp8.float().tolist(), scale.tolist()
    ([[0.5, -448.0]], [2.0])
    """
    scale = _scale_of(x.abs().amax()) if x.numel() else x.new_ones((), dtype=torch.float32)
    return _divided(x, scale), scale.reshape(1)


def quantize_groups(w: torch.Tensor) -> Quantized:
    """(fp8, scales (groups,)) of weights (groups, N, K), one a group."""
    scale = _scale_of(w.abs().amax((1, 2)))
    return _divided(w, scale[:, None, None]), scale


def quantize_rows(x: torch.Tensor) -> Quantized:
    """(fp8, scales (..., rows, 1)) of (..., rows, K), one a row.

    >>> quantize_rows(torch.tensor([[448.0, 1.0], [0.0, 0.0]]))[1].tolist()
    [[1.0], [1.0]]
    """
    scale = _scale_of(x.abs().amax(-1, keepdim=True))
    return _divided(x, scale), scale


def quantize_rows_128(x: torch.Tensor) -> Quantized:
    """(fp8, scales (rows, blocks of K)) of (rows, K), one for each 1x128: what activations have in DeepSeek's models.

    The scales are stored block by block (`stride()` is (1, rows)), as the kernel, cuBLAS and DeepGEMM read them.

    >>> fp8, scales = quantize_rows_128(torch.randn(3, 200))
    >>> scales.shape, scales.stride()
    (torch.Size([3, 2]), (1, 3))
    """
    rows, k = x.shape
    padded = _padded(x, 1, SCALED)
    blocks = padded.view(rows, padded.shape[1] // SCALED, SCALED)
    scale = _scale_of(blocks.abs().amax(-1))
    fp8 = _divided(blocks, scale[:, :, None]).view(padded.shape)[:, :k]
    return fp8.contiguous(), scale.t().contiguous().t()


def quantize_blocks_128(w: torch.Tensor) -> Quantized:
    """(fp8, scales (..., blocks of N, blocks of K)) of (..., N, K), one for each 128x128: what weights have there.

    Its transpose is the transpose of both: dX of a layer needs no other rounding than its forward pass.

    >>> fp8, scales = quantize_blocks_128(torch.randn(4, 256, 200))
    >>> fp8.shape, scales.shape
    (torch.Size([4, 256, 200]), torch.Size([4, 2, 2]))
    """
    *groups, n, k = w.shape
    padded = _padded(w, SCALED, SCALED)
    shape = (padded.shape[-2] // SCALED, SCALED, padded.shape[-1] // SCALED, SCALED)
    blocks = padded.view(*groups, *shape)
    scale = _scale_of(blocks.abs().amax((-3, -1)))
    fp8 = _divided(blocks, scale[..., :, None, :, None]).view(padded.shape)[..., :n, :k]
    return fp8.contiguous(), scale


def quantize_x(x: torch.Tensor, kind: str) -> Quantized:
    """Activations (rows, K) with the kind of scales that their side of a product has."""
    ways: dict[str, Callable[[torch.Tensor], Quantized]] = {BLOCKWISE: quantize_rows_128, ROWWISE: quantize_rows}
    return ways.get(kind, quantize_tensor)(x)


def quantize_w(w: torch.Tensor, kind: str) -> Quantized:
    """Weights (N, K), or (groups, N, K), likewise; of rows, the scales are (N, 1), or (groups, N)."""
    if kind == BLOCKWISE:
        return quantize_blocks_128(w)
    if kind == ROWWISE:
        fp8, scale = quantize_rows(w)
        return fp8, scale if w.dim() == 2 else scale.squeeze(-1)
    return quantize_tensor(w) if w.dim() == 2 else quantize_groups(w)


def transposed(w: torch.Tensor, scale: torch.Tensor, kind: str) -> Quantized:
    """Quantised weights (..., N, K) as dX wants them, (..., K, N): what is multiplied is contiguous.

    By blocks and by tensors the numbers stay as they are. Scales of rows lie along N, which dX sums over, so there
    the weights are quantised anew, by rows of K.
    """
    if kind == ROWWISE:
        return quantize_w((w.float() * scale.reshape(*w.shape[:-1], 1)).transpose(-2, -1), kind)
    return w.transpose(-2, -1).contiguous(), scale.transpose(-2, -1).contiguous() if kind == BLOCKWISE else scale


def check_kind(kind: object) -> str:
    """The kind of scales; raises `ForetuneError` for what is none."""
    if not isinstance(kind, str) or kind not in KINDS:
        raise ForetuneError(f"scales must be one of {', '.join(KINDS)} but is {kind!r}")
    return kind


def _scale_of(largest: torch.Tensor) -> torch.Tensor:
    scale = largest.float() / LARGEST
    # A subnormal largest number has a scale of 0, or one whose division overflows.
    return torch.where(scale < torch.finfo(torch.float32).tiny, 1.0, scale)


def _divided(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(FP8).contiguous()


def _padded(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """x with zeros at the end of its last two dimensions, up to multiples of these; contiguous."""
    *_, n, k = x.shape
    return torch.nn.functional.pad(x, (0, -k % columns, 0, -n % rows)).contiguous()


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
