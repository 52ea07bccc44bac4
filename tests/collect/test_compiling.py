"""The compile pool: real compilers, in processes that may die."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from children import assert_end
from fakes import DEVICE
from foretune.collect import compiling
from foretune.collect.compiling import TRIES, Binary, CompilePool, compile_ahead, signature_of
from foretune.collect.processes import Watch
from foretune.datasets import ForetuneError, KernelConfig, Problem
from tiny import (
    EndlessFamily,
    KillingFamily,
    NotingFamily,
    PrintingFamily,
    RaisingFamily,
    SpecialisedFamily,
    TinyFamily,
    UnluckyFamily,
)
from waiting import until

TESTS = Path(__file__).parents[1]


PROBLEM = Problem.of("fake", groups=2, rows=16, n=64, k=64, ragged={"rows": (8, 8)})


class Pool:
    """A compile pool, and what it says of configs."""

    def __init__(self, watch, family, size):
        self.family, self.watch = family, watch
        self.pool = CompilePool({family.name: family}, watch, size)
        self.pool.on_finished = self.note
        self.finished = []  # in order

    def note(self, binary, compiled):
        self.finished.append((binary.config["BLOCK"], compiled))

    def compile(self, blocks, problem=PROBLEM, device=DEVICE):
        """What comes of these blocks: {block: Compiled}."""
        wanted = {
            block: Binary.of(self.family, KernelConfig.of(BLOCK=block, GRID=2), problem, device) for block in blocks
        }
        outcomes = {block: self.pool.request(binary, rank) for rank, (block, binary) in enumerate(wanted.items())}

        def all_known():
            self.watch.handle(0.05)
            self.pool.check()
            outcomes.update((block, self.pool.request(binary, 9)) for block, binary in wanted.items())
            return None not in outcomes.values()

        until(all_known, lambda: outcomes)
        return outcomes

    def errors(self, blocks, **about):
        return {block: compiled.error for block, compiled in self.compile(blocks, **about).items()}


@pytest.fixture
def pool(tmp_path, monkeypatch):
    """Pools for families that compile nothing with Triton: to import torch would be all that their processes do, so
    they find an empty one."""
    empty = tmp_path / "path" / "torch.py"
    empty.parent.mkdir()
    empty.touch()
    monkeypatch.syspath_prepend(empty.parent)
    with ExitStack() as stack:

        def make(family, size=1):
            return Pool(stack.enter_context(Watch()), family, size)

        yield make
    assert getattr(sys.modules.get("torch"), "__file__", "") != str(empty), "this process has imported it, too"


@pytest.fixture
def log(tmp_path):
    return tmp_path / "compiled"


@pytest.mark.compile
def test_compiles_each_binary_once_for_a_gpu_that_is_not_here(log, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    family = TinyFamily(log)
    compile_ahead(family, [(config, PROBLEM) for config in family.space()], DEVICE, size=2)
    assert len(list((tmp_path / "cache").rglob("*.cubin"))) == 3  # configs that differ in GRID share one
    assert len(log.read_text().splitlines()) == 3
    compile_ahead(family, [], DEVICE)


@pytest.mark.compile
def test_a_kernel_that_specialises_its_integers_has_one_binary_for_each_specialisation(log, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    family = SpecialisedFamily(log)
    problems = [replace(PROBLEM, dims=(("n", n),), ragged=None) for n in (1, 7, 16, 100, 4096, 8191)]
    compile_ahead(family, [(config, one) for one in problems for config in family.space()], DEVICE, size=2)
    kinds = {signature_of(family, one, DEVICE) for one in problems}
    assert len(kinds) == 3
    assert len(log.read_text().splitlines()) == len(list((tmp_path / "cache").rglob("*.cubin"))) == 3 * len(kinds)


def test_a_binary_is_compiled_once_for_all_problems_of_a_dtype_and_flags_and_all_devices_of_an_arch(log, pool):
    one = pool(NotingFamily(log))
    one.compile([64])
    one.compile([64], problem=Problem.of("fake", groups=1, rows=7, n=8, k=8))
    one.compile([64], device=replace(DEVICE, name="half", sm_count=66))
    assert len(log.read_text().splitlines()) == 1
    one.compile([64], problem=replace(PROBLEM, dtype="fp16"))
    one.compile([64], problem=replace(PROBLEM, flags=("transposed",)))
    one.compile([64], device=replace(DEVICE, arch="sm_80"))
    assert len(log.read_text().splitlines()) == 4
    assert one.pool.compile_s > 0


def test_a_pool_is_hungry_until_all_its_processes_have_a_next_binary(log, pool):
    pool = pool(NotingFamily(log), size=2).pool
    for block, is_hungry in ((16, True), (32, True), (64, True), (128, False)):  # two begin at once
        assert pool.is_hungry
        pool.request(Binary.of(NotingFamily(log), KernelConfig.of(BLOCK=block, GRID=2), PROBLEM, DEVICE), 0)
        assert pool.is_hungry == is_hungry


def test_what_a_compiler_prints_is_not_shown(pool, capfd):
    assert pool(PrintingFamily()).errors([64]) == {64: None}
    assert capfd.readouterr() == ("", "")


def test_what_the_compiler_raises_is_the_configs_error(pool):
    told = pool(RaisingFamily()).errors([64, 128, 256])
    assert told == {64: None, 128: "RuntimeError: no blocks of 128, please", 256: None}


def test_a_compiler_that_kills_its_process_costs_only_its_config(log, pool):
    one = pool(KillingFamily(log))
    killed = {
        64: "the compiler killed its process (exit code 3)",
        128: "the compiler killed its process (exit code -9)",
    }
    assert one.errors([64, 128, 256]) == killed | {256: None}
    assert log.read_text().count("BLOCK=64") == log.read_text().count("BLOCK=128") == TRIES
    before = log.read_text()
    assert one.errors([64, 128, 256]) == killed | {256: None}
    assert log.read_text() == before  # known by now
    assert one.errors([256], problem=replace(PROBLEM, dtype="fp16")) == {256: None}


def test_a_process_that_is_killed_once_is_forgiven(log, pool):
    assert pool(UnluckyFamily(log)).errors([128]) == {128: None}


def test_processes_that_cannot_even_begin_are_said_and_no_config_is_blamed(pool, tmp_path, monkeypatch):
    (tmp_path / "triton.py").write_text("raise ImportError('a broken installation')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ForetuneError, match="compiling processes end with exit code 1 while they start"):
        pool(NotingFamily()).errors([64])


def test_a_compile_that_does_not_end_is_stopped_with_all_it_started(log, pool, monkeypatch):
    monkeypatch.setattr(compiling, "COMPILE_SECONDS", float("inf"))
    one = pool(EndlessFamily(log), size=2)
    pending = Binary.of(one.family, KernelConfig.of(BLOCK=128, GRID=1), PROBLEM, DEVICE)
    assert one.pool.request(pending, 0) is None
    assert one.errors([64, 256]) == {64: None, 256: None}
    until(lambda: "sleeper" in log.read_text())
    monkeypatch.setattr(compiling, "COMPILE_SECONDS", 0.0)
    (told,) = one.errors([128]).values()
    assert re.fullmatch(r"the compiler was stopped after \d+ s", told)
    assert_end([int(re.search(r"sleeper (\d+)", log.read_text())[1])])


def test_what_is_waited_for_most_is_compiled_first(pool):
    one = pool(RaisingFamily())
    binaries = [Binary.of(one.family, KernelConfig.of(BLOCK=block, GRID=1), PROBLEM, DEVICE) for block in range(5)]
    for binary, rank in zip(binaries, (0, 1e6, 1e6 + 1, 3, 2), strict=True):
        assert one.pool.request(binary, rank) is None
    one.pool.request(binaries[2], 1)  # now a GPU waits for it
    one.pool.request(binaries[3], 1e6)  # a lower rank than before is forgotten
    while len(one.finished) < 5:
        one.watch.handle(1)
    assert [block for block, _ in one.finished] == [0, 2, 4, 3, 1]


def test_a_device_without_a_compiler_is_refused_at_once(pool):
    with pytest.raises(ForetuneError, match="arch must be like sm_90"):
        pool(NotingFamily()).errors([64], device=replace(DEVICE, backend="xpu"))


LINGERING = """
import sys; sys.path.insert(0, sys.argv[1])
from pathlib import Path
from children import assert_end
from fakes import DEVICE
from foretune.collect.compiling import compile_ahead
from foretune.datasets import Problem
from tiny import EndlessFamily
if __name__ == "__main__":
    family = EndlessFamily(Path(sys.argv[2]))
    problem = Problem.of("fake", groups=1, rows=7, n=8, k=8)
    compile_ahead(family, [(config, problem) for config in family.space()], DEVICE, size=2)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_workers_end_with_a_killed_parent(log, tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(LINGERING)
    parent = subprocess.Popen(
        [sys.executable, script, TESTS, log], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    )
    until(lambda: log.exists() and "sleeper" in log.read_text())
    pids = [int(line.split()[-1]) for line in log.read_text().splitlines()]
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert_end(pids)
