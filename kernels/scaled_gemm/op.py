"""Define `foretune.scaled_gemm` and `foretune.scaled_grouped_gemm`: linear layers in fp8, differentiable.

The precision of each product of a training step, and the reason:

- forward, y = x @ w.T: fp8. x is quantized per 1x128 block and w per 128x128 block, or as `scales` says.
- dX = dy @ w: fp8, by the same kernel on w's transpose. dy is quantized like x, as e4m3 or e5m2. Blocks of 128x128
  transpose with their scales, and so does one scale per tensor, so w's quantized values are those of the forward pass.
  Rowwise scales of w lie along N, over which dX sums, and cannot be factored out of the sum, so w is quantized again.
- dW = dy.T @ x: it sums over rows. Grouped: bf16, by `foretune.grouped_gemm`'s kernel; or fp8, for which both operands
  are quantized again, along columns (`both_ways`), with one scale per column of every 128 rows of a group if scales are
  blockwise, else one per column of a group. Dense: bf16, by PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ...datasets import ForetuneError, KernelConfig
from ..grouped_gemm.op import GRADIENT
from ..op import has_tangent, outside_autocast
from ..op_calls import check_tensor, is_transformed, needs_gradient, ready
from ..op_choice import how_chosen
from .operators import BOTH_WAYS, PRODUCT, QUANTIZED, SCALED_DW, WEIGHTS_BOTH_WAYS, check_dims
from .quantize import FP8, GRADIENTS, check_granularity, dequantized_x, transposed
from .space import BLOCKWISE, TENSORWISE


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
    return _scaled(x, w, None, x_scale, w_scale, scales, (config, config_dx, None), ("e4m3", "bf16"), how)


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
    grad_dtype: str = "e4m3",
    dw_dtype: str = "fp8",
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
        config_dw: The same for the gradient of w, a config of scaled_grouped_gemm_dw, or of grouped_gemm_dw if
            `dw_dtype` is "bf16".
        grad_dtype: The fp8 dtype of y's gradient in dX and dW: "e4m3", as in DeepSeek-V3, or "e5m2", which has a larger
            range but twice the rounding error, and for which dX is slower.
        dw_dtype: The precision of the gradient of w. "fp8" is as in DeepSeek-V3: x and y's gradient are quantized along
            columns, one scale per column of every 128 rows of a group if scales are blockwise, else one per column of a
            group. "bf16" has a tenth of the error or less, and is slower. With "fp8", calls
            that need a gradient may round a quantized number of x or w to the other neighbor than calls that need none.
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
    for name, dtype, able in (("grad_dtype", grad_dtype, GRADIENTS), ("dw_dtype", dw_dtype, ("bf16", "fp8"))):
        if dtype not in able:
            raise ForetuneError(f"{name} must be one of {', '.join(able)} but is {dtype!r}")
    configs, dtypes = (config, config_dx, config_dw), (grad_dtype, dw_dtype)
    return _scaled(x, w, group_sizes, x_scale, w_scale, scales, configs, dtypes, how)


def _how_chosen(
    mode: str | None, same_bits: bool | None, invariant: str | None, x_scale: Any, granularity: str
) -> str | None:
    """Check `invariant`, and encode `mode`, `same_bits` and `invariant` as one text (see `how_chosen`).

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
    configs: tuple[KernelConfig | None, ...],
    dtypes: tuple[str, str],
    mode: str | None,
) -> torch.Tensor:
    """Return the result of `scaled_gemm`, or with group sizes that of `scaled_grouped_gemm`.

    `configs` are those of the forward pass, dX and dW, and `dtypes` are `grad_dtype` and `dw_dtype`.
    """
    y: torch.Tensor
    if is_transformed():
        _refuse_derivatives(x, w)
    if needs_gradient((x_scale, w_scale)):
        for name, operand, scale in (("x_scale", x, x_scale), ("w_scale", w, w_scale)):
            if needs_gradient((scale,)) and not needs_gradient((operand,)):  # else the operand's error is reported
                raise ForetuneError(f"{name} requires a gradient, but scales get none: pass {name}.detach()")
    if needs_gradient((x, w)):
        y = _ScaledGemm.apply(x, w, group_sizes, x_scale, w_scale, granularity, configs, dtypes, mode)  # type: ignore[no-untyped-call]
        return y
    x8, x_scale = _quantized("x", x, x_scale, granularity, 2)
    w8, w_scale = _quantized("w", w, w_scale, granularity, 2 if group_sizes is None else 3)
    y = PRODUCT.call(x8, w8, x_scale, w_scale, group_sizes, granularity, configs[0], mode, False)
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
        x, w, group_sizes, x_scale, w_scale, granularity, configs, dtypes, mode = arguments
        check_tensor("x", x)
        check_tensor("w", w)
        needs_x, needs_w = ctx.needs_input_grad[:2]
        # Copies that are transposed in the pass over memory that quantizes the operands are kept for the gradients,
        # otherwise the operands.
        of_dw: Sequence[Any] = (x, x_scale) if needs_w else (None, None)
        fp8 = dtypes[1] == "fp8"
        x_turned = fp8 and needs_w and x.dtype == torch.bfloat16 and x_scale is None
        if x_turned:
            x8, own_scale, *of_dw = _quantized_both_ways(x, group_sizes, granularity, "e4m3", True)
        else:
            x8, own_scale = _quantized("x", x, x_scale, granularity, 2)
        dims = 2 if group_sizes is None else 3
        w_turned = fp8 and needs_x and granularity != TENSORWISE and w.dtype == torch.bfloat16 and w.dim() == dims == 3
        if w_turned and w_scale is None:
            w8, w_scale, *of_dx = WEIGHTS_BOTH_WAYS.call(w, granularity == BLOCKWISE)
        else:
            w_turned = False
            w8, w_scale = _quantized("w", w, w_scale, granularity, dims)
            of_dx = [w8, w_scale] if needs_x else [None, None]
        y: torch.Tensor = PRODUCT.call(x8, w8, own_scale, w_scale, group_sizes, granularity, configs[0], mode, False)
        ctx.save_for_backward(*of_dw, *of_dx, group_sizes)
        ctx.options = granularity, configs, dtypes, mode, x_turned, w_turned
        return y

    @staticmethod
    @once_differentiable
    @outside_autocast
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of x and w for `dy`, and None for the other arguments."""
        x, x_scale, w8, w_scale, group_sizes = ctx.saved_tensors
        granularity, (_, config_dx, config_dw), (grad_dtype, dw_dtype), mode, x_turned, w_turned = ctx.options
        dy = dy.contiguous()
        dx = dw = dy8 = None
        if x is not None and x.dtype == FP8 and not x_turned:  # x was given in fp8
            x = dequantized_x(x, x_scale, granularity).to(torch.bfloat16)
        if x is not None and dw_dtype == "fp8":
            if not x_turned:
                _, _, x, x_scale = _quantized_both_ways(x, group_sizes, granularity, "e4m3", False)
            needs_x = w8 is not None
            dy8, dy_scale, dyt8, dyt_scale = _quantized_both_ways(dy, group_sizes, granularity, grad_dtype, needs_x)
            blockwise = granularity == BLOCKWISE
            dw = SCALED_DW.call(dyt8, x, dyt_scale, x_scale, group_sizes, len(dy), blockwise, config_dw, mode)
        elif x is not None and group_sizes is not None:
            options = (None, None, None, 1, False, False, None, None, config_dw, mode)
            dw = GRADIENT.call(dy, ready(x), None, group_sizes, *options, (False, True, False, False))[1]
        elif x is not None:
            dw = dy.t() @ x
        if w8 is not None:
            if dy8 is None:
                dy8, dy_scale = QUANTIZED.call(dy, grad_dtype, granularity, False)
            if not w_turned:
                w8, w_scale = transposed(w8, w_scale, granularity)
            dx = PRODUCT.call(dy8, w8, dy_scale, w_scale, group_sizes, granularity, config_dx, mode, True)
        return dx, dw, *[None] * 7


def _quantized_both_ways(
    x: torch.Tensor, group_sizes: torch.Tensor, granularity: str, fp8: str, with_rows: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Return (x in fp8, scales, transposed x in fp8 for dW, scales); the first two are None without `with_rows`."""
    both = with_rows and granularity != TENSORWISE
    x8, scale, xt8, xt_scale = BOTH_WAYS.call(x, group_sizes, fp8, granularity == BLOCKWISE, both)
    if with_rows and not both:
        x8, scale = QUANTIZED.call(x, fp8, granularity, False)
    return x8, scale, xt8, xt_scale


def _quantized(
    name: str, operand: torch.Tensor, scale: torch.Tensor | None, granularity: str, dims: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an fp8 operand and its scales; check that a bf16 one has `dims` dimensions, and quantize it."""
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
    x8, own_scale = QUANTIZED.call(operand, "e4m3", granularity, name == "w")
    return x8, own_scale
