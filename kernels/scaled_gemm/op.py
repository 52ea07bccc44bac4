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
from .family import ScaledGemm, ScaledGroupedGemmForward
from .quantize import FP8, check_kind, dequantized_x, quantize_w, quantize_x, transposed
from .scales import BLOCKWISE, DTYPE, ROWWISE, STEP, flags_of, scale_shapes
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
    return _scaled(x, w, None, x_scale, w_scale, check_kind(scales), config, config_dx, None, mode)


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
    return _scaled(x, w, group_sizes, x_scale, w_scale, check_kind(scales), config, config_dx, config_dw, mode)


def _scaled(
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
    """Both ops: dense where there are no group sizes."""
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
    y = PRODUCT.call(x8, w8, x_scale, w_scale, group_sizes, kind, config, mode, False)
    return y


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
    """What quantises, and multiplies by the operator: its gradients are other products than the operator's."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
        x, w, group_sizes, x_scale, w_scale, kind, config, config_dx, config_dw, mode = arguments
        x8, own_scale = _quantized("x", x, x_scale, kind, 2)
        w8, w_scale = _quantized("w", w, w_scale, kind, 2 if group_sizes is None else 3)
        y: torch.Tensor = PRODUCT.call(x8, w8, own_scale, w_scale, group_sizes, kind, config, mode, False)
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
            dx = PRODUCT.call(dy8, wt8, dy_scale, wt_scale, group_sizes, kind, config_dx, mode, True)
        if x is not None:
            if x_scale is not None:  # x was given in fp8
                x = dequantized_x(x, x_scale, kind).to(torch.bfloat16)
            if group_sizes is None:
                dw = dy.t() @ x
            else:
                options = (None, None, None, 1, False, False, None, None, config_dw, mode)
                dw = GRADIENT.call(dy, x, None, group_sizes, *options, (False, True, False, False))[1]
        return dx, dw, *[None] * 8


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


class Shape(NamedTuple):
    """The sizes of one product; without groups it is dense."""

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
    kind: str,
) -> Shape:
    """The sizes of a product of fp8 operands. Raises `ForetuneError` naming what is wrong with it."""
    check_kind(kind)
    for name, operand, dims in (("x", x, 2), ("w", w, 2 if group_sizes is None else 3)):
        Operand(name, dtypes=(FP8,), contiguous=True).check(operand, x, "x")
        check_dims(name, operand, dims)
    (rows, k), n = x.shape, w.shape[-2]
    require(w.shape[-1] == k, f"x has {k} columns but w {tuple(w.shape)} has K = {w.shape[-1]}")
    require(min(n, k) > 0, f"N and K of w must be at least {STEP} but are {n} and {k}")
    require(n % STEP == 0 and k % STEP == 0, f"N and K of w must be multiples of {STEP} but are {n} and {k}")
    require(rows <= MOST_ROWS, f"there must be at most {MOST_ROWS} rows but there are {rows}")
    groups = None
    if group_sizes is not None:
        groups = w.shape[0]
        Operand("group_sizes", 1, INTEGERS, contiguous=True).check(group_sizes, x, "x")
        require(len(group_sizes) == groups, f"there are {len(group_sizes)} group_sizes but w has {groups} groups")
    shapes = scale_shapes(kind, rows, n, k, groups)
    for name, scale, shape in (("x_scale", x_scale, shapes[0]), ("w_scale", w_scale, shapes[1])):
        Operand(name, dtypes=(torch.float32,)).check(scale, x, "x")
        require(tuple(scale.shape) == shape, f"{name} must be {shape} for {kind} scales but is {tuple(scale.shape)}")
        in_order = scale.is_contiguous() or (name == "x_scale" and kind == BLOCKWISE)
        require(in_order, f"{name} must be contiguous: call {name}.contiguous() first")
    return Shape(rows, n, k, groups)


def check_dims(name: str, operand: torch.Tensor, dims: int) -> None:
    """Raise `ForetuneError` for an operand with another number of dimensions, or nothing to add up."""
    require(operand.dim() == dims, f"{name} must have {dims} dimensions but is {tuple(operand.shape)}")
    require(operand.shape[-1] > 0, f"{name} must have at least {STEP} columns but is {tuple(operand.shape)}")


def _find(place: int, *arguments: Any) -> Call[Shape]:
    shape = check_product(*arguments[:6])
    kind, config, mode, _ = arguments[5:]
    device_at(place)  # which refuses the CPU
    rows, n, k, groups = shape
    if rows == 0 or groups == 0:
        return Call(shape)

    def prepare(config: KernelConfig, device: DeviceSpec, _: Any) -> Launch:
        are = {"rowwise": kind == ROWWISE, "blockwise": kind == BLOCKWISE}
        return prepare_scaled_gemm(*shape, config, device.sm_count, **are)

    if groups is None:
        problem = Problem.of(ScaledGemm.name, dtype=DTYPE, flags=flags_of(kind), m=rows, n=n, k=k)
    else:
        name, flags = ScaledGroupedGemmForward.name, flags_of(kind)
        problem = Problem.of(name, dtype=DTYPE, flags=flags, groups=groups, rows=rows, n=n, k=k)
    return Call(shape, ConfiguredLaunch(problem, place, config, mode, prepare))


def _run(
    call: Call[Shape],
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    group_sizes: torch.Tensor | None,
    kind: str,
    config: KernelConfig | None,
    mode: str | None,
    zeroes: bool,
) -> torch.Tensor:
    """y (rows, N) in bf16 of x (rows, K) and w (N, K), or with group sizes (groups, N, K), in fp8.

    The scales are as `kinds.scale_shapes` says. Rows of no group are zero if `zeroes`, or under FORETUNE_CHECK; else as
    the memory was.
    """
    check_aligned(x, w)
    rows, n, _, _ = call.seen
    y = x.new_empty(rows, n, dtype=torch.bfloat16)
    if group_sizes is not None and call.contents_checked:
        check_contents(group_sizes, None, rows)
    if call.launch is None:
        return y.zero_()
    if kind == BLOCKWISE:
        x_scale = x_scale.t().contiguous()  # as they are stored anyway
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
    kind: str,
    *_: Any,
) -> torch.Tensor:
    shape = check_product(x, w, x_scale, w_scale, group_sizes, kind)
    return x.new_empty((shape.rows, shape.n), dtype=torch.bfloat16)


PRODUCT = Op(
    "scaled_product(Tensor x, Tensor w, Tensor x_scale, Tensor w_scale, Tensor? group_sizes, str kind, str? config, "
    "str? mode, bool zeroes=False) -> Tensor",
    find=_find,
    run=_run,
    fake=_fake,
    flops=lambda x, w, *_, **__: 2 * x[0] * w[-2] * w[-1],
)
