"""One product of plain tensors: checked, its config chosen, launched; nothing recorded, nothing waited for.

What depends on shapes and strides alone is found out once, then looked up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from ...datasets import ForetuneError, KernelConfig
from ..op_calls import ConfiguredLaunch, Memo, are_placed, device_at, encode, key_of, needs_operator
from .layouts import A_KM, ACTIVATIONS, B_KN, activation_of, is_aligned, worth_turning
from .operands import operands_of
from .triton_kernels.launches import prepare_matmul

if TYPE_CHECKING:
    from ...datasets import DeviceSpec
    from ..op_calls import Launch

_calls: Memo[Call] = Memo()


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    config: KernelConfig | None = None,
    mode: str | None = None,
) -> torch.Tensor:
    """`foretune.matmul` without gradients; the operator where PyTorch wants to see one."""
    if needs_operator((a, b, bias)):
        from .op_library import matmul  # here, because that module imports this one

        y: torch.Tensor = matmul(a, b, bias, activation, encode(config), mode)
        return y
    return run(a, b, bias, activation, config, mode)


def run(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    config: KernelConfig | None,
    mode: str | None,
) -> torch.Tensor:
    """`product` of tensors that have memory."""
    key = key_of((a, b, bias), (activation, config, mode), "a")
    call = _calls.found(key) or _calls.add(key, Call(key[0], a, b, bias, activation, config, mode))
    if call.copies or (call.is_aligned and not are_placed((a, b))):
        a, b = call.operands.readable(a, b, aligned=call.is_aligned, turned=call.turned)
        bias = None if bias is None else bias.contiguous()
        return run(a, b, bias, activation, config, mode)  # a call like any other
    y = a.new_empty(*call.out_shape, dtype=call.out_dtype)
    if call.launch is None:
        return _sums_of_nothing(y, bias, activation)
    call.launch((a, b, y, bias))
    return y


def gradients(
    dy: torch.Tensor, a: torch.Tensor | None, b: torch.Tensor | None, b_is_batch: bool, mode: str | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Those of a and of b, from y's: two more products. None of a without b, and of b without a."""
    da = None if b is None else product(dy, b.mT, mode=mode)
    if a is None:
        return da, None
    rows = (a, dy) if b_is_batch else (a.flatten(0, -2), dy.flatten(0, -2))
    return da, product(rows[0].mT, rows[1], mode=mode)


def gradient_of_bias(dy: torch.Tensor) -> torch.Tensor:
    """(N,), the sum over all rows."""
    return dy.sum(tuple(range(dy.dim() - 1)))


def activated(y: torch.Tensor, activation: str) -> torch.Tensor:
    """PyTorch's own, by its name. Raises `ForetuneError` for one that there is not."""
    if activation not in ACTIVATIONS:
        raise ForetuneError(f"activation must be one of {', '.join(ACTIVATIONS)} but is {activation!r}")
    y = getattr(functional, activation)(y)
    return y


def _sums_of_nothing(y: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> torch.Tensor:
    y.zero_()
    if bias is not None:
        y += bias
    return y if activation is None else activated(y, activation)


class Call:
    """All calls with tensors of these shapes and strides on one device. FORETUNE_MODE is read when it is made."""

    def __init__(
        self,
        place: int,
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None,
        config: KernelConfig | None,
        mode: str | None,
    ) -> None:
        self.operands = operands_of(a, b, bias, activation)
        problem = self.operands.problem
        self.out_shape = self.operands.out_shape
        self.out_dtype = torch.int32 if a.dtype == torch.int8 else a.dtype
        #: Then a config may use TMA, and the kernel loads 16 bytes at a time.
        self.is_aligned = is_aligned(problem)
        self.copies = False  # whether the kernel cannot read an operand as it lies, or had better not
        self.launch: ConfiguredLaunch | None = None  # nothing is launched where there is nothing to add up
        device = device_at(place, "a")
        #: A config that somebody asks for is for the operands as they lie.
        self.turned = worth_turning(problem, device) if config is None else (False, False)
        if 0 in (problem[dim] for dim in ("batch", "m", "n", "k")):
            return
        self.copies = any(self.turned) or self.operands.copies(a, b, aligned=self.is_aligned)
        self.copies |= bias is not None and not bias.is_contiguous()
        if not self.copies:
            self.launch = ConfiguredLaunch(problem, place, config, mode, self._prepared, "a")

    def _prepared(self, config: KernelConfig, device: DeviceSpec, tensors: Sequence[Any]) -> Launch:
        a, b, y, _ = tensors
        problem = self.operands.problem
        return prepare_matmul(
            *self.operands.stored(a, b),
            y.view(problem["batch"], problem["m"], problem["n"]),
            config,
            device.sm_count,
            a_km=A_KM in problem.flags,
            b_kn=B_KN in problem.flags,
            activation=activation_of(problem),
        )
