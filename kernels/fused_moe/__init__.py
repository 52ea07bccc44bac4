"""The fused MoE kernel of serving engines, SGLang's and vLLM's, as families, and the tuned files that they read.

Importing this imports neither torch nor triton nor an engine.
"""

from __future__ import annotations

from .engines import EngineMissingError, Layer, installed
from .measurable import FusedMoeDown, FusedMoeUp

__all__ = ["EngineMissingError", "FusedMoeDown", "FusedMoeUp", "Layer", "installed"]
