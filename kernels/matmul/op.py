"""`matmul`: the op that people call, with gradients, in eager mode and under `torch.compile`. Its config is predicted
once for each shape, then looked up."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ...datasets import KernelConfig
from ..op_calls import encode, is_transformed, needs_gradient, needs_operator
from ..op import outside_autocast
from . import op_library as library
from .op_passes import activated, gradient_of_bias, gradients, product


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    config: KernelConfig | None = None,
    mode: str | None = None,
) -> torch.Tensor:
    """y = activation(a @ b + bias). Differentiable: the gradients are two more such products.

    Args:
        a: (M, K), or a batch of them (B, M, K); bfloat16, float16, float32 (multiplied as tf32) or int8.
        b: (K, N), or (B, K, N), of the same dtype. How either is stored follows from its strides, so that `x @ w.T`,
            `dy @ w` and `dy.T @ x` copy nothing; what has contiguous rows neither way is copied, and so is what begins
            at no multiple of 16 bytes though its rows are long enough for it. In a large product of float32, what lies
            across K is copied too, where that is faster (sm_90).
        bias: (N,), of the same dtype. Neither it nor an activation goes with int8.
        activation: "relu", "gelu" (the exact one) or "silu".
        config: the kernel's config, for y and not for gradients. It may name some knobs only, as those of
            `foretune.grouped_gemm` may. Chosen as `mode` says where left out.
        mode: "predict" (the default, or the environment variable FORETUNE_MODE) runs the config that is predicted to
            be the fastest; "shortlist" times the 8 best on the first call of about that many rows, and "off" runs the
            family's default.

    Returns:
        y, (M, N) or (B, M, N), of a's dtype, int32 for int8. The same, to the bit, in every run with the same config.

    Raises:
        ForetuneError: for shapes, dtypes, devices, options or a config that cannot be, naming it.

    >>> if torch.cuda.is_available():
    ...     x, w = (torch.randn(64, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    ...     matmul(x, w.T, activation="silu").sum().backward()
    ...     assert w.grad.shape == (64, 128)
    """
    tensors = (a, b, bias)
    # (Under a function transform, a tensor does not say whether an outer transform wants its gradient.)
    if needs_gradient(tensors) or (activation is not None and is_transformed()):
        # The gradient of an activation needs what went into it: it is not fused here.
        y: torch.Tensor
        if needs_operator(tensors):
            y = library.matmul(*tensors, None, encode(config), mode)
        else:
            y = _Matmul.apply(*tensors, config, mode)  # type: ignore[no-untyped-call]
        return y if activation is None else activated(y, activation)
    return product(a, b, bias, activation, config, mode)


class _Matmul(torch.autograd.Function):
    """a @ b + bias in eager mode, where something needs a gradient."""

    @staticmethod
    def forward(ctx: Any, a: Any, b: Any, bias: Any, config: Any, mode: Any) -> torch.Tensor:
        y = product(a, b, bias, None, config, mode)
        needs_a, needs_b = ctx.needs_input_grad[:2]
        ctx.save_for_backward(a if needs_b else None, b if needs_a else None)
        ctx.mode, ctx.b_is_batch = mode, b.dim() == 3
        return y

    @staticmethod
    @once_differentiable
    @outside_autocast
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        a, b = ctx.saved_tensors
        da, db = gradients(dy, a, b, ctx.b_is_batch, ctx.mode)
        return da, db, gradient_of_bias(dy) if ctx.needs_input_grad[2] else None, None, None
