"""Contributions of features to a ranker's predictions: Shapley values, equal to LightGBM's `pred_contrib`.

NumPy alone computes them from the flat arrays of a bundle, so that neither LightGBM and its parser nor torch is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..datasets import DeviceSpec, Family, KernelConfig, Problem
from ..datasets.feature_groups import joined
from .gbdt import LightGBMRanker
from .scoring.trees import Forest

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
    """Return, for each explained config, the names of the knobs whose values do not occur in the training data.

    If `recorded` is None, only knobs whose training values the ranker itself contains are checked; others are never
    returned. For a family whose features read binaries, the ranker has the measured configs. The network lists the
    values of each feature that had 3 to 12 distinct ones in the training data; these are a knob's values if the feature
    has the knob's name and equals it in all candidates.

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


#: The smallest share of background rows on a path: small enough to count as zero, and safe to divide by.
_HARDLY_ANY = 1e-12


def tree_shap(
    forest: Forest, rows: NDArray[np.float32], background: NDArray[np.float32]
) -> tuple[NDArray[np.float64], float]:
    """Return the Shapley values of each row's features, and the mean prediction.

    A row's values and the mean prediction sum to the row's prediction. This is path-dependent TreeSHAP (Lundberg, Erion
    and Lee, arXiv:1802.03888): at a split on an unknown feature, both branches count, weighted by their shares of the
    background rows. The value of a leaf is a product over the features on its path, so its Shapley value is an integral
    of a polynomial, which Gauss-Legendre quadrature computes exactly.

    Args:
        forest: The trees.
        rows: The rows to explain, (n_rows, n_features).
        background: The rows that represent all data, (n_background, n_features).

    Returns:
        The values, (n_rows, n_features), and the mean prediction.

    >>> stump = Forest(  # x[1] <= 0.5 ? 0 : 4
    ...     n_features=np.array(2), tree_leaves=np.array([2], np.uint8), split_feature=np.array([1], np.uint16),
    ...     split_threshold=np.array([0.5], np.float32), split_left=np.array([1], np.uint8),
    ...     leaf_value=np.array([0.0, 4.0]),
    ... )
    >>> table = np.array([[7, 0], [7, 0], [7, 0], [7, 1]], np.float32)
    >>> values, mean = tree_shap(stump, table[2:], table)
    >>> values.round(6).tolist(), mean
    ([[0.0, -1.0], [0.0, 3.0]], 1.0)
    """
    values, mean = np.zeros((int(forest.n_features), len(rows))), 0.0
    split = leaf = 0
    for leaves in forest.tree_leaves.astype(int).tolist():
        value = forest.leaf_value[leaf : leaf + leaves]
        tree = _paths(forest, split, leaves, background)
        mean += float(tree.shares.prod(axis=1) @ value)
        if leaves > 1:
            splits = slice(split, split + leaves - 1)
            _add_values(values, rows, value, tree, forest.split_feature[splits], forest.split_threshold[splits])
        split, leaf = split + leaves - 1, leaf + leaves
    return values.T, mean


@dataclass(frozen=True)
class _Paths:
    """The paths from a tree's root to its leaves, arrays with a value for each leaf and split, (n_leaves, n_splits)."""

    on_path: NDArray[np.bool_]  # whether the split is on the leaf's path
    left: NDArray[np.bool_]  # whether the path goes left at the split
    shares: NDArray[np.float64]  # share of the background rows at the split that follow the path; 1 off the path


def _paths(forest: Forest, start: int, leaves: int, background: NDArray[np.float32]) -> _Paths:
    """Return the paths in the tree of `leaves` leaves whose splits begin at `start`.

    The `background` rows, (n_background, n_features), give the branches of each split their shares.
    """
    on_path, left = np.zeros((2, leaves, leaves - 1), bool)
    shares = np.ones((leaves, leaves - 1))
    open_nodes = [(start, 0, leaves, np.arange(len(background)))]
    while open_nodes:
        node, first, size, reached = open_nodes.pop()
        if size == 1:
            continue
        split, middle, last = node - start, first + int(forest.split_left[node]), first + size
        lefts = background[reached, forest.split_feature[node]] <= forest.split_threshold[node]
        share = float(lefts.mean()) if len(reached) else 0.5
        on_path[first:last, split], left[first:middle, split] = True, True
        shares[first:middle, split], shares[middle:last, split] = share, 1 - share
        open_nodes.append((node + 1, first, middle - first, reached[lefts]))
        open_nodes.append((node + middle - first, middle, last - middle, reached[~lefts]))
    return _Paths(on_path, left, shares)


def _add_values(
    values: NDArray[np.float64],  # (n_features, n_rows); the values of one tree are added
    rows: NDArray[np.float32],
    leaf_value: NDArray[np.floating[Any]],
    paths: _Paths,
    feature: NDArray[np.uint16],
    threshold: NDArray[np.float32],
) -> None:
    """Add the Shapley values of one tree, for each row to explain, to `values`.

    `feature` and `threshold` are those of the tree's splits, (n_splits,), and `leaf_value` are its leaves' values.
    """
    follows = paths.left[:, :, None] == (rows[:, feature] <= threshold).T  # (n_leaves, n_splits, n_rows)
    follows |= ~paths.on_path[:, :, None]
    used = np.unique(feature)
    # A feature that splits a path several times counts once: either all its splits are known, or none.
    own = [feature == one for one in used]
    known = np.stack([follows[:, splits].all(axis=1) for splits in own]).astype(np.float64)
    unknown = np.stack([paths.shares[:, splits].prod(axis=1) for splits in own])[:, :, None]
    unknown = np.maximum(unknown, _HARDLY_ANY)  # known: (n_used, n_leaves, n_rows)
    longest = int(np.stack([paths.on_path[:, splits].any(axis=1) for splits in own]).sum(axis=0).max())
    nodes, weights = np.polynomial.legendre.leggauss(longest // 2 + 1)
    integral = np.zeros(known.shape)
    for node, weight in zip((nodes + 1) / 2, weights / 2, strict=True):
        factors = (1 - node) * unknown + node * known
        integral += weight * factors.prod(axis=0) / factors
    values[used] += np.einsum("fln,l->fn", integral * (known - unknown), leaf_value)
