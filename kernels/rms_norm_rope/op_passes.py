"""The forward and backward pass of one call: plain tensors in and out, nothing recorded, nothing waited for.

What depends on shapes and strides alone is found out once, then looked up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...datasets import KernelConfig, Problem
from ..op_calls import DTYPES, ConfiguredLaunch, Memo, are_placed, key_of
from .launches import Rotation, prepare_backward, prepare_forward
from .op_checks import check_call

if TYPE_CHECKING:
    from ...datasets import DeviceSpec
    from ..op_calls import Launch

_calls: Memo[Call] = Memo()


class Options(NamedTuple):
    """What a call has besides its tensors; `rms_norm_rope` says what each means."""

    eps: float
    weight_offset: float
    interleaved: bool
    config: KernelConfig | None
    config_backward: KernelConfig | None
    mode: str | None


def forward(tensors: Sequence[Any], options: Options, *, inverse: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k normed and rotated, contiguous in their shapes; rotated back if `inverse`, without a norm. Of the tensors
    (q, k, cos, sin, q_weight, k_weight) the weights may be None. Raises `ForetuneError` as `check_call` does."""
    key = key_of(tensors, (options, inverse), "q")
    call = _calls.found(key)
    if call is None:
        if not inverse:
            q, k, cos, sin, q_weight, k_weight = tensors
            check_call(q, k, cos, sin, q_weight, k_weight, *options[:3])
        call = _calls.add(key, Call(key[0], tensors, options, inverse=inverse))
    if call.copies or not are_placed(tensors):
        return forward(readable(tensors), options, inverse=inverse)  # a call like any other
    q, k, *tables = tensors
    q_out, k_out = _contiguous_like(q), _contiguous_like(k)
    if call.launch is not None:
        call.launch((q, k, q_out, k_out, *tables))
    return q_out, k_out


def backward(
    dq: torch.Tensor, dk: torch.Tensor, tensors: Sequence[Any], options: Options
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k, q_weight and k_weight; the last two are empty where there is no norm. The tensors are
    those of the forward pass, which found them in order."""
    q, k, cos, sin, q_weight, k_weight = tensors
    if q_weight is None:
        return *forward((dq, dk, cos, sin, None, None), options, inverse=True), dq.new_empty(0), dq.new_empty(0)
    given = (dq, dk, *tensors)
    key = key_of(given, options, "dq")
    call = _calls.found(key) or _calls.add(key, Call(key[0], given, options))
    if call.copies or not are_placed(given):
        dq, dk, *tensors = readable(given)
        return backward(dq, dk, tensors, options)
    q_grad, k_grad = _contiguous_like(q), _contiguous_like(k)
    if call.launch is None:
        return q_grad, k_grad, torch.zeros_like(q_weight), torch.zeros_like(k_weight)
    weight_grads = torch.empty_like(q_weight), torch.empty_like(k_weight)
    call.launch((dq, dk, q, k, q_grad, k_grad, *weight_grads, cos, sin, q_weight, k_weight))
    return q_grad, k_grad, *weight_grads


class Call:
    """All passes in one direction with tensors of these shapes and strides: pairs of heads, of which the last are q and
    k, then cos, sin, and both weights or None. FORETUNE_MODE is read when it is made."""

    def __init__(self, place: int, tensors: Sequence[Any], options: Options, *, inverse: bool = False) -> None:
        self._options, self._inverse = options, inverse
        self.copies = not all(_lie_well(tensors))  # whether the kernels cannot read a tensor as it lies
        self.launch: ConfiguredLaunch | None = None  # nothing is launched where there are no tokens
        is_backward = len(tensors) > 6
        q, k = (_tokens(x) for x in tensors[-6:-4])
        if self.copies or not q.numel():
            return
        flags = ("interleaved",) * options.interleaved + ("unnormed",) * (tensors[-1] is None)
        tokens, q_heads, head_dim = q.shape
        dims = {"tokens": tokens, "q_heads": q_heads, "kv_heads": k.shape[1], "head_dim": head_dim}
        family = "rms_norm_rope_bwd" if is_backward else "rms_norm_rope_fwd"
        problem = Problem.of(family, dtype=DTYPES[q.dtype], flags=flags, ragged=None, **dims)
        config = options.config_backward if is_backward else options.config
        prepare = self._prepared_backward if is_backward else self._prepared
        self.launch = ConfiguredLaunch(problem, place, config, options.mode, prepare, "q")

    def _prepared(self, config: KernelConfig, device: DeviceSpec, tensors: Sequence[Any]) -> Launch:
        q, k = map(_tokens, tensors[:2])
        return prepare_forward(q, k, self._rotation(tensors), config, inverse=self._inverse)

    def _prepared_backward(self, config: KernelConfig, device: DeviceSpec, tensors: Sequence[Any]) -> Launch:
        dq, dk, q, k = map(_tokens, tensors[:4])
        return prepare_backward(dq, dk, q, k, self._rotation(tensors), config)

    def _rotation(self, tensors: Sequence[Any]) -> Rotation:
        cos, sin, q_weight, k_weight = tensors[-4:]
        numbers = float(self._options.eps), float(self._options.weight_offset)
        return Rotation(_rows(cos), _rows(sin), q_weight, k_weight, *numbers, self._options.interleaved)


def readable(tensors: Sequence[Any]) -> list[Any]:
    """The tensors, or contiguous copies where the kernels could not read them."""
    return [
        x if x is None or (lies_well and are_placed([x])) else x.clone(memory_format=torch.contiguous_format)
        for x, lies_well in zip(tensors, _lie_well(tensors), strict=True)
    ]


def _lie_well(tensors: Sequence[Any]) -> list[bool]:
    """Which of a call's tensors the kernels can read as they lie, wherever they begin: heads side by side, tokens at
    multiples of 8 elements, and rows of cos and sin as well, as far apart in both."""
    *heads, cos, sin, q_weight, k_weight = tensors
    alike = _rows(cos).stride(0) == _rows(sin).stride(0)
    return [
        *map(_has_ready_heads, heads),
        *(alike and _has_ready_rows(table) for table in (cos, sin)),
        *(weight is None or weight.is_contiguous() for weight in (q_weight, k_weight)),
    ]


def _has_ready_heads(x: torch.Tensor) -> bool:
    viewed = _tokens(x)
    tokens, heads, head_dim = viewed.shape
    side_by_side = viewed.stride(2) == 1 and (heads == 1 or viewed.stride(1) == head_dim)
    return side_by_side and (tokens == 1 or viewed.stride(0) % 8 == 0) and viewed.data_ptr() == x.data_ptr()


def _has_ready_rows(table: torch.Tensor) -> bool:
    viewed = _rows(table)
    return viewed.stride(1) == 1 and viewed.stride(0) % 8 == 0 and viewed.data_ptr() == table.data_ptr()


def _contiguous_like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _tokens(x: torch.Tensor) -> torch.Tensor:
    """As (tokens, heads, head_dim)."""
    return x.reshape(-1, *x.shape[-2:]) if x.dim() > 3 else x


def _rows(table: torch.Tensor) -> torch.Tensor:
    """cos or sin as (positions, columns)."""
    return table.reshape(-1, table.shape[-1])
