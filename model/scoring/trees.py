"""`Forest`: a trained ensemble of trees, stored as flat arrays that cannot represent a cycle.

A tree with L leaves has L - 1 splits, stored in pre-order with the number of leaves in each left subtree. The left
child of split i is split i + 1, and the right child is split i + left[i]. There are no pointers, so a damaged or
hostile file can at worst have a count out of range, which is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ...datasets import BundleError, ForetuneError
from ...datasets.feature_groups import FeatureGroup
from .quickscorer import QuickScorer

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: The most leaves of a tree: `quickscorer` uses one bit of a uint32 for each.
MAX_LEAVES = 32
#: Bounds that limit the memory and time that a file can cause: twice the trees that a ranker can be trained with, ten
#: times its features, and scorer tables (uint32 cells, 128 MiB) seven times as large as those of 450 trees with 255
#: thresholds for each of 40 features. At these bounds 1,000 configs take 1.0 s and 300 MB the first time (2026-11).
MAX_TREES, MAX_FEATURES, _MAX_TABLE_CELLS = 4096, 512, 1 << 25


@dataclass(frozen=True, eq=False)
class Forest:
    """An additive ensemble of trees with float32 comparisons `x[feature] <= threshold` and no missing values.

    Raises:
        BundleError: An array is invalid; the message names it.

    >>> stump = Forest(  # x[0] <= 0.5 ? 1 : 2, plus the constant 10
    ...     n_features=np.array(1),
    ...     tree_leaves=np.array([2, 1], np.uint8),
    ...     split_feature=np.array([0], np.uint16),
    ...     split_threshold=np.array([0.5], np.float32),
    ...     split_left=np.array([1], np.uint8),
    ...     leaf_value=np.array([1.0, 2.0, 10.0]),
    ... )
    >>> stump.predict(np.array([[0.5], [0.6]])).tolist()
    [11.0, 12.0]
    """

    n_features: NDArray[np.int64]  # ()
    tree_leaves: NDArray[np.uint8]  # (n_trees,) 1 to 32; a tree of one leaf is a constant
    split_feature: NDArray[np.uint16]  # (n_splits,) the feature that is compared
    split_threshold: NDArray[np.float32]  # (n_splits,) a row goes left if x <= threshold
    split_left: NDArray[np.uint8]  # (n_splits,) leaves in the left subtree
    leaf_value: NDArray[np.floating[Any]]  # (n_leaves,) tree by tree, left to right; float64, or float32 if `compact`

    def __post_init__(self) -> None:
        self._check_shapes()
        _ = self.split_first  # raises an error for inconsistent counts

    def _check_shapes(self) -> None:
        """Check the dtypes, shapes and bounds of the arrays. Raises `BundleError`."""
        for name, (dtypes, rank) in _LAYOUT.items():
            array = getattr(self, name)
            if not isinstance(array, np.ndarray) or array.dtype.name not in dtypes or array.ndim != rank:
                wanted = " or ".join(dtypes)
                raise BundleError(f"forest array {name} must be {wanted} with {rank} axes but is {_described(array)}")
        if not 1 <= self.n_features <= MAX_FEATURES:
            raise BundleError(f"forest array n_features must be between 1 and {MAX_FEATURES} but is {self.n_features}")
        if len(self.tree_leaves) > MAX_TREES:
            raise BundleError(f"a forest may have at most {MAX_TREES} trees but has {len(self.tree_leaves)}")
        if not len(self.tree_leaves) or self.tree_leaves.min() < 1 or self.tree_leaves.max() > MAX_LEAVES:
            raise BundleError(f"forest array tree_leaves must hold counts between 1 and {MAX_LEAVES}")
        leaves = int(self.tree_leaves.sum(dtype=np.int64))
        splits = leaves - len(self.tree_leaves)
        for name, length in (
            ("leaf_value", leaves),
            ("split_feature", splits),
            ("split_threshold", splits),
            ("split_left", splits),
        ):
            if len(getattr(self, name)) != length:
                raise BundleError(f"forest array {name} must have {length} entries but has {len(getattr(self, name))}")
        for name in ("leaf_value", "split_threshold"):
            if not np.isfinite(getattr(self, name)).all():
                raise BundleError(f"forest array {name} must be finite")
        if splits and self.split_feature.max() >= self.n_features:
            raise BundleError(f"forest array split_feature must be in 0..{self.n_features - 1}")
        if splits * len(self.tree_leaves) > _MAX_TABLE_CELLS and self._table_cells() > _MAX_TABLE_CELLS:
            raise BundleError(
                f"a forest of {len(self.tree_leaves)} trees and {splits} splits is too large to score: its tables "
                f"would have {self._table_cells()} cells, but at most {_MAX_TABLE_CELLS} are allowed"
            )

    def _table_cells(self) -> int:
        """Return the number of cells of the tables that `QuickScorer` builds from this forest.

        They have a column for each tree, and for each feature one row more than it has thresholds.
        """
        order = np.lexsort((self.split_threshold, self.split_feature))
        feature, threshold = np.diff(self.split_feature[order]) != 0, np.diff(self.split_threshold[order]) != 0
        rows = int((feature | threshold).sum()) + 1 + int(feature.sum()) + 1
        return rows * len(self.tree_leaves)

    @cached_property
    def reach(self) -> float:
        """An upper bound on the absolute value of predictions: the sum of each tree's largest leaf."""
        first = np.cumsum(self.tree_leaves, dtype=np.int64) - self.tree_leaves
        return float(np.maximum.reduceat(np.abs(self.leaf_value), first).sum(dtype=np.float64))

    @cached_property
    def split_tree(self) -> NDArray[np.int64]:
        """The index of the tree that each split is in, (n_splits,)."""
        result: NDArray[np.int64] = np.repeat(np.arange(len(self)), self.tree_leaves.astype(np.int64) - 1)
        return result

    @cached_property
    def split_first(self) -> NDArray[np.int64]:
        """The leftmost leaf under each split, numbered within its tree, (n_splits,)."""
        first = np.zeros(len(self.split_left), np.int64)
        # All trees at once, level by level. For each split: its index, its leftmost leaf, its number of leaves.
        size = self.tree_leaves[self.tree_leaves > 1].astype(np.int64)
        node = np.cumsum(size - 1) - (size - 1)
        start = np.zeros(len(size), np.int64)
        while len(node):
            left = self.split_left[node].astype(np.int64)
            if (left < 1).any() or (left >= size).any():
                raise BundleError(
                    "forest array split_left does not describe trees: a subtree has too few or too many leaves"
                )
            first[node] = start
            node = np.concatenate([node + 1, node + left])
            start = np.concatenate([start, start + left])
            size = np.concatenate([left, size - left])
            inner = size > 1
            node, start, size = node[inner], start[inner], size[inner]
        return first

    @cached_property
    def _scorer(self) -> QuickScorer:
        return QuickScorer(self)

    def __len__(self) -> int:
        """Return the number of trees."""
        return len(self.tree_leaves)

    def predict(self, features: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
        """Return the sum of all trees for each row, (n_rows,), of features, (n_rows, n_features).

        A row's sum does not depend on the other rows. Values are rounded to the nearest float32.

        Raises:
            ForetuneError: The number of features is wrong, or a value is not finite.
        """
        if features.ndim != 2 or features.shape[1] != self.n_features:
            raise ForetuneError(f"features must be (rows, {self.n_features}) but are {features.shape}")
        if not len(features):
            return np.empty(0)
        columns = tuple(range(int(self.n_features)))
        result: NDArray[np.float64] = self.predict_groups(
            [FeatureGroup(columns, features[None], np.arange(len(features)))]
        )[0]
        return result

    def predict_groups(self, groups: Sequence[FeatureGroup]) -> NDArray[np.float64]:
        """Return the predictions for features in groups, (n_problems, n_configs); see `predict`."""
        check_finite(groups)
        return self._scorer.predict(groups)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays by name, for storing; `Forest(**arrays)` gives an equal forest."""
        return {name: getattr(self, name) for name in _LAYOUT}

    def affine(self, scale: float, offset: float = 0.0) -> Forest:
        """Return a forest that predicts `scale` times this one's prediction plus `offset`, added as a one-leaf tree."""
        arrays = self.arrays() | {"leaf_value": self.leaf_value * scale}
        if offset:
            arrays["tree_leaves"] = np.append(self.tree_leaves, np.uint8(1))
            arrays["leaf_value"] = np.append(arrays["leaf_value"], offset)
        return Forest(**arrays)

    def compact(self) -> Forest:
        """Return a forest whose leaf values are rounded to float32, half the size.

        Predictions change by about a millionth, which is far below any difference between configs.
        """
        return Forest(**self.arrays() | {"leaf_value": self.leaf_value.astype(np.float32)})

    def __add__(self, other: Forest) -> Forest:
        """Return a forest that predicts the sum of this one's and the other one's predictions."""
        if other.n_features != self.n_features:
            raise ForetuneError(f"forests over {self.n_features} and {other.n_features} features cannot be added")
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in _LAYOUT if name != "n_features"}
        return Forest(n_features=self.n_features, **{name: np.concatenate(pair) for name, pair in pairs.items()})

    @classmethod
    def from_lightgbm(cls, dump: Mapping[str, Any]) -> Forest:
        """Return the forest of a LightGBM `Booster.dump_model()`.

        Raises:
            ForetuneError: The model has categorical splits, missing values, or trees with more than 32 leaves.
        """
        trees: list[int] = []
        splits: list[tuple[int, float, int]] = []
        values: list[float] = []
        for tree in dump["tree_info"]:
            leaves = _flatten(tree["tree_structure"], splits, values)
            if leaves > MAX_LEAVES:
                raise ForetuneError(f"a tree may have at most {MAX_LEAVES} leaves but has {leaves}")
            trees.append(leaves)
        feature, threshold, left = zip(*splits, strict=True) if splits else ((), (), ())
        return cls(
            n_features=np.array(dump["max_feature_idx"] + 1, np.int64),
            tree_leaves=np.array(trees, np.uint8),
            split_feature=np.array(feature, np.uint16),
            split_threshold=_rounded_down(np.array(threshold, np.float64)),
            split_left=np.array(left, np.uint8),
            leaf_value=np.array(values, np.float64),
        )


#: The dtypes that each array may have, and its number of axes.
_LAYOUT: dict[str, tuple[tuple[str, ...], int]] = {
    "n_features": (("int64",), 0),
    "tree_leaves": (("uint8",), 1),
    "split_feature": (("uint16",), 1),
    "split_threshold": (("float32",), 1),
    "split_left": (("uint8",), 1),
    "leaf_value": (("float64", "float32"), 1),
}
assert tuple(_LAYOUT) == tuple(field.name for field in fields(Forest))


def _flatten(node: Mapping[str, Any], splits: list[tuple[int, float, int]], values: list[float]) -> int:
    """Append a subtree's splits and leaf values in pre-order, and return its number of leaves."""
    if "split_feature" not in node:
        values.append(float(node["leaf_value"]))
        return 1
    if node["decision_type"] != "<=" or node["missing_type"] != "None":
        raise ForetuneError(f"cannot score a split of type {node['decision_type']}, missing {node['missing_type']}")
    place = len(splits)
    splits.append((0, 0.0, 0))
    left = _flatten(node["left_child"], splits, values)
    splits[place] = (int(node["split_feature"]), float(node["threshold"]), min(left, 255))
    return left + _flatten(node["right_child"], splits, values)


def _rounded_down(thresholds: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return the largest float32 values that are not above the thresholds.

    Comparing float32 features with them gives the same results as with the float64 thresholds.


    >>> _rounded_down(np.array([0.1, 0.5])).tolist()
    [0.09999999403953552, 0.5]
    """
    nearest = thresholds.astype(np.float32)
    return np.where(nearest > thresholds, np.nextafter(nearest, np.float32(-np.inf)), nearest)


def check_finite(groups: Sequence[FeatureGroup]) -> None:
    """Check that features are finite. Lasting groups are not checked again.

    Raises:
        ForetuneError: A value is not finite; the message names its column.
    """
    for group in groups:
        if not group.lasting and not np.isfinite(group.values).all():
            column = int(np.flatnonzero(~np.isfinite(group.values).all(axis=(0, 1)))[0])
            raise ForetuneError(f"features must be finite, but column {group.columns[column]} is not")


def _described(array: object) -> str:
    """Return the dtype and shape of an array, or the type of another object, for a message."""
    return f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
