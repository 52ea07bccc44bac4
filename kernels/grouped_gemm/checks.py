"""What a call of the op may be given: everything that the host can know without waiting for the device.

And, where the user switches that on, what it can only know by waiting (`check_contents`).
"""

from __future__ import annotations

from numbers import Integral
from typing import Any, NamedTuple

import torch

from ...datasets import ForetuneError, torch_dtype
from ...datasets.errors import check_flag, shown
from ..op_calls import check_tensor
from .family import DTYPES as NAMES
from .family import MOST_ROWS

DTYPES = {torch_dtype(name): name for name in NAMES}
_INTEGERS = (torch.int32, torch.int64)
_NEEDED = ("x", "w", "group_sizes")
_DIMS = {"x": 2, "w": 3, "group_sizes": 1, "gather_indices": 1, "topk_weights": 1, "bias": 2}


class Shape(NamedTuple):
    """The sizes of one call; x has `rows` rows, or rows / topk where it is gathered."""

    rows: int
    groups: int
    n: int
    k: int


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
    """The sizes of a call that is in order, whatever its tensors hold. Raises `ForetuneError` naming what is not."""
    _require(not (permute_x and permute_y), "permute_x and permute_y exclude each other: only one side is permuted")
    permuted = "permute_x" if permute_x else "permute_y"
    _require(
        gather_indices is not None or not (permute_x or permute_y),
        f"{permuted}=True needs gather_indices, but they are None",
    )
    _require(isinstance(topk, int) and topk >= 1, f"topk must be an integer >= 1 but is {topk!r}")
    tensors = {
        "x": x,
        "w": w,
        "group_sizes": group_sizes,
        "gather_indices": gather_indices,
        "topk_weights": topk_weights,
        "bias": bias,
    }
    for name, tensor in tensors.items():
        if tensor is not None or name in _NEEDED:
            _check_tensor(name, tensor, x)

    groups, n, k = w.shape
    _require(x.shape[1] == k, f"x has {x.shape[1]} columns but w {tuple(w.shape)}, (groups, N, K), has K = {k}")
    _require(n % 8 == 0 and k % 8 == 0, f"N and K of w must be multiples of 8 but are {n} and {k}")
    _require(n > 0 and k > 0, f"N and K of w must be at least 8 but are {n} and {k}")
    _require(group_sizes.shape[0] == groups, f"there are {group_sizes.shape[0]} group_sizes but w has {groups} groups")
    rows = x.shape[0] * topk if permute_x else x.shape[0]
    _require(rows <= MOST_ROWS, f"there must be at most {MOST_ROWS} rows but there are {rows}")
    if gather_indices is not None:
        what = f"{x.shape[0]} rows of x times topk = {topk}" if permute_x else f"{rows} rows of x"
        given = gather_indices.shape[0]
        _require(given == rows, f"there must be one of gather_indices a row, for {what}, but there are {given}")
    if topk_weights is not None:
        given = topk_weights.shape[0]
        _require(given == rows, f"there must be one of topk_weights a row of y, so {rows}, but there are {given}")
    if bias is not None:
        _require(tuple(bias.shape) == (groups, n), f"bias must be {(groups, n)} but is {tuple(bias.shape)}")
    return Shape(rows, groups, n, k)


def check_options(topk: Any, permute_x: Any, permute_y: Any) -> tuple[int, bool, bool]:
    """Return the options in Python's own types. Raise `ForetuneError` for what merely equals one, as True equals 1."""
    is_integer = isinstance(topk, Integral) and not isinstance(topk, bool)
    _require(is_integer, f"topk must be an integer >= 1 but is {shown(topk)}")
    return int(topk), check_flag("permute_x", permute_x), check_flag("permute_y", permute_y)


def check_indices(gather_indices: torch.Tensor, topk_weights: torch.Tensor) -> None:
    """Raise `ForetuneError` for indices that cannot permute the weights, (rows,), of rows that are not permuted."""
    _check_tensor("topk_weights", topk_weights, topk_weights)
    _check_tensor("gather_indices", gather_indices, topk_weights, "topk_weights")
    given, rows = len(gather_indices), len(topk_weights)
    _require(given == rows, f"there must be {rows} gather_indices, one for each of topk_weights, but there are {given}")


def _check_tensor(name: str, tensor: Any, x: torch.Tensor, other: str = "x") -> None:
    check_tensor(name, tensor)
    _require(tensor.dim() == _DIMS[name], f"{name} must have {_DIMS[name]} dimensions but is {tuple(tensor.shape)}")
    _require(tensor.device == x.device, f"{name} is on {tensor.device} but {other} is on {x.device}")
    if name in ("group_sizes", "gather_indices"):
        _require(tensor.dtype in _INTEGERS, f"{name} must be int32 or int64 but is {tensor.dtype}")
    else:
        known = ", ".join(map(str, DTYPES))
        _require(tensor.dtype in DTYPES, f"{name} must be one of {known} but is {tensor.dtype}")
    if name == "w":
        _require(tensor.dtype == x.dtype, f"w is {tensor.dtype} but x is {x.dtype}: cast one of them")
    _require(
        tensor.is_contiguous(),
        f"{name} must be contiguous but has strides {tuple(tensor.stride())} at shape {tuple(tensor.shape)}: "
        f"call {name}.contiguous() first",
    )


def check_aligned(x: torch.Tensor, w: torch.Tensor) -> None:
    """Raises `ForetuneError` where TMA or a vector load could not begin at the first element."""
    if (x.data_ptr() | w.data_ptr()) % 16:
        name = "x" if x.data_ptr() % 16 else "w"
        raise ForetuneError(f"{name} must begin at a multiple of 16 bytes but this view does not: call {name}.clone()")


def check_contents(group_sizes: torch.Tensor, gather_indices: torch.Tensor | None, rows: int) -> None:
    """Waits for the device and raises `ForetuneError` for group sizes and indices that make no sense. (Rows that are
    past the last group are allowed.)"""
    sizes = group_sizes.tolist()
    _require(min(sizes, default=0) >= 0, f"group_sizes must be >= 0 but one is {min(sizes, default=0)}")
    _require(sum(sizes) <= rows, f"group_sizes sum to {sum(sizes)} but there are {rows} rows")
    if gather_indices is not None:
        there = torch.arange(rows, device=gather_indices.device, dtype=gather_indices.dtype)
        wrong = (gather_indices.sort().values != there).nonzero().flatten()
        _require(
            len(wrong) == 0,
            f"gather_indices must be each of 0 to {rows - 1} once but, sorted, there is "
            f"{gather_indices.sort().values[wrong[:1]].tolist()} at {wrong[:1].tolist()}",
        )


def _require(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise ForetuneError(otherwise)
