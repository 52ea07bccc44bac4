"""Define `foretune.grouped_gemm`: the public op, differentiable, in eager mode and under `torch.compile`."""

from __future__ import annotations

from math import prod
from numbers import Integral
from typing import Any

import torch

from ...datasets import KernelConfig
from ...datasets.errors import check_flag, shown
from ..op import Op
from ..op_calls import DTYPES, INTEGERS, Operand, check_operands, check_tensor, require
from ..op_choice import how_chosen
from .family import MOST_ROWS
from .passes import Needs, Options, Shape, Step, backward, compile_step, forward, saved_of
from .triton_kernels.tiles import routing_shape

_FLOATS = tuple(DTYPES)
_OPERANDS = (
    Operand("x", 2, _FLOATS, contiguous=True),
    Operand("w", 3, _FLOATS, contiguous=True, alike=True),
    Operand("group_sizes", None, INTEGERS, contiguous=True),
    Operand("gather_indices", 1, INTEGERS, contiguous=True, needed=False),
    Operand("topk_weights", 1, _FLOATS, contiguous=True, needed=False),
    Operand("bias", 2, _FLOATS, contiguous=True, needed=False),
)


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
    same_bits: bool | None = None,
    invariant: str | None = None,
) -> torch.Tensor:
    """Multiply the rows of each group by that group's weight matrix, as an MoE layer does. Differentiable.

    For the rows of group e, y = (x @ w[e].T + bias[e]) * topk_weights.

    Args:
        x: (rows, K), sorted by group; with `permute_x` (tokens, K), in the order of tokens. bfloat16, float16, or (for
            reference results) float32.
        w: (groups, N, K), of the same dtype as x. N and K must be multiples of 8.
        group_sizes: (groups,) int32, the number of rows of each group. It stays on the device. int64 is accepted too;
            one more small kernel then converts it. It may also be the routing that `route` returned for as many rows,
            which is not checked; rows of y that belong to no group are then zero with `permute_y`.
        gather_indices: (rows,) int32 or int64. Entry i is the position of sorted row i in the permuted order, token *
            topk + j for the j-th expert of a token. This is the stable argsort of the flattened top-k expert ids.
        topk: The number of rows (selected experts) per token.
        permute_x: Gather x while it is loaded: sorted row i is x[gather_indices[i] // topk], and rows = tokens * topk.
        permute_y: Scatter y while it is stored: sorted row i of the result becomes row gather_indices[i] of y. Cannot
            be combined with `permute_x`.
        topk_weights: (rows,) or (tokens, topk), floating point, the factor of each row of y. In the permuted order if
            `gather_indices` is given, else in the order of the rows. They receive a gradient too.
        bias: (groups, N), floating point.
        config: The kernel config of the forward pass. It may name a subset of the knobs; the others get the values of
            the family's default config, except num_warps and num_stages, which are 4 and 3 unless named (as in
            `triton.Config`). If omitted, `mode` decides.
        config_dx: The same for the gradient of x.
        config_dw: The same for the gradient of w.
        mode: "predict" (the default, unless the environment variable FORETUNE_MODE says otherwise) runs the config that
            is predicted to be fastest; "shortlist" times the 8 most promising configs on the first call with about this
            many rows and keeps the fastest; "refine" runs the predicted config at first and then others in turn, until
            the calls themselves show which is the fastest; "off" runs the family's default config. A few rows of many
            groups run a kernel that has no config in any mode but "off" (see README.md).
        same_bits: Run only configs whose results have the same bits as those of the family's default config, so that no
            tuning changes a result. If None, FORETUNE_SAME_BITS=1 requests it. A given config is not restricted.
        invariant: "rows" (or "m"): Run only configs that compute a row with the same bits for every number of rows, so
            that a row of the result does not depend on the other rows of the call.

    Returns:
        y, (rows, N), of x's dtype. The result and all gradients are bitwise reproducible for the same configs.

    Raises:
        ForetuneError: An argument is invalid in a way that the host can see (shape, dtype, device, strides, option, or
            a config that cannot run this problem). The message names the argument.

    Group sizes may sum to less than the number of rows, for example where other ranks own some experts. The remaining
    rows belong to no group: they are uninitialized memory in y, and their gradients are zero.

    The call never synchronizes with the device, so values that only the device holds are not checked. Negative group
    sizes count as 0. If sizes sum to more than the number of rows, the last groups are cut off, and the gradients of w
    and bias are undefined. An index out of range reads an arbitrary row and stores none. Nothing is ever read or
    written out of bounds. With the environment variable FORETUNE_CHECK=1 every call synchronizes, such sizes and
    indices raise `ForetuneError`, and rows of y that belong to no group are zero. FORETUNE_MODE and FORETUNE_CHECK are
    read when a shape is first called.

    After one ordinary call of its shape, a call can be captured in a CUDA graph, and the graph can be replayed with
    other group sizes.

    >>> import torch
    >>> if torch.cuda.is_available():
    ...     x = torch.randn(6, 16, device="cuda", dtype=torch.bfloat16)
    ...     w = torch.randn(3, 8, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ...     y = grouped_gemm(x, w, torch.tensor([4, 0, 2], dtype=torch.int32, device="cuda"))
    ...     y.sum().backward()
    ...     assert y.shape == (6, 8) and w.grad[1].abs().sum() == 0
    """
    if type(topk) is not int or type(permute_x) is not bool or type(permute_y) is not bool:
        # Normalized here because the cache of calls compares options by equality, and True == 1.
        topk, permute_x, permute_y = check_options(topk, permute_x, permute_y)
    if topk_weights is not None:
        check_tensor("topk_weights", topk_weights)
        if topk_weights.dim() == 2:
            topk_weights = topk_weights.reshape(-1)
        if gather_indices is not None and not (permute_x or permute_y):
            check_indices(gather_indices, topk_weights)
            # Only the weights are permuted, and they are small.
            topk_weights = topk_weights.index_select(0, gather_indices.clamp(0, max(len(topk_weights) - 1, 0)))
    if not (permute_x or permute_y):
        gather_indices = None
    tensors = (x, w, group_sizes, gather_indices, topk_weights, bias)
    how = how_chosen(mode, same_bits, invariant)
    y: torch.Tensor = OP.call(*tensors, topk, permute_x, permute_y, config, config_dx, config_dw, how)
    return y


def check_call(
    x: torch.Tensor,
    w: torch.Tensor,
    group_sizes: torch.Tensor,
    gather_indices: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    bias: torch.Tensor | None,
    topk: int,
    permute_x: bool,
    permute_y: bool,
) -> Shape:
    """Check everything of a `grouped_gemm` call that the host can see, and return its shape.

    Raises:
        ForetuneError: An argument is invalid; the message names it.
    """
    require(
        not (permute_x and permute_y),
        "permute_x and permute_y cannot both be True: only one side of the product can be permuted",
    )
    permuted = "permute_x" if permute_x else "permute_y"
    require(
        gather_indices is not None or not (permute_x or permute_y),
        f"{permuted}=True needs gather_indices, but gather_indices is None",
    )
    require(isinstance(topk, int) and topk >= 1, f"topk must be an integer >= 1 but is {topk!r}")
    check_operands(_OPERANDS, (x, w, group_sizes, gather_indices, topk_weights, bias))

    groups, n, k = w.shape
    require(
        x.shape[1] == k, f"x must have K = {k} columns, as w {tuple(w.shape)} is (groups, N, K), but has {x.shape[1]}"
    )
    require(n % 8 == 0 and k % 8 == 0, f"N and K of w must be multiples of 8 but are {n} and {k}")
    require(n > 0 and k > 0, f"N and K of w must be at least 8 but are {n} and {k}")
    dims = tuple(group_sizes.shape)
    require(len(dims) in (1, 2), f"group_sizes must have shape ({groups},), or be route's routing, but has {dims}")
    require(dims[-1] == groups, f"group_sizes must have {groups} entries, one per group of w, but has {dims[-1]}")
    rows = x.shape[0] * topk if permute_x else x.shape[0]
    require(rows <= MOST_ROWS, f"the product must have at most {MOST_ROWS} rows but has {rows}")
    if len(dims) == 2:
        shape = routing_shape(rows, groups)
        require(
            dims == shape and group_sizes.dtype == torch.int32,
            f"group_sizes must be the routing of {rows} rows, int32 {shape}, but is {group_sizes.dtype} {dims}",
        )
    if gather_indices is not None:
        what = f" ({x.shape[0]} rows of x times topk = {topk})" if permute_x else " of x"
        given = gather_indices.shape[0]
        require(given == rows, f"gather_indices must have {rows} entries, one per row{what}, but has {given}")
    if topk_weights is not None:
        given = topk_weights.shape[0]
        require(given == rows, f"topk_weights must have {rows} entries, one per row of y, but has {given}")
    if bias is not None:
        require(
            tuple(bias.shape) == (groups, n),
            f"bias must have shape {(groups, n)}, N entries per group, but has {tuple(bias.shape)}",
        )
    return Shape(rows, groups, n, k)


def check_options(topk: Any, permute_x: Any, permute_y: Any) -> tuple[int, bool, bool]:
    """Check the options of `grouped_gemm`, and return them as Python's own int and bool.

    Raises:
        ForetuneError: An option has another type, even if it compares equal (True == 1).
    """
    is_integer = isinstance(topk, Integral) and not isinstance(topk, bool)
    require(is_integer, f"topk must be an integer >= 1 but is {shown(topk)}")
    return int(topk), check_flag("permute_x", permute_x), check_flag("permute_y", permute_y)


def check_indices(gather_indices: torch.Tensor, topk_weights: torch.Tensor) -> None:
    """Check `gather_indices` where they permute only topk_weights (rows,), not x or y.

    Raises:
        ForetuneError: An argument has the wrong shape, dtype or device, or their lengths differ.
    """
    *_, indices, weights, _ = _OPERANDS
    weights.check(topk_weights, topk_weights, "topk_weights")
    indices.check(gather_indices, topk_weights, "topk_weights")
    given, rows = len(gather_indices), len(topk_weights)
    require(given == rows, f"gather_indices must have {rows} entries, one per entry of topk_weights, but has {given}")


def _find(place: int, *arguments: Any) -> Step:
    """Check a call, and return the `Step` that launches it; `place` is the index of its GPU."""
    return Step(check_call(*arguments[:9]), arguments[0].dtype, place, Options(*arguments[6:]))


def _find_backward(place: int, dy: torch.Tensor, *arguments: Any) -> Step:
    """Return the `Step` that launches a backward pass on GPU `place`, without checks: the forward pass made them."""
    return Step(_shape(dy, *arguments[:3]), dy.dtype, place, Options(*arguments[6:-1]))


def _shape(dy: torch.Tensor, x: torch.Tensor | None, w: torch.Tensor | None, group_sizes: torch.Tensor) -> Shape:
    """Return the sizes of a call from the tensors that were saved for its gradient.

    K is 0 if only the bias needs a gradient, which does not depend on K.
    """
    known = x if x is not None else w
    return Shape(dy.shape[0], group_sizes.shape[-1], dy.shape[1], 0 if known is None else known.shape[-1])


def _fake(*arguments: Any) -> torch.Tensor:
    """Return an uninitialized y, after checking the call."""
    shape = check_call(*arguments[:9])
    return arguments[0].new_empty(shape.rows, shape.n)  # type: ignore[no-any-return]


def _save(ctx: Any, arguments: tuple[Any, ...], _: torch.Tensor) -> None:
    """Save the tensors that the gradients need in the autograd context."""
    ctx.save_for_backward(*saved_of(arguments[:6], Needs.of(ctx.needs_input_grad)))


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients for the output's gradient `dy`: one per tensor argument of the op, None where not needed."""
    needs = Needs.of(ctx.needs_input_grad)
    if ctx.call is None:
        x, w, weights, bias = GRADIENT.operator(dy, *ctx.saved_tensors, *ctx.options, needs)
    else:
        x, w, weights, bias = backward(ctx.call, needs, dy, *ctx.saved_tensors)
    return x, w, None, None, weights, bias


def _run_backward(step: Step, dy: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients for the output's gradient `dy`, launched by `step`."""
    return tuple(backward(step, Needs(*arguments[-1]), dy, *arguments[:6]))


def _fake_backward(dy: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, ...]:
    """Return uninitialized gradients; empty tensors for those that are not needed."""
    x, w, group_sizes, _, weights, bias, topk, permute_x = arguments[:8]
    rows, groups, n, k = _shape(dy, x, w, group_sizes)
    needs = Needs(*arguments[-1])
    return (
        dy.new_empty(rows // topk if permute_x else rows, k) if needs.x else dy.new_empty(0),
        dy.new_empty(groups, n, k) if needs.w else dy.new_empty(0),
        torch.empty_like(weights) if needs.weights else dy.new_empty(0),
        torch.empty_like(bias) if needs.bias else dy.new_empty(0),
    )


def _flops(*arguments: Any, out_shape: Any, **_: Any) -> Any:
    """Return the floating-point operations of the forward pass, from the arguments' shapes."""
    return 2 * prod(out_shape) * arguments[1][-1]


def _backward_flops(dy: Any, x: Any, w: Any, *arguments: Any, **_: Any) -> Any:
    """Return the floating-point operations of the needed gradients, from the arguments' shapes."""
    needs = Needs(*arguments[-1])
    known = x if x is not None else w
    products = (needs.x or needs.weights) + needs.w  # the gradient of topk_weights is computed from that of x
    return 2 * prod(dy) * known[-1] * products if products else 0


_TENSORS = "Tensor group_sizes, Tensor? gather_indices, Tensor? topk_weights, Tensor? bias"
_CONFIGS = "str? config, str? config_dx, str? config_dw"
_OPTIONS = f"int topk, bool permute_x, bool permute_y, {_CONFIGS}, str? mode"
OP = Op(
    f"grouped_gemm(Tensor x, Tensor w, {_TENSORS}, {_OPTIONS}) -> Tensor",
    find=_find,
    run=forward,
    fake=_fake,
    save=_save,
    backward=_backward,
    flops=_flops,
    compile_step=compile_step,
)
GRADIENT = Op(
    f"grouped_gemm_backward(Tensor dy, Tensor? x, Tensor? w, {_TENSORS}, {_OPTIONS}, bool[4] needs)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    find=_find_backward,
    run=_run_backward,
    fake=_fake_backward,
    flops=_backward_flops,
)
