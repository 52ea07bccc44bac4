"""Whatever goes wrong costs at most the config it went wrong at; the rest is measured as if nothing had been.

Here with processes that really end, hang and are killed. The faults themselves are those of a fake GPU; those of a
real one are in `test_on_gpu.py`.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from children import assert_end, children_of
from collecting import CASES, collect
from fakes import DEVICE, FakeFamily
from faulty import FaultyGpu, LateGpu, NeverOpen, is_stuck
from foretune.collect.case_tasks import TRIES
from foretune.collect.supervisor import Limits, Supervisor
from foretune.datasets import ForetuneError, load
from replay import outcomes_of, rows_of
from waiting import until

TESTS = Path(__file__).parents[1]
FAMILY = FakeFamily()
VALID = [config for config in FAMILY.space() if FAMILY.supports(config, CASES[0].problem, DEVICE) is None]
NOT_OVER = re.compile(r"stopped after \d+ s without a result")


@pytest.fixture
def impatient(tmp_path, monkeypatch):
    """The log of GPUs for which the time is over as soon as they are stuck, however long it takes to get there."""
    log = tmp_path / "log"

    def limit_s(supervisor):
        task = supervisor.work.at_hand if supervisor.work else None
        at = getattr(task, "config", None) or getattr(task, "problem", None)
        return -1.0 if is_stuck(log, at, supervisor._child.pid) else None

    monkeypatch.setattr(Supervisor, "_limit_s", limit_s)
    return log


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed") / "measured"
    assert collect(out, [FaultyGpu()]).complete
    return outcomes_of(out)


def test_each_fault_costs_the_config_it_strikes_at_and_no_other(out, undisturbed, impatient):
    over = "stopped after 0 s without a result"
    faults = {
        VALID[10]: ("never ends", "timeout", over),
        VALID[30]: ("segfault", "launch_failed", "the measuring process ended with exit code -11"),
        VALID[50]: ("abort", "launch_failed", "the measuring process ended with exit code -6"),
        VALID[70]: ("exit", "launch_failed", "the measuring process ended with exit code 7"),
        VALID[90]: ("killed", "launch_failed", "the measuring process ended with exit code -9"),
        VALID[110]: ("lost", "launch_failed", "CUDA error: an illegal memory access was encountered"),
        VALID[130]: ("stopped", "timeout", over),
    }
    gpu = FaultyGpu({config: fault for config, (fault, _, _) in faults.items()}, log=impatient)
    summary = collect(out, [gpu], cases=CASES[:1])
    assert summary.complete
    assert summary.lost_s > 0
    outcomes = outcomes_of(out)
    for config, (_, status, error) in faults.items():
        status_now, time_us, samples, error_now = outcomes.pop((CASES[0].problem, config, 1))
        assert (status_now, time_us, samples) == (status, "nan", 0)
        assert NOT_OVER.sub(over, error_now) == error
    # Those that were struck may have been leading ones: others are confirmed in their place.
    scanned = {key: outcome for key, outcome in outcomes.items() if key[2] == 1}
    assert scanned.items() <= undisturbed.items()
    assert len(scanned) == len(FAMILY.space()) - len(faults)
    lines = impatient.read_text().splitlines()
    assert {config: lines.count(str(config)) for config in VALID} == {
        config: TRIES if faults.get(config, "")[:1] == ("killed",) else 1 for config in VALID
    }


def test_inputs_that_take_for_ever_cost_their_case(out, impatient):
    summary = collect(out, [FaultyGpu({CASES[0].problem: "never ends"}, log=impatient)], cases=CASES[:2])
    (told,) = summary.skipped
    problem, error = told.split(": ")
    assert (problem, bool(NOT_OVER.fullmatch(error))) == (str(CASES[0].problem), True)
    assert summary.cases == 1


def test_a_gpu_that_takes_for_ever_to_open_is_given_up(out, monkeypatch):
    monkeypatch.setattr("foretune.collect.supervisor.LOSSES", 2)
    with pytest.raises(ForetuneError, match=r"no GPU is left to measure on: stopped after \d+ s without a result"):
        collect(out, [NeverOpen()], limits=Limits(open_s=1.5))


def test_a_gpu_whose_process_cannot_be_killed_is_given_up_and_the_others_measure_all(out, impatient, monkeypatch):
    """As when its driver hangs."""
    monkeypatch.setattr("foretune.collect.processes._UNKILLABLE_SECONDS", 0.5)
    monkeypatch.setattr("foretune.collect.processes.Child.exitcode", None)
    hung = FaultyGpu(dict.fromkeys(VALID, "never ends"), log=impatient)
    summary = collect(out, [hung, LateGpu(log=impatient)], cases=CASES[:3])
    assert (summary.cases, summary.complete) == (3, True)
    (told,) = summary.skipped
    assert re.fullmatch(r"GPU 0: stopped after \d+ s without a result; its process cannot be killed", told)


def start(out, *, endless=0):
    """A collection on two GPUs that runs by itself, as the leader of a process group; it never ends where its last
    cases are `endless`."""
    arguments = [TESTS / "collecting.py", out, 2, 0.002, endless]
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout.readline() == "ready\n"
    return process


def check_tidy(out):
    """Nothing lies there but a dataset: no lock, and nothing that a killed process left half written."""
    assert {path.name for path in out.iterdir()} == {"dataset.json", "parts", "drift"}
    assert {path.suffix for folder in ("parts", "drift") for path in (out / folder).iterdir()} == {".parquet"}
    assert load(out).ignored == ()


def rows_measured(out):
    return len(load(out).measurements) if (out / "dataset.json").exists() else 0


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize("asked", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_stops_cleanly_and_the_next_run_goes_on(out, undisturbed, asked):
    process = start(out, endless=2)
    until(lambda: rows_measured(out) > 300)
    measuring = children_of(process)
    assert len(measuring) == 2
    os.killpg(process.pid, asked)  # as a terminal does
    said, _ = process.communicate()
    assert process.returncode == 0
    summary = json.loads(said)
    assert (summary["interrupted"], summary["complete"]) == (True, False)
    assert summary["measurements"] == rows_measured(out)  # nothing is lost
    assert_end(measuring)
    assert collect(out, [FaultyGpu()]).complete
    assert outcomes_of(out) == undisturbed


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_second_run_on_the_folder_is_refused_until_the_first_is_killed_and_its_processes_end_with_it(
    out, undisturbed
):
    process = start(out, endless=2)
    until(lambda: rows_measured(out) > 300)
    measuring = children_of(process)
    with pytest.raises(ForetuneError, match=f"measured is being written by process {process.pid} on .*, since 20"):
        collect(out, [FaultyGpu()])
    assert process.poll() is None
    process.kill()
    process.communicate()
    assert collect(out, [FaultyGpu()]).complete
    assert outcomes_of(out) == undisturbed
    check_tidy(out)
    assert_end(measuring)


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize("kills", [3, pytest.param(200, marks=pytest.mark.slow)])
def test_kills_at_random_moments_leave_the_dataset_of_an_undisturbed_run(out, undisturbed, kills):
    """Of the parent or of a measuring process, by turns of a die."""
    seed = random.randrange(1 << 32)
    die, run, left = random.Random(seed), 0, kills
    while left:
        process = start(out.with_name(f"run{run}"))
        while left and process.poll() is None:
            time.sleep(die.uniform(0.0, 1.2))
            victims = [*children_of(process), process.pid]
            victim = die.choice(victims)
            with suppress(ProcessLookupError):  # it has just ended
                if process.poll() is None:
                    os.kill(victim, signal.SIGKILL)
                    left -= 1
            if victim == process.pid:
                break
        else:
            if process.wait() == 0:  # it got to its end: the next kills are another dataset's
                run += 1
        process.communicate()
    for number in range(run + 1):
        one = out.with_name(f"run{number}")
        assert collect(one, [FaultyGpu()]).complete, seed
        assert outcomes_of(one) == undisturbed, seed
        check_tidy(one)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_part_that_a_power_cut_tore_is_measured_again(out, undisturbed, share):
    collect(out, [FaultyGpu()], cases=CASES[:3])
    for part in sorted((out / "parts").iterdir())[1:]:
        part.write_bytes(part.read_bytes()[: int(share * part.stat().st_size)])
    for readings in (out / "drift").iterdir():
        readings.write_bytes(readings.read_bytes()[: int(share * readings.stat().st_size)])
    assert collect(out, [FaultyGpu()], cases=CASES[:3]).complete
    told = outcomes_of(out)
    assert told == {key: outcome for key, outcome in undisturbed.items() if key in told}
    assert {problem for problem, _, _ in told} == {case.problem for case in CASES[:3]}


# No file may become larger than this: as on a disk with that much room, a write ends early.
ON_A_FULL_DISK = """
import resource, sys
from pathlib import Path
from collecting import collect
from faulty import FaultyGpu
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
collect(Path(sys.argv[1]), [FaultyGpu()])
"""


def test_a_full_disk_is_a_clear_stop_and_the_next_run_goes_on(out, undisturbed):
    collect(out, [FaultyGpu()], cases=CASES[:2])
    kept = rows_of(out)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    run = subprocess.run(
        [sys.executable, "-c", ON_A_FULL_DISK, out], env=environment, capture_output=True, text=True
    )  # fmt: skip
    assert run.returncode == 1
    told = run.stderr.splitlines()[-1]
    assert re.search(r"ForetuneError: cannot write to .*measured: .*File too large.* run the same command again", told)
    assert not list(out.rglob("*.tmp"))
    assert load(out).ignored == ()
    assert rows_of(out).keys() == kept.keys()
    assert collect(out, [FaultyGpu()]).complete
    assert outcomes_of(out) == undisturbed
