"""List, clear, export and import the cached choices of kernels and tuned functions.

Only files that declare a format of the cache are removed or replaced.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from ....datasets import ForetuneError
from ....datasets.console import printable, table
from ....datasets.errors import abridged, check_path, shown
from ....datasets.files import check_file, check_replaceable, open_regular, read_regular, replacing
from ..functions.config_cache import functions_folder
from .document import Refining, merge_choices
from .kernel_cache import choices_folder, shared_file
from .known import KnownFunction, KnownKernel, known_functions, known_kernels, unknown_name_error
from .shared_file import MOST_BYTES, from_json

T = TypeVar("T")
#: The value of an exported file's "format".
_EXPORTED = "foretune exported choices 1"
#: The largest exported file that is read, in bytes: enough for a few hundred kernels with full files.
_MOST_EXPORTED_BYTES = 1 << 28
#: The beginnings of the files in each of the cache's folders, and of an exported file. There may be white space between
#: `{` and `"format"`.
_OUR_CHOICES, _OUR_FUNCTIONS, _OUR_EXPORT = (
    re.compile(rb'\s*\{\s*"format"\s*:\s*"foretune ' + what + b" ")
    for what in (b"choices", b"functions", b"exported choices")
)
#: The names of files that the cache has written: an empty one of them can be removed without loss.
_OUR_NAME = re.compile(r".*-[0-9a-f]{12}\.json(\.unreadable)?", re.DOTALL)
#: Bytes to read of a file: more than precede the format's name, and than an empty document has.
_HEAD_BYTES = 256


@dataclass(frozen=True)
class CacheContents:
    """The table of `foretune cache show`: a row per kernel and function, or per problem or key of one of them."""

    folder: Path | None
    kernels: tuple[KnownKernel, ...]
    functions: tuple[KnownFunction, ...]
    of_one: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the content as a dict for JSON."""
        return {
            "folder": None if self.folder is None else str(self.folder),
            "kernels": [one.counted() | ({"by_problem": one.listed()} if self.of_one else {}) for one in self.kernels],
            "functions": [one.counted() | ({"by_key": one.listed()} if self.of_one else {}) for one in self.functions],
        }

    def __rich__(self) -> Any:
        from rich.console import Group

        if not self.kernels and not self.functions:
            return table("Choices", ("kernel", "device"), [], below=[f"There are no choices in {self.folder}"])
        return Group(
            *([self._of_kernels()] if self.kernels else []), *([self._of_functions()] if self.functions else [])
        )

    def _of_kernels(self) -> Any:
        """Return the table with a row per kernel, or per problem of one kernel."""
        below = [f"In {self.folder}"]
        if not self.of_one:
            return _table("Choices", [one.counted() for one in self.kernels], below=below)
        rows = [{"device": one.device.name, **problem} for one in self.kernels for problem in one.listed()]
        columns = ("problem", "device", "times", "failed", "best", "best_us", "triton", "source")
        return _table(self.kernels[0].kernel, rows, columns, below=below, once=("device", "triton", "source"))

    def _of_functions(self) -> Any:
        """Return the table with a row per function, or per key of one function."""
        below = [f"In {functions_folder()}"]
        if not self.of_one:
            return _table("Functions", [one.counted() for one in self.functions], below=below)
        rows = [row for one in self.functions for row in one.listed()]
        of_kernels = ["kernel"] if any(row["kernel"] for row in rows) else []
        columns = ("key", *of_kernels, "times", "failed", "chosen", "best_us")
        return _table(self.functions[0].name, rows, columns, below=below)


@dataclass(frozen=True)
class Counted:
    """Numbers of files, problems (for functions: keys) and times that were exported, imported or cleared.

    `left` has a line for each item that was skipped: a foreign file, malformed records, or records without room.
    """

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
        """Count kernels, functions, and their problems and times.

        `what` names the action for the message, such as "Exported"; `left` lists the skipped items.
        """
        problems = [problem for kernel in kernels for problem in kernel.problems]
        times = [len(one.times_us) for one in problems] + [one.times for one in functions]
        n_problems = len(problems) + sum(len(one.entries) for one in functions)
        return cls(what, len(kernels), len(functions), n_problems, sum(times), tuple(left))

    def to_json(self) -> dict[str, Any]:
        """Return the numbers as a dict for JSON."""
        counts = {"kernels": self.kernels, "functions": self.functions}
        counts |= {"problems": self.problems, "times": self.times}
        return {**counts, "left": list(self.left)} if self.left else counts

    def __rich__(self) -> Any:
        from rich.text import Text

        files = f"{self.kernels} files of kernels and {self.functions} of functions"
        line = f"{self.what}: {self.times} times of {self.problems} problems in {files}."
        return Text("\n".join(map(printable, (line, *self.left))))


def cache_contents(kernel: str | None = None) -> CacheContents:
    """Return the cached choices of all kernels and functions, or of one.

    Args:
        kernel: The name of a kernel or function; None for all.

    Raises:
        ForetuneError: There is nothing of that name; the message lists the known names.
    """
    kernels, functions = _all(kernel)
    return CacheContents(choices_folder(), tuple(kernels), tuple(functions), of_one=kernel is not None)


def refined_contents(kernel: str | None = None) -> Refining:
    """Return the results that mode `refine` has stored for all kernels, or for one.

    Raises:
        ForetuneError: There is no kernel of that name; the message lists the known names.
    """
    return Refining(
        [
            {"kernel": one.kernel, "problem": f"{known.problem} on {one.device.name}", **row}
            for one in known_kernels(kernel)
            for known in one.problems
            for row in (known.refined.rows() if known.refined is not None else ())
        ]
    )


def clear_cache(kernel: str | None = None) -> Counted:
    """Delete the cached choices of all kernels and functions, or of one.

    Only regular files that declare a format of the cache are removed, and nothing behind a symbolic link: the result
    lists what was left.

    Args:
        kernel: The name of a kernel or function; None for all.

    Raises:
        ForetuneError: There is nothing of that name.
        OSError: A file cannot be removed.
    """
    kernels, functions = _all(kernel)
    known = [*(one.path for one in kernels), *(one.path for one in functions)]
    left: list[str] = []
    removed: set[Path] = set()
    for folder, begins in ((choices_folder(), _OUR_CHOICES), (functions_folder(), _OUR_FUNCTIONS)):
        if folder is not None:
            names = None if kernel is None else {path.name for path in known if path and path.parent == folder}
            gone, kept = _remove_own(folder, begins, names)
            removed |= gone
            left += kept
    gone_kernels = [one for one in kernels if one.path in removed]
    return Counted.of("Cleared", gone_kernels, [one for one in functions if one.path in removed], left)


def export_choices(out: Path | str, kernel: str | None = None) -> Counted:
    """Write the cached choices of all kernels and functions, or of one, to a file for `import_choices`.

    Args:
        out: The file.
        kernel: The name of a kernel or function; None for all.

    Raises:
        ForetuneError: There is nothing to export, the file cannot be written, or it exists and is not an exported file.
    """
    check_file(out)
    check_replaceable(out, lambda content: _OUR_EXPORT.match(content) is not None, "an export of the cache")
    kernels, functions = _all(kernel)
    if not kernels and not functions:
        raise ForetuneError(f"there are no choices in {choices_folder()}: there is nothing to export")
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
    """Add the choices of an exported file to the cache; return the counts of the file's records that it has afterwards.

    If both have a time or a choice, the cache's is kept. Malformed records are left out, and so is what a cache file
    has no room for, oldest first; the result says how many.

    Args:
        path: The exported file.

    Raises:
        ForetuneError: The file is not an exported one, or nothing in it is well-formed (then nothing is added); or the
            cache cannot be written.
    """
    path = check_path("the file", path)
    kernels, functions, malformed = _exported(path)
    folder = choices_folder()
    kept_kernels, kept_functions = [], []
    for one in kernels:
        file, kept = shared_file(folder, one.kernel, one.device), list[int]()
        file.update(lambda here, there=one.document, kept=kept: merge_choices(here, there, kept))  # type: ignore[misc]
        if not file.is_on_disk:
            raise ForetuneError(f"{folder}: imported choices cannot be stored there")
        kept_kernels.append(replace(one, problems=tuple(one.problems[at] for at in kept)))
    for function in functions:
        if (known := function.keep()) is None:
            raise ForetuneError(f"{functions_folder()}: imported choices cannot be stored there")
        kept_functions.append(known)
    given, counted = Counted.of("", kernels, functions), Counted.of("Imported", kept_kernels, kept_functions)
    left = [f"{malformed} malformed records are left out"] if malformed else []
    if counted.problems < given.problems:
        left.append(
            f"{given.times - counted.times} times of {given.problems - counted.problems} problems are left out: a file "
            f"of the cache has at most {MOST_BYTES >> 10} KiB"
        )
    return replace(counted, left=tuple(left))


def _exported(path: Path) -> tuple[list[KnownKernel], list[KnownFunction], int]:
    """Return the kernels and functions in an exported file, and the number of malformed records that were left out."""
    try:
        value = from_json(read_regular(path, _MOST_EXPORTED_BYTES, follow=True))
        if not isinstance(value, dict) or value.get("format") != _EXPORTED or not isinstance(value.get("files"), list):
            raise ForetuneError(f"it is not a file of format {_EXPORTED!r}")
        functions = value.get("functions", [])  # older files do not have it
        if not isinstance(functions, list):
            raise ForetuneError(f"functions must be a list but are {shown(functions)}")
        found = [_read_or_error(KnownKernel.read, one) for one in value["files"]]
        found_functions = [_read_or_error(KnownFunction.from_json, one) for one in functions]
    except OSError as error:
        raise ForetuneError(f"{abridged(str(path))}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # including ForetuneError
        raise _not_exported(path, error) from None
    left_out = [wrong for _, wrong in (*found, *found_functions)]
    errors = [wrong for wrong in left_out if isinstance(wrong, ForetuneError)]
    if errors and len(errors) == len(left_out):
        raise _not_exported(path, errors[0])
    kernels = [kernel for kernel, _ in found if kernel is not None]
    known = [function for function, _ in found_functions if function is not None]
    return kernels, known, len(errors) + sum(wrong for wrong in left_out if isinstance(wrong, int))


def _read_or_error(read: Callable[[Any], tuple[T, int]], value: Any) -> tuple[T, int] | tuple[None, ForetuneError]:
    """Call `read`; return its result and number of malformed records, or None and the error that it raises."""
    try:
        return read(value)
    except ForetuneError as error:
        return None, error


def _not_exported(path: Path, error: Exception) -> ForetuneError:
    """Return the error to raise for a file that `export_choices` did not write, with the reason `error` in its text."""
    return ForetuneError(f"{abridged(str(path))}: not exported choices: {abridged(str(error))}")


def _all(name: str | None) -> tuple[list[KnownKernel], list[KnownFunction]]:
    """Return the stored results of all kernels and functions, or of those with one name."""
    kernels, functions = known_kernels(None), known_functions()
    if name is None:
        return kernels, functions
    found = [one for one in kernels if one.kernel == name], [one for one in functions if one.name == name]
    if not any(found):
        raise unknown_name_error(name, {one.kernel for one in kernels} | {one.name for one in functions})
    return found


def _remove_own(folder: Path, begins: re.Pattern[bytes], names: Collection[str] | None) -> tuple[set[Path], list[str]]:
    """Remove the cache's files from a folder; return the removed ones, and a line for each file that was left.

    The content of the cache's files matches `begins` at its start. Only those in `names` are removed; all if None.
    """
    if names is not None and not names:
        return set(), []
    if folder.is_symlink():
        return set(), [f"{folder} is a symbolic link: nothing in it was removed"]
    try:
        at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return set(), []
    removed, left = set(), []
    try:
        for name in sorted(os.listdir(at) if names is None else names):
            if name.startswith("."):  # locks and temporary files of processes that are writing
                continue
            if (why := _why_not_ours(at, name, begins)) is not None:
                left.append(f"{folder / name} was not removed: {why}")
                continue
            with suppress(FileNotFoundError):  # another process removed it
                os.unlink(name, dir_fd=at)
            removed.add(folder / name)
    finally:
        os.close(at)
    return removed, left


def _why_not_ours(folder: int, name: str, begins: re.Pattern[bytes]) -> str | None:
    """Return why a file must not be removed; None if it is missing, or is a file of the cache.

    The content of the cache's files matches `begins` at its start. `folder` is the descriptor of the file's folder.
    """
    try:
        with os.fdopen(open_regular(name, dir_fd=folder), "rb") as file:
            head = file.read(_HEAD_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        return error.strerror or type(error).__name__
    except ForetuneError as error:
        return str(error)
    is_empty = head in (b"", b"{}") and _OUR_NAME.fullmatch(name)
    is_torn = name.endswith(".unreadable") and b'{"format":"foretune '.startswith(head)
    if begins.match(head) or is_empty or is_torn:
        return None
    return "it is not a file of the cache"


def _table(title: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = (), **more: Any) -> Any:
    """Return a table of rows with these columns, by default all; `more` is as for `console.table`."""
    columns = columns or list(rows[0])
    return table(title, columns, [[row[column] for column in columns] for row in rows], **more)
