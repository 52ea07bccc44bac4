"""Compute the Shapley values of features in a forest's predictions, equal to LightGBM's `pred_contrib`.

They are computed from a bundle's flat arrays, without LightGBM and its parser.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..scoring.trees import Forest

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
    """The paths from a tree's root to its leaves; each array is (n_leaves, n_splits)."""

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
