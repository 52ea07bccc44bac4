"""The gated MLP by plain PyTorch: the reference, and what users run."""

from __future__ import annotations

import torch
from torch.nn import functional


def activated(gate: torch.Tensor, activation: str) -> torch.Tensor:
    """The activation by its name: silu, gelu or gelu_tanh."""
    if activation == "silu":
        return functional.silu(gate)
    return functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")


def gated(x: torch.Tensor, w: torch.Tensor, activation: str) -> torch.Tensor:
    """act(x @ gate.T) * (x @ up.T), with x (M, K) and w (2 N, K), gate's rows first; (M, N)."""
    gate, up = (x @ w.t()).chunk(2, -1)
    return activated(gate, activation) * up
