"""A function with two kernels and an all-reduce, tuned by two gloo processes: see `ranks_in_context_on_gpu.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_two_ranks_tune_a_function_in_step_and_choose_the_same():
    pytest.importorskip("torch")
    script = Path(__file__).with_name("ranks_in_context_on_gpu.py")
    ran = subprocess.run(
        [sys.executable, script, "gloo"], env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    *ranks, logs = map(json.loads, ran.stdout.splitlines())
    # 1 to meet the kernels; 2 to warm up and 3 to time, of each config that works; 1 that fails on a rank; 1 to meet
    # what is new; and the call itself.
    # Then the call alone; and in another process 1 to meet the kernels, whose configs are known.
    assert [rank["calls"] for rank in ranks] == [[1 + 2 * 3 * 5 + 1 + 1 + 1, 1, 2]] * 2
    assert [rank["y"] for rank in ranks] == [[[10.0]] * 3] * 2  # 2 * ((1 + 1) + (2 + 1)), as if called once each
    # The first kernel with the second at 16: rank 0 takes 2, 5, 10 us and rank 1 takes 16, 12, 9.
    assert [rank["times_us"][0] for rank in ranks] == [[16.0, 12.0, 10.0, None]] * 2
    assert [rank["chosen"] for rank in ranks] == [[64, 16]] * 2
    assert [rank["plain"] for rank in ranks] == [rank["mesh"] for rank in ranks] == [32] * 2
    assert ranks[0]["timeouts"][0] == 240  # the group's: how long a rank waits for the others
    assert all(rank["restored"] and rank["caches"] == [1, 1] for rank in ranks)
    assert {name: len(lines) for name, lines in logs.items()} == {"rank-0.log": 7, "rank-1.log": 7}
    assert logs["rank-1.log"][0].startswith("rank 1: ")
    assert "failed on another rank" in logs["rank-0.log"][3]
    assert "RuntimeError: this block is too large for rank 1" in logs["rank-1.log"][3]
