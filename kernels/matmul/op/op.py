"""`matmul`: the op that people call, with gradients. Its config is predicted once for each shape, then looked up."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ....datasets import ForetuneError, KernelConfig
from ....runtime import Mode, resolve_mode
from ....runtime.choice import Launch, choose, given
from ....runtime.tuning.ranks.agreement import epoch
from ... import find_measurable
from ...op_calls import device_at, on_device_of, place_of
from ..layouts import A_KM, ACTIVATIONS, B_KN, activation_of, is_aligned
from ..triton_kernels.gemm import launch_matmul
from .operands import is_placed, operands_of

#: Calls that are remembered. When there are more, all are forgotten: to find one out again takes milliseconds at most.
_MEMO_SIZE = 4096
_calls: dict[tuple[Any, ...], Call] = {}


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    config: KernelConfig | None = None,
    mode: str | None = None,
) -> torch.Tensor:
    """y = activation(a @ b + bias). Differentiable: the gradients are two more such products.

    Args:
        a: (M, K), or a batch of them (B, M, K); bfloat16, float16, float32 (multiplied as tf32) or int8.
        b: (K, N), or (B, K, N), of the same dtype. How either is stored follows from its strides, so that `x @ w.T`,
            `dy @ w` and `dy.T @ x` copy nothing; what has contiguous rows neither way is copied, and so is what begins
            at no multiple of 16 bytes though its rows are long enough for it.
        bias: (N,), of the same dtype. Neither it nor an activation goes with int8.
        activation: "relu", "gelu" (the exact one) or "silu".
        config: the kernel's config, for y and not for gradients. It may name some knobs only: the family's default has
            the others. Chosen as `mode` says where left out.
        mode: "predict" (the default, or the environment variable FORETUNE_MODE) runs the config that is predicted to
            be the fastest; "shortlist" times the 8 best on the first call of about that many rows, and "off" runs the
            family's default.

    Returns:
        y, (M, N) or (B, M, N), of a's dtype, int32 for int8. The same, to the bit, in every run with the same config.

    Raises:
        ForetuneError: for shapes, dtypes, devices, options or a config that cannot be, naming it.

    >>> if torch.cuda.is_available():
    ...     x, w = (torch.randn(64, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    ...     matmul(x, w.T, activation="silu").sum().backward()
    ...     assert w.grad.shape == (64, 128)
    """
    if torch.is_grad_enabled() and any(getattr(tensor, "requires_grad", False) for tensor in (a, b, bias)):
        # The gradient of an activation needs what went into it: it is not fused here.
        y: torch.Tensor = _Matmul.apply(a, b, bias, config, mode)  # type: ignore[no-untyped-call]
        return y if activation is None else _activated(y, activation)
    return product(a, b, bias, activation, config, mode)


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    config: KernelConfig | None = None,
    mode: str | None = None,
) -> torch.Tensor:
    """`matmul` without gradients."""
    key = (place_of(a, "a"), epoch(), _facts(a), _facts(b), _facts(bias), activation, config, mode)
    call = _calls.get(key)
    if call is None:
        if len(_calls) >= _MEMO_SIZE:
            _calls.clear()
        call = _calls[key] = Call(a, b, bias, activation, config, mode)
    with on_device_of(a):
        return call.run(a, b, bias)


class _Matmul(torch.autograd.Function):
    """a @ b + bias where something needs a gradient."""

    @staticmethod
    def forward(ctx: Any, a: Any, b: Any, bias: Any, config: Any, mode: Any) -> torch.Tensor:
        needs_a, needs_b = ctx.needs_input_grad[:2]
        ctx.save_for_backward(a if needs_b else None, b if needs_a else None)
        ctx.mode, ctx.b_is_batch = mode, b.dim() == 3
        return product(a, b, bias, None, config, mode)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        a, b = ctx.saved_tensors
        da = None if b is None else product(dy, b.mT, mode=ctx.mode)
        db = dbias = None
        if a is not None:
            rows = (a, dy) if ctx.b_is_batch else (a.reshape(-1, a.shape[-1]), dy.reshape(-1, dy.shape[-1]))
            db = product(rows[0].mT, rows[1], mode=ctx.mode)
        if ctx.needs_input_grad[2]:
            dbias = dy.sum(tuple(range(dy.dim() - 1)))
        return da, db, dbias, None, None


def _activated(y: torch.Tensor, activation: str) -> torch.Tensor:
    if activation not in ACTIVATIONS:
        raise ForetuneError(f"activation must be one of {', '.join(ACTIVATIONS)} but is {activation!r}")
    activated: torch.Tensor = getattr(functional, activation)(y)
    return activated


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
            y = _activated(y, activation)
        return y.view(self.operands.out_shape)


def _facts(tensor: Any) -> Any:
    """All of a tensor that a call's being in order depends on."""
    if not isinstance(tensor, torch.Tensor):
        return None if tensor is None else type(tensor)
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device()
