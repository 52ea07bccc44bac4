"""What a problem of the dense GEMM says beside its sizes: how its operands are stored, and what follows the product."""

from __future__ import annotations

from ...datasets import Problem

#: How operands are stored where it is not as a linear layer has them (a (M, K), b (N, K), so that y = a @ b.T): a as
#: (K, M), b as (K, N). The gradient of a layer's input has B_KN, that of its weight both.
A_KM, B_KN = LAYOUTS = ("a_km", "b_kn")
BIAS = "bias"
ACTIVATIONS = ("relu", "gelu", "silu")
FLAGS = (*LAYOUTS, BIAS, *ACTIVATIONS)
#: float32 is multiplied as tf32; int8 is summed in int32, which the output has then. Else the output has the dtype of
#: the operands.
DTYPES = ("bf16", "fp16", "fp32", "int8")
#: What TMA, and one load of a thread, want rows to begin at multiples of.
ALIGNMENT_BYTES = 16


def output_dtype(problem: Problem) -> str:
    """The dtype of y.

    >>> output_dtype(Problem.of("matmul", batch=1, m=16, n=64, k=64, dtype="int8"))
    'int32'
    """
    return "int32" if problem.dtype == "int8" else problem.dtype_name


def activation_of(problem: Problem) -> str:
    """The activation that follows, or "none"."""
    return next((flag for flag in problem.flags if flag in ACTIVATIONS), "none")


def row_lengths(problem: Problem) -> tuple[str, str, str]:
    """The dimensions that rows of a, b and y run along.

    >>> row_lengths(Problem.of("matmul", batch=1, m=16, n=64, k=64, flags=("b_kn",)))
    ('k', 'n', 'n')
    """
    return ("m" if A_KM in problem.flags else "k"), ("n" if B_KN in problem.flags else "k"), "n"


def is_aligned(problem: Problem) -> bool:
    """Whether all rows are whole numbers of 16 bytes of operands: only then can TMA move them, and loads be wide.

    >>> layer = {"batch": 1, "m": 7, "n": 64}
    >>> is_aligned(Problem.of("matmul", **layer, k=64)), is_aligned(Problem.of("matmul", **layer, k=60))
    (True, False)
    """
    unit = ALIGNMENT_BYTES // problem.itemsize
    return not any(problem[dim] % unit for dim in row_lengths(problem))


def call_dims(problem: Problem) -> tuple[str, ...]:
    """The dimensions that are another at every call, the tokens: M, but K where both operands are stored along it, as
    for the gradient of a weight. None where rows run along it, so that a rounded problem is as aligned as its own."""
    if A_KM not in problem.flags:
        return ("m",)
    return ("k",) if B_KN in problem.flags else ()
