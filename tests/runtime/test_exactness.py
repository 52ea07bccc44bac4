"""How right the timer is: against CUPTI (through torch.profiler), from 10 us to 5 ms, beside other corrections.

`pytest -m gpu -s tests/runtime/test_exactness.py` prints a line for each kernel and the summary of every correction.
"""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from foretune.datasets import DeviceSpec, Problem
from foretune.kernels import find_family
from foretune.runtime import Timer
from foretune.runtime.timing.timer import EMPTY_KERNEL_US

FAMILY = find_family("grouped_gemm_fwd")
SHORTEST_US, LONGEST_US = 10.0, 5000.0
SAMPLES, ROUNDS = 15, 2
#: (groups, rows, n, k), from 32 MB of weights to 2.2 TFLOP.
SHAPES = [
    (8, 128, 1024, 2048), (16, 256, 1024, 1024), (32, 512, 768, 1024), (16, 64, 1024, 2048), (32, 1024, 1024, 1024),
    (8, 64, 2048, 4096), (64, 256, 1024, 1024), (64, 1024, 1024, 1024), (8, 1024, 4096, 2048), (64, 512, 2048, 1024),
    (8, 2048, 4096, 4096), (64, 4096, 2048, 2048), (16, 4096, 4096, 4096), (128, 2048, 1536, 2048),
    (64, 16384, 2048, 2048), (8, 4096, 7168, 4096), (8, 64, 28672, 4096), (32, 8192, 4096, 4096),
    (8, 8192, 7168, 4096), (128, 32768, 1536, 2048), (32, 16384, 4096, 4096), (16, 16384, 8192, 4096),
    (8, 16384, 14336, 4096), (16, 32768, 8192, 4096),
]  # fmt: skip
#: Every so many configs of the space one is tried, three on each shape: no two shapes have the same three.
STRIDE = 83


@dataclass
class Reading:
    """One kernel's times in microseconds: medians over all rounds."""

    name: str
    cupti: float
    events: float  # what a pair of events reads, nothing subtracted
    stamps: float  # between the device's clock in a kernel before and in one after, nothing subtracted


def launches(device):
    """(name, launch) of grouped GEMMs of the space on shapes of all sizes, a few slow configs among them."""
    space = FAMILY.space(device)
    for place, (groups, rows, n, k) in enumerate(SHAPES):
        problem = Problem.of(FAMILY.name, groups=groups, rows=rows, n=n, k=k)
        inputs = FAMILY.inputs(problem, device)
        configs = [FAMILY.default(problem, device), *(space[STRIDE * (2 * place + i) % len(space)] for i in (0, 1))]
        for config in configs:
            if FAMILY.supports(config, problem, device) is None:
                yield f"{groups}x{rows}x{n}x{k} {config}", lambda i=inputs, c=config: FAMILY.launch(i, c)


def cupti_us(timer, launch, name, samples):
    """What CUPTI says of the kernel of that name, each time that the timer samples the launch."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        timer.sample(launch, samples)  # in the very rhythm in which it is timed
    on_device = [event for event in profiled.events() if event.device_type != torch.autograd.DeviceType.CPU]
    kernels = sorted((event for event in on_device if name in event.name), key=lambda event: event.time_range.start)
    seen = dict(Counter(event.name for event in on_device))
    assert len(kernels) >= samples, f"CUPTI saw fewer than {samples} launches of {name}; what it saw: {seen}"
    # Earlier ones were thrown away, as a timer does.
    return [event.time_range.elapsed_us() for event in kernels[-samples:]]


def stamped_us(timer, launch, stamp, samples):
    """The time between the stamps of a kernel before and one after, on the device's own clock."""
    import torch

    out, turn = torch.zeros(64 * samples, dtype=torch.int64, device="cuda"), iter(range(32 * samples))

    def stamped():
        place = 2 * next(turn)
        stamp(out, place)
        launch()
        stamp(out, place + 1)

    timer.sample(stamped, samples)
    stamps = out[: 2 * next(turn)].view(-1, 2)[-samples:].double()
    return ((stamps[:, 1] - stamps[:, 0]) / 1000).tolist()


def read(timer, stamp, name, launch) -> Reading:
    from foretune.kernels.grouped_gemm.triton_kernels.gemm import grouped_gemm_kernel  # not the family's name

    events, cupti, stamps = [], [], []
    for _ in range(3):
        launch()
    for _ in range(ROUNDS):  # interleaved: clocks drift
        events += timer.sample(launch, SAMPLES)
        cupti += cupti_us(timer, launch, grouped_gemm_kernel.__name__, SAMPLES)
        stamps += stamped_us(timer, launch, stamp, SAMPLES)
    return Reading(name, *(statistics.median(times) for times in (cupti, events, stamps)))


@pytest.mark.gpu
def test_agrees_with_cupti_at_every_size(stamping, capsys):
    timer, device, stamp = Timer(), DeviceSpec.live(), stamping.stamp
    overhead_us, timer.overhead_us = timer.overhead_us, 0.0  # from here on it says what the events read

    def empty():
        timer.queue.hold(0.0)

    def of_events(launch):
        return statistics.median(timer.sample(launch, 30))

    empty_cupti = statistics.median(cupti_us(timer, empty, "spin", SAMPLES))
    nothing, one, two = of_events(lambda: None), of_events(empty), of_events(lambda: (empty(), empty()))
    blank = statistics.median(stamped_us(timer, lambda: None, stamp, 30))
    period = two - one  # of empty kernels, one after the other
    with capsys.disabled():  # before the readings, which take a minute and may fail
        print(f"\nempty kernel: events {one:.2f} us, CUPTI {empty_cupti:.2f} us, period {period:.2f} us;")  # noqa: T201
        print(f"nothing: events {nothing:.2f} us, stamps {blank:.2f} us; subtracted: {overhead_us:.2f} us")  # noqa: T201
    readings = sorted((read(timer, stamp, *named) for named in launches(device)), key=lambda reading: reading.cupti)
    readings = [reading for reading in readings if SHORTEST_US <= reading.cupti <= LONGEST_US]
    corrections = {
        "the timer": ("events", overhead_us),
        "events around nothing": ("events", nothing),
        "events around an empty kernel": ("events", one),
        "... less what CUPTI says of it now": ("events", one - empty_cupti),
        "... less half the period of empty kernels": ("events", one - period / 2),
        "... less that period": ("events", one - period),
        "device stamps": ("stamps", 0.0),
        "device stamps less half the period": ("stamps", period / 2),
        "device stamps less those around nothing": ("stamps", blank),
    }
    cupti = np.array([reading.cupti for reading in readings])
    off = {
        name: np.array([getattr(reading, clock) for reading in readings]) - subtracted - cupti
        for name, (clock, subtracted) in corrections.items()
    }
    thirds = np.array_split(np.arange(len(readings)), 3)
    with capsys.disabled():
        for place, reading in enumerate(readings):
            us = off["the timer"][place]
            print(  # noqa: T201
                f"CUPTI {reading.cupti:8.2f} us  events {reading.events:8.2f}  stamps {reading.stamps:8.2f}  "
                f"timer off by {us:+6.2f} us {100 * us / reading.cupti:+6.2f} %  {reading.name}"
            )
        print(f"{len(readings)} kernels; off by, as medians:  |all|, then shortest, middle and longest third")  # noqa: T201
        for name, us in off.items():
            share = 100 * us / cupti
            parts = "  ".join(f"{np.median(share[t]):+6.2f} % ({np.median(us[t]):+5.2f} us)" for t in thirds)
            print(f"{name:42s} {np.median(np.abs(share)):5.2f} %  {parts}")  # noqa: T201
    share = off["the timer"] / cupti
    assert len(readings) >= 50
    assert np.median(np.abs(share)) <= 0.02
    for third in thirds:  # no bias with size
        assert abs(np.median(share[third])) <= 0.02
    assert pytest.approx(empty_cupti, abs=0.3) == EMPTY_KERNEL_US
