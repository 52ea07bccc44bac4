"""Scaled GEMM: products of fp8 operands with scales, dense and grouped.

Importing this package imports neither torch nor triton, which prediction does not need; the public functions import
them on first access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..registry import attach_ops
from .dw_family import ScaledGroupedGemmDW
from .family import ScaledGemm, ScaledGroupedGemmForward

if TYPE_CHECKING:
    from .op import scaled_gemm, scaled_grouped_gemm
    from .quantize import quantize_blocks_128, quantize_groups, quantize_rows, quantize_rows_128, quantize_tensor

__all__ = [
    "ScaledGemm",
    "ScaledGroupedGemmDW",
    "ScaledGroupedGemmForward",
    "quantize_blocks_128",
    "quantize_groups",
    "quantize_rows",
    "quantize_rows_128",
    "quantize_tensor",
    "scaled_gemm",
    "scaled_grouped_gemm",
]

__getattr__, __dir__ = attach_ops(
    __name__,
    {
        **dict.fromkeys(("scaled_gemm", "scaled_grouped_gemm"), ".op"),
        **dict.fromkeys([name for name in __all__ if name.startswith("quantize_")], ".quantize"),
    },
)
