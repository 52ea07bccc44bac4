"""Covers: a few configs for a dimension whose size is only known at run time, and a table that selects one by size."""

from __future__ import annotations

from .cover import Cover, make_cover, measured_cover
from .hint_matrix import HintMatrix, make_hint_matrix

__all__ = ["Cover", "HintMatrix", "make_cover", "make_hint_matrix", "measured_cover"]
