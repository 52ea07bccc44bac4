"""What a learned ranker must beat, behind the same interface."""

from __future__ import annotations

from .plain import EstimateRanker, NearestRanker, RandomRanker, StaticRanker

__all__ = ["EstimateRanker", "NearestRanker", "RandomRanker", "StaticRanker"]
