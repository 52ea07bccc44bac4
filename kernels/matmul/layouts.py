"""The flags of a dense GEMM: how its operands are stored, and what follows the product."""

from __future__ import annotations

from ...datasets import DeviceSpec, Problem

#: Storage that differs from a linear layer's, which has a (M, K) and b (N, K), so that y = a @ b.T: A_KM stores a as
#: (K, M), B_KN stores b as (K, N). The gradient of a layer's input has B_KN; that of its weight has both.
A_KM, B_KN = LAYOUTS = ("a_km", "b_kn")
BIAS = "bias"
ACTIVATIONS = ("relu", "gelu", "silu")
FLAGS = (*LAYOUTS, BIAS, *ACTIVATIONS)
#: The dtypes of the operands, and of the output, except that int8 is summed in int32, which is then the output's dtype.
#: float32 is multiplied as tf32.
DTYPES = ("bf16", "fp16", "fp32", "int8")
#: Rows must begin at multiples of this many bytes for TMA, and for 16-byte loads.
ALIGNMENT_BYTES = 16
#: A kernel without tiles is faster for at most so many rows.
_FEW_ROWS = 2
#: When a float32 operand that is stored across K is copied first: products per element, products in all, and K from
#: which on an H200 gained at every size (tests/kernels/matmul/turning_on_gpu.py).
_REUSED_FROM, _PRODUCTS_FROM, _DEPTH_FROM = 512, 2**31, 64


def output_dtype(problem: Problem) -> str:
    """Return the dtype of y.

    >>> output_dtype(Problem.of("matmul", batch=1, m=16, n=64, k=64, dtype="int8"))
    'int32'
    """
    return "int32" if problem.dtype == "int8" else problem.dtype_name


def activation_of(problem: Problem) -> str:
    """Return the activation that follows the product, or "none"."""
    return next((flag for flag in problem.flags if flag in ACTIVATIONS), "none")


def row_lengths(problem: Problem) -> tuple[str, str, str]:
    """Return for each of a, b and y the dimension along which it is contiguous in memory.

    >>> row_lengths(Problem.of("matmul", batch=1, m=16, n=64, k=64, flags=("b_kn",)))
    ('k', 'n', 'n')
    """
    return ("m" if A_KM in problem.flags else "k"), ("n" if B_KN in problem.flags else "k"), "n"


def is_aligned(problem: Problem) -> bool:
    """Return whether all rows are multiples of 16 bytes long, in bytes of the operands.

    Only then can TMA move them, and only then are loads 16 bytes wide.

    >>> layer = {"batch": 1, "m": 7, "n": 64}
    >>> is_aligned(Problem.of("matmul", **layer, k=64)), is_aligned(Problem.of("matmul", **layer, k=60))
    (True, False)
    """
    unit = ALIGNMENT_BYTES // problem.itemsize
    return not any(problem[dim] % unit for dim in row_lengths(problem))


def is_few(problem: Problem) -> bool:
    """Return whether `triton_kernels/few_rows.py` computes a problem: one product x @ w.T of one or two rows.

    >>> is_few(Problem.of("matmul", batch=1, m=2, n=64, k=64)), is_few(Problem.of("matmul", batch=1, m=3, n=64, k=64))
    (True, False)
    """
    few = problem["batch"] == 1 and problem["m"] <= _FEW_ROWS and problem.dtype != "int8"
    return few and is_aligned(problem) and A_KM not in problem.flags and B_KN not in problem.flags


def call_dims(problem: Problem) -> tuple[str, ...]:
    """Return the dimensions that vary from call to call with the number of tokens, which are rounded.

    This is M; or K if both operands are stored along it, as in the gradient of a weight; or no dimension if rows of a
    run along M and rows of b along K, so that rounding never changes whether a problem is aligned.
    """
    if A_KM not in problem.flags:
        return ("m",)
    return ("k",) if B_KN in problem.flags else ()


def worth_turning(problem: Problem, device: DeviceSpec) -> tuple[bool, bool]:
    """Return whether a, and b, should be copied so that their rows run along K before the product.

    This is so for large float32 operands that are stored across K. sm_90's asynchronous products take only 16-bit
    operands transposed (PTX ISA, wgmma), so the kernel rearranges such operands itself, and is several times slower.

    >>> gradient = Problem.of("matmul", batch=1, m=4096, n=4096, k=4096, dtype="fp32", flags=LAYOUTS)
    >>> worth_turning(gradient, DeviceSpec.named("h200"))
    (True, True)
    """
    batch, m, n, k = (problem[dim] for dim in ("batch", "m", "n", "k"))
    if device.arch != "sm_90" or problem.dtype != "fp32" or k < _DEPTH_FROM or batch * m * n * k < _PRODUCTS_FROM:
        return False, False
    turn_a = A_KM in problem.flags and n >= _REUSED_FROM
    # If both are stored across K, copying b alone does not pay: rearranging a is what slows the kernel most.
    turn_b = B_KN in problem.flags and m >= _REUSED_FROM and (turn_a or A_KM not in problem.flags)
    return turn_a, turn_b
