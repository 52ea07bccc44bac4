"""A dataset of another kernel is used with a warning that says so; what cannot be a family's is refused or left out."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from fakes import FakeFamily, fake_cases, fake_dataset
from foretune.datasets import DatasetError, ForetuneError, ForetuneWarning, KernelConfig
from foretune.datasets.family import KernelChange
from foretune.model import (
    LightGBMRanker,
    TrainingSet,
    check_measured,
    check_trained_source,
    cross_validate,
    load_bundle,
    train_bundle,
)
from foretune.model.testing import ToyFamily
from foretune.model.training_set import source_of

FAMILY = FakeFamily()
BARE = fake_dataset(fake_cases(models=3, tokens=(64,), randoms=0))


def measured_with(*sources, family="fake"):
    """The dataset as runs with these kernel sources would have left it."""
    runs = {f"r{place}": {"family": family, "kernel_source": source} for place, source in enumerate(sources)}
    return replace(BARE, provenance={"runs": runs})


@pytest.mark.parametrize(
    "use",
    [
        lambda dataset: train_bundle(dataset, {"fake": FAMILY}, partial(LightGBMRanker, trees=2, epochs=0)),
        lambda dataset: cross_validate(dataset, FAMILY, partial(LightGBMRanker, trees=2, epochs=0)),
        lambda dataset: check_measured(dataset, FAMILY),
    ],
    ids=["train", "cross_validate", "check_measured"],
)
def test_whoever_learns_from_another_kernels_times_is_told(use):
    named = r"fake was measured with other sources of fake \(new, old\) than the installed ones \(fake-source\)"
    with pytest.warns(ForetuneWarning, match=named):
        use(measured_with("old", FAMILY.source_hash(), "new"))


@pytest.mark.parametrize(
    ("recorded", "now", "told"),
    [
        ("", "+4b1de3aa926b63df", False),
        ("+4b1de3aa926b63df", "", False),
        ("+2263e89fede9aba3", "+4b1de3aa926b63df", True),
    ],
)
def test_a_hash_is_compared_with_what_was_hashed_when_it_was_recorded(recorded, now, told):
    class Now(FakeFamily):
        def source_hash(self):
            return f"037307fb8c7f56d3{now}"

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        check_measured(measured_with(f"037307fb8c7f56d3{recorded}"), Now())
    assert bool(warned) == told


@pytest.mark.parametrize(
    ("origin", "told"),
    [
        ({}, ""),
        ({"source_hash": None, "adapted": "no list"}, ""),
        ({"source_hash": "fake-source"}, ""),
        ({"source_hash": "old"}, r"other sources of fake \(old\) than the installed ones \(fake-source\)"),
        ({"source_hash": "fake-source", "adapted": [{"source_hash": "new"}]}, r"other sources of fake \(new\)"),
    ],
)
def test_a_bundle_trained_for_another_kernel_source_is_warned_of(origin, told):
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        check_trained_source(origin, FAMILY)
    assert len(warned) == bool(told)
    assert not told or re.search(told, str(warned[0].message))


@pytest.mark.parametrize(
    ("knobs", "saved_us", "told"),
    [(None, None, False), ({"BLOCK_M": 64}, None, True), (None, lambda *_: [1.0], True)],
    ids=["no times", "some outdated", "some reduced"],
)
def test_a_bundle_trained_before_a_change_is_warned_of_if_times_changed(knobs, saved_us, told):
    class Changed(FakeFamily):
        kernel_changes = (KernelChange("old", "fake-source", knobs, saved_us),)

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        check_trained_source({"source_hash": "old"}, Changed())
    assert bool(warned) == told


def test_without_triton_nothing_can_be_compared():
    class Elsewhere(FakeFamily):
        def source_hash(self):
            raise ImportError("No module named 'triton'")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_measured(measured_with("old"), Elsewhere())


class Predicting(ToyFamily):
    """One that only predicts: somebody else measured it."""

    name = "fake"
    dims, knobs = FakeFamily.dims, FakeFamily.knobs
    feature_names = FakeFamily.feature_names
    space, features = FakeFamily.space, FakeFamily.features
    supports, estimate_us = FakeFamily.supports, FakeFamily.estimate_us


def test_a_family_that_only_predicts_is_trained_and_says_nothing_of_a_kernel(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_bundle(measured_with("old"), {"fake": Predicting()}, partial(LightGBMRanker, trees=2, epochs=0)).save(
            tmp_path / "b"
        )
    bundle = load_bundle(tmp_path / "b")
    assert bundle.manifest["families"]["fake"]["origin"]["source_hash"] is None
    problem = BARE.cases[0].problem
    assert len(bundle.ranker("fake").predict(Predicting(), problem, BARE.devices[0], BARE.configs)) == len(BARE.configs)


@pytest.mark.parametrize(
    "dataset",
    [
        BARE,
        measured_with(FAMILY.source_hash(), FAMILY.source_hash()),
        measured_with("old", family="another"),
        replace(BARE, provenance={"runs": {"r0": {"family": "fake"}}}),
    ],
    ids=["no runs", "the same sources", "another family's sources", "no sources"],
)
def test_the_same_kernel_or_an_unknown_one_is_no_reason_to_warn(dataset):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_measured(dataset, FAMILY)


def with_config(config):
    """The dataset as if its first config had been this one."""
    return replace(BARE, configs=(config, *BARE.configs[1:]))


def test_a_config_that_lacks_a_knob_is_refused_by_name():
    first = BARE.configs[0].to_json()
    lacking = KernelConfig.from_json({name: value for name, value in first.items() if name != FAMILY.knobs[0]})
    with pytest.raises(
        DatasetError, match=rf"fake \(run fake-run\): the knobs of fake are .* but a config lacks {FAMILY.knobs[0]}"
    ):
        TrainingSet.of(with_config(lacking), FAMILY)


def test_a_problem_of_other_dimensions_is_refused():
    case = BARE.cases[0]
    other = replace(case, problem=replace(case.problem, dims=case.problem.dims[:-1], ragged=None))
    with pytest.raises(DatasetError, match="fake: a problem of fake must have the dimensions"):
        TrainingSet.of(replace(BARE, cases=(other, *BARE.cases[1:])), FAMILY)


class Strict(FakeFamily):
    """One that supports less than when it was measured."""

    def supports(self, config, problem, device):
        return "too large" if config == BARE.configs[0] else super().supports(config, problem, device)


def test_times_of_what_is_not_supported_are_left_out_with_a_warning():
    whole = TrainingSet.of(BARE, FAMILY).grid
    column = whole.configs.index(BARE.configs[0])
    times = np.isfinite(whole.times_us[:, column]).sum()
    with pytest.warns(ForetuneWarning, match=rf"fake: {times} times are left out, of configs that fake .*: too large"):
        grid = TrainingSet.of(BARE, Strict()).grid
    possible = grid.supported
    assert possible.shape == (len(grid), len(grid.configs))
    others = np.arange(len(whole.configs)) != column
    assert grid.configs == tuple(np.array(whole.configs, object)[others])
    np.testing.assert_array_equal(grid.times_us, whole.times_us[:, others])


class Half(FakeFamily):
    """One that supports a config on some problems only."""

    def supports(self, config, problem, device):
        large = config == BARE.configs[0] and problem == BARE.cases[0].problem
        return "too large" if large else super().supports(config, problem, device)


def test_a_config_that_is_supported_elsewhere_has_no_time_where_it_is_not():
    whole = TrainingSet.of(BARE, FAMILY).grid
    column, row = whole.configs.index(BARE.configs[0]), whole.cases.index(BARE.cases[0])
    with pytest.warns(ForetuneWarning, match="fake: 1 times are left out"):
        grid = TrainingSet.of(BARE, Half()).grid
    possible = grid.supported
    assert (grid.configs, grid.cases) == (whole.configs, whole.cases)
    assert np.isnan(grid.times_us[row, column])
    assert not possible[row, column]
    assert np.isnan(grid.times_us).sum() == np.isnan(whole.times_us).sum() + 1


@pytest.mark.parametrize("value", ["a", 0])
def test_a_knob_of_which_there_are_no_features_is_left_out(value):
    odd = with_config(KernelConfig.from_json(BARE.configs[0].to_json() | {"BLOCK_M": value}))
    few = partial(LightGBMRanker, trees=2, epochs=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of NumPy
        warnings.simplefilter("ignore", ForetuneWarning)
        assert train_bundle(odd, {"fake": FAMILY}, few).families == ("fake",)
        assert cross_validate(odd, FAMILY, few).to_json()["regret"]


def test_where_nothing_is_supported_there_is_nothing_to_learn():
    class Nothing(FakeFamily):
        def supports(self, config, problem, device):
            return "no"

    with pytest.warns(ForetuneWarning), pytest.raises(DatasetError, match="supports none of the configs"):
        TrainingSet.of(BARE, Nothing())


def test_a_kernel_of_a_package_that_is_missing_has_no_known_source(monkeypatch):
    class MissingError(ForetuneError, ImportError):
        pass

    def missing(family):
        raise MissingError("the engine is not installed")

    monkeypatch.setattr(FakeFamily, "source_hash", missing)
    assert source_of(FAMILY) is None
