"""Define `foretune.scaled_gemm` and `foretune.scaled_grouped_gemm`: linear layers in fp8, differentiable.

The precision of each product of a training step, and the reason:

- forward, y = x @ w.T: fp8. x is quantized per 1x128 block and w per 128x128 block, or as `scales` says.
- dX = dy @ w: fp8, by the same kernel on w's transpose. Blocks of 128x128 transpose with their scales, and so does one
  scale per tensor, so w's quantized values are those of the forward pass. Rowwise scales of w lie along N, over which
  dX sums, and cannot be factored out of the sum, so w is quantized again.
- dW = dy.T @ x: bf16, by `foretune.grouped_gemm`'s kernel, or without groups by PyTorch. It sums over rows, whose
  scales cannot be factored out either; and since groups end anywhere, blocks of 128 rows would span two groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from ...datasets import ForetuneError, KernelConfig, Problem
from ..grouped_gemm.family import MOST_ROWS
from ..grouped_gemm.op import GRADIENT
from ..grouped_gemm.passes import check_aligned, check_contents
from ..grouped_gemm.triton_kernels.tiles import TileMap
from ..op import Op, has_tangent, outside_autocast
from ..op_calls import (
    INTEGERS,
    Call,
    ConfiguredLaunch,
    Operand,
    check_tensor,
    device_at,
    is_transformed,
    needs_gradient,
    on_device_of,
    require,
)
from ..op_choice import how_chosen
from .family import ScaledGemm, ScaledGroupedGemmForward
from .quantize import FP8, check_granularity, dequantized_x, quantize_w, quantize_x, transposed
from .scales import BLOCKWISE, DTYPE, ROWWISE, STEP, TENSORWISE, flags_of, scale_shapes
from .triton_kernels.launches import prepare_scaled_gemm

if TYPE_CHECKING:
    from ...datasets import DeviceSpec
    from ..op_calls import Launch


def scaled_gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    *,
    x_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
    scales: str = BLOCKWISE,
    config: KernelConfig | None = None,
    config_dx: KernelConfig | None = None,
    mode: str | None = None,
    same_bits: bool | None = None,
    invariant: str | None = None,
) -> torch.Tensor:
    """Return x @ w.T, computed in fp8 (e4m3) and accumulated in float32, in bf16. Differentiable in bf16 operands.

    It always runs Foretune's kernel. `torch._scaled_mm`, which has no gradient, is slower for most shapes with rowwise
    or blockwise scales, and faster for most with one scale per tensor (figures in kernels/README.md).

    Args:
        x: (rows, K), bfloat16, which is quantized by this function, or fp8 (torch.float8_e4m3fn) with `x_scale`.
        w: (N, K), bfloat16, or fp8 with `w_scale`. N and K must be multiples of 16.
        x_scale: float32, the factors of x's fp8 values; required if and only if x is fp8. It gets no gradient.
        w_scale: The same for w.
        scales: The granularity of the scales. "blockwise": x_scale is (rows, blocks of K), one per 1x128, ideally
            stored block by block, and w_scale is (blocks of N, blocks of K), one per 128x128. "rowwise": (rows, 1) and
            (N, 1). "tensorwise": (1,) and (1,).
        config: The kernel config of the forward pass; see `foretune.grouped_gemm`.
        config_dx: The same for the gradient of x.
        mode: How configs are chosen if not given; see `foretune.grouped_gemm`.
        same_bits: As for `foretune.matmul`.
        invariant: "m", as for `foretune.matmul`. One scale for all of a bfloat16 x depends on all rows, so x must then
            be fp8, or have other scales.

    Returns:
        y, (rows, N), bfloat16, bitwise reproducible for the same config. At most 128 products are summed by the tensor
        cores before they are added to the float32 accumulator; `quantize.error_bound` gives the resulting error bound.

    Raises:
        ForetuneError: A shape, dtype, device, scale or config is invalid, or the GPU has no fp8. The message names it.

    >>> if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9):
    ...     x, w = (torch.randn(64, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    ...     assert scaled_gemm(x, w).shape == (64, 64)
    """
    how = _how_chosen(mode, same_bits, invariant, x_scale, check_granularity(scales))
    return _scaled(x, w, None, x_scale, w_scale, scales, config, config_dx, None, how)


def scaled_grouped_gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    group_sizes: torch.Tensor,
    *,
    x_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
    scales: str = BLOCKWISE,
    config: KernelConfig | None = None,
    config_dx: KernelConfig | None = None,
    config_dw: KernelConfig | None = None,
    mode: str | None = None,
    same_bits: bool | None = None,
    invariant: str | None = None,
) -> torch.Tensor:
    """Return x[rows of e] @ w[e].T for rows sorted by group e, in fp8 (e4m3), as in DeepSeek's MoE layers.

    Accumulates in float32, returns bf16, and is differentiable in bf16 operands.

    Args:
        x: (rows, K), sorted by group; bfloat16, which is quantized by this function, or fp8 (torch.float8_e4m3fn) with
            `x_scale`.
        w: (groups, N, K), bfloat16, or fp8 with `w_scale`. N and K must be multiples of 16.
        group_sizes: (groups,) int32 or int64, the number of rows of each group. It stays on the device.
        x_scale: As for `scaled_gemm`.
        w_scale: As for `scaled_gemm`, per group: (groups, blocks of N, blocks of K), (groups, N), or (groups,).
        scales: As for `scaled_gemm`.
        config: The kernel config of the forward pass; see `foretune.grouped_gemm`.
        config_dx: The same for the gradient of x.
        config_dw: The same for the gradient of w, a config of grouped_gemm_dw.
        mode: As for `scaled_gemm`.
        same_bits: As for `scaled_gemm`.
        invariant: "rows" (or "m"), as for `scaled_gemm`.

    Returns:
        y, (rows, N), bfloat16. Rows that belong to no group are uninitialized (zero under FORETUNE_CHECK); their
        gradients are zero.

    Raises:
        ForetuneError: As for `scaled_gemm`. The call does not wait for the device, so invalid group sizes are treated
            as by `foretune.grouped_gemm`.

    >>> if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9):
    ...     x = torch.randn(6, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ...     w = torch.randn(3, 256, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ...     y = scaled_grouped_gemm(x, w, torch.tensor([4, 0, 2], dtype=torch.int32, device="cuda"))
    ...     y.sum().backward()
    ...     assert y.shape == (6, 256) and w.grad[1].abs().sum() == 0
    """
    if group_sizes is None:
        raise ForetuneError("group_sizes must be a tensor but is None: call foretune.scaled_gemm for a dense product")
    how = _how_chosen(mode, same_bits, invariant, x_scale, check_granularity(scales))
    return _scaled(x, w, group_sizes, x_scale, w_scale, scales, config, config_dx, config_dw, how)


def _how_chosen(
    mode: str | None, same_bits: bool | None, invariant: str | None, x_scale: Any, granularity: str
) -> str | None:
    """Return `mode`, `same_bits` and `invariant` as one option, as `how_chosen` does.

    Raises:
        ForetuneError: `invariant` is given, but quantizing x makes each row of the result depend on all rows.
    """
    if invariant is not None and granularity == TENSORWISE and x_scale is None:
        raise ForetuneError(
            f"invariant={invariant!r} needs rowwise or blockwise scales, or a given x_scale: one scale of all of x "
            "depends on all rows"
        )
    return how_chosen(mode, same_bits, invariant)


def _scaled(
    x: torch.Tensor,
    w: torch.Tensor,
    group_sizes: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    w_scale: torch.Tensor | None,
    granularity: str,
    config: KernelConfig | None,
    config_dx: KernelConfig | None,
    config_dw: KernelConfig | None,
    mode: str | None,
) -> torch.Tensor:
    """Return the result of `scaled_gemm`, or with group sizes that of `scaled_grouped_gemm`."""
    y: torch.Tensor
    if is_transformed():
        _refuse_derivatives(x, w)
    if needs_gradient((x_scale, w_scale)):
        for name, operand, scale in (("x_scale", x, x_scale), ("w_scale", w, w_scale)):
            if needs_gradient((scale,)) and not needs_gradient((operand,)):  # else the operand's error is reported
                raise ForetuneError(f"{name} requires a gradient, but scales get none: pass {name}.detach()")
    if needs_gradient((x, w)):
        y = _ScaledGemm.apply(x, w, group_sizes, x_scale, w_scale, granularity, config, config_dx, config_dw, mode)  # type: ignore[no-untyped-call]
        return y
    x8, x_scale = _quantized("x", x, x_scale, granularity, 2)
    w8, w_scale = _quantized("w", w, w_scale, granularity, 2 if group_sizes is None else 3)
    y = PRODUCT.call(x8, w8, x_scale, w_scale, group_sizes, granularity, config, mode, False)
    return y


def _refuse_derivatives(x: Any, w: Any) -> None:
    """Raise `ForetuneError` if a function transform or forward-mode AD differentiates the op."""
    for name, operand in (("x", x), ("w", w)):
        if has_tangent(operand):
            raise ForetuneError(f"foretune.scaled_gemm has no forward-mode derivative, but {name} has a tangent")
        if torch._C._are_functorch_transforms_active() and needs_gradient((operand,)):
            raise ForetuneError(
                f"foretune.scaled_gemm cannot be differentiated under torch.func's transforms, but {name} needs a "
                "gradient: call .backward() or torch.autograd.grad outside of the transform"
            )


class _ScaledGemm(torch.autograd.Function):
    """The autograd function of both ops: it quantizes bf16 operands, then calls the fp8 operator.

    Its backward pass uses other products than the operator, as the module's docstring explains.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
        """Return y, and save what the gradients need in the autograd context."""
        x, w, group_sizes, x_scale, w_scale, granularity, config, config_dx, config_dw, mode = arguments
        x8, own_scale = _quantized("x", x, x_scale, granularity, 2)
        w8, w_scale = _quantized("w", w, w_scale, granularity, 2 if group_sizes is None else 3)
        y: torch.Tensor = PRODUCT.call(x8, w8, own_scale, w_scale, group_sizes, granularity, config, mode, False)
        needs_x, needs_w = ctx.needs_input_grad[:2]
        of_x = (x, x_scale) if needs_w else (None, None)
        of_w = (w8, w_scale) if needs_x else (None, None)
        ctx.save_for_backward(*of_x, *of_w, group_sizes)
        ctx.options = granularity, config_dx, config_dw, mode
        return y

    @staticmethod
    @once_differentiable
    @outside_autocast
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of x and w for `dy`, and None for the other arguments."""
        x, x_scale, w8, w_scale, group_sizes = ctx.saved_tensors
        granularity, config_dx, config_dw, mode = ctx.options
        dy = dy.contiguous()
        dx = dw = None
        if w8 is not None:
            dy8, dy_scale = quantize_x(dy, granularity)
            wt8, wt_scale = transposed(w8, w_scale, granularity)
            dx = PRODUCT.call(dy8, wt8, dy_scale, wt_scale, group_sizes, granularity, config_dx, mode, True)
        if x is not None:
            if x_scale is not None:  # x was given in fp8
                x = dequantized_x(x, x_scale, granularity).to(torch.bfloat16)
            if group_sizes is None:
                dw = dy.t() @ x
            else:
                options = (None, None, None, 1, False, False, None, None, config_dw, mode)
                dw = GRADIENT.call(dy, x, None, group_sizes, *options, (False, True, False, False))[1]
        return dx, dw, *[None] * 8


def _quantized(
    name: str, operand: torch.Tensor, scale: torch.Tensor | None, granularity: str, dims: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the operand, with `dims` dimensions, in fp8 with its scales; bf16 is quantized at this granularity."""
    check_tensor(name, operand)
    if operand.dtype == FP8:
        if operand.requires_grad:
            raise ForetuneError(
                f"{name} requires a gradient but is {FP8}, which gets none: pass the bfloat16 tensor instead"
            )
        if scale is None:
            raise ForetuneError(f"{name} is {FP8}, so {name}_scale must be given but is None")
        return operand, scale
    if scale is not None:
        raise ForetuneError(f"{name}_scale is given, so {name} must be {FP8} but is {operand.dtype}")
    if operand.dtype != torch.bfloat16:
        raise ForetuneError(f"{name} must be torch.bfloat16 or {FP8} but is {operand.dtype}")
    check_dims(name, operand, dims)
    return (quantize_x if name == "x" else quantize_w)(operand, granularity)


class Shape(NamedTuple):
    """The sizes of one product; `groups` is None if it is dense."""

    rows: int
    n: int
    k: int
    groups: int | None


def check_product(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    group_sizes: torch.Tensor | None,
    granularity: str,
) -> Shape:
    """Check the fp8 operands, scales and group sizes of a product, and return its shape.

    Raises:
        ForetuneError: An argument is invalid; the message names it.
    """
    check_granularity(granularity)
    for name, operand, dims in (("x", x, 2), ("w", w, 2 if group_sizes is None else 3)):
        Operand(name, dtypes=(FP8,), contiguous=True).check(operand, x, "x")
        check_dims(name, operand, dims)
    (rows, k), n = x.shape, w.shape[-2]
    require(w.shape[-1] == k, f"x must have K = {w.shape[-1]} columns, as w {tuple(w.shape)} does, but has {k}")
    require(min(n, k) > 0, f"N and K of w must be at least {STEP} but are {n} and {k}")
    require(n % STEP == 0 and k % STEP == 0, f"N and K of w must be multiples of {STEP} but are {n} and {k}")
    require(rows <= MOST_ROWS, f"the product must have at most {MOST_ROWS} rows but has {rows}")
    groups = None
    if group_sizes is not None:
        groups = w.shape[0]
        Operand("group_sizes", 1, INTEGERS, contiguous=True).check(group_sizes, x, "x")
        given = len(group_sizes)
        require(given == groups, f"group_sizes must have {groups} entries, one per group of w, but has {given}")
    shapes = scale_shapes(granularity, rows, n, k, groups)
    for name, scale, shape in (("x_scale", x_scale, shapes[0]), ("w_scale", w_scale, shapes[1])):
        Operand(name, dtypes=(torch.float32,)).check(scale, x, "x")
        require(
            tuple(scale.shape) == shape,
            f"{name} must have shape {shape} for {granularity} scales but has {tuple(scale.shape)}",
        )
        in_order = scale.is_contiguous() or (name == "x_scale" and granularity == BLOCKWISE)
        require(in_order, f"{name} must be contiguous: call {name}.contiguous() first")
    return Shape(rows, n, k, groups)


def check_dims(name: str, operand: torch.Tensor, dims: int) -> None:
    """Check that an operand has `dims` dimensions and at least one column to sum over.

    Raises:
        ForetuneError: It does not.
    """
    require(operand.dim() == dims, f"{name} must have {dims} dimensions but has shape {tuple(operand.shape)}")
    require(operand.shape[-1] > 0, f"{name} must have at least {STEP} columns but has shape {tuple(operand.shape)}")


def _find(place: int, *arguments: Any) -> Call[Shape]:
    """Check the arguments of a call, and return it with a launch; without one if there is nothing to compute.

    `place` is the index of the GPU.
    """
    shape = check_product(*arguments[:6])
    granularity, config, mode, _ = arguments[5:]
    device_at(place)  # raises for the CPU
    rows, n, k, groups = shape
    if rows == 0 or groups == 0:
        return Call(shape)

    def prepare(config: KernelConfig, device: DeviceSpec, _: Any) -> Launch:
        are = {"rowwise": granularity == ROWWISE, "blockwise": granularity == BLOCKWISE}
        return prepare_scaled_gemm(*shape, config, device.sm_count, **are)

    if groups is None:
        problem = Problem.of(ScaledGemm.name, dtype=DTYPE, flags=flags_of(granularity), m=rows, n=n, k=k)
    else:
        name, flags = ScaledGroupedGemmForward.name, flags_of(granularity)
        problem = Problem.of(name, dtype=DTYPE, flags=flags, groups=groups, rows=rows, n=n, k=k)
    return Call(shape, ConfiguredLaunch(problem, place, config, mode, prepare))


def _run(
    call: Call[Shape],
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    group_sizes: torch.Tensor | None,
    granularity: str,
    config: KernelConfig | None,
    mode: str | None,
    zeroes: bool,
) -> torch.Tensor:
    """Return y = x @ w.T with the scales applied, (rows, N) in bf16.

    x (rows, K) and w are fp8. w is (N, K), or (groups, N, K) with group sizes. The shapes of the scales are those of
    `scales.scale_shapes`. Rows that belong to no group are zero if `zeroes` or under FORETUNE_CHECK, otherwise they are
    uninitialized.
    """
    check_aligned(x, w)
    rows, n, _, _ = call.seen
    y = x.new_empty(rows, n, dtype=torch.bfloat16)
    if group_sizes is not None and call.contents_checked:
        check_contents(group_sizes, None, rows)
    if call.launch is None:
        return y.zero_()
    if granularity == BLOCKWISE:
        x_scale = x_scale.t().contiguous()  # no copy if stored block by block
    if group_sizes is None:
        call.launch((x, w, x_scale, w_scale, y, None))
        return y
    with on_device_of(x):
        tile_map = TileMap.build(group_sizes, rows)
        call.launch.here((x, w, x_scale, w_scale, y, tile_map.entries))
        if zeroes or call.contents_checked:
            from ..grouped_gemm.triton_kernels.ungrouped import zero_ungrouped

            zero_ungrouped(y, tile_map)
    return y


def _fake(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    group_sizes: torch.Tensor | None,
    granularity: str,
    *_: Any,
) -> torch.Tensor:
    """Check the arguments, and return an uninitialized tensor like the result y."""
    shape = check_product(x, w, x_scale, w_scale, group_sizes, granularity)
    return x.new_empty((shape.rows, shape.n), dtype=torch.bfloat16)


PRODUCT = Op(
    "scaled_product(Tensor x, Tensor w, Tensor x_scale, Tensor w_scale, Tensor? group_sizes, str kind, str? config, "
    "str? mode, bool zeroes=False) -> Tensor",
    find=_find,
    run=_run,
    fake=_fake,
    flops=lambda x, w, *_, **__: 2 * x[0] * w[-2] * w[-1],
)
