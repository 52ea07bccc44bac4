"""The ops that Inductor has Triton templates for, each a family: its own choices, as it lists and generates them.

`inductor:mm` (mm, addmm, bmm, baddbmm and scaled_mm) can be collected; all can be predicted. Importing this imports
neither torch nor triton. `foretune.use("inductor")` (integrations/) puts the predictions in front of Inductor.
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
