"""One collection at a time uses a dataset's folder, one writer at a time its files, and a kill releases both."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from foretune.datasets import ForetuneError, ForetuneWarning, locks
from foretune.datasets.locks import TAKEN, WRITING, check_free, taken, writing
from foretune.datasets.store import continued, read, seal_dataset, upgrade_dataset
from writers import append

# Locks a folder, and starts a child process that lives until the pipe is closed.
HOLDS = """
import subprocess, sys
from pathlib import Path
from foretune.datasets.locks import taken
with taken(Path(sys.argv[1])):
    own = subprocess.Popen(["cat"])
    print("taken", flush=True)
    own.wait()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", HOLDS, tmp_path], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "taken\n"
        yield process
        process.kill()


def test_who_comes_second_is_told_who_has_the_folder(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    who = rf"process {holder.pid} on {re.escape(platform.node())}"
    said = rf"^{tmp_path} is being written by {who}, since 20\d\d-\d\d-\d\d "
    for _ in range(2):  # checking does not release it
        with (
            pytest.raises(ForetuneError, match=said + r"\d\d:\d\d:\d\d UTC: wait until it ends, or choose another"),
            taken(tmp_path),
        ):
            pass
        with pytest.raises(ForetuneError, match=said):
            check_free(tmp_path)
    holder.communicate()  # it ends
    check_free(tmp_path)
    with taken(tmp_path):
        assert (tmp_path / TAKEN).read_text().startswith(f"process {os.getpid()} on ")
    assert not list(tmp_path.iterdir())


def test_a_kill_frees_the_folder_whatever_the_dead_one_started(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.wait()  # its child lives on
    assert (tmp_path / TAKEN).read_text().startswith(f"process {holder.pid} on ")
    check_free(tmp_path)
    with taken(tmp_path), pytest.raises(ForetuneError, match=f"process {os.getpid()} on"), taken(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_a_lock_that_was_removed_while_it_was_waited_for_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A holder ends after a second process opened the lock file and before it locks it, and a third process comes."""
    opened: list[int] = []

    def lock(file: object, how: int) -> None:
        if not opened:
            (tmp_path / TAKEN).unlink()
        opened.append(how)
        flock(file, how)  # type: ignore[arg-type]

    flock = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", lock)
    with taken(tmp_path):
        assert len(opened) == 2
        with pytest.raises(ForetuneError, match="is being written by"), taken(tmp_path):
            pass


def test_only_one_at_a_time_writes(tmp_path: Path) -> None:
    path = tmp_path / "count"
    path.write_text("0")

    def count() -> None:
        for _ in range(25):
            with writing(tmp_path):
                path.write_text(str(int(path.read_text()) + 1))

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_text() == "200"
    assert [one.name for one in tmp_path.iterdir()] == ["count"]


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_that_cannot_lock_is_told_and_all_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def refuse(file: object, how: int) -> None:
        raise OSError(error, os.strerror(error))

    reason = os.strerror(error)
    said = rf"^{tmp_path / 'mine'}: its file system does not support locks \({reason}\). Make sure that no other"
    append(tmp_path / "mine", "mine")
    half_written = tmp_path / "mine" / f".x.{'0a' * 8}.tmp"
    half_written.write_text("")
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.warns(ForetuneWarning, match=said), continued(tmp_path / "mine"):
        append(tmp_path / "mine", "another")
    assert len(read(tmp_path / "mine").devices) == 2
    assert half_written.exists()  # it may belong to a running process


def test_locks_are_no_part_of_a_dataset(tmp_path: Path) -> None:
    folder = append(tmp_path / "mine", "mine")
    before = read(folder)
    for name in (TAKEN, WRITING):
        (folder / name).write_text("process 1 on a host that is gone, since long ago")
    after = read(folder)
    assert (after.ignored, len(after.measurements)) == ((), len(before.measurements))
    with continued(folder):
        append(folder, "another")
    assert {path.name for path in folder.iterdir()} == {"dataset.json", "parts", "drift"}


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: seal_dataset(folder, folder.with_name("sealed"), name="sealed"),
        lambda folder: seal_dataset(append(folder.with_name("other"), "mine"), folder, name="sealed"),
        upgrade_dataset,
    ],
    ids=["sealing it", "sealing into it", "upgrading it"],
)
def test_what_a_collection_writes_is_neither_sealed_nor_upgraded(
    tmp_path: Path, change: Callable[[Path], object]
) -> None:
    folder = tmp_path / "mine"
    seal_dataset(append(tmp_path / "parts", "mine"), folder, name="mine")
    before = json.loads((folder / "dataset.json").read_text())
    with taken(folder), pytest.raises(ForetuneError, match=f"mine is being written by process {os.getpid()} on "):
        change(folder)
    assert json.loads((folder / "dataset.json").read_text()) == before
    assert not (tmp_path / "sealed").exists()
    change(folder)


def test_a_full_disk_is_told_with_the_locks_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(locks.platform, "node", full)  # as if writing it had failed
    with pytest.raises(OSError, match="No space left") as caught, taken(tmp_path):
        pass
    assert caught.value.filename == str(tmp_path / TAKEN)


def in_a_fork(does: Callable[[], object]) -> int:
    """Fork a process that exits with 0 if the call returns, and is killed by a signal if it blocks; return its id."""
    if child := os.fork():
        return child
    signal.alarm(30)
    try:
        does()
        os._exit(0)
    finally:
        os._exit(1)


def exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@contextmanager
def held_by_a_thread(folder: Path) -> Iterator[Callable[[], None]]:
    """Hold the writers' lock in another thread, and return a function that releases it."""
    is_held, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with writing(folder):
            is_held.set()
            may_end.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait()

    def let_go() -> None:
        may_end.set()
        thread.join()

    try:
        yield let_go
    finally:
        let_go()


def tell_before_waiting(monkeypatch: pytest.MonkeyPatch, tell: Callable[[], object]) -> None:
    def lock(file: object, how: int) -> None:
        if how == fcntl.LOCK_EX:
            tell()
        flock(file, how)  # type: ignore[arg-type]

    flock = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", lock)


def test_a_forked_process_does_not_wait_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a lock file open that a thread of its parent held when it was forked."""
    waits, told = os.pipe()
    with held_by_a_thread(tmp_path) as let_go:
        tell_before_waiting(monkeypatch, lambda: os.write(told, b"x"))

        def write() -> None:
            with writing(tmp_path):
                pass

        child = in_a_fork(write)
        os.read(waits, 1)  # it has opened the file
        let_go()
        assert exit_code(child) == 0


def test_a_forked_process_that_lives_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lives, ends = os.pipe()
    is_waiting, has_it = threading.Event(), threading.Event()
    with held_by_a_thread(tmp_path) as let_go:
        child = in_a_fork(lambda: (os.close(ends), os.read(lives, 1)))
        tell_before_waiting(monkeypatch, is_waiting.set)

        def write() -> None:
            with writing(tmp_path):
                has_it.set()

        waiting = threading.Thread(target=write, daemon=True)
        waiting.start()
        is_waiting.wait()
        let_go()
        try:
            assert has_it.wait(30)
        finally:
            os.close(ends)
            assert exit_code(child) == 0
            os.close(lives)


def test_a_forked_process_does_not_end_what_its_parent_holds(tmp_path: Path) -> None:
    with ExitStack() as stack:
        stack.enter_context(taken(tmp_path))
        assert exit_code(in_a_fork(stack.close)) == 0  # leaves the block
        assert (tmp_path / TAKEN).exists()
        with pytest.raises(ForetuneError, match="is being written by"):
            check_free(tmp_path)
    assert not list(tmp_path.iterdir())


LOCKS: dict[str, Callable[[Path], object]] = {
    TAKEN: lambda folder: taken(folder),
    WRITING: lambda folder: writing(folder),
    ".a.lock": lambda folder: locks.locked(folder / ".a.lock", 0.0),
}


@pytest.mark.parametrize("name", LOCKS)
@pytest.mark.parametrize("what", ["link", "link to nothing", "pipe", "folder", "file"])
def test_what_is_no_lock_file_is_neither_followed_nor_removed(name: str, what: str, tmp_path: Path) -> None:
    path, outside = tmp_path / name, tmp_path / "outside"
    outside.write_text("")
    {
        "link": lambda: path.symlink_to(outside),
        "link to nothing": lambda: path.symlink_to(tmp_path / "nothing"),
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
        "file": lambda: path.write_text("a list of what I am collecting"),
    }[what]()

    def state() -> tuple[int, ...]:
        now = path.lstat()
        return now.st_ino, now.st_mode, now.st_nlink, now.st_size, now.st_mtime_ns  # reading it changes st_atime

    before = state()
    with pytest.raises(OSError, match="is") as caught, LOCKS[name](tmp_path):  # type: ignore[attr-defined]
        pass
    assert caught.value.filename == str(path)
    assert state() == before
    assert {one.name for one in tmp_path.iterdir()} == {name, "outside"}
    if name == TAKEN and what != "folder":
        check_free(tmp_path)  # the folder is not locked
