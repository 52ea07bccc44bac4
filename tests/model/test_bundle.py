"""A bundle says the same everywhere."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from fakes import DEVICE, FakeFamily, fake_cases, fake_dataset
from foretune.datasets import BinaryFacts, BundleError, ForetuneError, Problem
from foretune.model import Bundle, LightGBMRanker, TrainedFamily, load_bundle, open_bundle, train_bundle
from foretune.runtime import make_shortlist
from forging import contents, forge, hand_made

FAMILY, DATASET = FakeFamily(), fake_dataset(fake_cases(models=3))
CASE, CONFIGS = DATASET.cases[0], DATASET.configs
QUICK = partial(LightGBMRanker, trees=20, epochs=0)


@pytest.fixture(scope="module")
def bundle():
    return train_bundle(DATASET, {"fake": FAMILY}, QUICK)


@pytest.fixture
def saved(bundle, tmp_path):
    bundle.save(tmp_path / "bundle")
    return tmp_path / "bundle"


def predictions(bundle):
    return bundle.ranker("fake").predict(FAMILY, CASE.problem, DEVICE, CONFIGS)


def test_saved_and_loaded_it_is_the_same(bundle, saved):
    loaded = load_bundle(saved)
    assert (predictions(loaded) == predictions(bundle)).all()
    assert loaded.digest == bundle.digest
    assert loaded.families == ("fake",)
    assert loaded.trained_on("fake") == (DEVICE,)
    assert loaded.ranker("fake").get_params() == bundle.ranker("fake").get_params()
    assert loaded.manifest == bundle.manifest


@pytest.fixture
def three(tmp_path):
    """The folder of a bundle of three families."""
    first, *others = (hand_made(name=name) for name in ("fake", "other", "third"))
    for other in others:
        first = first.merged_with(other)
    first.save(tmp_path / "three")
    return tmp_path / "three"


@pytest.fixture
def restored(three, monkeypatch):
    """The trees of each family that is restored from now on."""
    done, restore = [], TrainedFamily.from_json
    monkeypatch.setattr(TrainedFamily, "from_json", lambda value, arrays: done.append(value) or restore(value, arrays))
    return done


def test_of_an_opened_bundle_a_family_is_restored_when_it_is_asked_for_and_once(three, restored):
    bundle = open_bundle(three)
    assert (bundle.families, bundle.digest) == (("fake", "other", "third"), load_bundle(three).digest)
    restored.clear()
    assert make_shortlist(FAMILY, CASE.problem, DEVICE, k=3, bundle=bundle).predicted
    assert bundle.ranker("fake") is bundle.ranker("fake")
    assert restored == [bundle.manifest["families"]["fake"]]
    bundle.trained_on("third")
    assert len(restored) == 2


def test_a_loaded_bundle_is_restored_and_so_found_to_be_in_order(three, restored):
    load_bundle(three)
    assert len(restored) == 3


def test_a_family_that_nobody_asked_for_is_not_missed(three, tmp_path):
    opened = open_bundle(three)
    opened.save(tmp_path / "again")
    opened.merged_with(hand_made(name="fourth")).save(tmp_path / "more")
    assert (tmp_path / "again" / "bundle.npz").read_bytes() == (three / "bundle.npz").read_bytes()
    assert load_bundle(tmp_path / "more").families == ("fake", "fourth", "other", "third")


def test_a_family_that_is_not_in_order_is_refused_by_whoever_asks_for_it_and_no_other(three):
    forge(three, change_manifest=lambda m: m["families"]["other"].update(devices=[]))
    bundle = open_bundle(three)
    assert make_shortlist(FAMILY, CASE.problem, DEVICE, bundle=bundle).predicted
    for _ in range(2):
        with pytest.raises(BundleError, match=f"{three}/bundle.npz: not a bundle.*devices must name at least one"):
            bundle.ranker("other")
    with pytest.raises(BundleError, match="devices must name at least one"):
        load_bundle(three)
    with pytest.raises(BundleError, match="devices must name at least one"):
        bundle.save(three)


def test_what_computed_a_wrong_result_is_on_no_shortlist(tmp_path):
    problem = CASE.problem
    likely = make_shortlist(FAMILY, problem, DEVICE, k=3, bundle=train_bundle(DATASET, {"fake": FAMILY}, QUICK)).configs
    numbers = [i for i, case in enumerate(DATASET.cases) if case.problem.dtype == problem.dtype]
    numbers = [i for i in numbers if DATASET.cases[i].problem.flags == problem.flags]
    rows = DATASET.measurements
    wrong = rows["problem"].isin(numbers) & rows["config"].isin([CONFIGS.index(config) for config in likely[:2]])
    rows = rows.assign(status=rows["status"].mask(wrong, "wrong_result"), time_us=rows["time_us"].mask(wrong))
    train_bundle(replace(DATASET, measurements=rows), {"fake": FAMILY}, QUICK).save(tmp_path / "bundle")
    bundle = load_bundle(tmp_path / "bundle")
    assert bundle.wrong_results("fake", problem) == set(likely[:2])
    least = make_shortlist(FAMILY, problem, DEVICE, k=len(CONFIGS), bundle=bundle)
    assert least.predicted
    assert not set(likely[:2]) & set(least.configs)
    other = replace(problem, dtype="fp32")
    assert bundle.wrong_results("fake", other) == set()  # was not seen to be wrong


class ReadingFamily(FakeFamily):
    """One whose features look at what the binaries say."""

    reads_binaries = True
    feature_names = (*FakeFamily.feature_names, "registers", "told")

    def features(self, problem, device, configs, binaries=None):
        told = np.array([[binaries[c].registers, 1] if c in binaries else [0, 0] for c in configs], np.float32)
        return np.hstack([super().features(problem, device, configs), told.reshape(len(configs), 2)])


MIXED = {"x": "bf16", "w": "int4", "y": "bf16"}


@pytest.fixture(scope="module")
def reading():
    """Trained where registers are all that decides; half of the problems have a dtype for each operand."""
    cases = tuple(
        replace(case, problem=replace(case.problem, dtype=MIXED) if place % 2 else case.problem)
        for place, case in enumerate(DATASET.cases)
    )
    rows = DATASET.measurements
    registers = 16 + 7 * (rows["config"] % 11) + 100 * (rows["problem"] % 2)  # of other dtypes another binary
    rows = rows.assign(
        registers=registers.where(rows["config"] > 2), time_us=registers.where(rows["time_us"].notna()) * 1.0
    )
    return train_bundle(replace(DATASET, cases=cases, measurements=rows), {"fake": ReadingFamily()}, QUICK)


def test_what_the_binaries_say_is_kept_by_dtype_and_flags(reading, tmp_path):
    reading.save(tmp_path / "bundle")
    loaded, family = load_bundle(tmp_path / "bundle"), ReadingFamily()
    known = loaded.ranker("fake").binaries_
    assert known == reading.ranker("fake").binaries_
    assert set(known) == {("bf16", ()), (Problem.of("fake", dtype=MIXED).dtype, ())}
    for place, facts in enumerate((known["bf16", ()], known[Problem.of("fake", dtype=MIXED).dtype, ()])):
        assert set(facts) == set(CONFIGS[3:])  # of the first ones nobody knew
        assert facts[CONFIGS[10]] == BinaryFacts(registers=16 + 7 * 10 + 100 * place, spills=0, smem_bytes=1024)
    problem = CASE.problem
    predicted = loaded.ranker("fake").predict(family, problem, DEVICE, CONFIGS)
    assert (predicted == reading.ranker("fake").predict(family, problem, DEVICE, CONFIGS)).all()
    assert predicted[11] < 0.7 * predicted[10]  # 16 registers against 86


def test_without_the_binaries_it_predicts_otherwise(reading):
    ranker, family = reading.ranker("fake"), ReadingFamily()
    unknown = replace(CASE.problem, flags=("transposed",))  # of which no binary was measured
    told, blind = (ranker.predict(family, problem, DEVICE, CONFIGS) for problem in (CASE.problem, unknown))
    assert (told != blind).any()


def test_a_family_that_does_not_read_binaries_has_none_in_its_bundle(bundle):
    assert bundle.ranker("fake").binaries_ == {}
    assert bundle.manifest["families"]["fake"]["binaries"] == {"kinds": [], "configs": []}


def test_wrong_results_of_problems_with_a_dtype_for_each_operand(tmp_path):
    cases = tuple(replace(case, problem=replace(case.problem, dtype=MIXED)) for case in DATASET.cases)
    rows = DATASET.measurements
    wrong = (rows["config"] == 5) & (rows["problem"] == 1)
    rows = rows.assign(status=rows["status"].mask(wrong, "wrong_result"), time_us=rows["time_us"].mask(wrong))
    train_bundle(replace(DATASET, cases=cases, measurements=rows), {"fake": FAMILY}, QUICK).save(tmp_path / "bundle")
    bundle = load_bundle(tmp_path / "bundle")
    assert bundle.wrong_results("fake", cases[0].problem) == {CONFIGS[5]}
    assert bundle.wrong_results("fake", CASE.problem) == frozenset()


def test_what_was_calibrated_is_loaded_as_it_was(bundle, saved):
    trained, loaded = bundle.trained["fake"], load_bundle(saved).trained["fake"]
    assert (loaded.calibration, loaded.domain) == (trained.calibration, trained.domain)
    assert loaded.calibration.problems == len(DATASET.cases)


def test_the_measured_values_of_each_knob_are_recorded_and_old_bundles_have_none(bundle, saved, tmp_path):
    used = [config.to_json() for config in CONFIGS]
    assert bundle.trained["fake"].measured == {
        knob: tuple(sorted({str(one[knob]) for one in used})) for knob in FAMILY.knobs
    }
    assert load_bundle(saved).trained["fake"].measured == bundle.trained["fake"].measured
    old = Bundle({"fake": replace(bundle.trained["fake"], measured=None)}, bundle.lightgbm_version)
    assert "measured" not in old.manifest["families"]["fake"]
    old.save(tmp_path / "old")
    assert load_bundle(tmp_path / "old").trained["fake"].measured is None


def test_a_network_is_saved_and_loaded_beside_the_trees(tmp_path):
    trained = train_bundle(DATASET, {"fake": FAMILY}, partial(LightGBMRanker, trees=6, epochs=2))
    trained.save(tmp_path / "bundle")
    loaded = load_bundle(tmp_path / "bundle")
    assert loaded.digest == trained.digest
    assert (predictions(loaded) == predictions(trained)).all()
    network, kept = (one.ranker("fake").network_ for one in (trained, loaded))
    assert all((array == kept.arrays()[name]).all() for name, array in network.arrays().items())


def test_same_training_same_bytes(saved, tmp_path):
    train_bundle(DATASET, {"fake": FAMILY}, QUICK).save(tmp_path / "again")
    assert (saved / "bundle.npz").read_bytes() == (tmp_path / "again" / "bundle.npz").read_bytes()


def test_other_data_other_digest(bundle):
    other = train_bundle(fake_dataset(fake_cases(models=4)), {"fake": FAMILY}, QUICK)
    assert other.digest != bundle.digest
    assert other.manifest["families"]["fake"]["origin"] != bundle.manifest["families"]["fake"]["origin"]


def test_the_manifest_says_where_it_comes_from(saved):
    _, manifest = contents(saved)
    entry = manifest["families"]["fake"]
    assert entry["origin"]["dataset"] == "fake"
    assert entry["origin"]["source_hash"] == "fake-source"
    assert entry["origin"]["problems"] == len(DATASET.cases)
    assert entry["feature_names"] == list(FAMILY.feature_names)
    assert entry["trees"] == 21  # and the constant that places the ranking half
    assert [device["arch"] for device in entry["devices"]] == ["sm_90"]


def test_numpy_reads_the_arrays_too(saved):
    with np.load(saved / "bundle.npz", allow_pickle=False) as arrays:
        assert len(arrays["fake/tree_leaves"]) == 21


def test_predicting_needs_numpy_alone(saved):
    code = f"""
import sys
import foretune.model
foretune.model.load_bundle({str(saved)!r})
heavy = {{"lightgbm", "pandas", "sklearn", "joblib", "torch", "triton", "pyarrow"}} & sys.modules.keys()
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_unknown_family_lists_those_there_are(bundle):
    with pytest.raises(BundleError, match="no family 'attention'; it has fake"):
        bundle.ranker("attention")
    with pytest.raises(BundleError, match="no family 'attention'; it has fake"):
        bundle.trained_on("attention")


def test_training_an_unknown_family_lists_the_known_ones():
    with pytest.raises(ForetuneError, match="must be among other but are fake"):
        train_bundle(DATASET, {"other": FAMILY}, QUICK)


def test_missing_and_newer_files_are_named(saved, tmp_path):
    with pytest.raises(BundleError, match=r"nowhere/bundle.npz: no such file, so .*nowhere has no bundle"):
        load_bundle(tmp_path / "nowhere")
    with pytest.raises(BundleError, match=r"bundle.npz is not a folder: name the one that has the bundle"):
        load_bundle(saved / "bundle.npz")
    for version, why in ((9, "; a newer Foretune wrote it"), (7, ": train it again")):
        forge(saved, change_manifest=lambda manifest, version=version: manifest.update(schema_version=version))
        with pytest.raises(BundleError, match=f"schema_version is {version} but this Foretune reads 8{why}"):
            load_bundle(saved)


def test_a_bundle_shows_its_families_in_one_line_and_as_a_table(bundle):
    assert repr(bundle) == f"Bundle(1 family: fake; digest {bundle.digest[:12]})"
    assert repr(Bundle({}, "4")).startswith("Bundle(0 families: none; digest ")
    shown = bundle._repr_html_()
    assert f"<caption>Bundle {bundle.digest[:12]}</caption>" in shown
    cells = [cell.removesuffix("</td>") for cell in shown.split("<tr>")[2].partition("</tr>")[0].split("<td>")[1:]]
    trained = bundle.trained["fake"]
    assert cells[:4] == ["fake", "NVIDIA H200", str(trained.origin["problems"]), f"{len(trained.ranker.forest_)} trees"]
    hostile = replace(trained, origin={"problems": "<script>"})
    assert "<script>" not in Bundle({"fake": hostile}, "4")._repr_html_()
