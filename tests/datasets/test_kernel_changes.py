"""Times of configs whose kernel has changed are left out, and those of others are today's."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from fakes import FakeFamily, fake_cases, fake_dataset
from foretune.collect.recording import Recording
from foretune.datasets import DatasetError, FamilyError
from foretune.datasets.contents import since
from foretune.datasets.family import KernelChange, roofline_us
from foretune.datasets.merge import merge_datasets
from foretune.kernels import learning
from foretune.model import TrainingSet

NOW = FakeFamily().source_hash()


class Changed(FakeFamily):
    """A family whose kernel changed twice."""

    kernel_changes = (
        KernelChange("first", "second", {"num_stages": 3}),
        KernelChange("second", NOW, {"num_stages": 2, "BLOCK_M": 64}),
    )


FAMILY = Changed()
BARE = fake_dataset(fake_cases(models=2, tokens=(64,), randoms=0))


def of(source, name="fake", run="fake-run"):
    """The dataset as a run with this kernel source would have left it."""
    runs = {run: {"family": "fake", "kernel_source": source}}
    return replace(BARE, name=name, provenance={"runs": runs}, measurements=BARE.measurements.assign(run_id=run))


def knobs_in(dataset):
    """The (num_stages, BLOCK_M) of the configs that have rows."""
    return {(config.num_stages, config["BLOCK_M"]) for config in map(dataset.configs.__getitem__, _used(dataset))}


def _used(dataset):
    return dataset.measurements["config"].unique()


EVERY = knobs_in(BARE)
SECOND = {one for one in EVERY if one != (2, 64)}
FIRST = {one for one in SECOND if one[0] != 3}


@pytest.mark.parametrize(("source", "left"), [("first", FIRST), ("second", SECOND), (NOW, EVERY), ("other", EVERY)])
def test_rows_of_changed_configs_are_left_out(source, left):
    assert FIRST < SECOND < EVERY
    dataset = of(source)
    found = dataset.of_family(FAMILY)
    assert knobs_in(found) == left
    assert len(found.measurements) + len(dataset.outdated(FAMILY)) == len(dataset.measurements)
    assert found.kernel_sources("fake") == {source if source == "other" else NOW}
    assert found.of_family(FAMILY) is found
    assert dataset.kernel_sources("fake") == {source}
    assert dataset.of_family(FakeFamily()) is dataset  # which declares no change


def test_kept_times_of_changed_configs_count_until_they_are_measured_again():
    class Kept(FakeFamily):
        kernel_changes = (KernelChange("second", NOW, {"num_stages": 2}, keeps_times=True),)

    dataset, family = of("second"), Kept()
    found = dataset.of_family(family)
    pd.testing.assert_frame_equal(found.measurements, dataset.measurements)
    assert found.kernel_sources("fake") == {NOW}
    assert dataset.outdated(family).empty
    outdated = dataset.outdated(family, kept=True)["config"].unique()
    assert {dataset.configs[number].num_stages for number in outdated} == {2}


def test_a_hash_without_its_second_part_is_the_same():
    change = KernelChange("037307fb8c7f56d3+af828593194bc74c", "b20ace3efe518e62+e58d5a1fbd4b5ed7", {"A": 1})
    assert since([change], "037307fb8c7f56d3") == (change.after, [change])
    assert since([change], change.after) == (change.after, [])


def test_a_change_of_no_config_leaves_all_times_valid():
    class Cleaned(FakeFamily):
        kernel_changes = (KernelChange("first", NOW, None),)

    found = of("first").of_family(Cleaned())
    assert (knobs_in(found), found.kernel_sources("fake")) == (EVERY, {NOW})


def saved_us(family, problem, device, configs):
    """Most configs have saved a fortieth of a microsecond per stage; those of two stages more than they took."""
    assert (family.name, problem.family, device) == ("fake", "fake", BARE.devices[0])
    return np.array([1e6 if config.num_stages == 2 else config.num_stages / 40 for config in configs])


class Faster(FakeFamily):
    """A family whose kernel became faster, and of whose work no rate of the device is a limit."""

    kernel_changes = (KernelChange("first", "second", {"num_stages": 4}), KernelChange("second", NOW, None, saved_us))

    def flops(self, problem):
        return 0.0

    def bytes(self, problem):
        return 0.0


def test_times_of_before_a_change_that_saved_time_are_reduced():
    before = of("first")
    after, stages = before.of_family(Faster()), np.array([config.num_stages for config in before.configs])
    kept = before.measurements[stages[before.measurements["config"]] != 4]
    here = stages[after.measurements["config"]]
    assert set(here) == set(stages) - {4}
    times, then = after.measurements["time_us"].to_numpy(), kept["time_us"].to_numpy()
    np.testing.assert_allclose(times[here == 2], then[here == 2] / 2)  # not by more than half
    np.testing.assert_allclose(times[here == 3], then[here == 3] - 3 / 40)
    assert np.isnan(times).sum() == np.isnan(then).sum()
    assert after.of_family(Faster()) is after  # which is not reduced once more
    np.testing.assert_array_equal(of(NOW).of_family(Faster()).measurements["time_us"], BARE.measurements["time_us"])


def test_no_time_is_reduced_below_the_roofline():
    """Other programs keep the memory busy while one waits."""

    class Bound(Faster):
        flops, bytes = FakeFamily.flops, FakeFamily.bytes

    free, bound = (of("first").of_family(family()).measurements for family in (Faster, Bound))
    stages = np.array([config.num_stages for config in BARE.configs])[BARE.measurements["config"]]
    times = BARE.measurements["time_us"][stages != 4].to_numpy()
    least = free["problem"].map(lambda number: roofline_us(Bound(), BARE.cases[number].problem, BARE.devices[0]))
    np.testing.assert_allclose(bound["time_us"], np.maximum(free["time_us"], np.minimum(times, least)), rtol=1e-6)
    is_bound = bound["time_us"] > free["time_us"]
    assert is_bound.any()
    assert not is_bound.all()


@pytest.mark.parametrize(
    "wrong", [lambda n: [0.5] * (n - 1), lambda n: 0.5, lambda n: [float("nan")] * n, lambda n: [-1.0] * n]
)
def test_what_a_change_has_saved_must_be_a_time_for_each_config(wrong):
    class Wrong(FakeFamily):
        kernel_changes = (KernelChange("first", NOW, None, lambda *given: wrong(len(given[-1]))),)

    with pytest.raises(FamilyError, match=r"saved_us of family fake must return \d+ finite times of at least 0 for"):
        of("first").of_family(Wrong())


def test_declared_changes_are_no_reason_not_to_merge(monkeypatch):
    """All rows stay as they were measured, and are made comparable when they are used."""
    older, newer = of("second", "older", "1"), of(NOW, "newer", "2")
    with pytest.raises(DatasetError, match="measured with different kernel sources in older"):
        merge_datasets([older, newer], name="both")
    both = merge_datasets([older, newer], name="both", families=[Faster()])
    assert both.kernel_sources("fake") == {"second", NOW}
    assert len(both.measurements) == 2 * len(BARE.measurements)
    monkeypatch.setattr(learning, "families", lambda: {"fake": Faster()})
    pd.testing.assert_frame_equal(both.measurements, learning.datasets_merged([older, newer]).measurements)


def test_a_replay_records_the_reduced_times_as_those_of_todays_kernel():
    dataset, family = of("second"), Faster()
    recorded = Recording(dataset, [family])
    facts = recorded.provenance(family, dataset.devices[0])
    assert facts["kernel_source"] == NOW


def test_a_merged_dataset_reduces_the_times_of_its_older_runs_only(monkeypatch):
    monkeypatch.setattr(learning, "families", lambda: {"fake": Faster()})
    older, newer = of("second", "older", "1"), of(NOW, "newer", "2")
    merged = learning.datasets_merged([older, newer]).of_family(Faster()).measurements
    times = newer.measurements["time_us"].to_numpy()
    np.testing.assert_array_equal(merged.loc[merged["run_id"] == "2", "time_us"], times)
    reduced = merged.loc[merged["run_id"] == "1", "time_us"].to_numpy()
    assert (reduced < times)[~np.isnan(times)].all()


def test_data_of_before_a_declared_change_are_learned_from_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = TrainingSet.of(of("first"), FAMILY)
    assert {(config.num_stages, config["BLOCK_M"]) for config in data.grid.configs} <= FIRST


def test_older_and_newer_data_are_merged_to_be_learned_from(monkeypatch):
    older, newer = of("first", "older", "1"), of(NOW, "newer", "2")
    with pytest.raises(DatasetError, match="measured with different kernel sources in older"):
        merge_datasets([older, newer], name="both")
    monkeypatch.setattr(learning, "families", lambda: {"fake": FAMILY})
    merged = learning.datasets_merged([older, newer]).of_family(FAMILY)
    assert knobs_in(merged) == EVERY
    changed = merged.measurements[merged.measurements["config"].isin(older.outdated(FAMILY)["config"])]
    assert set(changed["run_id"]) == {"2"}
