"""`grouped_gemm`: the op that people call, with gradients, in eager mode and under `torch.compile`."""

from __future__ import annotations

from math import prod
from numbers import Integral
from typing import Any

import torch

from ...datasets import KernelConfig
from ...datasets.errors import check_flag, shown
from ..op import Op
from ..op_calls import DTYPES, INTEGERS, Operand, check_operands, check_tensor, require
from .family import MOST_ROWS
from .passes import Needs, Options, Shape, Step, backward, compile_step, forward, saved_of

_FLOATS = tuple(DTYPES)
_OPERANDS = (
    Operand("x", 2, _FLOATS, contiguous=True),
    Operand("w", 3, _FLOATS, contiguous=True, alike=True),
    Operand("group_sizes", 1, INTEGERS, contiguous=True),
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
    y: torch.Tensor = OP.call(*tensors, topk, permute_x, permute_y, config, config_dx, config_dw, mode)
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
    """Return the sizes of a call. Raise `ForetuneError` naming what the host can know to be wrong with it."""
    require(not (permute_x and permute_y), "permute_x and permute_y exclude each other: only one side is permuted")
    permuted = "permute_x" if permute_x else "permute_y"
    require(
        gather_indices is not None or not (permute_x or permute_y),
        f"{permuted}=True needs gather_indices, but they are None",
    )
    require(isinstance(topk, int) and topk >= 1, f"topk must be an integer >= 1 but is {topk!r}")
    check_operands(_OPERANDS, (x, w, group_sizes, gather_indices, topk_weights, bias))

    groups, n, k = w.shape
    require(x.shape[1] == k, f"x has {x.shape[1]} columns but w {tuple(w.shape)}, (groups, N, K), has K = {k}")
    require(n % 8 == 0 and k % 8 == 0, f"N and K of w must be multiples of 8 but are {n} and {k}")
    require(n > 0 and k > 0, f"N and K of w must be at least 8 but are {n} and {k}")
    require(group_sizes.shape[0] == groups, f"there are {group_sizes.shape[0]} group_sizes but w has {groups} groups")
    rows = x.shape[0] * topk if permute_x else x.shape[0]
    require(rows <= MOST_ROWS, f"there must be at most {MOST_ROWS} rows but there are {rows}")
    if gather_indices is not None:
        what = f"{x.shape[0]} rows of x times topk = {topk}" if permute_x else f"{rows} rows of x"
        given = gather_indices.shape[0]
        require(given == rows, f"there must be one of gather_indices a row, for {what}, but there are {given}")
    if topk_weights is not None:
        given = topk_weights.shape[0]
        require(given == rows, f"there must be one of topk_weights a row of y, so {rows}, but there are {given}")
    if bias is not None:
        require(tuple(bias.shape) == (groups, n), f"bias must be {(groups, n)} but is {tuple(bias.shape)}")
    return Shape(rows, groups, n, k)


def check_options(topk: Any, permute_x: Any, permute_y: Any) -> tuple[int, bool, bool]:
    """Return the options in Python's own types. Raise `ForetuneError` for what merely equals one, as True equals 1."""
    is_integer = isinstance(topk, Integral) and not isinstance(topk, bool)
    require(is_integer, f"topk must be an integer >= 1 but is {shown(topk)}")
    return int(topk), check_flag("permute_x", permute_x), check_flag("permute_y", permute_y)


def check_indices(gather_indices: torch.Tensor, topk_weights: torch.Tensor) -> None:
    """Raise `ForetuneError` for indices that cannot permute the weights, (rows,), of rows that are not permuted."""
    *_, indices, weights, _ = _OPERANDS
    weights.check(topk_weights, topk_weights, "topk_weights")
    indices.check(gather_indices, topk_weights, "topk_weights")
    given, rows = len(gather_indices), len(topk_weights)
    require(given == rows, f"there must be {rows} gather_indices, one for each of topk_weights, but there are {given}")


def _find(place: int, *arguments: Any) -> Step:
    return Step(check_call(*arguments[:9]), arguments[0].dtype, place, Options(*arguments[6:]))


def _find_backward(place: int, dy: torch.Tensor, *arguments: Any) -> Step:
    """Nothing is checked: the forward pass was."""
    return Step(_shape(dy, *arguments[:3]), dy.dtype, place, Options(*arguments[6:-1]))


def _shape(dy: torch.Tensor, x: torch.Tensor | None, w: torch.Tensor | None, group_sizes: torch.Tensor) -> Shape:
    """The sizes of a call from what is left of it. K is 0 where only the bias has a gradient, which needs none."""
    known = x if x is not None else w
    return Shape(dy.shape[0], group_sizes.shape[0], dy.shape[1], 0 if known is None else known.shape[-1])


def _fake(*arguments: Any) -> torch.Tensor:
    shape = check_call(*arguments[:9])
    return arguments[0].new_empty(shape.rows, shape.n)  # type: ignore[no-any-return]


def _save(ctx: Any, arguments: tuple[Any, ...], _: torch.Tensor) -> None:
    ctx.save_for_backward(*saved_of(arguments[:6], Needs.of(ctx.needs_input_grad)))


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    needs = Needs.of(ctx.needs_input_grad)
    if ctx.call is None:
        x, w, weights, bias = GRADIENT.operator(dy, *ctx.saved_tensors, *ctx.options, needs)
    else:
        x, w, weights, bias = backward(ctx.call, needs, dy, *ctx.saved_tensors)
    return x, w, None, None, weights, bias


def _run_backward(step: Step, dy: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor | None, ...]:
    return tuple(backward(step, Needs(*arguments[-1]), dy, *arguments[:6]))


def _fake_backward(dy: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, ...]:
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
    return 2 * prod(out_shape) * arguments[1][-1]


def _backward_flops(dy: Any, x: Any, w: Any, *arguments: Any, **_: Any) -> Any:
    needs = Needs(*arguments[-1])
    known = x if x is not None else w
    products = (needs.x or needs.weights) + needs.w  # the weights' gradient is made from that of x
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
