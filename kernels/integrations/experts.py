"""The experts of MoE models in other projects, multiplied by `foretune.grouped_gemm`.

`foretune.use("transformers")` registers the experts implementation "foretune" of Hugging Face's models. It computes
what their `grouped_mm` does, with the gathering of tokens, the bias, the routing weights and the scattering fused into
the products; no (tokens * topk, hidden) copy of the activations is made on the way in.

`foretune.use("torchtitan")` replaces `GroupedExperts._grouped_mm`, the seam that torchtitan's experts multiply through.
What it replaces is `torch._grouped_mm`: rows that are past the last offset are of no expert, and neither writes them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ...datasets import ForetuneError
from ...runtime.arguments import warn_once
from ..grouped_gemm import grouped_gemm

#: What the implementation is called in transformers' registry.
NAME = "foretune"


def install_transformers() -> Callable[[], None]:
    """Register the implementation and return what removes it. Raise `ForetuneError` where there is no registry."""
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


def install_torchtitan() -> Callable[[], None]:
    """Replace the method and return what restores it. Raise `ForetuneError` where there is no such seam."""
    try:
        from torchtitan.models.common.moe import GroupedExperts

        before = GroupedExperts._grouped_mm
    except (ImportError, AttributeError) as error:
        raise ForetuneError(
            f"foretune.use('torchtitan') needs torchtitan >= 0.3, which has GroupedExperts._grouped_mm: {error}"
        ) from error
    GroupedExperts._grouped_mm = multiply

    def restore() -> None:
        if GroupedExperts._grouped_mm is multiply:  # and not what somebody put there since
            GroupedExperts._grouped_mm = before

    return restore


def multiply(experts: Any, *, A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """A[rows of e] @ B_t[e] for each expert e, (rows, N), from A (rows, K), sorted by expert, B_t (experts, K, N) and
    `offs` (experts,), where each expert's rows end."""
    w = stored_as_n_k(B_t.transpose(-2, -1), type(experts).__name__)
    return grouped_gemm(A.contiguous(), w, sizes_between(offs))


def sizes_between(ends: torch.Tensor) -> torch.Tensor:
    """Group sizes (groups,), int32, from where each group ends; on the device, nothing waits.

    >>> sizes_between(torch.tensor([4, 4, 6])).tolist()
    [4, 0, 2]
    """
    return ends.to(torch.int32).diff(prepend=ends.new_zeros(1, dtype=torch.int32))


def stored_as_n_k(w: torch.Tensor, owner: str) -> torch.Tensor:
    """Weights (groups, N, K) that the op can read: themselves, unless they are a view of what is stored as
    (groups, K, N). Those are copied, with one warning for each owner.

    >>> stored = torch.zeros(2, 8, 16)
    >>> stored_as_n_k(stored, "an example") is stored
    True
    """
    if w.is_contiguous():
        return w
    if not torch.compiler.is_compiling():  # Dynamo cannot trace a warning
        warn_once(
            f"{owner}: the weights are stored as (experts, K, N) but Foretune reads (experts, N, K)",
            ": each call copies them. Store them transposed, or keep the project's own implementation",
        )
    return w.contiguous()
