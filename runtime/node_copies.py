"""`near_copy`: a small file on a shared file system, read once by each node of a job instead of once by each rank.

A thousand ranks that start together would all open the same file in the same second. Instead, one process of each node
copies it to a folder on the node's own disk, after a pause that differs from node to node, and the other processes of
the node read the copy. A lock in that folder decides which process copies; the system releases it if that process dies,
so that another one copies.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..datasets.files import open_regular, replacing
from .arguments import warn_once

#: The environment variable with a folder on the node's own disk for the copies, which only one job uses. It is needed
#: only if `torch.distributed` cannot tell that this is a job of several nodes.
VARIABLE = "FORETUNE_NODE_DIR"
#: The longest pause before a copy, for each other node and in total: a file server sees about 500 readers a second.
_PAUSE_S_PER_NODE, _LONGEST_PAUSE_S = 0.002, 10.0


def near_copy(path: Path, *, writes: bool = False) -> Path:
    """Return the path from which this process reads a file: `path`, or in a job of several nodes the node's copy.

    Each node makes its copy once. If the file is missing, nothing is copied, and the returned path does not exist.
    Never raises: if copying fails, the function warns once and returns `path`.

    Args:
        path: The file.
        writes: Whether this process also writes the file. Then the job's first rank gets `path` itself, so that its
            results are kept; what other ranks write to their copies is lost when the job ends.

    >>> near_copy(Path("choices.json"))  # a process of its own
    PosixPath('choices.json')
    """
    try:
        folder = _folder()
        distributed = distributed_in_use()
        rank = distributed.get_rank() if distributed is not None else _number("RANK", -1)
        if folder is None or (writes and rank == 0):
            return path
        return copied(path.absolute(), folder)
    except Exception as error:  # noqa: BLE001 - a disk or a store of any kind
        warn_once(f"this node has no copies of files ({type(error).__name__}: {error})", ": each process reads its own")
        return path


def copied(
    path: Path,
    folder: Path,
    *,
    read: Callable[[Path], bytes] = Path.read_bytes,
    sleep: Callable[[float], object] = time.sleep,
) -> Path:
    """Return the path of a file's copy in a node's folder; the first process of the node copies it, the others wait.

    If the file does not exist, neither does the returned path. `read` returns the file's content, and `sleep` waits for
    some seconds; tests replace them.

    Raises:
        OSError: The folder cannot be written to, or the file cannot be read.
        ForetuneError: The folder has a link or a pipe in place of a file.
    """
    import fcntl  # imported here, because not every system that predicts has it

    copies = folder / hashlib.sha256(os.fsencode(path.parent)).hexdigest()[:16]
    copy, was_read = copies / path.name, copies / f".{path.name}.read"
    if not was_read.exists():
        copies.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(open_regular(copies / f".{path.name}.lock", os.O_WRONLY | os.O_CREAT), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed
            if not was_read.exists():
                sleep(_pause_s())
                try:
                    content = read(path)
                except FileNotFoundError:
                    pass  # the other processes then need not look for it
                else:
                    with replacing(copy, is_cache=True) as temporary:
                        temporary.write_bytes(content)
                os.close(open_regular(was_read, os.O_WRONLY | os.O_CREAT))
    return copy


def _pause_s() -> float:
    """Return a random pause in seconds, at most the time that the file server needs to serve all nodes in turn.

    It comes from the system's generator, so that a seed the user set cannot synchronize the nodes.
    """
    return min(_PAUSE_S_PER_NODE * (_nodes() - 1), _LONGEST_PAUSE_S) * int.from_bytes(os.urandom(4), "big") / 2**32


def _folder() -> Path | None:
    """Return the folder for this node's copies; None for a job of a single process or node, which needs no copies."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    distributed = distributed_in_use()
    return _own_folder(_job(distributed)) if distributed is not None and _nodes() > 1 else None


def _nodes() -> int:
    """Return the number of nodes of the job: its ranks divided by LOCAL_WORLD_SIZE (1 if it is not set)."""
    distributed = distributed_in_use()
    ranks = distributed.get_world_size() if distributed is not None else _number("WORLD_SIZE", 1)
    return -(-ranks // max(_number("LOCAL_WORLD_SIZE", 1), 1))


def _number(variable: str, default: int) -> int:
    """Return an environment variable as an integer, or the default."""
    try:
        return int(os.environ[variable])
    except (KeyError, ValueError):
        return default


def _job(distributed: Any) -> str:
    """Return a random name that all ranks of this job get; they share it through `torch.distributed`'s store."""
    store = distributed.PrefixStore("foretune", distributed.group.WORLD.get_group_store())
    return str(store.compare_set("job", "", os.urandom(8).hex()).decode())


@lru_cache
def _own_folder(job: str) -> Path:
    """Return the job's folder in the user's private folder below the system's temporary folder.

    The process that creates it removes it at exit. Raises `PermissionError` if others can access the private folder.
    """
    mine = Path(tempfile.gettempdir()) / f"foretune-{os.getuid()}"
    mine.mkdir(mode=0o700, exist_ok=True)
    if mine.is_symlink() or mine.stat().st_uid != os.getuid() or mine.stat().st_mode & 0o077:
        raise PermissionError(f"{mine} must be a folder that only this user can access")
    folder = mine / job
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        return folder
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def distributed_in_use() -> Any:
    """Return the module `torch.distributed` if a process group is initialized, else None. Imports nothing."""
    distributed = sys.modules.get("torch.distributed")
    return distributed if distributed and distributed.is_available() and distributed.is_initialized() else None
