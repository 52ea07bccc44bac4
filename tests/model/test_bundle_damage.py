"""No file, damaged or hostile, does worse than a `BundleError`."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest
from fakes import DEVICE, FakeFamily, fake_cases
from foretune.datasets import BundleError, ForetuneError, ForetuneWarning, KernelConfig
from foretune.model import Forest, bundle_file, load_bundle, open_bundle
from foretune.runtime import make_shortlist
from forging import contents, forge, hand_made, signed, write

FAMILY, CONFIGS = FakeFamily(), FakeFamily().space()
PROBLEM = fake_cases(models=1)[0].problem


@pytest.fixture
def saved(tmp_path):
    hand_made().save(tmp_path / "bundle")
    return tmp_path / "bundle"


def used(directory):
    """A bundle of which every family is asked for, one by one."""
    bundle = open_bundle(directory)
    return [bundle.ranker(name) for name in bundle.families]


#: However a bundle is read, nothing of it is used before it is found to be in order.
READ = pytest.mark.parametrize("read", [load_bundle, used])


def predictions(bundle):
    return bundle.ranker("fake").predict(FAMILY, PROBLEM, DEVICE, CONFIGS)


def test_damage_is_an_error_or_changes_nothing(saved):
    """Flipped bits, cuts, gaps and repeated stretches, 400 of them."""
    random = np.random.default_rng(0)
    path = saved / "bundle.npz"
    whole, expected, caught = path.read_bytes(), predictions(load_bundle(saved)), 0
    for trial in range(400):
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
        path.write_bytes(content)
        try:
            assert (predictions(load_bundle(saved)) == expected).all()
        except BundleError as error:
            assert str(path) in str(error)  # noqa: PT017
            caught += 1
    assert caught > 360


def test_damage_under_a_fitting_checksum_is_an_error_or_a_forest(saved):
    """What stands behind the checksums, fed 200 bundles that somebody tampered with and signed."""
    random = np.random.default_rng(0)
    arrays, manifest = contents(saved)
    caught = 0
    for _ in range(200):
        name = random.choice(sorted(arrays))
        content = bytearray(arrays[name].tobytes())
        for _ in range(int(random.integers(1, 4))):
            content[int(random.integers(len(content)))] = int(random.integers(256))
        forged = arrays | {name: np.frombuffer(bytes(content), arrays[name].dtype).reshape(arrays[name].shape)}
        write(saved, forged, signed(manifest, forged))
        try:
            assert np.isfinite(predictions(load_bundle(saved))).all()
        except BundleError:
            caught += 1
    assert 80 < caught < 200


@READ
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("split_left", np.zeros),  # each split its own child
        ("split_left", lambda n, dtype: np.full(n, 31, dtype)),
        ("split_feature", lambda n, dtype: np.full(n, 1000, dtype)),
        ("split_feature", lambda n, dtype: np.full(n, -1, np.int16)),
        ("split_threshold", lambda n, dtype: np.zeros(n, np.float64)),
        ("split_threshold", lambda n, dtype: np.full(n, np.nan, dtype)),
        ("leaf_value", lambda n, dtype: np.full(n, np.inf, dtype)),
        ("leaf_value", lambda n, dtype: np.zeros(n - 1, dtype)),
        ("tree_leaves", lambda n, dtype: np.full(n, 200, dtype)),
        ("tree_leaves", lambda n, dtype: np.zeros(n, np.float64)),
        ("n_features", lambda n, dtype: np.array(1 << 60, dtype)),
        ("n_features", lambda n, dtype: np.array(19, dtype)),  # one more than there are names
    ],
)
def test_hostile_arrays_with_a_fitting_checksum(saved, name, value, read):
    def change(arrays):
        old = arrays[f"fake/{name}"]
        return arrays | {f"fake/{name}": value(old.size, old.dtype)}

    forge(saved, change_arrays=change)
    with pytest.raises(BundleError, match=str(saved)):
        read(saved)


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


def _twice(**members):
    """Two members of one name."""
    return _archive(**members, b=b"x" * 100).replace(b"b.npy", b"a.npy")


def _overlapping():
    """Two members, the second of which begins where the first does: 100 kB that say to be 200."""
    content = _archive(a=bytes(100_000), b=b"")
    place = content.rindex(b"PK\x01\x02")
    first = content.index(b"PK\x01\x02")
    listed = content[first:place]
    end = bytearray(content[-22:])
    struct.pack_into("<L", end, 12, 2 * len(listed))
    return content[:first] + listed + listed.replace(b"a.npy", b"c.npy") + bytes(end)


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
        _archive(**{f"a{number}": b"" for number in range(1025)}),
        _archive(a=b"") + b"more",
        _archive(a=b"")[:-2] + b"\x05\x00hello",  # with a comment
        _archive(a=b"")[:-14] + b"\xff\xff\xff\xff" + _archive(a=b"")[-10:],  # members that are not there
        _twice(a=b"x" * 100),
        _overlapping(),
    ],
    ids=lambda content: f"{len(content)}-{content[-12:]!r}"[:40],
)
def test_hostile_archives(saved, content):
    (saved / "bundle.npz").write_bytes(content)
    with pytest.raises(BundleError, match=str(saved)):
        load_bundle(saved)


@READ
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
        *(lambda m, odd=odd: m["families"]["fake"].update(origin=odd) for odd in (3, "[red]", [], None)),
        lambda m: m["families"]["fake"].update(devices=[]),
        lambda m: m["families"]["fake"].pop("origin"),
        lambda m: m["families"]["fake"].pop("trees"),
        lambda m: m["families"]["fake"].update(trees=7),
        lambda m: m["families"]["fake"].update(more=7),
        lambda m: m.update(more=7),
        lambda m: m.update(families={}),  # whose are the arrays?
        lambda m: m.update(families={str(number): {} for number in range(65)}),
        *(lambda m, odd=odd: m.update(lightgbm_version=odd) for odd in (7, None, "", "4.7\n", "\x1b[31m", "4" * 201)),
        *(lambda m, odd=odd: m["families"].update({odd: m["families"].pop("fake")}) for odd in ("", "fake\n", "other")),
        *(lambda m, odd=odd: m.update(schema_version=odd) for odd in (7, 9, 8.0, True, "8", None, [], -1, 10**400)),
        lambda m: m["families"]["fake"]["params"].pop("trees"),
        *(
            lambda m, odd=odd: m["families"]["fake"]["params"].update(trees=odd)
            for odd in (True, 2.5, 10**400, None, [], -1)
        ),
        *(
            lambda m, odd=odd: m["families"]["fake"]["params"].update(l2=odd)
            for odd in (float("nan"), float("inf"), 1e300, "1", None)
        ),
        *(
            lambda m, odd=odd: m["families"]["fake"].update(feature_names=odd)
            for odd in ("x" * 18, [7] * 18, [["x"]] * 18, dict.fromkeys("abcdefghijklmnopqr"), ["\ud800"] * 18)
        ),
        lambda m: m["families"]["fake"]["wrong_results"].append(m["families"]["fake"]["wrong_results"][0]),
        lambda m: m["families"]["fake"]["wrong_results"][0].update(flags=[1]),
        lambda m: m["families"]["fake"]["wrong_results"][0].update(flags="transposed"),
        lambda m: m["families"]["fake"].pop("wrong_results"),
        lambda m: m["families"]["fake"].update(wrong_results={"bf16": []}),
        lambda m: m["families"]["fake"].update(wrong_results=[{"dtype": "bf16", "flags": []}]),
        lambda m: m["families"]["fake"].update(wrong_results=[{"dtype": "bf16", "flags": [], "configs": [{"M": []}]}]),
        lambda m: m["families"]["fake"].update(wrong_results=[{"dtype": "int7", "flags": [], "configs": []}]),
        lambda m: m["families"]["fake"].update(wrong_results=[{"dtype": {}, "flags": [], "configs": []}]),
        lambda m: m["families"]["fake"].update(wrong_results=[{"dtype": ["bf16"], "flags": [], "configs": []}]),
        lambda m: m["families"]["fake"].update(binaries=7),
        lambda m: m["families"]["fake"].update(binaries=[]),
        lambda m: m["families"]["fake"].update(binaries={"kinds": []}),
        lambda m: m["families"]["fake"].update(binaries={"kinds": [{"dtype": "bf16", "flags": []}], "configs": []}),
        lambda m: m["families"]["fake"].update(binaries={"kinds": [], "configs": [KernelConfig.of(M=16).to_json()]}),
        *(
            lambda m, key=key: m["families"]["fake"].pop(key)
            for key in ("calibration", "extent", "binaries", "network")
        ),
        lambda m: m["families"]["fake"]["params"].pop("epochs"),
        *(
            lambda m, odd=odd: m["families"]["fake"].update(measured=odd)
            for odd in (7, [], "auto", None, {"BLOCK_M": 7}, {"BLOCK_M": [64]}, {"BLOCK_M": "64"})
        ),
        lambda m: m["families"]["fake"].update(extent=None),
        *(
            lambda m, key=key, odd=odd: m["families"]["fake"].update({key: odd})
            for key in ("calibration", "extent")
            for odd in (7, [], {}, "auto", True)
        ),
        *(
            lambda m, key=key, odd=odd: m["families"]["fake"]["calibration"].update({key: odd})
            for key, odd in (
                ("problems", 0),
                ("problems", 39),  # fewer than have a level
                ("problems", True),
                ("problems", 10**400),
                ("levels", [1.0, 0.5]),
                ("levels", [-1.0]),
                ("levels", [float("inf")]),
                ("levels", ["1"]),
                ("levels", {}),
                ("levels", [10**400]),
                ("regret", []),
                ("regret", [0.0] * 12 + [0.5]),  # rises
                ("regret", [float("nan")] * 13),
                ("regret", "0" * 13),
            )
        ),
        *(
            lambda m, key=key, odd=odd: m["families"]["fake"]["extent"].update({key: odd})
            for key, odd in (
                ("sizes", {"rows": [8, 8]}),  # and no others
                ("sizes", {"rows": [9.0, 8.0]}),
                ("sizes", {"rows": [0.0, 8.0]}),
                ("sizes", {"": [8.0, 8.0]}),
                ("sizes", {"rows": [8.0, float("nan")]}),
                ("sizes", []),
                ("ratios", {}),
                ("ratios", {"rows": 7}),
                ("kinds", []),
                ("kinds", [{"dtype": "int7", "flags": []}]),
                ("kinds", [{"dtype": "bf16"}]),
                ("kinds", 7),
            )
        ),
    ],
)
def test_hostile_manifests_with_a_fitting_checksum(saved, change, read):
    forge(saved, change_manifest=change)
    with pytest.raises(BundleError, match=str(saved)):
        read(saved)


def test_features_of_another_family_are_no_prediction(saved):
    forge(saved, change_manifest=lambda m: m["families"]["fake"].update(feature_names=[f"f{i}" for i in range(18)]))
    with pytest.warns(ForetuneWarning, match="retrain it"):
        answer = make_shortlist(FAMILY, PROBLEM, DEVICE, bundle=load_bundle(saved))
    assert not answer.predicted
    assert "was trained on other features than the family has now" in answer.reason


def test_a_deep_origin_is_an_error_or_kept(saved):
    deep = json.loads("[" * 50 + "]" * 50)
    forge(saved, change_manifest=lambda m: m["families"]["fake"]["origin"].update(more=deep))
    assert load_bundle(saved).trained["fake"].origin["more"] == deep
    arrays, manifest = contents(saved)
    text = json.dumps(manifest).replace('"dataset": "fake"', f'"dataset": {"[" * 100_000}{"]" * 100_000}')
    (saved / "bundle.npz").write_bytes(bundle_file.dumps(arrays, {"manifest.json": text.encode()}))
    with pytest.raises(BundleError, match=r"its manifest is not JSON: .*(recursion|Stack overflow)"):
        load_bundle(saved)


def test_a_manifest_larger_than_any_is_not_parsed(saved):
    forge(saved, change_manifest=lambda m: m["families"]["fake"]["origin"].update(more="x" * (8 << 20)))
    with pytest.raises(BundleError, match=r"its manifest is larger than one may be \(8 MiB\)"):
        load_bundle(saved)


def test_a_file_larger_than_any_is_not_read(saved):
    with (saved / "bundle.npz").open("r+b") as file:
        file.truncate((64 << 20) + 1)  # a hole
    with pytest.raises(BundleError, match="cannot be read: it has more than 67108864 bytes"):
        load_bundle(saved)


def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "bundle.npz")
    with pytest.raises(BundleError, match="it is a pipe, not a regular file"):
        load_bundle(tmp_path)


@pytest.mark.parametrize("place", ["a/bundle.npz", "a\0b", "x" * 5000])
def test_places_where_no_bundle_can_be(tmp_path, place):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "bundle.npz").write_bytes(b"")
    with pytest.raises(ForetuneError, match="bundle"):
        load_bundle(tmp_path / place)


def test_members_that_are_no_bundles(saved):
    arrays, manifest = contents(saved)
    texts = {"manifest.json": json.dumps(manifest).encode(), "../evil.txt": b"more"}
    (saved / "bundle.npz").write_bytes(bundle_file.dumps(arrays, texts))
    with pytest.raises(BundleError, match=r"unexpected members: '../evil.txt'"):
        load_bundle(saved)


def forest(trees, leaves, features, thresholds):
    """Arrays of a forest of chains, whose splits have so many thresholds of each feature."""
    random = np.random.default_rng(0)
    splits = trees * (leaves - 1)
    return {
        "fake/n_features": np.array(features, np.int64),
        "fake/tree_leaves": np.full(trees, leaves, np.uint8),
        "fake/split_feature": (np.arange(splits) % features).astype(np.uint16),
        "fake/split_threshold": (random.integers(0, thresholds, splits) / thresholds).astype(np.float32),
        "fake/split_left": np.tile(np.arange(leaves - 1, 0, -1), trees).astype(np.uint8),
        "fake/leaf_value": random.normal(0, 0.001, trees * leaves),
    }


def resealed(directory, arrays):
    """A bundle with other trees, that fit."""

    def tell(manifest):
        features = int(arrays["fake/n_features"])
        names = [f"f{number}" for number in range(features)]
        manifest["families"]["fake"] |= {"trees": len(arrays["fake/tree_leaves"]), "feature_names": names}

    binaries = contents(directory)[0]["fake/binaries"]
    forge(directory, change_arrays=lambda old: arrays | {"fake/binaries": binaries}, change_manifest=tell)


@READ
@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (forest(1_000_000, 1, 18, 1), "at most 4096 trees but has 1000000"),
        (forest(1, 2, 513, 1), "n_features must be between 1 and 512 but is 513"),
        (forest(2000, 32, 100, 10_000), "too large to score: its tables would have"),
        (forest(2, 2, 18, 1) | {"fake/leaf_value": np.full(4, 1e300)}, "can reach 2e.300, but at most 300"),
        (forest(2, 2, 18, 1) | {"fake/leaf_value": np.full(4, 150.1)}, "can reach 300, but at most 300"),
    ],
)
def test_no_forest_takes_all_memory_or_predicts_no_number(saved, arrays, message, read):
    resealed(saved, arrays)
    with pytest.raises(BundleError, match=f"{saved}.*{message}"):
        read(saved)


@pytest.mark.parametrize(
    "arrays",
    [forest(4096, 3, 32, 200), forest(2001, 32, 65, 254), forest(1000, 32, 512, 60), forest(1000, 32, 1, 33_000)],
    ids=["trees", "splits", "features", "thresholds"],
)
def test_at_its_bounds_a_forest_is_predicted_in_half_a_gigabyte(saved, arrays):
    """And in a second: not measured here, where others compute too."""
    resealed(saved, arrays)
    width = int(arrays["fake/n_features"])
    table = np.random.default_rng(0).random((1000, width))
    tracemalloc.start()
    try:
        predicted = load_bundle(saved).ranker("fake").forest_.predict(table)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert np.isfinite(np.exp(predicted)).all()
    assert peak < 500e6


def test_whatever_a_ranker_may_be_trained_with_can_be_loaded():
    """Its trees, leaves, and LightGBM's 255 bins for each of 65 features."""
    Forest(**{name.removeprefix("fake/"): array for name, array in forest(2001, 32, 65, 254).items()})


@pytest.mark.parametrize("text", ["", "[]", "null", "[" * 100_000, '{"schema_version": ', "\xff", "1e999"])
def test_a_manifest_that_is_no_manifest(saved, text):
    content = bundle_file.dumps(contents(saved)[0], {"manifest.json": text.encode("latin1")})
    (saved / "bundle.npz").write_bytes(content)
    with pytest.raises(BundleError, match=r"bundle.npz: not a bundle of this Foretune: (its manifest is|not)"):
        load_bundle(saved)
