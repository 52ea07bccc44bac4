"""The quick way to score configs gives what walking down every tree gives, to the last bit, in any order of tables."""

from __future__ import annotations

import numpy as np
import pytest
from foretune.datasets import DeviceSpec, load
from foretune.kernels import find_family
from foretune.model import Forest, load_bundle

H200 = DeviceSpec.named("h200")
FAMILIES = ("grouped_gemm_fwd", "grouped_gemm_dx", "grouped_gemm_dw")


def walked(forest, table):
    """Down every tree for every row, one level at a time: (n_rows,)."""
    leaves = forest.tree_leaves.astype(np.int64)
    shape = len(table), len(leaves)
    node = np.broadcast_to(np.cumsum(leaves - 1) - (leaves - 1), shape).ravel()
    leaf = np.broadcast_to(np.cumsum(leaves) - leaves, shape).ravel()
    size, row = np.broadcast_to(leaves, shape).ravel(), np.repeat(np.arange(len(table)), len(leaves))
    node, leaf, size = node.copy(), leaf.copy(), size.copy()
    while len(inner := np.flatnonzero(size > 1)):
        split = node[inner]
        left = forest.split_left[split].astype(np.int64)
        goes_left = table[row[inner], forest.split_feature[split]] <= forest.split_threshold[split]
        node[inner] += np.where(goes_left, 1, left)
        leaf[inner] += np.where(goes_left, 0, left)
        size[inner] = np.where(goes_left, left, size[inner] - left)
    return forest.leaf_value[leaf].reshape(shape).sum(axis=1)


def check(family, bundle, cases):
    """On each of the problems, sizes known and unknown, with one scorer that remembers, as a process has it."""
    ranker = bundle.ranker(family.name)
    fixed = tuple(place for place, name in enumerate(family.feature_names) if name in family.config_features)
    seen = 0
    for problem, device in cases:
        space = family.space(device)
        for told in dict.fromkeys((problem, problem.without_sizes())):
            table = family.features(told, device, space)
            expected, logs = walked(ranker.forest_, table), ranker.forest_.predict(table, fixed)
            assert np.abs(logs - expected).max() <= 1e-12
            assert (np.argsort(logs, kind="stable") == np.argsort(expected, kind="stable")).all()
            seen += 1
    assert seen


@pytest.mark.parametrize("name", FAMILIES)
def test_orders_the_space_as_the_trees_do(name):
    family = find_family(name)
    cases = family.cases(per_layer=1, tokens=(64, 4096), random=4, seed=1)[:2]
    check(family, load_bundle(), [(case.problem, H200) for case in cases])


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_orders_the_space_as_the_trees_do_on_every_measured_problem(name):
    grid = load("h200").grid(name)
    check(
        find_family(name),
        load_bundle(),
        [(case.problem, on) for case, on in zip(grid.cases, grid.devices, strict=True)],
    )


def forest(trees=40, features=12, leaves=9, seed=0):
    """Random trees over columns of small integers."""
    random = np.random.default_rng(seed)
    left = []

    def grow(size):
        if size > 1:
            left.append(on_the_left := int(random.integers(1, size)))
            grow(on_the_left)
            grow(size - on_the_left)

    counts = random.integers(1, leaves + 1, trees)
    for count in counts:
        grow(int(count))
    return Forest(
        n_features=np.array(features),
        tree_leaves=counts.astype(np.uint8),
        split_feature=random.integers(0, features, len(left)).astype(np.int32),
        split_threshold=random.integers(0, 6, len(left)) + 0.5,
        split_left=np.array(left, np.uint8),
        leaf_value=random.normal(size=counts.sum()),
    )


FIXED = (2, 3, 7, 9)


def tables(rows, count, *, kinds=5, seed=0):
    """Tables of the same rows: FIXED are the same, two columns a problem's own, and the rest those of a row's kind."""
    random = np.random.default_rng(seed)
    fixed, kind = random.integers(0, 7, (rows, len(FIXED))), random.integers(0, kinds, rows)
    for _ in range(count):
        table = random.integers(0, 7, (kinds, 12))[kind].astype(np.float32)
        table[:, 5:7] = random.integers(0, 7, 2)
        table[:, FIXED] = fixed
        yield table


def test_what_is_remembered_changes_nothing():
    trees = forest()
    lists = [
        tables(rows, 4, kinds=kinds, seed=rows) for rows, kinds in ((300, 5), (1, 1), (127, 40), (300, 300), (129, 2))
    ]
    lists += [tables(300, 4, seed=seed) for seed in range(5)]  # more lists than are remembered, in turn
    for turn in zip(*lists, strict=True):
        for table in turn:
            assert np.array_equal(trees.predict(table, FIXED), walked(trees, table))
            assert np.array_equal(trees.predict(table), walked(trees, table))


def test_rows_that_differ_after_all_are_told_apart():
    trees = forest()
    alike, apart = tables(200, 1, kinds=1), tables(200, 1, kinds=150)
    one, other = next(alike), next(apart)
    other[:, FIXED] = one[:, FIXED]
    for table in (one, other, one, other):
        assert np.array_equal(trees.predict(table, FIXED), walked(trees, table))


def test_a_column_that_was_promised_to_stay_may_change():
    trees = forest()
    for table in tables(200, 3):
        for value in (0, 3, 6):
            table[:, FIXED[1]] = value
            assert np.array_equal(trees.predict(table, FIXED), walked(trees, table))


def test_all_columns_or_unused_ones_may_be_fixed():
    trees = forest(features=12)
    wide = Forest(**trees.arrays() | {"n_features": np.array(14)})
    for table in tables(50, 2):
        assert np.array_equal(trees.predict(table, tuple(range(12))), walked(trees, table))
        table = np.column_stack([table, table[:, :2]])
        assert np.array_equal(wide.predict(table, (12, 13)), walked(wide, table))
