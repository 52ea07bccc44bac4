"""Where a command is to write, it says before any work that it cannot; and what it writes is whole or not there."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import call
from foretune import datasets
from foretune.datasets import DeviceSpec
from foretune.datasets.store import seal_dataset
from foretune.runtime import quickstart
from writers import append

FAMILY = "grouped_gemm_fwd"


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file, a bundle's folder, a dataset's, one with parts and one with somebody's files."""
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("old")
    for name in ("bundle/bundle.npz", "others/notes.txt"):
        Path(name).parent.mkdir()
        Path(name).write_text("old")
    append(Path("parts"), "mine")
    seal_dataset("parts", "sealed", name="mine")


def contents() -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path().rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("train --data h200 --out file", "file is a file: name a folder"),
        ("train --data h200 --out file/b", "file/b cannot be a folder: file is a file"),
        ("train --data h200 --out sealed", "sealed is the folder of a dataset: name one for the bundle alone"),
        ("train --data h200 --out others", "others holds files but no bundle (notes.txt): name a new"),
        ("quickstart --out file", "file is a file: name a folder"),
        ("quickstart --out others", "others holds files but no bundle (notes.txt): name a new"),
        (f"collect {FAMILY} --limit 1 --out file", "file is a file: name a folder"),
        (f"collect {FAMILY} --limit 1 --out bundle", "bundle is the folder of a bundle: name one for the dataset"),
        ("datasets merge h200 --out file", "file is a file: name a folder"),
        ("datasets merge h200 --out bundle", "bundle is the folder of a bundle: name one for the dataset"),
        ("datasets merge h200 --out parts", "parts has unsealed parts: seal into another folder"),
        ("datasets seal parts --out file", "file is a file: name a folder"),
        ("datasets seal parts --out bundle", "bundle is the folder of a bundle: name one for the dataset"),
        ("datasets seal parts --out parts", "parts is the source itself"),
        ("export h200 --format csv --out bundle", "bundle is a folder: name a file"),
        ("export h200 --format csv --out no/o.csv", "no/o.csv cannot be written: make the folder"),
        ("device h200 --out bundle", "bundle is a folder: name a file"),
        ("device h200 --out no/o.json", "no/o.json cannot be written: make the folder"),
    ],
)
def test_what_cannot_be_written_is_said_before_any_work(line: str, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: object) -> None:
        raise AssertionError("loads what it works on")

    monkeypatch.setattr(datasets, "load", load)
    before = contents()
    result = call(line)
    assert (result.exit_code, result.stdout) == (1, "")
    (said,) = [one for one in result.stderr.splitlines() if one.startswith("Error: ")]
    assert named in said
    assert contents() == before


def test_a_disk_that_takes_nothing_is_said_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(dir: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(dir / "tmp1234"))

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    for work in (
        "train --data h200",
        "quickstart",
        f"collect {FAMILY} --limit 1",
        "datasets merge h200",
        "datasets seal parts",
        "export h200 --format csv",
        "device h200",
    ):
        result = call(f"{work} --out new")
        assert (result.exit_code, result.stdout) == (1, ""), work
        assert result.stderr.endswith("Error: new cannot be written: Read-only file system\n"), work
    assert not Path("new").exists()


@pytest.mark.parametrize(
    "line",
    [
        *(f"export parts --format {format} --out file" for format in ("csv", "t4")),
        "device h200 --out file",
    ],
)
@pytest.mark.parametrize("trouble", [KeyboardInterrupt(), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))], ids=str)
def test_a_write_that_is_cut_short_leaves_the_old_file(
    line: str, trouble: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(path: object) -> None:
        raise trouble

    monkeypatch.setattr("foretune.datasets.files.flush", cut)  # all is written, and nothing is on the disk
    result = call(line)
    assert result.exit_code != 0
    if isinstance(trouble, OSError):
        assert result.stderr.endswith("Error: [Errno 28] No space left on device: 'file'\n")
    assert Path("file").read_text() == "old"
    assert not list(Path().glob(".*"))


@pytest.mark.parametrize("line", ["datasets seal parts --out new", "datasets merge parts --out new"])
def test_a_full_disk_is_told_with_the_name_of_what_was_to_be_sealed(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("pyarrow.parquet.write_table", refuse)
    before = contents()
    result = call(line)
    assert result.exit_code == 1
    assert result.stderr.endswith("Error: [Errno 28] No space left on device: 'new'\n")
    assert contents() == before


def test_a_quickstart_that_cannot_save_shows_what_it_found_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unsaved:
        def save(self, path: Path) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path / "bundle.npz"))

        def ranker(self, family: str) -> None:
            pass

    found = SimpleNamespace(to_json=lambda: {"found": True})
    monkeypatch.setattr(quickstart, "train_bundle", lambda *arguments: Unsaved())
    monkeypatch.setattr(quickstart, "cross_validate", lambda *arguments, **options: found)
    monkeypatch.setattr(quickstart, "make_shortlist", lambda *arguments, **options: found)
    monkeypatch.setattr(quickstart, "prediction_ms", lambda *arguments, **options: (1.0, 1.0))
    monkeypatch.setattr(datasets, "load", lambda name: SimpleNamespace(rows=lambda family: ()))
    monkeypatch.setattr(DeviceSpec, "live", lambda index=None: DeviceSpec.named("nothing"))
    result = call("quickstart --json --out new")
    assert result.exit_code == 0, result.stderr
    assert '"found": true' in result.stdout
    assert '"bundle": null' in result.stdout
    assert (
        "Warning: the bundle is not saved in new: [Errno 28] No space left on device: 'new/bundle.npz'" in result.stderr
    )
