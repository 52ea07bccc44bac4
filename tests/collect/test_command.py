"""`foretune collect`: what its options ask for, and what a person sees of a run."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from foretune.__main__ import app
from foretune.collect import campaign, shapes
from foretune.collect.campaign import Progress, Summary
from foretune.collect.measuring import DeviceLostError
from foretune.datasets import load_models
from typer.testing import CliRunner

FAMILY = "grouped_gemm_fwd"
MODELS = "model,num_experts,top_k,hidden_size,moe_intermediate_size\nMine-1B,16,4,1024,512\n"


def call(line):
    return CliRunner().invoke(app, ["collect", *shlex.split(line)], env={"COLUMNS": "200"})


class Collect:
    """Stands in for `campaign.collect`: notes what it is asked for, and says what it is told to."""

    def __init__(self):
        self.raises = None
        self.summary = Summary(3, 100, {"ok": 90, "hopeless": 10}, 61.0, (), True)

    def __call__(self, family, cases, out, *, on_progress, **options):
        self.family, self.cases, self.out, self.options = family, cases, out, options
        on_progress(Progress(1, 3, cases[0], 50, 12.5, 90.0))
        if self.raises:
            raise self.raises
        return self.summary


@pytest.fixture
def collect(monkeypatch):
    stand_in = Collect()
    monkeypatch.setattr(campaign, "collect", stand_in)
    return stand_in


def test_measures_the_layers_of_the_shipped_models_unless_told_otherwise(collect):
    result = call(f"{FAMILY} --out measured")
    assert result.exit_code == 0, result.stderr
    assert (collect.family.name, collect.out) == (FAMILY, Path("measured"))
    assert collect.cases == shapes.cases(FAMILY, load_models())
    assert collect.options == {"budget_s": None, "resume": True}


def test_options_reach_the_shapes_and_the_campaign(collect, tmp_path):
    table = tmp_path / "models.csv"
    table.write_text(MODELS)
    options = "--tokens 16,4096 --per-layer 3 --random 5 --seed 7 --budget 1.5h --no-resume"
    assert call(f"{FAMILY} --models {table} --out measured {options}").exit_code == 0
    drawn = shapes.cases(FAMILY, load_models(table), tokens=(16, 4096), per_layer=3, random=5, seed=7)
    assert collect.cases == drawn
    assert len(drawn) == 2 * 3 + 5
    assert collect.options == {"budget_s": 5400.0, "resume": False}


def test_its_help_says_what_is_measured_by_default():
    told = " ".join(call("--help").stdout.replace("│", " ").split())
    assert "[default: (the shipped models.csv)]" in told
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
    assert "3 problems in 61 s; measurements: 90 ok, 10 hopeless" in result.stdout
    assert "The dataset lies in measured" in result.stdout
    assert "again" not in result.stdout


def test_what_was_not_measured_is_said(collect):
    collect.summary = Summary(2, 60, {"ok": 60}, 61.0, ("fake n=8: OutOfMemoryError: 12 GiB",), False)
    shown = call(f"{FAMILY} --out measured").stdout
    assert "Skipped fake n=8: OutOfMemoryError: 12 GiB" in shown
    assert "not measured yet: run the same command again to go on" in shown
    told = json.loads(call(f"{FAMILY} --out measured --json").stdout)
    assert told == {
        "cases": 2,
        "measurements": 60,
        "statuses": {"ok": 60},
        "seconds": 61.0,
        "skipped": ["fake n=8: OutOfMemoryError: 12 GiB"],
        "complete": False,
        "out": "measured",
    }


def test_a_lost_gpu_is_one_line_and_exit_code_1(collect):
    collect.raises = DeviceLostError("the GPU was lost (illegal memory access). Run the same command again to go on")
    result = call(f"{FAMILY} --out measured")
    assert result.exit_code == 1
    assert "Error: the GPU was lost (illegal memory access)" in result.stderr
    assert "Traceback" not in result.stderr
