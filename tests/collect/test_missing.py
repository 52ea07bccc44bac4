"""The missing plan: what a dataset lacks, beside what was fastest, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest
from fakes import DEVICE, FakeFamily, fake_cases, fake_dataset
from foretune.collect.plan import Missing, Outdated, named
from foretune.datasets import DatasetError, DeviceSpec, ForetuneError, KernelConfig, load
from foretune.datasets.family import KernelChange
from foretune.datasets.merge import merge_datasets
from foretune.kernels import find_family
from replay import run

FAMILY = FakeFamily()
WHOLE = fake_dataset()
#: The configs that came later.
LATER = {config for config in FAMILY.space() if config.num_stages == 3}


def before(dataset=WHOLE):
    """The dataset as it was when the space had none of them."""
    later = [number for number, config in enumerate(dataset.configs) if config in LATER]
    rows = dataset.measurements
    return replace(dataset, measurements=rows[~rows["config"].isin(later)].reset_index(drop=True))


def asked(known, cases=WHOLE.cases, family=FAMILY, **options):
    steps = Missing(known, family, DEVICE, **options).next(cases, None)
    assert [step.case for step in steps] == list(cases)
    return {step.case.problem: step.configs for step in steps}


def supported(problem, configs):
    return {config for config in configs if FAMILY.supports(config, problem, DEVICE) is None}


@pytest.mark.parametrize("fastest_of", [0, 1, 4])
def test_it_asks_for_what_a_dataset_lacks_and_for_the_fastest_that_it_has(fastest_of):
    known = before()
    grid = known.grid("fake")
    found = asked(known, fastest=fastest_of)
    for case, times in zip(grid.cases, grid.times_us, strict=True):
        fastest = [grid.configs[place] for place in np.argsort(times)[:fastest_of]]
        configs = found[case.problem]
        assert list(configs[:fastest_of]) == fastest
        assert set(configs[fastest_of:]) == supported(case.problem, LATER)
        assert len(set(configs)) == len(configs)


def test_of_a_problem_of_which_it_lacks_nothing_it_asks_for_nothing():
    assert set(asked(WHOLE).values()) == {()}


def test_of_a_problem_that_it_has_not_it_asks_for_all():
    cases = fake_cases(models=1, tokens=(96,), randoms=0)
    assert {set(configs) == supported(problem, FAMILY.space()) for problem, configs in asked(WHOLE, cases).items()} == {
        True
    }


def test_what_failed_is_not_asked_for_again():
    rows = WHOLE.measurements
    failed = rows["status"] == "launch_failed"
    assert failed.any()
    assert set(asked(replace(WHOLE, measurements=rows[failed | (rows["status"] == "ok")])).values()) == {()}


def test_configs_of_before_a_knob_came_are_known_by_its_default():
    """The knob's other values are what is missing."""

    class Grown(FakeFamily):
        knobs = (*FakeFamily.knobs, "NEW")
        default_knobs = {"NEW": 1}

        def space(self, device=None):
            return tuple(
                KernelConfig.of(**config.to_json(), NEW=new) for new in (1, 2) for config in FakeFamily().space(device)
            )

    for configs in asked(WHOLE, family=Grown()).values():
        assert [config["NEW"] for config in configs[:4]] == [1] * 4
        assert {config["NEW"] for config in configs[4:]} == {2}


def test_a_run_by_it_completes_the_dataset(out, triton):
    """What was measured then and now is, merged, what would have been measured at once."""
    cases = WHOLE.cases[:3]
    known = replace(before(fake_dataset(cases)), name="before")
    run(cases, out, plan="missing", known=known)
    added = load(out)
    assert added.plans("fake") == {"missing"}
    merged = merge_datasets([known, added], name="both", allow_other_sources=True)
    tried = merged.counts(grid := merged.grid("fake")) > 0
    for case, row in zip(grid.cases, tried, strict=True):
        was = {config for config, is_there in zip(grid.configs, row, strict=True) if is_there}
        assert supported(case.problem, FAMILY.space()) <= was


def changed_in(sources, knobs, keeps_times=False):
    """The fake family, whose kernel has changed from `sources` to today's for the configs with these knobs."""

    class Changed(FakeFamily):
        kernel_changes = (KernelChange(sources, FAMILY.source_hash(), knobs, keeps_times=keeps_times),)

    return Changed()


def test_the_outdated_plan_asks_for_what_has_changed_and_for_the_fastest_of_the_others():
    older = replace(WHOLE, provenance={"runs": {"fake-run": {"family": "fake", "kernel_source": "old"}}})
    family = changed_in("old", {"num_stages": 3})
    grid = before().grid("fake")
    steps = Outdated(older, family, DEVICE, fastest=3).next(grid.cases, None)
    assert steps
    for step, times in zip(steps, grid.times_us, strict=True):
        assert list(step.configs[:3]) == [grid.configs[place] for place in np.argsort(times)[:3]]
        assert set(step.configs[3:]) == supported(step.case.problem, LATER)
    cases = fake_cases(models=1, tokens=(96,), randoms=0)  # which the dataset does not have
    for plan in (Outdated(older, family, DEVICE), Outdated(older, changed_in("other", {"num_stages": 3}), DEVICE)):
        assert {step.configs for step in plan.next(cases, None)} == {()}


def test_the_outdated_plan_asks_for_kept_times_too_until_they_are_measured_again():
    family = changed_in("old", {"num_stages": 3}, keeps_times=True)
    runs = {run: {"family": "fake", "kernel_source": of} for run, of in (("old", "old"), ("new", FAMILY.source_hash()))}
    rows = WHOLE.measurements.assign(run_id="old")
    known = replace(WHOLE, provenance={"runs": runs}, measurements=rows)
    cases = WHOLE.grid("fake").cases
    for step in Outdated(known, family, DEVICE, fastest=3).next(cases, None):
        assert {config.num_stages for config in step.configs[:3]}.isdisjoint({3})
        assert set(step.configs[3:]) == supported(step.case.problem, LATER)
    again = rows[rows["problem"] == 0].assign(run_id="new")
    known = replace(known, measurements=pd.concat([rows, again], ignore_index=True))
    for step in Outdated(known, family, DEVICE).next(WHOLE.cases, None):
        assert bool(step.configs) == (step.case is not WHOLE.cases[0])


def test_what_cannot_be_added_to_is_refused_and_said():
    other = replace(DEVICE, name="Other GPU")
    with pytest.raises(ForetuneError, match=f"what was measured on Other GPU, but fake has fake on {DEVICE.name}$"):
        Missing(WHOLE, FAMILY, other)
    with pytest.raises(DatasetError, match="no measurements of 'matmul'"):
        Missing(WHOLE, find_family("matmul"), DeviceSpec.named("h200"))
    with pytest.raises(ForetuneError, match="fastest must be an integer between 0 and 1000 but got -1"):
        Missing(WHOLE, FAMILY, DEVICE, fastest=-1)
    with pytest.raises(
        ForetuneError, match="the missing plan needs the dataset that it adds to: --like DATA, or known"
    ):
        named("missing")
    with pytest.raises(ForetuneError, match="known is only for the plans missing and outdated, but plan is thin"):
        named("thin", WHOLE)
    assert isinstance(named("missing", WHOLE), partial)
