"""RMSNorm of query and key heads and rotary embedding, fused: forward and backward.

Importing this imports neither torch nor triton: a prediction needs neither. The op does, when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..op_imports import imported_op
from .family import RmsNormRopeBackward, RmsNormRopeForward

if TYPE_CHECKING:
    from .op import rms_norm_rope

__all__ = ["RmsNormRopeBackward", "RmsNormRopeForward", "rms_norm_rope"]


def __getattr__(name: str) -> Any:
    if name == "rms_norm_rope":
        return globals().setdefault(name, imported_op(".op", __name__, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
