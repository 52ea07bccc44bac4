"""`foretune collect`: what its options ask for, and what a person sees of a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import commands
import pytest
import torch
from collecting import SUMMARY
from foretune.collect import campaign
from foretune.collect import cluster as on_cluster
from foretune.collect.cases import cases_like, first_cases
from foretune.collect.plan import ADDING
from foretune.collect.run_state import Progress
from foretune.collect.runner import DeviceLostError
from foretune.datasets import DeviceSpec, load
from foretune.kernels import find_family

FAMILY = "grouped_gemm_fwd"
MODELS = "model,num_experts,top_k,hidden_size,moe_intermediate_size\nMine-1B,16,4,1024,512\n"


def call(line):
    return commands.call(f"collect {line}")


class Collect:
    """Stands in for `collect_on_gpus`: notes what it is asked for, and says what it is told to."""

    def __init__(self):
        self.raises = None
        self.summary = SUMMARY

    def __call__(self, families, cases, out, *, on_progress, **options):
        self.families, self.cases, self.out, self.options = families, cases, out, options
        on_progress(Progress(1, 3, cases[0], 50, 12.5, 90.0))
        if self.raises:
            raise self.raises
        return self.summary


@pytest.fixture
def collect(monkeypatch):
    stand_in = Collect()
    monkeypatch.setattr(campaign, "collect_on_gpus", stand_in)
    return stand_in


def test_measures_the_layers_of_the_shipped_models_unless_told_otherwise(collect):
    result = call(f"{FAMILY} --out measured")
    assert result.exit_code == 0, result.stderr
    assert ([family.name for family in collect.families], collect.out) == ([FAMILY], Path("measured"))
    assert collect.cases == list(find_family(FAMILY).cases())
    asked = {"gpus": None, "sms": (), "plan": "exhaustive", "known": None, "share": None}
    assert collect.options == asked | {"budget_s": None, "resume": True}


def test_options_reach_the_shapes_and_the_campaign(collect, tmp_path):
    table = tmp_path / "models.csv"
    table.write_text(MODELS)
    shapes = "--tokens 16,4096 --per-layer 3 --random 5 --seed 7"
    options = "--budget 1.5h --no-resume --gpus 2 --plan adaptive --share 0.05"
    assert call(f"{FAMILY} --models {table} --out measured {shapes} {options}").exit_code == 0
    drawn = find_family(FAMILY).cases(models=table, tokens=(16, 4096), per_layer=3, random=5, seed=7)
    assert collect.cases == list(drawn)
    assert len(drawn) == 2 * 3 + 5
    asked = {"gpus": 2, "sms": (), "plan": "adaptive", "known": None, "share": 0.05}
    assert collect.options == asked | {"budget_s": 5400.0, "resume": False}


def test_the_problems_of_a_dataset_come_first_and_a_limit_counts_them(collect):
    family = find_family(FAMILY)
    shared = first_cases(family, cases_like(load("h200"), FAMILY, seed=7), max_tflop=0.1)
    options = "--like h200 --max-tflop 0.1 --seed 7"
    assert call(f"{FAMILY} --out measured {options}").exit_code == 0
    assert collect.cases[: len(shared)] == list(shared)
    drawn = family.cases(max_tflop=0.1, seed=7)
    assert collect.cases[len(shared) :] == [case for case in drawn if case.problem not in {c.problem for c in shared}]
    assert call(f"{FAMILY} grouped_gemm_dx --out measured {options} --limit 5").exit_code == 0
    assert collect.cases[:5] == list(shared[:5])
    assert [case.problem.family for case in collect.cases[5:]] == ["grouped_gemm_dx"] * 5


def test_only_problems_of_the_named_dtypes_are_measured(collect):
    drawn = find_family("matmul").cases(random=30)
    assert call("matmul --out measured --random 30 --dtype fp32 --dtype int8").exit_code == 0
    assert collect.cases == [case for case in drawn if case.problem.dtype in ("fp32", "int8")]
    for dtypes in ("--dtype fp8", "--dtype fp32 --dtype fp8"):
        result = call(f"matmul --out measured {dtypes}")
        assert result.exit_code == 2
        assert "--dtype: 'fp8' is not one of bf16, fp16, fp32, int8" in result.stderr


def test_several_families_may_be_named(collect):
    names = [FAMILY, "grouped_gemm_dx"]
    assert call(f"{' '.join(names)} {FAMILY} --out measured --random 5").exit_code == 0
    assert [one.name for one in collect.families] == names
    drawn = [find_family(name).cases(random=5) for name in names]
    assert collect.cases == [case for each in drawn for case in each]


def test_a_scheduler_has_a_clusters_gpus_measure(collect, monkeypatch):
    monkeypatch.setattr(on_cluster, "collect_on_cluster", collect)
    result = call(f"{FAMILY} --out measured --scheduler tcp://host:8786 --budget 90s")
    assert result.exit_code == 0, result.stderr
    assert collect.options == {
        "scheduler": "tcp://host:8786",
        "plan": "exhaustive",
        "known": None,
        "share": None,
        "budget_s": 90.0,
        "resume": True,
    }
    result = call(f"{FAMILY} --out measured --scheduler tcp://host:8786 --gpus 2")
    assert result.exit_code == 2
    assert "start as many workers as you need" in result.stderr


@pytest.mark.parametrize("asked", ["--sms 32 --sms 64 --sms 96", "--sms 32,64,96", "--sms 32,64 --sms 64,96"])
def test_parts_of_the_gpus_are_measured_in_the_order_in_which_they_are_named(collect, asked):
    assert call(f"{FAMILY} --out measured {asked}").exit_code == 0
    assert collect.options["sms"] == (32, 64, 96)


def test_parts_of_a_schedulers_gpus_are_refused(collect):
    result = call(f"{FAMILY} --out measured --scheduler tcp://host:8786 --sms 64")
    assert result.exit_code == 2
    assert "only the GPUs of this machine can be partitioned" in result.stderr


def test_its_help_says_what_is_measured_by_default():
    told = " ".join(call("--help").stdout.replace("│", " ").split())
    assert "[default: (the family's own models)]" in told
    assert all(option in told for option in ("--tokens", "--per-layer", "--random", "--seed", "--budget"))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--models no/such.csv", "no/such.csv"),
        ("--tokens 999999999", "999999999"),
    ],
)
def test_bad_input_is_named_before_anything_is_measured(collect, options, named):
    result = call(f"{FAMILY} --out measured {options}")
    assert result.exit_code == 1
    assert named in result.stderr
    assert not hasattr(collect, "cases")


def test_more_sms_than_the_card_has_are_refused_before_anything_is_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(campaign, "visible_gpus", lambda wanted: 1)
    monkeypatch.setattr(DeviceSpec, "live", lambda index: DeviceSpec.named("h200"))
    result = call(f"{FAMILY} --out {tmp_path / 'measured'} --sms 64,133")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "Error: sms must be between 1 and 132, as NVIDIA H200 has, but got 133" in result.stderr
    assert not (tmp_path / "measured").exists()


def test_a_plan_that_there_is_not_is_refused_before_anything_is_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(campaign, "visible_gpus", lambda wanted: 1)
    result = call(f"{FAMILY} --out {tmp_path / 'measured'} --plan greedy")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "must be one of exhaustive, adaptive, thin, missing, outdated but is 'greedy'" in result.stderr
    assert not (tmp_path / "measured").exists()


@pytest.mark.parametrize("plan", ADDING)
def test_a_plan_that_adds_takes_the_problems_of_a_dataset_and_draws_no_others(collect, plan):
    assert call(f"{FAMILY} --like h200 --plan {plan} --out measured").exit_code == 0
    assert collect.cases == list(first_cases(find_family(FAMILY), cases_like(load("h200"), FAMILY)))
    assert collect.options["known"].name == "h200"


def test_the_missing_plan_without_a_dataset_is_refused_before_anything_is_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(campaign, "visible_gpus", lambda wanted: 1)
    result = call(f"{FAMILY} --out {tmp_path / 'measured'} --plan missing")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "Error: the missing plan needs the dataset that it adds to: --like DATA" in result.stderr
    assert not (tmp_path / "measured").exists()


def test_no_gpu_is_said_in_one_line_and_nothing_is_written(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "measured"
    result = call(f"{FAMILY} --out {out}")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "Error: no GPU is visible here" in result.stderr
    assert not out.exists()


def test_a_run_shows_its_progress_its_outcome_and_where_the_dataset_lies(collect):
    result = call(f"{FAMILY} --out measured")
    assert f"1/3 {collect.cases[0].problem} · 12 configs/s · 2 min left" in result.stderr
    assert "3 problems in 61 s, exhaustive plan; measurements: 90 ok, 10 early-stopped" in result.stdout
    assert "2 configs/s; GPUs: 2, busy 83 % of the time; 120 s of compiling, 4 s lost to aborts" in result.stdout
    assert "Written to measured" in result.stdout
    assert "again" not in result.stdout


def test_what_was_not_measured_is_said(collect):
    skipped = ("fake n=8: OutOfMemoryError: 12 GiB",)
    collect.summary = replace(SUMMARY, cases=2, measurements=60, statuses={"ok": 60}, skipped=skipped, complete=False)
    shown = call(f"{FAMILY} --out measured").stdout
    assert "Skipped fake n=8: OutOfMemoryError: 12 GiB" in shown
    assert "not measured yet: run the same command again to continue" in shown
    told = json.loads(call(f"{FAMILY} --out measured --json").stdout)
    assert told == {
        "plan": "exhaustive",
        "cases": 2,
        "measurements": 60,
        "statuses": {"ok": 60},
        "seconds": 61.0,
        "gpus": 2,
        "configs_per_s": 1.64,
        "gpu_busy_share": 0.83,
        "compile_s": 120.0,
        "lost_s": 4.0,
        "drifted": {},
        "skipped": ["fake n=8: OutOfMemoryError: 12 GiB"],
        "complete": False,
        "interrupted": False,
        "replay_of": None,
        "out": "measured",
    }


def test_problems_during_which_the_gpu_was_slower_are_said(collect):
    collect.summary = replace(SUMMARY, drifted={"fake n=8": 1.523})
    assert "up to 52.3 % slower than usual during fake n=8" in call(f"{FAMILY} --out measured").stdout


def test_ctrl_c_is_said_and_is_exit_code_130(collect):
    collect.summary = replace(SUMMARY, complete=False, interrupted=True)
    result = call(f"{FAMILY} --out measured")
    assert result.exit_code == 130
    assert "Interrupted." in result.stdout
    assert "run the same command again to continue" in result.stdout


def test_a_lost_gpu_is_one_line_and_exit_code_1(collect):
    collect.raises = DeviceLostError("the GPU was lost (illegal memory access). Run the same command again to continue")
    result = call(f"{FAMILY} --out measured")
    assert result.exit_code == 1
    assert "Error: the GPU was lost (illegal memory access)" in result.stderr
    assert "Traceback" not in result.stderr
