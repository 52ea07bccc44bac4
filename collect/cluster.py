"""A run on the GPUs of a cluster. dask.distributed transports orders, and reports workers that come, go or die.

It uses dask's futures, because a task that always kills its worker would hang in joblib's dask backend. Start one
worker for each GPU with `dask worker tcp://HOST:8786 --nthreads 16 --resources "GPU=1"`; as many processes compile
there as it has threads. A worker supervises the processes that use the GPU (see `remote_gpu`). Therefore, it dies with
its host or when memory runs out, but hardly ever because of a kernel. Another worker then measures its orders.
"""

from __future__ import annotations

import time
import uuid
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..datasets import Case, DeviceSpec, ForetuneError, KernelConfig, Measurable, Measurement, Status
from ..datasets.errors import abridged
from .case_tasks import TRIES
from .cases import SCAN
from .compiling import binary_if_able, signature_of
from .processes import Interrupt
from .remote_gpu import Order, Report, RunSettings, close, introduce, measure, stop
from .row_writer import run_provenance
from .run_state import RunState, started_run
from .runner import DeviceLostError
from .summary import Effort, Summary
from .worker import CudaGpu, Probe, choose_probe

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .run_state import RunOptions

#: How often, in seconds, to look for workers that came or went, and after how many seconds without any to give up.
LOOK_SECONDS, ALONE_SECONDS = 1.0, 60.0


class DaskWorkers:
    """Keeps track of the dask workers that have a GPU, as they come and go.

    Args:
        client: dask's client.
        settings: The settings of the run.

    Attributes:
        devices: The GPUs of the workers that are present, by worker address.
        troubles: Why a worker cannot be used, by address.
        most: The largest number of GPUs at a time.
    """

    def __init__(self, client: Any, settings: RunSettings) -> None:
        self._client, self._settings = client, settings
        self._introductions: dict[str, Any] = {}  # futures, by worker address
        self.devices: dict[str, DeviceSpec] = {}
        self.troubles: dict[str, str] = {}
        self.most = 0
        self._next_look = 0.0
        self._last_present = time.monotonic()  # when there was a usable worker

    @property
    def is_complete(self) -> bool:
        """Whether all workers that are present have reported their device."""
        return bool(self.devices) and not self._introductions

    def lost(self, address: str, trouble: str) -> None:
        """Record that a worker's GPU cannot be used, because of `trouble`, so that it gets no further orders."""
        self.devices.pop(address, None)
        self.troubles[address] = trouble

    def look(self) -> None:
        """Ask new workers for their devices, and remove workers that are gone. Call it regularly.

        Raises:
            ForetuneError: There was no worker with a GPU for a minute, or a worker fails for another reason.
        """
        if (now := time.monotonic()) < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        workers = self._client.scheduler_info()["workers"]
        present = {address for address, worker in workers.items() if worker["resources"].get("GPU")}
        for address in self._introductions.keys() - present:
            self._introductions.pop(address).cancel()
        for address in self.devices.keys() - present:
            del self.devices[address]
        for address in present - self._introductions.keys() - self.devices.keys() - self.troubles.keys():
            self._introductions[address] = self._client.submit(
                introduce, self._settings, workers=[address], resources={"GPU": 1}, pure=False
            )
        self._take_introductions()
        if present - self.troubles.keys():
            self._last_present = now
        elif now - self._last_present > ALONE_SECONDS:
            why = "".join(f"; {address} cannot be used: {trouble}" for address, trouble in self.troubles.items())
            raise ForetuneError(
                f"there is no dask worker with a GPU. Start one: dask worker {self._client.scheduler.address} "
                f'--resources "GPU=1"{why}'
            )

    def _take_introductions(self) -> None:
        """Add the devices that new workers have reported."""
        for address, future in list(self._introductions.items()):
            if future.done():
                del self._introductions[address]
                if future.status == "finished":
                    self.devices[address] = future.result()
                elif isinstance(error := future.exception(), DeviceLostError):
                    self.lost(address, str(error))
                elif address in self._client.scheduler_info()["workers"]:
                    raise ForetuneError(f"the dask worker {address} cannot measure: {error!r}")
        self.most = max(self.most, len(self.devices))


#: How many orders each GPU has: one that it measures, and one so that it does not wait for the next.
ORDERS_PER_GPU = 2
#: Into how many orders one that kills every worker is divided, repeatedly, until the config that does so is found.
PIECES = 32
#: How many seconds to wait for the scheduler.
CONNECT_SECONDS = 10.0
#: How many seconds to wait for results when a run is stopped.
STOP_SECONDS = 30.0


def collect_on_cluster(
    families: Sequence[Measurable],
    cases: Sequence[Case],
    out: Path | str,
    scheduler: str,
    *,
    resume: bool = True,
    **options: Unpack[RunOptions],
) -> Summary:
    """Measure cases on the GPUs of a dask cluster, and append the results to the dataset in `out` on this machine.

    GPUs of one name share the cases; each name measures all cases.

    Args:
        families: The families to measure.
        cases: Problems of these families.
        out: The dataset's folder.
        scheduler: The address of the scheduler, such as tcp://HOST:8786.
        resume: Whether `out` may hold a dataset already.
        options: See `RunOptions`.

    Raises:
        ForetuneError: An argument is wrong (see `run_state.started_run`); the dataset cannot be written; no scheduler
            answers; or there is no worker with a GPU for a minute.
    """
    with started_run(families, cases, out, resume=resume, **options) as state, connected(scheduler) as client:
        run = ClusterCampaign(client, RunSettings(uuid.uuid4().hex, CudaGpu(0), state.families))
        state.row_writer.origin = run.origin
        return run.measure(state)


def connected(scheduler: str) -> Any:
    """Return a dask client that is connected to a scheduler.

    Raises:
        ForetuneError: dask is not installed, or no scheduler answers.
    """
    try:
        from distributed import Client
    except ImportError:
        raise ForetuneError('measuring on a cluster needs dask: pip install "foretune[cluster]"') from None
    try:
        return Client(scheduler, timeout=CONNECT_SECONDS)
    except (OSError, TimeoutError, ValueError) as error:
        raise ForetuneError(f"no dask scheduler answers at {scheduler}: {error}") from None


@dataclass
class _Cut:
    """The state of a case that killed every worker it was sent to, and was divided into pieces to find the cause."""

    left: int = 0  # how many pieces are not done yet
    given_up: bool = False


@dataclass(frozen=True)
class _Job:
    """An `Order` (a case to measure, or a part of it) for GPUs of one name, and the worker that measures it.

    Attributes:
        device: The GPU.
        order: The order.
        cut: The divided case that the order is a piece of; None if it is not.
        deaths: How many workers died while they had it.
        address: The address of the worker that has it.
    """

    device: DeviceSpec
    order: Order
    cut: _Cut | None = None
    deaths: int = 0
    address: str = ""

    @property
    def case(self) -> Case:
        """The case that the order measures."""
        return self.order.case

    @property
    def is_suspect(self) -> bool:
        """True if the order may kill workers; its worker then gets no other order, so that the cause is clear."""
        return self.deaths > 0 or self.cut is not None


class ClusterCampaign:
    """Measures the cases of one run on a cluster's GPUs. `measure` may be called once.

    A case, or a part of it, is sent to a dask worker as an `Order`; the worker returns a `Report`.
    """

    def __init__(self, client: Any, settings: RunSettings) -> None:
        self._client, self._settings, self._workers = client, settings, DaskWorkers(client, settings)
        self._state: RunState
        self._probes: dict[str, Probe | None] = {}  # by device name
        self._met: defaultdict[str, set[Hashable]] = defaultdict(set)  # signatures of problems, by worker address
        self._jobs: dict[Any, _Job] = {}  # by future
        self._waiting: deque[_Job] = deque()  # to be sent before any new case
        self._began = float("inf")
        self._spent = dict.fromkeys(("busy", "lost", "compile"), 0.0)  # seconds

    def origin(self, family: Measurable, device: DeviceSpec) -> dict[str, Any]:
        """Return the provenance of a family's measurements on a device, as one of the device's workers reports it."""
        address = next(address for address, spec in self._workers.devices.items() if spec.name == device.name)
        reported: dict[str, dict[str, Any]] = self._client.run(run_provenance, family, device, workers=[address])
        return reported[address]

    def measure(self, state: RunState) -> Summary:
        """Run until all cases of `state` are complete, and return a summary of what was done.

        Raises:
            ForetuneError: As `collect_on_cluster` does, or the dataset cannot be written.
        """
        self._state = state
        with Interrupt() as interrupt:
            try:
                if state.cases:
                    self._run(interrupt)
            finally:
                state.row_writer.flush()
                self._client.run(close, self._settings.run, on_error="ignore")
        state.skipped += [f"worker {address}: {trouble}" for address, trouble in self._workers.troubles.items()]
        return Summary.of(state, self._effort(), interrupted=interrupt.requested)

    def _run(self, interrupt: Interrupt) -> None:
        while not (interrupt.requested or self._state.time_is_over):
            self._workers.look()
            self._recall()
            self._submit()
            if self._workers.is_complete and not (self._jobs or self._waiting):
                return
            self._receive()
            self._state.row_writer.flush_due()
        self._client.run(stop, self._settings.run, on_error="ignore")
        deadline = time.monotonic() + STOP_SECONDS
        while self._jobs and time.monotonic() < deadline:
            self._receive()

    # Sending orders.

    def _submit(self) -> None:
        """Send orders to the workers that have fewer than `ORDERS_PER_GPU`."""
        for address, device in self._workers.devices.items():
            there = [job for job in self._jobs.values() if job.address == address]
            while len(there) < ORDERS_PER_GPU and not any(job.is_suspect for job in there):
                job = self._next(address, device, alone=not there)
                if job is None:
                    break
                self._met[address].add(signature_of(self._state.family(job.case), job.case.problem, device))
                job = replace(job, address=address)
                future = self._client.submit(
                    measure, self._settings, job.order, workers=[address], resources={"GPU": 1}, pure=False
                )
                self._jobs[future] = job
                there.append(job)
                self._began = min(self._began, time.monotonic())

    def _next(self, address: str, device: DeviceSpec, *, alone: bool) -> _Job | None:
        """Return the next order for the worker at an address; None if there is none, or none yet.

        An order that may kill the worker is returned only if the worker has no other order (`alone`).
        """
        for job in self._waiting:
            if job.device.name == device.name and (alone or not job.is_suspect):
                self._waiting.remove(job)
                return job
        while step := self._state.take(device, self._met[address], len(self._workers.devices)):
            if self._state.is_known(step, device):
                self._state.done(step.case, device, was_idle=True)
            else:
                self._state.report(step.case)
                return _Job(device, self._order(step.case, step.configs, device))
        return None

    def _order(self, case: Case, configs: Sequence[KernelConfig], device: DeviceSpec) -> Order:
        if device.name not in self._probes:
            self._probes[device.name] = choose_probe(self._state.families, self._state.cases, device)
        known, seconds = self._state.case_state(case, device), self._state.seconds_left
        return Order(case, tuple(configs), known, self._probes[device.name], seconds)

    # Receiving reports.

    def _receive(self) -> None:
        """Handle the orders that have ended, after waiting a while for the first one."""
        from distributed import wait

        if not self._jobs:
            time.sleep(LOOK_SECONDS / 10)
            return
        try:
            done = wait(list(self._jobs), timeout=LOOK_SECONDS, return_when="FIRST_COMPLETED").done
        except TimeoutError:
            return
        for future in done:
            self._ended(self._jobs.pop(future), future)

    def _recall(self) -> None:
        """Cancel the orders of workers that are gone, so that other workers get them."""
        gone = [future for future, job in self._jobs.items() if job.address not in self._workers.devices]
        for future in gone:
            future.cancel()
            self._died(self._jobs.pop(future))

    def _ended(self, job: _Job, future: Any) -> None:
        """Handle the end of a job: `future` is done, with a report, a lost GPU, a dead worker, or an error."""
        from distributed import KilledWorker

        if future.status == "finished":
            self._reported(job, future.result())
            return
        error = future.exception() if future.status == "error" else None
        if isinstance(error, DeviceLostError):
            self._workers.lost(job.address, str(error))
            self._died(job)
        elif isinstance(error, KilledWorker) or future.status in ("lost", "cancelled"):
            self._died(job)
        else:
            raise ForetuneError(f"the dask worker {job.address} cannot measure: {error!r}")

    def _died(self, job: _Job) -> None:
        """Put the order of a job whose worker was lost back in the queue; after `TRIES` lost workers, divide it."""
        if job.deaths + 1 < TRIES:
            self._waiting.append(replace(job, deaths=job.deaths + 1))
        else:
            self._cut(job, f"{TRIES} dask workers or their GPUs were lost during it")

    def _reported(self, job: _Job, report: Report) -> None:
        """Store the results in a job's report, and record whether its case is complete or given up."""
        state, family = self._state, self._state.family(job.case)
        if report.source_hash != family.source_hash():
            raise ForetuneError(
                f"the worker {report.gpu} has another version of {family.name}'s kernel (source hash "
                f"{report.source_hash}; here {family.source_hash()}): install the same Foretune there"
            )
        self._record(job, report.rows)
        for ago_s, time_us in report.readings:
            state.row_writer.read(job.case, job.device, report.gpu, time_us, ago_s)
        for what, seconds in report.spent.items():
            self._spent[what] += seconds
        if report.refused is not None:
            self._given_up(job, report.refused, deadly=report.deadly)
        elif report.over:
            self._done(job)

    def _record(self, job: _Job, rows: Sequence[Measurement]) -> None:
        """Add rows of a job to the state of its case and to the dataset."""
        known = self._state.case_state(job.case, job.device)
        for row in rows:
            known.add(row.config, row.timing_pass, row.time_us)
        if rows:
            self._state.row_writer.add(job.case, job.device, rows)

    def _done(self, job: _Job) -> None:
        """Record that a job's order is complete, and with it its case unless that was divided.

        After the last piece of a divided case, queue an order that times its leading configs again.
        """
        if job.cut is None:
            self._state.done(job.case, job.device)
            return
        job.cut.left -= 1
        if (
            job.cut.left == 0 and not job.cut.given_up
        ):  # everything is scanned, and the leading configs are left to confirm
            self._waiting.append(_Job(job.device, self._order(job.case, (), job.device)))

    def _given_up(self, job: _Job, reason: str, *, deadly: bool) -> None:
        """Give up the case that an order measures, with all other pieces if it was divided.

        Args:
            job: The order.
            reason: Why.
            deadly: Whether processes died at the case.
        """
        if job.cut is not None:
            if job.cut.given_up:
                return
            job.cut.given_up = True  # rows of pieces that are out are kept; the other pieces are dropped
            self._waiting = deque(other for other in self._waiting if other.cut is not job.cut)
        self._state.given_up(job.case, job.device, reason, deadly=deadly)

    def _cut(self, job: _Job, reason: str) -> None:
        """Divide a job whose order kills workers; if it has one config, record that as failed for `reason`."""
        configs = self._left(job)
        cut = job.cut or _Cut(left=1)
        job = replace(job, cut=cut)
        if not configs or cut.given_up:
            self._given_up(job, reason, deadly=False)
        elif len(configs) == 1:
            row = Measurement(
                problem=job.case.problem,
                device=job.device.name,
                config=configs[0],
                status=Status.LAUNCH_FAILED,
                timing_pass=SCAN,
                error=abridged(reason),
            )
            self._record(job, [row])
            self._done(job)
        else:
            size = -(-len(configs) // PIECES)
            pieces = [configs[start : start + size] for start in range(0, len(configs), size)]
            cut.left += len(pieces) - 1
            orders = [replace(self._order(job.case, p, job.device), confirm=False) for p in pieces]
            self._waiting += (_Job(job.device, order, cut) for order in orders)

    def _left(self, job: _Job) -> tuple[KernelConfig, ...]:
        """Return the configs of a job's order that are not scanned yet and can run the problem."""
        family, known = self._state.family(job.case), self._state.case_state(job.case, job.device)
        return tuple(
            config
            for config in job.order.configs
            if config not in known.scanned_us and binary_if_able(family, config, job.case.problem, job.device)
        )

    def _effort(self) -> Effort:
        """Return the GPU and compile time that the run has taken, over all workers."""
        gpu_s = self._workers.most * max(time.monotonic() - self._began, 0.0)
        return Effort(self._workers.most, gpu_s, self._spent["busy"], self._spent["lost"], self._spent["compile"])
