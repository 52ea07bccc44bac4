"""The gated MLP (SwiGLU, GeGLU): both up projections and the activation in one GEMM.

Importing this imports neither torch nor triton: a prediction needs neither. The op does, when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..op_imports import imported_op
from .family import GatedMlp

if TYPE_CHECKING:
    from .op import gated_mlp

__all__ = ["GatedMlp", "gated_mlp"]


def __getattr__(name: str) -> Any:
    if name == "gated_mlp":
        return globals().setdefault(name, imported_op(".op", __name__, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
