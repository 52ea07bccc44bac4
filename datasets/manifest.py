"""`dataset.json`, the manifest of a dataset's folder; loading a dataset by its folder, or a shipped one by its name.

Reading manifests needs neither pandas nor pyarrow.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .contents import described
from .device import DeviceSpec
from .errors import DatasetError, ForetuneError, abridged, check_path, printable, shown
from .files import BUNDLE, few, read_regular, replacing, visible_in

if TYPE_CHECKING:
    from .dataset import Dataset

#: The manifest's file name.
MANIFEST = "dataset.json"
#: The current version. It increases whenever a column or a key of the manifest changes its meaning, type or name.
SCHEMA_VERSION = 2  # 2: scenarios, ragged sizes with their dimension, a dtype for each operand
#: Older versions that can be read; see tables.py.
OLDER_VERSIONS = (1,)
#: Required keys -> (type, the type in messages).
_TYPES: dict[str, tuple[type, str]] = {
    "name": (str, "a string"),
    "devices": (list, "a list of device specs"),
    "provenance": (dict, "an object"),
    "sealed": (dict, "an object of SHA-256 by file name"),
}
#: The fields of a family in "contents" that are needed to describe it, and the counts that each of its devices has.
_COUNTS_OF = {"problems": int, "configs": int, "measurements": int, "plans": list, "devices": dict, "statuses": dict}
_COUNTED = ("problems", "measurements")


def read_manifest(directory: Path) -> dict[str, Any]:
    """Read the manifest in a folder; raise `DatasetError` if it is missing, damaged or of an unknown version."""
    path = directory / MANIFEST
    try:
        manifest = json.loads(read_regular(path, follow=True))
        version = manifest["schema_version"]
    except FileNotFoundError:
        raise DatasetError(f"{path}: no such file, so {directory} is not a Foretune dataset") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DatasetError(f"{path}: cannot be read as JSON: {abridged(str(error))}") from None
    except (KeyError, TypeError):
        raise DatasetError(f"{path}: not a Foretune manifest: it has no schema_version") from None
    if type(version) is not int or version not in (SCHEMA_VERSION, *OLDER_VERSIONS):
        raise DatasetError(
            f"{path}: schema_version is {abridged(repr(version))} but this Foretune reads {SCHEMA_VERSION} and before"
            + ("; a newer Foretune wrote it" if isinstance(version, int) and version > SCHEMA_VERSION else "")
        )
    if missing := [key for key in _TYPES if key not in manifest]:
        raise DatasetError(f"{path}: keys missing: {', '.join(missing)}")
    for key, (expected, what) in _TYPES.items():
        _check(path, key, manifest[key], expected, what)
    runs = manifest["provenance"].get("runs", {})
    _check(path, "provenance.runs", runs, dict, "an object")
    for run, facts in runs.items():
        _check(path, f"provenance.runs.{run}", facts, dict, "an object")
        try:
            check_facts(facts)
        except ForetuneError as error:
            raise DatasetError(f"{path}: provenance.runs.{abridged(run)}: {error}") from None
    return dict(manifest)


def check_facts(facts: Mapping[str, Any]) -> None:
    """Raise `ForetuneError` if one of a run's facts that Foretune uses is not a string; the message names it."""
    for name in ("family", "kernel_source", "plan", "timed"):
        if facts.get(name) is not None and not isinstance(facts[name], str):
            raise ForetuneError(f"{name} must be a string but is {shown(facts[name])}")


def check_ours(directory: Path) -> None:
    """Raise unless a folder is empty, missing, or holds a dataset. Hidden files are ignored.

    Raises:
        DatasetError: The folder has files but no manifest, or one that this version cannot read.
    """
    if (directory / MANIFEST).exists():
        read_manifest(directory)
    elif (directory / BUNDLE).is_file():
        raise DatasetError(f"{directory} is the folder of a bundle: name one for the dataset alone")
    elif others := visible_in(directory):
        raise DatasetError(
            f"{directory} holds files that are not a dataset ({few(others)}): choose a new or an empty folder"
        )


def write_manifest(directory: Path, content: Mapping[str, Any]) -> None:
    """Write the manifest of a folder atomically: `content`, with the current schema version."""
    version = {"schema_version": SCHEMA_VERSION}
    text = json.dumps(version | dict(content) | version, indent=1) + "\n"  # the current version, as the first key
    with replacing(directory / MANIFEST) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _check(path: Path, key: str, value: object, expected: type, what: str) -> None:
    """Raise `DatasetError` unless a manifest's value has the expected type, which the message calls `what`."""
    if not isinstance(value, expected):
        raise DatasetError(f"{path}: {abridged(key)} must be {what} but is {abridged(repr(value))}")


def description_in(directory: Path) -> dict[str, Any] | None:
    """Return the description of a sealed dataset (see `Dataset.describe`) from its manifest alone.

    Return None if the manifest has no counts, or if the folder has parts, which it does not describe. Raises as
    `read_manifest` does.
    """
    manifest = read_manifest(directory)
    contents: Any = manifest.get("contents")
    if not _is_known(contents) or any((directory / folder).exists() for folder in ("parts", "drift")):
        return None
    specs = tuple(DeviceSpec.from_json(spec) for spec in manifest["devices"])
    return described(manifest["name"], specs, manifest["schema_version"], contents, manifest["provenance"], ())


def _is_known(contents: Any) -> bool:
    """Return whether a manifest's "contents" has all fields of `Dataset.contents` that `described` uses."""
    try:
        return isinstance(contents["drifted"], dict) and all(
            all(type(family[key]) is expected for key, expected in _COUNTS_OF.items())
            and all(isinstance(plan, str) for plan in family["plans"])
            and all(type(there[key]) is int for there in family["devices"].values() for key in _COUNTED)
            for family in contents["families"].values()
        )
    except (KeyError, TypeError, AttributeError):
        return False


def names() -> list[str]:
    """Return the names of the datasets that are shipped with the package.

    >>> names()[:2]
    ['h100', 'h100_fp8_gradients']
    """
    root = Path(__file__).parent
    return sorted(manifest.parent.name for manifest in root.glob("[!.]*/dataset.json"))


def load(name_or_path: str | Path) -> Dataset:
    """Load a shipped dataset by name, or the dataset in a folder.

    Args:
        name_or_path: A name of `names()`, or the folder of a dataset.

    Raises:
        DatasetError: There is no such dataset, or one of its files is damaged, has another format or another schema
            version. The message names the file.

    >>> load("h200").name
    'h200'
    """
    from .store import read

    folder = _folder(name_or_path)
    dataset = read(folder)
    if folder.resolve().name == dataset.name:
        return dataset
    return replace(dataset, given=printable(str(name_or_path)))


def describe(name_or_path: str | Path) -> dict[str, Any]:
    """Return a dataset's counts and provenance, as `load(name_or_path).describe()` does.

    A sealed dataset is described from its manifest alone, which is much faster. Raises `DatasetError` as `load` does.

    >>> describe("h200")["device"].split(", ")[0]
    'NVIDIA H200'
    """
    folder = _folder(name_or_path)
    return description_in(folder) or load(folder).describe()


def _folder(name_or_path: str | Path) -> Path:
    """Return the folder of a dataset that is given by name or by path; raise `DatasetError` if there is none."""
    check_path("a dataset", name_or_path)
    if str(name_or_path) in names():
        return Path(__file__).parent / str(name_or_path)
    if not os.path.isdir(name_or_path):
        raise DatasetError(
            f"{abridged(str(name_or_path))}: neither a folder nor a shipped dataset (shipped: {', '.join(names())})"
        )
    return Path(name_or_path)
