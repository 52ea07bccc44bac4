"""`rms_norm_rope`: the op that people call, with gradients, in eager mode and under `torch.compile`."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ...datasets import KernelConfig
from ..op_calls import encode, needs_gradient, needs_operator
from ..op_registration import outside_autocast
from . import op_library as library
from .op_checks import check_options
from .op_passes import Options, backward, forward


def rms_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    interleaved: bool = False,
    weight_offset: float = 0.0,
    config: KernelConfig | None = None,
    config_backward: KernelConfig | None = None,
    mode: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Query and key heads, each normed by itself (RMSNorm over the elements of a head) and then rotated by its token's
    angles, in one launch. Differentiable, but for the angles.

    A head x becomes n = x / sqrt(mean(x**2) + eps) * (weight + weight_offset), and each pair (a, b) of n becomes
    (a cos - b sin, b cos + a sin). (RMSNorm: Zhang and Sennrich, 2019; rotary embedding: Su et al., 2021.)

    Args:
        q: (..., q_heads, head_dim), bfloat16, float16 or float32; head_dim is any multiple of 16 up to 512. Views are
            fine where heads lie side by side, as in the output of one projection: nothing is copied then.
        k: (..., kv_heads, head_dim), as q but for the number of heads.
        cos, sin: (..., head_dim / 2), whose rows (all dimensions but the last, one after another) divide the tokens:
            token i takes row i % rows. For q of (batch, sequence, ...) that may be one row a position, or one a token.
            Not interleaved, also (..., head_dim) of which the halves are alike, as transformers has it.
        q_weight, k_weight: (head_dim,), of any floating dtype. Without them there is no norm, just the rotation.
        eps: what is added to the mean of squares.
        interleaved: pairs are the elements 2 i and 2 i + 1 (GPT-J's layout), and not i and i + head_dim / 2 (NeoX's,
            which Llama, Qwen and Gemma have in transformers).
        weight_offset: what is added to the weights; Gemma's are stored less 1.
        config, config_backward: the kernel's config, forward and backward; it may name some knobs only, as those
            of `foretune.grouped_gemm` may. Chosen as `mode` says where left out. (The gradient of a rotation alone is
            one, and runs `config`.)
        mode: "predict" (the default, or the environment variable FORETUNE_MODE) runs the config that is predicted to be
            the fastest; "shortlist" times the 8 best on the first call of about that many tokens, and "off" runs the
            family's default.

    Returns:
        q and k, contiguous in their shapes and dtype. Computed in float32 and rounded once. Results and gradients are
        the same, to the bit, in every run with the same configs.

    Raises:
        ForetuneError: for what the host can see to be wrong (shapes, dtypes, devices, options, a config that cannot run
            this), naming it.

    A norm over all heads together (OLMo-2) and heads of which only a part rotates are not taken.

    >>> if torch.cuda.is_available():
    ...     q, k = (torch.randn(2, 5, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 1))
    ...     angles = torch.arange(5, device="cuda")[:, None] * 1e4 ** -torch.linspace(0, 1, 32, device="cuda")
    ...     weight = torch.ones(64, device="cuda", dtype=torch.bfloat16)
    ...     q, k = rms_norm_rope(q, k, angles.cos(), angles.sin(), weight, weight)
    ...     assert q.shape == (2, 5, 4, 64) and k.shape == (2, 5, 1, 64)
    """
    if type(interleaved) is not bool or type(eps) is not float or type(weight_offset) is not float:
        # Here, because calls that are alike are looked up by their options, and True is equal to 1.0.
        check_options(eps, weight_offset, interleaved)
    tensors = (q, k, cos, sin, q_weight, k_weight)
    if needs_operator(tensors):
        texts = (encode(config), encode(config_backward), mode)
        made: tuple[torch.Tensor, torch.Tensor] = library.rms_norm_rope(
            *tensors, eps, weight_offset, interleaved, *texts
        )
        return made
    options = Options(eps, weight_offset, interleaved, config, config_backward, mode)
    if needs_gradient(tensors):
        made = _RmsNormRope.apply(*tensors, options)  # type: ignore[no-untyped-call]
        return made
    return forward(tensors, options)


class _RmsNormRope(torch.autograd.Function):
    """The op in eager mode, where something needs a gradient."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        *tensors, ctx.options = arguments
        made = forward(tensors, ctx.options)
        ctx.save_for_backward(*tensors)
        return made

    @staticmethod
    @once_differentiable
    @outside_autocast
    def backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_grad, k_grad, *weight_grads = backward(dq, dk, ctx.saved_tensors, ctx.options)
        of_weights = [None, None] if ctx.saved_tensors[-1] is None else weight_grads
        return q_grad, k_grad, None, None, *of_weights, None
