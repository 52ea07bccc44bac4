"""Dense GEMM: y = activation(a @ b + bias) of one matrix or a batch, in every layout.

Importing this imports neither torch nor triton: a prediction needs neither. The op does, when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..op_imports import imported_op
from .family import Matmul

if TYPE_CHECKING:
    from .op import matmul

__all__ = ["Matmul", "matmul"]


def __getattr__(name: str) -> Any:
    if name == "matmul":
        return globals().setdefault(name, imported_op(".op", __name__, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
