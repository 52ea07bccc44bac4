"""A bundle is replaced in one step: whoever saves, reads or dies meanwhile, there is one bundle or the other."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from foretune.datasets import BundleError, ForetuneWarning
from foretune.model import load_bundle
from forging import hand_made

HERE = Path(__file__).parent


@pytest.fixture
def saved(tmp_path):
    hand_made().save(tmp_path / "bundle")
    return tmp_path / "bundle"


def test_saving_over_an_older_bundle(saved):
    newer = hand_made(seed=1)
    newer.save(saved)
    assert load_bundle(saved).digest == newer.digest
    assert [path.name for path in saved.parent.iterdir()] == ["bundle"]
    assert [path.name for path in saved.iterdir()] == ["bundle.npz"]


def test_a_failed_save_leaves_nothing_behind(tmp_path):
    (tmp_path / "bundle").write_text("a file is in the way")
    with pytest.raises(OSError, match="bundle"):
        hand_made().save(tmp_path / "bundle")
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_what_could_not_be_read_is_not_saved(saved):
    before = load_bundle(saved).digest
    for odd in (float("nan"), object(), "\ud800", {"deep": [[[float("inf")]]]}):
        bundle = hand_made(seed=1)
        bundle.trained["fake"].origin["dataset"] = odd
        with pytest.raises(BundleError, match="the values of a bundle must be JSON"):
            bundle.save(saved)
    assert load_bundle(saved).digest == before


def test_what_a_killed_writer_left_goes_with_the_next_save(saved):
    (saved / ".bundle.npz.0123456789abcdef.tmp").write_bytes(b"half of one")
    others = {"README", ".spec.json.0123456789abcdef.tmp"}
    for name in others:
        (saved / name).write_text("somebody's own")
    hand_made(seed=1).save(saved)
    assert {path.name for path in saved.iterdir()} == {*others, "bundle.npz"}


def test_where_nothing_can_be_locked_leftovers_stay_and_the_save_succeeds(saved, monkeypatch):
    def no_locks(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    (saved / ".bundle.npz.0123456789abcdef.tmp").write_bytes(b"perhaps of somebody who lives")
    newer = hand_made(seed=1)
    with pytest.warns(ForetuneWarning, match="does not support locks"):
        newer.save(saved)
    assert load_bundle(saved).digest == newer.digest
    assert len(list(saved.iterdir())) == 2


FEW = [("doubles", 10), ("kills", 20), ("reads", 60)]
MANY = [("doubles", 200), ("kills", 200), ("reads", 2000)]


@pytest.mark.parametrize(("what", "count"), [*FEW, *(pytest.param(*many, marks=pytest.mark.slow) for many in MANY)])
def test_nothing_is_torn(tmp_path, what, count):
    """See saving.py: saves at the same time, kills at any line of a save, reads beside saves."""
    command = [sys.executable, HERE / "saving.py", what, str(count), tmp_path / "folder" / "bundle"]
    paths = os.pathsep.join([str(HERE.parent), *filter(None, sys.path)])
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == []
