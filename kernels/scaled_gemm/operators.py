"""The operators of scaled products.

`PRODUCT` is y = x @ w.T of fp8 operands with given scales, dense or grouped, and `QUANTIZED` quantizes an operand for
it. Training also needs `BOTH_WAYS`, which quantizes x or dy along rows and columns, `WEIGHTS_BOTH_WAYS`, which
quantizes weights and transposes them, and `SCALED_DW`, which computes dW.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...datasets import ForetuneError, KernelConfig, Problem
from .. import find_measurable
from ..grouped_gemm.family import MOST_ROWS
from ..grouped_gemm.passes import check_aligned, check_contents
from ..grouped_gemm.space import chunk_rows
from ..grouped_gemm.triton_kernels.tiles import TileMap
from ..op import Op
from ..op_calls import INTEGERS, Call, ConfiguredLaunch, Operand, device_at, on_device_of, ready, require
from .dw_family import ScaledGroupedGemmDW
from .family import ScaledGemm, ScaledGroupedGemmForward, fp8_limit
from .quantize import FP8, GRADIENTS, Quantized, check_granularity, quantize_w, quantize_x, scale_of_largest
from .space import BLOCKWISE, DTYPE, ROWWISE, SCALED, STEP, flags_of, scale_shapes
from .triton_kernels.blocks import PADDED
from .triton_kernels.both_ways import quantize_both_ways, quantize_weights_both_ways
from .triton_kernels.launches import prepare_scaled_dw, prepare_scaled_gemm
from .triton_kernels.one_way import quantize_along_rows, quantize_in_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...datasets import DeviceSpec
    from ..launchers import Launch

BothWays = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor, torch.Tensor]
#: Of a call with group sizes; see `check_product`.
GROUP_SIZES = Operand("group_sizes", 1, INTEGERS, contiguous=True)


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
    gradients = tuple(GRADIENTS.values())  # the product is dX if x is e5m2
    for name, operand, dims, able in (("x", x, 2, gradients), ("w", w, 2 if group_sizes is None else 3, (FP8,))):
        Operand(name, dtypes=able, contiguous=True).check(operand, x, "x")
        check_dims(name, operand, dims)
    (rows, k), n = x.shape, w.shape[-2]
    require(w.shape[-1] == k, f"x must have K = {w.shape[-1]} columns, as w {tuple(w.shape)} does, but has {k}")
    require(min(n, k) > 0, f"N and K of w must be at least {STEP} but are {n} and {k}")
    require(n % STEP == 0 and k % STEP == 0, f"N and K of w must be multiples of {STEP} but are {n} and {k}")
    require(rows <= MOST_ROWS, f"the product must have at most {MOST_ROWS} rows but has {rows}")
    groups = None
    if group_sizes is not None:
        groups = w.shape[0]
        GROUP_SIZES.check(group_sizes, x, "x")
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
    """Check the arguments of a call and return its `Call`, with a launch unless there is nothing to compute.

    `place` is the index of the GPU.
    """
    shape = check_product(*arguments[:6])
    granularity, config, mode, _ = arguments[5:]
    device_at(place)  # raises for the CPU
    rows, n, k, groups = shape
    if rows == 0 or groups == 0:
        return Call(shape)

    def prepare(config: KernelConfig, device: DeviceSpec, tensors: Sequence[torch.Tensor | None]) -> Launch:
        if config["CONSUMERS"] and arguments[0].dtype != FP8:  # that kernel's operands have the same dtype
            config = find_measurable(problem.family).default(problem, device)
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
    `space.scale_shapes`. Rows that belong to no group are zero if `zeroes` or under FORETUNE_CHECK, otherwise they are
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


def _find_quantized(place: int, x: torch.Tensor, fp8: str, granularity: str, weights: bool) -> Call[None]:
    """Check the arguments of `_quantized` and return an empty `Call`; `place` is the index of the GPU."""
    name, k = "w" if weights else "x", x.shape[-1]
    require(k % STEP == 0, f"{name} must have a multiple of {STEP} columns but has {k}")
    if reason := fp8_limit(device_at(place)):  # which raises for the CPU
        raise ForetuneError(f"{name} cannot be quantized: {reason}")
    return Call(None)


def _quantized(_: Call[None], x: torch.Tensor, fp8: str, granularity: str, weights: bool) -> Quantized:
    """Return activations x, (rows, K) bf16, or weights, (..., N, K), in fp8 with scales of this granularity.

    The result has the bits and strides of `quantize.quantize_x` or `quantize_w`.
    """
    if x.numel() == 0:
        return _fake_quantized(x, fp8, granularity, weights)
    dtype = GRADIENTS[fp8]
    with on_device_of(x):
        x = ready(x)
        if granularity == BLOCKWISE:
            return quantize_in_blocks(x, dtype, square=weights)
        if granularity == ROWWISE:
            x8, scale = quantize_along_rows(x, dtype)
            return x8, scale.squeeze(-1) if x.dim() == 3 else scale
        largest = x.abs().amax((1, 2) if x.dim() == 3 else (0, 1))
        return quantize_along_rows(x, dtype, scale_of_largest(largest, dtype).reshape(-1))


def _fake_quantized(x: torch.Tensor, fp8: str, granularity: str, weights: bool) -> Quantized:
    """Return uninitialized tensors like the results of `_quantized`."""
    return quantize_w(x, granularity) if weights else quantize_x(x, granularity, GRADIENTS[fp8])


def _find_quantize(place: int, x: torch.Tensor, group_sizes: torch.Tensor, *_: Any) -> Call[None]:
    """Check the arguments of `_quantize` and return an empty `Call`; `place` is the index of the GPU."""
    check_dims("x", x, 2)
    require(x.shape[1] % STEP == 0, f"x must have a multiple of {STEP} columns but has {x.shape[1]}")
    GROUP_SIZES.check(group_sizes, x, "x")
    device_at(place)  # raises for the CPU
    return Call(None)


def _quantize(
    _: Call[None], x: torch.Tensor, group_sizes: torch.Tensor, fp8: str, blockwise: bool, with_rows: bool
) -> BothWays:
    """Return x, (rows, N) bf16, in fp8 along rows and columns; see `both_ways.quantize_both_ways`."""
    if not (x.numel() and len(group_sizes)):
        return _fake_quantize(x, group_sizes, fp8, blockwise, with_rows)
    with on_device_of(x):
        tile_map = TileMap.build(group_sizes, len(x))
        return quantize_both_ways(ready(x), tile_map, GRADIENTS[fp8], blockwise=blockwise, with_rows=with_rows)


def _fake_quantize(x: torch.Tensor, group_sizes: torch.Tensor, fp8: str, blockwise: bool, with_rows: bool) -> BothWays:
    """Return uninitialized tensors like the results of `_quantize`."""
    (rows, n), groups = x.shape, len(group_sizes)
    dtype, blocks = GRADIENTS[fp8], rows // SCALED + groups
    column_blocks, padded = -(-n // SCALED), -(-n // PADDED.value) * PADDED.value
    x8, row_scale = x.new_empty(0), x.new_empty(0)
    if with_rows:
        x8 = x.new_empty((rows, n), dtype=dtype)
        row_scale = x.new_empty((column_blocks, rows) if blockwise else (1, rows), dtype=torch.float32).t()
    xt8 = x.new_empty((n, blocks * SCALED), dtype=dtype)
    column_scale = x.new_empty((blocks if blockwise else groups, padded), dtype=torch.float32)
    return x8, row_scale, xt8, column_scale


def _find_weights(place: int, w: torch.Tensor, _: bool) -> Call[None]:
    """Check the arguments of `_quantize_weights` and return an empty `Call`; `place` is the index of the GPU."""
    check_dims("w", w, 3)
    n, k = w.shape[1:]
    require(n % STEP == 0 and k % STEP == 0, f"N and K of w must be multiples of {STEP} but are {n} and {k}")
    device_at(place)  # raises for the CPU
    return Call(None)


def _quantize_weights(_: Call[None], w: torch.Tensor, blockwise: bool) -> tuple[torch.Tensor, ...]:
    """Return w, (groups, N, K) bf16, and its transpose in fp8 with scales; see `quantize_weights_both_ways`."""
    if not w.numel():
        return _fake_quantize_weights(w, blockwise)
    with on_device_of(w):
        return quantize_weights_both_ways(ready(w), blockwise=blockwise)


def _fake_quantize_weights(w: torch.Tensor, blockwise: bool) -> tuple[torch.Tensor, ...]:
    """Return uninitialized tensors like the results of `_quantize_weights`."""
    groups, n, k = w.shape
    granularity = BLOCKWISE if blockwise else ROWWISE
    made = []
    for rows, columns in ((n, k), (k, n)):
        made.append(w.new_empty((groups, rows, columns), dtype=FP8))
        shape = scale_shapes(granularity, 0, rows, columns, groups)[1]
        made.append(w.new_empty(shape, dtype=torch.float32))
    return tuple(made)


class _DWShape(NamedTuple):
    """The sizes of one dW, and the most rows that it sums at a time."""

    rows: int
    groups: int
    chunk_rows: int
    n: int
    k: int


def _find_dw(
    place: int,
    dy: torch.Tensor,
    x: torch.Tensor,
    dy_scale: torch.Tensor,
    x_scale: torch.Tensor,
    group_sizes: torch.Tensor,
    rows: int,
    blockwise: bool,
    config: KernelConfig | None,
    mode: str | None,
) -> Call[_DWShape]:
    """Return the `Call` of dW, with a launch unless there are no rows or groups; `place` is the index of the GPU."""
    groups, n, k, gradient = len(group_sizes), len(dy), len(x), dy.dtype
    most = chunk_rows(rows, n, k, device_at(place).sm_count)
    shape = _DWShape(rows, groups, most, n, k)
    if groups == 0 or rows == 0:
        return Call(shape)

    def prepare(config: KernelConfig, device: DeviceSpec, _: Sequence[Any]) -> Launch:
        return prepare_scaled_dw(*shape, config, device.sm_count, blockwise=blockwise, gradient=gradient)

    flags = (BLOCKWISE,) if blockwise else ()
    problem = Problem.of(ScaledGroupedGemmDW.name, dtype=DTYPE, flags=flags, groups=groups, rows=rows, n=n, k=k)
    return Call(shape, ConfiguredLaunch(problem, place, config, mode, prepare))


def _run_dw(
    call: Call[_DWShape],
    dy: torch.Tensor,
    x: torch.Tensor,
    dy_scale: torch.Tensor,
    x_scale: torch.Tensor,
    group_sizes: torch.Tensor,
    *_: Any,
) -> torch.Tensor:
    """Return dW, (groups, N, K) bf16, from the transposed copies of dy and x; zero for groups without rows."""
    rows, groups, most, n, k = call.seen
    dw = dy.new_empty((groups, n, k), dtype=torch.bfloat16)
    if call.launch is None:
        return dw.zero_()
    with on_device_of(dy):
        tile_map = TileMap.build(group_sizes, rows, most)
        call.launch.here((dy, x, dy_scale, x_scale, dw, tile_map.entries))
    return dw


def _fake_dw(dy: torch.Tensor, x: torch.Tensor, dy_scale: Any, x_scale: Any, group_sizes: Any, *_: Any) -> torch.Tensor:
    """Return an uninitialized tensor like dW."""
    return dy.new_empty((len(group_sizes), len(dy), len(x)), dtype=torch.bfloat16)


QUANTIZED = Op(
    "quantize_scaled(Tensor x, str fp8, str granularity, bool weights) -> (Tensor, Tensor)",
    find=_find_quantized,
    run=_quantized,
    fake=_fake_quantized,
)
BOTH_WAYS = Op(
    "quantize_both_ways(Tensor x, Tensor group_sizes, str fp8, bool blockwise, bool with_rows) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    find=_find_quantize,
    run=_quantize,
    fake=_fake_quantize,
)
WEIGHTS_BOTH_WAYS = Op(
    "quantize_weights_both_ways(Tensor w, bool blockwise) -> (Tensor, Tensor, Tensor, Tensor)",
    find=_find_weights,
    run=_quantize_weights,
    fake=_fake_quantize_weights,
)
SCALED_DW = Op(
    "scaled_grouped_dw(Tensor dy, Tensor x, Tensor dy_scale, Tensor x_scale, Tensor group_sizes, int rows, "
    "bool blockwise, str? config, str? mode) -> Tensor",
    find=_find_dw,
    run=_run_dw,
    fake=_fake_dw,
    flops=lambda dy, x, dy_scale, x_scale, group_sizes, rows, *_, **__: 2 * dy[0] * x[0] * rows,
)
