"""Routed rows as the engines' kernel wants them: sorted by expert, each expert's padded to whole blocks.

The engines do this with compiled CUDA kernels (`moe_align_block_size`), which need not be installed; here plain PyTorch
stands in for them. It is not part of what is timed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .launching import Product


@dataclass(frozen=True)
class Blocks:
    """The rows for one BLOCK_SIZE_M."""

    sorted_rows: torch.Tensor | None  # (length,) int32; the number of rows where there is padding; None if unsorted
    experts: torch.Tensor  # (blocks,) int32
    padded: torch.Tensor  # (1,) int32: how many of sorted_rows count


def chosen_experts(product: Product, generator: torch.Generator, where: str) -> torch.Tensor:
    """(tokens, topk) int32: different experts for each token, all alike likely."""
    tokens, experts, topk = (product.problem[dim] for dim in ("tokens", "experts", "topk"))
    chances = torch.rand(tokens, experts, generator=generator, device=where)
    return chances.topk(topk, dim=1).indices.to(torch.int32)


def blocks_of(product: Product, chosen: torch.Tensor, block_m: int) -> Blocks:
    """The routed rows in blocks of `block_m`, each of one expert."""
    flat, experts = chosen.flatten(), product.problem["experts"]
    device, rows = flat.device, flat.numel()

    def whole(size: int, value: int) -> torch.Tensor:
        return torch.full((size,), value, dtype=torch.int32, device=device)

    if product.is_unsorted:
        return Blocks(None, flat.contiguous(), whole(1, rows * block_m))
    counts = torch.bincount(flat.long(), minlength=experts)
    padded = (counts + block_m - 1) // block_m * block_m
    begins = padded.cumsum(0) - padded  # of each expert in the padded list
    order = flat.long().argsort(stable=True)
    expert = flat[order].long()
    within = torch.arange(rows, device=device) - (counts.cumsum(0) - counts)[expert]
    length = product.sorted_length(block_m)
    sorted_rows = whole(length, rows)
    sorted_rows[begins[expert] + within] = order.to(torch.int32)
    blocks = torch.repeat_interleave(torch.arange(experts, device=device), padded // block_m).to(torch.int32)
    named = whole(-(-length // block_m), 0)
    named[: len(blocks)] = blocks
    return Blocks(sorted_rows, named, padded.sum().to(torch.int32).reshape(1))
