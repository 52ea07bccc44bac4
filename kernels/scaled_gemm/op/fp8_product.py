"""`product`: one product of fp8 operands with their scales, checked, its config chosen, launched; nothing recorded.

PyTorch's dispatcher knows it as `torch.ops.foretune.scaled_product`, which is how `torch.compile` sees it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ....datasets import ForetuneError, KernelConfig, Problem
from ...grouped_gemm.family import MOST_ROWS
from ...grouped_gemm.op.calls import contents_are_checked
from ...grouped_gemm.op.checks import check_aligned, check_contents
from ...grouped_gemm.triton_kernels.tiles import TileMap
from ...op_calls import (
    ConfiguredLaunch,
    Memo,
    check_tensor,
    decode,
    device_at,
    encode,
    key_of,
    needs_operator,
    on_device_of,
)
from ...op_registration import not_differentiable, register_fake, register_flops
from ..family import ScaledGemm, ScaledGroupedGemmForward
from ..quantize import FP8, check_kind
from ..scales import BLOCKWISE, DTYPE, ROWWISE, STEP, flags_of, scale_shapes
from ..triton_kernels.launches import prepare_scaled_gemm

if TYPE_CHECKING:
    from ....datasets import DeviceSpec
    from ...op_calls import Launch

_calls: Memo[Call] = Memo()


class Shape(NamedTuple):
    """The sizes of one product; without groups it is dense."""

    rows: int
    n: int
    k: int
    groups: int | None


def product(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    group_sizes: torch.Tensor | None,
    kind: str,
    config: KernelConfig | None = None,
    mode: str | None = None,
    *,
    zeroes: bool = False,
) -> torch.Tensor:
    """y (rows, N) in bf16 of x (rows, K) and w (N, K), or with group sizes (groups, N, K), in fp8; the scales are as
    `kinds.scale_shapes` says. Rows of no group are zero if `zeroes`, or under FORETUNE_CHECK; else as the memory was.

    Raises `ForetuneError` for what the host can see to be wrong, naming it.
    """
    tensors = (x, w, x_scale, w_scale, group_sizes)
    if needs_operator(tensors):
        y: torch.Tensor = scaled_product(*tensors, kind, encode(config), mode, zeroes)
        return y
    return _run(x, w, x_scale, w_scale, group_sizes, kind, config, mode, zeroes)


def _run(
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
    tensors = (x, w, x_scale, w_scale, group_sizes)
    key = key_of(tensors, (kind, config, mode))
    call = _calls.found(key) or _calls.add(key, Call(key[0], tensors, kind, config, mode))
    check_aligned(x, w)
    rows, n, _, _ = call.shape
    y = x.new_empty(rows, n, dtype=torch.bfloat16)
    if group_sizes is not None and call.contents_checked:
        check_contents(group_sizes, None, rows)
    if call.launch is None:
        return y.zero_()
    entries = None
    if group_sizes is not None:
        with on_device_of(x):
            tile_map = TileMap.build(group_sizes, rows)
        entries = tile_map.entries
    if kind == BLOCKWISE:
        x_scale = x_scale.t().contiguous()  # as they are stored anyway
    call.launch((x, w, x_scale, w_scale, y, entries))
    if group_sizes is not None and (zeroes or call.contents_checked):
        from ...grouped_gemm.triton_kernels.ungrouped import zero_ungrouped

        with on_device_of(x):
            zero_ungrouped(y, tile_map)
    return y


class Call:
    """All products of tensors that are alike. FORETUNE_MODE is read when it is made."""

    def __init__(
        self,
        place: int,
        tensors: tuple[Any, Any, Any, Any, Any],
        kind: str,
        config: KernelConfig | None,
        mode: str | None,
    ) -> None:
        shape = self.shape = check_product(*tensors, kind)
        self.contents_checked = contents_are_checked()
        device_at(place)  # which refuses the CPU
        self.launch: ConfiguredLaunch | None = None  # nothing is launched where there are no rows
        if shape.rows == 0 or shape.groups == 0:
            return

        def prepare(config: KernelConfig, device: DeviceSpec, _: Any) -> Launch:
            are = {"rowwise": kind == ROWWISE, "blockwise": kind == BLOCKWISE}
            return prepare_scaled_gemm(*shape, config, device.sm_count, **are)

        rows, n, k, groups = shape
        if groups is None:
            problem = Problem.of(ScaledGemm.name, dtype=DTYPE, flags=flags_of(kind), m=rows, n=n, k=k)
        else:
            name, flags = ScaledGroupedGemmForward.name, flags_of(kind)
            problem = Problem.of(name, dtype=DTYPE, flags=flags, groups=groups, rows=rows, n=n, k=k)
        self.launch = ConfiguredLaunch(problem, place, config, mode, prepare)


def check_product(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    group_sizes: torch.Tensor | None,
    kind: str,
) -> Shape:
    """The sizes of a product that is in order, whatever its tensors hold. Raises `ForetuneError` naming what is not."""
    check_kind(kind)
    grouped = group_sizes is not None
    dims = {"x": (x, 2), "w": (w, 3 if grouped else 2)}
    for name, (operand, count) in dims.items():
        check_tensor(name, operand)
        _require(operand.dtype == FP8, f"{name} must be {FP8} but is {operand.dtype}")
        check_dims(name, operand, count)
        _require(operand.device == x.device, f"{name} is on {operand.device} but x is on {x.device}")
        _require(
            operand.is_contiguous(),
            f"{name} must be contiguous but has strides {tuple(operand.stride())} at shape {tuple(operand.shape)}: "
            f"call {name}.contiguous() first",
        )
    (rows, k), n = x.shape, w.shape[-2]
    _require(w.shape[-1] == k, f"x has {k} columns but w {tuple(w.shape)} has K = {w.shape[-1]}")
    _require(min(n, k) > 0, f"N and K of w must be at least {STEP} but are {n} and {k}")
    _require(n % STEP == 0 and k % STEP == 0, f"N and K of w must be multiples of {STEP} but are {n} and {k}")
    _require(rows <= MOST_ROWS, f"there must be at most {MOST_ROWS} rows but there are {rows}")
    groups = None
    if group_sizes is not None:
        groups = w.shape[0]
        check_tensor("group_sizes", group_sizes)
        _require(group_sizes.dim() == 1, f"group_sizes must have 1 dimension but is {tuple(group_sizes.shape)}")
        _require(len(group_sizes) == groups, f"there are {len(group_sizes)} group_sizes but w has {groups} groups")
        known = (torch.int32, torch.int64)
        _require(group_sizes.dtype in known, f"group_sizes must be int32 or int64 but is {group_sizes.dtype}")
        _require(group_sizes.device == x.device, f"group_sizes is on {group_sizes.device} but x is on {x.device}")
        _require(group_sizes.is_contiguous(), "group_sizes must be contiguous: call group_sizes.contiguous() first")
    shapes = scale_shapes(kind, rows, n, k, groups)
    for name, scale, shape in (("x_scale", x_scale, shapes[0]), ("w_scale", w_scale, shapes[1])):
        check_tensor(name, scale)
        _require(scale.dtype == torch.float32, f"{name} must be torch.float32 but is {scale.dtype}")
        _require(tuple(scale.shape) == shape, f"{name} must be {shape} for {kind} scales but is {tuple(scale.shape)}")
        _require(scale.device == x.device, f"{name} is on {scale.device} but x is on {x.device}")
        in_order = scale.is_contiguous() or (name == "x_scale" and kind == BLOCKWISE)
        _require(in_order, f"{name} must be contiguous: call {name}.contiguous() first")
    return Shape(rows, n, k, groups)


def check_dims(name: str, operand: torch.Tensor, count: int) -> None:
    """Raises `ForetuneError` for an operand with another number of dimensions, or nothing to add up."""
    _require(operand.dim() == count, f"{name} must have {count} dimensions but is {tuple(operand.shape)}")
    _require(operand.shape[-1] > 0, f"{name} must have at least {STEP} columns but is {tuple(operand.shape)}")


def _require(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise ForetuneError(otherwise)


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


def _through_library(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    group_sizes: torch.Tensor | None,
    kind: str,
    config: str | None,
    mode: str | None,
    zeroes: bool = False,
) -> torch.Tensor:
    return _run(x, w, x_scale, w_scale, group_sizes, kind, decode(config), mode, zeroes)


def _flops(x: Any, w: Any, *_: Any, **__: Any) -> Any:
    return 2 * x[0] * w[-2] * w[-1]


_library: Any = torch.library.Library("foretune", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "scaled_product(Tensor x, Tensor w, Tensor x_scale, Tensor w_scale, Tensor? group_sizes, str kind, str? config, "
    "str? mode, bool zeroes=False) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.impl("scaled_product", _through_library, "CompositeExplicitAutograd")
register_fake("foretune::scaled_product", _fake, _library)
scaled_product = not_differentiable("scaled_product", _library)
register_flops("scaled_product", _flops)
