"""RMSNorm of query and key heads and rotary embedding, fused: forward and backward.

Importing this package imports neither torch nor triton, which prediction does not need; the public function imports
them on first access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..registry import attach_ops
from .family import RmsNormRopeBackward, RmsNormRopeForward

if TYPE_CHECKING:
    from .op import rms_norm_rope

__all__ = ["RmsNormRopeBackward", "RmsNormRopeForward", "rms_norm_rope"]

__getattr__, __dir__ = attach_ops(__name__, {"rms_norm_rope": ".op"})
