"""A family for each op that Inductor has Triton templates for; its configs are the choices that Inductor lists.

`inductor:mm` (mm, addmm, bmm, baddbmm and scaled_mm) can be collected; all can be predicted. Importing this imports
neither torch nor triton. `foretune.use("inductor")` (integrations/) applies the predictions in Inductor.
"""

from __future__ import annotations

from .measurable import InductorMM
from .templates import (
    InductorConvolution,
    InductorFlexAttention,
    InductorFlexBackward,
    InductorFlexDecoding,
    InductorGroupedMM,
)

__all__ = [
    "InductorConvolution",
    "InductorFlexAttention",
    "InductorFlexBackward",
    "InductorFlexDecoding",
    "InductorGroupedMM",
    "InductorMM",
]
