"""The gated MLP (SwiGLU, GeGLU): both up projections and the activation in one GEMM.

Importing this imports neither torch nor triton: a prediction needs neither. The op does, when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..op_imports import attach_ops
from .family import GatedMlp

if TYPE_CHECKING:
    from .op import gated_mlp

__all__ = ["GatedMlp", "gated_mlp"]

__getattr__, __dir__ = attach_ops(__name__, {"gated_mlp": ".op"})
