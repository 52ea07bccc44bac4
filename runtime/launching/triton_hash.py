"""The hash of Triton's installation, with which every key of a cached binary begins.

Triton computes it once in each process, before it compiles or finds its first binary: it reads 500 MB, which takes
0.3-0.5 s of one core. Here a thread does that during imports, and writes the hash to a small file in Triton's cache
folder, where the next process finds it. The file also has a fingerprint of the hashed files (paths, inodes, sizes and
times of change). If the fingerprint differs, Triton hashes again.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from ...datasets.files import read_regular, replacing
from .ahead import compile_ahead_of, wait_for

#: The key of the job that hashes.
_JOB = "Triton's own hash"
#: The name of the file, in the folder where Triton caches binaries.
_FILE = "foretune-triton-key.json"
#: The most bytes of the file that are read.
_MOST_BYTES = 1 << 16
#: The parts of the package that `triton.runtime.cache.triton_key` reads, and perhaps more.
_HASHED = ("compiler", "backends", "language", "runtime/cache.py", "_C")
#: Python's switch interval while the thread hashes, in seconds. The thread requests Python's lock twice for each MiB;
#: with the default interval of 5 ms it would make no progress while another thread imports.
_SWITCH_S = 1e-4
#: The hash that was read from the file, until it is given to Triton.
_known: list[str] = []


def hash_triton_ahead() -> None:
    """Start to compute the hash of Triton's installation, which its cache keys contain, in a thread."""
    compile_ahead_of(_JOB, _hash)


def wait_for_the_hash() -> None:
    """Wait for the hash that `hash_triton_ahead` computes, if it was called, and pass it to Triton.

    A compile that does not wait would compute the hash a second time.
    """
    wait_for(_JOB)
    for key in _known:
        _give_to_triton(key)
    _known.clear()  # afterwards, because another thread may be in this function


@lru_cache
def hash_triton() -> None:
    """Set Triton's hash of its own installation, once in a process: read from a file, or computed and written to it."""
    hash_triton_ahead()
    wait_for_the_hash()


def _give_to_triton(key: str) -> None:
    """Make Triton use `key` as the hash of its installation."""
    from triton.runtime import cache

    cache.triton_key = lru_cache(lambda: key)


def _hash() -> None:
    """Read Triton's hash from its file, or let Triton compute it and write the file."""
    from triton.runtime import cache

    path, fingerprint = _file(), _fingerprint()
    key = _read(path, fingerprint)
    if key is not None:
        _known.append(key)
        return
    usual = sys.getswitchinterval()
    sys.setswitchinterval(min(usual, _SWITCH_S))
    try:
        key = cache.triton_key()
    finally:
        sys.setswitchinterval(usual)
    if fingerprint == _fingerprint():  # else Triton was replaced meanwhile
        _write(path, fingerprint, key)


def _file() -> Path:
    """Return the path of the file in Triton's cache folder that keeps the hash."""
    from triton import knobs

    return Path(knobs.cache.dir) / _FILE


def _fingerprint() -> str:
    """Return a hash of the paths, inodes, sizes and times of change of all files that Triton hashes."""
    import triton

    root = os.path.dirname(os.path.abspath(triton.__file__))
    facts = [triton.__version__]
    for path in sorted(path for part in _HASHED for path in _files(os.path.join(root, part))):
        stat = os.stat(path)
        facts.append(f"{path} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}")
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def _files(path: str) -> Iterator[str]:
    """Yield the paths of the Python modules below a folder, or the path itself if it is a file."""
    if os.path.isfile(path):
        yield path
    for folder, _, names in os.walk(path):
        yield from (os.path.join(folder, name) for name in names if name.endswith((".py", ".so", ".pyd")))


def _read(path: Path, fingerprint: str) -> str | None:
    """Return Triton's hash from its file; None if the file is missing, damaged or has another fingerprint."""
    try:
        content = json.loads(read_regular(path, _MOST_BYTES))
        key = content["key"] if content["fingerprint"] == fingerprint else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # missing or damaged
        return None
    return key if isinstance(key, str) and key else None


def _write(path: Path, fingerprint: str, key: str) -> None:
    """Write Triton's hash (`key`) and the fingerprint to the file; ignore errors of the disk."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, is_cache=True) as temporary:
            temporary.write_text(json.dumps({"fingerprint": fingerprint, "key": key}))
    except OSError:
        pass  # the next process then computes the hash again
