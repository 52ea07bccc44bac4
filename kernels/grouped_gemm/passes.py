"""The forward and backward pass of one call: plain tensors in and out, nothing recorded, nothing waited for.

The kernels that only some calls launch are imported where they are: Triton reads the source of each, 2 ms.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...runtime import Mode
from ...runtime.launching.ahead import only_compiling
from .checks import check_aligned, check_contents
from .triton_kernels.gemm_launches import launch_gemm, prepare_gemm
from .triton_kernels.tiles import TileMap

if TYPE_CHECKING:
    from ...datasets import KernelConfig
    from .steps import Call


class Needs(NamedTuple):
    """Which gradients are needed."""

    x: bool
    w: bool
    weights: bool
    bias: bool


class Grads(NamedTuple):
    """The gradients that were needed."""

    x: torch.Tensor | None = None
    w: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    bias: torch.Tensor | None = None


def needs_of(ctx: Any) -> Needs:
    """What an autograd context needs, for a function whose first arguments are a call's tensors."""
    x, w, _, _, weights, bias = ctx.needs_input_grad[:6]
    return Needs(x, w, weights, bias)


def saved_of(tensors: tuple[Any, ...], needs: Needs) -> tuple[torch.Tensor | None, ...]:
    """What `backward` takes of a call's tensors. x and w are large, so each only where a gradient is made from it."""
    x, w, *others = tensors
    return x if needs.w or needs.weights else None, w if needs.x or needs.weights else None, *others


def forward(
    call: Call,
    x: torch.Tensor,
    w: torch.Tensor,
    group_sizes: torch.Tensor,
    indices: torch.Tensor | None,
    weights: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """y, (rows, N). Rows of no group are as the memory was, or zero where contents are checked."""
    if call.elsewhere():
        with torch.cuda.device(call.gpu):
            return forward(call, x, w, group_sizes, indices, weights, bias)
    check_aligned(x, w)
    if call.contents_checked:
        check_contents(group_sizes, indices, call.shape.rows)
    rows, groups, n, k = call.shape
    y = x.new_empty(rows, n)
    if rows and groups:
        tile_map = TileMap.build(group_sizes, rows)
        options = call.options
        if not (options.permute_x or options.permute_y):
            indices = None
        tensors = (x, w, y, tile_map.entries, indices, weights, bias)

        def launch(config: KernelConfig) -> None:
            prepared = call.prepared  # another thread may set it to that of another config
            if prepared is None or prepared[0] is not config:
                launches = prepare_gemm(
                    rows,
                    groups,
                    n,
                    k,
                    config,
                    call.device.sm_count,
                    x_rows=len(x),
                    gathers=options.permute_x,
                    divisor=options.topk,
                    scatters=options.permute_y,
                )
                prepared = call.prepared = config, launches
            prepared[1](tensors)

        launch(call.config("grouped_gemm_fwd", launch))
        if call.contents_checked:
            from .triton_kernels.ungrouped import zero_ungrouped

            zero_ungrouped(y, tile_map, _sides(call, indices)[1])
    elif call.contents_checked:
        y.zero_()
    return y


def backward(
    call: Call,
    needs: Needs,
    dy: torch.Tensor,
    x: torch.Tensor | None,
    w: torch.Tensor | None,
    group_sizes: torch.Tensor,
    indices: torch.Tensor | None,
    weights: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> Grads:
    """The gradients that are needed; that of x is zero in rows of no group. x and w may be None where `saved_of` says
    so."""
    if call.elsewhere():
        with torch.cuda.device(call.gpu):
            return backward(call, needs, dy, x, w, group_sizes, indices, weights, bias)
    rows, groups, _, _ = call.shape
    dy = dy.contiguous()
    if dy.data_ptr() % 16:
        dy = dy.clone()
    if not (rows and groups):
        return _nothing(call, dy, weights, bias, needs)
    tile_map = TileMap.build(group_sizes, rows, call.chunk_rows if needs.w else None)
    dx = dw = dweights = dbias = None
    if needs.weights or needs.bias or (needs.x and call.options.permute_x):
        from .triton_kernels.rowwise import bias_grads, sum_rows, weight_grads
    if needs.x:
        from .triton_kernels.ungrouped import zero_ungrouped
    if needs.x or needs.weights:
        assert w is not None
        # The weights' gradient is made from dx without them, so then they are multiplied in afterwards.
        dx = _dx(call, dy, w, tile_map, indices, None if needs.weights else weights)
        if needs.weights:
            assert x is not None
            assert weights is not None
            permutes = (call.options.permute_x, call.options.permute_y)
            dweights = weight_grads(dx, x, dy, bias, tile_map, indices, call.options.topk, *permutes).to(weights.dtype)
        if not needs.x:
            dx = None
        elif call.options.permute_x:  # dx has a row for each of the topk rows of a token
            zero_ungrouped(dx, tile_map, indices)
            dx = sum_rows(dx, call.options.topk, weights if needs.weights else None)
        else:
            if needs.weights:
                dx = sum_rows(dx, scale=weights, indices=indices)
            zero_ungrouped(dx, tile_map)  # last, since the weights of such rows may be anything
    if needs.w:
        assert x is not None
        dw = _dw(call, dy, x, tile_map, indices, weights)
    if needs.bias:
        assert bias is not None
        dbias = bias_grads(dy, weights, tile_map, indices, call.options.permute_y, bias.dtype)
    return Grads(dx, dw, dweights, dbias)


def compile_step(call: Call, needs: Needs, tensors: tuple[Any, ...]) -> None:
    """Has all that the call's forward pass launches compiled at once, and its backward pass if anything is needed of
    that, where that is not known yet.

    For the first step of a shape, whose binaries would else be compiled one after another. Tensors are only looked at.
    """
    if call.mode is Mode.SHORTLIST or call.contents_checked or call.device.backend == "cpu":
        return  # what needs the tensors' contents; and in the interpreter there are no binaries
    if TileMap.has_binary() and not any(needs):
        return  # the GEMM's alone may be missing: there is nothing to compile it beside
    empty: list[Any] = [tensor if tensor is None else torch.empty_like(tensor, device="meta") for tensor in tensors]
    with suppress(Exception), only_compiling():  # the launches themselves say what is wrong
        y = forward(call, *empty)
        if any(needs):
            backward(call, needs, y, *saved_of(tuple(empty), needs))  # type: ignore[arg-type]


def _dx(
    call: Call,
    dy: torch.Tensor,
    w: torch.Tensor,
    tile_map: TileMap,
    indices: torch.Tensor | None,
    weights: torch.Tensor | None,
) -> torch.Tensor:
    """dy @ w, (rows, K): sorted by group, or where permute_x permuted as the indices say. Rows of no group are as the
    memory was."""
    rows, _, _, k = call.shape
    dx = torch.empty((rows, k), dtype=dy.dtype, device=dy.device)
    scatter, gather = _sides(call, indices)  # the other way round than forward

    def launch(config: KernelConfig) -> None:
        sm_count = call.device.sm_count
        launch_gemm(
            dy, w, dx, tile_map, config, sm_count, transposed=True, gather=gather, scatter=scatter, scale=weights
        )

    launch(call.config("grouped_gemm_dx", launch))
    return dx


def _dw(
    call: Call,
    dy: torch.Tensor,
    x: torch.Tensor,
    tile_map: TileMap,
    indices: torch.Tensor | None,
    weights: torch.Tensor | None,
) -> torch.Tensor:
    """dy.T @ x of each group, (groups, N, K)."""
    from .triton_kernels.dw_launches import launch_dw

    _, groups, n, k = call.shape
    permute_x, permute_y = call.options.permute_x, call.options.permute_y
    if permute_x or permute_y:
        from .triton_kernels.sorting import sorted_rows
    elif weights is not None:
        from .triton_kernels.rowwise import sum_rows
    # The weights belong to rows, so either operand may have them: the one that is moved anyway, or the narrower one.
    if permute_x:
        assert indices is not None
        x = sorted_rows(x, indices, call.options.topk, weights)
    elif permute_y:
        assert indices is not None
        dy = sorted_rows(dy, indices, scale=weights)
    elif weights is not None and n <= k:
        dy = sum_rows(dy, scale=weights, indices=indices)
    elif weights is not None:
        x = sum_rows(x, scale=weights, indices=indices)
    dw = torch.empty((groups, n, k), dtype=x.dtype, device=x.device)

    def launch(config: KernelConfig) -> None:
        launch_dw(dy, x, dw, tile_map, config, call.device.sm_count)

    launch(call.config("grouped_gemm_dw", launch))
    return dw


def _nothing(
    call: Call,
    dy: torch.Tensor,
    weights: torch.Tensor | None,
    bias: torch.Tensor | None,
    needs: Needs,
) -> Grads:
    """The gradients where no row belongs to a group."""
    rows, groups, n, k = call.shape
    tokens = rows // call.options.topk if call.options.permute_x else rows
    return Grads(
        dy.new_zeros(tokens, k) if needs.x else None,
        dy.new_zeros(groups, n, k) if needs.w else None,
        torch.zeros_like(weights) if needs.weights and weights is not None else None,
        torch.zeros_like(bias) if needs.bias and bias is not None else None,
    )


def _sides(call: Call, indices: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The indices if x is permuted, and if y is."""
    return (indices if call.options.permute_x else None, indices if call.options.permute_y else None)
