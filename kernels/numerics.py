"""Numerics classes of matrix products: what decides the bits of a sum over the contraction.

Derived from the kernels' source and from binaries that Triton 3.9 compiles for sm_90, and not yet verified on cards
(tests/kernels/numerics_on_gpu.py does that). The arguments, for kernels that keep one accumulator for each element:

- An instruction adds the products of a fixed number of elements of K (8 to 32, by dtype) to the accumulator, and the
  compiler chains the instructions in ascending order of K. So the bits depend on the kind of instruction, and not on
  the tile, the loads (pointers or TMA), stages, warps, the order of tiles, or which warps multiply (CONSUMERS).
- wgmma takes 64 rows and groups of four warps, and the compiler uses it wherever a tile has these; other tiles run on
  mma.sync. Both may round in different places, so they are different kinds.
- Zeros past the end of K change no sum except -0 and, in fp8, truncated bits, so the padded length counts.
- float32 without tensor cores is a chain of fused multiply-adds in ascending order of K.
- Bias, scales and activations are applied to each element in float32 by the same functions in all configs.
"""

from __future__ import annotations

#: The rows that an instruction of a warp group takes, and the warps of a group.
_ROWS, _WARPS = 64, 4


def instruction_of(rows: int, num_warps: int) -> str:
    """Return the kind of instruction that multiplies a tile with this many rows: of a warp group, or of one warp.

    >>> instruction_of(64, 4), instruction_of(32, 4), instruction_of(128, 2)
    ('warp_group', 'warp', 'warp')
    """
    return "warp_group" if rows >= _ROWS and num_warps % _WARPS == 0 else "warp"


def padded(length: int, step: int) -> int:
    """Return the length of a contraction that is rounded up to whole steps.

    >>> padded(2880, 64), padded(2880, 128)
    (2880, 2944)
    """
    return -(-length // step) * step


def product_class(rows: int, num_warps: int, step: int, depth: int, dtype: str) -> tuple[str, int]:
    """Return the class of a product that sums in one accumulator, with float32 outside of tensor cores.

    Args:
        rows: The rows of a tile.
        num_warps: The warps that multiply it.
        step: BLOCK_K.
        depth: The length of the contraction.
        dtype: The operands' dtype.

    >>> product_class(128, 8, 64, 4096, "bf16") == product_class(64, 4, 128, 4096, "bf16")
    True
    """
    return "fma" if dtype == "fp32" else instruction_of(rows, num_warps), padded(depth, step)
