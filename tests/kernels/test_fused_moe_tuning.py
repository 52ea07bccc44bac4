"""Which rows are written: predicted, and by the measuring flow with a timer that reads the estimate."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from commands import call
from foretune.datasets import DeviceSpec, ForetuneError, KernelConfig, load
from foretune.kernels import find_family
from foretune.kernels.fused_moe import FusedMoeDown, FusedMoeUp, Layer, tuning, workload
from foretune.kernels.fused_moe.engines import ENGINES, SGLANG, VLLM
from foretune.kernels.fused_moe.tuned_files import DEFAULT, OURS, TunedRow, TunedTable, default_pair, row_for
from foretune.model import Bundle, LightGBMRanker, TrainingSet, load_bundle, split_folds, split_groups
from foretune.runtime.timing import timer as timer_module

H200 = DeviceSpec.named("h200")
LAYER = Layer(experts=60, topk=4, hidden=2048, inter=704)


@pytest.fixture
def none_installed(monkeypatch):
    """Whatever is installed here, the answer is as without: no shipped file, no version."""
    monkeypatch.setattr(tuning, "installed", lambda: ())
    monkeypatch.setattr(tuning, "table_in_force", lambda *of: TunedTable())


@pytest.fixture
def nothing_learned():
    """A bundle that knows other families alone."""
    shipped = load_bundle()
    return Bundle({"matmul": shipped.trained["matmul"]}, shipped.lightgbm_version)


def test_next_to_a_tuned_file_a_prediction_must_promise_more(none_installed, monkeypatch):
    """It promises some of it next to the fastest config of all, too."""
    pair = default_pair(SGLANG, LAYER, 64)
    table = TunedTable({64: TunedRow(pair.entries, pair)}, Path("there"))
    alone = tuning.tune_layer(SGLANG, LAYER, H200, batches=[64])
    monkeypatch.setattr(tuning, "table_in_force", lambda *of: table)
    beside = tuning.tune_layer(SGLANG, LAYER, H200, batches=[64])
    assert alone.least < beside.least == tuning.OVER_TUNED


@pytest.mark.slow
def test_what_is_promised_over_the_fastest_of_all_is_less_than_a_tuned_row_must_lose_by():
    """Of models that it did not learn from: a ranker's first choice, as it predicts it, over the fastest measured."""
    promised = []
    for name in ("fused_moe", "fused_moe_down"):
        family = find_family(name)
        grid = TrainingSet.of(load("h200_fused_moe"), family).grid
        folds = split_folds(split_groups(grid.cases), 5)
        for fold in range(5):
            ranker = LightGBMRanker().fit(grid.select(np.flatnonzero(folds != fold)), family)
            for row in np.flatnonzero(folds == fold):
                ran = np.flatnonzero(np.isfinite(grid.times_us[row]))
                configs = tuple(grid.configs[column] for column in ran)
                slowdowns = ranker.predict(family, grid.cases[row].problem, grid.devices[row], configs)
                promised.append(slowdowns[grid.times_us[row, ran].argmin()] / slowdowns.min())
    assert 1.05 < np.percentile(promised, 90) <= tuning.OVER_TUNED, np.percentile(promised, [50, 90, 100])


@pytest.mark.parametrize("engine", ENGINES)
def test_without_measurements_the_estimate_says_what_and_says_so(engine, none_installed, nothing_learned):
    seen = []
    files = tuning.tune_layer(engine, LAYER, H200, bundle=nothing_learned, batches=[4096, 1], on_row=seen.append)
    assert [row.tokens for row in files.rows] == [1, 4096] == [row.tokens for row in seen]
    assert not files.measured
    assert "by the analytic estimate alone" in files.reason
    assert f"{engine} is not installed here" in files.reason
    assert "predicted, not measured" in files.verdict
    assert files.verdict.startswith("worth it" if files.to_json()["worth_it"] else "not worth it")
    for row in files.rows:
        assert row.times_us[OURS] <= row.times_us[DEFAULT]
        if row.pinned:
            assert row.entries == default_pair(engine, LAYER, row.tokens).entries
            assert row.gain == 1.0
        else:
            assert row.gain >= files.least
        assert engine == SGLANG or row.entries.down == {"USE_TMA": False} | row.entries.up


def test_what_was_measured_of_one_engine_confirms_nothing_of_another_or_of_another_card(none_installed):
    least = {}
    for engine, device in ((SGLANG, H200), (VLLM, H200), (SGLANG, replace(H200, name="NVIDIA GH200"))):
        files = tuning.tune_layer(engine, LAYER, device, batches=[64])
        assert "predicted by bundle" in files.reason
        least[engine, device.name] = files.least
    sglang, *others = least.values()
    assert others == [max(others)] * 2
    assert 1 < sglang < max(others)


class _EstimatingTimer:
    """Reads the family's estimate; of the default half of it, so that nothing is gained."""

    def sample(self, launch, samples, before=None):
        return [launch()] * samples

    def time(self, launch):
        return timer_module.Timing.of([launch()])


def launch_as(launch, monkeypatch):
    """An engine is here, and each launch takes what this says."""
    monkeypatch.setattr(tuning, "installed", lambda: ENGINES)
    monkeypatch.setattr(timer_module, "Timer", _EstimatingTimer)
    monkeypatch.setattr(tuning, "_is_right", lambda *of: True)
    for family in (FusedMoeUp, FusedMoeDown):
        monkeypatch.setattr(family, "launch", launch)
        monkeypatch.setattr(family, "inputs", lambda self, problem, device, seed=0: problem)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("default_wins", [False, True])
def test_what_is_measured_decides(engine, default_wins, none_installed, monkeypatch):
    default = default_pair(engine, LAYER, 512)
    ran, compiled = [], []

    def launch(self, inputs, config):
        ran.append(config)
        if len(ran) == 2:
            raise RuntimeError("this one does not launch")
        us = float(self.estimate_us(inputs, H200, [config])[0])
        return us / 100 if default_wins and config in (default.up, default.down) else us

    launch_as(launch, monkeypatch)
    files = tuning.tune_layer(
        engine,
        LAYER,
        H200,
        measure=True,
        batches=[512],
        compile_ahead=lambda family, calls, device: compiled.extend(calls),
        others=lambda tokens: {"search": default},
    )
    (row,) = files.rows
    assert files.measured
    assert set(row.times_us) == {OURS, DEFAULT, "search"}
    assert row.times_us["search"] == row.times_us[DEFAULT]
    assert row.pinned == (DEFAULT if default_wins else "")
    assert len({config for config, _ in compiled}) <= 2 * (tuning.CANDIDATES + 1)
    assert {config for config, _ in compiled} >= set(ran)
    assert f"the {tuning.CANDIDATES} best of each product were timed" in files.reason


def test_what_others_found_is_raced_and_has_no_part_in_the_choice(none_installed, monkeypatch):
    alike = [dict.fromkeys(family().space(H200), 1.0) for family in (FusedMoeUp, FusedMoeDown)]
    found = tuning.best_pairs(SGLANG, *alike)
    best = found[-1][1]  # the last of all: nothing predicts it to be fast

    def launch(self, inputs, config):
        return 1.0 if config in (best.up, best.down) else 100 + float(self.estimate_us(inputs, H200, [config])[0])

    launch_as(launch, monkeypatch)
    files = tuning.tune_layer(SGLANG, LAYER, H200, measure=True, batches=[512], others=lambda tokens: {"search": best})
    (row,) = files.rows
    assert row.times_us["search"] == 2.0
    assert row.times_us[OURS] > 200


def test_measuring_takes_the_engine(none_installed):
    with pytest.raises(ForetuneError, match="pip install vllm, or --no-deps vllm"):
        tuning.tune_layer(VLLM, LAYER, H200, measure=True)


def test_the_best_pair_shares_its_sorting():
    def of(m, n):
        return KernelConfig.of(BLOCK_SIZE_M=m, BLOCK_SIZE_N=n)

    up = {of(16, 64): 1.0, of(32, 64): 2.0}
    down = {of(16, 64): 9.0, of(32, 64): 5.0, of(32, 128): 3.0, of(64, 64): 0.1}
    (us, best), *_ = tuning.best_pairs(SGLANG, up, down)
    assert (us, best.up, best.down) == (5.0, of(32, 64), of(32, 128))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"model": "Qwen9"}, "unknown model 'Qwen9'; known: Mixtral-8x7B"),
        ({"model": "Mixtral-8x7B", "experts": 8}, "Mixtral-8x7B has its own experts"),
        ({"experts": 8, "inter": 128}, "topk and hidden missing"),
        ({"experts": 8, "topk": 9, "hidden": 64, "inter": 64}, "topk must be at most experts, 8, but is 9"),
        ({"model": "Nemotron-3-Nano-30B-A3B"}, "the experts of Nemotron-3-Nano-30B-A3B have no gate"),
        ({"model": "Mixtral-8x7B", "tp": 3}, "tp must divide inter, 14336, but is 3"),
        ({"model": "Qwen3-30B-A3B", "tp": 4, "dtype": "fp8e4m3"}, "768 / 4 is 192"),
        ({"model": "Mixtral-8x7B", "dtype": "int4"}, "dtype must be one of bf16, fp16, fp8e4m3"),
    ],
)
def test_a_layer_that_cannot_be_is_refused(given, why):
    with pytest.raises(ForetuneError, match=why):
        workload.requested_layer(**given)


def test_a_model_of_two_names_is_known_by_its_first():
    assert workload.requested_layer("DeepSeek-V3", tp=8) == workload.requested_layer("DeepSeek-V3/R1", tp=8)


def test_the_command_writes_the_files_with_their_verdict(tmp_path, none_installed, monkeypatch):
    monkeypatch.setattr("foretune.kernels.commands.datasets.live_gpu", lambda: None)  # which would import torch
    monkeypatch.setattr(tuning, "tune_layer", partial(tuning.tune_layer, batches=[1, 64]))
    line = "export vllm --experts 8 --topk 2 --hidden 1024 --inter 512 --tp 2 --device h200 --json --out"
    said = json.loads(call(line, tmp_path).stdout)
    assert said["files"] == ["E=8,N=256,device_name=NVIDIA_H200.json"]
    written = json.loads((tmp_path / said["files"][0]).read_text())
    for row in said["rows"]:
        assert written[str(row["tokens"])] == row["up"]
    assert said["variable"] == "VLLM_TUNED_CONFIG_FOLDER"
    assert ("not worth it" in said["verdict"]) is not said["worth_it"]


def test_the_command_needs_a_format_for_a_dataset_and_a_card_to_measure(tmp_path):
    assert "a dataset needs a format: t4 or csv" in call("export h200 --out", tmp_path / "x").output
    line = "export vllm --model Mixtral-8x7B --measure --device h100 --out"
    assert "--measure: this machine has no NVIDIA H100" in " ".join(
        call(line, tmp_path).output.replace("│", " ").split()
    )


def tuned_by_vllm(tmp_path, monkeypatch):
    """A file of vLLM's for a block-scaled layer, with rows as it ships some; returns the layer and the file's rows."""
    layer = Layer(256, 8, 7168, 512, "fp8e4m3")
    row = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1}
    row |= {"num_warps": 4, "num_stages": 4}
    rows = {
        1: row | {"BLOCK_SIZE_M": 8},  # no block of our space
        64: row | {"BLOCK_SIZE_K": 256},  # launched as 128
        96: row | {"BLOCK_SIZE_N": 16},
        100: row | {"num_warps": 8},
        8192: row | {"waves_per_eu": 2, "BLOCK_SIZE_M": 64},
    }
    file = tmp_path / "E=256,N=512,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"
    file.write_text(json.dumps({"triton_version": "3.5.0"} | rows))
    monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", str(tmp_path))
    return layer, rows


def test_rows_that_the_engine_tuned_are_read_as_it_launches_them_and_kept(tmp_path, monkeypatch):
    layer, rows = tuned_by_vllm(tmp_path, monkeypatch)
    monkeypatch.setattr(tuning, "_UNCONFIRMED", 1e9)  # nothing gains that much
    files = tuning.tune_layer(VLLM, layer, H200)
    by_tokens = {row.tokens: row for row in files.rows}
    assert by_tokens[64].times_us.keys() == {OURS, DEFAULT, "shipped"}
    assert by_tokens[1].times_us.keys() == by_tokens[96].times_us.keys() == {OURS, DEFAULT}
    assert {row.pinned for row in files.rows} == {"shipped"}
    assert {row.gain for row in files.rows} == {1.0}
    (written,) = files.tables().values()
    written = {int(tokens): row for tokens, row in written.items() if tokens != "triton_version"}
    for tokens in range(1, 10_000):
        assert row_for(written, tokens) == row_for(rows, tokens), tokens


def test_a_row_that_gains_takes_the_place_of_one_that_can_be_ranked_alone(tmp_path, monkeypatch):
    layer, rows = tuned_by_vllm(tmp_path, monkeypatch)
    monkeypatch.setattr(tuning, "_UNCONFIRMED", 0.0)  # ours always wins
    files = tuning.tune_layer(VLLM, layer, H200)
    (written,) = files.tables().values()
    for row in files.rows:
        can_be_ranked = "shipped" in row.times_us
        assert row.pinned == ("" if can_be_ranked else "shipped")
        assert written[str(row.tokens)] == (row.entries.up if can_be_ranked else row_for(rows, row.tokens))
    assert written["100"] == rows[100]  # a batch that our files have no row for
    assert written["8192"] == rows[8192]


def test_the_file_in_the_folder_is_the_one_in_force_and_is_not_replaced_unasked(tmp_path, monkeypatch):
    layer, rows = tuned_by_vllm(tmp_path, monkeypatch)
    out = tmp_path / "out"
    out.mkdir()
    (there,) = tmp_path.glob("*.json")
    mine = out / there.name
    mine.write_text(json.dumps({"1": rows[1]}))
    files = tuning.tune_layer(VLLM, layer, H200, batches=[1, 64], out=out)
    assert files.now.file == mine
    assert [*files.now.rows] == [1]
    with pytest.raises(ForetuneError, match=r"NVIDIA_H200.*exists already: pass another folder, or --force"):
        files.save(out)
    assert json.loads(mine.read_text()) == {"1": rows[1]}
    files.save(out, force=True)
    files.save(out)  # the same contents
    assert json.loads(mine.read_text())["1"] == rows[1]
    line = f"export vllm --experts 256 --topk 8 --hidden 7168 --inter 512 --dtype fp8e4m3 --device h200 --out {out}"
    refused = call(line)
    assert refused.exit_code == 1
    assert "exists already" in " ".join(refused.output.replace("│", " ").split())
