"""The corpus without a GPU: recipes, the order of work, wide lists, and what a worker writes, resumes and merges."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import foretune
import pytest
import torch
import triton
import triton.language as tl
from studies.corpus import inputs, measure, measurer

OPTIONS = SimpleNamespace(most=3, wide=14, keys=2, threads=1)


class CountingTimer:
    """Gives every launch the same time and counts the launches."""

    def __init__(self) -> None:
        self.launches = 0

    def sample(self, launch, samples, before=None):
        for _ in range(samples):
            before()
            launch()
        self.launches += samples
        return [10.0] * samples


def tuned_kernel():
    """An autotuned kernel that is created while a measurer watches."""
    configs = [triton.Config({"BLOCK": block}, num_warps=warps) for block in (64, 128) for warps in (1, 2)]

    @triton.autotune(configs, key=["n"])
    @triton.jit
    def double(x_ptr, n, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(x_ptr + at, 2 * tl.load(x_ptr + at, mask=at < n), mask=at < n)

    return lambda size: double[lambda meta: (triton.cdiv(size, meta["BLOCK"]),)](torch.rand(size), size)


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """Returns a function that makes a worker's measurer and a kernel; they share the folder."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    created = triton.runtime.Autotuner.__init__
    monkeypatch.setattr(triton.runtime.Autotuner, "__init__", created)  # restores it in the end

    def start(name: str = "a"):
        triton.runtime.Autotuner.__init__ = created
        timer = CountingTimer()
        found = measurer.Measurer(nullcontext, tmp_path, tmp_path / f"{name}.jsonl", OPTIONS, lambda: timer)
        found.install()
        return SimpleNamespace(measurer=found, timer=timer, launch=tuned_kernel())

    with foretune.testing.use_stub_device("h200"):
        yield start


def configs_in(folder: Path) -> list[int]:
    return [len(line["trials"]) for line in measure.merged(folder)]


@pytest.mark.parametrize("name", measure.recipes())
def test_a_recipe_is_at_most_forty_lines_and_needs_no_package(name):
    lines = (measure.HERE / "recipes" / f"{name}.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) <= 40
    assert all(len(functions) >= 8 for functions in measure.recipe(name).calls().values())


def test_the_first_shape_of_every_op_comes_first_and_parts_are_disjoint():
    calls = {"one": {"a": [0, 1], "b": [0, 1]}, "two": {"a": [0, 1]}}
    order = measure.units(calls)
    assert order[:3] == [("one", "a", 0), ("two", "a", 0), ("one", "b", 0)]
    assert [unit[-1] for unit in order] == [0] * 3 + [1] * 3
    parts = [measure.units(calls, f"{at}/2") for at in (1, 2)]
    assert sorted(parts[0] + parts[1]) == sorted(order)


def test_each_problem_is_measured_once_and_at_most_so_many(worker, tmp_path):
    first = worker()
    for size in (1000, 2000, 1000, 3000):
        first.launch(size)
    assert configs_in(tmp_path) == [3, 3]
    [line, _] = measure.merged(tmp_path)
    assert line["arguments"]["x_ptr"] == {"shape": [1000], "dtype": "float32"}
    assert {trial["us"] for trial in line["trials"]} == {10.0}
    assert line["compiled"]["configs"] == 3
    other = worker("b")
    other.launch(1000)
    assert other.timer.launches == 0


def wide(one, unit: str = "recipe.op.0") -> None:
    """Have a worker measure wide lists."""
    one.measurer.phase, one.measurer.tag = 1, {"unit": unit}


def test_a_wide_list_has_the_authors_configs_and_others_around_them(worker, tmp_path):
    one = worker()
    wide(one)
    one.launch(1000)
    one.launch(2000)
    first, second = measure.merged(tmp_path)
    configs = [trial["config"] for trial in first["trials"]]
    assert len(configs) == OPTIONS.wide
    assert configs == [trial["config"] for trial in second["trials"]]
    assert sum(trial.get("own", False) for trial in first["trials"]) == 4
    assert {config["BLOCK"] for config in configs} == {32, 64, 128, 256}
    assert {config["num_stages"] for config in configs} == {1, 2, 3, 4}
    assert all(config["BLOCK"] / config["num_warps"] <= 256 for config in configs)
    assert not any("differs" in trial for trial in first["trials"])


def test_wider_lists_keep_to_the_shape_and_to_knobs_that_are_no_tiles():
    own = [triton.Config({"BK": k, "GROUP_M": 8, "BLOCK_SIZE": 64, "FLAG": True}) for k in (16, 64)]
    found = measurer.wider(own, own, 1000, 48)
    assert {one.kwargs["BK"] for one in found} == {16, 32, 64}
    assert {one.kwargs["BLOCK_SIZE"] for one in found} == {32, 64}
    assert {(one.kwargs["GROUP_M"], one.kwargs["FLAG"]) for one in found} == {(8, True)}
    assert not {*found} & {*own}
    assert measurer.wider([triton.Config({"num_warps": 2})], own, 10, 64) == []


def test_only_one_unit_measures_wide_lists_of_a_kernel_and_new_ones_in_time(worker, tmp_path):
    one, other = worker(), worker("b")
    wide(one)
    one.launch(1000)
    wide(other, "recipe.other.0")
    other.launch(3000)
    assert configs_in(tmp_path) == [OPTIONS.wide]
    wide(other, "recipe.other.1")
    other.measurer.unit_ends = 0.0
    other.launch(3000)
    assert configs_in(tmp_path) == [OPTIONS.wide]
    one.measurer.unit_ends = 0.0
    one.launch(2000)  # further sizes of a kernel that it has measured
    assert configs_in(tmp_path) == [OPTIONS.wide] * 2


def test_compiling_ends_after_some_time_and_other_keys_have_the_same_configs(worker, tmp_path, monkeypatch):
    monkeypatch.setattr(measurer, "COMPILE_S", 0.0)
    monkeypatch.setattr(measurer, "CHUNK", 5)
    one = worker()
    wide(one)
    one.launch(1000)
    one.launch(2000)
    assert configs_in(tmp_path) == [5, 5]


def test_a_config_that_computes_something_else_is_found():
    x, y = torch.arange(8.0), torch.full((4,), torch.nan)
    results = measurer.Results({"x": x, "y": y, "n": 8})
    for factor, differs in ((2.0, False), (2.0, False), (1.0, True), (2.01, False)):
        results.reset()
        y.copy_(factor * x[:4])
        assert results.differ() == differs
    results.reset()
    assert y.isnan().all()
    assert results.differ()


def test_batches_have_other_first_sizes():
    calls = inputs.calls_of(print, ["op"], [(8, 3), (1, 3)])["op"]
    assert [[one.args[1] for one in inputs.batches(call)] for call in calls] == [
        [(8, 3), (4, 3), (2, 3)],
        [(2, 3), (4, 3), (6, 3)],
    ]


def test_a_restarted_worker_continues_behind_the_config_that_ended_it(worker, tmp_path):
    worker().launch(1000)
    path = tmp_path / "a.jsonl"
    lines = path.read_text().splitlines()
    last = max(at for at, line in enumerate(lines) if '"begin"' in line)
    path.write_text("\n".join(lines[: last + 1]) + "\n")  # the process ended while it timed the last config
    again = worker()
    again.launch(1000)
    again.launch(2000)
    [line, _] = measure.merged(tmp_path)
    assert [trial.get("failure") for trial in line["trials"]] == [None, None, "the process died or hung"]
    assert configs_in(tmp_path) == [3, 3]


def test_a_failure_is_recorded_and_the_fastest_config_runs(worker, tmp_path):
    one = worker()
    sample, failed = one.timer.sample, []

    def fail_once(launch, samples, before=None):
        if not failed:
            failed.append(1)
            raise RuntimeError("no such luck")
        return sample(launch, samples, before)

    one.timer.sample = fail_once
    one.launch(1000)
    [line] = measure.merged(tmp_path)
    assert [trial.get("failure") for trial in line["trials"]] == ["RuntimeError: no such luck", None, None]
    rows = measure.summary([line | {"package": "one"}]).splitlines()
    assert [row.split() for row in rows[1:]] == [[name, "1", "1", "3", "1", "0"] for name in ("one", "all")]
