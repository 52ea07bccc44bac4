"""Files are written atomically."""

from __future__ import annotations

import errno
import os
import threading

import pytest
from foretune.datasets.files import remove_leftovers, replacing


def _half(path, error: BaseException) -> None:
    with replacing(path) as temporary:
        temporary.write_text("half")
        raise error


def test_what_goes_wrong_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt):
        _half(path, KeyboardInterrupt())
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("a.txt", "old")]


def test_a_full_disk_is_told_with_the_files_name(tmp_path):
    path = tmp_path / "a.txt"
    with pytest.raises(OSError, match="No space left on device") as caught:
        _half(path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert caught.value.filename == str(path)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="has no /dev/full")
def test_a_full_disk_is_told_with_the_files_name_where_that_is_written_as_it_is():
    with pytest.raises(OSError, match="No space left on device") as caught, replacing("/dev/full") as where:
        where.write_text("all")
    assert caught.value.filename == "/dev/full"


def test_what_a_kill_left_is_removed_and_nothing_else(tmp_path):
    others = {".notes.tmp", "a.txt.0123456789abcdef.tmp", ".a.txt.0123.tmp", "a.txt"}
    for name in others:
        (tmp_path / name).write_text("")
    with replacing(tmp_path / "a.txt") as temporary:
        temporary.write_text("whole")
    temporary.write_text("half")
    remove_leftovers(tmp_path)
    assert {one.name for one in tmp_path.iterdir()} == others


def test_a_folder_that_is_not_there_is_told_with_the_files_name(tmp_path):
    with pytest.raises(FileNotFoundError) as caught, replacing(tmp_path / "none" / "a.txt") as temporary:
        temporary.write_text("")
    assert caught.value.filename == str(tmp_path / "none" / "a.txt")


def test_trouble_with_another_file_keeps_that_ones_name(tmp_path):
    with pytest.raises(FileNotFoundError) as caught, replacing(tmp_path / "a.txt"):
        (tmp_path / "other").read_text()
    assert caught.value.filename == str(tmp_path / "other")


def test_a_folder_is_not_replaced(tmp_path):
    with pytest.raises(IsADirectoryError), replacing(tmp_path):
        pass


def test_rights_and_links_stay(tmp_path):
    path, link = tmp_path / "a.txt", tmp_path / "link"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    with replacing(link) as temporary:
        temporary.write_text("new")
    assert link.is_symlink()
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_new_file_has_the_rights_of_any_other(tmp_path):
    (tmp_path / "other").write_text("")
    with replacing(tmp_path / "a.txt") as temporary:
        temporary.write_text("")
    assert (tmp_path / "a.txt").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_pipe_is_written_as_it_is(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    with replacing(pipe) as where:
        where.write_text("all")
    reader.join()
    assert read == ["all"]


def test_writers_at_once_do_not_meet(tmp_path):
    path, start = tmp_path / "a.txt", threading.Barrier(8)

    def write(number: int) -> None:
        start.wait()
        for _ in range(25):
            with replacing(path) as temporary:
                temporary.write_text(str(number) * 10_000)

    writers = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(set(path.read_text())) == 1
    assert [one.name for one in tmp_path.iterdir()] == ["a.txt"]


def test_a_caches_file_takes_the_place_of_a_link_or_a_pipe(tmp_path):
    (tmp_path / "elsewhere").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "link", tmp_path / "pipe"):
        with replacing(path, is_cache=True) as temporary:
            temporary.write_text("new")
        assert (path.is_symlink(), path.read_text()) == (False, "new")
    assert (tmp_path / "elsewhere").read_text() == "old"


def test_a_temporary_is_made_and_not_opened_through_a_link(tmp_path, monkeypatch):
    """An attacker could guess the name of a temporary file and place a link there."""
    monkeypatch.setattr(os, "urandom", lambda count: b"\0" * count)
    (tmp_path / "elsewhere").write_text("old")
    (tmp_path / f".a.txt.{'00' * 8}.tmp").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError), replacing(tmp_path / "a.txt") as temporary:
        temporary.write_text("new")
    assert (tmp_path / "elsewhere").read_text() == "old"


def test_only_regular_files_are_leftovers(tmp_path):
    (tmp_path / "elsewhere").write_text("")
    (tmp_path / f".a.{'0a' * 8}.tmp").symlink_to(tmp_path / "elsewhere")
    (tmp_path / f".b.{'0a' * 8}.tmp").mkdir()
    (tmp_path / f".c.{'0a' * 8}.tmp").write_text("")
    remove_leftovers(tmp_path)
    assert {one.name[:2] for one in tmp_path.iterdir()} == {"el", ".a", ".b"}
