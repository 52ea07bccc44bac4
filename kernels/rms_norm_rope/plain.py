"""RMSNorm and rotary embedding by plain PyTorch: the reference, and what users run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .launches import Rotation


def rotated(q: torch.Tensor, k: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
    """q (tokens, q_heads, head_dim) and k, normed by head if there are weights, and rotated; in their dtype."""
    half = q.shape[-1] // 2
    rows = torch.arange(len(q), device=q.device) % len(rotation.cos)
    cos, sin = (table[rows, None, :half].to(q.dtype) for table in (rotation.cos, rotation.sin))

    def one(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is not None:
            scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + rotation.eps)
            x = (x.float() * scale * (weight.float() + rotation.weight_offset)).to(x.dtype)
        first, second = (x[..., 0::2], x[..., 1::2]) if rotation.interleaved else x.chunk(2, -1)
        pair = first * cos - second * sin, second * cos + first * sin
        return torch.stack(pair, -1).flatten(-2) if rotation.interleaved else torch.cat(pair, -1)

    return one(q, rotation.q_weight), one(k, rotation.k_weight)
