"""Kernels side by side: which configs compete, that all are timed alternately, and how goals are judged."""

from __future__ import annotations

import io
import json
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fakes import DEVICE, FakeFamily, fake_cases, fake_dataset
from foretune.datasets import ForetuneError, ForetuneWarning, KernelConfig
from foretune.runtime.timing import compare
from foretune.runtime.timing.compare import (
    FINALISTS,
    ROUNDS,
    SAMPLES,
    Goal,
    LaunchPath,
    Row,
    Summary,
    compare_kernels,
    judge_least,
    judge_most,
    time_side_by_side,
)
from rich.console import Console

pytestmark = pytest.mark.filterwarnings("ignore:fake. no prediction")
CASES = fake_cases()[:2]
DATASET = fake_dataset(CASES)


class CountingTimer:
    """Takes what a launch returns for its time, and notes the order of launches."""

    def __init__(self, *, clean=False):
        self.clean = clean
        self.launched = []

    def sample(self, launch, samples, before=None):
        self.launched.append((launch, samples))
        return [(before and before(), launch())[1] for _ in range(samples)]


def test_launches_alternate_and_the_median_counts():
    timer, slow_once = CountingTimer(), iter([50.0] + [2.0] * ROUNDS * SAMPLES)
    launches = {"ours": lambda: next(slow_once), "theirs": lambda: 3.0}
    assert time_side_by_side(launches, timer) == {"ours": 2.0, "theirs": 3.0}
    assert timer.launched == [(launch, SAMPLES) for _ in range(ROUNDS) for launch in launches.values()]


ROW = Row(
    name="first",
    family="fake",
    problem=CASES[0].problem,
    best_us=10.0,
    predicted_us=11.0,
    others_us={"torch": 12.0},
    compute_us=8.0,
    memory_us=4.0,
    config=KernelConfig.of(BLOCK_M=64),
)
ROWS = [ROW, replace(ROW, name="second")]


def test_a_rows_own_time_is_the_best_known_and_its_limit_the_longer_one():
    assert (ROW.ours_us, ROW.roofline_us) == (10.0, 8.0)
    assert replace(ROW, best_us=None).ours_us == 11.0
    assert replace(ROW, memory_us=9.0).roofline_us == 9.0
    told = json.loads(json.dumps(ROW.to_json()))
    assert (told["torch_us"], told["roofline_us"], told["best_us"]) == (12.0, 8.0, 10.0)


@pytest.mark.parametrize(
    ("judge", "ratios", "met", "worst"),
    [
        (judge_least, (1.0, 1.6), True, "fake first"),
        (judge_least, (0.99, 1.6), False, "fake first"),
        (judge_least, (1.2, 1.2), False, "fake first"),  # 1.2 in geomean
        (judge_most, (1.0, 0.5), True, "fake first"),
        (judge_most, (0.5, 1.01), False, "fake second"),
    ],
)
def test_every_row_must_reach_a_goal_and_where_it_says_so_their_mean(judge, ratios, met, worst):
    limits = (1.0, 1.25) if judge is judge_least else (1.0,)
    (goal,) = judge("a goal", ROWS, ratios, *limits)
    assert (goal.met, goal.worst, goal.rows) == (met, worst, 2)
    assert judge("a goal", [], [], *limits) == []


def test_what_was_aimed_at_and_reached_is_said():
    (goal,) = judge_least("a goal", ROWS, (2.0, 0.5), 0.9, 1.0)
    assert goal == Goal("a goal", ">= 0.9 each, >= 1 geomean", "worst 0.500, geomean 1.000", False, 2, "fake second")


class TimedFamily(FakeFamily):
    """A launch returns its time."""

    def inputs(self, problem, device, *, seed=0):
        return problem

    def launch(self, inputs, config):
        return self.time_us(inputs, config, timing_pass=9) or 1e6


class Contenders:
    """One other, of 5 us."""

    others = ("torch", "slow")

    def suite(self, family):
        return {"first layer": CASES[0], "second layer": CASES[1]}

    def contenders(self, family, problem, inputs, device, best):
        assert inputs == problem
        return {"torch": lambda: 5.0}

    def goals(self, rows):
        return judge_least("over torch", rows, [5.0 / row.ours_us for row in rows], 1.0)

    def launch_path(self, device):
        return LaunchPath("foretune.product", 6.0, 4.0)


@pytest.fixture
def timers(monkeypatch):
    made = []

    def make(**options):
        made.append(CountingTimer(**options))
        return made[-1]

    monkeypatch.setattr(compare, "Timer", make)
    return made


def test_the_best_of_a_datasets_finalists_and_the_prediction_are_timed_with_the_contenders(timers):
    family, ahead, seen = TimedFamily(), [], []
    note = lambda *call: ahead.append(call)  # noqa: E731
    compared = compare_kernels({family: Contenders()}, DEVICE, DATASET, None, compile_ahead=note, on_row=seen.append)
    assert (tuple(seen), [row.name for row in seen]) == (compared.rows, ["first layer", "second layer"])
    (timer,) = timers
    assert timer.clean
    ((compiled_for, calls, device),) = ahead
    assert (compiled_for, device) == (family, DEVICE)
    assert len(calls) == len(set(calls)) <= len(CASES) * (1 + FINALISTS)
    grid = DATASET.grid("fake")
    for place, (row, case) in enumerate(zip(compared.rows, CASES, strict=True)):
        finalists = [grid.configs[i] for i in grid.times_us[place].argsort()[:FINALISTS]]
        times = {config: family.launch(case.problem, config) for config in finalists}
        assert (row.config, row.best_us) == min(times.items(), key=lambda item: item[1])
        assert {(config, case.problem) for config in finalists} <= set(calls)
        assert row.others_us == {"torch": 5.0}
        assert row.compute_us == family.flops(case.problem) / (DEVICE.matrix_tflops * 1e6)
    assert compared.goals[0].rows == 2


def test_without_a_dataset_there_is_the_prediction_alone_and_a_name_chooses_problems(timers):
    compared = compare_kernels({TimedFamily(): Contenders()}, DEVICE, None, None, only="second")
    (row,) = compared.rows
    assert (row.name, row.best_us, row.ours_us) == ("second layer", None, row.predicted_us)
    console = Console(file=io.StringIO(), width=200)
    console.print(compared)
    shown = console.file.getvalue()
    assert all(told in shown for told in ("second layer", "torch", "5.0", "over torch", "1.50x"))
    told = json.loads(json.dumps(compared.to_json()))
    assert told["launch_paths"] == [{"op": "foretune.product", "op_us": 6.0, "bare_us": 4.0, "ratio": 1.5}]
    assert told["rows"][0]["torch_us"] == 5.0


def test_what_is_updated_in_place_is_reset_before_each_launch_also_of_contenders(timers):
    class InPlace(TimedFamily):
        def inputs(self, problem, device, *, seed=0):
            return [0.0]

        def reset(self, inputs):
            inputs[0] = 0.0

        def launch(self, inputs, config):
            inputs[0] += 1.0  # what the launch before left there would make it longer
            return inputs[0]

    class Theirs(Contenders):
        def contenders(self, family, problem, inputs, device, best):
            return {"torch": lambda: family.launch(inputs, None)}

    (row,) = compare_kernels({InPlace(): Theirs()}, DEVICE, None, None, only="first").rows
    assert (row.predicted_us, row.others_us) == (1.0, {"torch": 1.0})


def test_no_problem_is_begun_when_the_time_is_up(timers, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(compare, "time", SimpleNamespace(monotonic=lambda: now[0]))
    compared = compare_kernels(
        {TimedFamily(): Contenders()}, DEVICE, None, None, budget_s=60.0, on_row=lambda row: now.append(now.pop() + 61)
    )
    assert ([row.name for row in compared.rows], compared.left_out) == (["first layer"], 1)
    console = Console(file=io.StringIO(), width=200)
    console.print(compared)
    assert "Problems left out because the budget was spent: 1" in console.file.getvalue()


def test_contenders_are_chosen_by_name_and_one_that_fails_is_one_less(timers):
    def broken():
        raise RuntimeError("no such scales here")

    class Several(Contenders):
        def contenders(self, *arguments):
            return {"torch": lambda: 5.0, "slow": broken}

    with pytest.warns(ForetuneWarning, match="not compared with slow: .*no such scales here"):
        (row,) = compare_kernels({TimedFamily(): Several()}, DEVICE, None, None, only="second").rows
    assert row.others_us == {"torch": 5.0}
    assert str(row) == f"fake second layer: predicted {row.predicted_us:.1f} us, torch 5.0 us"
    with warnings.catch_warnings():
        warnings.simplefilter("error", ForetuneWarning)
        warnings.filterwarnings("ignore", "fake. no prediction")
        compare_kernels({TimedFamily(): Several()}, DEVICE, None, None, only="second", against=["torch"])
    with pytest.raises(ForetuneError, match="against must be one of torch, slow but is 'cublas'"):
        compare_kernels({TimedFamily(): Several()}, DEVICE, None, None, against=["torch", "cublas"])


def test_a_summary_is_of_the_rows_of_one_kind_and_contender():
    times = {"balanced": [(10.0, 20.0), (10.0, 5.0)], "hot": [(4.0, 8.0)]}
    rows = [
        replace(ROW, name=f"{kind} {i}", kind=kind, predicted_us=ours, others_us={"torch": theirs})
        for kind, pairs in times.items()
        for i, (ours, theirs) in enumerate(pairs)
    ]
    rows.append(replace(rows[-1], others_us={}))
    assert Summary.of(rows) == [
        Summary("fake", "balanced", "torch", 2, pytest.approx(1.0), 0.5, "balanced 1"),
        Summary("fake", "hot", "torch", 1, pytest.approx(2.0), 2.0, "hot 0"),
    ]
    assert Summary.of([]) == []


def test_rows_have_the_scenario_and_the_flags_of_their_problem(timers):
    class Kinds(Contenders):
        def suite(self, family):
            return {"skewed": replace(CASES[0], scenario="hot"), "plain": CASES[1]}

    compared = compare_kernels({TimedFamily(): Kinds()}, DEVICE, None, None)
    assert [row.kind for row in compared.rows] == ["hot", CASES[1].scenario]
    assert [one["kind"] for one in compared.to_json()["summaries"]] == ["hot", CASES[1].scenario]


def test_families_that_share_contenders_are_judged_together_and_others_by_themselves(timers):
    class Alone(Contenders):
        def launch_path(self, device):
            return None

    for alone, rows, paths in ((Contenders(), [1, 1], 2), (Alone(), [1, 1], 1), (None, [2], 1)):
        shared = Contenders()
        comparisons = {TimedFamily(): shared, TimedFamily(): alone or shared}
        compared = compare_kernels(comparisons, DEVICE, None, None, only="second")
        assert ([goal.rows for goal in compared.goals], len(compared.launch_paths)) == (rows, paths)


def test_the_fastest_of_a_few_configs_is_not_called_the_best(timers):
    rows = DATASET.measurements
    few = rows["config"] < len(DATASET.configs) // 4
    thin = replace(DATASET, measurements=rows[(rows["problem"] == 0) | few].reset_index(drop=True))
    first, second = compare_kernels({TimedFamily(): Contenders()}, DEVICE, thin, None).rows
    assert first.best_us is not None
    assert second.best_us is None
