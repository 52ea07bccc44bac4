"""`SharedFile`: a small JSON document on the disk that many processes update, and that never stops one of them."""

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

#: A file is read as a whole and written as a whole: of half a MiB both together take some 30 ms.
MOST_BYTES = 1 << 19
#: An update takes milliseconds: after so long, a process was stopped while it held the lock.
_WAIT_S = 5.0
#: What stands in the place of a document that is not there.
_EMPTY = b"{}"
_IN_MEMORY = ": what is found out is remembered in this process alone"


class SharedFile:
    """A JSON object in a file that many threads, processes and machines read and update: none loses what another wrote.

    It never raises for the disk, or for what lies there. Where nothing can be written or locked, the document lives on
    in this process's memory; a file that is truncated or foreign is moved aside (the last one stays, as
    `NAME.unreadable`) and begun anew. Each is one `ForetuneWarning`. The file is its owner's alone (0600, in folders
    that are made as 0700) and is replaced as a whole.

    Args:
        path: The file; None for memory alone.
        check: Removes malformed records from a document and returns their number, if any; raises for an object that is
            no such document.
        forget: Drops what is oldest in a document; returns False where there is nothing to drop: then the update is
            left out, with a warning.
        most_bytes: How large the file may be.

    Attributes:
        is_on_disk: Whether another process will find what is written here.

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
        """See `renew_in_children`."""
        self._guard = Lock()

    def read(self) -> Document:
        """Return the document as it is now, {} where there is none. Only `update` may change it."""
        with self._guard:
            if self.is_on_disk:
                try:
                    self._load()
                except OSError as error:
                    self._leave_the_disk(error)
                except Exception as error:  # noqa: BLE001 - whatever lies there; the next update moves it aside
                    self._begin_anew(error)
            return self._document

    def update(self, change: Callable[[Document], object]) -> None:
        """Have `change` alter the document, as it is now, in place; it is on the disk when this returns."""
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
        """Change a copy, so that a reader meanwhile, and a change that fails, meet a whole document."""
        document: Document = json.loads(self._text)
        change(document)
        text = _as_json(document)
        while len(text) > self.most_bytes:
            if not self._forget(document):  # a file that is too large could not be read again
                warn_once(
                    f"{self.path or 'memory'}: {self.most_bytes} bytes do not hold a new value", ": it is not kept"
                )
                return
            text = _as_json(document)
        self._hold(text, document)

    def _hold(self, text: bytes, document: Document, on_disk: bytes | None = None) -> None:
        """Keep a document, its text, and the bytes that the file has for it where those are others."""
        self._text, self._document, self._bytes = text, document, text if on_disk is None else on_disk

    def _take_over(self) -> None:
        """Load what lies there now; move aside what cannot be read. Others wait for the lock meanwhile."""
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
        """Raise `OSError` for trouble with the disk, and anything else for what is no such document."""
        assert self.path is not None
        try:
            text = read_regular(self.path, self.most_bytes)
        except FileNotFoundError:
            text = _EMPTY
        if text != self._bytes:
            document = from_json(text)
            if not isinstance(document, dict):
                raise ValueError(f"it is no object but {type(document).__name__}")
            left_out = self._check(document) if text != _EMPTY else 0
            if left_out:
                warn_once(f"{self.path}: {left_out} malformed records", " are left out")
            self._hold(_as_json(document) if left_out else text, document, text)

    def _leave_the_disk(self, error: OSError) -> None:
        self.is_on_disk = False
        # By folder: a disk that is full is one matter, however many kernels there are.
        folder = "" if self.path is None else abridged(str(self.path.parent))
        warn_once(f"{folder}: {error.strerror or error}", _IN_MEMORY)

    def _begin_anew(self, error: Exception) -> None:
        self._hold(_EMPTY, {})
        why = abridged(f"{error}" or type(error).__name__, 200)
        warn_once(f"{self.path} cannot be read as it is and is begun anew", f" ({why})")


def make_private_folder(folder: Path) -> None:
    """Make a folder and its missing parents, for their owner alone."""
    if not folder.is_dir():
        make_private_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def from_json(text: bytes) -> Any:
    """Return the value of a JSON text; an integer of more digits than Python reads becomes NaN, which no record has.

    Raises:
        ValueError: It is no JSON.
        RecursionError: It is nested too deeply.
    """
    try:
        return json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError:
        return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < 1000 else math.nan)


def size_of(value: Any) -> int:
    """Return how many bytes a value takes in a file."""
    return len(_as_json(value))


def _as_json(document: Document) -> bytes:
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
