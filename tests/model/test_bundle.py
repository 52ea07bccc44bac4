"""A bundle says the same everywhere, and no file, damaged or hostile, does worse than a `BundleError`."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import subprocess
import sys
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from fakes import DEVICE, FakeFamily, fake_cases, fake_dataset
from foretune.datasets import BinaryFacts, BundleError, DeviceSpec, ForetuneError, KernelConfig, Problem
from foretune.datasets.store.older import upgraded_problem
from foretune.kernels import find_family
from foretune.model import LightGBMRanker, load_bundle, npz, train_bundle
from foretune.runtime import make_shortlist

FAMILY, DATASET = FakeFamily(), fake_dataset(fake_cases(models=3))
CASE, CONFIGS = DATASET.cases[0], DATASET.configs
QUICK = partial(LightGBMRanker, trees=20)


@pytest.fixture(scope="module")
def bundle():
    return train_bundle(DATASET, {"fake": FAMILY}, QUICK)


@pytest.fixture
def saved(bundle, tmp_path):
    bundle.save(tmp_path / "bundle")
    return tmp_path / "bundle"


def predictions(bundle):
    return bundle.ranker("fake").predict(FAMILY, CASE.problem, DEVICE, CONFIGS)


def forge(directory, change_arrays=None, change_manifest=None, content=None):
    """Rewrites a bundle with checksums that fit."""
    manifest = json.loads((directory / "manifest.json").read_text())
    if change_arrays:
        content = npz.dumps(change_arrays(npz.loads((directory / "arrays.npz").read_bytes())))
    if content is not None:
        (directory / "arrays.npz").write_bytes(content)
        manifest["arrays_sha256"] = hashlib.sha256(content).hexdigest()
    if change_manifest:
        change_manifest(manifest)
    manifest.pop("checksum", None)
    manifest["checksum"] = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (directory / "manifest.json").write_text(json.dumps(manifest))


def test_saved_and_loaded_it_is_the_same(bundle, saved):
    loaded = load_bundle(saved)
    assert (predictions(loaded) == predictions(bundle)).all()
    assert loaded.digest == bundle.digest
    assert loaded.families == ("fake",)
    assert loaded.trained_on("fake") == (DEVICE,)
    assert loaded.ranker("fake").get_params() == bundle.ranker("fake").get_params()
    assert loaded.manifest == bundle.manifest


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
    other = replace(problem, dtype="fp32")  # was not seen to be wrong
    assert set(likely[:2]) <= set(make_shortlist(FAMILY, other, DEVICE, k=len(CONFIGS), bundle=bundle).configs)


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
    assert bundle.manifest["families"]["fake"]["binaries"] == []


def test_wrong_results_of_problems_with_a_dtype_for_each_operand(tmp_path):
    cases = tuple(replace(case, problem=replace(case.problem, dtype=MIXED)) for case in DATASET.cases)
    rows = DATASET.measurements
    wrong = (rows["config"] == 5) & (rows["problem"] == 1)
    rows = rows.assign(status=rows["status"].mask(wrong, "wrong_result"), time_us=rows["time_us"].mask(wrong))
    train_bundle(replace(DATASET, cases=cases, measurements=rows), {"fake": FAMILY}, QUICK).save(tmp_path / "bundle")
    bundle = load_bundle(tmp_path / "bundle")
    assert bundle.wrong_results("fake", cases[0].problem) == {CONFIGS[5]}
    assert bundle.wrong_results("fake", CASE.problem) == frozenset()


def test_a_bundle_of_version_2_is_read(bundle, saved):
    """It had no binaries."""

    def older(manifest):
        manifest["schema_version"] = 2
        del manifest["families"]["fake"]["binaries"]

    forge(saved, change_manifest=older)
    loaded = load_bundle(saved)
    assert loaded.ranker("fake").binaries_ == {}
    assert (predictions(loaded) == predictions(bundle)).all()
    loaded.save(saved)  # and written again as one of today
    assert json.loads((saved / "manifest.json").read_text())["schema_version"] == 3
    assert load_bundle(saved).digest == bundle.digest


VERSION2 = Path(__file__).parent / "version2"  # see make.py there


@pytest.mark.parametrize(
    "recorded", json.loads((VERSION2 / "scores.json").read_text()), ids=lambda one: one["problem"]["family"]
)
def test_what_the_code_of_version_2_wrote_is_predicted_to_the_last_bit(recorded):
    assert json.loads((VERSION2 / "manifest.json").read_text())["schema_version"] == 2
    problem = Problem.from_json(json.loads(upgraded_problem(json.dumps(recorded["problem"]))))
    configs = [KernelConfig.from_json(config) for config in recorded["configs"]]
    ranker = load_bundle(VERSION2).ranker(problem.family)
    scores = ranker.predict(find_family(problem.family), problem, DeviceSpec.named("h200"), configs)
    assert scores.tolist() == recorded["scores"]


def test_same_training_same_bytes(saved, tmp_path):
    train_bundle(DATASET, {"fake": FAMILY}, QUICK).save(tmp_path / "again")
    for name in ("manifest.json", "arrays.npz"):
        assert (saved / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_other_data_other_digest(bundle):
    other = train_bundle(fake_dataset(fake_cases(models=4)), {"fake": FAMILY}, QUICK)
    assert other.digest != bundle.digest
    assert other.manifest["families"]["fake"]["origin"] != bundle.manifest["families"]["fake"]["origin"]


def test_the_manifest_says_where_it_comes_from(saved):
    manifest = json.loads((saved / "manifest.json").read_text())
    entry = manifest["families"]["fake"]
    assert entry["origin"]["dataset"] == "fake"
    assert entry["origin"]["source_hash"] == "fake-source"
    assert entry["origin"]["problems"] == len(DATASET.cases)
    assert entry["feature_names"] == list(FAMILY.feature_names)
    assert entry["trees"] == 21  # and the constant that places the ranking half
    assert [device["arch"] for device in entry["devices"]] == ["sm_90"]


def test_numpy_reads_the_arrays_too(saved):
    with np.load(saved / "arrays.npz", allow_pickle=False) as arrays:
        assert len(arrays["fake/tree_leaves"]) == 21


def test_saving_over_an_older_bundle(saved):
    newer = train_bundle(fake_dataset(fake_cases(models=4)), {"fake": FAMILY}, QUICK)
    newer.save(saved)
    assert load_bundle(saved).digest == newer.digest
    assert sorted(path.name for path in saved.parent.iterdir()) == ["bundle"]


def test_a_failed_save_leaves_nothing_behind(bundle, tmp_path):
    (tmp_path / "bundle").write_text("a file is in the way")
    with pytest.raises(OSError, match="bundle"):
        bundle.save(tmp_path / "bundle")
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


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
    with pytest.raises(BundleError, match=r"nowhere/manifest.json: cannot be read"):
        load_bundle(tmp_path / "nowhere")
    forge(saved, change_manifest=lambda manifest: manifest.update(schema_version=4))
    with pytest.raises(BundleError, match="schema_version is 4 but this Foretune reads 2 to 3; a newer Foretune wrote"):
        load_bundle(saved)


@pytest.mark.parametrize("name", ["manifest.json", "arrays.npz"])
def test_damage_is_an_error_or_changes_nothing(bundle, saved, name):
    """Flipped bits, cuts, gaps and repeated stretches, 200 of each file."""
    random = np.random.default_rng(0)
    whole, expected, caught = (saved / name).read_bytes(), predictions(bundle), 0
    for trial in range(200):
        content, place = bytearray(whole), int(random.integers(len(whole)))
        match trial % 4:
            case 0:
                content[place] ^= 1 << int(random.integers(8))
            case 1:
                del content[place:]
            case 2:
                del content[place : place + int(random.integers(1, 50))]
            case _:
                content[place:place] = content[place : place + 20] or b"x"
        (saved / name).write_bytes(content)
        try:
            assert (predictions(load_bundle(saved)) == expected).all()
        except BundleError:
            caught += 1
    assert caught > 180


def test_damage_under_a_fitting_checksum_is_an_error_or_a_forest(saved):
    """The parsers behind the checksum, fed 400 files that somebody tampered with and signed."""
    random = np.random.default_rng(0)
    whole, caught = (saved / "arrays.npz").read_bytes(), 0
    for _ in range(400):
        content = bytearray(whole)
        for _ in range(int(random.integers(1, 4))):
            content[int(random.integers(len(content)))] = int(random.integers(256))
        forge(saved, content=bytes(content))
        try:
            assert predictions(load_bundle(saved)).shape == (len(CONFIGS),)
        except BundleError:
            caught += 1
    assert caught > 300  # zip members carry a CRC


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("split_left", np.zeros),  # each split its own child
        ("split_left", lambda n, dtype: np.full(n, 31, dtype)),
        ("split_feature", lambda n, dtype: np.full(n, 1000, dtype)),
        ("split_feature", lambda n, dtype: np.full(n, -1, dtype)),
        ("split_threshold", lambda n, dtype: np.full(n, np.nan, dtype)),
        ("leaf_value", lambda n, dtype: np.full(n, np.inf, dtype)),
        ("leaf_value", lambda n, dtype: np.zeros(n - 1, dtype)),
        ("tree_leaves", lambda n, dtype: np.full(n, 200, dtype)),
        ("tree_leaves", lambda n, dtype: np.zeros(n, np.float64)),
        ("n_features", lambda n, dtype: np.array(1 << 60, dtype)),
        ("n_features", lambda n, dtype: np.array(19, dtype)),  # one more than there are names
    ],
)
def test_hostile_arrays_with_a_fitting_checksum(saved, name, value):
    def change(arrays):
        old = arrays[f"fake/{name}"]
        return arrays | {f"fake/{name}": value(old.size, old.dtype)}

    forge(saved, change_arrays=change)
    with pytest.raises(BundleError, match=str(saved)):
        load_bundle(saved)


@pytest.mark.parametrize(
    "change",
    [
        lambda arrays: {name: array for name, array in arrays.items() if not name.endswith("leaf_value")},
        lambda arrays: arrays | {"fake/extra": np.zeros(1)},
        lambda arrays: {},
    ],
)
def test_missing_and_extra_arrays(saved, change):
    forge(saved, change_arrays=change)
    with pytest.raises(BundleError, match="not a bundle of this Foretune"):
        load_bundle(saved)


class _Bomb:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was loaded",))


def _archive(compression=zipfile.ZIP_STORED, **members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return buffer.getvalue()


def _header(text):
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK\x05\x06" + bytes(18),
        pickle.dumps(_Bomb()),
        _archive(a=pickle.dumps(_Bomb())),
        _archive(a=_header(b"{'descr': '|O', 'fortran_order': False, 'shape': (1,)}\n") + pickle.dumps([_Bomb()])),
        _archive(a=_header(b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,)}\n")),
        _archive(a=_header(b"{'descr': '<f8', 'fortran_order': False, 'shape': (-1,)}\n") + bytes(8)),
        _archive(a=_header(b"{'descr': '<f8', 'fortran_order': False, 'shape': (1 << 70,)}\n")),
        _archive(a=_header(b"__import__('os').abort()\n")),
        _archive(a=_header(b"[" * 4000)),
        _archive(a=_header(b"")),
        _archive(zipfile.ZIP_DEFLATED, a=bytes(100_000_000)),  # a bomb: 100 kB on the disk
    ],
    ids=lambda content: f"{len(content)}-{content[-12:]!r}"[:40],
)
def test_hostile_archives_with_a_fitting_checksum(saved, content):
    forge(saved, content=content)
    with pytest.raises(BundleError, match=str(saved)):
        load_bundle(saved)


def _binary(without=None, **changes):
    """A forged entry of one binary, right but for these changes."""
    facts = {"config": {"BLOCK_M": 16}, "registers": 40, "spills": 0, "smem_bytes": 512} | changes
    facts.pop(without, None)
    return [{"dtype": "bf16", "flags": [], "configs": [facts]}]


def test_the_forged_entry_of_a_binary_is_right_but_for_what_is_changed(saved):
    forge(saved, change_manifest=lambda manifest: manifest["families"]["fake"].update(binaries=_binary()))
    known = {KernelConfig.of(BLOCK_M=16): BinaryFacts(registers=40, spills=0, smem_bytes=512)}
    assert load_bundle(saved).ranker("fake").binaries_ == {("bf16", ()): known}


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.pop("families"),
        lambda m: m.update(families=[]),
        lambda m: m.update(families={"fake": None}),
        lambda m: m.update(families={"fake": {}}),
        lambda m: m.update(arrays_sha256=7),
        lambda m: m.pop("lightgbm_version"),
        lambda m: m["families"]["fake"]["params"].update(trees=0),
        lambda m: m["families"]["fake"]["params"].update(trees="many"),
        lambda m: m["families"]["fake"]["params"].update(unknown=1),
        lambda m: m["families"]["fake"].update(params=[]),
        lambda m: m["families"]["fake"].update(feature_names=7),
        lambda m: m["families"]["fake"].update(feature_names=["a"]),
        lambda m: m["families"]["fake"].update(devices=[{"name": "h200"}]),
        lambda m: m["families"]["fake"].update(devices=["h200"]),
        lambda m: m["families"]["fake"].update(origin=3),
        lambda m: m["families"]["fake"].pop("wrong_results"),
        lambda m: m["families"]["fake"].update(wrong_results={"bf16": []}),
        lambda m: m["families"]["fake"].update(wrong_results=[{"dtype": "bf16", "flags": []}]),
        lambda m: m["families"]["fake"].update(wrong_results=[{"dtype": "bf16", "flags": [], "configs": [{"M": []}]}]),
        lambda m: m["families"]["fake"].update(wrong_results=[{"dtype": "int7", "flags": [], "configs": []}]),
        lambda m: m["families"]["fake"].update(wrong_results=[{"dtype": {}, "flags": [], "configs": []}]),
        lambda m: m["families"]["fake"].update(wrong_results=[{"dtype": ["bf16"], "flags": [], "configs": []}]),
        lambda m: m["families"]["fake"].update(binaries=7),
        lambda m: m["families"]["fake"].update(binaries={"bf16": []}),
        lambda m: m["families"]["fake"].update(binaries=[{"dtype": "bf16", "flags": []}]),
        lambda m: m["families"]["fake"].update(binaries=[{"dtype": "bf16", "flags": [], "configs": [{"M": 16}]}]),
        *(
            lambda m, count=count: m["families"]["fake"].update(binaries=_binary(registers=count))
            for count in (-1, 1 << 31, 40.0, "40", None, True, [])
        ),
        *(
            lambda m, name=name: m["families"]["fake"].update(binaries=_binary(without=name))
            for name in ("registers", "spills", "smem_bytes", "config")
        ),
    ],
)
def test_hostile_manifests_with_a_fitting_checksum(saved, change):
    forge(saved, change_manifest=change)
    with pytest.raises(BundleError, match=str(saved)):
        load_bundle(saved)


@pytest.mark.parametrize("text", ["", "[]", "null", "[" * 100_000, '{"schema_version": ', "\xff", "1e999"])
def test_a_manifest_that_is_no_manifest(saved, text):
    (saved / "manifest.json").write_bytes(text.encode("latin1"))
    with pytest.raises(BundleError, match=r"manifest.json: not"):
        load_bundle(saved)
