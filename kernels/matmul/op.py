"""Define `foretune.matmul`: the public op, differentiable, in eager mode and under `torch.compile`.

Its config is predicted once per shape, then looked up.
"""

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
from ..op_choice import HowChosen, how_chosen
from .space import A_KM, ACTIVATIONS, ALIGNMENT_BYTES, B_KN, BIAS, activation_of, is_aligned, is_few, worth_turning
from .space import DTYPES as NAMES
from .triton_kernels.launches import prepare_matmul
from .triton_kernels.turning import turned_copy

if TYPE_CHECKING:
    from ...datasets import DeviceSpec
    from ..launchers import Launch

_DTYPES = {torch_dtype(name): name for name in NAMES}


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    config: KernelConfig | None = None,
    mode: str | None = None,
    same_bits: bool | None = None,
    invariant: str | None = None,
) -> torch.Tensor:
    """Return activation(a @ b + bias). Differentiable: the gradients are two more such products.

    Args:
        a: (M, K), or a batch of matrices (B, M, K); bfloat16, float16, float32 (multiplied as tf32; in
            float32 for one or two rows of x @ w.T, see README.md) or int8.
        b: (K, N), or (B, K, N), of the same dtype. The strides of a and b decide how they are read, so `x @ w.T`, `dy @
            w` and `dy.T @ x` copy nothing. An operand is copied if neither its rows nor its columns are contiguous, or
            if it does not begin at a multiple of 16 bytes although its rows are long enough for 16-byte loads. On
            sm_90, a large float32 product also copies operands that are stored across K, because that is faster.
        bias: (N,), of the same dtype. Not available for int8.
        activation: "relu", "gelu" (the exact one) or "silu". Not available for int8.
        config: The kernel config of y (not of the gradients). It may name a subset of the knobs, as for
            `foretune.grouped_gemm`. If omitted, `mode` decides.
        mode: "predict" (the default, unless the environment variable FORETUNE_MODE says otherwise) runs the config that
            is predicted to be fastest; "shortlist" times the 8 most promising configs on the first call with about this
            many rows and keeps the fastest; "refine" runs the predicted config at first and then others in turn, until
            the calls themselves show which is the fastest; "off" runs the family's default config. One or two rows
            run a kernel that has no config in any mode but "off" (see README.md).
        same_bits: Run only configs whose results have the same bits as those of the family's default config, so that no
            tuning changes a result. If None, FORETUNE_SAME_BITS=1 requests it. A given config is not restricted.
        invariant: "m": Run only configs that compute a row with the same bits for every number of rows, so that a row
            of the result does not depend on the other rows of the call.

    Returns:
        y, (M, N) or (B, M, N), of a's dtype; int32 for int8. Bitwise reproducible for the same config.

    Raises:
        ForetuneError: A shape, dtype, device, option or config is invalid; the message names it.

    >>> if torch.cuda.is_available():
    ...     x, w = (torch.randn(64, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    ...     matmul(x, w.T, activation="silu").sum().backward()
    ...     assert w.grad.shape == (64, 128)
    """
    # (Under a function transform, a tensor does not show whether an outer transform needs its gradient.)
    how = how_chosen(mode, same_bits, invariant)
    if activation is not None and (needs_gradient((a, b, bias)) or is_transformed()):
        # The gradient of an activation needs its input, so it is not fused here.
        return _activated(OP.call(a, b, bias, None, config, how), activation)
    y: torch.Tensor = OP.call(a, b, bias, activation, config, how)
    return y


class Operands(NamedTuple):
    """The problem of a call, the result's shape and dtype, and how the operands are stored, read from their strides."""

    problem: Problem
    out_shape: tuple[int, ...]  # of the result that the caller gets
    out_dtype: torch.dtype
    a_is_transposed: bool  # stored as (batch, K, M)
    b_is_transposed: bool  # stored as (batch, N, K)
    is_aligned: bool  # a config may use TMA, and loads are 16 bytes wide
    turned: tuple[bool, bool] = (False, False)  # whether to copy a, and b, so that rows run along K

    @classmethod
    def of(cls, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> Operands:
        """Return the problem and the storage of a call's tensors, which `check_call` has accepted."""
        (m, k), n = a.shape[-2:], b.shape[-1]
        out_shape, out_dtype = (*a.shape[:-1], n), torch.int32 if a.dtype == torch.int8 else a.dtype
        batch = len(b) if b.dim() == 3 else 1
        if a.dim() == 3 and b.dim() == 2:  # the batch dimension is merged into the rows
            m *= len(a)
            a = a.reshape(m, k)
        transposed = _is_transposed(a), _is_transposed(b)
        given = {A_KM: transposed[0], B_KN: not transposed[1], BIAS: bias is not None}
        flags = tuple(flag for flag, is_set in given.items() if is_set) + (() if activation is None else (activation,))
        problem = Problem.of("matmul", dtype=_DTYPES[a.dtype], flags=flags, batch=batch, m=m, n=n, k=k)
        return cls(problem, out_shape, out_dtype, *transposed, is_aligned(problem))

    def stored(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a and b as the kernel takes them, with three dimensions and contiguous rows; views if possible."""
        batch = self.problem["batch"]
        return _stored(a, batch, self.a_is_transposed), _stored(b, batch, self.b_is_transposed)

    def copies(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        """Return whether to copy a or b, because the kernel cannot read it in place or because a copy is faster.

        The addresses at which they begin are not considered.
        """
        stored_a, stored_b = self.stored(a, b)
        lie_well = _lies_well(a, stored_a, self.is_aligned) and _lies_well(b, stored_b, self.is_aligned)
        return any(self.turned) or not lie_well

    def readable(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a and b for the kernel, after copying those that it cannot read in place or reads more slowly.

        If rows are aligned, both must also begin at multiples of 16 bytes.
        """
        (stored_a, stored_b), (turns_a, turns_b), aligned = self.stored(a, b), self.turned, self.is_aligned
        good_a = _lies_well(a, stored_a, aligned) and (not aligned or are_placed([a]))
        good_b = _lies_well(b, stored_b, aligned) and (not aligned or are_placed([b]))
        if not good_a or turns_a:
            a = turned_copy(stored_a).view(a.shape) if good_a else _copied(a, self.a_is_transposed and not turns_a)
        if not good_b or turns_b:
            b = turned_copy(stored_b).view(b.mT.shape).mT if good_b else _copied(b, self.b_is_transposed or turns_b)
        return a, b


class _FixedLaunch(ConfiguredLaunch):
    """A launch of a kernel that has no configs, so that none is predicted, timed or pinned."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch


def check_call(a: Any, b: Any, bias: Any, activation: str | None) -> None:
    """Check all arguments of `matmul` that the host can check without waiting for the device.

    Raises:
        ForetuneError: An argument is invalid; the message names it.
    """
    for name, tensor in (("a", a), ("b", b)):
        check_tensor(name, tensor)
        require(tensor.dim() in (2, 3), f"{name} must have 2 or 3 dimensions but has {tensor.dim()}")
        if tensor.dtype not in _DTYPES or tensor.dtype != a.dtype:
            one_of = f"{a.dtype}, as a's is," if a.dtype in _DTYPES else f"one of {', '.join(map(str, _DTYPES))}"
            raise ForetuneError(f"the dtype of {name} must be {one_of} but is {tensor.dtype}")
        require(tensor.device == a.device, f"{name} must be on {a.device}, as a is, but is on {tensor.device}")
    k, n = a.shape[-1], b.shape[-1]
    require(b.shape[-2] == k, f"b must have {k} rows, as many as a has columns, but has shape {tuple(b.shape)}")
    if b.dim() == 3 and (a.dim() != 3 or a.shape[0] != b.shape[0]):
        raise ForetuneError(f"a must be a batch of {b.shape[0]} matrices, as b is, but has shape {tuple(a.shape)}")
    if bias is not None:
        check_tensor("bias", bias)
        require(
            bias.shape == (n,), f"bias must have shape ({n},), one entry per column of b, but has {tuple(bias.shape)}"
        )
        require(
            (bias.dtype, bias.device) == (a.dtype, a.device),
            f"bias must be {a.dtype} on {a.device}, as a is, but is {bias.dtype} on {bias.device}",
        )
    if activation is not None:
        _check_activation(activation)


def _check_activation(activation: str) -> None:
    """Raise `ForetuneError` unless the activation is a known one."""
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
    """Check the arguments of a call and return its `Call`, with a launch unless there is nothing to compute.

    `place` is the index of the GPU.
    """
    check_call(a, b, bias, activation)
    operands, device = Operands.of(a, b, bias, activation), device_at(place, "a")
    problem = operands.problem
    if config is None:  # a config that the caller passes is meant for the operands' own layout
        operands = operands._replace(turned=worth_turning(problem, device))
    if 0 in (problem[dim] for dim in ("batch", "m", "n", "k")):
        return Call(operands)
    if operands.copies(a, b) or (bias is not None and not bias.is_contiguous()):
        return Call(operands, copies=True)

    how = HowChosen.of(mode)
    if config is None and how.is_free and is_few(problem):
        from .triton_kernels.few_rows import prepare_few_rows  # few calls launch it

        stored_a, stored_b = operands.stored(a, b)
        return Call(operands, _FixedLaunch(prepare_few_rows(problem, stored_a.stride(-2), stored_b.stride(-2))))

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

    return Call(operands, ConfiguredLaunch(problem, place, config, how, prepare, "a"))


def _run(
    call: Call[Operands],
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    *options: Any,
) -> torch.Tensor:
    """Return y = activation(a @ b + bias), after copying operands that the kernel cannot read."""
    operands = call.seen
    if call.copies or (operands.is_aligned and not are_placed((a, b))):
        bias = None if bias is None else bias.contiguous()
        return OP.direct(*operands.readable(a, b), bias, activation, *options)  # type: ignore[no-any-return] # like any
    y = a.new_empty(*operands.out_shape, dtype=operands.out_dtype)
    if call.launch is not None:
        call.launch((a, b, y, bias))
        return y
    y.zero_()  # empty sums
    if bias is not None:
        y += bias
    return y if activation is None else _activated(y, activation)


def _activated(y: torch.Tensor, activation: str) -> torch.Tensor:
    """Apply the activation of this name to y with PyTorch, and return the result."""
    _check_activation(activation)
    y = getattr(functional, activation)(y)
    return y


def _fake(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, activation: str | None, *_: str | None
) -> torch.Tensor:
    """Check the arguments, and return an uninitialized tensor like the result y."""
    check_call(a, b, bias, activation)
    return a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=torch.int32 if a.dtype == torch.int8 else a.dtype)


def _save(ctx: Any, arguments: tuple[Any, ...], output: torch.Tensor) -> None:
    """Save the operands that the gradients need in the autograd context."""
    a, b, _, activation, *_ = arguments
    if activation is not None:
        raise ForetuneError(
            f"torch.ops.foretune.matmul has no gradient with a fused activation ({activation}): call foretune.matmul, "
            "which applies the activation afterwards"
        )
    needs_a, needs_b = ctx.needs_input_grad[:2]
    ctx.save_for_backward(a if needs_b else None, b if needs_a else None)
    ctx.b_is_batch = b.dim() == 3


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients for `dy`: two more products, and the sum over all rows for the bias."""
    a, b = ctx.saved_tensors
    options = (None, None, None, ctx.options[-1])  # neither bias nor activation, a config by prediction, the mode
    da = None if b is None else OP.call(dy, b.mT, *options)
    db = None
    if a is not None:
        rows = (a, dy) if ctx.b_is_batch else (a.flatten(0, -2), dy.flatten(0, -2))
        db = OP.call(rows[0].mT, rows[1], *options)
    return da, db, dy.sum(tuple(range(dy.dim() - 1))) if ctx.needs_input_grad[2] else None


def _is_transposed(matrix: torch.Tensor) -> bool:
    """Return whether the kernel reads a matrix along its columns.

    A matrix that could be read either way, such as a vector, is read along its longer side.
    """
    rows, columns = matrix.shape[-2:]
    return _has_rows(matrix.mT) and (rows > columns or not _has_rows(matrix))


def _has_rows(matrix: torch.Tensor) -> bool:
    """Return whether rows are contiguous, do not overlap, and the matrices of a batch follow each other."""
    rows, columns = matrix.shape[-2:]
    contiguous = (matrix.stride(-1) == 1 or columns == 1) and matrix.stride(-2) >= columns
    return contiguous and (matrix.dim() == 2 or len(matrix) == 1 or matrix.stride(0) == rows * matrix.stride(-2))


def _stored(matrix: torch.Tensor, batch: int, is_transposed: bool) -> torch.Tensor:
    """Return a matrix as the kernel expects it, (batch, rows, columns), transposed if read along its columns.

    It is a view if possible, else a copy.
    """
    if matrix.dim() == 3 and batch == 1:
        matrix = matrix.reshape(-1, matrix.shape[-1])
    if is_transposed:
        matrix = matrix.mT
    return matrix if matrix.dim() == 3 else matrix[None]


def _lies_well(matrix: torch.Tensor, stored: torch.Tensor, aligned: bool) -> bool:
    """Return whether the kernel can read a matrix in place, given its `_stored` form.

    With `aligned`, rows must also be multiples of 16 bytes apart.
    """
    if stored.data_ptr() != matrix.data_ptr() or not _has_rows(stored):  # no view has its rows in order
        return False
    return not aligned or stored.stride(-2) * stored.element_size() % ALIGNMENT_BYTES == 0


def _copied(matrix: torch.Tensor, is_transposed: bool) -> torch.Tensor:
    """Return a copy of a matrix with contiguous rows; with contiguous columns if `is_transposed`."""
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
