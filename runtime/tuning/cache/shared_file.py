"""`SharedFile`: share a small JSON document on disk between processes; errors of the disk never stop a process."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any, TypeAlias

from ....datasets.errors import abridged
from ....datasets.files import read_regular, remove_leftovers, replacing
from ....datasets.forking import renew_in_children
from ....datasets.locks import locked
from ...arguments import warn_once

Document: TypeAlias = dict[str, Any]

#: The maximum size of a file. It is read and written as a whole: half a MiB takes some 30 ms for both together.
MOST_BYTES = 1 << 19
#: Seconds to wait for the lock. An update takes milliseconds: after this time, the process that holds the lock must
#: have been stopped.
_WAIT_S = 5.0
#: The text of a document that does not exist yet.
_EMPTY = b"{}"
_IN_MEMORY = ": results are kept in this process only"


class SharedFile:
    """A JSON object in a file that many threads, processes and machines read and update without losing updates.

    It never raises errors of the disk or of the file's content. If the file cannot be written or locked, the
    document is kept in this process's memory. A truncated or foreign file is moved to `NAME.unreadable` (replacing an
    earlier one), and a new one is started. Each of these is one `ForetuneWarning`. Only the file's owner can access it
    (0600, in folders created as 0700), and each write replaces it atomically.

    Args:
        path: The file; None to use memory only.
        check: Removes malformed records from a document and returns their number, if any; raises if the object is not a
            valid document.
        forget: Drops the oldest records of a document that is too large; returns False if nothing can be dropped. Then
            the update is discarded with a warning.
        most_bytes: The maximum size of the file.

    Attributes:
        is_on_disk: Whether other processes see what is written here.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "counts.json"
    >>> mine, theirs = (SharedFile(path, check=lambda counts: None, forget=lambda counts: False) for _ in range(2))
    >>> mine.update(lambda counts: counts.update(a=1))
    >>> theirs.update(lambda counts: counts.update(b=2))
    >>> mine.read()
    {'a': 1, 'b': 2}
    """

    def __init__(
        self,
        path: Path | None,
        *,
        check: Callable[[Document], int | None],
        forget: Callable[[Document], bool],
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self.path, self.most_bytes = path, most_bytes
        self._check, self._forget = check, forget
        self._hold(_EMPTY, {})
        self.is_on_disk, self._tidied = path is not None, False
        renew_in_children(self)

    def renew(self) -> None:
        """Create a new lock, at construction and in forked processes (see `renew_in_children`)."""
        self._guard = Lock()

    def read(self) -> Document:
        """Return the current document, {} if there is none. Callers must not modify it; use `update`."""
        with self._guard:
            if self.is_on_disk:
                try:
                    self._load()
                except OSError as error:
                    self._leave_the_disk(error)
                except Exception as error:  # noqa: BLE001 - any content; the next update moves it aside
                    self._begin_anew(error)
            return self._document

    def update(self, change: Callable[[Document], object]) -> None:
        """Have `change` modify the current document in place, and write it before returning."""
        with self._guard:
            is_changed = False
            if self.is_on_disk and self.path is not None:
                try:
                    make_private_folder(self.path.parent)
                    with locked(self.path.with_name(f".{self.path.name}.lock"), _WAIT_S):
                        self._take_over()
                        self._apply(change)
                        is_changed = True
                        with replacing(self.path, is_cache=True) as temporary:
                            temporary.write_bytes(self._text)
                except OSError as error:
                    self._leave_the_disk(error)
            if not is_changed:
                self._apply(change)

    def _apply(self, change: Callable[[Document], object]) -> None:
        """Apply `change` to a copy of the document, and replace the document by it.

        So readers in other threads see the old document or the new one, and a `change` that raises alters nothing.
        """
        document: Document = json.loads(self._text)
        change(document)
        text = _as_json(document)
        while len(text) > self.most_bytes:
            if not self._forget(document):  # a larger file would not be read again
                warn_once(
                    f"{self.path or 'memory'}: a new value does not fit into {self.most_bytes} bytes",
                    ": it is not stored",
                )
                return
            text = _as_json(document)
        self._hold(text, document)

    def _hold(self, text: bytes, document: Document, on_disk: bytes | None = None) -> None:
        """Keep a document in memory, with its text, and the file's bytes (`on_disk`) if these are not the text."""
        self._text, self._document, self._bytes = text, document, text if on_disk is None else on_disk

    def _take_over(self) -> None:
        """Load the current file under the lock, or move it aside if it cannot be read."""
        assert self.path is not None
        if not self._tidied:
            remove_leftovers(self.path.parent, of=f"{self.path.name}.")
            self._tidied = True
        try:
            self._load()
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001 - as in read
            self.path.replace(self.path.with_name(f"{self.path.name}.unreadable"))
            self._begin_anew(error)

    def _load(self) -> None:
        """Load the file if it changed; raise `OSError` for the disk, other exceptions for an invalid document."""
        assert self.path is not None
        try:
            text = read_regular(self.path, self.most_bytes)
        except FileNotFoundError:
            text = _EMPTY
        if text != self._bytes:
            document = from_json(text)
            if not isinstance(document, dict):
                raise ValueError(f"it must be a JSON object but is {type(document).__name__}")
            left_out = self._check(document) if text != _EMPTY else 0
            if left_out:
                warn_once(f"{self.path}: {left_out} malformed records", " are left out")
            self._hold(_as_json(document) if left_out else text, document, text)

    def _leave_the_disk(self, error: OSError) -> None:
        """Keep the document in memory only from now on, and warn once with the reason `error`."""
        self.is_on_disk = False
        # One warning per folder: a full disk is one problem, however many kernels there are.
        folder = "" if self.path is None else abridged(str(self.path.parent))
        warn_once(f"{folder}: {error.strerror or error}", _IN_MEMORY)

    def _begin_anew(self, error: Exception) -> None:
        """Start with an empty document, and warn once that the file is replaced, with the reason `error`."""
        self._hold(_EMPTY, {})
        why = abridged(f"{error}" or type(error).__name__, 200)
        warn_once(f"{self.path} cannot be read and is replaced by a new file", f" ({why})")


def make_private_folder(folder: Path) -> None:
    """Create a folder and its missing parents with access for their owner only."""
    if not folder.is_dir():
        make_private_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def from_json(text: bytes) -> Any:
    """Return the value of a JSON text.

    An integer with more digits than Python reads becomes NaN, which is not valid in any record.

    Raises:
        ValueError: The text is not JSON.
        RecursionError: It is nested too deeply.
    """
    try:
        return json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError:
        return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < 1000 else math.nan)


def size_of(value: Any) -> int:
    """Return the number of bytes that a value takes in a file as JSON."""
    return len(_as_json(value))


def _as_json(document: Document) -> bytes:
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
