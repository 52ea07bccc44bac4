"""A real collection on all GPUs that is killed, that meets a second one, and whose disk is full. Ten minutes on two."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest
from children import children_of
from foretune.datasets import load
from waiting import until

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
FAMILY, CASES, KILLS = "grouped_gemm_dw", 24, 20


def start(out, cases=CASES):
    command = (
        f"-m foretune collect {FAMILY} --json --per-layer 1 --random 0 --max-tflop 0.5 --seed 7 --limit {cases} --out"
    )
    return subprocess.Popen(
        [sys.executable, *command.split(), str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def measured(out):
    """The scan's cells: what was tried on what. Which configs are confirmed depends on their times."""
    dataset = load(out)
    rows = dataset.measurements[dataset.measurements["timing_pass"] == 1]
    pairs = rows[["problem", "config"]].drop_duplicates()
    assert len(pairs) == len(rows)
    return {
        (dataset.cases[problem].problem, dataset.configs[config]) for problem, config in pairs.itertuples(index=False)
    }


def parts(out):
    return len(list(out.glob("parts/*.parquet")))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed") / "measured"
    said, told = (run := start(out)).communicate()
    assert run.returncode == 0, told
    print("undisturbed:", {key: value for key, value in json.loads(said).items() if key != "statuses"})
    return measured(out)


def test_kills_at_random_moments_lose_nothing(tmp_path, undisturbed):
    die, left, runs, killed = random.Random(0), KILLS, 0, {"parent": 0, "child": 0}
    while left:
        out = tmp_path / f"run{runs}"
        process = start(out)
        while left and process.poll() is None:
            before = parts(out)
            until(lambda: parts(out) > before or process.poll() is not None)  # noqa: B023 - called at once
            time.sleep(die.uniform(0.0, 2.0))
            if process.poll() is not None:
                break
            victims = children_of(process)
            parent = left % 2 or not victims
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(process.pid if parent else die.choice(victims), signal.SIGKILL)
                killed["parent" if parent else "child"] += 1
                left -= 1
            if parent:
                break
        process.communicate()
        if process.returncode == 0:
            runs += 1
    print("killed:", killed, "over", runs + 1, "datasets")
    for number in range(runs + 1):
        out = tmp_path / f"run{number}"
        if out.exists():
            _, told = (run := start(out)).communicate()
            assert run.returncode == 0, told
            assert measured(out) == undisturbed
            assert not [path for path in out.rglob("*") if path.suffix == ".tmp"]
            assert load(out).ignored == ()


def test_a_second_collection_is_refused(tmp_path, undisturbed):
    out = tmp_path / "measured"
    first = start(out)
    until(lambda: parts(out) > 0 or first.poll() is not None)
    said, told = (second := start(out)).communicate()
    assert second.returncode == 1, told
    assert f"is being written by process {first.pid} " in json.loads(said)["error"]
    _, told = first.communicate()
    assert first.returncode == 0, told
    assert measured(out) == undisturbed


def test_a_full_disk_stops_and_the_next_run_goes_on(tmp_path, undisturbed):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False).returncode != 0:
        pytest.skip("needs a file system of its own, so root")
    try:
        said, told = (run := start(disk / "measured")).communicate()
        assert run.returncode == 1, told
        print("full disk:", json.loads(said)["error"])
        assert "No space left on device" in json.loads(said)["error"]
        assert measured(disk / "measured") < undisturbed
        subprocess.run(["mount", "-o", "remount,size=256m", str(disk)], check=True)
        _, told = (run := start(disk / "measured")).communicate()
        assert run.returncode == 0, told
        assert measured(disk / "measured") == undisturbed
    finally:
        subprocess.run(["umount", str(disk)], check=True)
