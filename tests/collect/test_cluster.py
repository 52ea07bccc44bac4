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
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from children import assert_end
from fakes import DEVICE, fake_cases
from faulty import CompiledFamily, FaultyGpu, FewFamily, MeetingGpu, NoGpu, TwoKinds
from foretune.collect import cluster as on_cluster
from foretune.collect import plan, remote_gpu
from foretune.collect.cases import CaseState
from foretune.collect.cluster import ClusterCampaign, collect_on_cluster, connected
from foretune.collect.plan import Adaptive, Exhaustive
from foretune.collect.remote_gpu import Order, RemoteGpu, RunSettings
from foretune.collect.row_writer import RowWriter
from foretune.collect.run_state import RunState
from foretune.collect.supervisor import Limits
from foretune.datasets import ForetuneError, Measurement, Status, load
from foretune.model import LightGBMRanker
from replay import rows_of
from waiting import until

distributed = pytest.importorskip("distributed")
TESTS = Path(__file__).parents[1]
CASES = fake_cases()[:6]


class Cluster:
    """A scheduler, and workers with a GPU each: all end with its block, and with the process of the tests. The workers
    of one test end with `without_workers`."""

    def __init__(self, folder):
        self.file, self.processes = folder / "scheduler.json", {}

    def __enter__(self):
        try:
            self._start("scheduler", "scheduler", "--port", "0", "--no-dashboard")
            until(lambda: self.address or self.processes["scheduler"].poll() is not None)
            assert self.address, "the scheduler has ended"
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc):
        self._kill(*self.processes)

    def without_workers(self):
        """Returns when the scheduler knows that there are none."""
        if names := self.processes.keys() - {"scheduler"}:
            self._kill(*names)
            with connected(self.address) as client:
                until(lambda: not client.scheduler_info()["workers"])

    def _kill(self, *names):
        for name in names:
            process = self.processes[name]
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdin.close()
            if name != "scheduler":
                del self.processes[name]

    @property
    def address(self):
        """None until the scheduler's file is there, and all that is to be in it."""
        try:
            return json.loads(self.file.read_text())["address"]
        except (FileNotFoundError, json.JSONDecodeError):
            return None

    def add(self, name, *options):
        always = ("--nthreads", "1", "--resources", "GPU=1", "--no-dashboard", "--name", name)
        self._start(name, "worker", *always, *options)

    def _start(self, name, kind, *options):
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
        module = f"distributed.cli.dask_{kind}"
        self.processes[name] = subprocess.Popen(
            [sys.executable, TESTS / "ending.py", module, "--scheduler-file", self.file, *options],
            env=environment,
            cwd=self.file.parent,
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("dask")) as cluster:
        yield cluster


@pytest.fixture
def dask(scheduler):
    """A cluster without workers, but for those that a test adds."""
    yield scheduler
    scheduler.without_workers()


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """However long a busy machine takes."""
    for seconds in ("CONNECT_SECONDS", "STOP_SECONDS"):
        monkeypatch.setattr(on_cluster, seconds, 300.0)
    monkeypatch.setattr(on_cluster, "ALONE_SECONDS", 300.0)


#: Of what runs in a worker.
PATIENT = Limits(open_s=300.0, prepare_s=300.0, task_s=300.0)


def origin(family, device):
    return {"family": family.name, "kernel_source": family.source_hash()}


def run(address, out, cases, gpu, family=None, **options):
    family = family or CompiledFamily()
    with connected(address) as client:
        campaign = ClusterCampaign(client, RunSettings(uuid.uuid4().hex, gpu, {"fake": family}, PATIENT))
        state = RunState({"fake": family}, cases, out, **options)
        state.row_writer.origin = origin
        return campaign.measure(state)


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


def start_workers(dask, *names):
    for name in names:
        dask.add(name, "--no-nanny")
    with connected(dask.address) as client:
        client.wait_for_workers(len(names), timeout=400)


def test_the_scheduler_and_workers_end_with_who_has_started_them(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import sys; sys.path[:0] = sys.argv[1:3]\n"
        "from pathlib import Path\nfrom test_cluster import Cluster, workers\n"
        "from waiting import until\n"
        "cluster = Cluster(Path(sys.argv[3])).__enter__()\ncluster.add('only')\n"
        "until(lambda: workers(cluster.address))\n"
        "print(*(p.pid for p in cluster.processes.values()), *workers(cluster.address).values(), flush=True)\n"
        "sys.stdin.read()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, script, TESTS, TESTS / "collect", tmp_path],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        parent.kill()
    assert len(pids) == 3  # scheduler, nanny, worker
    assert_end(pids)


def test_what_was_started_ends_where_the_cluster_does_not_come_up(tmp_path, monkeypatch):
    cluster = Cluster(tmp_path)

    def fail(condition):
        raise RuntimeError("in between")

    monkeypatch.setitem(globals(), "until", fail)
    with pytest.raises(RuntimeError, match="in between"):
        cluster.__enter__()
    assert cluster.processes["scheduler"].poll() is not None


@pytest.mark.slow
def test_two_workers_share_the_cases_and_one_that_is_killed_is_replaced_by_the_other(dask, out, tmp_path, monkeypatch):
    cases = fake_cases()[:12]
    start_workers(dask, "first", "second")
    killed, heard, read = threading.Event(), set(), RowWriter.read

    def listen(row_writer, case, device, gpu, *more):
        heard.add(gpu)
        read(row_writer, case, device, gpu, *more)
        if len(heard) == 2 and not killed.is_set():  # both have measured, and have a next case
            killed.set()
            dask.processes["second"].kill()

    monkeypatch.setattr(RowWriter, "read", listen)
    (tmp_path / "met").mkdir()
    summary = run(dask.address, out, cases, MeetingGpu(seconds=0.003, folder=tmp_path / "met"))
    assert killed.is_set()
    assert (summary.cases, summary.complete, summary.gpus, summary.skipped) == (len(cases), True, 2, ())
    assert summary.gpu_busy_share > 0
    check_measured(out, cases, CompiledFamily())
    dataset = load(out)
    assert dataset.drift["gpu"].nunique() == 2  # both have measured
    assert set(dataset.drift["problem"]) == set(range(len(cases)))
    again = run(dask.address, out, cases, FaultyGpu())
    assert (again.measurements, again.complete) == (0, True)


@pytest.mark.slow
def test_a_config_that_kills_every_worker_is_a_row_and_the_rest_is_measured(dask, out, monkeypatch):
    monkeypatch.setattr(on_cluster, "TRIES", 2)
    dask.add("only")  # with a nanny, which starts it again
    family = FewFamily()
    valid = [config for config in family.space() if family.supports(config, CASES[0].problem, DEVICE) is None]
    culprit = valid[5]
    summary = run(dask.address, out, CASES[:1], FaultyGpu({culprit: "kills its supervisor"}), family)
    assert summary.complete
    row = check_measured(out, CASES[:1], family)[CASES[0].problem, culprit][1]
    assert row.status == "launch_failed"
    assert row.error == "2 dask workers or their GPUs were lost during it"


@pytest.mark.slow
def test_an_order_that_is_down_to_one_config_still_has_its_case_confirmed(dask, out, monkeypatch):
    """As where an earlier run got to all but one."""
    monkeypatch.setattr(on_cluster, "TRIES", 1)
    dask.add("only")
    family = FewFamily()
    (step,) = Exhaustive(family, DEVICE).next(CASES[:1], None)
    last = [config for config in step.configs if family.supports(config, CASES[0].problem, DEVICE) is None][-1]
    known = RunState({"fake": family}, CASES[:1], out)
    known.row_writer.origin = origin
    rows = [
        Measurement(CASES[0].problem, DEVICE.name, config, Status.OK, us)
        if (us := family.time_us(CASES[0].problem, config, timing_pass=1))
        else Measurement(CASES[0].problem, DEVICE.name, config, Status.LAUNCH_FAILED)
        for config in family.space()
        if config != last
    ]
    known.row_writer.add(CASES[0], DEVICE, rows)
    known.row_writer.flush()
    assert run(dask.address, out, CASES[:1], FaultyGpu({last: "kills its supervisor"}), family).complete
    found = check_measured(out, CASES[:1], family)
    assert found[CASES[0].problem, last][1].error == "1 dask workers or their GPUs were lost during it"


@pytest.mark.slow
def test_a_budget_brings_back_what_is_measured(dask, out, tmp_path):
    """The GPU gets stuck at the second case, and then the time is over."""
    start_workers(dask, "only")
    stuck_at, log = CASES[1].problem, tmp_path / "log"
    gpu = FaultyGpu({stuck_at: "never ends"}, log=log)
    summary = run(
        dask.address,
        out,
        CASES,
        gpu,
        budget_s=3600.0,
        clock=lambda: time.monotonic() + 9999.0 * (log.exists() and f"stuck {stuck_at}" in log.read_text()),
    )
    assert (summary.cases, summary.complete) == (1, False)
    family = CompiledFamily()
    refused = {c for c in family.space() if family.supports(c, stuck_at, DEVICE) is not None}
    assert {config for problem, config in rows_of(out) if problem == stuck_at} == refused  # what needs no GPU
    assert summary.measurements == len(load(out).measurements)
    assert run(dask.address, out, CASES, FaultyGpu()).complete
    check_measured(out, CASES, family)


def test_an_order_is_brought_back_when_its_time_is_over(tmp_path, monkeypatch):
    """On a GPU without dask that gets stuck at a config; then the time is over."""
    family, log = CompiledFamily(), tmp_path / "log"
    valid = [config for config in family.space() if family.supports(config, CASES[0].problem, DEVICE) is None]
    is_stuck = lambda: log.exists() and "stuck" in log.read_text()  # noqa: E731
    monkeypatch.setattr(remote_gpu, "time", SimpleNamespace(monotonic=lambda: 9999.0 if is_stuck() else 0.0))
    gpu = FaultyGpu({valid[5]: "never ends"}, log=log)
    remote = RemoteGpu(RunSettings("a run", gpu, {"fake": family}, PATIENT), "the only one", 1)
    try:
        report = remote.measure(Order(CASES[0], tuple(valid[:20]), CaseState(), None, seconds=60.0))
    finally:
        remote.close()
    measured = [row.config for row in report.rows]
    assert set(measured) <= set(valid[:5])  # the last answers may come too late
    assert len(measured) == len(set(measured))
    assert (report.over, report.refused, report.gpu) == (False, None, "the only one")


def test_cards_of_two_kinds_measure_all_cases_each(dask, out):
    start_workers(dask, "big", "small")
    summary = run(dask.address, out, CASES[:2], TwoKinds(seconds=0.001))
    assert (summary.cases, summary.complete) == (4, True)
    dataset = load(out)
    assert {spec.name for spec in dataset.devices} == {DEVICE.name, "small"}
    assert len(dataset.measurements.groupby(["device", "problem"])) == 4


@pytest.mark.slow
def test_an_adaptive_plan_is_asked_again_when_its_batch_is_measured(dask, out, monkeypatch):
    few = partial(Adaptive, share=0.1, first=2, ranker=partial(LightGBMRanker, trees=10, epochs=0))
    monkeypatch.setitem(plan.PLANS, "adaptive", few)
    start_workers(dask, "first", "second")
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
    monkeypatch.setattr(on_cluster, "CONNECT_SECONDS", 0.5)
    with pytest.raises(ForetuneError, match=r"no dask scheduler answers at tcp://127\.0\.0\.1:1"):
        collect_on_cluster([CompiledFamily()], CASES, "nowhere", "tcp://127.0.0.1:1")


def test_a_cluster_without_gpus_is_told_how_to_have_some(dask, out, monkeypatch):
    monkeypatch.setattr(on_cluster, "ALONE_SECONDS", 0.5)
    with pytest.raises(ForetuneError, match=r"no dask worker with a GPU. Start one: dask worker tcp://.* --res"):
        run(dask.address, out, CASES, FaultyGpu())


def test_a_gpu_that_cannot_be_opened_is_said(dask, out, monkeypatch):
    lost = on_cluster.DaskWorkers.lost

    def lose(known, address, trouble):
        lost(known, address, trouble)
        monkeypatch.setattr(on_cluster, "ALONE_SECONDS", 0.0)  # not before: nothing would be known of the worker

    monkeypatch.setattr(on_cluster.DaskWorkers, "lost", lose)
    start_workers(dask, "only")
    with pytest.raises(ForetuneError, match="cannot be used: RuntimeError: no CUDA today"):
        run(dask.address, out, CASES, NoGpu())
