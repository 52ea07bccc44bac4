"""`foretune.use("transformers")`: the experts implementation "foretune" of Hugging Face's MoE models.

It computes what their `grouped_mm` does, with the gathering of tokens, the bias, the routing weights and the
scattering fused into the products; no (tokens * topk, hidden) copy of the activations is made on the way in.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ...datasets import ForetuneError
from ..grouped_gemm import grouped_gemm
from .operands import sizes_between, stored_as_n_k

#: What the implementation is called in the registry.
NAME = "foretune"


def install() -> Callable[[], None]:
    """Registers the implementation; returns what removes it. Raises `ForetuneError` where there is no registry."""
    try:
        # There since models look for the name of an implementation in the registry; before, they knew three names.
        from transformers.modeling_utils import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        raise ForetuneError(
            f"foretune.use('transformers') needs transformers >= 5.7, whose models take registered experts: {error}"
        ) from error
    ALL_EXPERTS_FUNCTIONS[NAME] = experts_forward
    return partial(ALL_EXPERTS_FUNCTIONS.pop, NAME, None)


def experts_forward(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """What the experts add to each token, (tokens, hidden), from (tokens, hidden), (tokens, topk) and (tokens, topk).

    `experts` is a module under `use_experts_implementation`. An index that is not below the number of its experts is
    another rank's and adds nothing. Where autocast is on, the products are of its dtype, else of the weights'.
    """
    tokens, topk = top_k_index.shape
    # Older versions know no norm, and do not say whether other ranks have some of the experts.
    has_norm = getattr(experts, "has_post_expert_norm", False)
    is_parallel = getattr(experts, "_is_expert_parallel", True)
    w_up, bias_up = _weights(experts, "gate_up_proj" if experts.has_gate else "up_proj")
    w_down, bias_down = _weights(experts, "down_proj")
    groups = w_up.shape[0]

    weights = top_k_weights.reshape(-1).contiguous()
    chosen = top_k_index.reshape(-1)
    sorted_choice, order = chosen.sort(stable=True)
    each = torch.arange(groups, dtype=chosen.dtype, device=chosen.device)
    sizes = sizes_between(torch.searchsorted(sorted_choice, each, right=True))

    x = hidden_states.to(w_up.dtype).contiguous()
    if is_parallel:
        # The rows of other ranks come last and are of no group, and undefined in what the op returns: they are masked
        # after each product, and before it, so that nothing multiplies them.
        elsewhere = (sorted_choice >= groups)[:, None]
        h = grouped_gemm(x[order // topk].masked_fill(elsewhere, 0), w_up, sizes, bias=bias_up)
        h = h.masked_fill(elsewhere, 0)
    else:
        h = grouped_gemm(x, w_up, sizes, gather_indices=order, topk=topk, permute_x=True, bias=bias_up)
    h = experts._apply_gate(h) if experts.has_gate else experts.act_fn(h)
    h = h.to(w_down.dtype).contiguous()
    are_fused = not (is_parallel or has_norm)
    y = grouped_gemm(
        h,
        w_down,
        sizes,
        gather_indices=order,
        permute_y=True,
        topk_weights=weights if are_fused else None,
        bias=bias_down,
    )
    if is_parallel:
        elsewhere = (chosen >= groups)[:, None]
        y = y.masked_fill(elsewhere, 0)
        weights = weights.masked_fill(elsewhere[:, 0], 0)
    if has_norm:
        y = experts.post_expert_norm(y)
    if not are_fused:
        y = y * weights[:, None]
    return y.view(tokens, topk, y.shape[1]).sum(1).to(hidden_states.dtype)


def _weights(experts: Any, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weights (experts, N, K) of one projection, of the dtype to multiply in, and its bias (experts, N) or None."""
    w: torch.Tensor = getattr(experts, name)
    kind = w.device.type
    if torch.is_autocast_enabled(kind):
        w = w.to(torch.get_autocast_dtype(kind))
    if experts.is_transposed:
        w = w.transpose(-2, -1)
    return stored_as_n_k(w, type(experts).__name__), getattr(experts, f"{name}_bias") if experts.has_bias else None
