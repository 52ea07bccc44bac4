"""Ranking: features in, predicted slowdowns out; the bundle that carries it; the evaluation that judges it.

Importing this imports nothing of it before it is asked for; who predicts needs NumPy alone, LightGBM is imported to
train, pandas to read a dataset.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .baselines import (
        EstimateRanker,
        NearestRanker,
        RandomRanker,
        RegimeRanker,
        Rivals,
        StaticRanker,
        choose_rivals,
    )
    from .bundle import Bundle, TrainedFamily, load_bundle, open_bundle
    from .cross_validation import cross_validate, evaluate_bundle
    from .evaluation import Evaluation
    from .gbdt import LightGBMRanker
    from .metrics import Summary, geomean, noise_floor, summarise, top_k_regret
    from .ranker import Ranker, UnseenCardRanker, ranker_on
    from .scoring.trees import Forest
    from .splits import split_folds, split_groups
    from .train import adapt_bundle, train_bundle
    from .training_set import TrainingSet, check_measured, check_sources

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
    "TrainingSet",
    "UnseenCardRanker",
    "adapt_bundle",
    "check_measured",
    "check_sources",
    "choose_rivals",
    "cross_validate",
    "evaluate_bundle",
    "geomean",
    "load_bundle",
    "noise_floor",
    "open_bundle",
    "ranker_on",
    "split_folds",
    "split_groups",
    "summarise",
    "top_k_regret",
    "train_bundle",
]

_HOMES = {
    "Forest": ".scoring.trees",
    "LightGBMRanker": ".gbdt",
    "adapt_bundle": ".train",
    "train_bundle": ".train",
    **dict.fromkeys(
        (
            "EstimateRanker",
            "NearestRanker",
            "RandomRanker",
            "RegimeRanker",
            "Rivals",
            "StaticRanker",
            "choose_rivals",
        ),
        ".baselines",
    ),
    **dict.fromkeys(("Bundle", "TrainedFamily", "load_bundle", "open_bundle"), ".bundle"),
    **dict.fromkeys(("cross_validate", "evaluate_bundle"), ".cross_validation"),
    "Evaluation": ".evaluation",
    **dict.fromkeys(("Summary", "geomean", "noise_floor", "summarise", "top_k_regret"), ".metrics"),
    **dict.fromkeys(("Ranker", "UnseenCardRanker", "ranker_on"), ".ranker"),
    **dict.fromkeys(("TrainingSet", "check_measured", "check_sources"), ".training_set"),
    **dict.fromkeys(("split_folds", "split_groups"), ".splits"),
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return globals().setdefault(name, getattr(import_module(_HOMES[name], __name__), name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
