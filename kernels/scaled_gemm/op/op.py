"""`scaled_gemm` and `scaled_grouped_gemm`: linear layers whose products run in fp8, with gradients.

What each product of a training step runs in, and why:

- forward, y = x @ w.T: fp8. x is quantised by rows (1x128) and w by blocks (128x128), or as `scales` says.
- dX = dy @ w: fp8, by the same kernel on w's transpose. Blocks of 128x128 transpose with their scales, and so does one
  scale a tensor: w's numbers are those of the forward pass. Scales of w's rows lie along N, which dX sums over, and
  cannot be taken out of the sum: there w is quantised anew.
- dW = dy.T @ x: bf16, by `foretune.grouped_gemm`'s kernel, or without groups by PyTorch. It sums over rows, each of
  which has scales of its own, which cannot be taken out either; and groups end anywhere, so blocks of 128 rows would
  have two groups in them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ....datasets import ForetuneError, KernelConfig
from ...grouped_gemm.op import library as _  # noqa: F401 - torch.ops.foretune.grouped_gemm_backward
from ...op_calls import check_tensor, encode, is_transformed, needs_gradient
from ...op_registration import has_tangent, outside_autocast
from ..quantize import FP8, check_kind, dequantized_x, quantize_w, quantize_x, transposed
from ..scales import BLOCKWISE
from .fp8_product import check_dims, product


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
) -> torch.Tensor:
    """y = x @ w.T in fp8 (e4m3), added up in float32, in bf16. Differentiable in what is bf16.

    It always runs Foretune's kernel. `torch._scaled_mm`, which has no gradient, is slower in most shapes with scales of
    rows or blocks, and faster in most with one a tensor (kernels/README.md has the figures).

    Args:
        x: (rows, K), bfloat16, which is quantised here, or fp8 (torch.float8_e4m3fn) with `x_scale`.
        w: (N, K), likewise with `w_scale`. N and K are multiples of 16.
        x_scale, w_scale: float32, what the fp8 numbers are multiplied by; given for what is fp8 already. They get no
            gradient.
        scales: which ones: "blockwise" (x (rows, blocks of K), one for each 1x128, best stored block by block; w
            (blocks of N, blocks of K), one for each 128x128), "rowwise" (x (rows, 1), w (N, 1)) or "tensorwise" ((1,)).
        config, config_dx: the kernel's config forward and for the gradient of x; see `foretune.grouped_gemm`.
        mode: how a config is chosen; see `foretune.grouped_gemm`.

    Returns:
        y, (rows, N), bfloat16: the same, to the bit, in every run with the same config. No step of the sum is longer
        than 128 products before it is added up in float32; `reference.error_bound` says how far off that can be.

    Raises:
        ForetuneError: for shapes, dtypes, devices, scales, a GPU without fp8, or a config that cannot be, naming it.

    >>> if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9):
    ...     x, w = (torch.randn(64, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    ...     assert scaled_gemm(x, w).shape == (64, 64)
    """
    return _run(x, w, None, x_scale, w_scale, check_kind(scales), config, config_dx, None, mode)


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
) -> torch.Tensor:
    """y[rows of e] = x[rows of e] @ w[e].T in fp8 (e4m3), for rows sorted by group e, as DeepSeek's MoE layers have it.
    Differentiable in what is bf16.

    Args:
        x: (rows, K), sorted by group; bfloat16, which is quantised here, or fp8 (torch.float8_e4m3fn) with `x_scale`.
        w: (groups, N, K), likewise with `w_scale`. N and K are multiples of 16.
        group_sizes: (groups,) int32 or int64: how many rows each group has. It stays on the device.
        x_scale, w_scale, scales, mode: as for `scaled_gemm`; those of w by group: (groups, blocks of N, blocks of K),
            (groups, N), or (groups,).
        config, config_dx, config_dw: the config forward, for the gradient of x, and for that of w, which is one of
            grouped_gemm_dw.

    Returns:
        y, (rows, N), bfloat16. Rows of no group are undefined (zero under FORETUNE_CHECK); their gradients are zero.

    Raises:
        ForetuneError: as `scaled_gemm` does. Nobody waits for the device: group sizes that make no sense are treated as
            `foretune.grouped_gemm` treats them.

    >>> if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9):
    ...     x = torch.randn(6, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ...     w = torch.randn(3, 256, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ...     y = scaled_grouped_gemm(x, w, torch.tensor([4, 0, 2], dtype=torch.int32, device="cuda"))
    ...     y.sum().backward()
    ...     assert y.shape == (6, 256) and w.grad[1].abs().sum() == 0
    """
    if group_sizes is None:
        raise ForetuneError("group_sizes must be a tensor but is None: foretune.scaled_gemm is the dense product")
    return _run(x, w, group_sizes, x_scale, w_scale, check_kind(scales), config, config_dx, config_dw, mode)


def _run(
    x: torch.Tensor,
    w: torch.Tensor,
    group_sizes: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    w_scale: torch.Tensor | None,
    kind: str,
    config: KernelConfig | None,
    config_dx: KernelConfig | None,
    config_dw: KernelConfig | None,
    mode: str | None,
) -> torch.Tensor:
    y: torch.Tensor
    if is_transformed():
        _refuse_derivatives(x, w)
    if needs_gradient((x_scale, w_scale)):
        for name, operand, scale in (("x_scale", x, x_scale), ("w_scale", w, w_scale)):
            if needs_gradient((scale,)) and not needs_gradient((operand,)):  # of which something else is said
                raise ForetuneError(f"{name} requires a gradient, which it has none of here: call {name}.detach()")
    if needs_gradient((x, w)):
        y = _ScaledGemm.apply(x, w, group_sizes, x_scale, w_scale, kind, config, config_dx, config_dw, mode)  # type: ignore[no-untyped-call]
        return y
    x8, x_scale = _quantized("x", x, x_scale, kind, 2)
    w8, w_scale = _quantized("w", w, w_scale, kind, 2 if group_sizes is None else 3)
    return product(x8, w8, x_scale, w_scale, group_sizes, kind, config, mode)


def _refuse_derivatives(x: Any, w: Any) -> None:
    """Raise `ForetuneError` where a function transform or forward-mode AD differentiates the op."""
    for name, operand in (("x", x), ("w", w)):
        if has_tangent(operand):
            raise ForetuneError(f"foretune.scaled_gemm has no forward-mode derivative, but {name} has a tangent")
        if torch._C._are_functorch_transforms_active() and needs_gradient((operand,)):
            raise ForetuneError(
                f"foretune.scaled_gemm cannot be differentiated under torch.func's transforms, but {name} needs a "
                "gradient: call .backward() or torch.autograd.grad, outside of them"
            )


class _ScaledGemm(torch.autograd.Function):
    """Both ops: dense where there are no group sizes."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
        x, w, group_sizes, x_scale, w_scale, kind, config, config_dx, config_dw, mode = arguments
        x8, own_scale = _quantized("x", x, x_scale, kind, 2)
        w8, w_scale = _quantized("w", w, w_scale, kind, 2 if group_sizes is None else 3)
        y = product(x8, w8, own_scale, w_scale, group_sizes, kind, config, mode)
        needs_x, needs_w = ctx.needs_input_grad[:2]
        of_x = (x, x_scale) if needs_w else (None, None)
        of_w = (w8, w_scale) if needs_x else (None, None)
        ctx.save_for_backward(*of_x, *of_w, group_sizes)
        ctx.options = kind, config_dx, config_dw, mode
        return y

    @staticmethod
    @once_differentiable
    @outside_autocast
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, x_scale, w8, w_scale, group_sizes = ctx.saved_tensors
        kind, config_dx, config_dw, mode = ctx.options
        dy = dy.contiguous()
        dx = dw = None
        if w8 is not None:
            dy8, dy_scale = quantize_x(dy, kind)
            wt8, wt_scale = transposed(w8, w_scale, kind)
            dx = product(dy8, wt8, dy_scale, wt_scale, group_sizes, kind, config_dx, mode, zeroes=True)
        if x is not None:
            if x_scale is not None:  # x was given in fp8
                x = dequantized_x(x, x_scale, kind).to(torch.bfloat16)
            dw = _dw(dy, x, group_sizes, config_dw, mode)
        return dx, dw, *[None] * 8


def _dw(
    dy: torch.Tensor,
    x: torch.Tensor,
    group_sizes: torch.Tensor | None,
    config: KernelConfig | None,
    mode: str | None,
) -> torch.Tensor:
    """dy.T @ x of each group, in bf16."""
    if group_sizes is None:
        return dy.t() @ x
    no_tensors, needs = (None, None, None), [False, True, False, False]
    options = (1, False, False, None, None, encode(config), mode, None)
    backward = torch.ops.foretune.grouped_gemm_backward
    dw: torch.Tensor = backward(dy, x, None, group_sizes, *no_tensors, *options, needs)[1]
    return dw


def _quantized(
    name: str, operand: torch.Tensor, scale: torch.Tensor | None, kind: str, dims: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operand in fp8 with its scales, quantised here if it is bf16."""
    check_tensor(name, operand)
    if operand.dtype == FP8:
        if operand.requires_grad:
            raise ForetuneError(f"{name} is {FP8}, which has no gradient: give the bfloat16 that it was made of")
        if scale is None:
            raise ForetuneError(f"{name} is {FP8}, so {name}_scale must be given but is None")
        return operand, scale
    if scale is not None:
        raise ForetuneError(f"{name}_scale is given, so {name} must be {FP8} but is {operand.dtype}")
    if operand.dtype != torch.bfloat16:
        raise ForetuneError(f"{name} must be torch.bfloat16 or {FP8} but is {operand.dtype}")
    check_dims(name, operand, dims)
    return (quantize_x if name == "x" else quantize_w)(operand, kind)
