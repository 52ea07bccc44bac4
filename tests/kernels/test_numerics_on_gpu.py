"""The check of numerics classes on cards: what it samples and reports, and a small run of it on the card here."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from foretune.datasets import DeviceSpec, KernelConfig
from foretune.kernels import find_measurable

SCRIPT = Path(__file__).with_name("numerics_on_gpu.py")
spec = importlib.util.spec_from_file_location("numerics_on_gpu", SCRIPT)
check = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check)
H200 = DeviceSpec.named("h200")


@pytest.mark.parametrize("name", [name for name in check.PARTS if name != "fused_moe_down"])  # like fused_moe
def test_the_sample_has_every_class_of_the_space_and_few_binaries(name):
    family, part = find_measurable(name), check.PARTS[name][0]
    found = check.sample(family, part, H200, int(130 * part.share))
    able = [c for c in family.space(H200) if family.supports(c, found.problems[-1], H200) is None]
    assert found.binaries <= 130 * part.share
    if not name.startswith("rms_norm_rope"):  # each config is a class of its own
        for problem in found.problems[::5]:
            of_all = {family.numerics(config, problem) for config in able}
            assert {family.numerics(config, problem) for config in found.labels} == of_all
    values = {item for config in able for item in config.to_json().items()}
    assert {item for config in found.labels for item in config.to_json().items()} == values


def test_labels_tell_classes_apart_that_differ_in_numbers_only():
    family, part = find_measurable("matmul"), check.Part("fp16", (), 20, 0.7)
    labels = set(check.sample(family, part, H200, 90).labels.values())
    assert labels >= {f"tensor_core SPLIT_K=2 ('tensor_core', 2, {depth})" for depth in (2080, 2112, 2304)}


def test_knobs_that_tell_two_groups_apart():
    def configs(tma, *stages):
        return [KernelConfig.of(TMA=tma, num_warps=4, num_stages=stage) for stage in stages]

    assert check.telling(configs(0, 2, 3), configs(1, 3, 4)) == "TMA 0 : 1"


def record(problem, **classes):
    return {"problem": problem, "part": 0, "classes": {label: list(found) for label, found in classes.items()}}


def test_classes_that_always_agree_could_be_merged():
    records = [
        record("one", a=("('warp', 64)", 1), b=("('warp', 128)", 1), c=("('warp_group', 64)", 2)),
        record("two", a=("('warp', 64)", 3), b=("('warp', 64)", 3), c=("('warp_group', 64)", 3)),
    ]
    text = "\n".join(check.agreements(records))
    assert "1 of 3 pairs of classes always had equal bits" in text
    assert "could be merged: a; b" in text
    assert "MMA AGAINST WGMMA, whole sums: equal bits in 2 of 3 comparisons" in text


def test_a_log_continues_after_a_crash_without_the_config_that_ran(tmp_path):
    log = check.Log(tmp_path / "task.jsonl")
    assert log.todo("one")
    log.add(problem="one", complete=True, errors=[])
    assert log.todo("two")
    log.add(trying="BLOCK_M=64")
    with (tmp_path / "task.jsonl").open("a") as file:
        file.write('{"problem": "tw')
    again = check.Log(tmp_path / "task.jsonl")
    assert (again.todo("one"), again.todo("two")) == (False, True)
    assert again.faults == {"BLOCK_M=64": "the process ended while it ran"}
    for _ in range(check.STARTS):
        check.Log(tmp_path / "task.jsonl").todo("two")
    assert check.Log(tmp_path / "task.jsonl").records["two"]["complete"]


@pytest.mark.gpu
def test_a_small_run_finds_no_class_with_two_kinds_of_bits(tmp_path):
    tasks = ["grouped_gemm_fwd", "matmul", "rms_norm_rope_fwd", "rows rms_norm_rope"]
    options = ["--binaries", "24", "--problems", "2", "--limit-s", "600"]
    command = [sys.executable, str(SCRIPT), str(tmp_path), *tasks, *options]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
