"""What a call of the op may be given: everything that the host can know without waiting for the device."""

from __future__ import annotations

from math import prod

import torch

from ...datasets import ForetuneError
from ..op_calls import DTYPES, check_tensor
from .family import ACTIVATIONS, MOST_COLUMNS, MOST_ROWS, wrong_widths


def check_call(x: torch.Tensor, w: torch.Tensor, activation: str) -> None:
    """Raises `ForetuneError` naming what is not in order."""
    for name, tensor in (("x", x), ("w_gate_up", w)):
        check_tensor(name, tensor)
        known = ", ".join(map(str, DTYPES))
        _require(tensor.dtype in DTYPES, f"{name} must be one of {known} but is {tensor.dtype}")
    _require(activation in ACTIVATIONS, f"activation must be one of {', '.join(ACTIVATIONS)} but is {activation!r}")
    _require(w.dim() == 2, f"w_gate_up must be (2 N, K) but is {tuple(w.shape)}")
    _require(x.dim() >= 1, "x must be (..., K) but is a number")
    _require(w.dtype == x.dtype, f"w_gate_up is {w.dtype} but x is {x.dtype}: cast one of them")
    _require(w.device == x.device, f"w_gate_up is on {w.device} but x is on {x.device}")
    rows, k = w.shape
    _require(x.shape[-1] == k, f"x has {x.shape[-1]} columns but w_gate_up {tuple(w.shape)}, (2 N, K), has K = {k}")
    _require(rows % 2 == 0, f"w_gate_up must have 2 N rows, gate's first, but has {rows}")
    reason = wrong_widths(rows // 2, k)
    _require(reason is None, str(reason))
    _require(max(rows, k) <= MOST_COLUMNS, f"N and K must be at most {MOST_COLUMNS} but w_gate_up is {tuple(w.shape)}")
    count = prod(x.shape[:-1])  # numel() would make a number of a size that a compiler leaves open
    _require(count <= MOST_ROWS, f"x must have at most {MOST_ROWS} rows but has {count}")


def _require(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise ForetuneError(otherwise)
