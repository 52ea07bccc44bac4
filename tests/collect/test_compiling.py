"""The compile pool: real compilers, in processes that may die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fakes import DEVICE
from foretune.collect.compiling import Compiled, CompilePool
from foretune.datasets import DeviceSpec, ForetuneError
from tiny import KillingFamily, RaisingFamily, TinyFamily, UnluckyFamily

TESTS = Path(__file__).parents[1]


def outcomes(pool, configs, dtype="bf16"):
    """What the pool says of each config, once each."""
    listed = list(pool.finished(configs, dtype))
    assert sorted(map(str, dict(listed))) == sorted(map(str, configs))
    assert len(listed) == len(configs)
    return dict(listed)


def errors(pool, configs):
    return {config["BLOCK"]: compiled.error for config, compiled in outcomes(pool, configs).items()}


@pytest.fixture
def log(tmp_path):
    return tmp_path / "compiled"


@pytest.mark.compile
def test_compiles_each_binary_once_for_a_gpu_that_is_not_here(log, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    family = TinyFamily(log)
    configs = family.space()
    with CompilePool(family, DEVICE, workers=2) as pool:
        first = outcomes(pool, configs)
        again = list(pool.finished(configs, "bf16"))
        outcomes(pool, configs[:1], dtype="fp16")
    assert {compiled.error for compiled in first.values()} == {None}
    assert all(compiled.compile_ms > 0 for compiled in first.values())
    assert len(list((tmp_path / "cache").rglob("*.cubin"))) == 3  # configs that differ in GRID share one
    assert [config for config, _ in again] == list(configs)
    assert dict(again) == first
    binaries = [line.rpartition(" ")[0] for line in log.read_text().splitlines()]
    assert len(binaries) == len(set(binaries)) == 4


def test_what_the_compiler_raises_is_the_configs_error():
    with CompilePool(RaisingFamily(), DEVICE, workers=1) as pool:
        told = errors(pool, RaisingFamily().space())
    assert told == {64: None, 128: "RuntimeError: no blocks of 128, please", 256: None}


def test_a_compiler_that_kills_its_process_costs_only_its_config(log):
    family = KillingFamily(log)
    killed = "the compiler killed its process"
    with CompilePool(family, DEVICE, workers=2) as pool:
        assert errors(pool, family.space()) == {64: killed, 128: killed, 256: None}
        before = log.read_text()
        assert errors(pool, family.space()) == {64: killed, 128: killed, 256: None}
        assert log.read_text() == before  # known by now
        (late,) = outcomes(pool, family.space()[-1:], dtype="fp16").values()
        assert late.error is None


def test_a_process_that_is_killed_once_is_forgiven(log):
    family = UnluckyFamily(log)
    with CompilePool(family, DEVICE, workers=1) as pool:
        assert errors(pool, family.space()[2:3]) == {128: None}


def test_a_device_without_a_compiler_is_refused_at_once():
    with pytest.raises(ForetuneError, match="arch must be like sm_90"):
        CompilePool(TinyFamily(), DeviceSpec.from_json(DEVICE.to_json() | {"backend": "xpu"}), workers=1)


def test_the_outcomes_of_a_pool_that_compiled_before_come_in_the_order_asked(monkeypatch):
    monkeypatch.setattr(CompilePool, "_compile", lambda *_: Compiled(1.0))
    configs = TinyFamily().space()[::-1]
    with CompilePool(TinyFamily(), DEVICE, workers=1) as pool:
        outcomes(pool, configs)
        assert [config for config, _ in pool.finished(configs, "bf16")] == list(configs)


LINGERING = """
import sys; sys.path.insert(0, sys.argv[1])
from pathlib import Path
from fakes import DEVICE
from foretune.collect.compiling import CompilePool
from tiny import RaisingFamily
if __name__ == "__main__":
    pool = CompilePool(RaisingFamily(Path(sys.argv[2])), DEVICE, workers=1)
    list(pool.finished(RaisingFamily().space(), "bf16"))
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_workers_end_with_a_killed_parent(log, tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(LINGERING)
    parent = subprocess.Popen(
        [sys.executable, script, TESTS, log],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert parent.stdout.readline() == b"ready\n"
    worker = Path("/proc") / log.read_text().split()[-1]
    assert worker.exists()
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 10
    while worker.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not worker.exists() or "State:\tZ" in (worker / "status").read_text()
