"""What a config's result is checked on: a problem that it can run, with the binary that is timed, made once."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from fakes import DEVICE, FakeFamily, FakeTimer
from foretune.collect import cases, row_writer
from foretune.collect import runner as runners
from foretune.collect.runner import GpuRunner
from foretune.datasets import Case, KernelConfig, Problem, Status, load
from foretune.runtime.launching.results import poison
from foretune.runtime.timing import timer
from replay import ReplayPool, rows_of, run

BLOCKS = (64, 128, 256, 512, 1024)
SIZES = (32, 60, 64, 100, 128, 500, 512, 1000, 1024)


def problem(n):
    return Problem.of("doubled", dtype="fp32", n=n)


CASES = tuple(Case(problem(n), ("random",)) for n in SIZES)


@dataclass(eq=False)
class Inputs:
    x: torch.Tensor  # (n,)
    y: torch.Tensor  # (n,)


class Binary:
    n_regs, n_spills = 32, 0

    class metadata:  # noqa: N801 - Triton's name
        shared = 0

    def _init_handles(self):
        pass


class Doubled(FakeFamily):
    """y = 2 x, of which a config computes the first BLOCK elements. Checked on the measured problem."""

    name, dims, dtypes, knobs, bucketed = "doubled", ("n",), ("fp32",), ("BLOCK",), ()
    broken = ()  # blocks that compute something else

    def __init__(self):
        self.made, self.references, self.checked = Counter(), Counter(), Counter()
        self.alive = weakref.WeakSet()

    def space(self, device=None):
        return tuple(KernelConfig.of(BLOCK=block) for block in BLOCKS)

    def supports(self, config, problem, device):
        block, n = config["BLOCK"], problem["n"]
        return None if block >= n else f"BLOCK must be at least n={n} but is {block}"

    def default(self, problem, device):
        return KernelConfig.of(BLOCK=1024)

    def estimate_us(self, problem, device, configs):
        return torch.tensor([float(config["BLOCK"]) for config in configs]).numpy()

    def flops(self, problem):
        return float(problem["n"])

    def bytes(self, problem):
        return 8.0 * problem["n"]

    def inputs(self, problem, device, *, seed=0):
        self.made[problem["n"], seed] += 1
        x = torch.rand(problem["n"], generator=torch.Generator().manual_seed(seed))
        inputs = Inputs(x, torch.full_like(x, float("nan")))
        self.alive.add(inputs)
        return inputs

    def launch(self, inputs, config):
        block = config["BLOCK"]
        inputs.y[:block] = (3 if block in self.broken else 2) * inputs.x[:block]
        return inputs.y

    def reference(self, inputs):
        self.references[len(inputs.x)] += 1
        return 2 * inputs.x

    def tolerance(self, problem):
        return 1e-6

    def compile(self, config, problem):
        self.checked[config["BLOCK"]] += 1  # a check begins with its binary
        return Binary()

    def binary_key(self, config, problem):
        return config, problem["n"] % 16 == 0


class OfItsBlock(Doubled):
    """Checked just below each block, by 3 or 16: masked, and of the binary that is timed."""

    def check_problem(self, config, problem_):
        return problem(config["BLOCK"] - (16 if problem_["n"] % 16 == 0 else 3))


class Careless(Doubled):
    """Has one problem to check on, which most configs cannot run, and some run with another binary."""

    def check_problem(self, config, problem_):
        return problem(1000)


class SharedBinary(Doubled):
    """One binary for all sizes."""

    def binary_key(self, config, problem):
        return config, problem.signature


class CheckedSmall(SharedBinary):
    def check_problem(self, config, problem_):
        return problem(40)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(timer, "Timer", FakeTimer)
    monkeypatch.setattr(runners, "_device_answers", lambda: True)
    monkeypatch.setattr(cases, "triton_version", lambda: "3.9")
    monkeypatch.setattr(
        row_writer, "run_provenance", lambda family, device: {"family": "doubled", "kernel_source": "fake-source"}
    )


class Cpu:
    def open(self):
        return DEVICE, GpuRunner(DEVICE)


def collected(family, out, cases=CASES):
    """{(n, BLOCK): the scan's row} of a whole collection."""
    summary = run(cases, out, phases=[[Cpu()]], families={"doubled": family}, pool=ReplayPool())
    assert (summary.complete, summary.skipped) == (True, ())
    return {(where["n"], config["BLOCK"]): passes[1] for (where, config), passes in rows_of(out).items()}


@pytest.mark.parametrize("family", [Doubled, OfItsBlock, Careless, SharedBinary, CheckedSmall])
def test_a_family_whose_validity_depends_on_size_has_no_false_wrong_result(family, tmp_path):
    rows = collected(family(), tmp_path / "measured")
    assert {key: row.status for key, row in rows.items()} == {
        (n, block): "ok" if block >= n else "invalid" for n in SIZES for block in BLOCKS
    }
    assert rows[100, 64].error == "BLOCK must be at least n=100 but is 64"


@pytest.mark.parametrize("family", [Doubled, OfItsBlock, Careless, SharedBinary, CheckedSmall])
def test_a_config_that_computes_something_else_is_found_on_every_problem_that_it_can_run(family, tmp_path, monkeypatch):
    monkeypatch.setattr(family, "broken", (256,))
    rows = collected(family(), tmp_path / "measured")
    wrong = {(n, block) for (n, block), row in rows.items() if row.status == Status.WRONG_RESULT.value}
    assert wrong == {(n, 256) for n in SIZES if n <= 256}


class Rounded(Doubled):
    """Has a second output: the first one rounded to integers, of which a faulty config is off by one or writes none."""

    faulty = ()
    silent = ()

    def inputs(self, problem, device, *, seed=0):
        inputs = super().inputs(problem, device, seed=seed)
        inputs.z = poison(torch.empty(problem["n"], dtype=torch.int8))
        return inputs

    def launch(self, inputs, config):
        y, block = super().launch(inputs, config), config["BLOCK"]
        if block not in self.silent:
            inputs.z.copy_((100 * inputs.x).to(torch.int8) + (block in self.faulty))
        return y, inputs.z

    def reference(self, inputs):
        return super().reference(inputs), (100 * inputs.x).to(torch.int8)

    def tolerance(self, problem):
        return 1e-6, 0.0


def test_each_of_several_outputs_is_compared_and_filled_before_the_next_launch(tmp_path, monkeypatch):
    assert {row.status for row in collected(Rounded(), tmp_path / "right").values()} == {"ok", "invalid"}
    monkeypatch.setattr(Rounded, "faulty", (256,))
    monkeypatch.setattr(Rounded, "silent", (512,))
    rows = collected(Rounded(), tmp_path / "wrong")
    wrong = {key: row.error for key, row in rows.items() if row.status == Status.WRONG_RESULT.value}
    assert wrong.keys() == {(n, block) for n in SIZES for block in (256, 512) if n <= block}
    assert wrong[100, 256].startswith("output 2 of 2: 100 of 100 elements differ: the first is ")
    assert wrong[100, 512].startswith("output 2 of 2: 100 of 100 elements are -128, as the output is before a launch")


def test_check_inputs_are_made_once_for_each_check_problem(tmp_path):
    family = OfItsBlock()
    collected(family, tmp_path / "measured")
    expected = {block - (16 if n % 16 == 0 else 3): 1 for block in BLOCKS for n in SIZES if n <= block}
    assert {n: times for (n, seed), times in family.made.items() if seed == 1} == expected
    assert family.references == expected


def test_configs_are_checked_once_for_each_binary_and_check_problem(tmp_path):
    for family, times in ((CheckedSmall(), dict.fromkeys(BLOCKS, 1)), (OfItsBlock(), dict.fromkeys(BLOCKS, 2))):
        collected(family, tmp_path / type(family).__name__)
        assert family.checked == times
    family = Doubled()  # on each problem anew
    collected(family, tmp_path / "measured")
    assert family.checked == {block: sum(n <= block for n in SIZES) for block in BLOCKS}


def test_a_check_on_the_measured_problem_takes_its_inputs_and_frees_them_with_it(tmp_path):
    family = Doubled()
    runner = GpuRunner(DEVICE)
    for n in (100, 60):
        runner.prepare(family, problem(n))
        assert [len(inputs.x) for inputs in family.alive] == [n]  # the other problem's are gone
        for block in (128, 256, 512):
            assert runner.scan(KernelConfig.of(BLOCK=block), float("inf")).status is Status.OK
        assert [len(inputs.x) for inputs in family.alive] == [n]
    assert family.made == {(100, 0): 1, (60, 0): 1}
    assert family.references == {100: 1, 60: 1}
    collected(family, tmp_path / "measured")
    assert all(seed == 0 for _, seed in family.made)


def test_when_memory_runs_out_check_inputs_make_room_for_the_next_problem():
    class Full(CheckedSmall):
        def inputs(self, problem, device, *, seed=0):
            if self.alive and problem["n"] == 1000:
                raise torch.OutOfMemoryError("tried to allocate 12 GiB")
            return super().inputs(problem, device, seed=seed)

    family, runner = Full(), GpuRunner(DEVICE)
    runner.prepare(family, problem(100))
    config = KernelConfig.of(BLOCK=1024)
    assert runner.scan(config, float("inf")).status is Status.OK
    assert len(family.alive) == 2
    runner.prepare(family, problem(1000))
    assert runner.scan(config, float("inf")).status is Status.OK
    assert family.made[40, 1] == 1  # it was checked already


@pytest.mark.parametrize("what", ["check_problem", "reference", "tolerance", "binary_key"])
def test_whatever_a_familys_check_raises_is_the_rows_error(what, monkeypatch):
    family, runner = Doubled(), GpuRunner(DEVICE)
    runner.prepare(family, problem(100))

    def fails(*_):
        raise TypeError("a mistake")

    monkeypatch.setattr(family, what, fails)
    outcome = runner.scan(KernelConfig.of(BLOCK=128), float("inf"))
    assert (outcome.status, outcome.error) == (Status.LAUNCH_FAILED, "TypeError: a mistake")


def test_a_family_without_flops_or_a_default_is_collected_and_has_no_drift_probe_where_it_has_no_default(tmp_path):
    class Bare(Doubled):
        def flops(self, problem):
            return 0.0

        def bytes(self, problem):
            return 0.0

        def default(self, problem, device):
            return KernelConfig.of(BLOCK=64)  # runs few of them

    probed = [case for case in CASES if case.problem["n"] <= 64]
    collected(Bare(), tmp_path / "some", probed)
    assert not load(tmp_path / "some").drift.empty
    collected(Bare(), tmp_path / "none", [case for case in CASES if case not in probed])
    assert load(tmp_path / "none").drift.empty
