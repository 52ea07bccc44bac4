"""Scaled GEMM: products of fp8 operands that come with scales, dense and grouped.

Importing this imports neither torch nor triton: a prediction needs neither.
"""

from __future__ import annotations

from .measurable import ScaledGemm, ScaledGroupedGemmForward

__all__ = ["ScaledGemm", "ScaledGroupedGemmForward"]
