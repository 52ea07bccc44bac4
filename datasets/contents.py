"""What a dataset has, in counts: from its manifest where that says it, without reading a row."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .console.tables import table
from .device import DeviceSpec
from .disk.left_out import LeftOut
from .manifest import read_manifest

#: What a family's entry has, and what is counted of it for each device.
_KINDS = {"problems": int, "configs": int, "measurements": int, "plans": list, "devices": dict, "statuses": dict}
_COUNTED = ("problems", "measurements")


def described(
    name: str,
    devices: Sequence[DeviceSpec],
    schema_version: int,
    contents: Mapping[str, Any],
    provenance: Mapping[str, Any],
    ignored: Sequence[str],
    left_out: Sequence[LeftOut] = (),
) -> dict[str, Any]:
    """As `foretune datasets --json` prints it. `contents` is `Dataset.contents`."""
    return {
        "name": name,
        "device": ", ".join(spec.name for spec in devices),
        "schema_version": schema_version,
        "families": dict(contents["families"]),
        "provenance": dict(provenance),
        "drifted": dict(contents["drifted"]),
        "ignored": list(ignored),
        "left_out": [one.to_json() for one in left_out],
    }


def description_in(directory: Path) -> dict[str, Any] | None:
    """What the manifest of a sealed dataset says of it; None where that says nothing, or where there are parts, of
    which it does not know. Raises `DatasetError` for a manifest that is none."""
    manifest = read_manifest(directory)
    contents: Any = manifest.get("contents")
    if not _is_known(contents) or any((directory / folder).exists() for folder in ("parts", "drift")):
        return None
    specs = tuple(DeviceSpec.from_json(spec) for spec in manifest["devices"])
    return described(manifest["name"], specs, manifest["schema_version"], contents, manifest["provenance"], ())


def kernel_sources(provenance: Mapping[str, Any], family: str) -> set[str]:
    """The hashes of the kernel's sources with which a family was measured, as far as its runs recorded them."""
    runs = provenance.get("runs", {}).values()
    return {str(run["kernel_source"]) for run in runs if run.get("family") == family and "kernel_source" in run}


def same_source(one: str, other: str) -> bool:
    """Return whether two recorded hashes can be of the same kernel.

    The hash of a kernel that depends on more than functions that it calls by name has a second part, which was not
    recorded at first: a hash without it is compared with the first part of the other.

    >>> same_source("037307fb8c7f56d3", "037307fb8c7f56d3+4b1de3aa926b63df")
    True
    >>> same_source("037307fb8c7f56d3+2263e89fede9aba3", "037307fb8c7f56d3+4b1de3aa926b63df")
    False
    """
    if one == other:
        return True
    (first, one_more), (second, other_more) = (_parts(text) for text in (one, other))
    return first == second and not (one_more and other_more)


def other_sources(recorded: Iterable[str], now: str) -> set[str]:
    """Return those of some recorded hashes that cannot be of the kernel that has this hash now."""
    return {source for source in recorded if not same_source(source, now)}


def _parts(source: str) -> tuple[str, str]:
    """The parts of a hash that `hash_of_kernel` makes; anything else is one part."""
    found = re.fullmatch(r"([0-9a-f]{16})(?:\+([0-9a-f]{16}))?", source)
    return (found[1], found[2] or "") if found else (source, "")


def contents_table(datasets: Sequence[Mapping[str, Any]]) -> Any:
    """A `rich.table.Table` of several datasets as `described`: what is in each, by family and device; what was ignored
    stands below."""
    rows = [
        (
            one["name"],
            name,
            device,
            there["problems"],
            family["configs"],
            there["measurements"],
            ", ".join(family["plans"]),
        )
        for one in datasets
        for name, family in one["families"].items()
        for device, there in family["devices"].items()
    ]
    below = [
        f"{one['name']}: ignored half-written parts: {', '.join(one['ignored'])}" for one in datasets if one["ignored"]
    ]
    columns = ("name", "family", "device", "problems", "configs", "measurements", "plan")
    return table("Datasets", columns, rows, below=below, once=("plan",))


def _is_known(contents: Any) -> bool:
    """Whether it is what `Dataset.contents` gives, as far as is looked at; else the rows are asked."""
    try:
        return isinstance(contents["drifted"], dict) and all(
            all(type(family[key]) is kind for key, kind in _KINDS.items())
            and all(isinstance(plan, str) for plan in family["plans"])
            and all(type(there[key]) is int for there in family["devices"].values() for key in _COUNTED)
            for family in contents["families"].values()
        )
    except (KeyError, TypeError, AttributeError):
        return False
