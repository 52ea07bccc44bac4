"""Dense GEMM: y = activation(a @ b + bias) of one matrix or a batch, in every layout.

Importing this imports neither torch nor triton: a prediction needs neither. The op does, when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..op_imports import attach_ops
from .family import Matmul

if TYPE_CHECKING:
    from .op import matmul

__all__ = ["Matmul", "matmul"]

__getattr__, __dir__ = attach_ops(__name__, {"matmul": ".op"})
