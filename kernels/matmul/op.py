"""`matmul`: the op that people call, with gradients, in eager mode and under `torch.compile`. Its config is predicted
once for each shape, then looked up."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional

from ...datasets import ForetuneError, KernelConfig, Problem, torch_dtype
from ..op import Op
from ..op_calls import (
    Call,
    ConfiguredLaunch,
    are_placed,
    check_tensor,
    device_at,
    is_transformed,
    needs_gradient,
    require,
)
from .layouts import A_KM, ACTIVATIONS, ALIGNMENT_BYTES, B_KN, BIAS, activation_of, is_aligned, worth_turning
from .layouts import DTYPES as NAMES
from .triton_kernels.launches import prepare_matmul
from .triton_kernels.turning import turned_copy

if TYPE_CHECKING:
    from ...datasets import DeviceSpec
    from ..op_calls import Launch

_DTYPES = {torch_dtype(name): name for name in NAMES}


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
            at no multiple of 16 bytes though its rows are long enough for it. In a large product of float32, what lies
            across K is copied too, where that is faster (sm_90).
        bias: (N,), of the same dtype. Neither it nor an activation goes with int8.
        activation: "relu", "gelu" (the exact one) or "silu".
        config: the kernel's config, for y and not for gradients. It may name some knobs only, as those of
            `foretune.grouped_gemm` may. Chosen as `mode` says where left out.
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
    # (Under a function transform, a tensor does not say whether an outer transform wants its gradient.)
    if activation is not None and (needs_gradient((a, b, bias)) or is_transformed()):
        # The gradient of an activation needs what went into it: it is not fused here.
        return _activated(OP.call(a, b, bias, None, config, mode), activation)
    y: torch.Tensor = OP.call(a, b, bias, activation, config, mode)
    return y


class Operands(NamedTuple):
    """How the kernel sees tensors of these shapes and strides: layouts follow from strides."""

    problem: Problem
    out_shape: tuple[int, ...]  # of what the caller gets
    out_dtype: torch.dtype
    a_is_transposed: bool  # stored as (batch, K, M)
    b_is_transposed: bool  # stored as (batch, N, K)
    is_aligned: bool  # then a config may use TMA, and the kernel loads 16 bytes at a time
    turned: tuple[bool, bool] = (False, False)  # which of a and b to copy with rows along K

    @classmethod
    def of(cls, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> Operands:
        """How a call is seen that `check_call` finds in order."""
        (m, k), n = a.shape[-2:], b.shape[-1]
        out_shape, out_dtype = (*a.shape[:-1], n), torch.int32 if a.dtype == torch.int8 else a.dtype
        batch = len(b) if b.dim() == 3 else 1
        if a.dim() == 3 and b.dim() == 2:  # one more dimension of rows
            m *= len(a)
            a = a.reshape(m, k)
        transposed = _is_transposed(a), _is_transposed(b)
        given = {A_KM: transposed[0], B_KN: not transposed[1], BIAS: bias is not None}
        flags = tuple(flag for flag, is_set in given.items() if is_set) + (() if activation is None else (activation,))
        problem = Problem.of("matmul", dtype=_DTYPES[a.dtype], flags=flags, batch=batch, m=m, n=n, k=k)
        return cls(problem, out_shape, out_dtype, *transposed, is_aligned(problem))

    def stored(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """a and b as the kernel takes them, three dimensions with contiguous rows; views, where they are readable."""
        batch = self.problem["batch"]
        return _stored(a, batch, self.a_is_transposed), _stored(b, batch, self.b_is_transposed)

    def copies(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        """Whether one of the two has to be copied for the kernel to read it, or had better be, wherever it begins."""
        stored_a, stored_b = self.stored(a, b)
        lie_well = _lies_well(a, stored_a, self.is_aligned) and _lies_well(b, stored_b, self.is_aligned)
        return any(self.turned) or not lie_well

    def readable(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """a and b, or copies laid out alike where the kernel could not read them: aligned rows begin at multiples of
        16 bytes."""
        (stored_a, stored_b), (turns_a, turns_b), aligned = self.stored(a, b), self.turned, self.is_aligned
        good_a = _lies_well(a, stored_a, aligned) and (not aligned or are_placed([a]))
        good_b = _lies_well(b, stored_b, aligned) and (not aligned or are_placed([b]))
        if not good_a or turns_a:
            a = turned_copy(stored_a).view(a.shape) if good_a else _copied(a, self.a_is_transposed and not turns_a)
        if not good_b or turns_b:
            b = turned_copy(stored_b).view(b.mT.shape).mT if good_b else _copied(b, self.b_is_transposed or turns_b)
        return a, b


def check_call(a: Any, b: Any, bias: Any, activation: str | None) -> None:
    """Raise `ForetuneError` naming what is wrong with a call, of what the host knows without waiting for the device."""
    for name, tensor in (("a", a), ("b", b)):
        check_tensor(name, tensor)
        require(tensor.dim() in (2, 3), f"{name} must have 2 or 3 dimensions but has {tensor.dim()}")
        if tensor.dtype not in _DTYPES or tensor.dtype != a.dtype:
            one_of = f"a's {a.dtype}" if a.dtype in _DTYPES else f"of {', '.join(map(str, _DTYPES))}"
            raise ForetuneError(f"the dtype of {name} must be one {one_of} but is {tensor.dtype}")
        require(tensor.device == a.device, f"{name} must be on {a.device}, as a is, but is on {tensor.device}")
    k, n = a.shape[-1], b.shape[-1]
    require(b.shape[-2] == k, f"b must have {k} rows, as many as a has columns, but is {tuple(b.shape)}")
    if b.dim() == 3 and (a.dim() != 3 or a.shape[0] != b.shape[0]):
        raise ForetuneError(f"a must be a batch of {b.shape[0]} matrices, as b is, but is {tuple(a.shape)}")
    if bias is not None:
        check_tensor("bias", bias)
        require(bias.shape == (n,), f"bias must be a tensor of ({n},) but is {tuple(bias.shape)}")
        require(
            (bias.dtype, bias.device) == (a.dtype, a.device),
            f"bias must be of {a.dtype} on {a.device} but is of {bias.dtype} on {bias.device}",
        )
    if activation is not None:
        _check_activation(activation)


def _check_activation(activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ForetuneError(f"activation must be one of {', '.join(ACTIVATIONS)} but is {activation!r}")


def _find(
    place: int,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    config: KernelConfig | None,
    mode: str | None,
) -> Call[Operands]:
    check_call(a, b, bias, activation)
    operands, device = Operands.of(a, b, bias, activation), device_at(place, "a")
    problem = operands.problem
    if config is None:  # a config that the caller gives is for the operands as they lie
        operands = operands._replace(turned=worth_turning(problem, device))
    if 0 in (problem[dim] for dim in ("batch", "m", "n", "k")):
        return Call(operands)
    if operands.copies(a, b) or (bias is not None and not bias.is_contiguous()):
        return Call(operands, copies=True)

    def prepare(config: KernelConfig, device: DeviceSpec, tensors: Sequence[Any]) -> Launch:
        a, b, y, _ = tensors
        return prepare_matmul(
            *operands.stored(a, b),
            y.view(problem["batch"], problem["m"], problem["n"]),
            config,
            device.sm_count,
            a_km=A_KM in problem.flags,
            b_kn=B_KN in problem.flags,
            activation=activation_of(problem),
        )

    return Call(operands, ConfiguredLaunch(problem, place, config, mode, prepare, "a"))


def _run(
    call: Call[Operands],
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    *options: Any,
) -> torch.Tensor:
    operands = call.seen
    if call.copies or (operands.is_aligned and not are_placed((a, b))):
        bias = None if bias is None else bias.contiguous()
        return OP.direct(*operands.readable(a, b), bias, activation, *options)  # type: ignore[no-any-return] # like any
    y = a.new_empty(*operands.out_shape, dtype=operands.out_dtype)
    if call.launch is not None:
        call.launch((a, b, y, bias))
        return y
    y.zero_()  # sums of nothing
    if bias is not None:
        y += bias
    return y if activation is None else _activated(y, activation)


def _activated(y: torch.Tensor, activation: str) -> torch.Tensor:
    """PyTorch's own activation of that name."""
    _check_activation(activation)
    y = getattr(functional, activation)(y)
    return y


def _fake(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, activation: str | None, *_: str | None
) -> torch.Tensor:
    check_call(a, b, bias, activation)
    return a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=torch.int32 if a.dtype == torch.int8 else a.dtype)


def _save(ctx: Any, arguments: tuple[Any, ...], output: torch.Tensor) -> None:
    a, b, _, activation, *_ = arguments
    if activation is not None:
        raise ForetuneError(f"{activation} is fused here, and has no gradient: foretune.matmul applies it after")
    needs_a, needs_b = ctx.needs_input_grad[:2]
    ctx.save_for_backward(a if needs_b else None, b if needs_a else None)
    ctx.b_is_batch = b.dim() == 3


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Two more products, and the sum over all rows."""
    a, b = ctx.saved_tensors
    options = (None, None, None, ctx.options[-1])  # neither bias nor activation, a config that is chosen, the mode
    da = None if b is None else OP.call(dy, b.mT, *options)
    db = None
    if a is not None:
        rows = (a, dy) if ctx.b_is_batch else (a.flatten(0, -2), dy.flatten(0, -2))
        db = OP.call(rows[0].mT, rows[1], *options)
    return da, db, dy.sum(tuple(range(dy.dim() - 1))) if ctx.needs_input_grad[2] else None


def _is_transposed(matrix: torch.Tensor) -> bool:
    """Whether it is to be read along its columns: where it is a vector, which can be read either way, along that."""
    rows, columns = matrix.shape[-2:]
    return _has_rows(matrix.mT) and (rows > columns or not _has_rows(matrix))


def _has_rows(matrix: torch.Tensor) -> bool:
    """Whether rows are contiguous, do not overlap, and one matrix of a batch follows the other."""
    rows, columns = matrix.shape[-2:]
    contiguous = (matrix.stride(-1) == 1 or columns == 1) and matrix.stride(-2) >= columns
    return contiguous and (matrix.dim() == 2 or len(matrix) == 1 or matrix.stride(0) == rows * matrix.stride(-2))


def _stored(matrix: torch.Tensor, batch: int, is_transposed: bool) -> torch.Tensor:
    if matrix.dim() == 3 and batch == 1:
        matrix = matrix.reshape(-1, matrix.shape[-1])
    if is_transposed:
        matrix = matrix.mT
    return matrix if matrix.dim() == 3 else matrix[None]


def _lies_well(matrix: torch.Tensor, stored: torch.Tensor, aligned: bool) -> bool:
    if stored.data_ptr() != matrix.data_ptr() or not _has_rows(stored):  # no view has one row after the other
        return False
    return not aligned or stored.stride(-2) * stored.element_size() % ALIGNMENT_BYTES == 0


def _copied(matrix: torch.Tensor, is_transposed: bool) -> torch.Tensor:
    if is_transposed:
        return matrix.mT.clone(memory_format=torch.contiguous_format).mT
    return matrix.clone(memory_format=torch.contiguous_format)


OP = Op(
    "matmul(Tensor a, Tensor b, Tensor? bias, str? activation, str? config, str? mode) -> Tensor",
    find=_find,
    run=_run,
    fake=_fake,
    save=_save,
    backward=_backward,
    flops=lambda a, b, *_, **__: 2 * prod(a) * b[-1],
)
