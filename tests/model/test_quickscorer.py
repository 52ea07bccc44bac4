"""The quick way to score configs gives what walking down every tree gives, to the last bit, in any order of tables."""

from __future__ import annotations

import numpy as np
import pytest
from foretune.datasets import DeviceSpec, load
from foretune.datasets.feature_groups import FeatureGroup, joined, narrowed
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
    values = forest.leaf_value[leaf].reshape(shape).astype(np.float64)  # which the leaves are added up in
    return values.sum(axis=1)


def check(family, bundle, cases):
    """On each of the problems, sizes known and unknown, with one scorer that remembers, as a process has it."""
    ranker = bundle.ranker(family.name)
    seen = 0
    for problem, device in cases:
        space = family.space(device)
        told = [problem, *(one for _, one in family.plausible(problem.without_sizes()))]
        logs = ranker.forest_.predict_groups(family.feature_groups(told, device, space))
        for one, of_one in zip(told, logs, strict=True):
            expected = walked(ranker.forest_, family.features(one, device, space))
            assert np.abs(of_one - expected).max() <= 1e-12
            assert (np.argsort(of_one, kind="stable") == np.argsort(expected, kind="stable")).all()
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
        split_feature=random.integers(0, features, len(left)).astype(np.uint16),
        split_threshold=(random.integers(0, 6, len(left)) + 0.5).astype(np.float32),
        split_left=np.array(left, np.uint8),
        leaf_value=random.normal(size=counts.sum()),
    )


OWN, CALL = (2, 3, 7, 9), (5, 6)


def groups_of(rows, problems, *, kinds=5, seed=0):
    """Groups of several problems on the same configs: a lasting one, one of a single kind, and two of kinds."""
    random = np.random.default_rng(seed)

    def values(*shape):
        return random.integers(0, 7, shape).astype(np.float32)

    return [
        FeatureGroup(CALL, values(problems, 1, len(CALL)), np.zeros(rows, np.intp)),
        FeatureGroup(OWN, values(1, rows, len(OWN)), np.arange(rows), lasting=True),
        FeatureGroup((0, 1, 4, 8), values(problems, kinds, 4), random.integers(0, kinds, rows)),
        FeatureGroup((10, 11), values(problems, 3, 2), random.integers(0, 3, rows)),
    ]


@pytest.mark.parametrize(("rows", "kinds"), [(300, 5), (1, 1), (127, 40), (129, 2)])
def test_groups_are_scored_as_their_tables_are(rows, kinds):
    trees = forest()
    for seed in range(6):  # more lasting groups than are remembered
        groups = groups_of(rows, 3, kinds=kinds, seed=seed)
        expected = np.stack([walked(trees, joined(groups, place)) for place in range(3)])
        some = np.random.default_rng(seed).permutation(rows)[: rows // 2 + 1]
        for _ in range(2):  # the second time a group is remembered
            assert np.array_equal(trees.predict_groups(groups), expected)
            part = narrowed(groups, slice(1, None), some)
            assert np.array_equal(trees.predict_groups(part), expected[1:, some])
    assert np.array_equal(trees.predict(joined(groups, 2)), expected[2])


def test_trees_without_a_split_or_columns_that_no_split_looks_at():
    trees = forest(features=12)
    wide = Forest(**trees.arrays() | {"n_features": np.array(14)})
    groups = [*groups_of(50, 2), FeatureGroup((12, 13), np.ones((2, 1, 2), np.float32), np.zeros(50, np.intp))]
    for place in range(2):
        assert np.array_equal(wide.predict_groups(groups)[place], walked(wide, joined(groups, place)))
    constant = forest(trees=3, leaves=1)
    assert np.array_equal(constant.predict_groups(groups_of(50, 2)), np.full((2, 50), constant.leaf_value.sum()))


def test_a_long_table_is_scored_as_a_short_one_is():
    """In long ones columns that take few values jointly are looked up together."""
    trees, table = forest(), np.random.default_rng(0).integers(0, 7, (3000, 12)).astype(np.float32)
    table[:, 3] = 4
    assert np.array_equal(trees.predict(table), walked(trees, table))
    assert np.array_equal(trees.predict(table[:50]), walked(trees, table[:50]))
