"""`near_copy`: a small file on a shared file system, read once by each node of a job rather than once by each rank.

A thousand ranks that start together would all open the same file in the same second. So one process of each node reads
it, after a pause that differs from node to node, into a folder on the node's own disk, and the others of the node take
that copy. Who reads is settled by a lock in that folder, which the system lets go of when a process dies: then the next
one reads.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import secrets
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

#: Names a folder on the node's own disk, of one job alone, for the copies. Needed only where `torch.distributed` cannot
#: tell that this is a job of several nodes.
VARIABLE = "FORETUNE_NODE_DIR"
#: So that a file server has about 500 readers a second, whatever their number, up to this many seconds.
_PAUSE_S_PER_NODE, _LONGEST_PAUSE_S = 0.002, 10.0


def near_copy(path: Path, *, writes: bool = False) -> Path:
    """Return where this process reads a file: `path` itself, or in a job of several nodes its node's copy.

    The copy is made once; of a file that is missing, the copy is missing, too. Never raises: where no copy can be
    made, it warns, once, and returns `path`.

    Args:
        path: The file.
        writes: Whether it is updated: then the job's first rank has the file itself, so that what it finds out is kept.
            What the others write to their copies ends with the job.

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
    """Return the copy of a file in a node's folder, made unless another process or thread of the node has made it.

    Raises:
        OSError: The folder cannot be written to, or the file cannot be read.
        ForetuneError: A link or a pipe lies in the folder.
    """
    import fcntl  # here, because predictions are also made where there is none

    copies = folder / hashlib.sha256(os.fsencode(path.parent)).hexdigest()[:16]
    copy, was_read = copies / path.name, copies / f".{path.name}.read"
    if not was_read.exists():
        copies.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(open_regular(copies / f".{path.name}.lock", os.O_WRONLY | os.O_CREAT), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
            if not was_read.exists():
                sleep(_pause_s())
                try:
                    content = read(path)
                except FileNotFoundError:
                    pass  # which the others need not find out for themselves
                else:
                    with replacing(copy, is_cache=True) as temporary:
                        temporary.write_bytes(content)
                os.close(open_regular(was_read, os.O_WRONLY | os.O_CREAT))
    return copy


def _pause_s() -> float:
    """Return a random pause, of up to the time that the file server takes for all nodes.

    Uses `secrets`, so that a seed the user set cannot synchronize the nodes.
    """
    return min(_PAUSE_S_PER_NODE * (_nodes() - 1), _LONGEST_PAUSE_S) * secrets.randbelow(1000) / 1000


def _folder() -> Path | None:
    """Where this node has its copies; None for a process or a node of its own."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    distributed = distributed_in_use()
    return _own_folder(_job(distributed)) if distributed is not None and _nodes() > 1 else None


def _nodes() -> int:
    """How many nodes the job has, where torchrun or its like says how many ranks share one; else each rank is one."""
    distributed = distributed_in_use()
    ranks = distributed.get_world_size() if distributed is not None else _number("WORLD_SIZE", 1)
    return -(-ranks // max(_number("LOCAL_WORLD_SIZE", 1), 1))


def _number(variable: str, default: int) -> int:
    try:
        return int(os.environ[variable])
    except (KeyError, ValueError):
        return default


def _job(distributed: Any) -> str:
    """A name that this job alone has, the same in each of its ranks."""
    store = distributed.PrefixStore("foretune", distributed.group.WORLD.get_group_store())
    return str(store.compare_set("job", "", secrets.token_hex(8)).decode())


@lru_cache
def _own_folder(job: str) -> Path:
    """Return the job's folder among the node's temporary files; the process that makes it removes it at its end."""
    mine = Path(tempfile.gettempdir()) / f"foretune-{os.getuid()}"
    mine.mkdir(mode=0o700, exist_ok=True)
    if mine.is_symlink() or mine.stat().st_uid != os.getuid() or mine.stat().st_mode & 0o077:
        raise PermissionError(f"{mine} is not this user's alone")
    folder = mine / job
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        return folder
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def distributed_in_use() -> Any:
    """`torch.distributed` where a process group was made, else None. Imports nothing: without torch there is none."""
    distributed = sys.modules.get("torch.distributed")
    return distributed if distributed and distributed.is_available() and distributed.is_initialized() else None
