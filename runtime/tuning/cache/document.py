"""Read, check, shrink and merge the JSON document of a `ChoiceCache` file, which has the times and choices of a kernel.

`Refined` has the results of mode `refine`, which times an op's own calls, in the form that is stored and shown.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from ....datasets import DeviceSpec, ForetuneError, KernelConfig, Problem
from ....datasets.console import InNotebooks, table
from ....datasets.errors import LONGEST_WORD, check_between, check_integer, check_word, shown
from ....datasets.measurement import LONGEST_US, SHORTEST_US
from ...launching.kernel import are_kept_arguments
from ...pin_file import is_launch
from .shared_file import MOST_BYTES, Document, size_of

#: Half the width of a 95 % interval, in standard deviations.
_INTERVAL = 1.96
_COLUMNS = ("kernel", "problem", "state", "config", "calls", "mean_us", "interval_us", "saved_us")


class RefinedTime(NamedTuple):
    """The time of an op's calls with one config.

    Attributes:
        calls: The number of timed calls.
        mean_us: The estimated time of a call in microseconds.
        slowdown: The estimated time over that of the predicted config, under the same conditions.
        deviation: The standard deviation of the logarithm of the slowdown.
    """

    calls: int
    mean_us: float
    slowdown: float
    deviation: float

    @classmethod
    def from_json(cls, value: Any) -> RefinedTime:
        """Return the time that a cache file stores as a list; raise `ForetuneError` for anything else."""
        if not isinstance(value, list) or len(value) != len(cls._fields):
            raise ForetuneError(f"a refined time must be a list of {', '.join(cls._fields)} but is {shown(value)}")
        check_integer("calls", value[0], 0)
        check_between("mean_us", value[1], SHORTEST_US, LONGEST_US)
        check_between("slowdown", value[2], 1e-3, 1e3)
        check_between("deviation", value[3], 0.0, 1e3)
        return cls(*value)

    def row(self) -> dict[str, Any]:
        """Return the columns of this time in a table; a positive `saved_us` is time saved in each call."""
        half = _INTERVAL * self.deviation * self.mean_us
        return {
            "calls": self.calls,
            "mean_us": float(f"{self.mean_us:.5g}"),
            "interval_us": f"{self.mean_us - half:.5g}-{self.mean_us + half:.5g}",
            "saved_us": float(f"{self.mean_us * (1 / self.slowdown - 1):.3g}"),
        }


class Refined(NamedTuple):
    """The results of mode `refine` for one problem: times by config, and the chosen config, None while undecided."""

    times: Mapping[KernelConfig, RefinedTime]
    decided: KernelConfig | None

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each config, the chosen one marked."""
        state = {one: "chosen" if one == self.decided else "dropped" for one in self.times}
        return [
            {"state": "exploring" if self.decided is None else state[one], "config": str(one), **time.row()}
            for one, time in self.times.items()
        ]


@dataclass(frozen=True, repr=False)
class Refining(InNotebooks):
    """The results of mode `refine`: this process's (`foretune.refining`) or the cache's (`cache show --refining`).

    `rows` has a dict for each problem and config: kernel, problem, state ("exploring", "chosen" or "dropped"), config,
    calls, mean_us, interval_us (95 %, of the difference from the predicted config), and saved_us (per call, over the
    predicted config).
    """

    rows: Sequence[Mapping[str, Any]]

    def __repr__(self) -> str:
        problems = {(row["kernel"], row["problem"]) for row in self.rows}
        return f"<Refining of {len(problems)} problems, {len(self.rows)} configs>"

    def to_json(self) -> dict[str, Any]:
        """Return the rows as JSON values."""
        return {"refining": [dict(row) for row in self.rows]}

    def __rich__(self) -> Any:
        below = () if self.rows else ("Nothing has been refined.",)
        rows = [[row[name] for name in _COLUMNS] for row in self.rows]
        return table("Refinement", _COLUMNS, rows, below=below, once=("kernel", "problem"), lead=3)


def is_sound(time: RefinedTime) -> bool:
    """Return whether a time of mode `refine` can be stored: its numbers are finite and in the valid range."""
    return SHORTEST_US <= time.mean_us <= LONGEST_US and all(map(math.isfinite, time))


#: The value of a file's "format"; a file with another value is replaced by a new one.
FORMAT = "foretune choices 1"
_KEYS = {"format", "kernel", "device", "configs", "entries"}
_ENTRY_KEYS = {"source", "software", "problem", "times", "chosen", "launches"}
#: The name of an entry's field for the time of its oldest failure, in seconds since the epoch; older files lack it.
FAILED_AT = "failed_at"
#: The name of an entry's field for what a refinement measured with an op's own calls: {"times": {position of a config:
#: `RefinedTime` as a list}, "decided": position of the chosen config or null}. Entries without a refinement lack it.
REFINED = "refined"
_LATEST_S = 1 << 53
#: The maximum number of launches that are stored per problem: many may share one bucket.
_MOST_LAUNCHES = 32
#: The share of a full file's entries that is dropped at once, so that not every new config has to make room.
_FORGOTTEN = 0.25
#: In a full file, a problem's times are shortened first if they exceed this share of all times, and this number.
_LARGE_SHARE, _FEW = 0.25, 64
_SOFTWARE = {"driver", "torch", "triton"}


class Places:
    """The positions of configs in a document's list of configs, by which entries refer to them."""

    def __init__(self, configs: list[Document]) -> None:
        self._configs = configs
        self._known = {_hashable(config): place for place, config in enumerate(configs)}

    def of(self, config: Document) -> int:
        """Return the position of a config (as JSON), and append it to the list if it is new."""
        place = self._known.setdefault(_hashable(config), len(self._configs))
        if place == len(self._configs):
            self._configs.append(config)
        return place

    def cut(self, length: int) -> None:
        """Remove all configs but the first `length` from the list."""
        for config in self._configs[length:]:
            del self._known[_hashable(config)]
        del self._configs[length:]


def _hashable(config: Mapping[str, Any]) -> tuple[tuple[str, str, Any], ...]:
    """Return a hashable value that identifies a config."""
    return tuple(sorted((name, type(value).__name__, value) for name, value in config.items()))


def new_document(kernel: str, device: DeviceSpec) -> Document:
    """Return the document of a kernel and device without entries."""
    return {"format": FORMAT, "kernel": kernel, "device": device.to_json(), "configs": [], "entries": []}


def times_of(document: Document, entry: Document) -> dict[KernelConfig, float | None]:
    """Return the times of a document's entry in microseconds, by config; None for a failed config."""
    configs = document["configs"]
    return {KernelConfig.from_json(configs[int(place)]): time_us for place, time_us in entry["times"].items()}


def refined_of(document: Document, entry: Document) -> Refined | None:
    """Return the results of mode `refine` in a document's entry (one problem); None if it has none."""
    if (refined := entry.get(REFINED)) is None:
        return None
    configs = [KernelConfig.from_json(document["configs"][int(place)]) for place in refined["times"]]
    times = dict(zip(configs, map(RefinedTime.from_json, refined["times"].values()), strict=True))
    decided = refined["decided"]
    return Refined(times, None if decided is None else KernelConfig.from_json(document["configs"][decided]))


def check_choices(document: Any) -> int:
    """Remove malformed configs and entries, and entries that refer to a malformed config, from a document.

    Returns:
        The number of removed records.

    Raises:
        ForetuneError: The document is not one of a choices file, or none of its entries is well-formed.
    """
    if not isinstance(document, dict) or document.get("format") != FORMAT or set(document) != _KEYS:
        raise ForetuneError(f"it is not a file of format {FORMAT!r}")
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
    """Return the error of a value that does not pass a check; None if it passes."""
    try:
        check(value)
    except ForetuneError as error:
        return error
    return None


def _check_entry(entry: Any, places: Collection[int]) -> None:
    """Raise `ForetuneError` for a malformed entry; `places` are the positions of valid configs."""
    if not isinstance(entry, dict) or set(entry) - {FAILED_AT, REFINED} != _ENTRY_KEYS:
        raise ForetuneError(f"an entry must have {', '.join(sorted(_ENTRY_KEYS))} but one is {shown(entry)}")
    check_word("source", entry["source"])
    Problem.from_json(entry["problem"])
    for name in ("software", "times", "chosen"):
        if not isinstance(entry[name], dict):
            raise ForetuneError(f"{name} must be an object but is {shown(entry[name])}")
    software = entry["software"]
    if set(software) != _SOFTWARE or not all(isinstance(v, str) for v in software.values()):
        raise ForetuneError(
            f"software must have a string for each of driver, torch and triton but is {shown(software)}"
        )
    for place, time_us in entry["times"].items():
        if not re.fullmatch("0|[1-9][0-9]{0,6}", place) or int(place) not in places:
            raise ForetuneError(f"a time must be that of a config in the file but is that of {shown(place)}")
        if time_us is not None and not (type(time_us) in (int, float) and SHORTEST_US <= time_us <= LONGEST_US):
            raise ForetuneError(f"a time must be {SHORTEST_US} to {LONGEST_US} us, or null, but is {shown(time_us)}")
    _check_refined(entry.get(REFINED, {"times": {}, "decided": None}), places)
    check_integer(FAILED_AT, entry.get(FAILED_AT, 0), 0, _LATEST_S)
    launches = entry["launches"]
    if not isinstance(launches, list) or len(launches) > _MOST_LAUNCHES or not all(map(is_stored_launch, launches)):
        raise ForetuneError(
            f"launches must be at most {_MOST_LAUNCHES}, each with names and a key, but are {shown(launches)}"
        )
    for place in entry["chosen"].values():
        if type(place) is not int or place not in places:
            raise ForetuneError(f"a choice must be the position of a config but is {shown(place)}")


def _check_refined(refined: Any, places: Collection[int]) -> None:
    """Raise `ForetuneError` for malformed results of a refinement; `places` are the positions of valid configs."""
    if not isinstance(refined, dict) or set(refined) != {"times", "decided"} or not isinstance(refined["times"], dict):
        raise ForetuneError(f"{REFINED} must have times and decided but is {shown(refined)}")
    for place, time in refined["times"].items():
        if not re.fullmatch("0|[1-9][0-9]{0,6}", place) or int(place) not in places:
            raise ForetuneError(f"a refined time must be that of a config in the file but is that of {shown(place)}")
        RefinedTime.from_json(time)
    decided = refined["decided"]
    if decided is not None and (type(decided) is not int or str(decided) not in refined["times"]):
        raise ForetuneError(f"decided must be the position of a refined config but is {shown(decided)}")


def merge_launches(older: Sequence[Document], newer: Sequence[Document]) -> list[Document]:
    """Return the launches of one problem from an older and a newer document, each once with its newer config."""

    def without_config(launch: Document) -> Document:
        return {name: value for name, value in launch.items() if name != "config"}

    known = [without_config(launch) for launch in newer]
    return [*(one for one in older if without_config(one) not in known), *newer][-_MOST_LAUNCHES:]


def is_stored_launch(launch: Any) -> bool:
    """Return whether a value is a launch in the form in which `ChoiceCache.saw_launch` stores it."""
    try:
        is_valid = is_launch(launch, "arguments")
    except ForetuneError:  # of its config
        return False
    return is_valid and are_kept_arguments(launch.get("arguments", {})) and len(launch["names"]) <= len(launch["key"])


def forget_oldest(document: Document) -> bool:
    """Drop records from a full document; return False if nothing can be dropped.

    If one problem has a large share of all times, the slower half of its times is dropped. Otherwise the least recently
    used entries are dropped, but never the newest, which is being written. Configs that no entry uses are dropped, too.
    """
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
    """Drop a document's configs that no entry refers to, and renumber the others."""
    used = sorted({place for entry in document["entries"] for place in _used_places(entry)})
    moved = {old: new for new, old in enumerate(used)}
    document["configs"] = [document["configs"][old] for old in used]
    for entry in document["entries"]:
        entry |= _renumbered(entry, moved)


def _used_places(entry: Document) -> list[int]:
    """Return the positions of the configs that an entry refers to, in order."""
    refined = entry.get(REFINED, {"times": {}})["times"]
    return list(dict.fromkeys([*map(int, entry["times"]), *entry["chosen"].values(), *map(int, refined)]))


def _renumbered(entry: Document, places: Mapping[int, int]) -> Document:
    """Return an entry's times, choices and `refine` results with each config position replaced as in `places`."""
    refined = entry.get(REFINED)
    moved = (
        {}
        if refined is None
        else {
            REFINED: {
                "times": {str(places[int(old)]): time for old, time in refined["times"].items()},
                "decided": None if refined["decided"] is None else places[refined["decided"]],
            }
        }
    )
    return moved | {
        "times": {str(places[int(old)]): time_us for old, time_us in entry["times"].items()},
        "chosen": {bundle: places[old] for bundle, old in entry["chosen"].items()},
    }


def merge_choices(here: Document, there: Document, kept: list[int]) -> None:
    """Add another machine's entries to a document, newest first, as far as there is room.

    Existing records are kept. The added entries count as the oldest, so that they are dropped first.

    Args:
        here: The document; {} for a new file.
        there: The document to add, of the same kernel and device.
        kept: Receives the positions of those entries of `there` that are in the result.
    """
    if not here:
        here |= new_document(there["kernel"], DeviceSpec.from_json(there["device"]))
    configs, places = here["configs"], Places(here["configs"])
    known = {_identity(entry): entry for entry in here["entries"]}
    new: list[Document] = []
    kept.clear()  # an update may run twice
    room = MOST_BYTES - size_of(here)
    for number, entry in reversed(list(enumerate(there["entries"]))):
        n_configs, mine = len(configs), known.get(_identity(entry))
        theirs = entry | _renumbered(entry, {at: places.of(there["configs"][at]) for at in _used_places(entry)})
        merged = theirs
        if mine is not None:
            merged = mine | {part: theirs[part] | mine[part] for part in ("times", "chosen")}
            merged["launches"] = merge_launches(theirs["launches"], mine["launches"])
            if REFINED in theirs:
                merged.setdefault(REFINED, theirs[REFINED])
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
    """Return a text that is equal for entries of the same source, software and problem."""
    return json.dumps([entry["source"], entry["software"], entry["problem"]], sort_keys=True)
