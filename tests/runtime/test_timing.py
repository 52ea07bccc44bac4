"""What the timer makes of a device queue's readings, on a CPU. How right it is: test_exactness.py."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from foretune.datasets import ForetuneError
from foretune.datasets.errors import ForetuneWarning
from foretune.runtime import Timer, Timing, arguments
from foretune.runtime.timing import timer as timer_module
from foretune.runtime.timing.timer import EMPTY_KERNEL_US, L2Flush


class FakeQueue:
    """A device on which a stamp costs 1.5 us, the gap around any kernel 2 more, a flush 30, and an empty kernel what
    CUPTI says of one."""

    EVENT_US, GAP_US, FLUSH_US = 1.5, 2.0, 30.0

    def __init__(self):
        self.now, self.log, self.late = 0.0, [], 0

    def hold(self, us):
        self.log.append(("hold", us))
        self.now += self.GAP_US + EMPTY_KERNEL_US + us

    def flush(self):
        self.log.append("flush")
        self.now += self.FLUSH_US

    def mark(self):
        self.log.append("mark")
        self.now += self.EVENT_US
        return self.now

    def work(self, us):
        """A kernel that takes so long, the starting and draining included."""
        self.log.append("work")
        self.now += self.GAP_US + us

    def passed(self, mark):
        self.late -= 1
        return self.late >= 0

    def elapsed_us(self, start, end):
        return end - start

    def wait(self):
        self.log.append("wait")


@pytest.fixture
def queue():
    return FakeQueue()


@pytest.fixture
def timer(queue):
    timer = Timer(queue=queue)
    queue.log.clear()
    return timer


def test_subtracts_what_events_around_a_kernel_cost(timer, queue):
    assert timer.overhead_us == pytest.approx(queue.EVENT_US + queue.GAP_US)
    assert timer.time(lambda: queue.work(10.0)).time_us == pytest.approx(10.0)
    assert timer.time(lambda: queue.hold(0.0)).time_us == pytest.approx(EMPTY_KERNEL_US)


def test_a_queue_whose_events_read_less_than_an_empty_kernel_takes_is_not_corrected(queue, monkeypatch):
    monkeypatch.setattr(queue, "elapsed_us", lambda start, end: EMPTY_KERNEL_US / 2)
    assert Timer(queue=queue).overhead_us == 0.0


def test_what_comes_before_a_launch_is_not_timed_and_precedes_the_flush(timer, queue):
    def before():
        queue.log.append("before")
        queue.now += 1000.0

    timing = timer.time(lambda: queue.work(10.0), samples=3, before=before)
    assert timing == Timing(pytest.approx(10.0), pytest.approx(0.0, abs=1e-6), 3)
    launches = [event for event in queue.log if event in ("before", "flush", "work")]
    assert launches == ["before", "flush", "work"] * 3


def test_reports_median_spread_and_count(timer, queue):
    work = itertools.cycle([10.0, 12.0, 11.0, 13.0, 14.0])
    timing = timer.time(lambda: queue.work(next(work)), samples=5)
    assert timing.time_us == pytest.approx(12.0)
    assert timing.spread == pytest.approx(2.0 / 12.0)
    assert timing.samples == 5


@pytest.mark.parametrize(
    ("us", "budget_us", "samples"), [(10.0, 5000.0, 30), (1000.0, 10_000.0, 9), (1e6, 10_000.0, 5), (1.0, 0.0, 5)]
)
def test_takes_as_many_samples_as_the_budget_allows(timer, queue, us, budget_us, samples):
    assert timer.time(lambda: queue.work(us), budget_us=budget_us).samples == samples


def test_the_first_launch_decides_how_many_there_are(timer, queue):
    timing = timer.time(lambda: queue.work(500.0), samples=lambda first_us: 1 if first_us > 499.0 else 9)
    assert timing == Timing(pytest.approx(500.0), 0.0, 1)
    assert queue.log.count("work") == 1
    assert timer.time(lambda: queue.work(400.0), samples=lambda first_us: 1 if first_us > 499.0 else 9).samples == 9


def test_queues_everything_behind_the_hold_and_flushes_outside_the_interval(timer, queue):
    timer.time(lambda: queue.work(10.0), samples=3)
    one = ["flush", "mark", "work", "mark"]
    kinds = [entry if isinstance(entry, str) else entry[0] for entry in queue.log]
    assert kinds == ["hold", "mark", *one, "wait", "hold", "mark", *one, *one, "wait"]


def test_holds_longer_when_the_device_got_ahead(timer, queue):
    queue.late = 3
    work = itertools.chain([900.0] * 3, itertools.repeat(10.0))  # launches in which the device waited for the host
    assert timer.time(lambda: queue.work(next(work))).time_us == pytest.approx(10.0)
    holds = [entry[1] for entry in queue.log if isinstance(entry, tuple)]
    assert holds[1:4] == [holds[0] * 2, holds[0] * 4, holds[0] * 8]


def test_a_launch_that_waits_for_the_device_is_named(timer, queue):
    queue.late = 10**9
    with pytest.raises(ForetuneError, match="the launch probably waits for the device"):
        timer.time(lambda: queue.work(10.0))


def test_what_the_launch_raises_comes_through(timer):
    with pytest.raises(ZeroDivisionError):
        timer.time(lambda: 1 / 0)


def test_samples_must_be_positive(timer):
    with pytest.raises(ForetuneError, match="samples must be >= 1 but got 0"):
        timer.time(lambda: None, samples=0)


def test_a_time_is_positive_even_where_nothing_was_queued(timer):
    assert timer.time(lambda: None).time_us > 0


@pytest.mark.gpu
def test_is_repeatable_and_cold():
    import torch

    # 24 MB: fits the L2, so warm would be far faster, and takes long next to the steps of an event (0.4 us on an H200).
    x = torch.rand(6 << 20, device="cuda")
    cold, again, warm = Timer(), Timer(), Timer(flush_bytes=0)
    times = [timer.time(lambda: x.mul_(1.0), samples=30).time_us for timer in (cold, again, warm)]
    print(f"cold {times[0]:.2f} us and {times[1]:.2f} us, warm {times[2]:.2f} us")  # noqa: T201
    assert times[0] == pytest.approx(times[1], rel=0.05)
    assert times[2] < times[0]


class Card:
    """What torch says of a card with this much free memory; `buffers` are allocated on the CPU instead."""

    def __init__(self, monkeypatch, free_bytes):
        import torch

        self.asked, self.free_bytes, full = [], free_bytes, torch.full

        def allocate(shape, value, *, dtype, device):
            self.asked.append(4 * shape[0])
            if 4 * shape[0] > self.free_bytes:
                raise torch.cuda.OutOfMemoryError(f"tried to allocate {4 * shape[0]} bytes")
            return full((1,), value, dtype=dtype)

        monkeypatch.setattr(torch, "full", allocate)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=50 << 20))
        monkeypatch.setattr(arguments, "_warned", set())


def test_the_buffer_that_clears_the_l2_is_as_large_as_fits(monkeypatch):
    card = Card(monkeypatch, free_bytes=22 << 20)
    with pytest.warns(ForetuneWarning, match="100 MiB of GPU memory to clear the L2 are not free: 12800 KiB are"):
        flush = L2Flush("cuda", may_shrink=True)
    assert [size >> 20 for size in card.asked] == [100, 50, 25, 12]
    assert not flush.is_whole
    flush()
    card.free_bytes = 100 << 20
    assert L2Flush("cuda", may_shrink=True).is_whole


def test_where_nothing_is_free_and_where_data_are_measured_it_is_an_error(monkeypatch):
    import torch

    card = Card(monkeypatch, free_bytes=0)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        L2Flush("cuda", may_shrink=True)
    assert min(card.asked) < 1 << 17
    card.free_bytes = 22 << 20
    with pytest.raises(torch.cuda.OutOfMemoryError):
        L2Flush("cuda")


def test_a_timer_with_too_small_a_buffer_is_not_kept(monkeypatch, queue):
    made = []

    def make(index, *, may_shrink):
        made.append(may_shrink)
        queue.flush.__func__.is_whole = len(made) > 1
        return queue

    monkeypatch.setattr(timer_module, "CudaQueue", make)
    monkeypatch.setattr(timer_module, "_timers", {})
    first, second, third = (timer_module.timer_of(0) for _ in range(3))
    assert made == [True, True]
    assert first is not second
    assert second is third


@pytest.mark.gpu
def test_with_little_memory_free_configs_are_timed_all_the_same(monkeypatch):
    """All but some 22 MiB of the card are taken."""
    import torch

    monkeypatch.setattr(timer_module, "_timers", {})
    monkeypatch.setattr(arguments, "_warned", set())
    x = torch.rand(1 << 16, device="cuda")
    x.mul_(2)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    taken = torch.empty(free - (22 << 20), dtype=torch.uint8, device="cuda")
    try:
        with pytest.warns(ForetuneWarning, match="of GPU memory to clear the L2 are not free"):
            time_us = timer_module.timer_of(torch.cuda.current_device()).time(lambda: x.mul_(2)).time_us
        assert 0 < time_us < 1000
        assert not timer_module._timers
    finally:
        del taken
        torch.cuda.empty_cache()
    timer_module.timer_of(torch.cuda.current_device())
    assert timer_module._timers
