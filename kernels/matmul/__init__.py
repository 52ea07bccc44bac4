"""Dense GEMM: y = activation(a @ b + bias) of one matrix or a batch, in every layout.

Importing this package imports neither torch nor triton, which prediction does not need; the public function imports
them on first access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..registry import attach_ops
from .family import Matmul

if TYPE_CHECKING:
    from .op import matmul

__all__ = ["Matmul", "matmul"]

__getattr__, __dir__ = attach_ops(__name__, {"matmul": ".op"})
