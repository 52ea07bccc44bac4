"""Bundles that somebody changed: bytes, members, arrays, what the manifest says; with checksums that fit, or not."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from fakes import DEVICE, FakeFamily, fake_cases
from foretune.model import bundle_file, load_bundle
from foretune.runtime import make_shortlist
from forging import FILE, MANIFEST, hand_made, signed
from fuzz.judging import REFUSED, TroubleError, same, within
from fuzz.oddities import Change, changed, changes, text_of
from hypothesis import strategies as st

FAMILY, CONFIGS = FakeFamily(), FakeFamily().space()
#: That a ranker can be trained with.
MOST_TREES = 2000
PROBLEM = fake_cases(models=1)[0].problem
DTYPES = ["<f8", "<f4", "<i8", "<i4", "|u1", "|i1", "<u8", "<f2"]
BUNDLE = hand_made(trees=3)
NAMES = [f"fake/{name}" for name in BUNDLE.trained["fake"].arrays]


class ArrayChange(NamedTuple):
    """One array: some "values" in it, another "dtype", "length" or name ("rename"), or none ("drop")."""

    name: str
    how: str
    place: int
    value: Any


class Forged(NamedTuple):
    trees: int = 3
    says: tuple[Change, ...] = ()
    arrays: tuple[ArrayChange, ...] = ()
    texts: tuple[tuple[str, bytes], ...] = ()
    damage: tuple[tuple[float, str, int], ...] = ()  # place in the file as a share of it, what is done there, with what
    signed: bool = True


#: What arrays may hold, and what they may not.
numbers = (
    st.integers(0, 3)
    | st.floats(-1, 1)
    | st.sampled_from([-1, 17, 18, 31, 32, 255, 2**31, 1e300, -1e300, 150.1, float("nan"), float("inf")])
)
array_changes = st.builds(
    ArrayChange,
    st.sampled_from(NAMES),
    st.sampled_from(["values", "values", "values", "dtype", "length", "rename", "drop"]),
    st.integers(0, 20),
    numbers,
)
#: Most by far have checksums that fit and a whole file, so that what stands behind them is reached.
texts = st.tuples(st.sampled_from(["x", "../x", "fake/x.npy", MANIFEST]), st.binary(max_size=9))
damage = st.tuples(st.floats(0, 1), st.sampled_from(["flip", "cut", "gap", "repeat"]), st.integers(0, 255))


def _forged(**said: st.SearchStrategy[Any]) -> st.SearchStrategy[Forged]:
    return st.fixed_dictionaries(said).map(lambda drawn: Forged(**drawn))


def _some(what: st.SearchStrategy[Any], least: int, most: int) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(what, min_size=least, max_size=most).map(tuple)


#: Most have checksums that fit and a whole file, so that what stands behind them is reached.
inputs = st.one_of(
    _forged(arrays=_some(array_changes, 1, 2), trees=st.sampled_from([3, 3, 1, 200, 2000])),
    _forged(says=_some(changes(BUNDLE.manifest), 1, 2), signed=st.sampled_from([True, True, True, False])),
    _forged(says=_some(changes(BUNDLE.manifest), 1, 1), arrays=_some(array_changes, 1, 1)),
    _forged(texts=_some(texts, 0, 1), damage=_some(damage, 0, 2), trees=st.sampled_from([3, 1, 5000, 10**6])),
)


@cache
def _base(trees: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays and manifest of a bundle, be it one of too many trees."""
    bundle = hand_made(trees=min(trees, MOST_TREES))
    arrays = dict(bundle.trained["fake"].arrays)
    if trees > MOST_TREES:  # of one leaf each
        arrays |= {name: array[:0] for name, array in arrays.items() if name.startswith("split")}
        arrays |= {"tree_leaves": np.ones(trees, np.uint8), "leaf_value": np.zeros(trees)}
    return {f"fake/{name}": array for name, array in arrays.items()}, bundle.manifest


def check(forged: Forged, folder: Path) -> str:
    arrays, manifest = _base(forged.trees)
    for change in forged.arrays:
        arrays = _array_changed(arrays, change)
    says: Any = manifest
    for told in forged.says:
        says = changed(says, told)
    if forged.signed and isinstance(says, dict):
        says = signed(says, arrays)
    content = bundle_file.dumps(arrays, {MANIFEST: text_of(says).encode()} | dict(forged.texts))
    for share, how, value in forged.damage:
        content = _bytes_changed(content, int(share * len(content)), how, value)
    target = folder / "forged"
    target.mkdir(exist_ok=True)
    (target / FILE).write_bytes(content)
    loaded = within(lambda: load_bundle(target))
    if loaded is REFUSED:
        return "refused"
    same("manifest", json.loads(text_of(says)), json.loads(json.dumps(loaded.manifest)))
    for name, trained in loaded.trained.items():
        for array, values in trained.arrays.items():
            same(f"{name}/{array}", arrays[f"{name}/{array}"].tobytes(), values.tobytes())
    return within(lambda: _predicted(loaded))


def _predicted(bundle: Any) -> str:
    answer = make_shortlist(FAMILY, PROBLEM, DEVICE, k=3, bundle=bundle)
    if not answer.predicted:
        return "no prediction"
    slowdowns = bundle.ranker("fake").predict(FAMILY, PROBLEM, DEVICE, CONFIGS)
    if not (np.isfinite(slowdowns) & (slowdowns > 0)).all():
        raise TroubleError("silent change", "slowdowns that are no positive numbers")
    return "answered"


def _array_changed(arrays: dict[str, Any], change: ArrayChange) -> dict[str, Any]:
    if change.name not in arrays:
        return arrays
    array, others = arrays[change.name], {name: one for name, one in arrays.items() if name != change.name}
    match change.how:
        case "drop":
            return others
        case "rename":
            return others | {change.name + str(change.value): array}
        case "dtype":
            return others | {change.name: array.astype(DTYPES[change.place % len(DTYPES)])}
        case "length":
            return others | {change.name: np.resize(array, change.place)}
    array = np.array(array)
    with np.errstate(all="ignore"):
        array.reshape(-1)[change.place % array.size if array.size else slice(0)] = np.array(change.value).astype(
            array.dtype
        )
    return others | {change.name: array}


def _bytes_changed(content: bytes, place: int, how: str, value: int) -> bytes:
    match how:
        case "flip":
            return content[:place] + bytes([byte ^ value for byte in content[place : place + 1]]) + content[place + 1 :]
        case "cut":
            return content[:place]
        case "gap":
            return content[:place] + content[place + value :]
    return content[:place] + content[max(place - value, 0) : place] + content[place:]
