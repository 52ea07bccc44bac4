"""A bundle learns another card from a few measurements of it."""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import foretune
import numpy as np
import pytest
from commands import call
from fakes import DEVICE, FakeFamily, fake_cases, fake_dataset
from foretune.datasets import BundleError, Case, ForetuneError, Problem
from foretune.kernels.commands.inputs import bundle_at
from foretune.model import Bundle, LightGBMRanker, adapt_bundle, evaluate_bundle, geomean, load_bundle, train_bundle

FAMILY, ALL = FakeFamily(), {"fake": FakeFamily()}
OTHER = replace(DEVICE, name="another card")
OLD = fake_dataset(fake_cases(models=3))
QUICK = partial(LightGBMRanker, trees=30, epochs=0)


def elsewhere(cases, share=1.0):
    """On another card four warps take three times as long; of its configs a share was tried on each problem."""
    dataset = fake_dataset(cases)
    rows = dataset.measurements
    few = [config.num_warps == 4 for config in dataset.configs]
    slow = np.where(np.array(few)[rows["config"]], 3.0, 1.0)
    rows = rows.assign(device=OTHER.name, time_us=rows["time_us"] * slow, run_id=f"run of {share}")
    tried = np.random.default_rng(0).random((len(cases), len(dataset.configs))) < share
    rows = rows[tried[rows["problem"], rows["config"]]].reset_index(drop=True)
    return replace(dataset, name="small", devices=(OTHER,), measurements=rows)


NEW = fake_cases(models=6)[len(fake_cases(models=3, randoms=0)) :]  # layers of other models
SMALL = elsewhere(fake_cases(models=3), share=0.12)


@pytest.fixture(scope="module")
def bundle():
    return train_bundle(OLD, ALL, QUICK)


@pytest.fixture(scope="module")
def adapted(bundle):
    return adapt_bundle(bundle, SMALL, ALL, trees=30)


def regret(bundle, k=1):
    return geomean(evaluate_bundle(elsewhere(NEW), bundle, FAMILY, ks=(k,), jobs=1).regret[k]) - 1


def test_on_models_that_nobody_measured_there_it_loses_less_than_a_third(bundle, adapted):
    assert regret(adapted) < regret(bundle) / 3


def test_it_knows_both_cards_and_says_where_it_comes_from(bundle, adapted):
    assert adapted.trained_on("fake") == (DEVICE, OTHER)
    old, new = bundle.trained["fake"].origin, adapted.trained["fake"].origin
    assert new["measurements_sha256"] == old["measurements_sha256"]
    assert new["runs"] == ["fake-run", "run of 0.12"]
    (added,) = new["adapted"]
    assert (added["dataset"], added["from_bundle"]) == ("small", bundle.digest)
    assert (added["devices"], added["runs"]) == (["another card"], ["run of 0.12"])
    with pytest.warns(foretune.ForetuneWarning, match="trained on all of the measurements"):
        assert evaluate_bundle(SMALL, adapted, FAMILY, jobs=1).seen_in_training == 1.0


def test_it_knows_the_measured_knob_values_of_both(bundle):
    old = bundle.trained["fake"]
    fewer = Bundle({"fake": replace(old, measured={"BLOCK_M": ("1024",)})}, bundle.lightgbm_version)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert adapt_bundle(fewer, SMALL, ALL).trained["fake"].measured["BLOCK_M"] == tuple(
            sorted(("1024", *old.measured["BLOCK_M"]))
        )
        unknown = Bundle({"fake": replace(old, measured=None)}, bundle.lightgbm_version)
        assert adapt_bundle(unknown, SMALL, ALL).trained["fake"].measured is None


def test_same_measurements_in_another_order_give_the_same_bytes(bundle, adapted, tmp_path):
    rows = SMALL.measurements.sort_values(["problem", "config"], ascending=False, kind="stable", ignore_index=True)
    again = adapt_bundle(bundle, replace(SMALL, measurements=rows), ALL, trees=30)
    for number, one in enumerate((adapted, again)):
        one.save(tmp_path / str(number))
    assert (tmp_path / "0" / "bundle.npz").read_bytes() == (tmp_path / "1" / "bundle.npz").read_bytes()
    assert load_bundle(tmp_path / "0").digest == adapted.digest


def test_it_is_calibrated_on_the_new_card_and_knows_the_problems_of_both(bundle, adapted):
    old, new = bundle.trained["fake"], adapted.trained["fake"]
    assert new.calibration.problems == len(SMALL.cases)
    assert new.calibration != old.calibration
    large = elsewhere([Case(Problem.of("fake", groups=8, rows=1 << 20, n=1 << 14, k=1 << 14), ("random",))])
    with pytest.warns(foretune.ForetuneWarning, match=r'1 problems of fake are too few.*k="auto" is 8\. Measure'):
        wider = adapt_bundle(bundle, large, ALL, trees=1).trained["fake"]
    assert wider.calibration is None
    assert wider.domain.outside(large.cases[0].problem) == []
    assert all(wider.domain.outside(case.problem) == [] for case in OLD.cases)


def test_few_problems_that_make_lists_long_are_named_with_the_remedy(bundle):
    few = r'small: shortlists of fake with k="auto" will be long \(typically \d\d of 158 configs\), because only 21 '
    for make in (partial(adapt_bundle, bundle, trees=1), partial(train_bundle, ranker=QUICK)):
        with pytest.warns(foretune.ForetuneWarning, match=few + "problems .* at least 100 problems, or give k as a"):
            make(dataset=SMALL, families=ALL)


def test_enough_problems_are_calibrated_without_a_warning():
    many = fake_dataset(fake_cases(models=8, randoms=60))
    with warnings.catch_warnings():
        warnings.simplefilter("error", foretune.ForetuneWarning)
        calibration = train_bundle(many, ALL, QUICK).calibration("fake")
    assert calibration.problems >= 100


def test_twice_adapted_it_says_both(adapted):
    with pytest.warns(foretune.ForetuneWarning, match="trained on all of the measurements of fake in small, so they"):
        twice = adapt_bundle(adapted, SMALL, ALL, trees=1)
    assert [one["from_bundle"] == adapted.digest for one in twice.trained["fake"].origin["adapted"]] == [False, True]
    assert len(twice.ranker("fake").forest_) == len(adapted.ranker("fake").forest_) + 2  # a tree and a constant


def test_what_was_not_measured_stays_as_it_is(bundle):
    both = Bundle({**bundle.trained, "other": bundle.trained["fake"]}, bundle.lightgbm_version)
    assert adapt_bundle(both, SMALL, ALL, trees=1).trained["other"] is both.trained["other"]


def test_what_computed_a_wrong_result_on_either_card_is_remembered(bundle):
    config, rows = SMALL.measurements["config"].iloc[0], SMALL.measurements
    wrong = rows.assign(status=rows["status"].mask(rows["config"] == config, "wrong_result"))
    wrong["time_us"] = wrong["time_us"].mask(rows["config"] == config)
    known = adapt_bundle(bundle, replace(SMALL, measurements=wrong), ALL, trees=1)
    assert SMALL.configs[config] in known.wrong_results("fake", SMALL.cases[0].problem)


def test_what_cannot_be_adapted_is_named(bundle, monkeypatch):
    with pytest.raises(BundleError, match="small has measurements of fake, but the bundle knows other: none of the"):
        adapt_bundle(Bundle({"other": bundle.trained["fake"]}, "4"), SMALL, ALL)
    with pytest.raises(ForetuneError, match=r"trees must be an integer between 1 and [0-9]+ but got 0"):
        adapt_bundle(bundle, SMALL, ALL, trees=0)
    monkeypatch.setattr(FakeFamily, "feature_names", ("another", *FakeFamily.feature_names[1:]))
    with pytest.raises(BundleError, match="trained on other features than the family has now"):
        adapt_bundle(bundle, SMALL, ALL)


def test_the_command_and_the_face_make_the_same_bundle(bundle, tmp_path, monkeypatch):
    monkeypatch.setattr("foretune.kernels.registry._registered", {"fake": FAMILY})
    bundle.save(tmp_path / "old")
    monkeypatch.setattr(foretune.datasets, "load", {"small": SMALL}.__getitem__)
    told = call("adapt --data small --json", "--bundle", tmp_path / "old", "--out", tmp_path / "new")
    assert told.exit_code == 0, told.output
    assert json.loads(told.stdout)["devices"] == sorted([DEVICE.name, OTHER.name])
    face = foretune.adapt("small", bundle=tmp_path / "old", family=[FAMILY])
    assert load_bundle(tmp_path / "new").digest == face.digest


def test_the_command_says_how_to_compare_the_two_bundles(bundle, tmp_path, monkeypatch):
    monkeypatch.setattr("foretune.kernels.registry._registered", {"fake": FAMILY})
    monkeypatch.setattr(foretune.datasets, "load", {"small": SMALL}.__getitem__)
    old, new = tmp_path / "old", tmp_path / "new"
    bundle.save(old)
    told = "".join(call("adapt --data small", "--bundle", old, "--out", new).output.split())
    assert f"runforetuneevaluate--dataOTHER--bundle{old},andagainwith--bundle{new},on" in told
    for one in (old, new):
        judged = call("evaluate --data small --json", "--bundle", one)
        assert judged.exit_code == 0, judged.output
        assert "fake" in json.loads(judged.stdout)["families"]


def test_the_shipped_bundle_can_be_compared_by_its_name(bundle, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert bundle_at(None) is None
    assert bundle_at(Path("shipped")).digest == load_bundle().digest
    bundle.save(tmp_path / "shipped")
    assert bundle_at(Path("shipped")).digest == bundle.digest


def test_a_bundle_of_one_family_keeps_the_others_of_another_bundle(bundle, tmp_path, monkeypatch):
    monkeypatch.setattr("foretune.kernels.registry._registered", {"fake": FAMILY})
    monkeypatch.setattr(foretune.datasets, "load", {"small": SMALL}.__getitem__)
    monkeypatch.setattr("foretune.model.train.train_bundle", lambda dataset, families, ranker: bundle)
    told = call("train --data small --keep shipped --json --out", tmp_path / "new")
    assert told.exit_code == 0, told.output
    shipped = load_bundle()
    assert json.loads(told.stdout)["kept"] == list(shipped.families)
    together = load_bundle(tmp_path / "new")
    assert together.families == tuple(sorted({"fake", *shipped.families}))
    assert together.merged_with(shipped).digest == together.digest  # what it has itself stays
    for one in (bundle, shipped):
        assert (
            Bundle({name: together.trained[name] for name in one.families}, one.lightgbm_version).digest == one.digest
        )


@pytest.mark.parametrize("command", ["adapt", "train"])
def test_a_command_does_not_replace_a_bundle_that_has_other_families(command, bundle, tmp_path):
    bundle.save(tmp_path / "own")
    content = (tmp_path / "own" / "bundle.npz").read_bytes()
    result = call(f"{command} --data h200_cover --out {tmp_path / 'own'}")
    assert result.exit_code == 1
    remedy = "--keep" if command == "train" else "--bundle"
    advice = f"{remedy} {tmp_path / 'own'}, or name another --out"
    assert re.search(f"own has a bundle with fake, .* {re.escape(advice)}", result.stderr)
    assert (tmp_path / "own" / "bundle.npz").read_bytes() == content
