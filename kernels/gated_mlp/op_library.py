"""The op as PyTorch's dispatcher knows it: `torch.ops.foretune.gated_mlp`, and the gradient of what it saves.

Options are flattened into strings and flags, so that Dynamo can trace a call. The products of the backward pass are
`torch.ops.foretune.matmul`, so that a compiler sees them, and schedules them, one by one.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from ..op_calls import decode
from ..op_registration import differentiable, not_differentiable, register_fake, register_flops
from .op_checks import check_call
from .op_passes import Options, backward, forward, gradient_of_w, gradient_of_x

_library: Any = torch.library.Library("foretune", "FRAGMENT")  # type: ignore[no-untyped-call]
for schema in (
    "gated_mlp(Tensor x, Tensor w, str activation, bool saves, str? config, str? mode) -> (Tensor, Tensor)",
    "gated_mlp_backward(Tensor dh, Tensor x, Tensor w, Tensor saved, str activation, str? mode) -> Tensor",
):
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))


def _forward(
    x: torch.Tensor, w: torch.Tensor, activation: str, saves: bool, config: str | None, mode: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    h, saved = forward(x, w, Options(activation, decode(config), mode), saves=saves)
    return h, x.new_empty(0) if saved is None else saved


def _forward_fake(
    x: torch.Tensor, w: torch.Tensor, activation: str, saves: bool, config: str | None, mode: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    check_call(x, w, activation)
    rows = prod(x.shape[:-1])
    h = x.new_empty((*x.shape[:-1], w.shape[0] // 2))
    return h, x.new_empty((rows, w.shape[0]) if saves else (0,))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, w, ctx.activation, _, _, ctx.mode = inputs
    ctx.save_for_backward(x, w, output[1])
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, dh: torch.Tensor | None, _: Any) -> tuple[Any, ...]:
    x, w, saved = ctx.saved_tensors
    if dh is None:
        return None, None, None, None, None, None
    grad = gated_mlp_backward(dh, x, w, saved, ctx.activation, ctx.mode)
    dx = gradient_of_x(grad, x, w, ctx.mode) if ctx.needs_input_grad[0] else None
    dw = gradient_of_w(grad, x, ctx.mode) if ctx.needs_input_grad[1] else None
    return dx, dw, None, None, None, None


def _backward(
    dh: torch.Tensor, x: torch.Tensor, w: torch.Tensor, saved: torch.Tensor, activation: str, mode: str | None
) -> torch.Tensor:
    return backward(dh, x, w, saved if saved.dim() == 2 else None, activation, mode)


def _backward_fake(
    dh: torch.Tensor, x: torch.Tensor, w: torch.Tensor, saved: torch.Tensor, activation: str, mode: str | None
) -> torch.Tensor:
    return x.new_empty((prod(x.shape[:-1]), w.shape[0]))


def _flops(x: Any, w: Any, *_: Any, **__: Any) -> Any:
    return 2 * prod(x) * w[0]


def _backward_flops(_: Any, x: Any, w: Any, saved: Any, *__: Any, **___: Any) -> Any:
    return 0 if len(saved) == 2 else _flops(x, w)  # which are computed again


_library.impl("gated_mlp", _forward, "CompositeExplicitAutograd")
_library.impl("gated_mlp_backward", _backward, "CompositeExplicitAutograd")
register_fake("foretune::gated_mlp", _forward_fake, _library)
register_fake("foretune::gated_mlp_backward", _backward_fake, _library)
gated_mlp = differentiable("gated_mlp", _setup_context, _autograd, _library)
gated_mlp_backward = not_differentiable("gated_mlp_backward", _library)
register_flops("gated_mlp", _flops)
register_flops("gated_mlp_backward", _backward_flops)
