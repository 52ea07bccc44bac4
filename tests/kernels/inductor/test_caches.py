"""Inductor's caches under `foretune.use("inductor")`: a second process chooses and times nothing again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "cached_compile.py"


@pytest.fixture(
    scope="module", params=[pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def where(request):
    return request.param


@pytest.fixture(scope="module")
def found(where, tmp_path_factory):
    """Return what processes list and time that compile one after the other, each with one of Inductor's caches."""
    folder = tmp_path_factory.mktemp("caches")
    saved, remote = f"--save {folder / 'artifacts'}", f"--remote {folder / 'remote'}"
    runs = {
        "first": f"--cache {folder / 'a'} {saved}",
        "same cache": f"--cache {folder / 'a'}",
        "another k": f"--cache {folder / 'a'} --k 3",
        "loaded": f"--cache {folder / 'b'} --load {folder / 'artifacts'}",
        "saved remotely": f"--cache {folder / 'c'} {remote}",
        "remote": f"--cache {folder / 'd'} {remote}",
    }
    command = [sys.executable, str(SCRIPT), *(f"{options} --where {where}" for options in runs.values())]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return dict(zip(runs, map(json.loads, run.stdout.splitlines()), strict=True))


def assert_chosen(found, where):
    """Check that a process has chosen, and on a GPU has timed the choices."""
    assert found["listed"]
    assert not found["hits"]
    assert found["timed"] == (["mm"] if where == "cuda" else [])


def assert_recalled(found):
    """Check that a process has neither chosen nor timed anything."""
    assert {**found, "seconds": 0} == {"listed": [], "timed": [], "hits": 1, "seconds": 0}


def test_a_second_process_finds_the_graph_in_the_local_cache_and_another_k_does_not(found, where):
    assert_chosen(found["first"], where)
    assert_recalled(found["same cache"])
    assert_chosen(found["another k"], where)


def test_a_process_with_an_empty_cache_loads_what_another_saved(found):
    assert_recalled(found["loaded"])


def test_a_process_with_an_empty_cache_asks_the_remote_one(found, where):
    assert_chosen(found["saved remotely"], where)
    assert_recalled(found["remote"])
