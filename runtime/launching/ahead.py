"""Compilation ahead of time: of what launches will need (`only_compiling`), and of a list of jobs (`compile_ahead`).

Most of a compile is spent outside of Python's lock, so threads of this process do it: making the first IR is Python's
and one at a time, the rest is MLIR's and ptxas' and is not (1.8-1.9x on two quiet cores). Nothing that runs differs: a
binary is the one that the launch would have compiled, and where compiling ahead fails, the launch compiles again and
says what is wrong.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from threading import Lock
from types import SimpleNamespace
from typing import Any

from ...datasets.errors import check_integer
from ...datasets.forking import renew_in_children

_active: ContextVar[bool] = ContextVar("only_compiling", default=False)
#: Return whether this thread is in a block of `only_compiling`; asked at every launch.
is_only_compiling = _active.get


@contextmanager
def only_compiling() -> Iterator[None]:
    """Have launches in this block, of this thread, only compile. Tensors may be on torch's "meta" device."""
    token = _active.set(True)
    try:
        yield
    finally:
        _active.reset(token)


class _Jobs:
    """The compiles that are under way, by key."""

    def __init__(self) -> None:
        renew_in_children(self)

    def renew(self) -> None:
        """Forget them: in a forked process no thread goes on, so nobody may wait for one."""
        self.lock = Lock()
        self.underway: dict[Hashable, Future[Any]] = {}
        self.pool: ThreadPoolExecutor | None = None


_jobs = _Jobs()


def compile_ahead_of(key: Hashable, job: Callable[[], object]) -> None:
    """Run the job in a thread, once for each key that nobody has asked `wait_for` since."""
    with _jobs.lock:
        if key not in _jobs.underway:
            _jobs.pool = _jobs.pool or ThreadPoolExecutor(min(16, cores()), "foretune-ahead")
            _jobs.underway[key] = _jobs.pool.submit(job)


def wait_for(key: Hashable) -> None:
    """Return when the job of that key has ended, if there is one, however it ended."""
    future = _jobs.underway.get(key)
    if future is not None:
        wait([future])
        _jobs.underway.pop(key, None)


def cores() -> int:
    """Return how many processes, or threads without Python's lock, can run at once here."""
    if hasattr(os, "sched_getaffinity"):  # a container's share of the machine
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def compile_ahead(jobs: Sequence[Callable[[], object]], workers: int | None = None) -> list[BaseException | None]:
    """Run jobs that each warm one config up, and compile in parallel what they ask for.

    A job is like `lambda: kernel.warmup(..., grid=grid, **config.all_kwargs())`. There are `workers` threads, if left
    out as many as this process may use cores.

    Returns, for each job, what went wrong with it, or None: an exception of the job or of a compile that it was the
    first to ask for. Where the waiting is interrupted (Ctrl-C), compiles that have not begun are given up, and the
    interrupt goes on. Raises `ForetuneError` for fewer than one worker.

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
    # Threads that parse at one time can end Python 3.11's parser with a SystemError ("AST constructor recursion depth
    # mismatch"): that says nothing of the job, which is run again alone.
    return [
        _error_of(job) if isinstance(result, SystemError) else result for job, result in zip(jobs, results, strict=True)
    ]


def _error_of(job: Callable[[], object]) -> BaseException | None:
    try:
        job()
    except Exception as error:  # noqa: BLE001 - the result of this job, whatever it is
        return error
    return None


def _async_mode() -> Callable[[ThreadPoolExecutor], Any] | None:
    """Return what makes Triton's mode for parallel compiles, unless it has none, or the caller's own is active already.

    The mode is private (`triton.runtime._async_compile`, in 3.5.1 to 3.9): while it is active in a thread, a kernel's
    `warmup` there hands the compile to an executor. Where a later Triton has none, jobs run one after the other.
    """
    try:
        from triton.runtime._async_compile import AsyncCompileMode, active_mode
    except ImportError:
        return None
    if active_mode.get() is not None:
        return None
    return lambda pool: AsyncCompileMode(pool, ignore_errors=True)


# The function that launches a kernel's binaries, made while the first one is compiled. Triton 3.6 writes that function
# in C for each signature and has a C compiler make it, 0.2 s, but only when it has a binary to launch. It depends on
# nothing of the binary, so here a thread makes it meanwhile, and Triton finds it in its cache folder. Later Tritons
# have one function for all, and nothing is to be done.

#: What Triton looks up of a binary when it makes its launcher, besides what the C code is written from.
_NO_BINARY = SimpleNamespace(
    num_ctas=1,
    tensordesc_meta=None,
    global_scratch_size=0,
    global_scratch_align=1,
    profile_scratch_size=0,
    profile_scratch_align=1,
    launch_cooperative_grid=False,
    launch_pdl=False,
)


def make_launch_function_ahead(kernel: Any, args: Sequence[Any], arguments: Mapping[str, Any]) -> None:
    """Begins, in a thread, the launch function of a `triton.jit` kernel for such arguments, with constants and launch
    options among them, unless that was begun before. Whatever goes wrong, Triton makes it as ever."""
    with suppress(Exception):  # nothing of this is public
        from triton import knobs
        from triton.runtime import driver

        active = driver.active
        if not hasattr(sys.modules[type(active).__module__], "make_launcher"):
            return
        # Looked up here: of two threads that ask first, each would make one.
        *_, backend, bind = kernel.device_caches[active.get_current_device()]

        def make() -> None:
            bound, specialisation, options = bind(*args, **arguments)
            _, signature, constants, attributes = kernel._pack_args(backend, arguments, bound, specialisation, options)
            active.launcher_cls(kernel.ASTSource(kernel, signature, constants, attributes), _NO_BINARY)

        types = (getattr(value, "dtype", type(value)) for value in (*args, *arguments.values()))
        compile_ahead_of(("launch function", kernel, knobs.cache.dir, *types), make)
