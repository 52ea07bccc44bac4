"""What a disk that refuses means to a run: it ends with a line that names the file, and says what helps."""

from __future__ import annotations

import errno
import os
import re

import pytest
from fakes import DEVICE
from foretune.collect.row_writer import RowWriter
from foretune.datasets import ForetuneError, Measurement, Status, load
from replay import CASE, CASES, FAMILY, VALID, run

pytestmark = pytest.mark.usefixtures("triton")
FULL = "What was written before is kept: free some space, and run the same command again to continue"
OTHER = "What was written before is kept: run the same command again to continue"


@pytest.mark.parametrize(
    ("error", "advice"), [(errno.ENOSPC, FULL), (errno.EDQUOT, FULL), (errno.EIO, OTHER), (errno.EROFS, OTHER)]
)
def test_a_disk_that_refuses_is_told_with_the_files_name(out, monkeypatch, error, advice):
    """Where writing a table fails no file is named: that comes from us."""

    def refuse(*arguments, **options):
        raise OSError(error, os.strerror(error))

    run(CASES[:1], out)
    monkeypatch.setattr("pyarrow.parquet.write_table", refuse)
    with pytest.raises(ForetuneError) as caught:
        run(CASES[:2], out)
    (told,) = str(caught.value).splitlines()
    said = re.escape(f"cannot write to {out}: [Errno {error}] {os.strerror(error)}: '{out}")
    assert re.fullmatch(rf"{said}/(parts|drift)/[-\w]+\.parquet'\. {advice}", told)
    assert load(out).ignored == ()


def test_a_manifest_that_cannot_be_written_is_told_with_its_name(out, monkeypatch):
    def refuse(*arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("pathlib.Path.write_text", refuse)
    with pytest.raises(ForetuneError, match=rf"cannot write to {out}: .*: '{out}/dataset.json'. .* free some space"):
        run(CASES[:1], out)
    assert not list(out.iterdir())


def test_trouble_with_finding_out_where_rows_come_from_is_not_the_disks(out):
    def lost(family, device):
        raise ConnectionResetError("the worker is gone")

    row = Measurement(CASE.problem, DEVICE.name, VALID[0], Status.OK, time_us=7.0)
    writer = RowWriter(out, {"fake": FAMILY}, lambda: 0.0, {"plan": "exhaustive"})
    writer.origin = lost
    with pytest.raises(ConnectionResetError, match="the worker is gone"):
        writer.add(CASE, DEVICE, [row])
