"""What is remembered of kernels and tuned functions: listed, cleared, and carried from one machine to another."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ....datasets import DeviceSpec, ForetuneError, KernelConfig, Problem
from ....datasets.console.tables import table
from ....datasets.disk.atomic import replacing
from ....datasets.disk.writable import check_file
from ....datasets.errors import abridged, check_path, shown, warn
from ..functions.config_cache import functions_folder
from .choice_cache import Software, check_choices, choices_folder, new_document, shared_file, times_of
from .function_files import KnownFunction, known_functions
from .shared_file import MOST_BYTES, Document, content_of

#: What a file of several kernels' choices says it is.
_EXPORTED = "foretune exported choices 1"
#: An exported file is read as a whole: a few hundred kernels, all files full.
_MOST_EXPORTED_BYTES = 1 << 28


@dataclass(frozen=True)
class KnownProblem:
    """What is known of one problem, under one source and software."""

    problem: Problem
    source: str
    software: Software
    times_us: Mapping[KernelConfig, float | None]  # None: it failed
    chosen: Mapping[str, KernelConfig]  # by the digest of the bundle, "" for none
    launches: Sequence[Mapping[str, Any]]  # see ChoiceCache.saw_launch

    @property
    def best(self) -> KernelConfig | None:
        """The fastest config that was measured; else the one that was chosen last; else None."""
        timed = {config: time_us for config, time_us in self.times_us.items() if time_us is not None}
        if timed:
            return min(timed, key=timed.__getitem__)
        return list(self.chosen.values())[-1] if self.chosen else None


@dataclass(frozen=True)
class KnownKernel:
    """What a file has: a kernel on a device."""

    kernel: str
    device: DeviceSpec
    problems: tuple[KnownProblem, ...]  # the newest last

    def latest(self) -> KnownKernel:
        """What was found out with the source and the software of the newest problem alone: times of others are other
        kernels' times."""
        if not self.problems:
            return self
        newest = self.problems[-1]
        kept = [one for one in self.problems if (one.source, one.software) == (newest.source, newest.software)]
        return replace(self, problems=tuple(kept))

    @classmethod
    def from_document(cls, document: Document) -> KnownKernel:
        """Raises `ForetuneError` for what is no document of choices."""
        check_choices(document)
        configs = [KernelConfig.from_json(config) for config in document["configs"]]
        return cls(
            document["kernel"],
            DeviceSpec.from_json(document["device"]),
            tuple(
                KnownProblem(
                    Problem.from_json(entry["problem"]),
                    entry["source"],
                    Software(**entry["software"]),
                    times_of(document, entry),
                    {bundle: configs[place] for bundle, place in entry["chosen"].items()},
                    entry["launches"],
                )
                for entry in document["entries"]
            ),
        )


@dataclass(frozen=True)
class CacheContents:
    """What `foretune cache show` prints: a row a kernel and device and a row a function, or of one of them a row a
    problem or key."""

    folder: Path | None
    kernels: tuple[KnownKernel, ...]
    functions: tuple[KnownFunction, ...]
    of_one: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "folder": None if self.folder is None else str(self.folder),
            "kernels": [_counted(one) | ({"by_problem": _listed(one)} if self.of_one else {}) for one in self.kernels],
            "functions": [one.counted() | ({"by_key": one.listed()} if self.of_one else {}) for one in self.functions],
        }

    def __rich__(self) -> Any:
        from rich.console import Group

        if not self.kernels and not self.functions:
            return table("Choices", ("kernel", "device"), [], below=[f"Nothing is remembered in {self.folder}"])
        kernels = [self._of_kernels()] if self.kernels else []
        return Group(*kernels, *([self._of_functions()] if self.functions else []))

    def _of_kernels(self) -> Any:
        below = [f"In {self.folder}"]
        if not self.of_one:
            counts = ("kernel", "device", "problems", "times", "failed", "choices", "sources")
            return _table("Choices", counts, map(_counted, self.kernels), below=below)
        listed = [{"device": one.device.name, **problem} for one in self.kernels for problem in _listed(one)]
        columns = ("problem", "device", "times", "failed", "best", "best_us", "triton", "source")
        return _table(self.kernels[0].kernel, columns, listed, below=below, once=("device", "triton", "source"))

    def _of_functions(self) -> Any:
        below = [f"In {functions_folder()}"]
        if not self.of_one:
            counts = ("function", "keys", "times", "failed", "choices")
            return _table("Functions", counts, (one.counted() for one in self.functions), below=below)
        listed = [row for one in self.functions for row in one.listed()]
        of_kernels = ["kernel"] if any(row["kernel"] for row in listed) else []
        columns = ("key", *of_kernels, "times", "failed", "chosen", "best_us")
        return _table(self.functions[0].name, columns, listed, below=below)


@dataclass(frozen=True)
class Counted:
    """How many files of kernels and functions, problems (of functions: keys) and times were exported, imported or
    forgotten."""

    what: str
    kernels: int
    functions: int
    problems: int
    times: int

    @classmethod
    def of(cls, what: str, kernels: Sequence[KnownKernel], functions: Sequence[KnownFunction] = ()) -> Counted:
        problems = [problem for kernel in kernels for problem in kernel.problems]
        times = [len(one.times_us) for one in problems] + [one.times for one in functions]
        n_problems = len(problems) + sum(len(one.entries) for one in functions)
        return cls(what, len(kernels), len(functions), n_problems, sum(times))

    def to_json(self) -> dict[str, Any]:
        counts = {"kernels": self.kernels, "functions": self.functions}
        return {**counts, "problems": self.problems, "times": self.times}

    def __rich__(self) -> Any:
        from rich.text import Text

        files = f"{self.kernels} files of kernels and {self.functions} of functions"
        return Text(f"{self.what}: {self.times} times of {self.problems} problems in {files}.")


def cache_contents(kernel: str | None = None) -> CacheContents:
    """What is remembered, of all kernels and functions or of one. Raises `ForetuneError` that lists them where that one
    is none of them."""
    kernels, functions = _all(kernel)
    return CacheContents(
        choices_folder(), tuple(known for _, known in kernels), tuple(functions), of_one=kernel is not None
    )


def known_kernels(kernel: str | None) -> list[KnownKernel]:
    """One kernel's files, each a device; of None all kernels'. Raises `ForetuneError` that lists the kernels where it
    is none of them."""
    return [known for _, known in _files(kernel)]


def clear_cache(kernel: str | None = None) -> Counted:
    """Forgets all, or one kernel or function. Raises as `cache_contents` does, and `OSError` for what cannot be
    removed."""
    kernels, functions = _all(kernel)
    paths = [*(path for path, _ in kernels), *(one.path for one in functions)]
    if kernel is None:
        folders = filter(None, (choices_folder(), functions_folder()))
        paths = [path for one in folders for path in one.glob("*") if path.name.endswith((".json", ".unreadable"))]
    for path in paths:
        path.unlink(missing_ok=True)
    return Counted.of("Forgotten", [known for _, known in kernels], functions)


def export_choices(out: Path | str, kernel: str | None = None) -> Counted:
    """Writes what is remembered, of all kernels and functions or of one, to a file that `import_choices` reads. Raises
    `ForetuneError` where there is nothing, or where that cannot be written."""
    check_file(out)
    kernels, functions = _all(kernel)
    if not kernels and not functions:
        raise ForetuneError(f"nothing is remembered in {choices_folder()}: there is nothing to export")
    value = {
        "format": _EXPORTED,
        "files": [json.loads(content_of(path, MOST_BYTES)) for path, _ in kernels],
        "functions": [one.to_json() for one in functions],
    }
    with replacing(out) as temporary:
        temporary.write_text(json.dumps(value) + "\n", encoding="utf-8")
    return Counted.of("Exported", [known for _, known in kernels], functions)


def import_choices(path: Path | str) -> Counted:
    """Adds what an exported file has to what is remembered here. Of a time or a choice that both have, the one here
    stays. Raises `ForetuneError` for what is no such file, before anything is added, and where nothing can be kept."""
    path = check_path("the file", path)
    documents, functions = _exported(path)
    kernels = [KnownKernel.from_document(document) for document in documents]
    folder = choices_folder()
    for document, known in zip(documents, kernels, strict=True):
        file = shared_file(folder, known.kernel, known.device)
        file.update(lambda here, document=document: _merge(here, document))  # type: ignore[misc]
        if not file.is_on_disk:
            raise ForetuneError(f"{folder}: what is imported cannot be kept there")
    for one in functions:
        if not one.keep():
            raise ForetuneError(f"{functions_folder()}: what is imported cannot be kept there")
    return Counted.of("Imported", kernels, functions)


def _exported(path: Path) -> tuple[list[Document], list[KnownFunction]]:
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_EXPORTED_BYTES + 1)
        if len(content) > _MOST_EXPORTED_BYTES:
            raise ForetuneError(f"it has more than {_MOST_EXPORTED_BYTES >> 20} MiB")
        value = json.loads(content)
        if not isinstance(value, dict) or value.get("format") != _EXPORTED or not isinstance(value.get("files"), list):
            raise ForetuneError(f"it is no file of {_EXPORTED!r}")
        for document in value["files"]:
            check_choices(document)
        functions = value.get("functions", [])  # before there were any, none were written
        if not isinstance(functions, list):
            raise ForetuneError(f"functions must be a list but are {shown(functions)}")
        return list(value["files"]), [KnownFunction.from_json(one) for one in functions]
    except OSError as error:
        raise ForetuneError(f"{abridged(str(path))}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # a ForetuneError among them
        raise ForetuneError(f"{abridged(str(path))}: not exported choices: {abridged(str(error))}") from None


def _merge(here: Document, there: Document) -> None:
    """Adds what is there to what is here: as the oldest, so that it is the first to be forgotten."""
    if not here:
        here |= new_document(there["kernel"], DeviceSpec.from_json(there["device"]))
    place = {json.dumps(config, sort_keys=True): at for at, config in enumerate(here["configs"])}
    moved = []
    for config in there["configs"]:
        at = place.setdefault(json.dumps(config, sort_keys=True), len(here["configs"]))
        if at == len(here["configs"]):
            here["configs"].append(config)
        moved.append(at)
    known = {_identity(entry): entry for entry in here["entries"]}
    new = []
    for entry in there["entries"]:
        times = {str(moved[int(at)]): time_us for at, time_us in entry["times"].items()}
        chosen = {bundle: moved[at] for bundle, at in entry["chosen"].items()}
        if (mine := known.get(_identity(entry))) is None:
            new.append(entry | {"times": times, "chosen": chosen})
        else:
            mine["times"], mine["chosen"] = times | mine["times"], chosen | mine["chosen"]
    here["entries"] = new + here["entries"]


def _identity(entry: Document) -> str:
    return json.dumps([entry["source"], entry["software"], entry["problem"]], sort_keys=True)


def _all(name: str | None) -> tuple[list[tuple[Path, KnownKernel]], list[KnownFunction]]:
    """What can be read, of all kernels and functions or of those of one name."""
    kernels, functions = _files(None), known_functions()
    if name is None:
        return kernels, functions
    found = [one for one in kernels if one[1].kernel == name], [one for one in functions if one.name == name]
    if not any(found):
        raise _nothing_of(name, {known.kernel for _, known in kernels} | {one.name for one in functions})
    return found


def _nothing_of(name: str, names: Collection[str]) -> ForetuneError:
    folder = choices_folder()
    known = abridged(", ".join(sorted(names)), 1000) or "no kernel"
    return ForetuneError(
        f"nothing is remembered of {abridged(name, 100)!r} in {folder and folder.parent}; there are choices of {known}"
    )


def _files(kernel: str | None) -> list[tuple[Path, KnownKernel]]:
    """The files that can be read, by name; what cannot is warned of."""
    folder = choices_folder()
    paths = sorted(folder.glob("*.json")) if folder is not None else ()
    found = [(path, known) for path in paths if (known := _known(path)) is not None]
    if kernel is None:
        return found
    names = {known.kernel for _, known in found}
    if kernel not in names:
        if kernel in (one.name for one in known_functions()):
            raise ForetuneError(
                f"{abridged(kernel, 100)} is a tuned function: only a kernel's choices can be written so"
            )
        raise _nothing_of(kernel, names)
    return [(path, known) for path, known in found if known.kernel == kernel]


def _known(path: Path) -> KnownKernel | None:
    try:
        return KnownKernel.from_document(json.loads(content_of(path, MOST_BYTES)))
    except FileNotFoundError:  # cleared meanwhile
        return None
    except (OSError, ValueError, RecursionError) as error:
        warn(f"{path} is left out: {abridged(str(error))}")
        return None


def _table(title: str, columns: Sequence[str], rows: Iterable[Mapping[str, Any]], **more: Any) -> Any:
    return table(title, columns, [[row[column] for column in columns] for row in rows], **more)


def _counted(known: KnownKernel) -> dict[str, Any]:
    outcomes = Counter(time is None for one in known.problems for time in one.times_us.values())
    return {
        "kernel": known.kernel,
        "device": known.device.name,
        "problems": len(known.problems),
        "times": outcomes[False],
        "failed": outcomes[True],
        "choices": sum(len(one.chosen) for one in known.problems),
        "sources": len({one.source for one in known.problems}),
    }


def _listed(known: KnownKernel) -> list[dict[str, Any]]:
    return [
        {
            "problem": str(one.problem),
            "times": sum(time is not None for time in one.times_us.values()),
            "failed": sum(time is None for time in one.times_us.values()),
            "best": "" if one.best is None else str(one.best),
            "best_us": "" if one.best is None else one.times_us.get(one.best, ""),
            "source": one.source,
            "driver": one.software.driver,
            "torch": one.software.torch,
            "triton": one.software.triton,
        }
        for one in known.problems
    ]
