"""A run on dask workers that are processes of their own, on fake GPUs; they come, go, and are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from functools import partial
from pathlib import Path

import pytest
from fakes import DEVICE, fake_cases
from faulty import CompiledFamily, FaultyGpu, FewFamily, NoGpu, TwoKinds
from foretune.collect import plan
from foretune.collect.cluster import dask_campaign, dask_workers
from foretune.collect.cluster.dask_campaign import ClusterCampaign, collect_on_cluster, connected
from foretune.collect.cluster.remote_gpu import RunSettings
from foretune.collect.plan import Adaptive, Exhaustive
from foretune.collect.row_writer import RowWriter
from foretune.collect.run_state import RunState
from foretune.datasets import ForetuneError, Measurement, Status, load
from foretune.model import LightGBMRanker
from replay import rows_of

distributed = pytest.importorskip("distributed")
TESTS = Path(__file__).parents[1]
CASES = fake_cases()[:6]


def until(condition):
    """Waits for what takes seconds; fails where it does not come about."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Cluster:
    """A scheduler, and workers with a GPU each."""

    def __init__(self, folder):
        self.file, self.processes = folder / "scheduler.json", {}
        self._start("scheduler", "scheduler", "--port", "0", "--no-dashboard")
        until(self.file.exists)
        self.address = json.loads(self.file.read_text())["address"]

    def add(self, name, *options):
        always = ("--nthreads", "1", "--resources", "GPU=1", "--no-dashboard", "--name", name)
        self._start(name, "worker", *always, *options)

    def _start(self, name, kind, *options):
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
        command = [sys.executable, "-m", f"distributed.cli.dask_{kind}", "--scheduler-file", str(self.file), *options]
        self.processes[name] = subprocess.Popen(
            command, env=environment, cwd=self.file.parent, stderr=subprocess.DEVNULL, start_new_session=True
        )

    def close(self):
        for process in self.processes.values():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def dask(tmp_path):
    started = Cluster(tmp_path)
    yield started
    started.close()


@pytest.fixture
def out(tmp_path):
    return tmp_path / "measured"


def origin(family, device):
    return {"family": family.name, "kernel_source": family.source_hash()}


def run(address, out, cases, gpu, family=None, **options):
    family = family or CompiledFamily()
    with connected(address) as client:
        campaign = ClusterCampaign(client, RunSettings(uuid.uuid4().hex, gpu, {"fake": family}))
        return campaign.measure(RunState({"fake": family}, cases, out, origin=origin, **options))


def workers(address):
    """{name: pid} of the dask workers that are there."""
    with connected(address) as client:
        return {
            worker["name"]: client.run(os.getpid, workers=[address])[address]
            for address, worker in client.scheduler_info()["workers"].items()
        }


def check_measured(out, cases, family):
    """Every config of every case has its row, once, with the time that it takes; the leading ones are confirmed."""
    found = rows_of(out)
    assert set(found) == {(case.problem, config) for case in cases for config in family.space()}
    for (problem, config), passes in found.items():
        assert set(passes) in ({1}, {1, 2, 3})
        if passes[1].status in ("ok", "hopeless"):
            assert passes[1].time_us == pytest.approx(family.time_us(problem, config, timing_pass=1), rel=1e-6)
    for case in cases:
        assert sum(3 in found[case.problem, config] for config in family.space()) >= 20
    return found


def test_two_workers_share_the_cases_and_one_that_is_killed_is_replaced_by_the_other(dask, out, monkeypatch):
    cases = fake_cases()[:12]
    dask.add("first", "--no-nanny")
    dask.add("second", "--no-nanny")
    until(lambda: len(workers(dask.address)) == 2)
    killed, heard, read = threading.Event(), set(), RowWriter.read

    def listen(row_writer, case, family, device, gpu, *more):
        heard.add(gpu)
        read(row_writer, case, family, device, gpu, *more)

    monkeypatch.setattr(RowWriter, "read", listen)

    def kill_one(progress):
        if len(heard) == 2 and not killed.is_set():  # both have measured
            killed.set()
            dask.processes["second"].kill()

    summary = run(dask.address, out, cases, FaultyGpu(seconds=0.003), on_progress=kill_one)
    assert killed.is_set()
    assert (summary.cases, summary.complete, summary.gpus, summary.skipped) == (len(cases), True, 2, ())
    assert summary.gpu_busy_share > 0
    check_measured(out, cases, CompiledFamily())
    dataset = load(out)
    assert dataset.drift["gpu"].nunique() == 2  # both have measured
    assert set(dataset.drift["problem"]) == set(range(len(cases)))
    again = run(dask.address, out, cases, FaultyGpu())
    assert (again.measurements, again.complete) == (0, True)


def test_a_config_that_kills_every_worker_is_a_row_and_the_rest_is_measured(dask, out, monkeypatch):
    monkeypatch.setattr(dask_campaign, "TRIES", 2)
    dask.add("only")  # with a nanny, which starts it again
    family = FewFamily()
    valid = [config for config in family.space() if family.supports(config, CASES[0].problem, DEVICE) is None]
    culprit = valid[5]
    summary = run(dask.address, out, CASES[:1], FaultyGpu({culprit: "kills its supervisor"}), family)
    assert summary.complete
    row = check_measured(out, CASES[:1], family)[CASES[0].problem, culprit][1]
    assert row.status == "launch_failed"
    assert row.error == "2 dask workers or their GPUs were lost at it"


def test_an_order_that_is_down_to_one_config_still_has_its_case_confirmed(dask, out, monkeypatch):
    """As where an earlier run got to all but one."""
    monkeypatch.setattr(dask_campaign, "TRIES", 1)
    dask.add("only")
    family = FewFamily()
    (step,) = Exhaustive(family, DEVICE).next(CASES[:1], None)
    last = [config for config in step.configs if family.supports(config, CASES[0].problem, DEVICE) is None][-1]
    known = RunState({"fake": family}, CASES[:1], out, origin=origin)
    rows = [
        Measurement(CASES[0].problem, DEVICE.name, config, Status.OK, us)
        if (us := family.time_us(CASES[0].problem, config, timing_pass=1))
        else Measurement(CASES[0].problem, DEVICE.name, config, Status.LAUNCH_FAILED)
        for config in family.space()
        if config != last
    ]
    known.add(CASES[0], DEVICE, rows)
    known.row_writer.flush()
    assert run(dask.address, out, CASES[:1], FaultyGpu({last: "kills its supervisor"}), family).complete
    found = check_measured(out, CASES[:1], family)
    assert found[CASES[0].problem, last][1].error == "1 dask workers or their GPUs were lost at it"


def test_a_budget_brings_back_what_is_measured(dask, out):
    dask.add("only", "--no-nanny")
    while not workers(dask.address):
        time.sleep(0.1)
    summary = run(dask.address, out, CASES, FaultyGpu(seconds=0.02), budget_s=12.0)
    assert not summary.complete
    assert 0 < summary.measurements == len(load(out).measurements)
    assert run(dask.address, out, CASES, FaultyGpu()).complete
    check_measured(out, CASES, CompiledFamily())


def test_cards_of_two_kinds_measure_all_cases_each(dask, out):
    for name in ("big", "small"):
        dask.add(name, "--no-nanny")
    summary = run(dask.address, out, CASES[:2], TwoKinds(seconds=0.001))
    assert (summary.cases, summary.complete) == (4, True)
    dataset = load(out)
    assert {spec.name for spec in dataset.devices} == {DEVICE.name, "small"}
    assert len(dataset.measurements.groupby(["device", "problem"])) == 4


def test_an_adaptive_plan_is_asked_again_when_its_batch_is_measured(dask, out, monkeypatch):
    few = partial(Adaptive, share=0.1, first=2, ranker=partial(LightGBMRanker, trees=10))
    monkeypatch.setitem(plan.PLANS, "adaptive", few)
    for name in ("first", "second"):
        dask.add(name, "--no-nanny")
    summary = run(dask.address, out, CASES, FaultyGpu(seconds=0.001), plan="adaptive")
    assert (summary.plan, summary.cases, summary.complete) == ("adaptive", len(CASES), True)
    found, family = rows_of(out), CompiledFamily()
    grid = load(out).grid("fake")
    todo = list(CASES)
    while steps := few(family, DEVICE).next(todo, of(grid, [case for case in CASES if case not in todo])):
        for step in steps:
            assert {config for problem, config in found if problem == step.case.problem} == set(step.configs)
            todo.remove(step.case)
    assert run(dask.address, out, CASES, FaultyGpu(), plan="adaptive").measurements == 0


def of(grid, cases):
    return grid.select([grid.cases.index(case) for case in cases]) if cases else None


def test_a_scheduler_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(dask_campaign, "CONNECT_SECONDS", 0.5)
    with pytest.raises(ForetuneError, match=r"no dask scheduler answers at tcp://127\.0\.0\.1:1"):
        collect_on_cluster([CompiledFamily()], CASES, "nowhere", "tcp://127.0.0.1:1")


def test_a_cluster_without_gpus_is_told_how_to_have_some(dask, out, monkeypatch):
    monkeypatch.setattr(dask_workers, "ALONE_SECONDS", 0.5)
    with pytest.raises(ForetuneError, match=r"no dask worker with a GPU. Start some: dask worker tcp://.* --res"):
        run(dask.address, out, CASES, FaultyGpu())


def test_a_gpu_that_cannot_be_opened_is_said(dask, out, monkeypatch):
    monkeypatch.setattr(dask_workers, "ALONE_SECONDS", 3.0)
    dask.add("only", "--no-nanny")
    with pytest.raises(ForetuneError, match="is of no use: RuntimeError: no CUDA today"):
        run(dask.address, out, CASES, NoGpu())
