"""The op, and an MoE layer made of it, as plain loops over experts: what the kernels are compared with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import silu


def grouped_loop(x, w, sizes, *, indices=None, topk=1, permute_x=False, permute_y=False, weights=None, bias=None):
    """What `foretune.grouped_gemm` computes, one expert after another. `sizes` is a list."""
    sorted_x = x[indices // topk] if permute_x else x
    products, start = [], 0
    for expert, size in enumerate(sizes):
        product = sorted_x[start : start + size] @ w[expert].T
        products.append(product if bias is None else product + bias[expert])
        start += size
    y = torch.cat(products)
    if weights is not None:
        y = y * (weights if indices is None else weights[indices])[:, None]
    return torch.zeros_like(y).index_copy(0, indices, y) if permute_y else y


def error(result, reference, usual=0.0):
    """||result - reference|| / ||reference||, or over the usual norm where that is larger."""
    reference = reference.double()
    return float((result.double() - reference).norm()) / max(float(reference.norm()), usual)


@dataclass
class Routing:
    """Which experts each token goes to."""

    weights: torch.Tensor  # (tokens, topk)
    experts: torch.Tensor  # (tokens, topk)

    @classmethod
    def of(cls, logits, topk):
        weights, experts = logits.softmax(-1).topk(topk, dim=-1)
        return cls(weights / weights.sum(-1, keepdim=True), experts)

    @property
    def topk(self):
        return self.experts.shape[1]

    def order(self):
        """Where each sorted row is in the order of tokens."""
        return self.experts.flatten().argsort(stable=True)

    def sizes(self, experts):
        return self.experts.flatten().bincount(minlength=experts).int()


def moe_loop(x, router, w13, w2, topk):
    """An MoE layer: router, SwiGLU experts, weighted sum. x (tokens, hidden), w13 (experts, 2 * inner, hidden)."""
    routing = Routing.of(x @ router.T, topk)
    y = torch.zeros_like(x)
    for expert in range(len(w13)):
        token, which = (routing.experts == expert).nonzero(as_tuple=True)
        gate, up = (x[token] @ w13[expert].T).chunk(2, -1)
        product = (silu(gate) * up) @ w2[expert].T
        y = y.index_add(0, token, product * routing.weights[token, which][:, None])
    return y


def moe_fused(x, router, w13, w2, topk, *, gemm, permutes=True, weighs=True):
    """The same layer on `gemm`, with Unsloth's arguments in Unsloth's order; `permutes` and `weighs` say what is fused
    into it."""
    routing = Routing.of(x.float() @ router.float().T, topk)
    order, sizes = routing.order(), routing.sizes(len(w13))
    rows = x if permutes else x[order // topk]
    gate, up = gemm(rows, w13, sizes, topk, order, permute_x=permutes).chunk(2, -1)
    inner = (silu(gate) * up).contiguous()
    weights = routing.weights.flatten()
    y = gemm(inner, w2, sizes, topk, order, permute_y=permutes, topk_weights=weights if weighs else None)
    if not permutes:
        y = torch.zeros_like(y).index_copy(0, order, y)
    if not weighs:
        y = y * weights[:, None]
    return y.view(len(x), topk, -1).sum(1).to(x.dtype)
