"""A document that many processes update loses nothing, whoever is killed, and no disk ever stops its user."""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing
import os
import stat
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from foretune.datasets import files as atomic
from foretune.datasets import locks
from foretune.runtime import arguments
from foretune.runtime.tuning.cache import shared_file
from foretune.runtime.tuning.cache.shared_file import SharedFile


def check_counts(counts: dict[str, Any]) -> None:
    if not all(isinstance(count, int) for count in counts.values()):
        raise ValueError("a count must be a number")


def forget_first(counts: dict[str, Any]) -> bool:
    if counts:
        del counts[next(iter(counts))]
    return bool(counts)


def counts_in(path: Path | None, most_bytes: int = 1000) -> SharedFile:
    return SharedFile(path, check=check_counts, forget=forget_first, most_bytes=most_bytes)


def add(file: SharedFile, name: str) -> None:
    file.update(lambda counts: counts.update({name: counts.get(name, 0) + 1}))


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """The warnings of a block."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found: list[str] = []
        yield found
    found += [str(one.message) for one in caught]


def test_two_see_what_each_other_wrote(tmp_path: Path) -> None:
    mine, theirs = counts_in(tmp_path / "a.json"), counts_in(tmp_path / "a.json")
    assert mine.read() == {}
    add(mine, "x")
    add(theirs, "y")
    add(mine, "x")
    assert mine.read() == theirs.read() == {"x": 2, "y": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_32_processes_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    fork = multiprocessing.get_context("fork")
    ready = fork.Barrier(32)

    def count(name: str) -> None:
        file = counts_in(path)
        ready.wait()
        for _ in range(4):
            add(file, name)
        os._exit(0 if file.is_on_disk else 1)

    writers = [fork.Process(target=count, args=(f"p{number}",)) for number in range(32)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * 32
    assert json.loads(path.read_text()) == {f"p{number}": 4 for number in range(32)}


def test_threads_at_once_lose_nothing(tmp_path: Path) -> None:
    file = counts_in(tmp_path / "a.json")
    threads = [threading.Thread(target=lambda: [add(file, "x") for _ in range(20)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert file.read() == {"x": 160}


def test_only_the_owner_may_look(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        file = counts_in(tmp_path / "deep" / "er" / "a.json")
        add(file, "x")
        assert stat.S_IMODE((tmp_path / "deep").stat().st_mode) == 0o700
        assert stat.S_IMODE((tmp_path / "deep" / "er").stat().st_mode) == 0o700
        assert file.path is not None
        file.path.chmod(0o666)  # whoever did that: it ends with the next update
        add(file, "x")
        assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    finally:
        os.umask(old)


def test_a_file_that_was_cut_off_anywhere_is_moved_aside_and_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    add(counts_in(path), "x")
    whole = path.read_bytes()
    for length in range(len(whole)):
        arguments._warned.clear()
        path.write_bytes(whole[:length])
        file = counts_in(path)
        with heard() as caught:
            assert file.read() == {}
            add(file, "y")
            add(file, "y")
        assert file.read() == {"y": 2}
        assert file.is_on_disk
        assert json.loads(path.read_text()) == {"y": 2}
        assert len(caught) == 1
        assert caught[0].startswith(f"{path} cannot be read and is replaced by a new file (")
        assert (tmp_path / "a.json.unreadable").read_bytes() == whole[:length]


HOSTILE = {
    "deep": b"[" * 200_000,
    "deep objects": b'{"a":' * 50_000,
    "a huge number": b'{"a": ' + b"9" * 10_000 + b"}",
    "a large exponent": b'{"a": 1e999}',
    "nan": b'{"a": NaN}',
    "infinity": b'{"a": -Infinity}',
    "another type": b"[1, 2]",
    "null": b"null",
    "a text": b'"a"',
    "no text": b"\xff\xfe\x00",
    "other values": b'{"a": "b"}',
    "too long": b'{"a": 1' + b" " * 2000 + b"}",
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_whatever_lies_there_is_told_once_kept_aside_and_replaced(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with heard() as caught:
        file = counts_in(path)
        assert file.read() == {}
        add(file, "x")
    assert (len(caught), file.read(), counts_in(path).read()) == (1, {"x": 1}, {"x": 1})
    assert (tmp_path / "a.json.unreadable").read_bytes() == content


def test_what_is_not_a_file_is_neither_followed_nor_waited_for(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text('{"a": 1}')
    for make in (lambda path: path.symlink_to(elsewhere), os.mkfifo, Path.mkdir):
        path = tmp_path / f"{getattr(make, '__name__', 'link').strip('<>')}.json"
        make(path)  # type: ignore[operator]
        with heard() as caught:
            file = counts_in(path)
            add(file, "x")
            assert file.read() == {"x": 1}
        assert caught
    assert elsewhere.read_text() == '{"a": 1}'


def test_a_link_in_its_place_is_moved_aside(tmp_path: Path) -> None:
    path, elsewhere = tmp_path / "a.json", tmp_path / "elsewhere"
    elsewhere.write_text('{"a": 1}')
    path.symlink_to(elsewhere)
    with heard() as caught:
        add(counts_in(path), "x")
    assert len(caught) == 1
    assert not path.is_symlink()
    assert json.loads(path.read_text()) == {"x": 1}
    assert elsewhere.read_text() == '{"a": 1}'


def test_the_lock_is_not_opened_through_a_link(tmp_path: Path) -> None:
    lock, elsewhere = tmp_path / ".a.json.lock", tmp_path / "to come"
    lock.symlink_to(elsewhere)
    with heard() as caught:
        file = counts_in(tmp_path / "a.json")
        add(file, "x")
    assert file.read() == {"x": 1}
    assert ["it is a symbolic link, not a regular file" in one for one in caught] == [True]
    assert lock.is_symlink()
    assert not elsewhere.exists()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_a_disk_that_takes_nothing_is_told_once_and_memory_goes_on(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    add(counts_in(path), "before")

    def refuse(self: Path, text: bytes) -> int:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    file, other = counts_in(path), counts_in(tmp_path / "b.json")
    with heard() as caught:
        for _ in range(3):
            add(file, "x")
        add(other, "y")
    assert (file.read(), other.read()) == ({"before": 1, "x": 3}, {"y": 1})
    assert not file.is_on_disk
    assert len(caught) == 1  # of two files: one disk
    assert os.strerror(error) in caught[0]
    assert str(tmp_path) in caught[0]
    assert [one.name for one in tmp_path.iterdir()] == ["a.json"]
    assert json.loads(path.read_text()) == {"before": 1}


def test_without_a_place_on_the_disk_it_lives_in_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (None, tmp_path / "file" / "a.json", tmp_path / ("x" * 300) / "a.json", Path("/proc/none/a.json")):
        file = counts_in(path)
        add(file, "x")
        add(file, "x")
        assert file.read() == {"x": 2}
        assert not file.is_on_disk


def test_where_nothing_can_be_locked_it_lives_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def no_locks(file: Any, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    file = counts_in(tmp_path / "a.json")
    with heard() as caught:
        add(file, "x")
        add(file, "x")
    assert file.read() == {"x": 2}
    assert [os.strerror(errno.ENOLCK) in one for one in caught] == [True]
    assert not (tmp_path / "a.json").exists()


def test_nobody_waits_for_ever_for_one_that_was_stopped_with_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_file, "_WAIT_S", 0.0)
    file = counts_in(tmp_path / "a.json")
    add(file, "before")
    with heard() as caught, locks.locked(tmp_path / ".a.json.lock", 0.0):
        add(file, "x")
    assert file.read() == {"before": 1, "x": 1}
    assert [str(tmp_path) in one and "lock" in one for one in caught] == [True]


@pytest.mark.parametrize("step", ["before the lock", "half written", "written", "replaced"])
def test_a_kill_between_any_two_steps_loses_at_most_the_update(step: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    add(counts_in(path), "before")
    code = f"""
import os, signal
from pathlib import Path
from foretune.runtime.tuning.cache import shared_file
from foretune.runtime.tuning.cache.shared_file import SharedFile
step, die = {step!r}, lambda *given: os.kill(os.getpid(), signal.SIGKILL)
write, replace = Path.write_bytes, Path.replace
if step == "before the lock":
    shared_file.locked = die
if step == "half written":
    Path.write_bytes = lambda self, text: (write(self, text[:5]), die())
if step == "written":
    Path.replace = die
if step == "replaced":
    Path.replace = lambda self, target: (replace(self, target), die())
file = SharedFile(Path({str(path)!r}), check=lambda counts: None, forget=lambda counts: False)
file.update(lambda counts: counts.update(x=1))
"""
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert killed.returncode == -9, killed.stderr
    expected = {"before": 1, "x": 1} if step == "replaced" else {"before": 1}
    assert json.loads(path.read_text()) == expected
    file = counts_in(path)
    add(file, "after")
    assert file.read() == expected | {"after": 1}
    assert [one.name for one in tmp_path.iterdir()] == ["a.json"]  # what the killed one left is gone


def test_what_is_oldest_goes_first_where_there_is_no_room(tmp_path: Path) -> None:
    file = counts_in(tmp_path / "a.json", most_bytes=60)
    for number in range(30):
        add(file, f"n{number}")
    kept = list(file.read())
    assert 5 <= len(kept) < 10
    assert kept == [f"n{number}" for number in range(30)][-len(kept) :]
    assert (tmp_path / "a.json").stat().st_size <= 60


def test_an_update_that_fails_changes_nothing_and_says_so(tmp_path: Path) -> None:
    file = counts_in(tmp_path / "a.json")
    add(file, "x")

    def fail(counts: dict[str, Any]) -> None:
        counts["y"] = 1
        raise KeyError("a bug of the caller's")

    with pytest.raises(KeyError):
        file.update(fail)
    assert file.read() == counts_in(tmp_path / "a.json").read() == {"x": 1}
    add(file, "x")
    assert file.read() == {"x": 2}


def test_no_clock_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that jumps back, as after a suspend or by NTP, changes nothing: not even the order of the oldest."""
    path = tmp_path / "a.json"
    mine, theirs = counts_in(path), counts_in(path)
    add(mine, "x")
    assert theirs.read() == {"x": 1}
    add(mine, "x")
    os.utime(path, (0, 0))
    assert theirs.read() == {"x": 2}
    os.utime(path, (2**33, 2**33))
    add(mine, "x")
    os.utime(path, (0, 0))
    assert theirs.read() == {"x": 3}


def test_a_forked_child_does_not_inherit_a_lock_that_nobody_lets_go_of(tmp_path: Path) -> None:
    file = counts_in(tmp_path / "a.json")
    with file._guard:  # as another thread would, which the child has not
        child = os.fork()
        if child == 0:
            add(file, "child")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    assert file.read() == {"child": 1}


def test_leftovers_of_other_files_stay(tmp_path: Path) -> None:
    others = {".b.json.0123456789abcdef.tmp", "notes.tmp"}
    for name in others | {".a.json.0123456789abcdef.tmp"}:
        (tmp_path / name).write_text("")
    atomic.remove_leftovers(tmp_path, of="a.json.")
    assert {path.name for path in tmp_path.iterdir()} == others


def test_an_update_that_has_no_room_is_left_out_with_a_warning(tmp_path: Path) -> None:
    file = SharedFile(tmp_path / "a.json", check=check_counts, forget=lambda counts: False, most_bytes=60)
    add(file, "x")
    with heard() as said:
        add(file, "y" * 100)
    assert len(said) == 1
    assert "a new value does not fit into 60 bytes: it is not stored" in said[0]
    assert file.read() == counts_in(tmp_path / "a.json").read() == {"x": 1}
