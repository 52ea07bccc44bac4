"""The fused MoE kernel of the serving engines SGLang and vLLM: two families, and the tuned files that the engines read.

Importing this package imports neither torch nor triton nor an engine.
"""

from __future__ import annotations

from .engines import EngineMissingError, Layer, installed
from .measurable import FusedMoeDown, FusedMoeUp

__all__ = ["EngineMissingError", "FusedMoeDown", "FusedMoeUp", "Layer", "installed"]
