"""Numerics classes of matrix products: what decides the bits of a sum over the contraction.

Each kernel keeps one accumulator for each element, and the compiler chains instructions, which add the products of a
fixed number of elements of K (8 to 32, by dtype), in ascending order of K. So the bits do not depend on the tile, the
loads (pointers or TMA), stages, warps, the order of tiles, or which warps multiply (CONSUMERS). That is derived from
the kernels' source and from binaries for sm_90, and no comparison on an NVIDIA H200 or H100 contradicts it.

Two things are not derived, but verified there by hashes of results (tests/kernels/numerics_on_gpu.py), and so only
assumed for the dtypes of each family that were compared:

- wgmma takes 64 rows and groups of four warps, and the compiler uses it wherever a tile has these; other tiles run on
  mma.sync. Both gave equal bits in 16 bits and in tf32, but never in fp8, where they are different classes.
- Zeros past the end of K, up to a multiple of BLOCK_K, changed no result. (They could change the sign of a zero.)

float32 without tensor cores is a chain of fused multiply-adds in ascending order of K. Bias, scales and activations are
applied to each element in float32 by the same functions in all configs.
"""

from __future__ import annotations

from collections.abc import Sequence

#: The rows that an instruction of a warp group takes, and the warps of a group.
_ROWS, _WARPS = 64, 4


def instruction_of(rows: int, num_warps: int) -> str:
    """Return the kind of instruction that multiplies a tile with this many rows: of a warp group, or of one warp.

    >>> instruction_of(64, 4), instruction_of(32, 4), instruction_of(128, 2)
    ('warp_group', 'warp', 'warp')
    """
    return "warp_group" if rows >= _ROWS and num_warps % _WARPS == 0 else "warp"


def padded(length: int, step: int) -> int:
    """Return the length of a contraction, rounded up to a multiple of `step`.

    >>> padded(2880, 64), padded(2880, 128)
    (2880, 2944)
    """
    return -(-length // step) * step


def product_class(
    rows: int, num_warps: int, step: int, depth: int, dtype: str, compared: Sequence[str]
) -> tuple[str] | tuple[str, int]:
    """Return the numerics class of a tiled matrix product: configs of equal classes compute identical bits.

    It is for products that sum in one accumulator per element; those of "fp32" run without tensor cores.

    Args:
        rows: The rows of a tile.
        num_warps: The warps that multiply it.
        step: BLOCK_K.
        depth: The length of the contraction.
        dtype: The operands' dtype; "tf32" for float32 on tensor cores.
        compared: The dtypes for which a card gave equal bits with both kinds of instructions and with any BLOCK_K.

    >>> product_class(128, 8, 64, 2880, "bf16", ["bf16"]) == product_class(16, 4, 128, 2880, "bf16", ["bf16"])
    True
    >>> product_class(128, 8, 64, 2880, "fp16", ["bf16"]), product_class(16, 4, 128, 2880, "fp16", ["bf16"])
    (('warp_group', 2880), ('warp', 2944))
    """
    kind = "fma" if dtype == "fp32" else instruction_of(rows, num_warps)
    if dtype in compared:
        return ("fma" if kind == "fma" else "tensor_core",)
    return kind, padded(depth, step)
