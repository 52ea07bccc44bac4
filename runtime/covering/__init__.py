"""Several configs for a dimension whose size is only known at run time: which ones, and which runs when."""

from __future__ import annotations

from .cover import Cover, make_cover, measured_cover
from .hint_matrix import HintMatrix, make_hint_matrix

__all__ = ["Cover", "HintMatrix", "make_cover", "make_hint_matrix", "measured_cover"]
