"""RMSNorm of query and key heads and rotary embedding, fused: forward and backward.

Importing this imports neither torch nor triton: a prediction needs neither. The op does, when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..op_imports import attach_ops
from .family import RmsNormRopeBackward, RmsNormRopeForward

if TYPE_CHECKING:
    from .op import rms_norm_rope

__all__ = ["RmsNormRopeBackward", "RmsNormRopeForward", "rms_norm_rope"]

__getattr__, __dir__ = attach_ops(__name__, {"rms_norm_rope": ".op"})
