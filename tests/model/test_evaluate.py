"""Evaluation never trains on what it tests, counts only what could be chosen, and reports by contract."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest
from fakes import FakeFamily, fake_cases, fake_dataset
from foretune.datasets import BundleError, ForetuneError, ForetuneWarning
from foretune.datasets.dataset import Dataset
from foretune.datasets.merge import merge_datasets
from foretune.model import (
    LightGBMRanker,
    Ranker,
    StaticRanker,
    choose_rivals,
    cross_validate,
    evaluate_bundle,
    train_bundle,
)
from foretune.model.baselines import BASELINES, Baseline
from foretune.model.training_set import TrainingSet
from rich.console import Console

FAMILY, DATASET = FakeFamily(), fake_dataset()
QUICK = partial(LightGBMRanker, trees=60, epochs=0)


class Oracle(Ranker):
    """Knows the measured times of all problems, and remembers what it was trained on."""

    def __init__(self):
        self.grid = DATASET.grid("fake")

    def fit(self, grid, family):
        self.families_ = {name for case in grid.cases for name in case.model_families}
        self.problems_ = {case.problem for case in grid.cases}
        return self

    def predict(self, family, problem, device, configs):
        measured = [case.problem for case in self.grid.cases]
        views = measured, [one.without_sizes() for one in measured], [family.at_call_time(one) for one in measured]
        rows = next(rows for view in views if (rows := [row for row, one in enumerate(view) if one == problem]))
        assert problem not in self.problems_
        (sources,) = {self.grid.cases[row].model_families for row in rows}
        assert sources == ("random",) or not set(sources) & self.families_
        assert all(family.supports(config, problem, device) is None for config in configs)
        return np.array([self.grid.first_us[rows[0], self.grid.configs.index(config)] for config in configs])


@pytest.fixture(scope="module")
def evaluation():
    return cross_validate(DATASET, FAMILY, QUICK)


def test_held_out_problems_are_held_out_and_an_oracle_scores_the_noise_floor():
    evaluation = cross_validate(DATASET, FAMILY, Oracle)
    assert (evaluation.regret[16] == evaluation.full_search).all()
    assert (evaluation.regret[1] == evaluation.full_search).all()


def test_json_is_the_contract(evaluation):
    report = evaluation.to_json()
    assert {"problems", "tried", "noise_floor", "regret", "regret_sizes_unknown", "baselines"} <= set(report)
    assert sum(part["problems"] for part in report["regret_by_origin"].values()) == report["problems"]
    assert report["problems"] == len(DATASET.cases)
    assert report["tried"] == 1.0
    assert 1.0 <= report["noise_floor"] < 1.02
    assert list(report["baselines"]) == ["random", "static", "regimes", "nearest", "estimate"]
    assert list(report["baselines_sizes_unknown"]) == list(report["baselines"])
    curves = [report["regret"], report["regret_sizes_unknown"]]
    curves += [*report["baselines"].values(), *report["baselines_sizes_unknown"].values()]
    for regret in curves:
        assert list(regret) == ["1", "2", "4", "8", "16"]
        for summary in regret.values():
            assert list(summary) == ["geomean", "p95", "max", "ci95"]
            assert 1.0 <= summary["ci95"][0] <= summary["geomean"] <= summary["ci95"][1] <= summary["max"]


def test_it_shows_itself_as_a_table(evaluation):
    def printed(what):
        console = Console(width=200, no_color=True)
        with console.capture() as captured:
            console.print(what)
        return captured.get()

    report, shown = evaluation.to_json(), printed(evaluation)
    assert shown.startswith("fake: % slower than the best config that was measured (100 % were), over 39 problems")
    lines = [[cell.rstrip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if "│" in line]
    cells = {label[1:]: [figure.strip() for figure in figures] for label, *figures in reversed(lines)}
    for label, curve in {
        "foretune": report["regret"],
        "  as at call time": report["regret_sizes_unknown"],
        **report["baselines"],
    }.items():
        assert cells[label] == [f"{100 * (summary['geomean'] - 1):.1f}" for summary in curve.values()]


def test_an_evaluation_shows_itself_in_one_line_and_as_html(evaluation):
    report = evaluation.to_json()["regret"]
    first = f"{100 * (report['1']['geomean'] - 1):.1f} % at k=1"
    assert repr(evaluation).startswith(f"Evaluation(fake: 39 problems; regret {first}, ")
    assert "\n" not in repr(evaluation)
    shown = evaluation._repr_html_()
    assert "<p>Columns: the fastest of the first k configs" in shown
    assert shown.startswith("<table><caption>fake: % slower than the best config that was measured")
    assert f"<td>foretune</td><td>{first.split()[0]}</td>" in shown
    hostile = replace(evaluation, left_out={"mine": "<script>"})._repr_html_()
    assert "mine is left out: &lt;script&gt;" in hostile
    assert "<script>" not in hostile


def test_regrets_as_at_call_time_are_printed_where_they_differ(evaluation):
    labels = [row[0].strip() for row in evaluation.__rich__().rows]
    assert labels.count("as at call time") > 1
    same = {"regret_sizes_unknown": evaluation.regret, "baselines_sizes_unknown": evaluation.baselines}
    assert not any("call time" in row[0] for row in replace(evaluation, **same).__rich__().rows)


def test_rankers_see_each_problem_as_measured_and_as_at_call_time():
    seen = set()

    class Watching(Oracle):
        def predict(self, family, problem, device, configs):
            seen.add(problem)
            return super().predict(family, problem, device, configs)

    measured = {case.problem for case in cross_validate(DATASET, FAMILY, Watching, jobs=1).cases}
    at_call_time = {FAMILY.at_call_time(problem) for problem in measured}
    assert seen == measured | at_call_time
    assert at_call_time - {problem.without_sizes() for problem in measured}  # some are rounded


def test_learning_beats_not_learning(evaluation):
    report = evaluation.to_json()
    for k in ("4", "8"):
        learned = report["regret"][k]["geomean"]
        assert learned < report["baselines"]["random"][k]["geomean"]
        assert learned < report["baselines"]["estimate"][k]["geomean"]


class Worst(Oracle):
    """Knows the measured times too, and puts the slowest first."""

    def predict(self, family, problem, device, configs):
        return 1 / super().predict(family, problem, device, configs)


def test_it_says_where_a_baseline_is_better_and_where_none_is():
    # Few of the first alone: of sixteen, a list may beat the noise floor, and so the oracle, by luck.
    rivals, ks = choose_rivals(["random", "static"]), (1, 2)
    best = cross_validate(DATASET, FAMILY, Oracle, ks=ks, rivals=rivals)
    assert best.better_baselines() == []
    assert best.to_json()["better_baselines"] == []
    assert "Lower than every baseline at every k." in best.__rich__().below
    worst = cross_validate(DATASET, FAMILY, Worst, ks=ks, rivals=rivals)
    told = worst.to_json()
    assert {(one["baseline"], one["view"], one["best_of"]) for one in told["better_baselines"]} == {
        (name, view, k) for name in rivals.baselines for view in ("sizes known", "sizes unknown") for k in worst.regret
    }
    first = told["better_baselines"][0]
    assert first["baseline_regret"] == told["baselines"]["random"]["1"]["geomean"] < first["regret"]
    assert "static is better, sizes known, at the best of 1 (" in worst.__rich__().below
    assert first["is_within_noise"] is False
    noisy = replace(worst, full_search=np.full_like(worst.full_search, first["regret"]))
    assert all(one["is_within_noise"] for one in noisy.to_json()["better_baselines"])
    assert "static is as good, within the noise, sizes known, at the best of 1 (" in noisy.__rich__().below


def test_only_the_baselines_that_were_asked_for_are_judged_and_the_others_said():
    own = {"mine": Baseline((StaticRanker,), module="no_such_module", distribution="its-name")}
    judged = cross_validate(DATASET, FAMILY, Oracle, rivals=choose_rivals(["static", "mine"], own))
    assert list(judged.to_json()["baselines"]) == ["static"]
    assert judged.to_json()["baselines_left_out"] == {"mine": "it needs its-name: pip install its-name"}
    assert "mine is left out: it needs its-name: pip install its-name." in judged.__rich__().below
    with pytest.raises(ForetuneError, match=r"baselines must be fast, all or among random, .* but one is 'statik'"):
        choose_rivals(["statik"])
    with pytest.raises(ForetuneError, match="but none is given"):
        choose_rivals([])
    assert list(choose_rivals().baselines) == list(BASELINES)
    everything = choose_rivals(["all"])
    assert {*everything.baselines, *everything.left_out} == set(BASELINES)


def test_jobs_do_not_change_the_result(evaluation):
    assert cross_validate(DATASET, FAMILY, QUICK, jobs=1).to_json() == evaluation.to_json()


@pytest.fixture(scope="module")
def on_two_devices():
    """The last problems were measured on a part of the device too, where all takes twice as long."""
    part = DATASET.devices[0].with_sms(DATASET.devices[0].sm_count // 2)
    rows = DATASET.measurements
    there = rows[rows["problem"] >= len(DATASET.cases) - 12]
    there = there.assign(device=part.name, time_us=2 * there["time_us"])
    return replace(DATASET, devices=(*DATASET.devices, part), measurements=pd.concat([rows, there], ignore_index=True))


def test_each_device_is_reported_apart(on_two_devices):
    report = cross_validate(on_two_devices, FAMILY, QUICK).to_json()
    assert {name: one["problems"] for name, one in report["regret_by_device"].items()} == {
        on_two_devices.devices[0].name: len(DATASET.cases),
        on_two_devices.devices[1].name: 12,
    }
    assert report["problems"] == len(DATASET.cases) + 12
    parts = report["regret_by_device"].values()
    for part in parts:
        assert list(part["baselines"]) == list(part["baselines_sizes_unknown"]) == list(report["baselines"])
    for curves in ("baselines", "baselines_sizes_unknown"):
        everywhere, apart = report[curves]["static"]["1"], [part[curves]["static"]["1"] for part in parts]
        assert max(one["max"] for one in apart) == everywhere["max"]
    assert max(part["regret_sizes_unknown"]["8"]["max"] for part in parts) == report["regret_sizes_unknown"]["8"]["max"]


class Traveller(Oracle):
    """Remembers on which devices it was trained, and is asked about others only."""

    def fit(self, grid, family):
        self.devices_ = {device.name for device in grid.devices}
        return self

    def predict(self, family, problem, device, configs):
        assert device.name not in self.devices_
        return np.arange(len(configs))


def test_a_device_can_be_held_out(on_two_devices):
    evaluation = cross_validate(on_two_devices, FAMILY, Traveller, split="device")
    assert len(evaluation.cases) == len(DATASET.cases) + 12
    with pytest.raises(ForetuneError, match="needs measurements on two, but all are on"):
        cross_validate(DATASET, FAMILY, QUICK, split="device")
    with pytest.raises(ForetuneError, match="split must be one of model, device, size but is 'row'"):
        cross_validate(DATASET, FAMILY, QUICK, split="row")


def test_judging_one_fold_gives_its_part_of_the_whole(evaluation):
    part = cross_validate(DATASET, FAMILY, QUICK, tested=1)
    rows = [evaluation.cases.index(case) for case in part.cases]
    assert 0 < len(rows) < len(evaluation.cases)
    for k, regret in part.regret.items():
        assert (regret == evaluation.regret[k][rows]).all()
        assert (part.baselines["static"][k] == evaluation.baselines["static"][k][:, rows]).all()
    with pytest.raises(ForetuneError, match="tested must be >= 1 fold but got 0"):
        cross_validate(DATASET, FAMILY, QUICK, tested=0)


def test_the_same_measurements_in_another_order_give_the_same_results(evaluation):
    problems, configs = (len(some) - 1 for some in (DATASET.cases, DATASET.configs))
    rows = DATASET.measurements.assign(
        problem=problems - DATASET.measurements["problem"], config=configs - DATASET.measurements["config"]
    )
    backwards = replace(DATASET, cases=DATASET.cases[::-1], configs=DATASET.configs[::-1], measurements=rows)
    assert cross_validate(backwards, FAMILY, QUICK).to_json() == evaluation.to_json()


def test_the_frame_shows_the_worst_first(evaluation):
    frame = evaluation.frame()
    assert len(frame) == len(DATASET.cases)
    assert frame["regret@1"].is_monotonic_decreasing
    assert frame["regret@1"].max() == evaluation.regret[1].max()
    assert {"problem", "source", "scenario", "sizes_unknown@8", "full_search"} <= set(frame.columns)


def test_configs_that_were_never_tried_are_no_candidates():
    rows = DATASET.measurements
    cut = rows[(rows["problem"] != 0) | (rows["config"] % 20 < 12)]
    evaluation = cross_validate(replace(DATASET, measurements=cut), FAMILY, partial(LightGBMRanker, trees=1, epochs=0))
    regret = evaluation.regret[16][evaluation.cases.index(DATASET.cases[0])]
    assert regret < 1.6  # counting the others as failures would make it the worst


def test_problems_of_which_few_configs_were_tried_are_learned_from_and_not_judged():
    rows = DATASET.measurements
    thin = [number for number in range(len(DATASET.cases)) if number % 3 == 0]
    cut = replace(DATASET, measurements=rows[~rows["problem"].isin(thin) | (rows["config"] % 4 == 0)])
    learned = []

    class Learning(Oracle):
        def fit(self, grid, family):
            learned.append({case.problem for case in grid.cases})
            return super().fit(grid, family)

    evaluation = cross_validate(cut, FAMILY, Learning)
    few = {DATASET.cases[number].problem for number in thin}
    assert not few & {case.problem for case in evaluation.cases}
    assert evaluation.sparse == len(thin) == len(DATASET.cases) - len(evaluation.cases)
    assert evaluation.tried == 1.0
    assert few & set.union(*learned)
    assert evaluation.to_json()["sparse_problems"] == len(thin)
    assert (
        f"Not evaluated: problems of which less than half of the configs were measured ({len(thin)})"
        in evaluation.__rich__().below
    )


def test_configs_whose_result_was_wrong_are_no_candidates():
    grid, rows = DATASET.grid("fake"), DATASET.measurements
    first = DATASET.configs.index(grid.configs[int(np.nanargmin(grid.first_us[0]))])  # the oracle's choice there
    wrong = (rows["config"] == first) & (rows["problem"] == 0)
    rows = rows.assign(status=rows["status"].mask(wrong, "wrong_result"), time_us=rows["time_us"].mask(wrong))
    evaluation = cross_validate(replace(DATASET, measurements=rows), FAMILY, Oracle)
    assert (evaluation.regret[1] == evaluation.full_search).all()


def test_it_says_of_how_many_configs_the_best_is_the_best():
    some = replace(DATASET, measurements=DATASET.measurements[DATASET.measurements["config"] % 4 == 0])
    found = cross_validate(some, FAMILY, partial(LightGBMRanker, trees=1, epochs=0))
    assert found.tried == pytest.approx(0.25, abs=0.05)


def test_a_bundle_is_judged_as_it_is():
    bundle = train_bundle(DATASET, {"fake": FAMILY}, QUICK)
    other = measured_in("later-run", fake_dataset(fake_cases(models=9)[36:]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = evaluate_bundle(other, bundle, FAMILY).to_json()
    assert report["problems"] == len(other.cases)
    assert report["regret"]["8"]["geomean"] < report["baselines"]["random"]["8"]["geomean"]
    assert report["seen_in_training"] == 0.0


def test_a_bundle_judged_on_what_it_was_trained_on_says_so(evaluation):
    bundle = train_bundle(DATASET, {"fake": FAMILY}, QUICK)
    with pytest.warns(
        ForetuneWarning, match="trained on all of the measurements of fake in fake, so its regrets are too low"
    ):
        judged = evaluate_bundle(DATASET, bundle, FAMILY)
    told = judged.to_json()
    assert told["seen_in_training"] == 1.0
    assert (
        "The ranker was trained on all of these measurements, so its regrets are too low."
        in judged.__rich__().below.splitlines()
    )
    assert told["regret"]["2"]["geomean"] < evaluation.to_json()["regret"]["2"]["geomean"]
    assert evaluation.to_json()["seen_in_training"] == 0.0
    assert "trained on" not in evaluation.__rich__().below


def test_how_much_of_merged_data_was_trained_on_is_told_by_their_runs():
    origin = TrainingSet.of(DATASET, FAMILY).origin
    assert origin["runs"] == ["fake-run"]
    later = measured_in("later-run", fake_dataset(DATASET.cases[:13]))
    later = replace(later, measurements=later.measurements.assign(time_us=1.01 * later.measurements["time_us"]))
    merged = merge_datasets([DATASET, later], name="merged")
    share = len(DATASET.measurements) / len(merged.measurements)
    assert 0.7 < share < 0.8
    assert TrainingSet.of(merged, FAMILY).share_in(origin) == pytest.approx(share)
    assert TrainingSet.of(later, FAMILY).share_in(origin) == 0.0
    before_runs = {key: value for key, value in origin.items() if key != "runs"}
    assert TrainingSet.of(merged, FAMILY).share_in(before_runs) is None
    assert TrainingSet.of(DATASET, FAMILY).share_in(before_runs) == 1.0
    for odd in (None, "fake-run", [3, {}, []]):
        assert not TrainingSet.of(merged, FAMILY).share_in(origin | {"runs": odd})


def measured_in(run: str, dataset: Dataset) -> Dataset:
    return replace(dataset, measurements=dataset.measurements.assign(run_id=run))


def test_data_of_one_model_have_no_trained_baselines():
    one = measured_in("later-run", fake_dataset(fake_cases(models=1, randoms=0)))
    report = evaluate_bundle(one, train_bundle(DATASET, {"fake": FAMILY}, QUICK), FAMILY).to_json()
    assert list(report["baselines"]) == ["random", "estimate"]
    assert set(report["baselines_left_out"]) == {"static", "regimes", "nearest"}
    with pytest.raises(ForetuneError, match="two unrelated models"):
        cross_validate(one, FAMILY, QUICK)


def test_a_bundle_without_the_family_says_what_it_has():
    class Other(FakeFamily):
        name = "other"

    cases = tuple(replace(case, problem=replace(case.problem, family="other")) for case in DATASET.cases)
    with pytest.raises(BundleError, match="no family 'other'; it has fake"):
        evaluate_bundle(replace(DATASET, cases=cases), train_bundle(DATASET, {"fake": FAMILY}, QUICK), Other())
