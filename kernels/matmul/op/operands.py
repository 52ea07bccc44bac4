"""What a call of the op may be given, and as which problem its tensors are seen: layouts follow from strides."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ....datasets import ForetuneError, Problem, torch_dtype
from ..layouts import A_KM, ACTIVATIONS, ALIGNMENT_BYTES, B_KN, BIAS, DTYPES

_DTYPES = {torch_dtype(name): name for name in DTYPES}


class Operands(NamedTuple):
    """How the tensors of one call are seen by the kernel: what holds for all calls with tensors of these shapes and
    strides."""

    problem: Problem
    out_shape: tuple[int, ...]  # of what the caller gets
    a_is_transposed: bool  # stored as (batch, K, M)
    b_is_transposed: bool  # stored as (batch, N, K)
    copies_a: bool  # neither its rows nor its columns lie as the kernel takes them
    copies_b: bool

    def stored(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """a and b as the kernel takes them, three dimensions with contiguous rows; copied where they must be."""
        return (
            _stored(a, self.problem["batch"], self.a_is_transposed, self.copies_a),
            _stored(b, self.problem["batch"], self.b_is_transposed, self.copies_b),
        )


def operands_of(a: Any, b: Any, bias: Any, activation: str | None) -> Operands:
    """How a call is seen. Raises `ForetuneError` naming what is wrong with it."""
    check_operands(a, b, bias, activation)
    (m, k), n = a.shape[-2:], b.shape[-1]
    out_shape = (*a.shape[:-1], n)
    batch = len(b) if b.dim() == 3 else 1
    if a.dim() == 3 and b.dim() == 2:  # one more dimension of rows
        m *= len(a)
        a = a.reshape(m, k)
    a_is_transposed, b_is_transposed = map(_is_transposed, (a, b))
    given = {A_KM: a_is_transposed, B_KN: not b_is_transposed, BIAS: bias is not None}
    flags = tuple(flag for flag, is_set in given.items() if is_set) + (() if activation is None else (activation,))
    problem = Problem.of("matmul", dtype=_DTYPES[a.dtype], flags=flags, batch=batch, m=m, n=n, k=k)
    return Operands(
        problem,
        out_shape,
        a_is_transposed,
        b_is_transposed,
        copies_a=not (a_is_transposed or _has_rows(a)),
        copies_b=not (b_is_transposed or _has_rows(b)),
    )


def check_operands(a: Any, b: Any, bias: Any, activation: str | None) -> None:
    """Raises `ForetuneError` naming what is wrong with a call."""
    for name, tensor in (("a", a), ("b", b)):
        if not isinstance(tensor, torch.Tensor):
            raise ForetuneError(f"{name} must be a tensor but is a {type(tensor).__name__}")
        if tensor.dim() not in (2, 3):
            raise ForetuneError(f"{name} must have 2 or 3 dimensions but has {tensor.dim()}")
        if tensor.dtype not in _DTYPES or tensor.dtype != a.dtype:
            one_of = f"a's {a.dtype}" if a.dtype in _DTYPES else f"of {', '.join(map(str, _DTYPES))}"
            raise ForetuneError(f"the dtype of {name} must be one {one_of} but is {tensor.dtype}")
        if tensor.device != a.device:
            raise ForetuneError(f"{name} must be on {a.device}, as a is, but is on {tensor.device}")
    k, n = a.shape[-1], b.shape[-1]
    if b.shape[-2] != k:
        raise ForetuneError(f"b must have {k} rows, as many as a has columns, but is {tuple(b.shape)}")
    if b.dim() == 3 and (a.dim() != 3 or a.shape[0] != b.shape[0]):
        raise ForetuneError(f"a must be a batch of {b.shape[0]} matrices, as b is, but is {tuple(a.shape)}")
    _check_bias(bias, n, a)
    if activation is not None and activation not in ACTIVATIONS:
        raise ForetuneError(f"activation must be one of {', '.join(ACTIVATIONS)} but is {activation!r}")


def is_placed(tensor: torch.Tensor) -> bool:
    """Whether a stored operand begins at a multiple of 16 bytes, and its rows do."""
    return tensor.data_ptr() % ALIGNMENT_BYTES == 0 and tensor.stride(-2) * tensor.element_size() % ALIGNMENT_BYTES == 0


def _check_bias(bias: Any, n: int, a: torch.Tensor) -> None:
    if bias is None:
        return
    if not isinstance(bias, torch.Tensor) or bias.shape != (n,):
        got = tuple(bias.shape) if isinstance(bias, torch.Tensor) else type(bias).__name__
        raise ForetuneError(f"bias must be a tensor of ({n},) but is {got}")
    if (bias.dtype, bias.device) != (a.dtype, a.device):
        raise ForetuneError(f"bias must be of {a.dtype} on {a.device} but is of {bias.dtype} on {bias.device}")


def _is_transposed(matrix: torch.Tensor) -> bool:
    """Whether it is to be read along its columns: where it is a vector, which can be read either way, along that."""
    rows, columns = matrix.shape[-2:]
    return _has_rows(matrix.mT) and (rows > columns or not _has_rows(matrix))


def _has_rows(matrix: torch.Tensor) -> bool:
    """Whether rows are contiguous, do not overlap, and one matrix of a batch follows the other."""
    rows, columns = matrix.shape[-2:]
    contiguous = (matrix.stride(-1) == 1 or columns == 1) and matrix.stride(-2) >= columns
    return contiguous and (matrix.dim() == 2 or len(matrix) == 1 or matrix.stride(0) == rows * matrix.stride(-2))


def _stored(matrix: torch.Tensor, batch: int, is_transposed: bool, copies: bool) -> torch.Tensor:
    if matrix.dim() == 3 and batch == 1:
        matrix = matrix.reshape(-1, matrix.shape[-1])
    if is_transposed:
        matrix = matrix.mT
    if copies:
        matrix = matrix.contiguous()
    return matrix if matrix.dim() == 3 else matrix[None]
