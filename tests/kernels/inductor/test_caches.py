"""Inductor's caches under `foretune.use("inductor")`: a second process chooses and times nothing again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "cached_compile.py"


def compiled(cache, *options, where="cpu"):
    """Return what a new process lists and times, with Inductor's own cache in that folder."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    command = [sys.executable, str(SCRIPT), "--where", where, *map(str, options)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request):
    return request.param


def assert_chosen(found, where):
    """Check that a process has chosen, and on a GPU has timed the choices."""
    assert found["listed"]
    assert not found["hits"]
    assert found["timed"] == (["mm"] if where == "cuda" else [])


def assert_recalled(found):
    """Check that a process has neither chosen nor timed anything."""
    assert {**found, "seconds": 0} == {"listed": [], "timed": [], "hits": 1, "seconds": 0}


def test_a_second_process_finds_the_graph_in_the_local_cache_and_another_k_does_not(tmp_path, where):
    assert_chosen(compiled(tmp_path, "--k", 2, where=where), where)
    assert_recalled(compiled(tmp_path, "--k", 2, where=where))
    assert_chosen(compiled(tmp_path, "--k", 3, where=where), where)


def test_a_process_with_an_empty_cache_loads_what_another_saved(tmp_path, where):
    saved = tmp_path / "artifacts"
    assert_chosen(compiled(tmp_path / "a", "--save", saved, where=where), where)
    assert_recalled(compiled(tmp_path / "b", "--load", saved, where=where))


def test_a_process_with_an_empty_cache_asks_the_remote_one(tmp_path, where):
    assert_chosen(compiled(tmp_path / "a", "--remote", tmp_path / "remote", where=where), where)
    assert_recalled(compiled(tmp_path / "b", "--remote", tmp_path / "remote", where=where))
