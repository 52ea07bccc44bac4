"""Compiling a shortlist in parallel: real compiles, for a device that is not here."""

from __future__ import annotations

import sys
import threading

import pytest
from foretune.datasets import ForetuneError
from foretune.runtime import use_stub_driver
from foretune.runtime.launching.ahead import compile_ahead

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("own_cache")]


@pytest.fixture
def compiled(monkeypatch):
    """The thread of each compile that is not a cache hit."""
    import triton

    seen = []

    def listener(**what):
        if not what["cache_hit"]:
            seen.append(threading.current_thread().name)

    monkeypatch.setattr(triton.knobs.compilation, "listener", listener)
    return seen


def _job(toy, kernel, **knobs):
    import torch

    half, single = torch.float16, torch.float32
    return lambda: kernel.warmup(half, half, single, 64, 64, 64, grid=(1,), **toy.WARM | knobs)


def _kernel(toy):
    import triton

    return triton.jit(toy.matmul_kernel)


def test_compiles_in_threads_and_the_launch_finds_the_binaries(toy, compiled):
    kernel = _kernel(toy)
    with use_stub_driver(toy.H200) as driver:
        assert compile_ahead([_job(toy, kernel, BLOCK_M=m) for m in (16, 32, 64)], workers=2) == [None] * 3
        assert len(compiled) == 3
        # The main thread repeats what Python 3.11's parser breaks off in threads.
        assert any(name.startswith("foretune-compile") for name in compiled)
        for m in (16, 32, 64):
            kernel[(1,)](*toy.operands(), 64, 64, 64, **toy.WARM | {"BLOCK_M": m})
    assert len(compiled) == 3
    assert len(driver.launches) == 3


def test_each_job_has_its_own_error(toy):
    kernel = _kernel(toy)
    with use_stub_driver(toy.H200):
        jobs = [_job(toy, kernel), _job(toy, kernel, BLOCK_M=33), _job(toy, kernel, no_such=1), _job(toy, kernel)]
        fine, odd_size, unknown, again = compile_ahead(jobs, workers=2)
    assert fine is again is None
    assert "power of 2" in str(odd_size)
    assert "no_such" in str(unknown)


def test_what_ends_python_s_parser_in_a_thread_is_compiled_again_alone(toy, compiled, monkeypatch):
    """As threads that parse at one time may, on Python 3.11."""
    from triton.runtime.jit import JITFunction

    kernel, parse, ended = _kernel(toy), JITFunction.parse, []

    def parsed(self):
        if threading.current_thread() is not threading.main_thread() and not ended:
            ended.append(self)
            raise SystemError("AST constructor recursion depth mismatch (before=28, after=27)")
        return parse(self)

    monkeypatch.setattr(JITFunction, "parse", parsed)
    with use_stub_driver(toy.H200):
        jobs = [_job(toy, kernel, BLOCK_M=m, num_warps=2) for m in (16, 32)]  # which no other test compiles
        assert compile_ahead(jobs, workers=2) == [None, None]
    assert len(ended) == 1
    assert threading.main_thread().name in compiled


@pytest.mark.parametrize("why", ["no such mode", "one worker", "a mode of the caller's"])
def test_is_serial_where_it_must(toy, compiled, monkeypatch, why):
    kernel, workers = _kernel(toy), 1 if why == "one worker" else 2
    jobs = [_job(toy, kernel, BLOCK_M=64, BLOCK_N=16), _job(toy, kernel, BLOCK_M=33)]
    if why == "no such mode":
        monkeypatch.setitem(sys.modules, "triton.runtime._async_compile", None)
    with use_stub_driver(toy.H200):
        if why == "a mode of the caller's":
            from triton.runtime._async_compile import AsyncCompileMode

            handed = []
            mode = AsyncCompileMode(None, ignore_errors=True)
            mode.submit = lambda *asked: handed.append(asked)
            with mode:
                assert compile_ahead(jobs, workers) == [None, None]
            assert len(handed) == 2
            return
        fine, failed = compile_ahead(jobs, workers)
    assert fine is None
    assert "power of 2" in str(failed)


def test_an_interrupt_goes_on_and_nothing_stays_behind(toy, compiled):
    """Ctrl-C reaches whoever waits: here in the second job."""
    from triton.runtime._async_compile import active_mode

    kernel = _kernel(toy)

    def interrupted():
        raise KeyboardInterrupt

    before = set(threading.enumerate())
    with use_stub_driver(toy.H200):
        with pytest.raises(KeyboardInterrupt):
            compile_ahead([_job(toy, kernel, BLOCK_N=64), interrupted, _job(toy, kernel, BLOCK_N=128)], workers=2)
        assert active_mode.get() is None
        assert set(threading.enumerate()) <= before
        assert compile_ahead([_job(toy, kernel, BLOCK_N=64)] * 2, workers=2) == [None, None]


def test_a_worker_is_needed():
    with pytest.raises(ForetuneError, match="workers must be an integer >= 1 but got 0"):
        compile_ahead([], 0)
