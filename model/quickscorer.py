"""QuickScorer: a forest's predictions for many rows at once, in NumPy alone.

A tree's leaves are bits, left to right. A split whose test fails (x > threshold) rules out the leaves of its
left subtree; the lowest bit that no failed split rules out is the leaf a row ends in (Lucchese et al., SIGIR
2015). The failed splits of a feature are those with a threshold below x, so one table per feature holds, for
every interval between thresholds, what all its failed splits leave over in every tree: a row's leaves are the
AND of one table row per feature.

Configs of one problem share most of what describes them, and three shortcuts live off that: features in one
interval for all rows are folded into one vector; features that take few values jointly (everything computed
from BLOCK_M and BLOCK_N, say) are merged into one table first; what is left is gathered in blocks that stay in
the core's cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ALL = np.uint32(0xFFFFFFFF)
_LEAF_BITS = 5  # 32 leaves a tree
#: Rows scored at a time: 128 rows x 450 trees x 4 bytes stay in a core's L2 next to the tables.
_BLOCK_ROWS = 128
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
    def split_feature(self) -> NDArray[np.int32]: ...  # (n_splits,), as the others
    @property
    def split_threshold(self) -> NDArray[np.float64]: ...
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
        kept = ~(((np.uint64(1) << left) - np.uint64(1)) << forest.split_first.astype(np.uint64))
        masks = kept.astype(np.uint32)
        self._features: list[int] = []
        self._thresholds: list[NDArray[np.float64]] = []  # per feature, ascending, distinct
        self._tables: list[NDArray[np.uint32]] = []  # per feature, (n_thresholds + 1, n_trees)
        for feature in np.unique(forest.split_feature):
            mine = np.flatnonzero(forest.split_feature == feature)
            thresholds, interval = np.unique(forest.split_threshold[mine], return_inverse=True)
            table = np.full((len(thresholds) + 1, trees), _ALL)
            np.bitwise_and.at(table, (interval + 1, forest.split_tree[mine]), masks[mine])
            self._features.append(int(feature))
            self._thresholds.append(thresholds)
            self._tables.append(np.bitwise_and.accumulate(table, axis=0))
        # Leaves of tree t at t * 32; the padding is never reached.
        self._values = np.zeros((trees, 1 << _LEAF_BITS))
        used = np.arange(1 << _LEAF_BITS) < forest.tree_leaves[:, None]
        self._values[used] = forest.leaf_value
        # A power of two as float32 has its exponent + 127 in the upper bits: that turns a bit into its number.
        self._base = (np.arange(trees, dtype=np.int64) << _LEAF_BITS) - 127

    def predict(self, features: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
        """(n_rows, n_features) finite -> (n_rows,) sums over all trees."""
        rows = len(features)
        result = np.empty(rows)
        if not rows:
            return result
        constant, parts = self._parts(np.ascontiguousarray(features.T, dtype=np.float64))
        left = np.empty((_BLOCK_ROWS, len(constant)), np.uint32)
        gathered = np.empty_like(left)
        for start in range(0, rows, _BLOCK_ROWS):
            block = slice(start, start + _BLOCK_ROWS)
            size = min(_BLOCK_ROWS, rows - start)
            bits, more = left[:size], gathered[:size]
            bits[:] = constant
            for codes, table in parts:
                table.take(codes[block], axis=0, out=more, mode="clip")
                np.bitwise_and(bits, more, out=bits)
            np.bitwise_and(bits, np.negative(bits, out=more), out=bits)  # the lowest bit
            leaf = (bits.astype(np.float32).view(np.int32) >> 23) + self._base
            result[block] = self._values.ravel().take(leaf).sum(axis=1)
        return result

    def _parts(
        self, columns: NDArray[np.float64]
    ) -> tuple[NDArray[np.uint32], list[tuple[NDArray[np.intp], NDArray[np.uint32]]]]:
        """What all rows share, (n_trees,), and a list of (code of each row, table by code)."""
        constant = np.full(self._values.shape[0], _ALL)
        varying: list[tuple[NDArray[np.intp], NDArray[np.uint32]]] = []
        extremes = np.stack([columns.min(axis=1), columns.max(axis=1)], axis=1)
        for feature, thresholds, table in zip(self._features, self._thresholds, self._tables, strict=True):
            low, high = thresholds.searchsorted(extremes[feature])
            if low == high:
                constant &= table[low]
            else:
                codes, seen = _compact(thresholds.searchsorted(columns[feature]) - low, high - low + 1)
                varying.append((codes, table[seen + low]))
        return constant, _merge(varying, columns.shape[1])


def _merge(
    parts: list[tuple[NDArray[np.intp], NDArray[np.uint32]]], rows: int
) -> list[tuple[NDArray[np.intp], NDArray[np.uint32]]]:
    """Fewer parts that say the same: those whose codes take few values jointly become one."""
    limit = rows // 4
    merged: list[tuple[NDArray[np.intp], NDArray[np.uint32]]] = []
    for codes, table in sorted(parts, key=lambda part: len(part[1])):
        for place, (others, other_table) in enumerate(merged[:_MERGE_TRIES]):
            if len(other_table) * len(table) > 8 * rows:
                continue
            joint, seen = _compact(others * len(table) + codes, len(other_table) * len(table))
            if len(seen) <= limit:
                merged[place] = joint, other_table[seen // len(table)] & table[seen % len(table)]
                break
        else:
            merged.append((codes, table))
    return merged


def _compact(codes: NDArray[np.intp], bound: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Codes below `bound` renumbered without gaps, and the old code of each new one."""
    taken = np.zeros(bound, np.bool_)
    taken[codes] = True
    seen = taken.nonzero()[0]
    number = np.empty(bound, np.intp)
    number[seen] = np.arange(len(seen))
    return number[codes], seen
