"""Read the cache files of kernels and tuned functions as a whole, to list, export and import them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from ....datasets import DeviceSpec, ForetuneError, KernelConfig, Problem
from ....datasets.errors import LONGEST_WORD, abridged, check_word, shown, warn
from ....datasets.files import read_regular
from ...timing.flywheel import Software
from ..functions.config_cache import (
    FORMAT,
    ConfigCache,
    KeyRecord,
    check_document,
    function_of,
    functions_folder,
    parts_of,
    records_of,
)
from .document import Refined, check_choices, refined_of, times_of
from .kernel_cache import choices_folder
from .shared_file import MOST_BYTES, Document, from_json

T = TypeVar("T")


@dataclass(frozen=True)
class KnownProblem:
    """The stored results of one problem, for one version of the kernel's source and of the software."""

    problem: Problem
    source: str
    software: Software
    times_us: Mapping[KernelConfig, float | None]  # None for a failed config
    chosen: Mapping[str, KernelConfig]  # by the digest of the bundle, "" for none
    launches: Sequence[Mapping[str, Any]]  # see ChoiceCache.saw_launch
    refined: Refined | None = None  # see ChoiceCache.refine

    @property
    def best(self) -> KernelConfig | None:
        """The best known config: the one that mode `refine` chose, else the fastest, else the last chosen; or None."""
        if self.refined is not None and self.refined.decided is not None:
            return self.refined.decided
        timed = {config: time_us for config, time_us in self.times_us.items() if time_us is not None}
        if timed:
            return min(timed, key=timed.__getitem__)
        return list(self.chosen.values())[-1] if self.chosen else None

    @property
    def choice(self) -> KernelConfig | None:
        """The config that launches run: the last chosen one (perhaps agreed on by ranks), else the fastest; or None."""
        return list(self.chosen.values())[-1] if self.chosen else self.best

    @property
    def failed(self) -> int:
        """The number of configs that failed."""
        return sum(time_us is None for time_us in self.times_us.values())


@dataclass(frozen=True)
class KnownKernel:
    """The stored results of one kernel on one device: the content of one cache file."""

    kernel: str
    device: DeviceSpec
    problems: tuple[KnownProblem, ...]  # the newest last
    path: Path | None = field(default=None, compare=False)
    document: Document = field(default_factory=dict, compare=False, repr=False)  # the JSON that it was read from

    def latest(self) -> KnownKernel:
        """Return only the problems with the same source and software as the newest one.

        The others are times of other versions of the kernel.
        """
        if not self.problems:
            return self
        newest = self.problems[-1]
        kept = [one for one in self.problems if (one.source, one.software) == (newest.source, newest.software)]
        return replace(self, problems=tuple(kept))

    def counted(self) -> dict[str, Any]:
        """Return the kernel's row in `foretune cache show`."""
        failed = sum(one.failed for one in self.problems)
        return {
            "kernel": self.kernel,
            "device": self.device.name,
            "problems": len(self.problems),
            "times": sum(len(one.times_us) for one in self.problems) - failed,
            "failed": failed,
            "choices": sum(len(one.chosen) for one in self.problems),
            "sources": len({one.source for one in self.problems}),
        }

    def listed(self) -> list[dict[str, Any]]:
        """Return a table row (column name -> value) for each problem."""
        return [
            {
                "problem": str(one.problem),
                "times": len(one.times_us) - one.failed,
                "failed": one.failed,
                "best": "" if one.best is None else str(one.best),
                "best_us": "" if one.best is None else one.times_us.get(one.best, ""),
                "source": one.source,
                **vars(one.software),
            }
            for one in self.problems
        ]

    @classmethod
    def read(cls, document: Any, path: Path | None = None) -> tuple[KnownKernel, int]:
        """Return the results in a cache file's document, and the number of malformed records removed from it.

        Raises:
            ForetuneError: As `check_choices` raises it.
        """
        left_out = check_choices(document)
        configs = [KernelConfig.from_json(config) for config in document["configs"]]
        problems = tuple(
            KnownProblem(
                Problem.from_json(entry["problem"]),
                entry["source"],
                Software(**entry["software"]),
                times_of(document, entry),
                {bundle: configs[place] for bundle, place in entry["chosen"].items()},
                entry["launches"],
                refined_of(document, entry),
            )
            for entry in document["entries"]
        )
        return cls(document["kernel"], DeviceSpec.from_json(document["device"]), problems, path, document), left_out


@dataclass(frozen=True)
class KnownFunction:
    """The stored results of a tuned function, or of several that share a cache file under the first one's name."""

    path: Path
    entries: Mapping[str, Mapping[str, Any]]  # by `record_key`, the newest last; see `ConfigCache`

    @property
    def name(self) -> str:
        """The function's name, or that of the file if it has no results."""
        return next(map(function_of, self.entries), self.path.stem)

    @property
    def times(self) -> int:
        """The number of stored times of configs."""
        return sum(counts["times"] for counts in self.listed())

    def counted(self) -> dict[str, Any]:
        """Return the function's row in `foretune cache show`."""
        listed = self.listed()
        return {
            "function": self.name,
            "keys": len(self.entries),
            "times": self.times,
            "failed": sum(one["failed"] for one in listed),
            "choices": sum(bool(one["chosen"]) for one in listed),
        }

    def listed(self) -> list[dict[str, Any]]:
        """Return a table row (column -> value) for each key; in a contextual function, for each kernel of a key."""
        return [
            {
                "key": key.partition("#")[2],
                "kernel": kernel,
                "times": sum(one.time_us is not None for one in record.measured.values()),
                "failed": sum(one.time_us is None for one in record.measured.values()),
                "chosen": record.chosen or "",
                "best_us": _best_us(record),
                "software": " ".join(f"{name}={version}" for name, version in record.software.items()),
            }
            for key, entry in self.entries.items()
            for kernel, _, record in records_of(entry)
        ]

    def records(self) -> Iterator[tuple[tuple[str, str, str, str], str, KeyRecord]]:
        """Yield (function, source digest, device, key), the kernel's label or "", and the record; the newest last."""
        for key, entry in self.entries.items():
            for label, _, record in records_of(entry):
                yield parts_of(key), label, record

    def to_json(self) -> dict[str, Any]:
        """Return the function's part of an exported file."""
        return {"function": self.name, "entries": dict(self.entries)}

    def keep(self) -> KnownFunction | None:
        """Add these results to the cache of this machine, as far as there is room; existing records are kept.

        Returns:
            The part of them that the cache has then; None if they could only be kept in memory.
        """
        cache = ConfigCache.of(self.name)
        if not cache.add(self.entries):
            return None
        return KnownFunction(self.path, {key: entry for key, entry in self.entries.items() if key in cache})

    @classmethod
    def from_json(cls, value: Any) -> tuple[KnownFunction, int]:
        """Return the results in a function's part of an exported file, and the number of malformed records left out.

        Raises:
            ForetuneError: The value is something else.
        """
        if not isinstance(value, dict) or set(value) != {"function", "entries"}:
            raise ForetuneError(f"a function must be an object with function and entries but is {shown(value)}")
        name = check_word("function", value["function"], 4 * LONGEST_WORD)
        known, left_out = cls.read({"format": FORMAT, "entries": value["entries"]}, Path(name))
        if known.entries and known.name != name:
            raise ForetuneError(f"{shown(name)}: its entries are those of {shown(known.name)}")
        return known, left_out

    @classmethod
    def read(cls, document: Any, path: Path) -> tuple[KnownFunction, int]:
        """Return the results in a cache file's document, and the number of malformed records that are left out.

        Raises:
            ForetuneError: The document is not one of a function, or nothing in it is well-formed.
        """
        if document == {}:  # all of its records were dropped
            return cls(path, {}), 0
        if not isinstance(document, dict):
            raise ForetuneError(f"it is not a file of format {FORMAT!r}")
        left_out, entries = check_document(document), document["entries"]
        kept = {key: entry for key, entry in entries.items() if _is_well_formed(entry)}
        if entries and not kept:
            raise ForetuneError("none of its records is well-formed")
        return cls(path, kept), left_out + len(entries) - len(kept)


def known_kernels(kernel: str | None) -> list[KnownKernel]:
    """Return the stored results of one kernel (None: of all), one object per device. Warn of unreadable files.

    Raises:
        ForetuneError: There is no such kernel; the message lists the known ones.
    """
    found = _in_folder(choices_folder(), KnownKernel.read)
    if kernel is None:
        return found
    names = {known.kernel for known in found}
    if kernel not in names:
        if kernel in (one.name for one in known_functions()):
            raise ForetuneError(
                f"{abridged(kernel, 100)} is a tuned function: only choices of kernels can be written in this format"
            )
        raise unknown_name_error(kernel, names)
    return [known for known in found if known.kernel == kernel]


def known_functions() -> list[KnownFunction]:
    """Return the stored results of all tuned functions, one object per file. Warn of unreadable files."""
    return _in_folder(functions_folder(), KnownFunction.read)


def unknown_name_error(name: str, names: set[str]) -> ForetuneError:
    """Return the error for a name that is none of `names`."""
    folder = choices_folder()
    known = f", only of {abridged(', '.join(sorted(names)), 1000)}" if names else ""
    return ForetuneError(f"the cache {folder and folder.parent} has no choices of {abridged(name, 100)!r}{known}")


def _in_folder(folder: Path | None, read: Callable[[Any, Path], tuple[T, int]]) -> list[T]:
    """Return what `read` returns for the document of each file of a folder (its first value), sorted by path.

    Files that cannot be read are skipped, and malformed records left out, with a warning.
    """
    found = []
    for path in sorted(folder.glob("*.json")) if folder is not None else ():
        try:
            known, left_out = read(from_json(read_regular(path, MOST_BYTES)), path)
        except FileNotFoundError:  # deleted meanwhile
            continue
        except (OSError, ValueError, RecursionError) as error:
            warn(f"{path} is left out: {abridged(str(error))}")
            continue
        if left_out:
            warn(f"{path}: {left_out} malformed records are left out")
        found.append(known)
    return found


def _is_well_formed(entry: Mapping[str, Any]) -> bool:
    """Return whether an entry's key records are valid. Fields of the entry that are no key records are not checked."""
    sites = entry.get("sites")
    records = sites.values() if isinstance(sites, dict) else [entry]
    claimed = [one for one in records if isinstance(one, dict) and "outcomes" in one]
    return all(KeyRecord.from_json(one) is not None for one in claimed)


def _best_us(record: KeyRecord) -> float | str:
    """Return the time of a record's chosen config in microseconds, to six digits; "" if it was not timed."""
    time_us = record.measured[record.chosen].time_us if record.chosen in record.measured else None
    return "" if time_us is None else float(f"{time_us:.6g}")
