"""Which configs lead, now and as a resumed run sees it."""

from __future__ import annotations

import numpy as np
import pytest
from foretune.collect.cases import LEADING_LEAST, LEADING_SLOWDOWN, CaseState
from foretune.datasets import KernelConfig

pytestmark = pytest.mark.usefixtures("triton")


def test_the_stores_rounding_does_not_change_which_configs_lead():
    times = [100.0 + i * 1e-6 for i in range(200)]  # one float32 or another, in an order of their own
    configs = [KernelConfig.of(BLOCK_M=i) for i in range(200)]
    run_now, resumed = CaseState(), CaseState()
    for config, time_us in zip(configs, times, strict=True):
        run_now.add(config, 1, time_us)
    for config, time_us in reversed(list(zip(configs, times, strict=True))):
        resumed.add(config, 1, float(np.float32(time_us)))
    assert run_now.leading() == resumed.leading()
    assert run_now.best_us == resumed.best_us


def test_a_time_that_only_rounding_makes_near_leads_now_as_it_does_later():
    best = next(float(us) for us in range(100, 200) if float(np.float32(us * LEADING_SLOWDOWN)) < us * LEADING_SLOWDOWN)
    over = best * LEADING_SLOWDOWN * (1 + 1e-12)
    known = CaseState()
    for i in range(LEADING_LEAST):
        known.add(KernelConfig.of(BLOCK_M=i), 1, best)
    known.add(KernelConfig.of(BLOCK_N=0), 1, over)
    assert len(known.leading()) == LEADING_LEAST + 1
