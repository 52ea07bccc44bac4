"""`gated_mlp`: the op that people call, with gradients, in eager mode and under `torch.compile`."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ...datasets import KernelConfig
from ...datasets.errors import check_flag
from ..op_calls import encode, needs_gradient, needs_operator
from ..op_registration import outside_autocast
from . import op_library as library
from .op_passes import Options, backward, forward, gradient_of_w, gradient_of_x


def gated_mlp(
    x: torch.Tensor,
    w_gate_up: torch.Tensor,
    activation: str = "silu",
    *,
    recompute: bool = False,
    config: KernelConfig | None = None,
    mode: str | None = None,
) -> torch.Tensor:
    """act(x @ gate.T) * (x @ up.T): both up projections of a gated MLP and its activation, in one GEMM. Differentiable.

    SwiGLU with "silu", GeGLU with "gelu" or "gelu_tanh" (Shazeer, 2020). The down projection is a plain product.

    Args:
        x: (..., K), bfloat16, float16 or, for reference work, float32, whose config is always the family's default.
        w_gate_up: (2 N, K) of the same dtype, gate's rows first, as serving engines and many checkpoints store it.
            N and K are any multiples of 8.
        activation: "silu", "gelu" (by the error function) or "gelu_tanh" (its approximation, as Gemma has it).
        recompute: keeps only x and the weight for the backward pass, which then multiplies again; else gate and up,
            (rows, 2 N), are kept.
        config: the kernel's config. It may name some knobs only, as those of `foretune.grouped_gemm` may. Chosen as
            `mode` says where left out. The products of the backward pass are `foretune.matmul`'s (float32's, which that
            multiplies as tf32, PyTorch's), their configs chosen as `mode` says.
        mode: "predict" (the default, or the environment variable FORETUNE_MODE) runs the config that is predicted to be
            the fastest; "shortlist" times the 8 best on the first call of about that many rows, and "off" runs the
            family's default.

    Returns:
        h, (..., N), of x's dtype: sums, activation and product in float32, rounded once. The same to the bit in every
        run with the same config.

    Raises:
        ForetuneError: for what the host can see to be wrong (shapes, dtypes, devices, options, a config that cannot run
            this), naming it.

    >>> if torch.cuda.is_available():
    ...     x = torch.randn(6, 64, device="cuda", dtype=torch.bfloat16)
    ...     w = torch.randn(2 * 32, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ...     gated_mlp(x, w).sum().backward()
    ...     assert w.grad.shape == w.shape
    """
    if type(recompute) is not bool:
        check_flag("recompute", recompute)
    tensors = (x, w_gate_up)
    needs = needs_gradient(tensors)
    if needs_operator(tensors):
        saves = needs and not recompute
        h: torch.Tensor = library.gated_mlp(*tensors, activation, saves, encode(config), mode)[0]
        return h
    options = Options(activation, config, mode)
    if needs:
        h = _GatedMlp.apply(*tensors, options, recompute)  # type: ignore[no-untyped-call]
        return h
    return forward(x, w_gate_up, options, saves=False)[0]


class _GatedMlp(torch.autograd.Function):
    """The op in eager mode, where something needs a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, options: Options, recompute: bool) -> torch.Tensor:
        h, saved = forward(x, w, options, saves=not recompute)
        ctx.activation, ctx.mode = options.activation, options.mode
        ctx.save_for_backward(x, w, saved)
        return h

    @staticmethod
    @once_differentiable
    @outside_autocast
    def backward(ctx: Any, dh: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, w, saved = ctx.saved_tensors
        grad = backward(dh, x, w, saved, ctx.activation, ctx.mode)
        dx = gradient_of_x(grad, x, w, ctx.mode) if ctx.needs_input_grad[0] else None
        dw = gradient_of_w(grad, x, ctx.mode) if ctx.needs_input_grad[1] else None
        return dx, dw, None, None
