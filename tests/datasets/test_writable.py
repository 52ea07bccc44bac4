"""A path that cannot be written is refused before the work, and the check leaves no files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from foretune.datasets import ForetuneError
from foretune.datasets.files import check_file, check_folder, replacing


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a disk that is mounted read-only."""

    def refuse(dir: Path) -> None:
        raise OSError(30, "Read-only file system", str(dir / "tmp1234"))

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)


def test_a_file_may_be_new_or_old_or_what_a_link_points_to(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "to come")
    for name in ("new", "old", "link"):
        check_file(tmp_path / name)
    assert {path.name for path in tmp_path.iterdir()} == {"old", "link"}
    assert (tmp_path / "old").read_text() == "old"


def test_a_link_that_leads_to_itself_is_named(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ForetuneError, match="loop cannot be written: Too many levels of symbolic links"):
        check_file(tmp_path / "loop")
    with pytest.raises(OSError, match="symbolic links") as caught, replacing(tmp_path / "loop"):
        pass
    assert caught.value.filename == str(tmp_path / "loop")


def test_a_device_is_written_as_it_is(closed: None) -> None:
    check_file(os.devnull)


def test_a_folder_may_be_new_however_deep_or_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (tmp_path, tmp_path / "a" / "b", "a", "a/b", "."):
        check_folder(name)
    assert not list(tmp_path.iterdir())


def test_what_is_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for check, path, said in (
        (check_file, tmp_path, f"{tmp_path} is a folder: name a file"),
        (check_file, tmp_path / "no" / "a", f"{tmp_path}/no/a cannot be written: make the folder {tmp_path}/no first"),
        (check_file, tmp_path / "file" / "a", f"make the folder {tmp_path}/file first"),
        (check_folder, tmp_path / "file", f"{tmp_path}/file is a file: name a folder"),
        (check_folder, tmp_path / "file" / "a", f"{tmp_path}/file/a cannot be a folder: {tmp_path}/file is a file"),
    ):
        with pytest.raises(ForetuneError) as caught:
            check(path)
        assert said in str(caught.value)


@pytest.mark.parametrize("check", [check_file, check_folder])
def test_a_disk_that_takes_nothing_is_told_with_the_path_that_was_asked_for(
    check: type, tmp_path: Path, closed: None
) -> None:
    with pytest.raises(ForetuneError, match=rf"^{tmp_path}/new cannot be written: Read-only file system$"):
        check(tmp_path / "new")


@pytest.mark.parametrize("check", [check_file, check_folder])
def test_a_name_that_is_too_long_is_told(check: type, tmp_path: Path) -> None:
    with pytest.raises(ForetuneError, match="cannot be written: File name too long"):
        check(tmp_path / ("a" * 300))


@pytest.mark.parametrize("name", ["dataset.json", "measurements.parquet", "parts/r1-000000.parquet", "parts/run.jsonl"])
def test_no_result_replaces_a_file_of_a_dataset(tmp_path, name):
    check_file(tmp_path / "dataset.json")  # a name that anybody's file may have
    (tmp_path / "parts").mkdir()
    for one in ("dataset.json", name):
        (tmp_path / one).write_text("")
    with pytest.raises(ForetuneError, match=f"{name} is a file of the dataset or bundle in {tmp_path}: name another"):
        check_file(tmp_path / name)
    check_file(tmp_path / "measured.csv")
