"""Scaled GEMM: products of fp8 operands that come with scales, dense and grouped.

Importing this imports neither torch nor triton: a prediction needs neither. The ops do, when they are first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..op_imports import imported_op
from .family import ScaledGemm, ScaledGroupedGemmForward

if TYPE_CHECKING:
    from .op import scaled_gemm, scaled_grouped_gemm
    from .quantize import quantize_blocks_128, quantize_groups, quantize_rows, quantize_rows_128, quantize_tensor

__all__ = [
    "ScaledGemm",
    "ScaledGroupedGemmForward",
    "quantize_blocks_128",
    "quantize_groups",
    "quantize_rows",
    "quantize_rows_128",
    "quantize_tensor",
    "scaled_gemm",
    "scaled_grouped_gemm",
]

_HOMES = {
    **dict.fromkeys(("scaled_gemm", "scaled_grouped_gemm"), ".op"),
    **dict.fromkeys([name for name in __all__ if name.startswith("quantize_")], ".quantize"),
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return globals().setdefault(name, imported_op(_HOMES[name], __name__, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
