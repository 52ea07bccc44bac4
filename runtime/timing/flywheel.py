"""Implements `FORETUNE_LOG=DIR`: each benchmark that tuning runs anyway is logged as a row of a dataset in DIR.

Rows are in `DIR/parts/RUN.jsonl` (see datasets/log_part.py), one file for each process and kernel, which
`foretune train --data h200 --data DIR` reads. The rows serve as training data. Logging never makes a launch fail: a
full disk, for example, causes one warning.
"""

from __future__ import annotations

import atexit
import datetime
import errno
import math
import os
import re
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from itertools import islice
from pathlib import Path
from traceback import walk_stack
from typing import TYPE_CHECKING, Any

from ...datasets import DeviceSpec, Family, ForetuneError, KernelConfig, Problem
from ...datasets.errors import check_path, shown
from ...datasets.forking import renew_in_children
from ...datasets.log_part import LOG_SUFFIX, LOGGED, TIMED_HOW, row_line, run_line
from ...datasets.manifest import MANIFEST, check_ours, read_manifest, write_manifest
from ...datasets.measurement import LONGEST_US, SHORTEST_US
from ..arguments import harmless, warn_once
from ..launching.kernel import Kernel
from ..launching.source_hash import hash_of_kernel
from ..launching.stub_driver import measures

if TYPE_CHECKING:
    import triton

#: The environment variable with the dataset's folder.
VARIABLE = "FORETUNE_LOG"
_NOT_LOGGED = ": some benchmarks are not logged"
#: How many frames of the stack are searched for the autotuner that runs a pruner.
_MOST_FRAMES = 16


@dataclass(frozen=True)
class Software:
    """The versions of the driver, torch and Triton, on which times depend; "" for one that is not installed."""

    driver: str
    torch: str
    triton: str

    @classmethod
    @cache
    def here(cls) -> Software:
        """Return this machine's versions of the driver, torch and triton, which are looked up once."""
        return cls(driver=_driver(), torch=_version_of("torch"), triton=_version_of("triton"))


def _driver() -> str:
    """Return the GPU driver's version from the file system, because asking the driver would initialize CUDA."""
    for path in ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version"):
        try:
            found = re.search(r"\b\d+(\.\d+)+", Path(path).read_text(errors="replace"))
        except OSError:
            continue
        if found:
            return found[0]
    return ""


def _version_of(package: str) -> str:
    """Return a package's version; "" if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # a package without metadata, built in place
        return str(getattr(sys.modules.get(package), "__version__", ""))


def is_logging() -> bool:
    """Return whether FORETUNE_LOG is set now."""
    return bool(os.environ.get(VARIABLE))


def log_row(
    family: Family | str,
    problem: Problem,
    config: KernelConfig,
    time_us: float | None,
    device: DeviceSpec,
    *,
    timed: str,
    source_hash: str | None = None,
) -> None:
    """Log the time of a config, if FORETUNE_LOG is set. Never raises.

    The caller makes sure that a GPU measured the time (see `stub_driver.measures`).

    Args:
        family: The kernel's family, or a name.
        problem: The problem that was timed.
        config: The config that was timed.
        time_us: The time in microseconds; None if the config failed.
        device: The device that it was timed on.
        timed: How it was timed: "cold" by Foretune's `Timer`, "autotuner" by `triton.autotune`, "warm" with a warm L2,
            "refined" in the calls of a running program. In training, times that are not cold have half the weight (see
            `Dataset.grid`).
        source_hash: The hash of the kernel that was timed (`source_that_ran`); the family's own if None.
    """
    if not is_logging():
        return
    folder = os.environ[VARIABLE]
    try:
        name = family if isinstance(family, str) else family.name
        if timed not in TIMED_HOW:
            raise ForetuneError(f"timed must be one of {', '.join(TIMED_HOW)} but is {shown(timed)}")
        if not all(size for _, size in problem.dims):
            return  # an empty problem runs no kernel
        if time_us is not None and not SHORTEST_US <= time_us <= LONGEST_US:
            time_us = None
        log = _log(folder, name, device, timed, source_hash or _source_of(family))
        log.append(row_line(problem, config, time_us))
    except Exception as error:  # noqa: BLE001 - logging never stops a launch
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        warn_once(f"{VARIABLE}: {shown(folder, 200)}: {why}", ": benchmarks are not logged there")


@dataclass
class _Log:
    """One log file of this process, to which `append` adds rows of one kernel source, device and way of timing."""

    path: Path
    head: bytes  # the first line, which describes the run
    is_begun: bool = False  # whether the head has been written

    def append(self, line: bytes) -> None:
        """Append a line with one write, so that a kill damages at most the last line.

        Raises `OSError` if the disk is full; the partial line is then removed.
        """
        with _guard:
            text = line if self.is_begun else self.head + line
            handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                before = os.fstat(handle).st_size
                if os.write(handle, text) < len(text):
                    os.ftruncate(handle, before)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(handle)
            self.is_begun = True


_guard: threading.Lock  # created by `renew`
_logs: dict[tuple[Any, ...], _Log] = {}
#: Before Triton 3.8, which does not report when tuning ends: each autotuner, its timings before, and what it will time.
_pending: list[tuple[weakref.ref[Any], Any, _Expected]] = []


def renew() -> None:
    """Forget all log files and pending benchmarks, at import and in a forked child (see `renew_in_children`).

    A child opens its own files; its parent logs the benchmarks that are pending.
    """
    global _guard
    _guard = threading.Lock()
    _logs.clear()
    _pending.clear()


renew_in_children(sys.modules[__name__])


def _log(folder: str, family: str, device: DeviceSpec, timed: str, source: str | None) -> _Log:
    """Return this process's log file for a kernel source, device and way of timing; create its folder if needed.

    Raises `ForetuneError` for a folder with other files or a sealed dataset, and `OSError` if it cannot be written.
    """
    key = (folder, family, device, timed, source)
    log = _logs.get(key)
    if log is None:
        directory = check_path(VARIABLE, folder).expanduser()
        directory.mkdir(parents=True, exist_ok=True)
        check_ours(directory)
        if not (directory / MANIFEST).exists():  # two processes at once write the same content
            write_manifest(directory, {"name": directory.name, "devices": [], "provenance": {}, "sealed": {}})
        elif read_manifest(directory)["sealed"]:
            raise ForetuneError("a sealed dataset must not change: choose another folder")
        parts = directory / "parts"  # after the manifest, so that other processes recognize the folder
        parts.mkdir(exist_ok=True)
        now = datetime.datetime.now(datetime.timezone.utc)
        run_id = f"{now:%Y%m%d-%H%M%S}-{os.urandom(6).hex()}"
        facts = {
            "family": family,
            "device": device.name,
            "plan": LOGGED,
            "timed": timed,
            **asdict(Software.here()),
        }
        facts |= {"date": now.isoformat(timespec="seconds")} | ({"kernel_source": source} if source else {})
        log = _logs.setdefault(key, _Log(parts / f"{run_id}{LOG_SUFFIX}", run_line(run_id, facts, device)))
    return log


def source_that_ran(family: Family | str, kernel: Any) -> str:
    """Return the source hash to log for a family when this `triton.jit` function ran.

    That is the family's own hash for a kernel of the package that declares the family, because these kernels are hashed
    together. For any other function it is the function's hash: often that is a user's kernel that has the family's
    knobs, and its times must not count as the family's.
    """
    package = type(family).__module__.rpartition(".")[0]
    own = _source_of(family) if package and f"{kernel.fn.__module__}.".startswith(f"{package}.") else None
    return own or hash_of_kernel(kernel)


def _source_of(family: Family | str) -> str | None:
    """Return the family's source hash; None if it has none or Triton is missing."""
    with suppress(Exception):
        return str(family.source_hash())  # type: ignore[union-attr]
    return None


# Measurements of Triton's own autotuners.


@dataclass(frozen=True)
class _Expected:
    """The configs that an autotuner will benchmark next in a thread; `log` logs their times."""

    family: Family | str
    problem: Problem
    device: DeviceSpec
    values: Mapping[int, KernelConfig]  # by the id of the triton.Config
    kept: tuple[Any, ...]  # the configs, kept alive so that no id is reused
    source_hash: str | None
    timed: str  # see `log_row`

    def log(self, timings: Mapping[triton.Config, Any]) -> None:
        """Log the times that an autotuner measured; none of them if one is of a config that was not announced."""
        if not timings or not all(id(config) in self.values for config in timings):
            return
        for config, timing in timings.items():
            time_ms = float(timing[0] if isinstance(timing, (list, tuple)) else timing)
            log_row(
                self.family,
                self.problem,
                self.values[id(config)],
                time_ms * 1e3 if math.isfinite(time_ms) else None,
                self.device,
                timed=self.timed,
                source_hash=self.source_hash,
            )


_thread = threading.local()


def expect(
    family: Family | str,
    problem: Problem,
    device: DeviceSpec,
    configs: Sequence[triton.Config],
    values: Sequence[KernelConfig],
    *,
    timed: str,
) -> None:
    """Prepare to log the configs that the autotuner now pruning in this thread will benchmark. Never raises.

    Does nothing without FORETUNE_LOG. From Triton 3.8 on, its listener reports the timings. With earlier releases, the
    timings of a key are read from the autotuner when the next key is pruned or the process ends.

    Args:
        family: The kernel's family, or a name.
        problem: The launch's problem.
        device: The current device.
        configs: The configs that will be benchmarked.
        values: The same configs with the family's knobs.
        timed: How they are timed, as for `log_row`.
    """
    if not is_logging():
        return
    with harmless(VARIABLE, _NOT_LOGGED):
        by_id = {id(config): value for config, value in zip(configs, values, strict=True)}
        found, _thread.due = launching_autotuner(), None
        if not measures(found):
            return
        source = None if found is None else source_that_ran(family, Kernel(found).jit)
        due = _Expected(family, problem, device, by_id, tuple(configs), source, timed)
        if _listens():
            _thread.due = due if len(configs) > 1 else None  # a single config is not benchmarked
            return
        _read_pending()
        if found is not None:
            _pending.append((weakref.ref(found), getattr(found, "configs_timings", None), due))


class _Listener:
    """A listener of Triton's benchmarks: calls the previous listener, then logs the times of the announced configs."""

    def __init__(self, before: Any) -> None:
        self.before = before

    def __call__(self, **report: Any) -> None:
        if self.before is not None:
            self.before(**report)
        due, _thread.due = getattr(_thread, "due", None), None
        if due is not None and not report.get("cache_hit"):
            with harmless(VARIABLE, _NOT_LOGGED):
                due.log(report["configs_timings"])


def _listens() -> bool:
    """Register Foretune's listener of benchmarks with Triton; return whether this Triton supports listeners."""
    from triton import knobs

    if not hasattr(knobs.autotuning, "listener"):
        return False
    if not isinstance(knobs.autotuning.listener, _Listener):
        knobs.autotuning.listener = _Listener(knobs.autotuning.listener)
    return True


def _read_pending() -> None:
    """Log the new timings of autotuners whose benchmarks were announced earlier, with `expect`, in FORETUNE_LOG."""
    while _pending:
        autotuner, before, due = _pending.pop()
        timings = getattr(autotuner(), "configs_timings", None)
        if timings is not None and timings is not before:
            due.log(timings)


atexit.register(_read_pending)


def launching_autotuner() -> Any:
    """Return the autotuner whose method `run` is on the call stack; None if there is none.

    For an attached autotuner, this is the original autotuner, not its copy that prunes and keeps no timings.
    """
    from triton.runtime.autotuner import Autotuner

    for frame, _ in islice(walk_stack(sys._getframe(1)), _MOST_FRAMES):
        if frame.f_code.co_name == "run" and isinstance(caller := frame.f_locals.get("self"), Autotuner):
            return caller
    return None
