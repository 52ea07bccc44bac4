"""What a learned ranker must beat, behind the same interface."""

from __future__ import annotations

from .by_regime import RegimeRanker
from .ck_tile import CKTileRanker
from .flagtune import FlagTuneRanker
from .plain import EstimateRanker, NearestRanker, RandomRanker, StaticRanker
from .registry import BASELINES, Baseline, Rivals, choose_rivals

__all__ = [
    "BASELINES",
    "Baseline",
    "CKTileRanker",
    "EstimateRanker",
    "FlagTuneRanker",
    "NearestRanker",
    "RandomRanker",
    "RegimeRanker",
    "Rivals",
    "StaticRanker",
    "choose_rivals",
]
