"""What a problem of the dense GEMM says beside its sizes: how its operands are stored, and what follows the product."""

from __future__ import annotations

from ...datasets import DeviceSpec, Problem

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
#: From how many products on each of its elements, and in all, a float32 operand that lies across K is copied before:
#: on an H200 a gain at each size from there on (tests/kernels/matmul/turning_on_gpu.py).
_REUSED_FROM, _PRODUCTS_FROM, _DEPTH_FROM = 512, 2**31, 64


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


def worth_turning(problem: Problem, device: DeviceSpec) -> tuple[bool, bool]:
    """Whether a, and b, had better be copied with rows along K before the product: float32 where it lies across it, and
    is worth two launches. sm_90's asynchronous products take 16 bits transposed and no more (PTX ISA, wgmma), so that
    the kernel takes such operands apart itself, and is a fraction as fast.

    >>> gradient = Problem.of("matmul", batch=1, m=4096, n=4096, k=4096, dtype="fp32", flags=LAYOUTS)
    >>> worth_turning(gradient, DeviceSpec.named("h200"))
    (True, True)
    """
    batch, m, n, k = (problem[dim] for dim in ("batch", "m", "n", "k"))
    if device.arch != "sm_90" or problem.dtype != "fp32" or k < _DEPTH_FROM or batch * m * n * k < _PRODUCTS_FROM:
        return False, False
    turn_a = A_KM in problem.flags and n >= _REUSED_FROM
    # Of two, b alone is not worth it: a is what the kernel takes apart the slowest.
    turn_b = B_KN in problem.flags and m >= _REUSED_FROM and (turn_a or A_KM not in problem.flags)
    return turn_a, turn_b
