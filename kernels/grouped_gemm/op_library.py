"""The op as PyTorch's dispatcher knows it: `torch.ops.foretune.grouped_gemm` and its backward pass.

Registered with `Library` and not with the `custom_op` decorator, which adds some 20 us to each call. Options are
flattened into integers and strings, so that Dynamo can trace a call.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from ..op_calls import decode
from ..op import differentiable, not_differentiable, register_fake, register_flops
from .checks import Shape, check_call
from .passes import Needs, backward, forward, needs_of, saved_of
from .steps import Options, call_of, call_of_backward

_TENSORS = "Tensor group_sizes, Tensor? gather_indices, Tensor? topk_weights, Tensor? bias"
_CONFIGS = "str? config, str? config_dx, str? config_dw"
_OPTIONS = f"int topk, bool permute_x, bool permute_y, {_CONFIGS}, str? mode"

_library: Any = torch.library.Library("foretune", "FRAGMENT")  # type: ignore[no-untyped-call]
for schema in (
    f"grouped_gemm(Tensor x, Tensor w, {_TENSORS}, {_OPTIONS}) -> Tensor",
    f"grouped_gemm_backward(Tensor dy, Tensor? x, Tensor? w, {_TENSORS}, {_OPTIONS}, bool[4] needs)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
):
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))


def _options(values: Any) -> Options:
    topk, permute_x, permute_y, config, config_dx, config_dw, mode = values
    return Options(topk, permute_x, permute_y, decode(config), decode(config_dx), decode(config_dw), mode)


def _forward(*arguments: Any) -> torch.Tensor:
    tensors = arguments[:6]
    return forward(call_of(_options(arguments[6:]), tensors), *tensors)


def _forward_fake(*arguments: Any) -> torch.Tensor:
    shape = check_call(*arguments[:9])
    return arguments[0].new_empty(shape.rows, shape.n)  # type: ignore[no-any-return]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*saved_of(inputs[:6], needs_of(ctx)))
    ctx.options = inputs[6:]


def _autograd(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    needs = needs_of(ctx)
    grads = grouped_gemm_backward(dy, *ctx.saved_tensors, *ctx.options, needs)
    x, w, weights, bias = (grad if needed else None for grad, needed in zip(grads, needs, strict=True))
    return x, w, None, None, weights, bias, *[None] * len(ctx.options)


def _backward(dy: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, ...]:
    tensors, needs = arguments[:6], Needs(*arguments[-1])
    call = call_of_backward(dy, _shape(dy, *tensors[:3]), _options(arguments[6:-1]))
    grads = backward(call, needs, dy, *tensors)
    return tuple(dy.new_empty(0) if grad is None else grad for grad in grads)


def _backward_fake(dy: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, ...]:
    x, w, group_sizes, _, weights, bias, topk, permute_x = arguments[:8]
    rows, groups, n, k = _shape(dy, x, w, group_sizes)
    needs = Needs(*arguments[-1])
    return (
        dy.new_empty(rows // topk if permute_x else rows, k) if needs.x else dy.new_empty(0),
        dy.new_empty(groups, n, k) if needs.w else dy.new_empty(0),
        torch.empty_like(weights) if needs.weights else dy.new_empty(0),
        torch.empty_like(bias) if needs.bias else dy.new_empty(0),
    )


def _shape(dy: torch.Tensor, x: torch.Tensor | None, w: torch.Tensor | None, group_sizes: torch.Tensor) -> Shape:
    """The sizes of a call from what is left of it. K is 0 where only the bias has a gradient, which needs none."""
    known = x if x is not None else w
    return Shape(dy.shape[0], group_sizes.shape[0], dy.shape[1], 0 if known is None else known.shape[-1])


def _flops(*arguments: Any, out_shape: Any, **_: Any) -> Any:
    return 2 * prod(out_shape) * arguments[1][-1]


def _backward_flops(dy: Any, x: Any, w: Any, *arguments: Any, **_: Any) -> Any:
    needs = Needs(*arguments[-1])
    known = x if x is not None else w
    products = (needs.x or needs.weights) + needs.w  # the weights' gradient is made from that of x
    return 2 * prod(dy) * known[-1] * products if products else 0


_library.impl("grouped_gemm", _forward, "CompositeExplicitAutograd")
_library.impl("grouped_gemm_backward", _backward, "CompositeExplicitAutograd")
register_fake("foretune::grouped_gemm", _forward_fake, _library)
register_fake("foretune::grouped_gemm_backward", _backward_fake, _library)
grouped_gemm = differentiable("grouped_gemm", _setup_context, _autograd, _library)
grouped_gemm_backward = not_differentiable("grouped_gemm_backward", _library)
register_flops("grouped_gemm", _flops)
register_flops("grouped_gemm_backward", _backward_flops)
