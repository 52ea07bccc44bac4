"""Grouped GEMM: one matrix product a group, rows sorted by group; forward, dX and dW.

Importing this imports neither torch nor triton: a prediction needs neither. The op does, when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..op_imports import attach_ops
from .measurable import GroupedGemmDW, GroupedGemmDX, GroupedGemmForward
from .space import estimate_smem_bytes

if TYPE_CHECKING:
    from .op import grouped_gemm
    from .unsloth import KernelConfigBackward_dW, KernelConfigBackward_dX, KernelConfigForward, unsloth_grouped_gemm

__all__ = [
    "GroupedGemmDW",
    "GroupedGemmDX",
    "GroupedGemmForward",
    "KernelConfigBackward_dW",
    "KernelConfigBackward_dX",
    "KernelConfigForward",
    "estimate_smem_bytes",
    "grouped_gemm",
    "unsloth_grouped_gemm",
]

__getattr__, __dir__ = attach_ops(
    __name__,
    {
        "grouped_gemm": ".op",
        "unsloth_grouped_gemm": ".unsloth",
        "KernelConfigForward": ".unsloth",
        "KernelConfigBackward_dX": ".unsloth",
        "KernelConfigBackward_dW": ".unsloth",
    },
)
