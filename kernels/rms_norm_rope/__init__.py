"""RMSNorm of query and key heads, fused with rotary embedding: forward and backward.

Importing this package imports neither torch nor triton, because predicting needs neither. The op imports both on its
first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..op_imports import attach_ops
from .family import RmsNormRopeBackward, RmsNormRopeForward

if TYPE_CHECKING:
    from .op import rms_norm_rope

__all__ = ["RmsNormRopeBackward", "RmsNormRopeForward", "rms_norm_rope"]

__getattr__, __dir__ = attach_ops(__name__, {"rms_norm_rope": ".op"})
