"""The operators that training needs in addition to the product.

`BOTH_WAYS` quantizes x or dy along rows and columns, `WEIGHTS_BOTH_WAYS` quantizes weights and transposes them, and
`SCALED_DW` computes dW.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...datasets import KernelConfig, Problem
from ..grouped_gemm.triton_kernels.tiles import TileMap
from ..grouped_gemm.variants import chunk_rows
from ..op import Op
from ..op_calls import Call, ConfiguredLaunch, device_at, on_device_of, ready, require
from .dw_family import ScaledGroupedGemmDW
from .product_op import GROUP_SIZES, check_dims
from .quantize import FP8, GRADIENTS
from .scales import BLOCKWISE, DTYPE, ROWWISE, SCALED, STEP, scale_shapes
from .triton_kernels.blocks import PADDED
from .triton_kernels.both_ways import quantize_both_ways, quantize_weights_both_ways
from .triton_kernels.launches import prepare_scaled_dw

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...datasets import DeviceSpec
    from ..launchers import Launch

BothWays = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor, torch.Tensor]


def _find_quantize(place: int, x: torch.Tensor, group_sizes: torch.Tensor, *_: Any) -> Call[None]:
    """Return a call after checking it; `place` is the index of the GPU."""
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
    """Return a call after checking it; `place` is the index of the GPU."""
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


class _Shape(NamedTuple):
    """The sizes of one dW, and the most rows that it sums at a time."""

    rows: int
    groups: int
    chunk_rows: int
    n: int
    k: int


def _find(
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
) -> Call[_Shape]:
    """Return a call with its launch; without one if there are no groups. `place` is the index of the GPU."""
    groups, n, k, gradient = len(group_sizes), len(dy), len(x), dy.dtype
    most = chunk_rows(rows, n, k, device_at(place).sm_count)
    shape = _Shape(rows, groups, most, n, k)
    if groups == 0 or rows == 0:
        return Call(shape)

    def prepare(config: KernelConfig, device: DeviceSpec, _: Sequence[Any]) -> Launch:
        return prepare_scaled_dw(*shape, config, device.sm_count, blockwise=blockwise, gradient=gradient)

    flags = (BLOCKWISE,) if blockwise else ()
    problem = Problem.of(ScaledGroupedGemmDW.name, dtype=DTYPE, flags=flags, groups=groups, rows=rows, n=n, k=k)
    return Call(shape, ConfiguredLaunch(problem, place, config, mode, prepare))


def _run(
    call: Call[_Shape],
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


def _fake(dy: torch.Tensor, x: torch.Tensor, dy_scale: Any, x_scale: Any, group_sizes: Any, *_: Any) -> torch.Tensor:
    """Return an uninitialized tensor like dW."""
    return dy.new_empty((len(group_sizes), len(dy), len(x)), dtype=torch.bfloat16)


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
    find=_find,
    run=_run,
    fake=_fake,
    flops=lambda dy, x, dy_scale, x_scale, group_sizes, rows, *_, **__: 2 * dy[0] * x[0] * rows,
)
