"""The op as PyTorch's dispatcher knows it: `torch.ops.foretune.rms_norm_rope` and its backward pass.

Options are flattened into numbers and strings, so that Dynamo can trace a call.
"""

from __future__ import annotations

from typing import Any

import torch

from ..op_calls import decode
from ..op_registration import differentiable, not_differentiable, register_fake
from .op_checks import check_call
from .op_passes import Options, backward, forward

_TENSORS = "Tensor q, Tensor k, Tensor cos, Tensor sin, Tensor? q_weight, Tensor? k_weight"
_OPTIONS = "float eps, float weight_offset, bool interleaved, str? config, str? config_backward, str? mode"
_library: Any = torch.library.Library("foretune", "FRAGMENT")  # type: ignore[no-untyped-call]
for schema in (
    f"rms_norm_rope({_TENSORS}, {_OPTIONS}) -> (Tensor, Tensor)",
    f"rms_norm_rope_backward(Tensor dq, Tensor dk, {_TENSORS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
):
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))


def _options(values: Any) -> Options:
    eps, weight_offset, interleaved, config, config_backward, mode = values
    return Options(eps, weight_offset, interleaved, decode(config), decode(config_backward), mode)


def _forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return forward(arguments[:6], _options(arguments[6:]))


def _forward_fake(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    check_call(*arguments[:9])
    q, k = arguments[:2]
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.options = inputs[6:]


def _autograd(ctx: Any, dq: torch.Tensor, dk: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    grads = rms_norm_rope_backward(dq, dk, *ctx.saved_tensors, *ctx.options)
    q, k, q_weight, k_weight = (grad if needed else None for grad, needed in zip(grads, _needed(ctx), strict=True))
    return q, k, None, None, q_weight, k_weight, *[None] * len(ctx.options)


def _needed(ctx: Any) -> tuple[bool, ...]:
    needs: tuple[bool, ...] = ctx.needs_input_grad
    return *needs[:2], *needs[4:6]


def _backward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    dq, dk = arguments[:2]
    return backward(dq, dk, arguments[2:8], _options(arguments[8:]))


def _backward_fake(*arguments: Any) -> tuple[torch.Tensor, ...]:
    q, k = arguments[2:4]
    weights = (q.new_empty(0) if weight is None else torch.empty_like(weight) for weight in arguments[6:8])
    return q.new_empty(q.shape), k.new_empty(k.shape), *weights


_library.impl("rms_norm_rope", _forward, "CompositeExplicitAutograd")
_library.impl("rms_norm_rope_backward", _backward, "CompositeExplicitAutograd")
register_fake("foretune::rms_norm_rope", _forward_fake, _library)
register_fake("foretune::rms_norm_rope_backward", _backward_fake, _library)
rms_norm_rope = differentiable("rms_norm_rope", _setup_context, _autograd, _library)
rms_norm_rope_backward = not_differentiable("rms_norm_rope_backward", _library)
