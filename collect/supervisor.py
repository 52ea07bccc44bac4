"""One GPU under supervision: the process that measures on it, and its successors."""

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

#: Tasks that are out at most, and the number below which more are sent: a message need not wait for a GPU, nor a
#: GPU for a message. 128 tasks are half a second of work and fit into a pipe, so that sending never blocks.
WINDOW, LOW = 128, 64
#: A GPU is given up when it was lost so many times without as much as a problem's inputs being made in between.
LOSSES = 5


@dataclass(frozen=True)
class Limits:
    """Seconds before a process that says nothing is taken to be stuck."""

    open_s: float = 300.0  # import torch from a slow disk, make a CUDA context
    prepare_s: float = 120.0
    task_s: float = 30.0


class Owner(Protocol):
    """Whom a supervisor tells what happens."""

    def idle(self, supervisor: Supervisor) -> None:
        """The supervisor is ready and has no work: give it some, or not."""

    def done(self, supervisor: Supervisor, work: CaseTasks) -> None:
        """All of the work is known, or it was given up."""

    def read(self, supervisor: Supervisor, case: Case, probe_us: float) -> None:
        """The drift probe took so long while the supervisor was at this case."""

    def retired(self, supervisor: Supervisor, work: CaseTasks | None) -> None:
        """The supervisor will not work any more, because of its `trouble`; of this work it has not done all."""


class Supervisor:
    """Gives a process on one GPU the tasks of one case after the other, and starts it again when it ends."""

    def __init__(self, start: Callable[[], Child], watch: Watch, owner: Owner, limits: Limits) -> None:
        self._start_child, self._watch, self._owner, self._limits = start, watch, owner, limits
        self.device: DeviceSpec | None = None  # known from the first opening on
        self.work: CaseTasks | None = None
        self.met: set[Hashable] = set()  # signatures of problems whose binaries the process has, or is about to have
        self._last: Case | None = None  # the one before, until the next one has begun
        self.trouble = ""  # what ended the last process
        self.busy_s = self.lost_s = 0.0  # at tasks, and at those that came to nothing
        self.began: float | None = None  # when the first task was sent, as time.monotonic() says
        self.retired = False
        self._losses = 0
        self._start()

    def _start(self) -> None:
        self._ready = self._overdue = False
        self.met = {self.work.signature} if self.work else set()
        self._lost: str | None = None
        self._heard = time.monotonic()
        self._child = self._start_child()
        self._watch.add(self._child, self._received, self._ended)

    @property
    def idle(self) -> bool:
        """Whether it could take work."""
        return self._ready and self.work is None and not self.retired

    def give(self, work: CaseTasks) -> None:
        """Begins with a case."""
        self.work = work
        self.met.add(work.signature)
        self.proceed()

    def proceed(self) -> None:
        """Sends the tasks that there are, and asks for other work when this is over."""
        self._feed()
        work = self.work
        if work is not None and work.over:
            self.work, self._last = None, work.case
            self._owner.done(self, work)
            if self.idle:
                self._owner.idle(self)

    def _feed(self) -> None:
        """As far as the window goes."""
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
        """Ends the process, for good."""
        self._watch.dismiss(self._child)

    def check(self) -> None:
        """Kill a process that has sent nothing for too long. To be called now and then."""
        if (limit_s := self._limit_s()) is None or self._overdue:
            return
        if time.monotonic() - self._heard > limit_s:
            self._overdue = True
            self._watch.kill(self._child)

    def _limit_s(self) -> float | None:
        if not self._ready:
            return self._limits.open_s
        task = self.work.at_hand if self.work else None
        if task is None:
            return None
        return self._limits.prepare_s if isinstance(task, Prepare) else self._limits.task_s

    def _received(self, message: Message) -> None:
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
                if self._last is not None:  # and it is the last reading of the case before
                    self._owner.read(self, self._last, message.probe_us)
            self._last = None
            self.work.answered(message)
        self.proceed()

    def _count(self, trial: Trial) -> None:
        self.busy_s += trial.seconds
        self._losses = 0
        if trial.status is not None and trial.status not in TIMED:
            self.lost_s += trial.seconds

    def _ended(self, exitcode: int | None) -> None:
        seconds = time.monotonic() - self._heard
        self.lost_s += seconds
        # A process that cannot be killed still holds the GPU: no other could use it.
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
        if self._overdue:
            return Trial(Status.TIMEOUT, error=f"not over after {seconds:.0f} s")
        if self._lost is not None:
            return Trial(Status.LAUNCH_FAILED, error=self._lost)
        return Trial(Status.LAUNCH_FAILED, error=f"the measuring process ended with exit code {exitcode}")
