"""RMSNorm of query and key heads and rotary embedding, fused: forward and backward.

Importing this imports neither torch nor triton: a prediction needs neither.
"""

from __future__ import annotations

from .measurable import RmsNormRopeBackward, RmsNormRopeForward

__all__ = ["RmsNormRopeBackward", "RmsNormRopeForward"]
