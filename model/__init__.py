"""Ranking: features in, predicted slowdowns out; the bundle that carries it; the evaluation that judges it.

Importing this needs NumPy alone; LightGBM is imported to train, pandas to read a dataset.
"""

from __future__ import annotations

from .adapt import adapt_bundle
from .baselines import EstimateRanker, NearestRanker, RandomRanker, RegimeRanker, Rivals, StaticRanker, choose_rivals
from .bundle import Bundle, load_bundle
from .evaluate import cross_validate, evaluate_bundle
from .evaluation import Evaluation
from .gbdt import LightGBMRanker
from .metrics import Summary, geomean, noise_floor, summarise, top_k_regret
from .ranker import Ranker, UnseenCardRanker, ranker_on
from .scoring.trees import Forest
from .sources import check_measured, check_sources, measured_grid
from .splits import split_folds, split_groups
from .train import train_bundle
from .trained_family import TrainedFamily

__all__ = [
    "Bundle",
    "EstimateRanker",
    "Evaluation",
    "Forest",
    "LightGBMRanker",
    "NearestRanker",
    "RandomRanker",
    "Ranker",
    "RegimeRanker",
    "Rivals",
    "StaticRanker",
    "Summary",
    "TrainedFamily",
    "UnseenCardRanker",
    "adapt_bundle",
    "check_measured",
    "check_sources",
    "choose_rivals",
    "cross_validate",
    "evaluate_bundle",
    "geomean",
    "load_bundle",
    "measured_grid",
    "noise_floor",
    "ranker_on",
    "split_folds",
    "split_groups",
    "summarise",
    "top_k_regret",
    "train_bundle",
]
