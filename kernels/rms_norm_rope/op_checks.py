"""What a call of the op may be given: everything that the host can know without waiting for the device."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from ...datasets import ForetuneError
from ...datasets.errors import check_flag, shown
from ..op_calls import DTYPES, check_tensor
from .family import MOST_HEADS, MOST_TOKENS, wrong_heads


def check_call(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    interleaved: bool,
) -> None:
    """Raises `ForetuneError` naming what is not in order."""
    named = {"q": q, "k": k, "cos": cos, "sin": sin, "q_weight": q_weight, "k_weight": k_weight}
    for name, tensor in named.items():
        if tensor is not None or not name.endswith("weight"):
            _check_tensor(name, tensor, q)
    for name, x in (("q", q), ("k", k)):
        _require(x.dim() >= 3, f"{name} must be (tokens, heads, head_dim), or more before, but is {tuple(x.shape)}")
        _require(x.dtype in DTYPES, f"{name} must be one of {', '.join(map(str, DTYPES))} but is {x.dtype}")
    head_dim, tokens = q.shape[-1], q.shape[:-2]
    _require(k.dtype == q.dtype, f"k is {k.dtype} but q is {q.dtype}: cast one of them")
    _require(
        (k.shape[:-2], k.shape[-1]) == (tokens, head_dim),
        f"q {tuple(q.shape)} and k {tuple(k.shape)} must be alike but for the heads, which are the last but one",
    )
    reason = wrong_heads(q.shape[-2], k.shape[-2], head_dim)
    _require(reason is None, str(reason))
    most = max(q.shape[-2], k.shape[-2])
    _require(most <= MOST_HEADS, f"there must be at most {MOST_HEADS} heads but there are {most}")
    count = prod(tokens)  # numel() would make a number of a size that a compiler leaves open
    _require(count <= MOST_TOKENS, f"there must be at most {MOST_TOKENS} tokens but there are {count}")
    _check_angles(cos, sin, count, head_dim, interleaved)
    _require((q_weight is None) == (k_weight is None), "q_weight and k_weight must be given both, or neither")
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None:
            given = tuple(weight.shape)
            _require(
                given == (head_dim,),
                f"{name} must be ({head_dim},), one for each element of a head, but is {given}. (A norm over all heads "
                "together, as OLMo-2 has it, is another one)",
            )
    check_options(eps, weight_offset, interleaved)


def check_options(eps: Any, weight_offset: Any, interleaved: Any) -> None:
    """Raise `ForetuneError` naming the option that is not in order."""
    check_flag("interleaved", interleaved)
    for name, number in (("eps", eps), ("weight_offset", weight_offset)):
        is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
        _require(is_number and 0 <= number < 1e30, f"{name} must be a number from 0 but is {shown(number)}")


def _check_angles(cos: torch.Tensor, sin: torch.Tensor, tokens: int, head_dim: int, interleaved: bool) -> None:
    _require(
        (cos.shape, cos.dtype) == (sin.shape, sin.dtype),
        f"cos {tuple(cos.shape)} {cos.dtype} and sin {tuple(sin.shape)} {sin.dtype} must be alike",
    )
    _require(cos.dim() >= 2, f"cos must be (positions, head_dim / 2) but is {tuple(cos.shape)}")
    columns, positions = cos.shape[-1], prod(cos.shape[:-1])
    if interleaved:
        _require(
            columns == head_dim // 2,
            f"cos must have head_dim / 2 = {head_dim // 2} columns, one for each pair, but has {columns}: of angles "
            "that are repeated for neighbours take [..., ::2], of those that are repeated by halves the first half",
        )
    else:
        _require(
            columns in (head_dim // 2, head_dim),
            f"cos must have head_dim / 2 = {head_dim // 2} columns, or {head_dim} whose halves are alike, but has "
            f"{columns}. (Heads of which only a part rotates are not taken)",
        )
    _require(
        positions > 0 and tokens % positions == 0,
        f"cos has {positions} rows, which must divide the {tokens} tokens: token i takes row i % {positions}",
    )
    for name, table in (("cos", cos), ("sin", sin)):
        _require(
            not table.requires_grad, f"{name} requires a gradient, which it has none of here: call {name}.detach()"
        )


def _check_tensor(name: str, tensor: Any, q: Any) -> None:
    check_tensor(name, tensor)
    _require(tensor.is_floating_point(), f"{name} must be of floats but is {tensor.dtype}")
    _require(tensor.device == q.device, f"{name} is on {tensor.device} but q is on {q.device}")


def _require(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise ForetuneError(otherwise)
