"""QuickScorer: a forest's predictions for many rows at once, in NumPy alone.

A tree's leaves are bits, the leftmost one the highest. A split whose test fails (x > threshold) rules out the leaves
of its left subtree; the highest bit that no failed split rules out is the leaf a row ends in (Lucchese et al., SIGIR
2015). The failed splits of a feature are those with a threshold below x, so one table per feature holds, for every
interval between thresholds, what all its failed splits leave over in every tree: a row's leaves are the AND of one
table row per feature.

The rows are configs, and the same ones problem after problem. Three shortcuts live off that: what the columns that
depend on the configs alone leave over is remembered; the other columns take few values jointly (all configs of one
tile have one number of tiles), so their AND is computed for each of those and shared; and a column in one interval
for all rows is folded into a vector. What is remembered is compared with the table every time, so it costs time where
it does not fit and changes no answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Table = NDArray[np.floating[Any]]
    Masks = NDArray[np.uint32]

_ALL = np.uint32(0xFFFFFFFF)
_LEAF_BITS = 5  # 32 leaves a tree
#: Rows scored at a time: 128 rows x 450 trees x 4 bytes stay in a core's L2 next to the tables.
_BLOCK_ROWS = 128
#: Lists of rows that are remembered, 2 MB each at 1,000 rows and 450 trees.
_MOST_REMEMBERED = 4
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


@dataclass(frozen=True, eq=False)
class _Rows:
    """What tables of the same rows have in common."""

    fixed: tuple[int, ...]  # the columns that say which rows they are
    others: tuple[int, ...]  # those that differ from table to table
    values: Table  # (n_rows, len(fixed)) what the fixed ones hold
    masks: Masks  # (n_rows, n_trees) what these leave over
    first: NDArray[np.intp]  # (n_kinds,) a row of each kind: rows of one kind hold the same in each other column
    kind: NDArray[np.intp]  # (n_rows,)

    def have(self, features: Table) -> bool:
        """Whether the table's rows of one kind are alike."""
        alike = (features[self.first[self.kind]] == features).all(axis=0)
        return bool(alike[list(self.others)].all())


class QuickScorer:
    """The tables of one forest. Made once; `predict` is then a few vector operations."""

    def __init__(self, forest: Splits) -> None:
        trees = len(forest.tree_leaves)
        left = forest.split_left.astype(np.uint64)
        leaves = ((np.uint64(1) << left) - np.uint64(1)) << (32 - left - forest.split_first.astype(np.uint64))
        masks = (~leaves).astype(np.uint32)
        self._thresholds: dict[int, NDArray[np.float64]] = {}  # by feature, ascending, distinct
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
        self._remembered: tuple[_Rows, ...] = ()  # the last one used first

    def predict(self, features: Table, fixed: tuple[int, ...] = ()) -> NDArray[np.float64]:
        """(n_rows, n_features) finite -> (n_rows,) sums over all trees.

        `fixed` are columns that the next table of these rows is expected to have again: what follows from them is
        remembered.
        """
        if not len(features):
            return np.empty(0)
        if not fixed:
            return self._sums(self._masks(features, tuple(self._tables)))
        rows = self._rows(features, fixed)
        return self._sums(rows.masks, rows.kind, self._masks(features[rows.first], rows.others))

    def _sums(
        self, masks: Masks, kind: NDArray[np.intp] | None = None, of_kind: Masks | None = None
    ) -> NDArray[np.float64]:
        """(n_rows,) from what each row, (n_rows, n_trees), and its kind, (n_kinds, n_trees), leave over."""
        result = np.empty(len(masks))
        bits = np.empty((_BLOCK_ROWS, len(self._base)), np.uint32)
        number = np.empty(bits.shape)
        leaf = number.view(np.int64)
        for start in range(0, len(masks), _BLOCK_ROWS):
            block = slice(start, start + _BLOCK_ROWS)
            left = masks[block]
            size = len(left)
            if kind is not None and of_kind is not None:
                of_kind.take(kind[block], axis=0, out=bits[:size], mode="clip")
                left = np.bitwise_and(left, bits[:size], out=bits[:size])
            number[:size] = left
            np.right_shift(leaf[:size], 52, out=leaf[:size])
            np.add(leaf[:size], self._base, out=leaf[:size])
            self._values.take(leaf[:size], mode="clip").sum(axis=1, out=result[block])
        return result

    def _rows(self, features: Table, fixed: tuple[int, ...]) -> _Rows:
        """What is remembered of these rows, or else found out and remembered."""
        remembered = self._remembered
        values = features[:, list(fixed)]
        same = (rows for rows in remembered if rows.fixed == fixed and np.array_equal(rows.values, values))
        known = next(same, None)
        if known is not None and known.have(features):
            return known
        if known is None:
            others = tuple(feature for feature in self._tables if feature not in fixed)
            masks = self._masks(features, tuple(feature for feature in fixed if feature in self._tables))
            differing = features[:, list(others)]
        else:
            others, masks = known.others, known.masks
            # Rows that were told apart once stay so: two problems in turn would else undo each other's kinds.
            differing = np.column_stack([features[:, list(others)], known.kind])
        _, first, kind = np.unique(differing, axis=0, return_index=True, return_inverse=True)
        rows = _Rows(fixed, others, values, masks, first, kind.ravel())
        # Replaced in one step: other threads predict meanwhile.
        self._remembered = (rows, *(one for one in remembered if one is not known))[:_MOST_REMEMBERED]
        return rows

    def _masks(self, features: Table, wanted: tuple[int, ...]) -> Masks:
        """What these columns leave over in each row of the table: (n_rows, n_trees)."""
        constant, parts = self._parts(features, wanted)
        result = np.empty((len(features), len(constant)), np.uint32)
        gathered = np.empty((_BLOCK_ROWS, len(constant)), np.uint32)
        for start in range(0, len(features), _BLOCK_ROWS):
            bits = result[start : start + _BLOCK_ROWS]
            bits[:] = constant
            more = gathered[: len(bits)]
            for codes, table in parts:
                table.take(codes[start : start + _BLOCK_ROWS], axis=0, out=more, mode="clip")
                np.bitwise_and(bits, more, out=bits)
        return result

    def _parts(self, features: Table, wanted: tuple[int, ...]) -> tuple[Masks, list[tuple[NDArray[np.intp], Masks]]]:
        """What all rows share, (n_trees,), and a list of (code of each row, table by code)."""
        columns = np.ascontiguousarray(features.T, dtype=np.float64)
        same = (columns == columns[:, :1]).all(axis=1).tolist()
        constant = np.full(len(self._base), _ALL)
        varying: list[tuple[NDArray[np.intp], Masks]] = []
        for feature in wanted:
            thresholds, table = self._thresholds[feature], self._tables[feature]
            if same[feature]:
                constant &= table[thresholds.searchsorted(columns[feature, 0])]
                continue
            codes, seen = _compact(thresholds.searchsorted(columns[feature]), len(table))
            if len(seen) == 1:
                constant &= table[seen[0]]
            else:
                varying.append((codes, table[seen]))
        return constant, _merge(varying, columns.shape[1])


def _merge(parts: list[tuple[NDArray[np.intp], Masks]], rows: int) -> list[tuple[NDArray[np.intp], Masks]]:
    """Fewer parts that say the same: those whose codes take few values jointly become one."""
    limit = rows // 4
    merged: list[tuple[NDArray[np.intp], Masks]] = []
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
