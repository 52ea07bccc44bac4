"""QuickScorer: a forest's predictions for many rows at once, in NumPy alone.

A tree's leaves are bits, the leftmost one the highest. A split whose test fails (x > threshold) rules out the leaves
of its left subtree; the highest bit that no failed split rules out is the leaf a row ends in (Lucchese et al., SIGIR
2015). The failed splits of a feature are those with a threshold below x, so one table per feature holds, for every
interval between thresholds, what all its failed splits leave over in every tree: a row's leaves are the AND of one
table row per feature.

The rows are configs, and configs of one kind share columns (see `FeatureGroup`): what those leave over is computed
once for each kind, and what a lasting group leaves over once and for all. In a long table columns take few values
jointly, so their AND is computed for each of those and shared; and a column in one interval for all rows is folded
into a vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ...datasets.feature_groups import FeatureGroup, problems_in
from .lasting import OfLasting

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Table = NDArray[np.floating[Any]]
    Masks = NDArray[np.uint32]

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
        self._tables: dict[int, Masks] = {}  # by feature, (n_thresholds + 1, n_trees)
        for feature in np.unique(forest.split_feature).tolist():
            mine = np.flatnonzero(forest.split_feature == feature)
            thresholds, interval = np.unique(forest.split_threshold[mine], return_inverse=True)
            table = np.full((len(thresholds) + 1, trees), _ALL)
            np.bitwise_and.at(table, (interval + 1, forest.split_tree[mine]), masks[mine])
            self._thresholds[feature] = thresholds
            self._tables[feature] = np.bitwise_and.accumulate(table, axis=0)
        # The leaf of bit b of tree t at t * 32 + b; the padding is never reached.
        values = np.zeros((trees, 1 << _LEAF_BITS))
        used = np.arange(1 << _LEAF_BITS) < forest.tree_leaves[:, None]
        values[used] = forest.leaf_value
        self._values = np.ascontiguousarray(values[:, ::-1]).ravel()
        # The highest bit of a number is its exponent as a float64, which has that + 1023 in the upper bits.
        self._base = (np.arange(trees, dtype=np.int64) << _LEAF_BITS) - 1023
        self._of_group = OfLasting(self._of_each_kind)

    def predict(
        self, groups: Sequence[FeatureGroup], problems: slice = slice(None), rows: NDArray[np.intp] | None = None
    ) -> NDArray[np.float64]:
        """Sums over all trees, (n_problems, n_rows): of some of the groups' problems, on some of their configs."""
        count = problems_in(groups, problems)
        parts: list[tuple[Masks, NDArray[np.intp]]] = []
        for group in groups:
            kind, values = group.kind, group.values
            if group.lasting:
                masks = np.broadcast_to(self._of_group(group), (count, values.shape[1], len(self._base)))
                kind = kind if rows is None else kind[rows]
            else:
                values = values[problems]
                if rows is not None:
                    kind, seen = _compact(kind[rows], values.shape[1])
                    values = values[:, seen]
                masks = self._of_each_kind(replace(group, values=values))
            parts.append((masks, kind))
        return np.stack([self._sums([(masks[place], kind) for masks, kind in parts]) for place in range(count)])

    def _sums(self, parts: Sequence[tuple[Masks, NDArray[np.intp]]]) -> NDArray[np.float64]:
        """(n_rows,) from what the kinds of each part leave over, (n_kinds, n_trees), and the rows' kinds, (n_rows,)."""
        rows = len(parts[0][1])
        result = np.empty(rows)
        bits, more = np.empty((2, min(rows, _BLOCK_ROWS), len(self._base)), np.uint32)
        number = np.empty(bits.shape)
        leaf = number.view(np.int64)
        for start in range(0, rows, _BLOCK_ROWS):
            block = slice(start, start + _BLOCK_ROWS)
            size = len(result[block])
            left, other = bits[:size], more[:size]
            for place, (masks, kind) in enumerate(parts):
                masks.take(kind[block], axis=0, out=other if place else left, mode="clip")
                if place:
                    np.bitwise_and(left, other, out=left)
            number[:size] = left
            np.right_shift(leaf[:size], 52, out=leaf[:size])
            np.add(leaf[:size], self._base, out=leaf[:size])
            self._values.take(leaf[:size], mode="clip").sum(axis=1, out=result[block])
        return result

    def _of_each_kind(self, group: FeatureGroup) -> Masks:
        """What each kind leaves over, (n_problems, n_kinds, n_trees)."""
        table = group.values.reshape(-1, len(group.columns))
        columns = np.ascontiguousarray(table.T, dtype=np.float32)
        same = (columns == columns[:, :1]).all(axis=1).tolist()
        constant = np.full(len(self._base), _ALL)
        parts: list[tuple[NDArray[np.intp], Masks]] = []  # the code of each row, and a table by code
        for column, is_same, feature in zip(columns, same, group.columns, strict=True):
            if feature not in self._tables:
                continue
            thresholds, of_feature = self._thresholds[feature], self._tables[feature]
            if is_same:
                constant &= of_feature[thresholds.searchsorted(column[0])]
            else:
                parts.append((thresholds.searchsorted(column), of_feature))
        masks = np.empty((len(table), len(constant)), np.uint32)
        gathered = np.empty((_BLOCK_ROWS, len(constant)), np.uint32)
        if len(table) > _BLOCK_ROWS:
            parts = _merge(parts, len(table))
        for start in range(0, len(table), _BLOCK_ROWS):
            bits = masks[start : start + _BLOCK_ROWS]
            bits[:] = constant
            more = gathered[: len(bits)]
            for codes, by_code in parts:
                by_code.take(codes[start : start + _BLOCK_ROWS], axis=0, out=more, mode="clip")
                np.bitwise_and(bits, more, out=bits)
        return masks.reshape(*group.values.shape[:2], -1)


def _merge(parts: list[tuple[NDArray[np.intp], Masks]], rows: int) -> list[tuple[NDArray[np.intp], Masks]]:
    """Fewer parts that say the same: those whose codes take few values jointly become one."""
    limit = rows // 4
    merged: list[tuple[NDArray[np.intp], Masks]] = []
    used = [
        (codes, table[seen]) for codes, seen, table in ((*_compact(codes, len(table)), table) for codes, table in parts)
    ]
    for codes, table in sorted(used, key=lambda part: len(part[1])):
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
