"""Compile kernels in threads before they are launched: `only_compiling` for a block of code, `compile_ahead` for jobs.

Threads compile in parallel, because most of a compile runs outside of Python's lock: only the first IR is built by
Python, the rest by MLIR and ptxas (1.8-1.9 times as fast on two quiet cores). What runs does not change: each binary is
the one that the launch would have compiled, and if compiling ahead fails, the launch compiles again and raises.
"""

from __future__ import annotations

import copy
import ctypes
import hashlib
import json
import os
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

from ...datasets.errors import check_integer
from ...datasets.files import read_regular, replacing
from ...datasets.forking import renew_in_children

#: CU_STREAM_CAPTURE_MODE_RELAXED: this thread may do what another thread's capture must not.
_RELAXED = 2
#: The jobs of the innermost block of `only_compiling`, and whether they also load binaries; None outside of a block.
_block: ContextVar[tuple[list[Future[Any]], bool] | None] = ContextVar("only_compiling", default=None)
#: Return a true value if this thread is in a block of `only_compiling`; called at every launch.
is_only_compiling = _block.get


def is_loading() -> bool:
    """Return whether this thread is in a block of `only_compiling(load=True)`."""
    return (block := _block.get()) is not None and block[1]


@contextmanager
def only_compiling(*, load: bool = False) -> Iterator[list[Future[Any]]]:
    """Compile instead of launching in this block and thread. Tensors may be on torch's "meta" device.

    Yields a list; the future of each compile that the block starts is added to it.

    Args:
        load: Whether each compile also loads its binary into the device, as the first launch would.
    """
    jobs: list[Future[Any]] = []
    token = _block.set((jobs, load))
    try:
        yield jobs
    finally:
        _block.reset(token)


class _Jobs:
    """The compiles in progress, by key."""

    def __init__(self) -> None:
        renew_in_children(self)

    def renew(self) -> None:
        """Forget the compiles: in a forked process their threads do not exist, so waiting for one would not end."""
        self.lock = Lock()
        self.underway: dict[Hashable, Future[Any]] = {}
        self.pool: ThreadPoolExecutor | None = None


_jobs = _Jobs()


def compile_ahead_of(key: Hashable, job: Callable[[], object]) -> None:
    """Run a job in a thread, unless one with the same key was started and nobody has waited for it with `wait_for` yet.

    In a block of `only_compiling`, the job's future is added to the block's list.
    """
    with _jobs.lock:
        if key not in _jobs.underway:
            _jobs.underway[key] = _pool().submit(job)
        future = _jobs.underway[key]
    if (block := _block.get()) is not None:
        block[0].append(future)


def load_binary(binary: Any) -> None:
    """Load a binary that Triton compiled into this thread's device, as its first launch would.

    Does nothing for an interpreted kernel. Other threads may launch the binary in the meantime, because all of its
    handles are set at once. They may also capture a CUDA graph: this thread switches to the relaxed capture mode, in
    which loading does not end their capture. Raises the errors that the launch would raise.
    """
    if binary is None or binary.module is not None:
        return
    with suppress(OSError, AttributeError):  # no CUDA
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))
    loaded = copy.copy(binary)
    loaded._init_handles()
    if binary.module is None:
        vars(binary).update(vars(loaded))
        loaded.module = None  # since Triton 3.8, the last owner of a module unloads it


def in_background(job: Callable[[], object]) -> Future[Any]:
    """Run a job in a thread of the pool that compiles ahead, and return its future."""
    with _jobs.lock:
        return _pool().submit(job)


def _pool() -> ThreadPoolExecutor:
    """Return the pool of threads that compile, created at its first use. The caller holds the lock of `_jobs`."""
    _jobs.pool = _jobs.pool or ThreadPoolExecutor(min(16, cores()), "foretune-ahead")
    return _jobs.pool


def wait_for(key: Hashable) -> None:
    """Wait until the job of a key has ended, with or without an error. Returns at once if there is none."""
    future = _jobs.underway.get(key)
    if future is not None:
        wait([future])
        _jobs.underway.pop(key, None)


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):  # respects a container's share of the machine
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def compile_ahead(jobs: Sequence[Callable[[], object]], workers: int | None = None) -> list[BaseException | None]:
    """Run jobs that each warm up one config, and compile their binaries in parallel.

    A job is like `lambda: kernel.warmup(..., grid=grid, **config.all_kwargs())`. If the wait is interrupted (Ctrl-C),
    compiles that have not started are cancelled, and the interrupt is raised.

    Args:
        jobs: The jobs, which run one after the other; only their compiles run in parallel.
        workers: The number of threads; the number of cores of this process if None.

    Returns:
        For each job, its exception or that of a compile that it started; None if there was none.

    Raises:
        ForetuneError: `workers` < 1.

    >>> compile_ahead([lambda: None, lambda: 1 / 0])
    [None, ZeroDivisionError('division by zero')]
    """
    workers = cores() if workers is None else check_integer("workers", workers, 1)
    errors: list[BaseException | None] = [None] * len(jobs)
    begin = _async_mode() if min(workers, len(jobs)) > 1 else None
    if begin is None:
        for i, job in enumerate(jobs):
            errors[i] = _error_of(job)
        return errors
    compiles: list[list[Future[Any]]] = [[] for _ in jobs]
    with ThreadPoolExecutor(min(workers, len(jobs)), "foretune-compile") as pool, begin(pool) as mode:
        submit = mode.submit
        try:
            for i, job in enumerate(jobs):

                def noted(key: Any, *rest: Any, found: list[Future[Any]] = compiles[i]) -> Any:
                    kernel = submit(key, *rest)
                    found.append(kernel.future)
                    return kernel

                mode.submit = noted
                errors[i] = _error_of(job)
            wait([future for found in compiles for future in found])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    results = [
        error or next(filter(None, (future.exception() for future in found)), None)
        for error, found in zip(errors, compiles, strict=True)
    ]
    # Python 3.11's parser can raise a SystemError if several threads parse at once ("AST constructor recursion depth
    # mismatch"). That is not the job's fault, so the job runs again alone.
    return [
        _error_of(job) if isinstance(result, SystemError) else result for job, result in zip(jobs, results, strict=True)
    ]


def _error_of(job: Callable[[], object]) -> BaseException | None:
    """Run a job; return its exception, or None."""
    try:
        job()
    except Exception as error:  # noqa: BLE001 - any exception is the result of this job
        return error
    return None


def _async_mode() -> Callable[[ThreadPoolExecutor], Any] | None:
    """Return a function that creates Triton's mode for parallel compiles; None if Triton lacks it or one is active.

    The mode is private (`triton.runtime._async_compile`, in 3.5.1 to 3.9): while it is active in a thread, a kernel's
    `warmup` in that thread passes the compile to an executor. With a Triton that lacks it, jobs compile one by one.
    """
    try:
        from triton.runtime._async_compile import AsyncCompileMode, active_mode
    except ImportError:
        return None
    if active_mode.get() is not None:
        return None
    return lambda pool: AsyncCompileMode(pool, ignore_errors=True)


# The function that launches a kernel's binaries, built while the first binary is compiled. Triton 3.6 generates C code
# for each signature and compiles it in 0.2 s, but only when it has a binary to launch. The code does not depend on the
# binary, so a thread builds it meanwhile, and Triton finds it in its cache folder. Later releases have one function for
# all kernels, so there is nothing to build.

#: The attributes of a binary that Triton reads when it builds a launcher, with the values of no binary in particular.
_NO_BINARY = SimpleNamespace(
    num_ctas=1,
    tensordesc_meta=[],
    global_scratch_size=0,
    global_scratch_align=1,
    profile_scratch_size=0,
    profile_scratch_align=1,
    launch_cooperative_grid=False,
    launch_pdl=False,
)


def make_launch_function_ahead(kernel: Any, args: Sequence[Any], arguments: Mapping[str, Any]) -> None:
    """Start to build the launch function of a `triton.jit` kernel in a thread, once for each signature.

    If anything fails, Triton builds the function itself at the launch.

    Args:
        kernel: The kernel.
        args: The positional arguments of the launch.
        arguments: The keyword arguments, including constants and launch options.
    """
    with suppress(Exception):  # all of these functions are private
        from triton import knobs
        from triton.runtime import driver

        active = driver.active
        if not hasattr(sys.modules[type(active).__module__], "make_launcher"):
            return
        # Looked up in this thread: two threads that look it up first would create one each.
        *_, backend, bind = kernel.device_caches[active.get_current_device()]

        def make() -> None:
            bound, specialisation, options = bind(*args, **arguments)
            _, signature, constants, attributes = kernel._pack_args(backend, arguments, bound, specialisation, options)
            binary = copy.copy(_NO_BINARY)
            # One entry per TMA descriptor that the host makes; the code does not depend on what is in it.
            binary.tensordesc_meta = [{} for one in signature.values() if str(one).startswith("tensordesc")]
            active.launcher_cls(kernel.ASTSource(kernel, signature, constants, attributes), binary)

        types = (getattr(value, "dtype", type(value)) for value in (*args, *arguments.values()))
        compile_ahead_of(("launch function", kernel, knobs.cache.dir, *types), make)


# The hash of Triton's installation, with which every key of a cached binary begins. Triton computes it once in each
# process, before it compiles or finds its first binary: it reads 500 MB, which takes 0.3-0.5 s of one core. Here a
# thread does that during imports, and writes the hash to a small file in Triton's cache folder, where the next process
# finds it. The file also has a fingerprint of the hashed files. If the fingerprint differs, Triton hashes again.

#: The key of the job that hashes.
_JOB = "Triton's own hash"
#: The name of the file, in the folder where Triton caches binaries.
_FILE = "foretune-triton-key.json"
#: The most bytes of the file that are read.
_MOST_BYTES = 1 << 16
#: The parts of the package that `triton.runtime.cache.triton_key` reads, and perhaps more.
_HASHED = ("compiler", "backends", "language", "runtime/cache.py", "_C")
#: Python's switch interval while the thread hashes, in seconds. The thread requests Python's lock twice for each MiB;
#: with the default interval of 5 ms it would make no progress while another thread imports.
_SWITCH_S = 1e-4
#: The hash that was read from the file, until it is given to Triton.
_known: list[str] = []


def hash_triton_ahead() -> None:
    """Start to compute the hash of Triton's installation, which its cache keys contain, in a thread."""
    compile_ahead_of(_JOB, _hash)


def wait_for_the_hash() -> None:
    """Wait for the hash that `hash_triton_ahead` computes, if it was called, and pass it to Triton.

    A compile that does not wait would compute the hash a second time.
    """
    wait_for(_JOB)
    for key in _known:
        _give_to_triton(key)
    _known.clear()  # afterwards, because another thread may be in this function


@lru_cache
def hash_triton() -> None:
    """Make Triton know the hash of its own installation, and wait for that; only the first call does anything."""
    hash_triton_ahead()
    wait_for_the_hash()


def _give_to_triton(key: str) -> None:
    """Make Triton use `key` as the hash of its installation."""
    from triton.runtime import cache

    cache.triton_key = lru_cache(lambda: key)


def _hash() -> None:
    """Read Triton's hash of its installation from its file into `_known`; if it is not valid, compute and write it."""
    from triton.runtime import cache

    path, fingerprint = _file(), _fingerprint()
    key = _read(path, fingerprint)
    if key is not None:
        _known.append(key)
        return
    usual = sys.getswitchinterval()
    sys.setswitchinterval(min(usual, _SWITCH_S))
    try:
        key = cache.triton_key()
    finally:
        sys.setswitchinterval(usual)
    if fingerprint == _fingerprint():  # else Triton was replaced meanwhile
        _write(path, fingerprint, key)


def _file() -> Path:
    """Return the path of the file in Triton's cache folder that stores the hash of Triton's installation."""
    from triton import knobs

    return Path(knobs.cache.dir) / _FILE


def _fingerprint() -> str:
    """Return a hash of the path, inode, size and times of each file that Triton's hash of its installation covers."""
    import triton

    root = os.path.dirname(os.path.abspath(triton.__file__))
    facts = [triton.__version__]
    for path in sorted(path for part in _HASHED for path in _files(os.path.join(root, part))):
        stat = os.stat(path)
        facts.append(f"{path} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}")
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def _files(path: str) -> Iterator[str]:
    """Yield the paths of the Python modules below a folder, or the path itself if it is a file."""
    if os.path.isfile(path):
        yield path
    for folder, _, names in os.walk(path):
        yield from (os.path.join(folder, name) for name in names if name.endswith((".py", ".so", ".pyd")))


def _read(path: Path, fingerprint: str) -> str | None:
    """Return Triton's hash from the file at `path`; None if it is missing, damaged or has another fingerprint."""
    try:
        content = json.loads(read_regular(path, _MOST_BYTES))
        key = content["key"] if content["fingerprint"] == fingerprint else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # missing or damaged
        return None
    return key if isinstance(key, str) and key else None


def _write(path: Path, fingerprint: str, key: str) -> None:
    """Write Triton's hash (`key`) and the fingerprint to the file; ignore errors of the disk."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, is_cache=True) as temporary:
            temporary.write_text(json.dumps({"fingerprint": fingerprint, "key": key}))
    except OSError:
        pass  # the next process then computes the hash again
