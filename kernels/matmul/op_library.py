"""The op as PyTorch's dispatcher knows it: `torch.ops.foretune.matmul`.

Configs are flattened into strings, so that Dynamo can trace a call.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from ...datasets import ForetuneError
from ..op_calls import decode
from ..op import differentiable, register_fake, register_flops
from .op_passes import gradient_of_bias, gradients, run
from .operands import check_operands

_library: Any = torch.library.Library("foretune", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "matmul(Tensor a, Tensor b, Tensor? bias, str? activation, str? config, str? mode) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _forward(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    config: str | None,
    mode: str | None,
) -> torch.Tensor:
    return run(a, b, bias, activation, decode(config), mode)


def _forward_fake(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, activation: str | None, *_: str | None
) -> torch.Tensor:
    check_operands(a, b, bias, activation)
    return a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=torch.int32 if a.dtype == torch.int8 else a.dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    a, b, _, activation, _, mode = inputs
    if activation is not None:
        raise ForetuneError(f"{activation} is fused here, and has no gradient: foretune.matmul applies it after")
    needs_a, needs_b = ctx.needs_input_grad[:2]
    ctx.save_for_backward(a if needs_b else None, b if needs_a else None)
    ctx.mode, ctx.b_is_batch = mode, b.dim() == 3


def _autograd(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    a, b = ctx.saved_tensors
    da, db = gradients(dy, a, b, ctx.b_is_batch, ctx.mode)
    return da, db, gradient_of_bias(dy) if ctx.needs_input_grad[2] else None, None, None, None


def _flops(a: Any, b: Any, *_: Any, **__: Any) -> Any:
    return 2 * prod(a) * b[-1]


_library.impl("matmul", _forward, "CompositeExplicitAutograd")
register_fake("foretune::matmul", _forward_fake, _library)
matmul = differentiable("matmul", _setup_context, _autograd, _library)
register_flops("matmul", _flops)
