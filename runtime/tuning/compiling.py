"""`compile_ahead`: compiles a shortlist in parallel, in threads of this process.

Triton's own way to do so is private (`triton.runtime._async_compile`, in 3.5.1 to 3.9): while its mode is active in a
thread, a kernel's `warmup` there hands the compile to an executor. 1.8-1.9x on two quiet cores (FIELD.md 8): making the
first IR is Python's and one at a time, the rest is MLIR's and ptxas' and is not. Where a later Triton has no such mode,
the jobs run one after the other, which is what it does anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from ...datasets.errors import check_integer
from ..launching.ahead import cores


def compile_ahead(jobs: Sequence[Callable[[], object]], workers: int | None = None) -> list[BaseException | None]:
    """Runs jobs that each warm one config up, as `lambda: kernel.warmup(..., grid=grid, **config.all_kwargs())`, and
    compiles what they ask for on `workers` threads (as many as this process may use cores, if left out).

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
    outcomes = [
        error or next(filter(None, (future.exception() for future in found)), None)
        for error, found in zip(errors, compiles, strict=True)
    ]
    # Threads that parse at one time can end Python 3.11's parser with a SystemError ("AST constructor recursion depth
    # mismatch"): that says nothing of the job, which is run again alone.
    return [
        _error_of(job) if isinstance(outcome, SystemError) else outcome
        for job, outcome in zip(jobs, outcomes, strict=True)
    ]


def _error_of(job: Callable[[], object]) -> BaseException | None:
    try:
        job()
    except Exception as error:  # noqa: BLE001 - the outcome of this job, whatever it is
        return error
    return None


def _async_mode() -> Callable[[ThreadPoolExecutor], Any] | None:
    """What makes Triton's mode, unless this Triton has none, or the caller's own is active already."""
    try:
        from triton.runtime._async_compile import AsyncCompileMode, active_mode
    except ImportError:
        return None
    if active_mode.get() is not None:
        return None
    return lambda pool: AsyncCompileMode(pool, ignore_errors=True)
