"""Test that wrong input is refused at once, with one line that names it and the right exit code."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import FAMILY, LAYER, MEASURED, PREDICT, built, call, words
from foretune.__main__ import app
from foretune.datasets import DeviceSpec

DIGITS = "9" * 5000
COLLECT = f"collect {FAMILY} --out o"
COVER = f"cover {FAMILY} --device h200 --dynamic rows --range 64:96 --groups 64 --n 2048 --k 1024"


@pytest.mark.parametrize(
    "line",
    [
        "tune",
        "train --data h200",
        "quickstart --fast",
        "export h200 --format csv",
        "datasets --fast",
        "datasets show",
        "datasets merge h200",
        "datasets seal h200",
        "bench kernels fast",
        "bench runtime --repeats 0",
        "bench predictions now",
        "evaluate h200",
        "replay h200",
        "device a b",
        "collect",
        f"collect {FAMILY}",
        "evaluate --bundle b --split device",
        "evaluate --jobs 0",
        f"{COLLECT} --scheduler tcp://host:1 --gpus 2",
        f"{COLLECT} --scheduler tcp://host:1 --sms 64",
        "cache show a b",
        "cache export",
        "cache import",
        f"cache freeze {FAMILY}",
        "cache freeze --out o",
    ],
)
def test_wrong_usage_exits_with_2_and_is_told_in_json_too(line: str) -> None:
    plain, as_json = call(line), call(line, "--json")
    assert (plain.exit_code, as_json.exit_code) == (2, 2)
    assert plain.stdout == ""
    said = json.loads(as_json.stdout)
    assert list(said) == ["error"]
    assert words(said["error"]) in words(as_json.stderr)


def test_an_error_is_one_line_whatever_it_names() -> None:
    told = call("datasets show", "no\nsuch\x1b[31m")
    assert told.exit_code == 1
    assert told.stderr.startswith("Error: no\\nsuch\\x1b[31m: neither a folder")
    assert told.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (f"{PREDICT} --dtype int8", "--dtype: 'int8' is not one of bf16, fp16"),
        (f"{PREDICT} --dtype [/foo]", "--dtype: '[/foo]' is not one of bf16, fp16"),
        (
            f"{PREDICT} --m 4",
            "'--m' is not an option; grouped_gemm_fwd takes --groups N --rows N --n N --k N "
            "[--permute_x] [--permute_y] [--dtype bf16|fp16|fp32]",
        ),
        (f"{PREDICT} --row 8", "'--row' is not an option (did you mean '--rows'?); grouped_gemm_fwd takes"),
        (f"{PREDICT} --bundel b", "'--bundel' is not an option (did you mean '--bundle'?)"),
        (f"{PREDICT} --dtype bfloat16", "is not one of bf16, fp16, fp32 (did you mean 'bf16'?)"),
        (f"{COVER} --dynamic row", "--dynamic: 'row' is not one of groups, rows, n, k (did you mean 'rows'?)"),
        (f"{PREDICT} --configs 2 --top 2", "--top: is the old name of --configs: give only --configs"),
        (f"{PREDICT} --tp 2", "--tp: needs a model: give --model"),
        (f"{PREDICT} --model Grok-1", "'--groups' is given twice"),
        ("evaluate --splitt model", "--split"),
        (f"{PREDICT} --n 8", "'--n' is given twice"),
        (f"{PREDICT} --permute_x --permute_x", "'--permute_x' is given twice"),
        (f"predict {FAMILY} --device h200 --groups 64 --rows 8192", "--n --k missing; grouped_gemm_fwd takes --groups"),
        (f"predict {FAMILY} --device h200 --groups 64 --n 8 --k 8 --rows", "--rows: must be a whole number"),
        (f"{COVER} --dynamic m", "--dynamic: 'm' is not one of groups, rows, n, k"),
        (f"{COVER} --rows 8", "--rows: is the dynamic dimension: --range gives its sizes"),
        (f"{COVER} --rows=8", "--rows: is the dynamic dimension: --range gives its sizes"),
        ("export sglang --model Grok-1 --out o --format csv", "--format: does not apply: sglang is an engine"),
        (
            "export h200 --format csv --out o --tp 2 --topk 2",
            "--topk: does not apply: h200 is a dataset, not an engine (sglang",
        ),
        ("warmup vllm --model Mixtral-8x7B --data h200", "--data: does not apply to vllm"),
        (f"warmup {FAMILY} --data h200 --experts 8", f"--experts: does not apply to {FAMILY}"),
        ("export hub --n 8 --out o", "--n: the hub's files are for weights of one shape: give --n and --k"),
        ("export hub --n 8 --k 8 --topk 2 --out o", "--topk: does not apply: hub is for kernels of Hugging Face's hub"),
        ("export vllm --model Grok-1 --n 8 --out o", "--n: does not apply: vllm is an engine"),
        (f"{COVER} --hints 64", "--hints: needs measured times: give --data"),
        (f"{COVER} --configs 3 --within 0.1", "--within: give --configs or --within, not both"),
        (f"{COVER} --data h200 --measure", "--measure: give --measure or --data, not both"),
    ],
)
def test_a_dimension_or_dtype_that_a_family_lacks_exits_with_2_and_lists_them(line: str, named: str) -> None:
    result = call(line)
    assert result.exit_code == 2
    assert named in words(result.stderr)


@pytest.mark.parametrize(
    ("line", "option", "right", "values"),
    [
        (
            f"predict {FAMILY} --device h200 --rows 8 --n 8 --k 8",
            "--groups",
            "from 1 to 65536",
            ("2147483648", "0", "-5"),
        ),
        (
            f"predict {FAMILY} --device h200 --groups 8 --n 8 --k 8",
            "--rows",
            "from 1 to 1073741823",
            ("many", "1.5", "0"),
        ),
        (PREDICT, "--configs", "from 1 to 2147483647", ("0", str(10**30), "\u0664")),
        (COVER, "--range", "a smallest and a largest size, as in 64:4096", ("64", "96:64", "0:8", "64:many", "64-96")),
        (COVER, "--configs", "from 1 to 16", ("0", "17")),
        ("device h200", "--sms", "from 1 to 10000", ("0", "10001")),
        ("replay", "--share", "a number from 0.001 to 1", ("nan", "inf", "1.5", "0", "1e400", "0_1")),
        ("export h200 --format csv --out o", "--problem", "from 0 to 2147483647", ("-1", "2147483648")),
        (
            COLLECT,
            "--gpus",
            "a number, or all): must be a whole number from 1 to 1024",
            ("0", "-1", "1025", "two", "1.5"),
        ),
        (COLLECT, "--sms", "each number from 1 to 10000", ("0", "-8", "32,,64", "10001", "half", "32,", "64.0")),
        (COLLECT, "--tokens", "each number from 1 to 2147483647", ("16,many", "0", "2147483648", "16 32")),
        (COLLECT, "--budget", "a duration such as 90s, 20m or 1h30m, of at most 10000h", ("20x", "0m", "1e400", "-1s")),
        (COLLECT, "--budget", "a duration such as 90s", ("40s8m", "1..5h", "h", "5s5m")),
        (COLLECT, "--budget", "a duration such as 90s", ("99999999999999999999h", "10001h", "\u0662s", "nans")),
        (COLLECT, "--per-layer", "from 0 to 100", ("-1", "101")),
        (COLLECT, "--random", "from 0 to 10000", ("-1", str(10**9))),
        (COLLECT, "--seed", "from 0 to 2147483647", ("-1", str(2**63))),
        (COLLECT, "--limit", "from 1 to 2147483647", ("0", "2147483648")),
        (f"cache freeze {FAMILY} --out o", "--rules", "from 1 to 1000", ("0", "1001", "-1")),
        (COLLECT, "--max-tflop", "a number from 0 to 1e+06", ("nan", "inf", "-1", "1e400")),
    ],
)
def test_a_number_out_of_bounds_exits_with_2_and_is_told_them(
    line: str, option: str, right: str, values: tuple[str, ...]
) -> None:
    for value in (*values, DIGITS, "x" * 5000):
        result = call(f"{line} {option}={value!r}")
        said = words(result.stderr)
        assert result.exit_code == 2, (value, said)
        assert option in said
        assert right in said
        assert len(said) < 900  # with the usage lines
        assert len(value) > 60 or f"is '{value}'" in said


def test_a_list_is_no_longer_than_anybody_types() -> None:
    result = call(f"{COLLECT} --tokens", ",".join(["16"] * 1001))
    assert result.exit_code == 2
    assert "--tokens: must be at most 1000 numbers but there are 1001" in words(result.stderr)


def commands() -> dict[str, Any]:
    """Return every command by its words."""
    top = built(app).commands  # type: ignore[attr-defined]
    found = {name: command for name, command in top.items() if name not in ("bench", "datasets", "cache")}
    found |= {
        f"{group} {name}": one for group in ("bench", "datasets", "cache") for name, one in top[group].commands.items()
    }
    return found


OPTIONS = [
    (name, parameter.opts[0])
    for name, command in commands().items()
    for parameter in command.params
    if parameter.param_type_name == "option" and not parameter.is_flag
]


@pytest.mark.parametrize(("command", "option"), OPTIONS)
def test_an_empty_value_as_an_unset_variable_leaves_it_is_refused(command: str, option: str) -> None:
    for given in ([option, ""], [f"{option}="], [option, " "]):
        result = call(command, *given, "--json")
        assert result.exit_code == 2
        assert f"{option}: is empty" in words(result.stderr)
        assert option in json.loads(result.stdout)["error"]


@pytest.mark.parametrize("line", ["evaluate ''", "datasets show ''", "collect '' --out o", f"{PREDICT} --rows ''"])
def test_an_empty_argument_is_refused(line: str) -> None:
    result = call(line)
    assert result.exit_code == 2
    assert "is empty: is a shell variable unset?" in words(result.stderr)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("datasets show h300", "h300"),
        ("datasets show '[/foo]'", "[/foo]: neither a folder nor"),
        (f"datasets merge {MEASURED} no/such --out o", "no/such"),
        ("datasets seal no/such --out o", "no/such"),
        ("train --data no/such/folder --out bundle", "no/such/folder"),
        ("train --data h200_fused_moe --winners trt --out bundle", "engine must be one of sglang, vllm but is 'trt'"),
        ("evaluate --data no/such/folder", "no/such/folder"),
        ("evaluate --bundle no/such/bundle", "no/such/bundle"),
        ("replay --data no/such/folder", "no/such/folder"),
        (f"predict gemm --device h200 {LAYER}", "unknown kernel family 'gemm'; known: "),
        (
            f"predict grouped_gem_fwd --device h200 {LAYER}",
            "'grouped_gem_fwd' (did you mean 'grouped_gemm_fwd'?); known: ",
        ),
        (
            f"predict ./missing.py:X --device h200 {LAYER}",
            "no kernel family at './missing.py:X': there is no Python file",
        ),
        (f"predict ./missing.py --device h200 {LAYER}", "as './missing.py:YourFamily'"),
        (f"predict {FAMILY} --device h300 {LAYER}", "unknown device 'h300'; known: "),
        (f"{PREDICT} --bundle no/such/bundle", "no/such/bundle"),
        ("bench predictions --device h200 --family fakes:FakeFamily", "the bundle has no family 'fake'"),
        (f"predict {FAMILY} --device h200 --groups 64 --rows 8 --n 2047 --k 64", "multiples of 8 but are 2047 and 64"),
        (f"predict {FAMILY} --device no/such.json {LAYER}", "no/such.json: cannot be read"),
        ("device h200 --sms 133", "the number of SMs must be 1 to 132 for NVIDIA H200 but is 133"),
        ("export h300 --format csv --out o", "h300"),
        (f"export {MEASURED} --format t4 --out o --problem 100000", "problem must be 0 to "),
        (f"export {MEASURED} --format t4 --out no/such/folder/o --problem 0", "no/such/folder/o"),
        ("device h300", "unknown device 'h300'; known: "),
        ("device no/such.json", "no/such.json: cannot be read"),
        (f"collect {FAMILY} --models no/such.csv --out o", "no/such.csv"),
        (f"{COLLECT} --tokens 16,4194305", "token counts must be between 1 and 4194304"),
        ("collect gemm --models no/such.csv --out o", "gemm"),
        ("cache show no.such.kernel", "has no choices of 'no.such.kernel'"),
        ("cache clear no.such.kernel", "has no choices of 'no.such.kernel'"),
        ("cache export --out o", "there is nothing to export"),
        ("cache export --out no/such/folder/o", "no/such/folder/o cannot be written"),
        ("cache import no/such/file", "no/such/file: cannot be read"),
        ("cache freeze no.such.kernel --out o", "has no choices of 'no.such.kernel'"),
        ("cache freeze gemm --device h200 --out o", "unknown kernel family 'gemm'; known: "),
        (f"cache freeze {FAMILY} --device h300 --out o", "unknown device 'h300'; known: "),
        (f"cache freeze {FAMILY} --device h200 --bundle no/such --out o", "no/such"),
        (f"cache freeze {FAMILY} --device h200 --out no/such/o", "no/such/o cannot be written"),
    ],
)
def test_bad_input_exits_with_1_and_is_named(
    line: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FORETUNE_CACHE_DIR", str(tmp_path / "cache"))
    plain, as_json = call(line), call(line, "--json")
    assert (plain.exit_code, as_json.exit_code) == (1, 1)
    assert named in plain.stderr
    assert plain.stderr.count("\n") == 1
    assert plain.stdout == ""
    assert named in json.loads(as_json.stdout)["error"]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("evaluate --data h100 --baselines random,other", "one is 'other'"),
        ("evaluate --split modle", "must be one of model, device, size but is 'modle' (did you mean 'model'?)"),
        (f"{COLLECT} --plan greedy", "must be one of exhaustive, adaptive, thin, missing, outdated but is 'greedy'"),
        (f"export {MEASURED} --format xml --out o", "must be one of t4, csv but is 'xml'"),
        ("cache export --out o --format xml", "must be one of foretune, fla but is 'xml'"),
        ("export vllm --model Mixtral-8x7B --out o --dtype int8", "must be one of bf16, fp16, fp8e4m3 but is 'int8'"),
    ],
)
def test_a_word_that_an_option_does_not_have_exits_with_2(line: str, named: str) -> None:
    plain, as_json = call(line), call(line, "--json")
    assert (plain.exit_code, as_json.exit_code) == (2, 2)
    assert named in words(plain.stderr)
    assert named in json.loads(as_json.stdout)["error"]


def test_a_family_in_a_file_is_found_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "in_a_file.py").write_text("from fakes import FakeFamily\nclass Mine(FakeFamily):\n    name = 'mine'\n")
    monkeypatch.chdir(tmp_path)
    for place in ("./in_a_file.py:Mine", "in_a_file.py:Mine", str(tmp_path / "in_a_file.py:Mine")):
        assert "mine takes --groups N" in words(call(f"predict {place} --help").stdout)
    (tmp_path / "json.py").write_text("class Mine: pass")
    shadowed = call(f"predict ./json.py:Mine --device h200 {LAYER}")
    assert shadowed.exit_code == 1
    assert "importing 'json' finds " in shadowed.stderr
    assert "rename the file" in shadowed.stderr


def test_the_options_of_dimensions_and_flags_may_have_dashes() -> None:
    line, sizes = "predict rms_norm_rope_fwd --device h200 --configs 2 --json", "--tokens 64 --q_heads 8 --kv_heads 2"
    underscores = call(f"{line} {sizes} --head_dim 128")
    dashes = call(f"{line} {sizes.replace('_', '-')} --head-dim 128")
    assert underscores.exit_code == 0, underscores.stderr
    assert dashes.stdout == underscores.stdout
    twice = call(f"{line} {sizes} --q-heads 8 --head_dim 128")
    assert twice.exit_code == 2
    assert "'--q-heads' is given twice" in words(twice.stderr)


def test_the_old_name_of_an_option_works_with_a_warning_and_is_not_in_the_help() -> None:
    old, new = call(f"{PREDICT} --top 2 --json"), call(f"{PREDICT} --configs 2 --json")
    assert old.stdout == new.stdout
    assert (old.stderr, new.stderr) == ("Warning: --top is deprecated: use --configs\n", "")
    helps = [call(f"{command} --help").stdout.replace("--topk", "") for command in ("predict", "warmup")]
    assert all("--top" not in text for text in helps)


def test_a_problem_that_no_config_of_the_space_runs_is_not_said_to_have_configs() -> None:
    result = call("predict gated_mlp --device h200 --m 8 --n 32 --k 64 --dtype fp32")
    assert result.exit_code == 1
    assert "none of the configs can run this problem" in words(result.stderr)
    assert "would try" not in result.stderr


@pytest.mark.parametrize("line", ["device", f"predict {FAMILY} {LAYER}", "bench kernels", "bench runtime"])
def test_no_gpu_is_told_in_a_line_that_says_what_to_give(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = call(line)
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "no GPU is visible here" in result.stderr
    names = ", ".join(DeviceSpec.names())
    assert line.startswith("bench") or f"Devices that can be named instead: {names}" in result.stderr
    assert ("Name a device with --device" in result.stderr) is line.startswith("predict")


def test_a_gpu_of_an_arch_that_no_bundle_knows_gets_a_longer_list_that_says_why(tmp_path: Path) -> None:
    spec = DeviceSpec.named("h200").to_json() | {"name": "NVIDIA A100", "arch": "sm_80"}
    path = tmp_path / "a100.json"
    path.write_text(json.dumps(spec))
    result = call(f"predict {FAMILY} {LAYER} --configs 4 --json --device {path}")
    assert (result.exit_code, result.stderr) == (0, "")
    told = json.loads(result.stdout)
    assert len(told["shortlist"]) == 32
    assert told["reason"].startswith("no measurement of sm_80: predicted from the analytic model")


SPEC = json.dumps(DeviceSpec.named("h200").to_json())


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b" " * (1 << 20) + SPEC.encode(), "it has more than 1048576 bytes"),
        (SPEC.replace("132", "NaN").encode(), "sm_count must be"),
        (SPEC.replace("132", "Infinity").encode(), "sm_count must be"),
        (SPEC.replace("132", DIGITS).encode(), "not JSON: "),
        (b"[]", "not a device spec"),
        (b"", "not JSON: "),
        (b"\xff", "not JSON: "),
        (b"[" * 100_000, "not JSON: "),
    ],
)
def test_a_file_that_is_no_device_is_refused_in_a_line(content: bytes, named: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_bytes(content)
    for line in ("device", f"predict {FAMILY} {LAYER} --device"):
        result = call(line, path)
        assert result.exit_code == 1
        assert result.stderr.startswith(f"Error: {path}: {named}")
        assert result.stderr.count("\n") == 1
        assert len(result.stderr) < 600


def test_a_device_file_that_an_editor_began_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_bytes(SPEC.encode("utf-8-sig"))
    assert json.loads(call("device --json", tmp_path / "mine.json").stdout) == json.loads(SPEC)
    refused = call("device", tmp_path)
    assert (refused.exit_code, refused.stderr) == (1, f"Error: {tmp_path}: cannot be read: Is a directory\n")


def test_a_device_that_is_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    for line in ("device", f"predict {FAMILY} {LAYER} --device"):
        refused = call(line, tmp_path / "pipe.json")
        said = f"Error: {tmp_path / 'pipe.json'}: it is a pipe, not a regular file\n"
        assert (refused.exit_code, refused.stderr) == (1, said)


@pytest.mark.parametrize(("module", "exit_code"), [("pandas", 1), ("foretune.nothing", None)])
def test_a_missing_package_of_an_extra_is_named_with_the_extra(module, exit_code, monkeypatch):
    def load(*names):
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr("foretune.kernels.commands.training.datasets_merged", load)
    result = call("train --data h200 --out bundle")
    if exit_code is None:  # a fault of ours: not hidden
        assert isinstance(result.exception, ModuleNotFoundError)
    else:
        assert result.exit_code == exit_code
        packages = "lightgbm pandas pyarrow joblib scikit-learn"
        assert result.stderr == (
            f"Error: this command needs pandas: pip install {packages} (Foretune's extra 'train')\n"
        )
