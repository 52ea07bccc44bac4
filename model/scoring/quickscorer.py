"""QuickScorer: evaluate a forest for many rows at once, in NumPy alone (Lucchese et al., SIGIR 2015).

Each leaf of a tree is a bit; the leftmost leaf is the highest bit. A split whose test fails (x > threshold) clears the
bits of its left subtree. The highest bit that no failed split clears is the leaf that the row reaches. The failed
splits of a feature are those with a threshold below x. So one table for each feature has, for every interval between
thresholds, the mask of remaining leaves in every tree, and a row's mask is the AND of one table row for each feature.

Rows are configs, and configs of one kind share the columns of a `FeatureGroup`. The masks of a group are computed once
for each kind, and cached for lasting groups. In a long table, columns have few distinct joint values, so the AND is
computed for each of these and shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...datasets.feature_groups import FeatureGroup, renumbered
from .parts import GroupMemo, combined, parts_of

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from .trees import Forest

    Masks = NDArray[np.uint32]

_ALL = np.uint32(0xFFFFFFFF)
_LEAF_BITS = 5  # 32 leaves a tree
#: Masks that are processed at a time: 128 rows x 450 trees x 4 bytes fit in a core's L2 cache next to the tables.
_BLOCK_CELLS = 128 * 450
#: With more rows than this, columns with few distinct joint values are merged.
_LONG = 512
#: The most parts that are tried for merging with another one. The 29 features that differ among a kernel's configs
#: become 4 parts; trying all pairs of a thousand features would take seconds.
_MERGE_TRIES = 32


class QuickScorer:
    """The tables of a forest, built once, so that predicting takes few vector operations."""

    def __init__(self, forest: Forest) -> None:
        trees = len(forest.tree_leaves)
        left = forest.split_left.astype(np.uint64)
        leaves = ((np.uint64(1) << left) - np.uint64(1)) << (32 - left - forest.split_first.astype(np.uint64))
        masks = (~leaves).astype(np.uint32)
        #: The distinct thresholds of all features, ascending: one search finds the intervals of all features.
        self._keys, place = np.unique(_keys(forest.split_threshold, _high(forest.split_feature)), return_inverse=True)
        feature = np.empty(len(self._keys), np.int64)
        feature[place] = forest.split_feature
        #: By feature, the number of features before it in the table. Each has one more row than thresholds.
        self._before = {number: before for before, number in enumerate(np.flatnonzero(np.bincount(feature)).tolist())}
        rows = place + np.array([self._before[number] for number in feature.tolist()], np.intp)[place] + 1
        ends = np.searchsorted(feature, [*self._before], side="right") + np.arange(1, len(self._before) + 1)
        self._table = np.full((max(len(self._keys) + len(self._before), 1), trees), _ALL)
        np.bitwise_and.at(self._table, (rows, forest.split_tree), masks)
        for first, last in pairwise([0, *ends.tolist()]):
            np.bitwise_and.accumulate(self._table[first:last], axis=0, out=self._table[first:last])
        # The value of the leaf with bit b of tree t at (t, b); the padding is never read.
        values = np.zeros((trees, 1 << _LEAF_BITS))
        values[np.arange(1 << _LEAF_BITS) < forest.tree_leaves[:, None]] = forest.leaf_value
        self._values = np.ascontiguousarray(values[:, ::-1]).ravel()
        # A number's highest bit is its exponent as a float64, which stores it in the upper bits with an offset of 1023.
        self._base = (np.arange(trees, dtype=np.int64) << _LEAF_BITS) - 1023
        self._columns: dict[tuple[int, ...], _Columns] = {}
        self._lasting: GroupMemo[Masks] = GroupMemo()

    def predict(self, groups: Sequence[FeatureGroup]) -> NDArray[np.float64]:
        """Return the forest's predictions, the sums over its trees, (n_problems, n_configs), for feature groups."""
        parts = parts_of(groups, self._of_kinds, np.bitwise_and)
        problems, trees = len(parts[0][0]), len(self._base)
        result = np.empty((problems, len(parts[0][1])))
        size = max(1, min(result.shape[1], _BLOCK_CELLS // max(problems * trees, 1)))
        buffers = np.empty((2, problems, size, trees), np.uint32)
        number = np.empty(buffers.shape[1:])
        for start in range(0, result.shape[1], size):
            block = slice(start, start + size)
            left = combined(parts, block, np.bitwise_and, buffers)
            numbers = number[:, : left.shape[1]]
            numbers[:] = left
            leaf = numbers.view(np.int64)
            np.right_shift(leaf, 52, out=leaf)
            np.add(leaf, self._base, out=leaf)
            self._values.take(leaf, mode="clip").sum(axis=2, out=result[:, block])
        return result

    def _of_kinds(self, group: FeatureGroup) -> Masks:
        """Return the mask of the leaves that each distinct row can still reach, (n_problems, n_kinds, n_trees)."""
        if group.lasting:
            return self._lasting(group, lambda: self._left_over(group))
        return self._left_over(group)

    def _left_over(self, group: FeatureGroup) -> Masks:
        """Compute the masks of reachable leaves that `_of_kinds` returns, without its cache."""
        codes = self._codes(group)
        problems, kinds, columns = codes.shape
        rows = np.ascontiguousarray(codes.reshape(problems * kinds, columns).T)
        masks = self._merged(rows) if rows.shape[1] > _LONG and len(rows) else self._all_of(rows)
        return masks.reshape(problems, kinds, -1)

    def _codes(self, group: FeatureGroup) -> NDArray[np.intp]:
        """Return the row of the scorer's tables in which to look up each value, (n_problems, n_kinds, n_used_columns).

        A kind is one of the distinct rows of a group.
        """
        columns = self._columns.get(group.columns)
        if columns is None:
            used = [place for place, column in enumerate(group.columns) if column in self._before]
            features = [group.columns[place] for place in used]
            before = np.array([self._before[feature] for feature in features], np.intp)
            columns = _Columns(np.array(used, np.intp), _high(features), before)
            self._columns[group.columns] = columns
        values = group.values
        if len(columns.used) < len(group.columns):
            values = values.take(columns.used, axis=2)
        codes: NDArray[np.intp] = self._keys.searchsorted(_keys(values, columns.features))
        codes += columns.before
        return codes

    def _all_of(self, rows: NDArray[np.intp]) -> Masks:
        """Return the AND over columns, (n_rows, n_trees), of the table rows in `rows`, (n_columns, n_rows)."""
        masks = np.empty((rows.shape[1], self._table.shape[1]), np.uint32)
        size = max(1, _BLOCK_CELLS // max(len(rows) * self._table.shape[1], 1))
        for start in range(0, len(masks), size):
            block = slice(start, start + size)
            found = self._table.take(rows[:, block], axis=0, mode="clip")
            np.bitwise_and.reduce(found, axis=0, out=masks[block])
        return masks

    def _merged(self, rows: NDArray[np.intp]) -> Masks:
        """Return the same as `_all_of`, faster for many rows: columns with few joint values are merged first."""
        (row, table), *others = _merge([(of_column, self._table) for of_column in rows], rows.shape[1])
        masks = table.take(row, axis=0)
        for row, table in others:
            masks &= table.take(row, axis=0)
        return masks


class _Columns(NamedTuple):
    """The columns of a feature group that a scorer's trees use, and the positions of their features in its table."""

    used: NDArray[np.intp]  # positions of the columns that any tree uses
    features: NDArray[np.int64]  # the features of these columns, from `_high`
    before: NDArray[np.intp]  # the number of features before each in the table


def _keys(values: NDArray[np.floating[Any]], features: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return integers that sort by feature and then by value.

    Args:
        values: The values.
        features: The features, from `_high`; broadcast against `values`.


    >>> keys = _keys(np.array([-2.0, -0.0, 0.0, 1e-30, 3.0, -5.0], np.float32), _high([1, 1, 1, 1, 1, 2]))
    >>> (np.diff(keys) > 0).tolist()
    [True, False, True, True, True]
    """
    bits = np.add(values, 0, dtype=np.float32).view(np.int32)  # -0.0 is 0.0
    # The bits of floats sort like the floats, but in reverse for negative ones.
    keys: NDArray[np.int64] = (bits ^ ((bits >> 31) & 0x7FFFFFFF)) + features
    return keys


def _high(features: ArrayLike) -> NDArray[np.int64]:
    """Return feature numbers shifted to the upper 32 bits of 64-bit integers."""
    high: NDArray[np.int64] = np.asarray(features, np.int64) << 32
    return high


def _merge(parts: list[tuple[NDArray[np.intp], Masks]], rows: int) -> list[tuple[NDArray[np.intp], Masks]]:
    """Merge parts (codes of rows, table of masks) whose joint codes have few distinct values; their AND is the same."""
    limit = rows // 4
    merged: list[tuple[NDArray[np.intp], Masks]] = []
    used = []
    for codes, table in parts:
        seen, codes = renumbered(codes, len(table))
        used.append((codes, table[seen]))
    for codes, table in sorted(used, key=lambda part: len(part[1])):
        for place, (others, other_table) in enumerate(merged[:_MERGE_TRIES]):
            if len(other_table) * len(table) > 8 * rows:
                continue
            seen, joint = renumbered(others * len(table) + codes, len(other_table) * len(table))
            if len(seen) <= limit:
                merged[place] = joint, other_table[seen // len(table)] & table[seen % len(table)]
                break
        else:
            merged.append((codes, table))
    return merged
