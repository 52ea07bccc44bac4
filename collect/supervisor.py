"""`Supervisor`: the parent's view of one GPU. It starts and restarts the process that measures there."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

from ..datasets import TIMED, Case, DeviceSpec, Status
from .case_tasks import CaseTasks
from .processes import Child, Watch
from .runner import Trial
from .worker import Lost, Message, Prepare

#: The most tasks that are out, and the number below which more are sent, so that a GPU never waits for a message. 128
#: tasks are half a second of work, and fit into a pipe, so that sending never blocks.
WINDOW, LOW = 128, 64
#: A GPU is given up after it was lost this many times without one answered task in between.
LOSSES = 5


@dataclass(frozen=True)
class Limits:
    """Time limits in seconds: a process that sends no message for longer is considered stuck.

    Attributes:
        open_s: While it starts: it imports torch, perhaps from a slow disk, and makes a CUDA context.
        prepare_s: While it makes the inputs of a problem.
        task_s: While it works on another task.
    """

    open_s: float = 300.0
    prepare_s: float = 120.0
    task_s: float = 30.0


class Owner(Protocol):
    """The interface of the object that a supervisor reports to, which also chooses the cases."""

    def idle(self, supervisor: Supervisor) -> None:
        """Called when the supervisor's process is ready and has no case; `supervisor.give` can give it one."""

    def done(self, supervisor: Supervisor, work: CaseTasks) -> None:
        """Called when the case of `work` is complete or given up."""

    def read(self, supervisor: Supervisor, case: Case, probe_us: float) -> None:
        """Called with a time of the drift probe, in microseconds, that was read while `case` was measured."""

    def retired(self, supervisor: Supervisor, work: CaseTasks | None) -> None:
        """Called when the GPU is given up because of `supervisor.trouble`; `work` is its unfinished case, if any."""


class Supervisor:
    """Sends the process that measures on one GPU the tasks of one case after the other, and restarts it when it ends.

    Args:
        start: Starts the process.
        watch: Watches the process.
        owner: Gets reports about cases and readings.
        limits: When a process is considered stuck.

    Attributes:
        device: The GPU; None until it was opened once.
        work: The case that is being measured.
        met: Signatures of problems whose binaries the process has, or is about to have.
        trouble: What ended the last process.
        busy_s: Seconds that the GPU spent on tasks.
        lost_s: The part of them for tasks that failed.
        began: When the first task was sent, by `time.monotonic`.
        retired: Whether the GPU was given up.
    """

    def __init__(self, start: Callable[[], Child], watch: Watch, owner: Owner, limits: Limits) -> None:
        self._start_child, self._watch, self._owner, self._limits = start, watch, owner, limits
        self.device: DeviceSpec | None = None
        self.work: CaseTasks | None = None
        self.met: set[Hashable] = set()
        self._last: Case | None = None  # the previous case, until the next one has begun
        self.trouble = ""
        self.busy_s = self.lost_s = 0.0
        self.began: float | None = None
        self.retired = False
        self._losses = 0
        self._start()

    def _start(self) -> None:
        """Start a process in place of the last one, if any."""
        self._ready = self._overdue = False
        self.met = {self.work.signature} if self.work else set()
        self._lost: str | None = None
        self._heard = time.monotonic()
        self._child = self._start_child()
        self._watch.add(self._child, self._received, self._ended)

    @property
    def idle(self) -> bool:
        """Whether the process is ready and has no case to measure."""
        return self._ready and self.work is None and not self.retired

    def give(self, work: CaseTasks) -> None:
        """Start to measure the case of `work`."""
        self.work = work
        self.met.add(work.signature)
        self.proceed()

    def proceed(self) -> None:
        """Send the tasks that are ready; if the case is complete or given up, report that to the owner."""
        self._feed()
        work = self.work
        if work is not None and work.over:
            self.work, self._last = None, work.case
            self._owner.done(self, work)
            if self.idle:
                self._owner.idle(self)

    def _feed(self) -> None:
        """Send tasks until the process has `WINDOW` unanswered ones, if it has fewer than `LOW`."""
        work = self.work
        if work is None or not self._ready or work.out >= LOW:
            return
        waited = not work.out
        if tasks := work.take(WINDOW - work.out):
            if waited:
                self._heard = time.monotonic()
                self.began = self.began or self._heard
            self._child.send(tasks)

    def close(self) -> None:
        """End the process, and do not restart it."""
        self._watch.dismiss(self._child)

    def check(self) -> None:
        """Kill the process if it has sent nothing for too long. Call it regularly."""
        if (limit_s := self._limit_s()) is None or self._overdue:
            return
        if time.monotonic() - self._heard > limit_s:
            self._overdue = True
            self._watch.kill(self._child)

    def _limit_s(self) -> float | None:
        """Return after how many seconds without a message the process is stuck; None if it has nothing to do."""
        if not self._ready:
            return self._limits.open_s
        task = self.work.at_hand if self.work else None
        if task is None:
            return None
        return self._limits.prepare_s if isinstance(task, Prepare) else self._limits.task_s

    def _received(self, message: Message) -> None:
        """Handle a message of the process: its opened device, the loss of the device, or the answer to a task."""
        self._heard = time.monotonic()
        if isinstance(message, DeviceSpec):
            self.device, self._ready = message, True
            if self.idle:
                self._owner.idle(self)
        elif isinstance(message, Lost):
            self._lost = message.error
        elif self.work is not None:
            self._count(message)
            if message.probe_us is not None:
                self._owner.read(self, self.work.case, message.probe_us)
                if self._last is not None:  # it is also the last reading of the previous case
                    self._owner.read(self, self._last, message.probe_us)
            self._last = None
            self.work.answered(message)
        self.proceed()

    def _count(self, trial: Trial) -> None:
        """Add the time of a task, which `trial` answers, to the supervisor's totals."""
        self.busy_s += trial.seconds
        self._losses = 0
        if trial.status is not None and trial.status not in TIMED:
            self.lost_s += trial.seconds

    def _ended(self, exitcode: int | None) -> None:
        """Handle the end of the process: start a new one, or give up the GPU after `LOSSES` losses in a row.

        The exit code is None if the process cannot be killed; the GPU is then given up at once.
        """
        seconds = time.monotonic() - self._heard
        self.lost_s += seconds
        # A process that cannot be killed still holds the GPU, so that no other process could use it.
        self._losses = self._losses + 1 if exitcode is not None else LOSSES
        forgivable = exitcode == -signal.SIGKILL and not self._overdue
        trial = self._last_trial(exitcode, seconds)
        self.trouble = trial.error or ""
        if self._ready and self.work is not None:
            self.work.died(trial, forgivable=forgivable)
        if self._losses < LOSSES:
            self._start()
            self.proceed()
        else:
            work, self.work = self.work, None
            self.retired = True
            if exitcode is None:
                self.trouble += "; its process cannot be killed"
            self._owner.retired(self, work)

    def _last_trial(self, exitcode: int | None, seconds: float) -> Trial:
        """Return a failed trial, with the reason, for the task that ran when the process ended after `seconds`."""
        if self._overdue:
            return Trial(Status.TIMEOUT, error=f"stopped after {seconds:.0f} s without a result")
        if self._lost is not None:
            return Trial(Status.LAUNCH_FAILED, error=self._lost)
        return Trial(Status.LAUNCH_FAILED, error=f"the measuring process ended with exit code {exitcode}")
