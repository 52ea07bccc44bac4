"""Grouped GEMM: one matrix product per group of rows, forward, dX and dW.

Rows are sorted by group. Importing this package imports neither torch nor triton, which prediction does not need; the
public functions import them on first access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..registry import attach_ops
from .measurable import GroupedGemmDW, GroupedGemmDX, GroupedGemmForward
from .space import estimate_smem_bytes

if TYPE_CHECKING:
    from .op import grouped_gemm
    from .routing import few_rows_gemm, route
    from .unsloth import KernelConfigBackward_dW, KernelConfigBackward_dX, KernelConfigForward, unsloth_grouped_gemm

__all__ = [
    "GroupedGemmDW",
    "GroupedGemmDX",
    "GroupedGemmForward",
    "KernelConfigBackward_dW",
    "KernelConfigBackward_dX",
    "KernelConfigForward",
    "estimate_smem_bytes",
    "few_rows_gemm",
    "grouped_gemm",
    "route",
    "unsloth_grouped_gemm",
]

__getattr__, __dir__ = attach_ops(
    __name__,
    {
        "grouped_gemm": ".op",
        "route": ".routing",
        "few_rows_gemm": ".routing",
        "unsloth_grouped_gemm": ".unsloth",
        "KernelConfigForward": ".unsloth",
        "KernelConfigBackward_dX": ".unsloth",
        "KernelConfigBackward_dW": ".unsloth",
    },
)
