"""`FORETUNE_LOG=DIR`: every benchmark that tuning does anyway becomes a row of a dataset in DIR, to learn from.

Rows are in `DIR/parts/RUN.jsonl` (see datasets/log_part.py), a file for each process and kernel, so that
`foretune train --data h200 --data DIR` reads them. No launch fails because of them: a full disk is one warning.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...datasets import DeviceSpec, Family, ForetuneError, KernelConfig, Problem
from ...datasets.errors import check_path, shown
from ...datasets.forking import renew_in_children
from ...datasets.log_part import LOG_SUFFIX, LOGGED, TIMED_HOW, row_line, run_line
from ...datasets.manifest import MANIFEST, check_ours, read_manifest, write_manifest
from ...datasets.measurement import LONGEST_US, SHORTEST_US
from ..arguments import warn_once
from ..launching.kernel import Kernel
from ..launching.source_hash import hash_of_kernel
from ..launching.stub_driver import measures

if TYPE_CHECKING:
    import triton

VARIABLE = "FORETUNE_LOG"
#: How far up a pruner looks for the autotuner that runs it.
_MOST_FRAMES = 16


@dataclass(frozen=True)
class Software:
    """What a time depends on beside the kernel, the problem and the card; "" for what is not here."""

    driver: str
    torch: str
    triton: str

    @classmethod
    def here(cls) -> Software:
        return _software()


@lru_cache(maxsize=1)
def _software() -> Software:
    return Software(driver=_driver(), torch=_version_of("torch"), triton=_version_of("triton"))


def _driver() -> str:
    """Read from the system: asking the driver itself would begin CUDA."""
    for path in ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version"):
        try:
            found = re.search(r"\b\d+(\.\d+)+", Path(path).read_text(errors="replace"))
        except OSError:
            continue
        if found:
            return found[0]
    return ""


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # built in place: then it is known once it is imported
        return str(getattr(sys.modules.get(package), "__version__", ""))


def is_logging() -> bool:
    """Whether rows are wanted, now."""
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
    """Log the time of a config, or that it failed (None); nothing without FORETUNE_LOG. Never raises.

    The caller has measured it (see `stub_driver.measures`).

    Args:
        family: The kernel's family, or a name.
        problem: What was timed.
        config: What was timed.
        time_us: Microseconds.
        device: Where.
        timed: How: "cold" as our `Timer` does, "autotuner" as `triton.autotune` does, "warm" with a warm L2. When a
            ranker learns, times that are not cold count for half (see `Dataset.grid`).
        source_hash: That of the kernel that was timed (`source_that_ran`); the family's own if left out.
    """
    if not is_logging():
        return
    folder = os.environ[VARIABLE]
    try:
        name = family if isinstance(family, str) else family.name
        if timed not in TIMED_HOW:
            raise ForetuneError(f"timed must be one of {', '.join(TIMED_HOW)} but is {shown(timed)}")
        if not all(size for _, size in problem.dims):
            return  # nothing was computed
        if time_us is not None and not SHORTEST_US <= time_us <= LONGEST_US:
            time_us = None
        log = _log(folder, name, device, timed, source_hash or _source_of(family))
        log.append(row_line(problem, config, time_us))
    except Exception as error:  # noqa: BLE001 - no trouble of ours stops a launch
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        warn_once(f"{VARIABLE}: {shown(folder, 200)}: {why}", ": benchmarks are not logged there")


@dataclass
class _Log:
    """One file: of a process, a kernel of one source, a device and a way of timing."""

    path: Path
    head: bytes
    is_begun: bool = False

    def append(self, line: bytes) -> None:
        """One write a line, so that a kill tears at most the last; of a full disk's half a row nothing stays."""
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


_guard: threading.Lock  # made by `renew`
_logs: dict[tuple[Any, ...], _Log] = {}
#: Before Triton 3.8: autotuners that nobody tells when they are done, what they had measured before, and what is due.
_pending: list[tuple[weakref.ref[Any], Any, _Expected]] = []


def renew() -> None:
    """See `renew_in_children`: a forked child has files of its own, and what is due is its parent's to log."""
    global _guard
    _guard = threading.Lock()
    _logs.clear()
    _pending.clear()


renew_in_children(sys.modules[__name__])


def _log(folder: str, family: str, device: DeviceSpec, timed: str, source: str | None) -> _Log:
    key = (folder, family, device, timed, source)
    log = _logs.get(key)
    if log is None:
        directory = check_path(VARIABLE, folder).expanduser()
        directory.mkdir(parents=True, exist_ok=True)
        check_ours(directory)
        if not (directory / MANIFEST).exists():  # of two at once, both write the same
            write_manifest(directory, {"name": directory.name, "devices": [], "provenance": {}, "sealed": {}})
        elif read_manifest(directory)["sealed"]:
            raise ForetuneError("a sealed dataset stays as it is: name another folder")
        parts = directory / "parts"  # after the manifest, so that no other process sees a folder that is not ours
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

    It is the family's hash for the kernels of the package that declares the family, which are hashed together, and the
    function's own otherwise: often a user's kernel with the family's knobs, whose times are not the family's.
    """
    package = type(family).__module__.rpartition(".")[0]
    own = _source_of(family) if package and f"{kernel.fn.__module__}.".startswith(f"{package}.") else None
    return own or hash_of_kernel(kernel)


def _source_of(family: Family | str) -> str | None:
    with suppress(Exception):  # a family that only predicts, or Triton that is not here
        return str(family.source_hash())  # type: ignore[union-attr]
    return None


# What Triton's own autotuners measure.


@dataclass(frozen=True)
class _Expected:
    """What the next benchmarks in a thread are of."""

    family: Family | str
    problem: Problem
    device: DeviceSpec
    values: Mapping[int, KernelConfig]  # by the id of the triton.Config, which the list keeps alive
    kept: tuple[Any, ...]
    source_hash: str | None
    timed: str  # see `log_row`

    def log(self, timings: Mapping[triton.Config, Any]) -> None:
        """Log timings if they are of these very configs."""
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
    """Announce what the autotuner that prunes now, in this thread, will benchmark: these configs, with these values.

    `timed` is as `log_row` has it. Nothing without FORETUNE_LOG; never raises. From Triton 3.8 on its listener reports
    the timings. Before, those of a key are read from the autotuner when the next one is pruned, or the process ends.
    """
    if not is_logging():
        return
    with _harmless():
        by_id = {id(config): value for config, value in zip(configs, values, strict=True)}
        found, _thread.due = _launching_autotuner(), None
        if not measures(found):
            return
        source = None if found is None else source_that_ran(family, Kernel(found).jit)
        due = _Expected(family, problem, device, by_id, tuple(configs), source, timed)
        if _listens():
            _thread.due = due if len(configs) > 1 else None  # of one alone, nothing is benchmarked or told
            return
        _read_pending()
        if found is not None:
            _pending.append((weakref.ref(found), getattr(found, "configs_timings", None), due))


@contextmanager
def _harmless() -> Iterator[None]:
    """Warn about an error instead of raising it: no trouble of ours stops a launch."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        warn_once(f"{VARIABLE}: {type(error).__name__}: {error}", ": some benchmarks are not logged")


class _Listener:
    """Triton's one listener: ours, after the one that was there."""

    def __init__(self, before: Any) -> None:
        self.before = before

    def __call__(self, **said: Any) -> None:
        if self.before is not None:
            self.before(**said)
        due, _thread.due = getattr(_thread, "due", None), None
        if due is not None and not said.get("cache_hit"):
            with _harmless():
                due.log(said["configs_timings"])


def _listens() -> bool:
    """Whether Triton tells of benchmarks; from then on, us."""
    from triton import knobs

    if not hasattr(knobs.autotuning, "listener"):
        return False
    if not isinstance(knobs.autotuning.listener, _Listener):
        knobs.autotuning.listener = _Listener(knobs.autotuning.listener)
    return True


def _read_pending() -> None:
    while _pending:
        autotuner, before, due = _pending.pop()
        timings = getattr(autotuner(), "configs_timings", None)
        if timings is not None and timings is not before:
            due.log(timings)


atexit.register(_read_pending)


def _launching_autotuner() -> Any:
    """The one whose `run` leads here. (An attached one's list is pruned by a copy of it, which keeps no timings.)"""
    from triton.runtime.autotuner import Autotuner

    frame: Any = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return None
        if frame.f_code.co_name == "run" and isinstance(caller := frame.f_locals.get("self"), Autotuner):
            return caller
        frame = frame.f_back
    return None
