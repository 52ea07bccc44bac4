"""Contributions of features to a ranker's predictions, compared with the other configs of the same problem.

NumPy alone computes it from the flat arrays of a bundle, so it needs neither LightGBM nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..datasets import DeviceSpec, Family, KernelConfig, Problem
from ..datasets.feature_groups import joined
from .gbdt import LightGBMRanker
from .report.shapley import tree_shap

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: The names of two parts that are not features: the network, and the family's estimate on an unseen card.
NETWORK, ESTIMATE = "network", "analytic estimate"


@dataclass(frozen=True)
class Contributions:
    """What each feature, the network and the analytic estimate add to the log of a config's predicted time.

    Each config has a row of parts, whose sum is the logarithm of the config's predicted time over the geometric mean of
    all candidates of the problem: a negative part makes the config faster than the average candidate.
    """

    names: tuple[str, ...]  # (n_parts,) the family's features, `NETWORK`, `ESTIMATE`
    values: NDArray[np.float64]  # (n_configs, n_features) the features, averaged over routings where they are unknown
    logs: NDArray[np.float64]  # (n_configs, n_parts)


def feature_contributions(
    ranker: LightGBMRanker,
    family: Family,
    problem: Problem,
    device: DeviceSpec,
    candidates: Sequence[KernelConfig],
    explained: Sequence[int],
    *,
    unseen_card: bool = False,
) -> Contributions:
    """Return what each feature adds to the predictions of some candidates of a problem.

    The trees' part is divided by path-dependent TreeSHAP (Lundberg, Erion and Lee, arXiv:1802.03888), with all
    candidates as the background: a feature that is the same for all configs, such as a size of the problem, contributes
    nothing by itself. The network's part is not divided. Where the prediction is marginalized over routings, so are the
    contributions.

    Args:
        ranker: The family's fitted ranker.
        family: The kernel's family.
        problem: The problem to predict, which is `Family.at_call_time` of a launch's problem.
        device: The device that is predicted for.
        candidates: The configs to compare with, (n_candidates,).
        explained: The positions in `candidates` of the configs to explain, (n_configs,).
        unseen_card: Whether the prediction includes the family's estimate (see `UnseenCardRanker`).

    Raises:
        ForetuneError: The features are not finite.
        BundleError: The ranker was trained on other features.
    """
    weights, groups = ranker.marginal(family, problem, device, candidates)
    rows, n_features = list(explained), len(ranker.feature_names_)
    values, logs = np.zeros((len(rows), n_features)), np.zeros((len(rows), n_features + 2))
    for place, weight in enumerate(weights):
        table = joined(groups, place)
        values += weight * table[rows]
        logs[:, :n_features] += weight * tree_shap(ranker.forest_, table[rows], table)[0]
        if ranker.network_ is not None:
            predicted = ranker.network_.predict(table)
            logs[:, n_features] += weight * (predicted[rows] - predicted.mean())
    if unseen_card:
        estimates = np.log(np.asarray(family.estimate_us(problem, device, candidates), np.float64))
        logs[:, n_features + 1] = ranker.trust_ * (estimates[rows] - estimates.mean())
    return Contributions((*ranker.feature_names_, NETWORK, ESTIMATE), values, logs)


def unmeasured_knobs(
    ranker: LightGBMRanker,
    family: Family,
    problem: Problem,
    device: DeviceSpec,
    candidates: Sequence[KernelConfig],
    explained: Sequence[int],
    recorded: Mapping[str, Sequence[str]] | None = None,
) -> list[tuple[str, ...]]:
    """Return the knobs of each explained config whose values are not in the training data, as far as it is recorded.

    A bundle without `recorded` values has two other records. The network lists the values of each feature that had 3 to
    12 distinct ones in the training data; if such a feature has a knob's name and equals it in all candidates, it
    records that knob's values. For a family whose features read binaries, the bundle has the measured configs
    themselves. Other knobs are not recorded, so they are never returned.

    Args:
        ranker: The family's fitted ranker.
        family: The kernel's family.
        problem: The problem, for which features are computed.
        device: The device that is predicted for.
        candidates: The configs to choose from, (n_candidates,).
        explained: The positions in `candidates` of the configs to look at, (n_configs,).
        recorded: The measured values of each knob, as in `TrainedFamily.measured`; None if they are not recorded.

    Raises:
        ForetuneError: The features cannot be computed.
    """
    knobs_of = [config.to_json() for config in candidates]
    if recorded is not None:
        return [
            tuple(knob for knob, values in recorded.items() if str(knobs_of[place].get(knob)) not in values)
            for place in explained
        ]
    missing: list[set[str]] = [set() for _ in explained]
    measured = [config.to_json() for facts in ranker.binaries_.values() for config in facts]
    for knob in family.knobs if measured else ():
        values = {str(one.get(knob)) for one in measured}
        for found, place in zip(missing, explained, strict=True):
            if str(knobs_of[place].get(knob)) not in values:
                found.add(knob)
    if ranker.network_ is not None:
        plausible = (family.plausible(problem)[0][1],)
        binaries = ranker.known_binaries(family, problem)
        table = joined(family.feature_groups(plausible, device, candidates, binaries))
        knobs = {knob.lower(): knob for knob in family.knobs}
        for column in np.unique(ranker.network_.which).tolist():
            knob = knobs.get(ranker.feature_names_[column].lower(), "")
            if not knob or [one.get(knob) for one in knobs_of] != table[:, column].tolist():
                continue
            known = ranker.network_.value[ranker.network_.which == column]
            for found, is_known in zip(missing, np.isin(table[list(explained), column], known), strict=True):
                if not is_known:
                    found.add(knob)
    return [tuple(knob for knob in family.knobs if knob in found) for found in missing]
