"""One product of plain tensors: checked, its config chosen, launched; nothing recorded, nothing waited for.

What depends on shapes and strides alone is found out once, then looked up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from ....datasets import ForetuneError, KernelConfig
from ....runtime import Mode, resolve_mode
from ....runtime.choice import Launch, choose, given
from ....runtime.tuning.ranks.agreement import epoch
from ... import find_measurable
from ...op_calls import device_at, encode, facts, needs_operator, on_device_of, place_of
from ..layouts import A_KM, ACTIVATIONS, B_KN, activation_of, is_aligned
from ..triton_kernels.gemm import launch_matmul
from .operands import is_placed, operands_of

#: Calls that are remembered. When there are more, all are forgotten: to find one out again takes milliseconds at most.
_MEMO_SIZE = 4096
_calls: dict[tuple[Any, ...], Call] = {}


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
        y: torch.Tensor = torch.ops.foretune.matmul(a, b, bias, activation, encode(config), mode)
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
    key = (place_of(a, "a"), epoch(), facts(a), facts(b), facts(bias), activation, config, mode)
    call = _calls.get(key)
    if call is None:
        if len(_calls) >= _MEMO_SIZE:
            _calls.clear()
        call = _calls[key] = Call(a, b, bias, activation, config, mode)
    with on_device_of(a):
        return call.run(a, b, bias)


def gradients(
    dy: torch.Tensor, a: torch.Tensor | None, b: torch.Tensor | None, b_is_batch: bool, mode: str | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Those of a and of b, from y's: two more products. None of a without b, and of b without a."""
    da = None if b is None else product(dy, b.mT, mode=mode)
    if a is None:
        return da, None
    rows = (a, dy) if b_is_batch else (a.reshape(-1, a.shape[-1]), dy.reshape(-1, dy.shape[-1]))
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


class Call:
    """All calls with tensors of these shapes and strides on one device. FORETUNE_MODE is read when it is made."""

    def __init__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None,
        config: KernelConfig | None,
        mode: str | None,
    ) -> None:
        self.operands = operands_of(a, b, bias, activation)
        self.problem = self.operands.problem
        self.family, self.device = find_measurable("matmul"), device_at(place_of(a, "a"), "a")
        self.mode = resolve_mode(mode, default=Mode.PREDICT)
        self.is_empty = 0 in (self.problem[dim] for dim in ("batch", "m", "n", "k"))
        self.is_aligned = is_aligned(self.problem)
        self._config: KernelConfig | None = None
        if not self.is_empty:
            default = self.family.default(self.problem, self.device)
            if reason := self.family.supports(default, self.problem, self.device):
                raise ForetuneError(f"matmul cannot run {self.problem}: {reason}")
            if config is not None:
                self._config = given(config, self.family, self.problem, self.device)

    def run(self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        problem = self.problem
        y = torch.empty(
            (problem["batch"], problem["m"], problem["n"]),
            dtype=torch.int32 if a.dtype == torch.int8 else a.dtype,
            device=a.device,
        )
        if self.is_empty:
            return self._empty(y, bias)
        a, b = self.operands.stored(a, b)
        if self.is_aligned:  # then a config may use TMA, and the kernel loads 16 bytes at a time
            a, b = (x if is_placed(x) else x.clone(memory_format=torch.contiguous_format) for x in (a, b))
        flags, activation = problem.flags, activation_of(problem)

        def launch(config: KernelConfig) -> None:
            launch_matmul(
                a,
                b,
                y,
                config,
                self.device.sm_count,
                a_km=A_KM in flags,
                b_kn=B_KN in flags,
                bias=bias,
                activation=activation,
            )

        launch(self._chosen(launch))
        return y.view(self.operands.out_shape)

    def _chosen(self, launch: Launch) -> KernelConfig:
        if self._config is None:
            self._config = choose(self.family, self.problem, self.device, self.mode, launch)
        return self._config

    def _empty(self, y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Sums of nothing."""
        y.zero_()
        if bias is not None:
            y += bias
        activation = activation_of(self.problem)
        if activation != "none":
            y = activated(y, activation)
        return y.view(self.operands.out_shape)
