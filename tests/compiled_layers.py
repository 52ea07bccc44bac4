"""What inductor_on_gpu.py compiles. It loads this file once for each search space, so that each has code of its own:
Dynamo keeps what it compiled by code object."""

from __future__ import annotations

import torch
from torch import nn


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w.T


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv, self.o = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, inner), nn.Linear(inner, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.down(nn.functional.gelu(self.up(self.norm_2(x))))


class TwoLayers(nn.Module):
    def __init__(self, hidden: int, heads: int, inner: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(hidden, heads, inner) for _ in range(2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)
