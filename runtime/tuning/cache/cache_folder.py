"""What is remembered of kernels and tuned functions: listed, cleared, and carried from one machine to another."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from ....datasets import DeviceSpec, ForetuneError, KernelConfig, Problem
from ....datasets.console.tables import printable, table
from ....datasets.disk.atomic import replacing
from ....datasets.disk.regular import check_replaceable, read_regular
from ....datasets.disk.writable import check_file
from ....datasets.errors import abridged, check_path, shown, warn
from ...timing.flywheel import Software
from ..functions.config_cache import functions_folder
from .choice_cache import choices_folder, shared_file
from .choice_document import check_choices, times_of
from .function_files import KnownFunction, known_functions
from .merging import merge_choices
from .own_files import OUR_CHOICES, OUR_EXPORT, OUR_FUNCTIONS, remove_own
from .shared_file import MOST_BYTES, Document, from_json

T = TypeVar("T")
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
    path: Path | None = field(default=None, compare=False)
    document: Document = field(default_factory=dict, compare=False, repr=False)  # what it was read from

    def latest(self) -> KnownKernel:
        """What was found out with the source and the software of the newest problem alone: times of others are other
        kernels' times."""
        if not self.problems:
            return self
        newest = self.problems[-1]
        kept = [one for one in self.problems if (one.source, one.software) == (newest.source, newest.software)]
        return replace(self, problems=tuple(kept))

    @classmethod
    def from_document(cls, document: Document, path: Path | None = None) -> KnownKernel:
        """Of a document that `check_choices` has accepted."""
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
            path,
            document,
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
    forgotten; and a line for what was left: files that are not the cache's, records without room."""

    what: str
    kernels: int
    functions: int
    problems: int
    times: int
    left: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        what: str,
        kernels: Sequence[KnownKernel],
        functions: Sequence[KnownFunction] = (),
        left: Sequence[str] = (),
    ) -> Counted:
        problems = [problem for kernel in kernels for problem in kernel.problems]
        times = [len(one.times_us) for one in problems] + [one.times for one in functions]
        n_problems = len(problems) + sum(len(one.entries) for one in functions)
        return cls(what, len(kernels), len(functions), n_problems, sum(times), tuple(left))

    def to_json(self) -> dict[str, Any]:
        counts = {"kernels": self.kernels, "functions": self.functions}
        counts |= {"problems": self.problems, "times": self.times}
        return {**counts, "left": list(self.left)} if self.left else counts

    def __rich__(self) -> Any:
        from rich.text import Text

        files = f"{self.kernels} files of kernels and {self.functions} of functions"
        line = f"{self.what}: {self.times} times of {self.problems} problems in {files}."
        return Text("\n".join(map(printable, (line, *self.left))))


def cache_contents(kernel: str | None = None) -> CacheContents:
    """What is remembered, of all kernels and functions or of one. Raises `ForetuneError` that lists them where that one
    is none of them."""
    kernels, functions = _all(kernel)
    return CacheContents(choices_folder(), tuple(kernels), tuple(functions), of_one=kernel is not None)


def known_kernels(kernel: str | None) -> list[KnownKernel]:
    """One kernel's files, each a device; of None all kernels'. Raises `ForetuneError` that lists the kernels where it
    is none of them."""
    return _files(kernel)


def clear_cache(kernel: str | None = None) -> Counted:
    """Forget all, or one kernel or function.

    Only regular files that say that they are the cache's are removed, and nothing behind a symbolic link: the result
    names what was left.

    Raises:
        ForetuneError: As `cache_contents` does.
        OSError: A file cannot be removed.
    """
    kernels, functions = _all(kernel)
    known = [*(one.path for one in kernels), *(one.path for one in functions)]
    left: list[str] = []
    removed: set[Path] = set()
    for folder, begins in ((choices_folder(), OUR_CHOICES), (functions_folder(), OUR_FUNCTIONS)):
        if folder is not None:
            names = None if kernel is None else {path.name for path in known if path and path.parent == folder}
            gone, kept = remove_own(folder, begins, names)
            removed |= gone
            left += kept
    gone_kernels = [one for one in kernels if one.path in removed]
    return Counted.of("Forgotten", gone_kernels, [one for one in functions if one.path in removed], left)


def export_choices(out: Path | str, kernel: str | None = None) -> Counted:
    """Write what is remembered, of all kernels and functions or of one, to a file that `import_choices` reads.

    Raises:
        ForetuneError: There is nothing, or the file cannot be written, or it is there and no exported file.
    """
    check_file(out)
    check_replaceable(out, lambda content: OUR_EXPORT.match(content) is not None, "an export of the cache")
    kernels, functions = _all(kernel)
    if not kernels and not functions:
        raise ForetuneError(f"nothing is remembered in {choices_folder()}: there is nothing to export")
    value = {
        "format": _EXPORTED,
        "files": [one.document for one in kernels],
        "functions": [one.to_json() for one in functions],
    }
    text = json.dumps(value, allow_nan=False) + "\n"
    with replacing(out) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return Counted.of("Exported", kernels, functions)


def import_choices(path: Path | str) -> Counted:
    """Add what an exported file has to what is remembered here, and count what of it is known here then.

    Of a time or a choice that both have, the one here stays. Malformed records are left out, and so is what a cache's
    file has no room for, the oldest first; the result says how many.

    Raises:
        ForetuneError: It is no such file, or nothing in it is well-formed, before anything is added; or nothing can be
            kept.
    """
    path = check_path("the file", path)
    documents, functions, malformed = _exported(path)
    folder = choices_folder()
    kept_kernels, kept_functions = [], []
    for document in documents:
        whole = KnownKernel.from_document(document)
        file, kept = shared_file(folder, whole.kernel, whole.device), list[int]()
        file.update(lambda here, there=document, kept=kept: merge_choices(here, there, kept))  # type: ignore[misc]
        if not file.is_on_disk:
            raise ForetuneError(f"{folder}: what is imported cannot be kept there")
        kept_kernels.append(replace(whole, problems=tuple(whole.problems[at] for at in kept)))
    for one in functions:
        if (known := one.keep()) is None:
            raise ForetuneError(f"{functions_folder()}: what is imported cannot be kept there")
        kept_functions.append(known)
    given = Counted.of("", [KnownKernel.from_document(document) for document in documents], functions)
    counted = Counted.of("Imported", kept_kernels, kept_functions)
    left = [f"{malformed} malformed records are left out"] if malformed else []
    if counted.problems < given.problems:
        left.append(
            f"{given.times - counted.times} times of {given.problems - counted.problems} problems are left out: a file "
            f"of the cache has at most {MOST_BYTES >> 10} KiB"
        )
    return replace(counted, left=tuple(left))


def _exported(path: Path) -> tuple[list[Document], list[KnownFunction], int]:
    """The documents and functions in a file, and how many records in it are malformed."""
    try:
        value = from_json(read_regular(path, _MOST_EXPORTED_BYTES, follow=True))
        if not isinstance(value, dict) or value.get("format") != _EXPORTED or not isinstance(value.get("files"), list):
            raise ForetuneError(f"it is no file of {_EXPORTED!r}")
        functions = value.get("functions", [])  # before there were any, none were written
        if not isinstance(functions, list):
            raise ForetuneError(f"functions must be a list but are {shown(functions)}")
        files = [_tried(_checked, document) for document in value["files"]]
        known = [_tried(KnownFunction.from_json, one) for one in functions]
        errors = [one for one in (*files, *known) if isinstance(one, ForetuneError)]
        if errors and len(errors) == len(files) + len(known):
            raise errors[0]
        right = [one for one in files if not isinstance(one, ForetuneError)]
        right_functions = [one for one in known if not isinstance(one, ForetuneError)]
        malformed = len(errors) + sum(left_out for _, left_out in (*right, *right_functions))
        return [document for document, _ in right], [function for function, _ in right_functions], malformed
    except OSError as error:
        raise ForetuneError(f"{abridged(str(path))}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # a ForetuneError among them
        raise ForetuneError(f"{abridged(str(path))}: not exported choices: {abridged(str(error))}") from None


def _checked(document: Document) -> tuple[Document, int]:
    """A document without what is malformed in it, and how much that is. Raises as `check_choices` does."""
    return document, check_choices(document)


def _tried(read: Callable[[Any], T], value: Any) -> T | ForetuneError:
    try:
        return read(value)
    except ForetuneError as error:
        return error


def _all(name: str | None) -> tuple[list[KnownKernel], list[KnownFunction]]:
    """What can be read, of all kernels and functions or of those of one name."""
    kernels, functions = _files(None), known_functions()
    if name is None:
        return kernels, functions
    found = [one for one in kernels if one.kernel == name], [one for one in functions if one.name == name]
    if not any(found):
        raise _nothing_of(name, {one.kernel for one in kernels} | {one.name for one in functions})
    return found


def _nothing_of(name: str, names: Collection[str]) -> ForetuneError:
    folder = choices_folder()
    known = abridged(", ".join(sorted(names)), 1000) or "no kernel"
    return ForetuneError(
        f"nothing is remembered of {abridged(name, 100)!r} in {folder and folder.parent}; there are choices of {known}"
    )


def _files(kernel: str | None) -> list[KnownKernel]:
    """The files that can be read, by name; what cannot is warned of."""
    folder = choices_folder()
    paths = sorted(folder.glob("*.json")) if folder is not None else ()
    found = [known for path in paths if (known := _known(path)) is not None]
    if kernel is None:
        return found
    names = {known.kernel for known in found}
    if kernel not in names:
        if kernel in (one.name for one in known_functions()):
            raise ForetuneError(
                f"{abridged(kernel, 100)} is a tuned function: only a kernel's choices can be written so"
            )
        raise _nothing_of(kernel, names)
    return [known for known in found if known.kernel == kernel]


def _known(path: Path) -> KnownKernel | None:
    try:
        document = from_json(read_regular(path, MOST_BYTES))
        left_out = check_choices(document)
    except FileNotFoundError:  # cleared meanwhile
        return None
    except (OSError, ValueError, RecursionError) as error:
        warn(f"{path} is left out: {abridged(str(error))}")
        return None
    if left_out:
        warn(f"{path}: {left_out} malformed records are left out")
    return KnownKernel.from_document(document, path)


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
