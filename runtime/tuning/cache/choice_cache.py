"""`ChoiceCache`: what is known of one kernel on one device, from one process to the next.

On the disk it is a file for each kernel and device, in `FORETUNE_CACHE_DIR/choices`, else `~/.cache/foretune/choices`.
Each config's time is kept by itself, so that another list of configs, or another pruner, measures only what is new.
"""

from __future__ import annotations

import atexit
import hashlib
import math
import os
import re
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any

from ....datasets import DeviceSpec, ForetuneError, KernelConfig, Problem
from ....datasets.errors import LONGEST_WORD, MOST_NAMES, check_integer, check_word, shown
from ....datasets.measurement import LONGEST_US, SHORTEST_US
from ...warn import warn_once
from ..launch_arguments import are_kept_arguments
from ..ranks.node_copies import near_copy
from .shared_file import Document, SharedFile

VARIABLE = "FORETUNE_CACHE_DIR"
#: What a file says it is; a file that says otherwise is begun anew.
FORMAT = "foretune choices 1"
_KEYS = {"format", "kernel", "device", "configs", "entries"}
_ENTRY_KEYS = {"source", "software", "problem", "times", "chosen", "launches"}
#: When the oldest failure in an entry was recorded, in seconds since the epoch; there is none in older files.
_FAILED_AT = "failed_at"
_LATEST_S = 1 << 53
#: A failed config is tried again after a day: what refused it may have been the machine, not the compiler.
FAILURES_LAST_S = 86_400
#: Launches that are kept of a problem: many may fall into one bucket.
_MOST_LAUNCHES = 32
#: The share of a full file's entries that goes at once, so that a full one is not made room in for every config.
_FORGOTTEN = 0.25
#: So many times of a problem are written one by one, and so large a share of all of them together after that.
_AT_ONCE, _WAITING_SHARE = 64, 0.125
#: Of a full file, one problem's times are shortened first where they are more than this share, and more than this many.
_LARGE_SHARE, _FEW = 0.25, 64
_caches: weakref.WeakSet[ChoiceCache] = weakref.WeakSet()


@atexit.register
def _flush_all() -> None:
    for cache in list(_caches):
        cache.flush()


class ChoiceCache:
    """Times and choices of one kernel, of this source, on this device, under this driver, torch and Triton. A time of
    another source or version is another time: it is kept beside, and not seen.

    A problem is taken as it is: whoever asks hands in what stands for it at call time (`Family.at_call_time`), and
    whoever reads a choice checks that it is among the configs at hand, because a file may say anything. Never raises
    for a bad disk or a bad file: then what is found out lives in memory, with one warning. A file has at most half a
    MiB (some 40,000 times); the problems that were touched longest ago go first.

    >>> import tempfile; os.environ["FORETUNE_CACHE_DIR"] = tempfile.mkdtemp()
    >>> cache = ChoiceCache.of("package.module.kernel", "a1b2", DeviceSpec.named("h200"))
    >>> del os.environ["FORETUNE_CACHE_DIR"]
    >>> problem, fast, failing = Problem.of("softmax", rows=64), KernelConfig.of(BLOCK=64), KernelConfig.of(BLOCK=128)
    >>> cache.record(problem, fast, 12.5)
    >>> cache.record(problem, failing, None)
    >>> dict(cache.times(problem)) == {fast: 12.5, failing: None}
    True
    >>> cache.choose(problem, "", fast)
    >>> cache.choice(problem, "") == fast, cache.choice(problem, "another bundle")
    (True, None)
    """

    def __init__(self, file: SharedFile, kernel: str, source_hash: str, device: DeviceSpec) -> None:
        self.file, self.kernel, self.source_hash, self.device = file, kernel, source_hash, device
        self._software = Software.here()
        self._recorded: Counter[Problem] = Counter()
        self._waiting: dict[Problem, dict[KernelConfig, float | None]] = {}  # recorded, but not written yet
        _caches.add(self)

    @classmethod
    def of(cls, kernel: str, source_hash: str, device: DeviceSpec) -> ChoiceCache:
        """What is known of the kernel of that name ("module.qualname", or a family's). Raises `ForetuneError` for what
        is no name, no hash or no device, and for nothing else."""
        kernel = check_word("a kernel's name", kernel, 4 * LONGEST_WORD)
        check_word("a kernel's source hash", source_hash)
        if not isinstance(device, DeviceSpec):
            raise ForetuneError(f"device must be a DeviceSpec but is {shown(device)}")
        folder = choices_folder()
        return cls(shared_file(folder, kernel, device), kernel, source_hash, device)

    def times(self, problem: Problem) -> Mapping[KernelConfig, float | None]:
        """Return the times that were measured of a problem, in microseconds by config; None for a config that failed
        less than a day ago."""
        self.flush()
        document = self.file.read()
        entry = self._entry(document, problem)
        if entry is None:
            return {}
        times, fails = times_of(document, entry), _failures_last(entry)
        return {config: time_us for config, time_us in times.items() if fails or time_us is not None}

    def problems(self) -> Sequence[Problem]:
        """Those that have times, the one that was touched longest ago first."""
        self.flush()
        return [Problem.from_json(entry["problem"]) for entry in self._entries(self.file.read()) if entry["times"]]

    def record(self, problem: Problem, config: KernelConfig, time_us: float | None) -> None:
        """Keep the time of a config, or that it failed: None, or what no clock gives (inf, as Triton has it).

        The first `_AT_ONCE` times of a problem are on the disk when this returns. The file is written as a whole, so
        that of more of them an eighth is written at a time, the last ones with the choice or when the process ends."""
        waiting = self._waiting.setdefault(problem, {})
        waiting[config] = time_us
        self._recorded[problem] += 1
        if self._recorded[problem] <= _AT_ONCE or len(waiting) > _WAITING_SHARE * self._recorded[problem]:
            self.flush()

    def flush(self) -> None:
        """Write the times that are not on the disk yet."""
        while self._waiting:
            self.record_all(*self._waiting.popitem())

    def record_all(self, problem: Problem, times: Mapping[KernelConfig, float | None]) -> None:
        """Several at once: the file is written once."""
        kept = {config: _time(time_us) for config, time_us in times.items()}

        def change(document: Document) -> None:
            entry = self._touched(document, problem)
            places = _Places(document["configs"])
            if None in kept.values() and not _failures_last(entry):
                entry["times"] = {place: time_us for place, time_us in entry["times"].items() if time_us is not None}
                entry[_FAILED_AT] = int(time.time())
            entry["times"] |= {str(places.of(config)): time_us for config, time_us in kept.items()}

        self.file.update(change)

    def choice(self, problem: Problem, bundle: str) -> KernelConfig | None:
        """What was chosen for a problem with the bundle of that digest ("" for none); None where nothing was."""
        document = self.file.read()
        entry = self._entry(document, problem)
        place = None if entry is None else entry["chosen"].get(bundle)
        return None if place is None else KernelConfig.from_json(document["configs"][place])

    def choose(self, problem: Problem, bundle: str, config: KernelConfig) -> None:
        """Keeps a choice. On the disk when it returns."""
        self.flush()

        def change(document: Document) -> None:
            entry = self._touched(document, problem)
            entry["chosen"][bundle] = _Places(document["configs"]).of(config)

        self.file.update(change)

    def saw_launch(
        self,
        problem: Problem,
        names: Sequence[str],
        key: Sequence[Any],
        arguments: Mapping[str, Any] | None = None,
        config: KernelConfig | None = None,
    ) -> None:
        """Keeps Triton's own key of a launch of this problem: the values of the arguments of those names, then the
        dtypes of its tensors, as `Autotuner.cache` has it. What other projects' tables are keyed by. A key that JSON
        has no words for is left out. `arguments`, as `kept_arguments` gives them, are what a warm-up goes by.
        `config` is what it runs, where that need not be the problem's best."""
        launch: Document = {"names": list(names), "key": list(key)}
        if arguments is not None:
            launch["arguments"] = dict(arguments)
        if config is not None:
            launch["config"] = config.to_json()
        if not _is_launch(launch):
            return
        entry = self._entry(self.file.read(), problem)
        if entry is not None and launch in entry["launches"]:
            return

        def change(document: Document) -> None:
            entry = self._touched(document, problem)
            entry["launches"] = joined_launches(entry["launches"], [launch])

        self.file.update(change)

    def _entries(self, document: Document) -> list[Document]:
        software = asdict(self._software)
        return [
            entry
            for entry in document.get("entries", [])
            if entry["source"] == self.source_hash and entry["software"] == software
        ]

    def _entry(self, document: Document, problem: Problem) -> Document | None:
        wanted = problem.to_json()
        return next((entry for entry in self._entries(document) if entry["problem"] == wanted), None)

    def _touched(self, document: Document, problem: Problem) -> Document:
        """The problem's entry, made if need be, moved to the end: what is last is the newest."""
        if not document:
            document |= new_document(self.kernel, self.device)
        entry = self._entry(document, problem)
        if entry is None:
            entry = {"source": self.source_hash, "software": asdict(self._software), "problem": problem.to_json()}
            entry |= {"times": {}, "chosen": {}, "launches": []}
        else:
            document["entries"] = [one for one in document["entries"] if one is not entry]
        document["entries"].append(entry)
        return entry


@dataclass(frozen=True)
class Software:
    """What a time depends on beside the kernel, the problem and the card; "" for what is not here."""

    driver: str
    torch: str
    triton: str

    @classmethod
    def here(cls) -> Software:
        return _software()


@lru_cache(maxsize=1)
def _software() -> Software:
    return Software(driver=_driver(), torch=_version_of("torch"), triton=_version_of("triton"))


def _driver() -> str:
    """Read from the system: asking the driver itself would begin CUDA."""
    for path in ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version"):
        try:
            found = re.search(r"\b\d+(\.\d+)+", Path(path).read_text(errors="replace"))
        except OSError:
            continue
        if found:
            return found[0]
    return ""


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # built in place: then it is known once it is imported
        return str(getattr(sys.modules.get(package), "__version__", ""))


def choices_folder() -> Path | None:
    """Where the files of choices are, or would be; None where there is no home to have them in."""
    try:
        cache = os.environ.get(VARIABLE) or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "foretune")
        return Path(cache).expanduser().absolute() / "choices"
    except (RuntimeError, OSError, ValueError):  # no home; a working directory that is gone
        return None


def shared_file(folder: Path | None, kernel: str, device: DeviceSpec) -> SharedFile:
    """The one file of a kernel and a device in a folder: its name says both, and a digest tells alike names apart."""
    names = (kernel, f"{device.name} {device.arch} {device.sm_count}")
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:12]
    words = [re.sub(r"[^A-Za-z0-9.]+", "_", name)[-80:].strip("._") for name in (kernel, device.name)]
    return _shared(folder, f"{words[0]}-{words[1]}-{digest}.json")


# One for each file, so that what lives in memory lives on; a process meets as many as it has kernels.
@lru_cache(maxsize=4096)
def _shared(folder: Path | None, name: str) -> SharedFile:
    if folder is None:
        warn_once("no home folder was found", f": choices are kept in this process alone; {VARIABLE} names another")
    path = None if folder is None else near_copy(folder / name, writes=True)
    return SharedFile(path, check=check_choices, forget=_forget_oldest)


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
    """Why a value does not pass a check; None for one that does."""
    try:
        check(value)
    except ForetuneError as error:
        return error
    return None


def _check_entry(entry: Any, places: Collection[int]) -> None:
    if not isinstance(entry, dict) or set(entry) - {_FAILED_AT} != _ENTRY_KEYS:
        raise ForetuneError(f"an entry must have {', '.join(sorted(_ENTRY_KEYS))} but one is {shown(entry)}")
    check_word("source", entry["source"])
    Problem.from_json(entry["problem"])
    for name in ("software", "times", "chosen"):
        if not isinstance(entry[name], dict):
            raise ForetuneError(f"{name} must be an object but is {shown(entry[name])}")
    software = entry["software"]
    if set(software) != set(Software.__dataclass_fields__) or not all(isinstance(v, str) for v in software.values()):
        raise ForetuneError(f"software must have texts for driver, torch and triton but is {shown(software)}")
    for place, time_us in entry["times"].items():
        if not re.fullmatch("0|[1-9][0-9]{0,6}", place) or int(place) not in places:
            raise ForetuneError(f"a time must be one of a config but is of {shown(place)}")
        if time_us is not None and not (type(time_us) in (int, float) and SHORTEST_US <= time_us <= LONGEST_US):
            raise ForetuneError(f"a time must be {SHORTEST_US} to {LONGEST_US} us, or null, but is {shown(time_us)}")
    check_integer(_FAILED_AT, entry.get(_FAILED_AT, 0), 0, _LATEST_S)
    launches = entry["launches"]
    if not isinstance(launches, list) or len(launches) > _MOST_LAUNCHES or not all(map(_is_launch, launches)):
        raise ForetuneError(f"launches must be at most {_MOST_LAUNCHES}, of names and a key, but are {shown(launches)}")
    for place in entry["chosen"].values():
        if type(place) is not int or place not in places:
            raise ForetuneError(f"a choice must be one of the configs but is {shown(place)}")


def joined_launches(older: Sequence[Document], newer: Sequence[Document]) -> list[Document]:
    """Return launches of one problem from two places, each once with its newer config, as many as are kept."""
    known = [_without_config(launch) for launch in newer]
    return [*(one for one in older if _without_config(one) not in known), *newer][-_MOST_LAUNCHES:]


def _without_config(launch: Document) -> Document:
    return {name: value for name, value in launch.items() if name != "config"}


def _is_launch(launch: Any) -> bool:
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
        and ("config" not in launch or _is_config(launch["config"]))
    )


def _is_config(value: Any) -> bool:
    try:
        KernelConfig.from_json(value)
    except ForetuneError:
        return False
    return True


def _failures_last(entry: Document) -> bool:
    """Return whether the failures in an entry still count. (A clock may have been set back since.)"""
    age_s = time.time() - float(entry.get(_FAILED_AT, -FAILURES_LAST_S))
    return 0 <= age_s < FAILURES_LAST_S


class _Places:
    """Where each config stands in a document's list, to which new ones are added."""

    def __init__(self, configs: list[Document]) -> None:
        self._configs = configs
        self._known = {_hashable(config): place for place, config in enumerate(configs)}

    def of(self, config: KernelConfig) -> int:
        value = config.to_json()
        place = self._known.setdefault(_hashable(value), len(self._configs))
        if place == len(self._configs):
            self._configs.append(value)
        return place


def _hashable(config: Mapping[str, Any]) -> tuple[tuple[str, str, Any], ...]:
    return tuple(sorted((name, type(value).__name__, value) for name, value in config.items()))


def _forget_oldest(document: Document) -> bool:
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
    kept = document["entries"]
    used = sorted({int(place) for one in kept for place in (*one["times"], *one["chosen"].values())})
    moved = {old: new for new, old in enumerate(used)}
    document["configs"] = [document["configs"][old] for old in used]
    for one in kept:
        one["times"] = {str(moved[int(place)]): time_us for place, time_us in one["times"].items()}
        one["chosen"] = {bundle: moved[place] for bundle, place in one["chosen"].items()}


def _time(time_us: float | None) -> float | None:
    """A time as it is kept: rounded to 6 digits, far below any noise; None for what no kernel takes."""
    if time_us is None or not SHORTEST_US <= time_us <= LONGEST_US:
        return None
    return float(f"{time_us:.6g}")
