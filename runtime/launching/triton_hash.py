"""The hash of Triton's installation, which every key of a cached binary begins with.

Triton makes it once a process, before it compiles or finds its first binary: it reads 500 MB, which takes 0.3-0.5 s of
one core. Here a thread does that while the rest is imported, and the next process finds the hash in a small file of
Triton's own cache folder, beside a fingerprint of the files that are hashed (where, how long, when changed: what `make`
goes by, and more). Where any of them differs, the file says nothing, and Triton hashes again.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from ...datasets.disk.atomic import replacing
from ...datasets.disk.regular import read_regular
from .ahead import compile_ahead_of, wait_for

_JOB = "Triton's own hash"
#: In the folder that Triton caches binaries in.
_FILE = "foretune-triton-key.json"
_MOST_BYTES = 1 << 16
#: What `triton.runtime.cache.triton_key` reads of the package, and perhaps more.
_HASHED = ("compiler", "backends", "language", "runtime/cache.py", "_C")
#: Seconds after which a thread with Python's lock hands it on. The hashing thread asks for the lock twice a MiB: of
#: Python's 5 ms each it would get nowhere while another thread imports.
_HAND_ON_S = 1e-4
#: What the file said, until Triton is told.
_known: list[str] = []


def hash_triton_ahead() -> None:
    """Begins, in a thread, what the first compile of a process starts with."""
    compile_ahead_of(_JOB, _hash)


def wait_for_the_hash() -> None:
    """Returns when Triton's hash is known, if that was begun: who does not wait would hash as well."""
    wait_for(_JOB)
    for key in _known:
        _tell_triton(key)
    _known.clear()  # not before it is told: another thread may be here


def _tell_triton(key: str) -> None:
    from triton.runtime import cache

    cache.triton_key = lru_cache(lambda: key)


def _hash() -> None:
    from triton.runtime import cache

    path, fingerprint = _file(), _fingerprint()
    key = _read(path, fingerprint)
    if key is not None:
        _known.append(key)
        return
    usual = sys.getswitchinterval()
    sys.setswitchinterval(min(usual, _HAND_ON_S))
    try:
        key = cache.triton_key()
    finally:
        sys.setswitchinterval(usual)
    if fingerprint == _fingerprint():  # nobody installs another one meanwhile
        _write(path, fingerprint, key)


def _file() -> Path:
    from triton import knobs

    return Path(knobs.cache.dir) / _FILE


def _fingerprint() -> str:
    """Changes with every file that Triton hashes."""
    import triton

    root = os.path.dirname(os.path.abspath(triton.__file__))
    facts = [triton.__version__]
    for path in sorted(path for part in _HASHED for path in _files(os.path.join(root, part))):
        of = os.stat(path)
        facts.append(f"{path} {of.st_ino} {of.st_size} {of.st_mtime_ns} {of.st_ctime_ns}")
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def _files(path: str) -> Iterator[str]:
    """What Python imports of a folder, or the file itself."""
    if os.path.isfile(path):
        yield path
    for folder, _, names in os.walk(path):
        yield from (os.path.join(folder, name) for name in names if name.endswith((".py", ".so", ".pyd")))


def _read(path: Path, fingerprint: str) -> str | None:
    try:
        said = json.loads(read_regular(path, _MOST_BYTES))
        key = said["key"] if said["fingerprint"] == fingerprint else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # not there, or not ours
        return None
    return key if isinstance(key, str) and key else None


def _write(path: Path, fingerprint: str, key: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, is_cache=True) as temporary:
            temporary.write_text(json.dumps({"fingerprint": fingerprint, "key": key}))
    except OSError:
        pass  # the next process hashes as well
