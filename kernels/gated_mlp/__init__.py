"""The gated MLP (SwiGLU, GeGLU): both up projections and the activation in one GEMM.

Importing this package imports neither torch nor triton, because a prediction needs neither. The op `gated_mlp` is
imported, with both, on its first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..registry import attach_ops
from .family import GatedMlp

if TYPE_CHECKING:
    from .op import gated_mlp

__all__ = ["GatedMlp", "gated_mlp"]

__getattr__, __dir__ = attach_ops(__name__, {"gated_mlp": ".op"})
