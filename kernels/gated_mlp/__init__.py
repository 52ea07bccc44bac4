"""The gated MLP (SwiGLU, GeGLU): both up projections and the activation in one GEMM.

Importing this imports neither torch nor triton: a prediction needs neither.
"""

from __future__ import annotations

from .measurable import GatedMlp

__all__ = ["GatedMlp"]
