"""The NumPy forest is LightGBM's forest, quick, and cannot be made ill-formed."""

from __future__ import annotations

import time
from functools import partial

import lightgbm
import numpy as np
import pytest
from foretune.datasets import BundleError, ForetuneError
from foretune.datasets.feature_groups import FeatureGroup
from foretune.model import Forest

STUMP = {
    "n_features": np.array(2, np.int64),
    "tree_leaves": np.array([3, 1], np.uint8),
    "split_feature": np.array([0, 1], np.uint16),
    "split_threshold": np.array([0.5, -1.0], np.float32),
    "split_left": np.array([2, 1], np.uint8),
    "leaf_value": np.array([1.0, 2.0, 3.0, 10.0]),
}


def trained(columns, *, leaves=31, trees=60, seed=0, **options):
    """A booster on these columns, and a target that needs them all."""
    random = np.random.default_rng(seed)
    target = np.sin(columns @ random.normal(size=columns.shape[1])) + random.normal(0, 0.1, len(columns))
    parameters = {"num_leaves": leaves, "use_missing": False, "verbosity": -1, "num_threads": 1, "min_data_in_leaf": 3}
    return lightgbm.train(parameters | options, lightgbm.Dataset(columns, target), num_boost_round=trees)


def table(rows, seed=0):
    """Columns of every kind: continuous, few-valued, jointly few-valued, integer, constant, tiny and huge."""
    random = np.random.default_rng(seed)
    m, n = random.choice([16, 32, 64, 128], rows), random.choice([32, 64, 256], rows)
    columns = [random.normal(size=rows), random.normal(size=rows) * 1e-30, random.normal(size=rows) * 1e30]
    columns += [m, n, m * n, np.ceil(1000 / m) * np.ceil(3000 / n), random.integers(0, 1000, rows), np.full(rows, 3.0)]
    columns += [random.choice([0.0, -0.0, 1e-36, 0.1], rows), random.normal(size=rows)]
    return np.stack(columns, axis=1).astype(np.float32)


@pytest.mark.parametrize("leaves", [2, 7, 31, 32])
@pytest.mark.parametrize("objective", ["regression", "l1"])
def test_equals_lightgbm(leaves, objective):
    booster = trained(table(3000), leaves=leaves, objective=objective)
    forest = Forest.from_lightgbm(booster.dump_model())
    for rows in (1, 2, 127, 128, 129, 1000):
        columns = table(rows, seed=rows)
        assert np.abs(forest.predict(columns) - booster.predict(columns)).max() <= 1e-12
    assert len(forest) == 60


def test_equals_lightgbm_exactly_at_the_thresholds():
    """LightGBM's are float64 and lie between two float32: ours is the lower one."""
    booster = trained(table(3000))
    forest = Forest.from_lightgbm(booster.dump_model())
    random = np.random.default_rng(1)
    columns = table(600, seed=1)
    for feature in np.unique(forest.split_feature):
        thresholds = forest.split_threshold[forest.split_feature == feature]
        nudge = random.choice(np.array([-np.inf, 0.0, np.inf], np.float32), 600)
        near = random.choice(thresholds, 600)
        columns[:, feature] = np.where(nudge == 0, near, np.nextafter(near, nudge))
    assert np.abs(forest.predict(columns) - booster.predict(columns)).max() <= 1e-12


def test_features_constant_over_the_rows():
    booster = trained(table(3000))
    forest = Forest.from_lightgbm(booster.dump_model())
    columns = np.repeat(table(1), 300, axis=0)
    columns[:, 3] = table(300)[:, 3]
    assert np.abs(forest.predict(columns) - booster.predict(columns)).max() <= 1e-12


def test_a_row_scores_the_same_in_any_company():
    forest = Forest.from_lightgbm(trained(table(2000)).dump_model())
    columns = table(700, seed=5)
    order = np.random.default_rng(0).permutation(700)[:300]
    assert (forest.predict(columns)[order] == forest.predict(columns[order])).all()


def test_no_rows():
    assert Forest(**STUMP).predict(np.empty((0, 2))).shape == (0,)


def test_scaling_and_adding():
    forest = Forest(**STUMP)
    columns = np.array([[0.5, -1.0], [0.5, 0.0], [0.6, 0.0]])
    assert forest.predict(columns).tolist() == [11.0, 12.0, 13.0]
    assert forest.affine(2.0, 1.0).predict(columns).tolist() == [23.0, 25.0, 27.0]
    assert (forest + forest.affine(0.0, 5.0)).predict(columns).tolist() == [16.0, 17.0, 18.0]


def test_more_leaves_than_bits_are_refused():
    with pytest.raises(ForetuneError, match="at most 32 leaves but has 40"):
        Forest.from_lightgbm(trained(table(3000), leaves=40, trees=1).dump_model())


def test_missing_values_are_refused():
    columns = table(500)
    columns[::7, 0] = np.nan
    booster = trained(np.nan_to_num(columns))  # trains without
    with_missing = lightgbm.train(
        {"verbosity": -1, "num_leaves": 7}, lightgbm.Dataset(columns, table(500)[:, 0]), num_boost_round=3
    )
    with pytest.raises(ForetuneError, match="missing NaN"):
        Forest.from_lightgbm(with_missing.dump_model())
    with pytest.raises(ForetuneError, match="column 0 is not"):
        Forest.from_lightgbm(booster.dump_model()).predict(columns)


def test_another_width_is_refused():
    with pytest.raises(ForetuneError, match=r"\(rows, 2\) but are \(4, 3\)"):
        Forest(**STUMP).predict(np.zeros((4, 3)))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("split_left", np.array([0, 1], np.uint8), "too few or too many"),  # would be its own child
        ("split_left", np.array([3, 1], np.uint8), "too few or too many"),
        ("split_left", np.array([2, 2], np.uint8), "too few or too many"),
        ("split_left", np.array([255, 255], np.uint8), "too few or too many"),
        ("split_left", np.array([2, 1], np.int8), "must be uint8"),
        ("split_feature", np.array([0, 2], np.uint16), "split_feature must be in 0..1"),
        ("split_feature", np.array([65535, 0], np.uint16), "split_feature must be in 0..1"),
        ("split_feature", np.array([0, 1], np.int32), "must be uint16"),
        ("split_feature", np.array([0], np.uint16), "must have 2 entries but has 1"),
        ("split_threshold", np.array([0.5, np.nan], np.float32), "must be finite"),
        ("split_threshold", np.array([0.5, -1.0]), "must be float32"),
        ("leaf_value", np.array([1.0, np.inf, 3.0, 10.0]), "must be finite"),
        ("leaf_value", np.array([1.0, 2.0, 3.0]), "must have 4 entries but has 3"),
        ("leaf_value", np.array([[1.0, 2.0, 3.0, 4.0]]), "1 axes"),
        ("tree_leaves", np.array([3, 0], np.uint8), "between 1 and 32"),
        ("tree_leaves", np.array([33, 1], np.uint8), "between 1 and 32"),
        ("tree_leaves", np.array([], np.uint8), "between 1 and 32"),
        ("tree_leaves", np.array([1, 3], np.uint8), None),  # other trees, well-formed all the same
        ("n_features", np.array(0, np.int64), "between 1 and 512"),
        ("n_features", np.array(1, np.int64), "split_feature must be in 0..0"),
        ("n_features", 2, "must be int64"),
        ("n_features", None, "must be int64"),
    ],
)
def test_ill_formed_arrays_are_refused(name, value, message):
    arrays = STUMP | {name: value}
    if message is None:
        Forest(**arrays)
    else:
        with pytest.raises(BundleError, match=message):
            Forest(**arrays)


def test_a_forest_too_large_for_memory_is_refused():
    trees = 4096
    with pytest.raises(BundleError, match="too large"):
        Forest(
            n_features=np.array(1, np.int64),
            tree_leaves=np.full(trees, 4, np.uint8),
            split_feature=np.zeros(3 * trees, np.uint16),
            split_threshold=np.arange(3.0 * trees, dtype=np.float32),
            split_left=np.tile(np.array([3, 2, 1], np.uint8), trees),
            leaf_value=np.zeros(4 * trees),
        )


@pytest.mark.slow
def test_a_thousand_configs_are_scored_in_less_than_half_the_time_that_lightgbm_takes():
    """300 trees x 31 leaves x 40 features, of the kinds that configs of one problem have."""
    random = np.random.default_rng(0)

    def configs(rows, problem):
        knobs = [
            random.choice(values, rows)
            for values in ([16, 32, 64, 128], [32, 64, 128, 256], [32, 64], [4, 8], [2, 3, 4, 5])
        ]
        m, n, k, _, stages = knobs
        tiles = [np.ceil(size / m) * np.ceil(size / n) for size in problem[:6]]
        derived = [m * n, m * k, n * k, (m + n) * k * stages, m / n, stages * k]
        derived += [np.ceil(np.log2(tile)) + stages for tile in tiles] + [tile * stages * k for tile in tiles[:5]]
        return np.stack([*(np.full(rows, size) for size in problem), *knobs, *tiles, *derived], axis=1).astype(
            np.float32
        )

    train = np.concatenate([configs(300, random.uniform(100, 5000, 12)) for _ in range(20)])
    assert train.shape[1] == 40
    booster = trained(train, trees=300)
    forest = Forest.from_lightgbm(booster.dump_model())
    columns = configs(1000, random.uniform(100, 5000, 12))
    of_configs = (*range(12, 17), *range(23, 29))
    rest = tuple(column for column in range(40) if column not in of_configs)
    groups = [
        FeatureGroup(some, columns[None, :, list(some)], np.arange(len(columns)), lasting=some is of_configs)
        for some in (of_configs, rest)
    ]

    def remembering(columns):
        return forest.predict_groups(groups)[0]

    assert (remembering(columns) == forest.predict(columns)).all()
    ours, quickest, theirs = [], [], []
    ways = ((ours, forest.predict), (quickest, remembering), (theirs, partial(booster.predict, num_threads=1)))
    for _ in range(50):
        # This thread's own time, and the least of it: on a busy machine others take turns on the core and its caches.
        for times, predict in ways:
            start = time.thread_time()
            predict(columns)
            times.append(time.thread_time() - start)
    for times in (ours, quickest):
        assert min(times) < min(theirs) / 2, f"{min(times) * 1e3:.2f} and {min(theirs) * 1e3:.2f} ms"
