"""The document in the file of a `ChoiceCache`: what is valid, what goes first when full, and merging."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from ....datasets import DeviceSpec, ForetuneError, KernelConfig, Problem
from ....datasets.errors import LONGEST_WORD, MOST_NAMES, check_integer, check_word, shown
from ....datasets.measurement import LONGEST_US, SHORTEST_US
from ..launch_arguments import are_kept_arguments
from .shared_file import MOST_BYTES, Document, size_of

#: What a file says it is; a file that says otherwise is begun anew.
FORMAT = "foretune choices 1"
_KEYS = {"format", "kernel", "device", "configs", "entries"}
_ENTRY_KEYS = {"source", "software", "problem", "times", "chosen", "launches"}
#: When the oldest failure in an entry was recorded, in seconds since the epoch; there is none in older files.
FAILED_AT = "failed_at"
_LATEST_S = 1 << 53
#: Launches that are kept of a problem: many may fall into one bucket.
_MOST_LAUNCHES = 32
#: The share of a full file's entries that goes at once, so that a full one is not made room in for every config.
_FORGOTTEN = 0.25
#: Of a full file, one problem's times are shortened first where they are more than this share, and more than this many.
_LARGE_SHARE, _FEW = 0.25, 64
_SOFTWARE = {"driver", "torch", "triton"}


class Places:
    """Where each config stands in a document's list, to which new ones are added."""

    def __init__(self, configs: list[Document]) -> None:
        self._configs = configs
        self._known = {_hashable(config): place for place, config in enumerate(configs)}

    def of(self, config: Document) -> int:
        """Return where a config, as JSON, stands; add it if it is new."""
        place = self._known.setdefault(_hashable(config), len(self._configs))
        if place == len(self._configs):
            self._configs.append(config)
        return place

    def cut(self, length: int) -> None:
        """Take back the configs that were added since there were so many."""
        for config in self._configs[length:]:
            del self._known[_hashable(config)]
        del self._configs[length:]


def _hashable(config: Mapping[str, Any]) -> tuple[tuple[str, str, Any], ...]:
    return tuple(sorted((name, type(value).__name__, value) for name, value in config.items()))


def new_document(kernel: str, device: DeviceSpec) -> Document:
    return {"format": FORMAT, "kernel": kernel, "device": device.to_json(), "configs": [], "entries": []}


def times_of(document: Document, entry: Document) -> dict[KernelConfig, float | None]:
    """An entry's times by config."""
    configs = document["configs"]
    return {KernelConfig.from_json(configs[int(place)]): time_us for place, time_us in entry["times"].items()}


def check_choices(document: Any) -> int:
    """Remove malformed configs, malformed entries and entries that name such a config from a document.

    Returns:
        The number of records that were removed.

    Raises:
        ForetuneError: It is not a file of choices, or none of its entries is well-formed.
    """
    if not isinstance(document, dict) or document.get("format") != FORMAT or set(document) != _KEYS:
        raise ForetuneError(f"it is no file of {FORMAT!r}")
    check_word("kernel", document["kernel"], 4 * LONGEST_WORD)
    DeviceSpec.from_json(document["device"])
    for name in ("configs", "entries"):
        if not isinstance(document[name], list):
            raise ForetuneError(f"{name} must be a list but is {shown(document[name])}")
    wrong = {at: why for at, one in enumerate(document["configs"]) if (why := _wrong(KernelConfig.from_json, one))}
    places = set(range(len(document["configs"]))) - wrong.keys()
    checked = [(entry, _wrong(partial(_check_entry, places=places), entry)) for entry in document["entries"]]
    kept = [entry for entry, why in checked if why is None]
    errors = [*wrong.values(), *(why for _, why in checked if why is not None)]
    if errors and not kept:
        raise errors[0]
    if errors:
        document["entries"] = kept
        _keep_used_configs(document)
    return len(errors)


def _wrong(check: Callable[[Any], object], value: Any) -> ForetuneError | None:
    """Return why a value does not pass a check; None for one that does."""
    try:
        check(value)
    except ForetuneError as error:
        return error
    return None


def _check_entry(entry: Any, places: Collection[int]) -> None:
    if not isinstance(entry, dict) or set(entry) - {FAILED_AT} != _ENTRY_KEYS:
        raise ForetuneError(f"an entry must have {', '.join(sorted(_ENTRY_KEYS))} but one is {shown(entry)}")
    check_word("source", entry["source"])
    Problem.from_json(entry["problem"])
    for name in ("software", "times", "chosen"):
        if not isinstance(entry[name], dict):
            raise ForetuneError(f"{name} must be an object but is {shown(entry[name])}")
    software = entry["software"]
    if set(software) != _SOFTWARE or not all(isinstance(v, str) for v in software.values()):
        raise ForetuneError(f"software must have texts for driver, torch and triton but is {shown(software)}")
    for place, time_us in entry["times"].items():
        if not re.fullmatch("0|[1-9][0-9]{0,6}", place) or int(place) not in places:
            raise ForetuneError(f"a time must be one of a config but is of {shown(place)}")
        if time_us is not None and not (type(time_us) in (int, float) and SHORTEST_US <= time_us <= LONGEST_US):
            raise ForetuneError(f"a time must be {SHORTEST_US} to {LONGEST_US} us, or null, but is {shown(time_us)}")
    check_integer(FAILED_AT, entry.get(FAILED_AT, 0), 0, _LATEST_S)
    launches = entry["launches"]
    if not isinstance(launches, list) or len(launches) > _MOST_LAUNCHES or not all(map(is_launch, launches)):
        raise ForetuneError(f"launches must be at most {_MOST_LAUNCHES}, of names and a key, but are {shown(launches)}")
    for place in entry["chosen"].values():
        if type(place) is not int or place not in places:
            raise ForetuneError(f"a choice must be one of the configs but is {shown(place)}")


def merge_launches(older: Sequence[Document], newer: Sequence[Document]) -> list[Document]:
    """Return launches of one problem from two places, each once with its newer config, as many as are kept."""

    def without_config(launch: Document) -> Document:
        return {name: value for name, value in launch.items() if name != "config"}

    known = [without_config(launch) for launch in newer]
    return [*(one for one in older if without_config(one) not in known), *newer][-_MOST_LAUNCHES:]


def is_launch(launch: Any) -> bool:
    """Whether it is what `saw_launch` keeps, in values that JSON gives back as they are."""
    return (
        isinstance(launch, dict)
        and {"names", "key"} <= set(launch) <= {"names", "key", "arguments", "config"}
        and all(isinstance(launch[part], list) and len(launch[part]) <= MOST_NAMES for part in ("names", "key"))
        and are_kept_arguments(launch.get("arguments", {}))
        and all(isinstance(name, str) for name in launch["names"])
        and all(type(value) in (int, float, bool, str, type(None)) for value in launch["key"])
        and all(math.isfinite(value) for value in launch["key"] if type(value) is float)
        and len(launch["names"]) <= len(launch["key"])
        and ("config" not in launch or _wrong(KernelConfig.from_json, launch["config"]) is None)
    )


def forget_oldest(document: Document) -> bool:
    """Drop the slower half of the times of one problem with a large share of all times; else the entries that were
    touched longest ago, but never the newest, which is being written. Configs that no entry names go, too."""
    entries = document.get("entries", [])
    largest: Document = max(entries, key=lambda entry: len(entry["times"]), default={"times": {}})
    times, total = largest["times"], sum(len(entry["times"]) for entry in entries)
    if len(times) > max(_FEW, _LARGE_SHARE * total):
        chosen = {str(place) for place in largest["chosen"].values()}
        fastest = sorted(times, key=lambda place: (place not in chosen, times[place] or math.inf))
        largest["times"] = {place: times[place] for place in fastest[: len(fastest) // 2]}
        kept = entries
    elif len(entries) > 1:
        kept = entries[math.ceil(len(entries) * _FORGOTTEN) :]
    else:
        return False
    document["entries"] = kept
    _keep_used_configs(document)
    return True


def _keep_used_configs(document: Document) -> None:
    """Drop the configs that no entry names, and number the others anew."""
    used = sorted({place for entry in document["entries"] for place in _named(entry)})
    moved = {old: new for new, old in enumerate(used)}
    document["configs"] = [document["configs"][old] for old in used]
    for entry in document["entries"]:
        entry |= _renumbered(entry, moved)


def _named(entry: Document) -> list[int]:
    """Return the places of the configs that an entry names, in order."""
    return list(dict.fromkeys([*map(int, entry["times"]), *entry["chosen"].values()]))


def _renumbered(entry: Document, places: Mapping[int, int]) -> Document:
    """Return an entry's times and choices for another list of configs."""
    return {
        "times": {str(places[int(old)]): time_us for old, time_us in entry["times"].items()},
        "chosen": {bundle: places[old] for bundle, old in entry["chosen"].items()},
    }


def merge_choices(here: Document, there: Document, kept: list[int]) -> None:
    """Add what another machine knows to a document as far as there is room, the newest first; what is here stays.

    What is new becomes the oldest, so that it is the first to be forgotten.

    Args:
        here: The document, {} for a new file.
        there: What is added to it, of the same kernel and device.
        kept: Gets the places of those entries of `there` that are in the file then.
    """
    if not here:
        here |= new_document(there["kernel"], DeviceSpec.from_json(there["device"]))
    configs, places = here["configs"], Places(here["configs"])
    known = {_identity(entry): entry for entry in here["entries"]}
    new: list[Document] = []
    kept.clear()  # an update may be tried twice
    room = MOST_BYTES - size_of(here)
    for number, entry in reversed(list(enumerate(there["entries"]))):
        n_configs, mine = len(configs), known.get(_identity(entry))
        theirs = entry | _renumbered(entry, {at: places.of(there["configs"][at]) for at in _named(entry)})
        merged = theirs
        if mine is not None:
            merged = mine | {part: theirs[part] | mine[part] for part in ("times", "chosen")}
            merged["launches"] = merge_launches(theirs["launches"], mine["launches"])
        size = size_of(merged) + 1 - (0 if mine is None else size_of(mine) + 1)
        size += sum(size_of(config) + 1 for config in configs[n_configs:])
        if size > room:
            places.cut(n_configs)
            continue
        room -= size
        kept.append(number)
        if mine is None:
            new.append(merged)
        else:
            mine |= merged
    kept.reverse()
    here["entries"] = new[::-1] + here["entries"]


def _identity(entry: Document) -> str:
    return json.dumps([entry["source"], entry["software"], entry["problem"]], sort_keys=True)
