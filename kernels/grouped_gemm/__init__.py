"""Grouped GEMM: one matrix product a group, rows sorted by group; forward, dX and dW.

Importing this imports neither torch nor triton: a prediction needs neither. The op does, when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..op_imports import imported_op
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

_HOMES = {
    "grouped_gemm": ".op",
    "unsloth_grouped_gemm": ".unsloth",
    "KernelConfigForward": ".unsloth",
    "KernelConfigBackward_dX": ".unsloth",
    "KernelConfigBackward_dW": ".unsloth",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return globals().setdefault(name, imported_op(_HOMES[name], __name__, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
