"""Run the experts of other projects' MoE models with `foretune.grouped_gemm`.

`foretune.use("transformers")` registers the experts implementation "foretune" of Hugging Face's models. It computes the
same as their `grouped_mm`, with the gathering of tokens, the bias, the routing weights and the scattering fused into
the products; the input is not copied to (tokens * topk, hidden).

In models that transformers quantizes to fp8 in blocks of 128x128, it computes the same as their `grouped_mm` of fp8
experts, with `foretune.scaled_grouped_gemm`, which quantizes the input per 1x128 block. The experts get no gradient;
the input gets that of this op.

`foretune.use("torchtitan")` replaces `GroupedExperts._grouped_mm`, through which torchtitan's experts multiply. Like
the `torch._grouped_mm` that it replaces, it does not write rows after the last offset, which belong to no expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from ...datasets import ForetuneError
from ...runtime.arguments import Mode, resolve_mode, warn_once
from ..grouped_gemm import few_rows_gemm, grouped_gemm, route
from ..grouped_gemm.space import is_few
from ..op_calls import is_transformed, needs_gradient
from ..op_choice import HowChosen
from ..scaled_gemm import scaled_grouped_gemm
from ..scaled_gemm.space import SCALED

#: The name of the implementation in transformers' registry.
NAME = "foretune"


def install_transformers() -> Callable[[], None]:
    """Register the experts implementation "foretune", in bf16 and fp8, and return a function that removes it.

    Raises:
        ForetuneError: transformers is not installed, or has no registry of experts implementations.
    """
    try:
        # Older versions have no registry, but three fixed names of implementations.
        from transformers.modeling_utils import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        raise ForetuneError(
            f"foretune.use('transformers') needs transformers >= 5.7, whose models take registered experts: {error}"
        ) from error
    registries = [ALL_EXPERTS_FUNCTIONS]
    ALL_EXPERTS_FUNCTIONS[NAME] = experts_forward
    with suppress(ImportError):  # older versions have no registry for fp8
        from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS

        registries.append(ALL_FP8_EXPERTS_FUNCTIONS)
        ALL_FP8_EXPERTS_FUNCTIONS[NAME] = fp8_experts_forward

    def remove() -> None:
        for registry in registries:
            registry.pop(NAME, None)

    return remove


def experts_forward(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return what the experts add to each token, (tokens, hidden).

    If autocast is on, products have its dtype, otherwise that of the weights.

    Args:
        experts: A module under transformers' `use_experts_implementation`.
        hidden_states: The tokens, (tokens, hidden).
        top_k_index: The experts of each token, (tokens, topk). An index that is not below the number of experts here
            belongs to another rank and adds nothing.
        top_k_weights: Their routing weights, (tokens, topk).
    """
    tokens, topk = top_k_index.shape
    has_norm = getattr(experts, "has_post_expert_norm", False)  # older versions have no norm
    w_up, bias_up = _weights(experts, "gate_up_proj" if experts.has_gate else "up_proj")
    w_down, bias_down = _weights(experts, "down_proj")
    groups = w_up.shape[0]

    weights = top_k_weights.reshape(-1).contiguous()
    chosen = top_k_index.reshape(-1).contiguous()
    x = hidden_states.to(w_up.dtype).contiguous()

    def gated(h: torch.Tensor) -> torch.Tensor:
        h = experts._apply_gate(h) if experts.has_gate else experts.act_fn(h)
        return h.to(w_down.dtype).contiguous()

    if not has_norm and _are_few(tokens * topk, w_up, w_down, (x, weights, bias_up, bias_down)):
        h = gated(few_rows_gemm(x, w_up, chosen, topk=topk, bias=bias_up))
        y = few_rows_gemm(h, w_down, chosen, topk=topk, weights=weights, bias=bias_down, sums=True)
        return y.to(hidden_states.dtype)
    # Rows of other ranks, if there are any, are last in the order, outside all groups: undefined in h, zero in y.
    order, routing = route(chosen, groups)
    h = gated(grouped_gemm(x, w_up, routing, gather_indices=order, topk=topk, permute_x=True, bias=bias_up))
    factors = None if has_norm else weights
    y = grouped_gemm(h, w_down, routing, gather_indices=order, permute_y=True, topk_weights=factors, bias=bias_down)
    if has_norm:
        y = experts.post_expert_norm(y) * weights.masked_fill(chosen >= groups, 0)[:, None]
    return y.view(tokens, topk, y.shape[1]).sum(1).to(hidden_states.dtype)


def fp8_experts_forward(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return what experts in fp8 add to each token, (tokens, hidden), as `experts_forward` does for those in bf16.

    Args:
        experts: transformers' `FP8Experts`, or a module with the same attributes.
        hidden_states: The tokens, (tokens, hidden); they are quantized in blocks of 1x128.
        top_k_index: The experts of each token, (tokens, topk). An index that is not below the number of experts here
            belongs to another rank and adds nothing.
        top_k_weights: Their routing weights, (tokens, topk).

    Raises:
        ForetuneError: The weights are not fp8 in blocks of 128x128 with float32 scales, or activations have fixed
            scales.
    """
    tokens, topk = top_k_index.shape
    w_up, scale_up = _fp8_weights(experts, "gate_up_proj" if experts.has_gate else "up_proj")
    w_down, scale_down = _fp8_weights(experts, "down_proj")
    chosen = top_k_index.reshape(-1).contiguous()
    order, routing = route(chosen, w_up.shape[0])
    sizes = routing[-1]
    # Older versions do not report whether other ranks have some of the experts.
    elsewhere = (chosen[order] >= w_up.shape[0])[:, None] if getattr(experts, "_is_expert_parallel", True) else None

    def masked(rows: torch.Tensor) -> torch.Tensor:
        """Return rows, with zeros for those of other ranks' experts, which the op leaves uninitialized."""
        return rows if elsewhere is None else rows.masked_fill(elsewhere, 0)

    x = masked(hidden_states.to(torch.bfloat16)[order // topk])
    h = masked(scaled_grouped_gemm(x, w_up, sizes, w_scale=scale_up))
    h = experts._apply_gate(h) if experts.has_gate else experts.act_fn(h)
    y = masked(scaled_grouped_gemm(h.to(torch.bfloat16).contiguous(), w_down, sizes, w_scale=scale_down))
    y = y * masked(top_k_weights.reshape(-1)[order, None])
    # In the order of tokens, so that the sum over their experts does not depend on the routing.
    y = torch.empty_like(y).index_copy(0, order.long(), y)
    return y.view(tokens, topk, y.shape[1]).sum(1).to(hidden_states.dtype)


def _are_few(rows: int, w_up: torch.Tensor, w_down: torch.Tensor, others: Sequence[torch.Tensor | None]) -> bool:
    """Return whether to run `few_rows_gemm`: `rows` is small, and no weight or tensor of `others` needs a gradient."""
    n = max(w_up.shape[1], w_down.shape[1])
    if not is_few(rows, w_up.shape[0], n) or needs_gradient((w_up, w_down, *others)) or is_transformed():
        return False
    return _is_free()


def _is_free() -> bool:
    """Return whether FORETUNE_MODE and FORETUNE_SAME_BITS allow running kernels that have no config."""
    return HowChosen.of(None).is_free


_is_free.__dict__["_dynamo_marked_constant"] = True


def _fp8_weights(experts: Any, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one projection's fp8 weights (experts, N, K), and their scales (experts, blocks of N, blocks of K)."""
    w, scale = getattr(experts, name).detach(), getattr(experts, f"{name}_scale_inv").detach()
    block = tuple(experts.block_size or ())
    for what, found, needed in (
        ("weights", w.dtype, torch.float8_e4m3fn),
        ("block_size", block, (SCALED, SCALED)),
        ("scales", scale.dtype, torch.float32),
        ("activation_scheme", experts.activation_scheme, "dynamic"),
        ("has_bias", getattr(experts, "has_bias", False), False),
    ):
        if found != needed:
            raise ForetuneError(
                f"{type(experts).__name__}: {name} has {what} {found}, but Foretune's fp8 experts need {needed}: use "
                "another experts implementation"
            )
    return w, scale


def _weights(experts: Any, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return one projection's weights (experts, N, K), in the dtype to multiply in, and its bias or None."""
    w: torch.Tensor = getattr(experts, name)
    device_type = w.device.type
    if torch.is_autocast_enabled(device_type):
        w = w.to(torch.get_autocast_dtype(device_type))
    if experts.is_transposed:
        w = w.transpose(-2, -1)
    return stored_as_n_k(w, type(experts).__name__), getattr(experts, f"{name}_bias") if experts.has_bias else None


def install_torchtitan() -> Callable[[], None]:
    """Let torchtitan's `GroupedExperts` compute with `foretune.grouped_gemm`, and return a function that undoes it.

    Raises:
        ForetuneError: torchtitan is not installed, or has no such method.
    """
    try:
        from torchtitan.models.common.moe import GroupedExperts

        before = GroupedExperts._grouped_mm
    except (ImportError, AttributeError) as error:
        raise ForetuneError(
            f"foretune.use('torchtitan') needs torchtitan >= 0.3, which has GroupedExperts._grouped_mm: {error}"
        ) from error
    if resolve_mode() is Mode.OFF:  # the method stays
        return lambda: None
    GroupedExperts._grouped_mm = multiply

    def restore() -> None:
        if GroupedExperts._grouped_mm is multiply:  # unless other code has replaced it since
            GroupedExperts._grouped_mm = before

    return restore


def multiply(experts: Any, *, A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Return A[rows of e] @ B_t[e] for each expert e, (rows, N).

    Args:
        experts: The module, whose class is named in warnings.
        A: The rows, (rows, K), sorted by expert.
        B_t: The weights, (experts, K, N).
        offs: The end of each expert's rows, (experts,).
    """
    w = stored_as_n_k(B_t.transpose(-2, -1), type(experts).__name__)
    return grouped_gemm(A.contiguous(), w, sizes_between(offs))


def sizes_between(ends: torch.Tensor) -> torch.Tensor:
    """Return group sizes (groups,), int32, from the ends of groups, without synchronizing.

    >>> sizes_between(torch.tensor([4, 4, 6])).tolist()
    [4, 0, 2]
    """
    return ends.to(torch.int32).diff(prepend=ends.new_zeros(1, dtype=torch.int32))


def stored_as_n_k(w: torch.Tensor, owner: str) -> torch.Tensor:
    """Return weights (groups, N, K) in the layout that the op reads.

    Weights that are a view of (groups, K, N) are copied, with one warning per owner.

    >>> stored = torch.zeros(2, 8, 16)
    >>> stored_as_n_k(stored, "an example") is stored
    True
    """
    if w.is_contiguous():
        return w
    if not torch.compiler.is_compiling():  # Dynamo cannot trace a warning
        warn_once(
            f"{owner}: the weights are stored as (experts, K, N) but Foretune reads (experts, N, K)",
            ": each call copies them. Store them transposed, or use the project's own implementation",
        )
    return w.contiguous()
