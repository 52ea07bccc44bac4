"""What Inductor's choices are timed by: as its benchmarker is asked on a CPU, and in a real compile on a GPU."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import foretune
import pytest
import torch
from foretune import ForetuneError
from foretune.kernels.integrations import inductor
from foretune.runtime.timing.timer import Timing, timer_of


def theirs(benchmarker, launch, *more, **how):
    return "theirs", launch(), more, how


@pytest.fixture
def ours(monkeypatch):
    """A benchmarker with our timer, which says that every launch takes 12 us."""
    timer = SimpleNamespace(time=lambda launch: launch() and Timing.of([12.0]))
    monkeypatch.setattr(inductor, "timer_of", lambda index: timer)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return partial(inductor.timed_by_us(theirs, lambda: True), object())


@pytest.mark.parametrize(
    "how", [{}, {"warmup": 25, "rep": 100}, {"device_type": "cuda", "is_vetted_benchmarking": True}]
)
def test_a_time_is_our_timers_in_milliseconds(ours, how):
    assert ours(lambda: True, **how) == 0.012


@pytest.mark.usefixtures("ours")
def test_inductors_own_benchmarker_asks_ours_while_it_is_used():
    from torch._inductor.runtime.benchmarking import benchmarker

    with foretune.use("inductor"):
        assert benchmarker.benchmark(lambda: True, device="cuda") == 0.012
    assert "benchmark_gpu" not in vars(benchmarker)


@pytest.mark.parametrize("how", [{"return_mode": "all"}, {"quantiles": [0.5]}, {"device_type": "xpu"}])
def test_what_is_asked_for_in_other_ways_is_theirs(ours, how):
    assert ours(lambda: True, **how) == ("theirs", True, (), how)


def test_in_inductors_deterministic_mode_or_without_foretune_it_is_theirs(ours):
    from torch._inductor import config

    with config.patch(deterministic=True):
        assert ours(lambda: True)[0] == "theirs"
    assert inductor.timed_by_us(theirs, lambda: False)(object(), lambda: True)[0] == "theirs"


def test_a_launch_that_waits_for_the_device_is_timed_by_theirs_and_what_a_launch_raises_is_raised(ours, monkeypatch):
    def waits(launch):
        raise ForetuneError("does the launch wait for it?")

    def refused():
        raise RuntimeError("out of resource: shared memory")

    with pytest.raises(RuntimeError, match="out of resource"):
        ours(refused)
    monkeypatch.setattr(inductor, "timer_of", lambda index: SimpleNamespace(time=waits))
    assert ours(lambda: True) == ("theirs", True, (), {})


def test_without_a_timer_it_is_theirs_and_a_warning_says_why(ours, monkeypatch):
    def broken(index):
        raise RuntimeError("no such device")

    monkeypatch.setattr(inductor, "timer_of", broken)
    with pytest.warns(foretune.ForetuneWarning, match="no timer .RuntimeError: no such device"):
        assert ours(lambda: True)[0] == "theirs"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ours(lambda: True)[0] == "theirs"


@pytest.mark.gpu
def test_all_choices_of_a_real_product_are_timed_by_ours(monkeypatch):
    from torch._inductor import config
    from torch._inductor.utils import fresh_cache

    taken = []

    def kept(timer, launch):
        taken.append(timer.time(launch))
        return taken[-1]

    monkeypatch.setattr(inductor, "timer_of", lambda index: SimpleNamespace(time=partial(kept, timer_of(index))))
    x, w = (torch.randn(256, 512, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    with foretune.use("inductor", k=2), fresh_cache(), config.patch(max_autotune=True):
        y = torch.compile(lambda x, w: x @ w.T)(x, w)
    torch.testing.assert_close(y, x @ w.T)
    assert len(taken) >= 3  # cuBLAS's and two of Triton's
    assert max(one.time_us for one in taken) < 1000
