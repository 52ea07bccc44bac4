"""Define `route`, which sorts rows by group, and `few_rows_gemm`, which multiplies a few rows that are not sorted."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch

from ..op import Op
from ..op_calls import (
    DTYPES,
    INTEGERS,
    Call,
    Operand,
    check_operands,
    device_at,
    needs_gradient,
    on_device_of,
    require,
)
from .space import MOST_COLUMNS
from .triton_kernels.few_rows import prepare_few_rows
from .triton_kernels.route import prepare_route
from .triton_kernels.tiles import routing_shape

_FLOATS = tuple(DTYPES)
_CHOSEN = Operand("chosen", 1, INTEGERS, contiguous=True)
_OPERANDS = (
    Operand("x", 2, _FLOATS, contiguous=True),
    Operand("w", 3, _FLOATS, contiguous=True, alike=True),
    _CHOSEN,
    Operand("weights", 1, _FLOATS, contiguous=True, needed=False),
    Operand("bias", 2, _FLOATS, contiguous=True, needed=False),
)


def route(chosen: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the order that sorts rows by the group that each chose, and the routing, without synchronizing.

    Args:
        chosen: (rows,) int32 or int64, the group of each row. Rows whose group does not exist are last in the order.
        groups: The number of groups, at least 1.

    Returns:
        The order, (rows,) int32, for `gather_indices` of `grouped_gemm`, and the routing, for its `group_sizes`. The
        last row of the routing has the group sizes; its other rows are the tile map, which all calls and gradients of a
        layer share.

    Raises:
        ForetuneError: An argument is invalid; the message names it.

    >>> if torch.cuda.is_available():
    ...     order, routing = route(torch.tensor([2, 0, 2], device="cuda"), 3)
    ...     assert order.tolist() == [1, 0, 2] and routing[-1].tolist() == [1, 0, 2]
    """
    order, routing = ROUTE.call(chosen, groups)
    return order, routing


def few_rows_gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    chosen: torch.Tensor,
    *,
    topk: int,
    weights: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    sums: bool = False,
) -> torch.Tensor:
    """Return each row times the weight matrix that it chose, fast if there are about as many rows as groups.

    Row r of y is x[r // topk] @ w[chosen[r]].T + bias[chosen[r]]; zero if chosen[r] does not exist. With `sums`, row t
    is the sum of (x[r] @ w[chosen[r]].T + bias[chosen[r]]) * weights[r] over the topk rows r of token t. There is no
    gradient.

    Args:
        x: (tokens, K); (tokens * topk, K) with `sums`.
        w: (groups, N, K), of the same dtype as x. N and K must be multiples of 8.
        chosen: (tokens * topk,) int32 or int64, the group of each row.
        topk: The number of rows per token.
        weights: (tokens * topk,), or None.
        bias: (groups, N), or None.
        sums: Add up the rows of each token.

    Returns:
        y, (tokens * topk, N); (tokens, N) with `sums`.

    Raises:
        ForetuneError: An argument is invalid; the message names it.
    """
    require(
        not needs_gradient((x, w, weights, bias)),
        "few_rows_gemm has no gradient: call it under torch.no_grad(), or call grouped_gemm",
    )
    y: torch.Tensor = FEW_ROWS.call(x, w, chosen, weights, bias, topk, sums)
    return y


class _Launch(Call[tuple[int, int]]):
    """The data that similar calls of `route` or `few_rows_gemm` share: a launching function and a result's shape."""

    def __init__(self, shape: tuple[int, int], launch: Callable[..., None]) -> None:
        super().__init__(shape)
        self.run = launch


def _check_route(chosen: torch.Tensor, groups: int) -> tuple[int, int]:
    """Check the arguments of `route`, and return the shape of its second result, the routing."""
    _CHOSEN.check(chosen, chosen, "chosen")
    require(groups >= 1, f"groups must be at least 1 but is {groups}")
    return routing_shape(chosen.shape[0], groups)


def _find_route(place: int, chosen: torch.Tensor, groups: int) -> _Launch:
    shape = _check_route(chosen, groups)
    device_at(place, "chosen")
    return _Launch(shape, prepare_route(chosen.shape[0], groups))


def _run_route(call: _Launch, chosen: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    order = torch.empty_like(chosen, dtype=torch.int32)
    routing = chosen.new_empty(call.seen, dtype=torch.int32)
    with on_device_of(chosen):
        call.run(chosen, order, routing)
    return order, routing


def _fake_route(chosen: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = _check_route(chosen, groups)
    return torch.empty_like(chosen, dtype=torch.int32), chosen.new_empty(shape, dtype=torch.int32)


def _check_few_rows(
    x: torch.Tensor,
    w: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor | None,
    bias: torch.Tensor | None,
    topk: int,
    sums: bool,
) -> tuple[int, int]:
    """Check the arguments of `few_rows_gemm`, and return the shape of its result."""
    check_operands(_OPERANDS, (x, w, chosen, weights, bias))
    (groups, n, k), rows = w.shape, chosen.shape[0]
    require(n % 8 == 0 and k % 8 == 0, f"N and K of w must be multiples of 8 but are {n} and {k}")
    require(groups >= 1, f"w must have at least one group but has shape {tuple(w.shape)}")
    require(n <= MOST_COLUMNS, f"N of w must be at most {MOST_COLUMNS} but is {n}")
    require(topk >= 1 and rows % topk == 0, f"the {rows} rows must be topk = {topk} for each token")
    for name, shape, needed in (
        ("x", x.shape, (rows if sums else rows // topk, k)),
        ("weights", None if weights is None else weights.shape, (rows,)),
        ("bias", None if bias is None else bias.shape, (groups, n)),
    ):
        require(shape is None or shape == needed, f"{name} must have shape {needed} but has {shape}")
    return rows // topk if sums else rows, n


def _find_few_rows(place: int, *arguments: Any) -> _Launch:
    shape = _check_few_rows(*arguments)
    x, w, chosen, _, _, topk, sums = arguments
    device_at(place)
    return _Launch(shape, prepare_few_rows(len(chosen), *w.shape, x_rows=len(x), divisor=topk, sums=sums))


def _run_few_rows(
    call: _Launch,
    x: torch.Tensor,
    w: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor | None,
    bias: torch.Tensor | None,
    *_: Any,
) -> torch.Tensor:
    y = x.new_empty(call.seen)
    if y.numel():
        with on_device_of(x):
            call.run((x, w, y, chosen, None, weights, bias))
    return y


def _few_rows_flops(x: Any, w: Any, chosen: Any, *_: Any, **__: Any) -> Any:
    return 2 * chosen[0] * prod(w[1:])


ROUTE = Op(
    "route(Tensor chosen, int groups) -> (Tensor, Tensor)",
    find=_find_route,
    run=_run_route,
    fake=_fake_route,
)
FEW_ROWS = Op(
    "few_rows_gemm(Tensor x, Tensor w, Tensor chosen, Tensor? weights, Tensor? bias, int topk, bool sums) -> Tensor",
    find=_find_few_rows,
    run=_run_few_rows,
    fake=lambda x, *arguments: x.new_empty(_check_few_rows(x, *arguments)),
    flops=_few_rows_flops,
)
