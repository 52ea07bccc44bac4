"""What a call of the op may be given, and as which problem its tensors are seen: layouts follow from strides."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...datasets import ForetuneError, Problem, torch_dtype
from ..op_calls import are_placed, check_tensor
from .layouts import A_KM, ACTIVATIONS, ALIGNMENT_BYTES, B_KN, BIAS, DTYPES
from .triton_kernels.turning import turned_copy

_DTYPES = {torch_dtype(name): name for name in DTYPES}


class Operands(NamedTuple):
    """How the tensors of one call are seen by the kernel: what holds for all calls with tensors of these shapes and
    strides."""

    problem: Problem
    out_shape: tuple[int, ...]  # of what the caller gets
    a_is_transposed: bool  # stored as (batch, K, M)
    b_is_transposed: bool  # stored as (batch, N, K)

    def stored(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """a and b as the kernel takes them, three dimensions with contiguous rows; views, where they are readable."""
        batch = self.problem["batch"]
        return _stored(a, batch, self.a_is_transposed), _stored(b, batch, self.b_is_transposed)

    def copies(self, a: torch.Tensor, b: torch.Tensor, *, aligned: bool) -> bool:
        """Whether one of the two has to be copied for the kernel to read it, wherever it begins. Rows are `aligned`
        where they are whole numbers of 16 bytes."""
        stored_a, stored_b = self.stored(a, b)
        return not (_lies_well(a, stored_a, aligned) and _lies_well(b, stored_b, aligned))

    def readable(
        self, a: torch.Tensor, b: torch.Tensor, *, aligned: bool, turned: tuple[bool, bool]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """a and b, or copies laid out alike where the kernel could not read them: aligned rows begin at multiples of
        16 bytes. What is to be `turned` is copied with rows along K."""
        stored_a, stored_b = self.stored(a, b)
        good_a = _lies_well(a, stored_a, aligned) and (not aligned or are_placed([a]))
        good_b = _lies_well(b, stored_b, aligned) and (not aligned or are_placed([b]))
        if not good_a or turned[0]:
            a = turned_copy(stored_a).view(a.shape) if good_a else _copied(a, self.a_is_transposed and not turned[0])
        if not good_b or turned[1]:
            b = turned_copy(stored_b).view(b.mT.shape).mT if good_b else _copied(b, self.b_is_transposed or turned[1])
        return a, b


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
    return Operands(problem, out_shape, a_is_transposed, b_is_transposed)


def check_operands(a: Any, b: Any, bias: Any, activation: str | None) -> None:
    """Raises `ForetuneError` naming what is wrong with a call."""
    for name, tensor in (("a", a), ("b", b)):
        check_tensor(name, tensor)
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


def _check_bias(bias: Any, n: int, a: torch.Tensor) -> None:
    if bias is None:
        return
    check_tensor("bias", bias)
    if bias.shape != (n,):
        raise ForetuneError(f"bias must be a tensor of ({n},) but is {tuple(bias.shape)}")
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
