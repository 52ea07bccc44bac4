"""Test that every command has help with an example, stable JSON for scripts, and tables for people."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import foretune
import pytest
from commands import COMMANDS, FAMILY, MEASURED, PREDICT, SUBCOMMANDS, built, call, words
from foretune import datasets
from foretune.__main__ import app
from foretune.collect import replay
from foretune.datasets.contents import since
from foretune.datasets.dataset import Dataset
from foretune.kernels import find_family
from foretune.model import Bundle, LightGBMRanker, cross_validation
from typer import Context


def example_of(command: str) -> str:
    """Return the example in a command's help, without `foretune`: the first paragraph below the usage line."""
    usage, example, *_ = call(f"{command} --help").stdout.split("\n\n")
    assert usage.startswith("Usage: ")
    assert words(example).startswith("Example: foretune ")
    return words(example).removeprefix("Example: foretune ")


def test_the_commands_are_these_in_this_order() -> None:
    top = built(app)
    assert top.list_commands(Context(top)) == [*COMMANDS, "bench", "datasets", "cache"]  # type: ignore[attr-defined]
    nested = {
        f"{group.name} {command.name}"
        for group in app.registered_groups
        for command in group.typer_instance.registered_commands  # type: ignore[union-attr]
    }
    assert nested == set(SUBCOMMANDS)


@pytest.mark.parametrize("command", [*COMMANDS, *SUBCOMMANDS, "datasets"])
def test_every_command_helps_with_an_example_and_has_json(command: str) -> None:
    result = call(f"{command} --help")
    assert result.exit_code == 0
    assert ("--json" in result.stdout) == (command != "run")  # whose output is that of another program
    assert example_of(command).startswith(command)


def test_a_device_is_shown_and_saved_and_predicts_as_itself(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    shown = call("device h200 --json --out", path)
    assert json.loads(shown.stdout) == json.loads(path.read_text())
    assert str(path) in shown.stderr
    table = call("device", path).stdout
    assert "NVIDIA H200" in table
    assert all(f" {name} " in table for name in json.loads(shown.stdout) if name != "name")
    assert call(f"{PREDICT.replace('h200', str(path))} --json").stdout == call(f"{PREDICT} --json").stdout


def test_a_part_of_a_named_device_is_shown_by_the_rule() -> None:
    shown = json.loads(call("device h200 --sms 64 --json").stdout)
    assert (shown["name"], shown["sm_count"], shown["rates_measured"]) == ("NVIDIA H200 (64 SMs)", 64, False)


def test_a_model_gives_predict_its_sizes(tmp_path: Path) -> None:
    config = {"text_config": {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 1024}}
    config["text_config"] |= {"hidden_size": 2048}
    (tmp_path / "config.json").write_text(json.dumps(config))
    line = f"predict {FAMILY} --device h200 --rows 8192 --configs 2 --json"
    of_model = call(f"{line} --tp 2 --model", tmp_path)
    of_sizes = [call(f"{line} --groups 64 --n {n} --k {k}").stdout for n, k in ((1024, 2048), (2048, 512))]
    assert [*json.loads(of_model.stdout)["products"].items()] == [
        *zip(("w13", "w2"), map(json.loads, of_sizes), strict=True)
    ]
    assert "num_experts=64, num_experts_per_tok=8, hidden_size=2048, moe_intermediate_size=1024" in of_model.stderr
    assert "w13, grouped_gemm_fwd" in call(f"{line.removesuffix('--json')} --model", tmp_path).stdout
    fused = "predict fused_moe --device h200 --tokens 64 --configs 2 --json"
    assert (
        call(f"{fused} --model", tmp_path).stdout
        == call(f"{fused} --experts 64 --topk 8 --hidden 2048 --inter 1024").stdout
    )


def test_a_config_is_a_file_of_models_to_collect_and_export(tmp_path: Path) -> None:
    config = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "hidden_size": 128}
    path = tmp_path / "A-1B" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(config))
    read = "A-1B: num_experts=8, num_experts_per_tok=2, hidden_size=128, moe_intermediate_size=64, gated"
    collected = call(f"collect {FAMILY} --models {path} --out {tmp_path / 'o'} --random 0 --limit 1")
    assert read in collected.stderr
    assert "no GPU" in collected.stderr  # after the problems were drawn
    exported = call(f"export vllm --model {path.parent} --device h200 --json --out {tmp_path / 'tuned'}")
    assert read in exported.stderr
    assert json.loads(exported.stdout)["files"] == ["E=8,N=64,device_name=NVIDIA_H200.json"]


@pytest.mark.parametrize("format", ["t4", "csv"])
def test_one_problem_is_exported(format: str, tmp_path: Path) -> None:
    result = json.loads(call(f"export h200 --problem 3 --format {format} --json --out", tmp_path / "x").stdout)
    assert result["format"] == format
    assert result["results"] > 0
    assert str(tmp_path / "x") == result["out"]
    assert (tmp_path / "x").read_text().count("num_warps") == (result["results"] if format == "t4" else 1)


def test_datasets_as_json_is_the_contract() -> None:
    listed = json.loads(call("datasets --json").stdout)
    assert [one["name"] for one in listed] == datasets.names()
    for one in listed:
        assert {"name", "device", "schema_version", "families"} <= one.keys()
        for counts in one["families"].values():
            assert {"problems", "measurements", "configs"} <= counts.keys()


def test_datasets_are_merged_and_sealed(tmp_path: Path) -> None:
    measured = Path(__file__).parents[2] / "kernels" / "examples" / "measured_h200"
    rows = len(datasets.load(measured).measurements)
    merged = json.loads(call(f"datasets merge {measured} {measured} --json --out", tmp_path / "both").stdout)
    # Duplicates are dropped.
    assert merged == {"measurements": rows, "dropped": rows, "left_out": [], "out": str(tmp_path / "both")}
    sealed = call(f"datasets seal {tmp_path / 'both'} --name shipped --out", tmp_path / "sealed").stdout
    assert f"shipped: {rows} measurements" in sealed
    (shown,) = json.loads(call(f"datasets show {tmp_path / 'sealed'} --json").stdout)
    assert shown["name"] == "shipped"
    again = call(f"datasets seal {tmp_path / 'both'} --out", tmp_path / "both")
    assert again.exit_code == 1
    assert str(tmp_path / "both") in again.stderr


def test_datasets_shows_them_as_a_table() -> None:
    table = call("datasets").stdout
    assert "measurements" in table
    assert all(name in table for name in datasets.names())


def test_data_of_another_kernel_are_named_in_one_line_beside_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    (measured,) = datasets.load("h200").kernel_sources(FAMILY)
    latest, _ = since(find_family(FAMILY).kernel_changes, measured)
    for now, warned in ((latest, False), ("another", True)):
        monkeypatch.setattr(type(find_family(FAMILY)), "source_hash", lambda self, now=now: now)
        result = call("datasets show h200 --json")
        lines = [line for line in result.stderr.splitlines() if f" of {FAMILY} (" in line]
        assert [line.startswith("Warning: h200 was measured with other sources") for line in lines] == [True] * warned
        assert json.loads(result.stdout)


def test_predict_as_json_is_the_contract() -> None:
    result = json.loads(call(f"{PREDICT} --configs 4 --json").stdout)
    assert result["device"] == "NVIDIA H200"
    assert isinstance(result["reason"], str)
    slowdowns = [entry["predicted_slowdown"] for entry in result["shortlist"]]
    assert len(slowdowns) == 4
    assert slowdowns[0] == 1.0
    # A diversified list is sorted but for the configs that moved up.
    explained = json.loads(call(f"{PREDICT} --configs 4 --explain --json").stdout)["configs"]
    assert [entry["predicted_slowdown"] for entry in explained] == pytest.approx(slowdowns, abs=1e-4)
    by_rank = sorted(explained, key=lambda entry: entry["predicted_rank"])
    assert [entry["predicted_slowdown"] for entry in by_rank] == sorted(slowdowns)
    for place, entry in enumerate(explained, 1):
        assert ("moved up" in entry["why"]) == (entry["predicted_rank"] > place)
    assert all(entry["config"]["num_warps"] in (4, 8) for entry in result["shortlist"])


def test_predict_shows_a_row_a_config() -> None:
    table = call(f"{PREDICT} --configs 3").stdout
    assert table.count("x ") == 3
    (same,) = (line for line in table.splitlines() if line.startswith("All with "))
    assert not [knob.split("=")[0] for knob in same.split()[2:] if f" {knob.split('=')[0]} " in table]  # reported once


def test_predict_takes_flags_and_a_place_of_a_family() -> None:
    flagged = json.loads(call(f"{PREDICT} --permute_x --json").stdout)
    assert all(entry["config"]["TMA_X"] == 0 for entry in flagged["shortlist"])
    place = PREDICT.replace(FAMILY, "foretune.kernels.grouped_gemm:GroupedGemmForward")
    assert call(f"{place} --json").stdout == call(f"{PREDICT} --json").stdout


def test_predict_takes_options_with_an_equals_sign_too() -> None:
    equals = PREDICT.replace(" 64", "=64").replace(" 8192", "=8192")
    assert call(f"{equals} --json").stdout == call(f"{PREDICT} --json").stdout


def test_cover_shows_a_row_a_range_and_as_json_its_table() -> None:
    shown = call(example_of("cover")).stdout
    assert "configs for rows on NVIDIA H200" in shown
    assert "% in geometric mean" in words(shown)
    line = f"cover {FAMILY} --device h200 --dynamic rows --range 64:66 --groups 64 --n 2048 --k 1024 --configs 1"
    said = json.loads(call(f"{line} --json").stdout)
    assert (said["dynamic"], said["choices"], said["crossovers"], said["sizes"]) == ("rows", [0], [], [64, 65, 66])


def test_predict_explains_the_list_that_it_prints() -> None:
    plain, explained = (json.loads(call(f"{PREDICT} --json{more}").stdout) for more in ("", " --explain"))
    assert [one["config"] for one in explained["configs"]] == [one["config"] for one in plain["shortlist"]]
    assert explained["configs"][0]["why"] == "predicted fastest"
    assert explained["reason"] == plain["reason"]
    assert "Contributions to the predicted time" in call(f"{PREDICT} --explain").stdout


def test_predict_explains_a_family_that_was_never_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    line = f"predict {MEASURED.parent / 'softmax.py'}:RowSoftmax --device h200 --rows 64"
    result = call(f"{line} --columns 1000 --configs 3 --explain")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "Nothing was measured of row_softmax: the order comes from the prior" in words(result.stdout)
    assert "no data of row_softmax: predicted from its source; k=3" in words(result.stdout)
    assert "Contributions to the predicted time" in words(result.stdout)
    told = json.loads(call(f"{line} --columns 1000 --explain --json").stdout)
    assert told["training_domain"]["octaves"] is None
    assert told["reason"].endswith("for a config within 5 % of the best in 90 % of cases, as on held-out packages")
    refused = call(f"{line} --columns 99999 --explain")
    assert refused.exit_code == 1
    assert "none of the configs can run this problem: BLOCK=128 does not cover" in refused.stderr


def test_a_cover_of_a_family_that_was_never_measured_names_the_way_to_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    line = f"cover {MEASURED.parent / 'softmax.py'}:RowSoftmax --device h200 --dynamic rows --range 64:66"
    result = call(f"{line} --columns 1000")
    assert result.exit_code == 1
    said = words(result.stderr)
    assert "a cover is not predicted from a kernel's source alone: the bundle has no family 'row_softmax'" in said
    assert "(`foretune collect`, then `foretune train`), and pass it as --bundle or bundle=" in said


def test_predict_and_cover_warn_of_a_bundle_for_another_kernel_source(tmp_path: Path) -> None:
    known = foretune.load_bundle()
    old = replace(known.trained["matmul"], origin={**known.trained["matmul"].origin, "source_hash": "0" * 16})
    Bundle({"matmul": old}, known.lightgbm_version).save(tmp_path / "old")
    layer = f"matmul --device h200 --n 1024 --k 1024 --bundle {tmp_path / 'old'}"
    warning = f"Warning: the bundle was trained for other sources of matmul ({'0' * 16})"
    for line in (f"predict {layer} --m 64 --configs 2", f"cover {layer} --dynamic m --range 64:66"):
        assert call(line).stderr.count(warning) == 1
    assert "other sources" not in call(f"{PREDICT} --configs 2").stderr


def test_the_example_of_predict_runs() -> None:
    assert call(example_of("predict")).exit_code == 0


@pytest.fixture(scope="module")
def part() -> Dataset:
    """Return every 32nd problem of one family of the shipped dataset; all of them take minutes."""
    whole = datasets.load("h200")
    kept = [i for i, case in enumerate(whole.cases) if case.problem.family == FAMILY][::32]
    few = whole.measurements[whole.measurements["problem"].isin(kept)]
    few = few.assign(problem=few["problem"].map({old: new for new, old in enumerate(kept)}))
    return dataclasses.replace(
        whole, cases=tuple(whole.cases[i] for i in kept), measurements=few, drift=whole.drift.iloc[:0]
    )


def test_replay_as_json_is_the_contract_and_the_table_shows_both(
    part: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets, "load", lambda name: part)
    over: list[replay.Replay] = []

    few = functools.partial(LightGBMRanker, trees=20, epochs=0)

    def once(dataset: Any, family: Any, plan: Any) -> replay.Replay:  # with all trees, twice, it takes minutes
        over[:] = over or [replay_plan(dataset, family, functools.partial(plan, ranker=few), ranker=few)]
        return over[0]

    replay_plan = replay.replay_plan
    monkeypatch.setattr(replay, "replay_plan", once)
    (family,) = json.loads(call("replay --share 0.1 --json").stdout)["families"].values()
    assert family["problems"] == len(part.grid(FAMILY))
    assert family["planned"]["configs"] == pytest.approx(0.1, abs=0.01)
    assert 0.1 < family["planned"]["measurements"] < 0.2  # leading configs are measured again
    for who, key, k in itertools.product(("everything", "planned"), ("regret", "regret_sizes_unknown"), "1248"):
        assert 1.0 <= family[who][key][k]["geomean"] < 1.5  # loose, because there are few problems
        assert family["ratio"][key][k]["ci95"][0] <= family["ratio"][key][k]["geomean"]
        assert family["ratio"][key][k]["geomean"] == pytest.approx(
            family["planned"][key][k]["geomean"] / family["everything"][key][k]["geomean"], abs=2e-4
        )
    table = call("replay").stdout
    plan = f"the plan: {100 * family['planned']['configs']:.1f} %"
    assert all(text in table for text in ("everything: 100.0 % of the configs", plan, "the plan loses"))


@pytest.fixture(scope="module", params=["part", pytest.param("whole", marks=pytest.mark.slow)])
def quick(
    request: pytest.FixtureRequest, part: Dataset, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any], Dataset]:
    """Return the bundle folder, the result and the data of one quickstart."""
    out = tmp_path_factory.mktemp("quickstart") / "bundle"
    data = part if request.param == "part" else datasets.load("h200")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets, "load", lambda name: data)
        result = call("quickstart --json --out", out)
    assert result.exit_code == 0, result.stderr
    return out, json.loads(result.stdout), data


def check_evaluation(evaluation: dict[str, Any]) -> None:
    """Check the JSON that scripts rely on; 1.0 = the best config."""
    assert evaluation["families"]
    for family in evaluation["families"].values():
        assert family["problems"] > 0
        assert 1.0 <= family["noise_floor"] < 1.1
        assert set(family["baselines"]) >= {"random", "static", "regimes", "nearest", "estimate"}
        for key, k in itertools.product(("regret", "regret_sizes_unknown"), ("1", "2", "4", "8", "16")):
            entry = family[key][k]
            low, high = entry["ci95"]
            assert 0.95 < low <= entry["geomean"] <= high
            assert entry["geomean"] <= entry["max"]
            assert entry["p95"] <= entry["max"]
            assert all(k in baseline for baseline in family["baselines"].values())


def test_quickstart_evaluates_predicts_and_says_where_the_bundle_lies(
    quick: tuple[Path, dict[str, Any], Dataset],
) -> None:
    out, result, _ = quick
    check_evaluation(result["evaluation"])
    assert len(result["prediction"]["shortlist"]) == 4
    assert result["bundle"] == str(out)
    assert out.exists()


def test_the_bundle_of_quickstart_predicts_and_is_judged(
    quick: tuple[Path, dict[str, Any], Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, result, data = quick
    monkeypatch.setattr(datasets, "load", lambda name: data)
    judge = cross_validation.evaluate_bundle
    judged: list[cross_validation.Evaluation] = []

    def once(
        *given: Any, **options: Any
    ) -> cross_validation.Evaluation:  # evaluates only once, which takes half a minute
        judged[:] = judged or [judge(*given, **options)]
        return judged[0]

    monkeypatch.setattr(cross_validation, "evaluate_bundle", once)
    shortlist = json.loads(call(f"{PREDICT} --configs 4 --json --bundle", out).stdout)["shortlist"]
    assert shortlist == result["prediction"]["shortlist"]
    check_evaluation(json.loads(call("evaluate --json --bundle", out).stdout))
    table = call("evaluate --bundle", out).stdout
    assert all(name in table for name in ("foretune", "95 % interval", "p95", "max", "random", "nearest"))
    assert "A value can rise with k:" in words(table)


def test_the_help_of_predict_for_a_family_shows_no_example_of_another() -> None:
    assert "Example:" not in call("predict matmul --help").stdout
    assert f"Example: foretune predict {FAMILY}" in words(call(f"predict {FAMILY} --help").stdout)


def test_a_dimension_that_has_a_default_may_be_left_out() -> None:
    line = "predict matmul --device h200 --m 512 --n 1024 --k 2048 --configs 1 --json"
    left_out, given, batched = (call(f"{line} {more}") for more in ("", "--batch 1", "--batch 2"))
    assert left_out.stdout == given.stdout != batched.stdout
    assert "matmul takes --m N --n N --k N [--batch 1]" in words(call("predict matmul --help").stdout)
