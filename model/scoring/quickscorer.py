"""QuickScorer: a forest's predictions for many rows at once, in NumPy alone.

A tree's leaves are bits, the leftmost one the highest. A split whose test fails (x > threshold) rules out the leaves
of its left subtree; the highest bit that no failed split rules out is the leaf a row ends in (Lucchese et al., SIGIR
2015). The failed splits of a feature are those with a threshold below x, so one table per feature holds, for every
interval between thresholds, what all its failed splits leave over in every tree: a row's leaves are the AND of one
table row per feature.

The rows are configs, and configs of one kind share columns (see `FeatureGroup`): what those leave over is computed
once for each kind, and what a lasting group leaves over once and for all. In a long table columns take few values
jointly, so their AND is computed for each of those and shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ...datasets.feature_groups import FeatureGroup, problems_in, renumbered
from .lasting import OfLasting
from .parts import parts_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Table = NDArray[np.floating[Any]]
    Masks = NDArray[np.uint32]

_ALL = np.uint32(0xFFFFFFFF)
_LEAF_BITS = 5  # 32 leaves a tree
#: Masks looked at at a time: 128 rows x 450 trees x 4 bytes stay in a core's L2 next to the tables.
_BLOCK_CELLS = 128 * 450
#: Beyond so many rows it pays to look for columns that take few values jointly.
_LONG = 512
#: A part is merged with one of so many others: the 29 features that differ among a kernel's configs become 4 parts, and
#: a thousand features would take seconds if each were tried with each.
_MERGE_TRIES = 32


class Splits(Protocol):
    """What the tables are made of: the flat arrays of a `Forest`."""

    @property
    def tree_leaves(self) -> NDArray[np.uint8]: ...  # (n_trees,)
    @property
    def leaf_value(self) -> NDArray[np.float64]: ...  # (n_leaves,)
    @property
    def split_feature(self) -> NDArray[np.uint16]: ...  # (n_splits,), as the others
    @property
    def split_threshold(self) -> NDArray[np.float32]: ...
    @property
    def split_left(self) -> NDArray[np.uint8]: ...
    @property
    def split_first(self) -> NDArray[np.int64]: ...
    @property
    def split_tree(self) -> NDArray[np.int64]: ...


class QuickScorer:
    """The tables of one forest. Made once; `predict` is then a few vector operations."""

    def __init__(self, forest: Splits) -> None:
        trees = len(forest.tree_leaves)
        left = forest.split_left.astype(np.uint64)
        leaves = ((np.uint64(1) << left) - np.uint64(1)) << (32 - left - forest.split_first.astype(np.uint64))
        masks = (~leaves).astype(np.uint32)
        self._thresholds: dict[int, NDArray[np.float32]] = {}  # by feature, ascending, distinct
        self._first: dict[int, int] = {}  # by feature, where its rows in the table begin: one for each interval
        tables = [np.full((1, trees), _ALL)]
        for feature in np.flatnonzero(np.bincount(forest.split_feature)).tolist():
            mine = np.flatnonzero(forest.split_feature == feature)
            thresholds, interval = np.unique(forest.split_threshold[mine], return_inverse=True)
            table = np.full((len(thresholds) + 1, trees), _ALL)
            np.bitwise_and.at(table, (interval + 1, forest.split_tree[mine]), masks[mine])
            self._thresholds[feature], self._first[feature] = thresholds, sum(map(len, tables))
            tables.append(np.bitwise_and.accumulate(table, axis=0))
        self._table = np.concatenate(tables)
        # The leaf of bit b of tree t at t * 32 + b; the padding is never reached.
        values = np.zeros((trees, 1 << _LEAF_BITS))
        used = np.arange(1 << _LEAF_BITS) < forest.tree_leaves[:, None]
        values[used] = forest.leaf_value
        self._values = np.ascontiguousarray(values[:, ::-1]).ravel()
        # The highest bit of a number is its exponent as a float64, which has that + 1023 in the upper bits.
        self._base = (np.arange(trees, dtype=np.int64) << _LEAF_BITS) - 1023
        self._of_group = OfLasting(self._of_each_kind)

    def predict(self, groups: Sequence[FeatureGroup]) -> NDArray[np.float64]:
        """Sums over all trees, (n_problems, n_rows)."""
        parts = parts_of(groups, self._of_group, np.bitwise_and)
        result = np.empty(len(parts[0][1]))
        rows = max(1, min(len(result), _BLOCK_CELLS // len(self._base)))
        bits, more = np.empty((2, rows, len(self._base)), np.uint32)
        number = np.empty(bits.shape)
        leaf = number.view(np.int64)
        for start in range(0, len(result), rows):
            block = slice(start, start + rows)
            size = len(result[block])
            left, other = bits[:size], more[:size]
            for place, (masks, row) in enumerate(parts):
                masks.take(row[block], axis=0, out=other if place else left, mode="clip")
                if place:
                    np.bitwise_and(left, other, out=left)
            number[:size] = left
            np.right_shift(leaf[:size], 52, out=leaf[:size])
            np.add(leaf[:size], self._base, out=leaf[:size])
            self._values.take(leaf[:size], mode="clip").sum(axis=1, out=result[block])
        return result.reshape(problems_in(groups), -1)

    def _of_each_kind(self, group: FeatureGroup) -> Masks:
        """What each kind leaves over, (n_problems, n_kinds, n_trees)."""
        table = group.values.reshape(-1, len(group.columns))
        columns = np.ascontiguousarray(table.T, dtype=np.float32)
        used = [(place, feature) for place, feature in enumerate(group.columns) if feature in self._thresholds]
        codes = np.empty((len(used), len(table)), np.intp)  # rows of the table of masks
        for of_column, (place, feature) in zip(codes, used, strict=True):
            of_column[:] = self._thresholds[feature].searchsorted(columns[place])
        codes += np.array([self._first[feature] for _, feature in used], np.intp)[:, None]
        masks = self._merged(codes) if len(table) > _LONG and used else self._left_over(self._table, codes)
        return masks.reshape(*group.values.shape[:2], -1)

    def _left_over(self, table: Masks, codes: NDArray[np.intp]) -> Masks:
        """(n_rows, n_trees) from the rows of the table that each column's interval has, (n_columns, n_rows)."""
        masks = np.empty((codes.shape[1], table.shape[1]), np.uint32)
        size = max(1, _BLOCK_CELLS // max(len(codes) * table.shape[1], 1))
        for start in range(0, len(masks), size):
            block = slice(start, start + size)
            found = table.take(codes[:, block], axis=0, mode="clip")
            np.bitwise_and.reduce(found, axis=0, out=masks[block])
        return masks

    def _merged(self, codes: NDArray[np.intp]) -> Masks:
        """The same of a long table."""
        (row, table), *others = _merge([(of_column, self._table) for of_column in codes], codes.shape[1])
        masks = table.take(row, axis=0)
        for row, table in others:
            masks &= table.take(row, axis=0)
        return masks


def _merge(parts: list[tuple[NDArray[np.intp], Masks]], rows: int) -> list[tuple[NDArray[np.intp], Masks]]:
    """Fewer parts that say the same: those whose codes take few values jointly become one."""
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
