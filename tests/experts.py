"""Experts modules as transformers declares them, without transformers: every layout that its registry knows, with a
plain loop over experts for what they compute."""

from __future__ import annotations

import torch
from foretune.kernels.scaled_gemm import scaled_gemm
from foretune.kernels.scaled_gemm.quantize import dequantized_weight, quantize_w
from torch import nn
from torch.nn.functional import silu

TOKENS, TOPK, EXPERTS, HIDDEN, INNER = 12, 2, 5, 16, 24


class Experts(nn.Module):
    """Experts with the attributes that `use_experts_implementation` gives them."""

    def __init__(self, *, has_gate=True, has_bias=False, is_transposed=False, is_concatenated=True, has_norm=False):
        super().__init__()
        self.has_gate, self.has_bias, self.has_post_expert_norm = has_gate, has_bias, has_norm
        self.is_transposed, self.is_concatenated = is_transposed, is_concatenated
        self._is_expert_parallel, self.act_fn, self.num_experts = False, silu, EXPERTS
        generator = torch.Generator().manual_seed(1)
        for name, n, k in (
            ("gate_up_proj" if has_gate else "up_proj", 2 * INNER if has_gate else INNER, HIDDEN),
            ("down_proj", HIDDEN, INNER),
        ):
            w = torch.randn(EXPERTS, n, k, generator=generator) / k**0.5
            w = w.transpose(1, 2).contiguous() if is_transposed else w
            self.register_parameter(name, nn.Parameter(w))
            if has_bias:
                bias = nn.Parameter(torch.randn(EXPERTS, n, generator=generator) / 4)
                self.register_parameter(f"{name}_bias", bias)
        if has_norm:
            self.post_expert_norm = nn.LayerNorm(HIDDEN)

    def _apply_gate(self, h):
        gate, up = h.chunk(2, -1) if self.is_concatenated else (h[..., ::2], h[..., 1::2])
        return self.act_fn(gate) * up

    def looped(self, x, chosen, weights):
        """One expert after another; an index that is not below EXPERTS adds nothing."""
        first, y = "gate_up_proj" if self.has_gate else "up_proj", torch.zeros_like(x)
        for expert in range(EXPERTS):
            token, which = (chosen == expert).nonzero(as_tuple=True)
            h = self._linear(x[token], first, expert)
            h = self._linear(self._apply_gate(h) if self.has_gate else self.act_fn(h), "down_proj", expert)
            h = self.post_expert_norm(h) if self.has_post_expert_norm else h
            y = y.index_add(0, token, (h * weights[token, which][:, None]).to(y.dtype))
        return y

    def _linear(self, x, name, expert):
        w = getattr(self, name)[expert]
        y = x @ (w if self.is_transposed else w.T)
        return y + getattr(self, f"{name}_bias")[expert] if self.has_bias else y


def routed(experts=EXPERTS, tokens=TOKENS, hidden=HIDDEN):
    """Tokens (tokens, hidden), the experts that each chooses, of which the third gets none, and their weights."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(tokens, experts, generator=generator)
    logits[:, 2] = -20
    weights, chosen = logits.softmax(-1).topk(TOPK)
    return torch.randn(tokens, hidden, generator=generator), chosen, weights


class Fp8Experts(Experts):
    """Experts in fp8 with scales of 128x128 blocks, with the attributes of transformers' `FP8Experts`."""

    HIDDEN, INNER = 256, 192
    is_exact = False  # whether the loop is in float32, with nothing quantized but the weights

    def __init__(self, *, has_gate=True):
        super().__init__(has_gate=has_gate)
        self.block_size, self.activation_scheme = (128, 128), "dynamic"
        generator = torch.Generator().manual_seed(1)
        for name, n, k in (
            ("gate_up_proj" if has_gate else "up_proj", (1 + has_gate) * self.INNER, self.HIDDEN),
            ("down_proj", self.HIDDEN, self.INNER),
        ):
            w = torch.randn(EXPERTS, n, k, generator=generator) / k**0.5
            fp8, scale = quantize_w(w, "blockwise")
            setattr(self, name, nn.Parameter(fp8))
            setattr(self, f"{name}_scale_inv", nn.Parameter(scale))

    def _linear(self, x, name, expert):
        """The product of the quantized operands of one expert, or of the dequantized ones if `is_exact`."""
        w, scale = getattr(self, name)[expert].detach(), getattr(self, f"{name}_scale_inv")[expert].detach()
        if self.is_exact:
            return x @ dequantized_weight(w, scale, "blockwise").T
        return scaled_gemm(x.to(torch.bfloat16), w, w_scale=scale)
