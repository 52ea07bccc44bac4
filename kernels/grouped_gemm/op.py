"""`grouped_gemm`: the op that people call, with gradients, in eager mode and under `torch.compile`.

One implementation (passes.py) is reached in two ways. In eager mode it is called directly, through an
`autograd.Function` if something needs a gradient: PyTorch's dispatcher would cost more than the launch. Wherever
PyTorch wants to see an operator (`torch.compile`, fake tensors, dispatch modes) it gets one, library.py's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ...datasets import KernelConfig
from ...runtime.launching.collector import collecting_later
from ..op_calls import check_tensor, encode, needs_operator
from ..op import outside_autocast
from . import op_library as library
from .checks import check_indices, check_options
from .passes import Needs, backward, compile_step, forward, needs_of, saved_of
from .steps import Call, call_of

_NO_GRADIENTS = Needs(x=False, w=False, weights=False, bias=False)


def grouped_gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    group_sizes: torch.Tensor,
    *,
    gather_indices: torch.Tensor | None = None,
    topk: int = 1,
    permute_x: bool = False,
    permute_y: bool = False,
    topk_weights: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    config: KernelConfig | None = None,
    config_dx: KernelConfig | None = None,
    config_dw: KernelConfig | None = None,
    mode: str | None = None,
) -> torch.Tensor:
    """y[rows of e] = (x[rows of e] @ w[e].T + bias[e]) * topk_weights, for rows sorted by group e. Differentiable.

    Args:
        x: (rows, K), sorted by group; with `permute_x` (tokens, K) in the order of tokens. bfloat16, float16, or, for
            reference work, float32.
        w: (groups, N, K) of the same dtype. N and K are any multiples of 8.
        group_sizes: (groups,) int32: how many rows each group has. It stays on the device. (int64 as well: then one
            more small kernel converts it.)
        gather_indices: (rows,) int32 or int64: where each sorted row is in the permuted order of token * topk + i.
            The stable argsort of the flat top-k expert ids.
        topk: rows of each token.
        permute_x: sorted row i is x[gather_indices[i] // topk], gathered while it is loaded. rows = tokens * topk.
        permute_y: the sorted row i of y is stored as row gather_indices[i]. Not together with `permute_x`.
        topk_weights: (rows,) or (tokens, topk), a floating dtype, in the permuted order if there are
            `gather_indices` and else in that of the rows. They get a gradient as well.
        bias: (groups, N), a floating dtype.
        config, config_dx, config_dw: the kernel's config forward and for the gradients of x and w. It may name some
            knobs only: the family's default has the others. (num_warps and num_stages it always has: 4 and 3 where
            it names none, as a `triton.Config`.) Chosen as `mode` says where left out.
        mode: "predict" (the default, or the environment variable FORETUNE_MODE) runs the config that is predicted to
            be the fastest; "shortlist" times the 8 best on the first call of about that many rows, and "off" runs the
            family's default.

    Returns:
        y, (rows, N), of x's dtype. The result and all gradients are the same, to the bit, in every run with the
        same configs.

    Raises:
        ForetuneError: for what the host can see to be wrong (shapes, dtypes, devices, strides, options, a config
            that cannot run this), naming it.

    Group sizes may sum to less than the rows, as they do where other ranks own some experts. The other rows belong to
    no group: in y they are undefined (the memory as it was), and their gradients are zero.

    Nobody waits for the device, so what only it knows is not checked: group sizes that are negative count as 0; those
    that sum to more than the rows end where the rows do, and then gradients of w and bias are undefined; an index out
    of range reads some other row and stores none. Nothing is ever read or written out of bounds. With the environment
    variable FORETUNE_CHECK=1 every call waits, such sizes and indices raise `ForetuneError`, and rows of y that belong
    to no group are zero. Both variables are read when a shape is first met. After one ordinary call of its shape, a
    call can be captured in a CUDA graph, which can be replayed with other group sizes.

    >>> import torch
    >>> if torch.cuda.is_available():
    ...     x = torch.randn(6, 16, device="cuda", dtype=torch.bfloat16)
    ...     w = torch.randn(3, 8, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ...     y = grouped_gemm(x, w, torch.tensor([4, 0, 2], dtype=torch.int32, device="cuda"))
    ...     y.sum().backward()
    ...     assert y.shape == (6, 8) and w.grad[1].abs().sum() == 0
    """
    if type(topk) is not int or type(permute_x) is not bool or type(permute_y) is not bool:
        # Here, because calls that are alike are looked up by their options, and True is equal to 1.
        topk, permute_x, permute_y = check_options(topk, permute_x, permute_y)
    if topk_weights is not None:
        check_tensor("topk_weights", topk_weights)
        if topk_weights.dim() == 2:
            topk_weights = topk_weights.reshape(-1)
        if gather_indices is not None and not (permute_x or permute_y):
            check_indices(gather_indices, topk_weights)
            # Nothing but the weights is permuted, and they are few.
            topk_weights = topk_weights.index_select(0, gather_indices.clamp(0, max(len(topk_weights) - 1, 0)))
    if not (permute_x or permute_y):
        gather_indices = None
    tensors = (x, w, group_sizes, gather_indices, topk_weights, bias)
    if needs_operator(tensors):
        configs = (encode(config), encode(config_dx), encode(config_dw))
        y: torch.Tensor = library.grouped_gemm(*tensors, topk, permute_x, permute_y, *configs, mode)
        return y
    call = call_of((topk, permute_x, permute_y, config, config_dx, config_dw, mode), tensors)
    if call.differentiable and torch.is_grad_enabled():
        y = _GroupedGemm.apply(*tensors, call)  # type: ignore[no-untyped-call]
        return y
    return _forward(call, _NO_GRADIENTS, tensors)


def _forward(call: Call, needs: Needs, tensors: tuple[Any, ...]) -> torch.Tensor:
    """The forward pass. The first of its kind has all binaries of the step compiled at once."""
    if needs in call.compiled:
        return forward(call, *tensors)
    call.compiled.add(needs)
    with collecting_later():
        compile_step(call, needs, tensors)
        return forward(call, *tensors)


class _GroupedGemm(torch.autograd.Function):
    """The op in eager mode, where something needs a gradient."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
        tensors, call, needs = arguments[:6], arguments[6], needs_of(ctx)
        ctx.call = call
        ctx.save_for_backward(*saved_of(tensors, needs))
        return _forward(call, needs, tensors)

    @staticmethod
    @once_differentiable
    @outside_autocast
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grads = backward(ctx.call, needs_of(ctx), dy, *ctx.saved_tensors)
        return grads.x, grads.w, None, None, grads.weights, grads.bias, None
