"""Test how commands end after Ctrl-C, a closed or full output, and errors; and shell completion."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import foretune
import pytest
from commands import COMMANDS, FAMILY, LAYER, SUBCOMMANDS, call, invoke
from foretune import datasets
from foretune.collect import campaign
from foretune.datasets import DeviceSpec, KernelConfig
from foretune.kernels import find_family
from foretune.runtime.timing import compare, device_rates
from foretune.runtime.timing.compare import Row
from foretune.runtime.tuning.cache import cache_folder, known

#: A command line for each command that soon reads something; how `run` ends is in `test_run.py`.
LINES = {
    "quickstart": "quickstart --out {out}",
    "collect": f"collect {FAMILY} --limit 1 --out {{out}}",
    "train": "train --data h200 --out {out}",
    "adapt": "adapt --data h100 --out {out}",
    "evaluate": "evaluate",
    "report": "report --data h200 --out {out}.html",
    "replay": "replay",
    "predict": f"predict {FAMILY} --device h200 {LAYER}",
    "cover": f"cover {FAMILY} --device h200 --dynamic rows --range 64:96 --groups 64 --n 2048 --k 1024",
    "warmup": f"warmup {FAMILY} --data h200 --device h200",
    "pin": f"pin {FAMILY} --data h200 --device h200 --out {{out}}",
    "device": "device h200",
    "export": "export h200 --format csv --out {out}",
    "bench kernels": "bench kernels",
    "bench runtime": "bench runtime",
    "bench predictions": "bench predictions",
    "datasets show": "datasets show h200",
    "datasets merge": "datasets merge h200 --out {out}",
    "datasets seal": "datasets seal h200 --out {out}",
    "datasets": "datasets",
    "cache show": "cache show",
    "cache clear": "cache clear",
    "cache export": "cache export --out {out}",
    "cache import": "cache import {out}",
    "cache freeze": f"cache freeze {FAMILY} --device h200 --out {{out}}",
}


def interrupted(*given: Any, **options: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize("command", LINES)
@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_ends_every_command_with_130_and_a_line(
    command: str, as_json: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets, "load", interrupted)
    monkeypatch.setattr(datasets, "names", interrupted)
    monkeypatch.setattr("foretune.datasets.manifest.names", interrupted)
    monkeypatch.setattr(DeviceSpec, "find", interrupted)
    monkeypatch.setattr(DeviceSpec, "live", interrupted)
    monkeypatch.setattr(campaign, "collect_on_gpus", interrupted)
    for name in ("choices_folder", "check_path"):
        monkeypatch.setattr(cache_folder, name, interrupted)
    monkeypatch.setattr(known, "choices_folder", interrupted)
    result = call(LINES[command].format(out=tmp_path / "out"), *(["--json"] if as_json else []))
    assert result.exit_code == 130
    assert result.stderr == "Interrupted.\n"
    assert result.stdout == ('{"error": "interrupted"}\n' if as_json else "")


def test_kernels_that_were_compared_before_an_end_were_told(monkeypatch: pytest.MonkeyPatch) -> None:
    case = find_family(FAMILY).cases()[0]
    row = Row("a layer", FAMILY, case.problem, None, 12.3, {"torch": 14.2}, 8.0, 4.0, KernelConfig.of(BLOCK_M=64))

    def cut(*_: Any, on_row: Any, **others: Any) -> None:
        on_row(row)
        raise KeyboardInterrupt

    monkeypatch.setattr(DeviceSpec, "live", lambda *_: DeviceSpec.named("h200"))
    monkeypatch.setattr(device_rates, "measured", lambda gpu: gpu)
    monkeypatch.setattr(compare, "compare_kernels", cut)
    result = call("bench kernels --family", FAMILY)
    assert result.exit_code == 130
    assert f"{FAMILY} a layer: predicted 12.3 us, torch 14.2 us\n" in result.stderr


def run(*words: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run a command line in a new process, outside the checkout."""
    return subprocess.run(
        [sys.executable, "-m", "foretune", *words], **{"capture_output": True, "text": True, "cwd": "/", **settings}
    )


INTERRUPTED = """
import signal, threading, time
from foretune import __main__, datasets
def wait():
    {first}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background processes of a shell ignore it
    print("ready", flush=True)
    while True:
        time.sleep(0.01)  # a signal just before a long sleep would be handled only after it
datasets.names = wait
__main__.main()
"""


@pytest.mark.parametrize(
    "first",
    [
        pytest.param("pass", id="alone"),
        # A process usually waits for such a thread before it ends.
        pytest.param("threading.Thread(target=threading.Event().wait).start()", id="with a thread"),
    ],
)
def test_a_real_ctrl_c_ends_with_130_and_a_line(first: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED.format(first=first), "datasets"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGINT)
        try:
            stdout, stderr = child.communicate(timeout=300)  # a bug would make it wait for ever
        finally:
            child.kill()
    assert (child.returncode, stdout, stderr) == (130, "", "Interrupted.\n")


@pytest.mark.parametrize("line", ["device h200", "device h200 --json", "device h300 --json", "device --fast --json"])
def test_an_output_that_nobody_reads_ends_it_quietly(line: str) -> None:
    read, write = os.pipe()
    os.close(read)  # as after `| head`
    try:
        ended = run(*line.split(), stdout=write, stderr=subprocess.PIPE, capture_output=False)
    finally:
        os.close(write)
    assert ended.returncode in (1, 2)
    assert "Traceback" not in ended.stderr
    assert "Broken pipe" not in ended.stderr
    assert "Exception ignored" not in ended.stderr


@pytest.mark.parametrize("line", ["device h200", "device h200 --json"])
def test_a_full_disk_below_the_output_is_told_in_a_line(line: str) -> None:
    with open("/dev/full", "w") as full:
        ended = run(*line.split(), stdout=full, stderr=subprocess.PIPE, capture_output=False)
    assert (ended.returncode, ended.stderr) == (1, "Error: [Errno 28] No space left on device\n")


def test_no_output_at_all_is_fine() -> None:
    """Run a command with stdout closed, as `>&-` does."""
    ended = run("device", "h200", capture_output=False, stderr=subprocess.PIPE, preexec_fn=lambda: os.close(1))
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(("line", "code"), [("device h200", 0), ("device h300", 1), ("device --fast", 2)])
def test_exit_codes_reach_the_shell(line: str, code: int) -> None:
    ended = run(*line.split())
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_module_is_called_as_the_script_is() -> None:
    assert "Usage: foretune device " in run("device", "--fast").stderr


def test_the_version_is_printed() -> None:
    assert call("--version").stdout == f"foretune {foretune.__version__}\n"


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("foretune predict grouped", ["grouped_gemm_dw", "grouped_gemm_dx", "grouped_gemm_fwd"]),
        ("foretune collect grouped_gemm_f", ["grouped_gemm_fwd"]),
        ("foretune train --family grouped_gemm_f", ["grouped_gemm_fwd"]),
        ("foretune train --data h200_w", ["h200_wide"]),
        (
            "foretune datasets show h1",
            [
                "h100",
                "h100_fp8_gradients",
                "h100_h200_bands",
                "h100_h200_counter",
                "h100_h200_inductor_templates",
                "h100_h200_medium",
                "h100_h200_training",
                "h100_h200_two_flushes",
                "h100_inductor_reduction",
                "h100_inductor_templates",
                "h100_kernels",
                "h100_memory_bound",
                "h100_products",
            ],
        ),
        ("foretune device h", ["h100", "h200"]),
        (f"foretune predict {FAMILY} --device h", ["h100", "h200"]),
        (f"foretune predict {FAMILY} --dtype f", ["fp16", "fp32"]),
        (f"foretune predict {FAMILY} --configs a", ["auto"]),
        (f"foretune cover {FAMILY} --dynamic r", ["rows"]),
        ("foretune evaluate --split d", ["device"]),
        ("foretune evaluate --baselines ran", ["random"]),
        ("foretune collect matmul --plan a", ["adaptive"]),
        ("foretune collect matmul --gpus a", ["all"]),
        ("foretune train --keep s", ["shipped"]),
        ("foretune train --winners v", ["vllm"]),
        ("foretune export h200 --format t", ["t4"]),
        ("foretune run --mode o", ["off"]),
        ("foretune export sg", ["sglang"]),
        ("foretune export sglang --model Qwen3-30B", ["Qwen3-30B-A3B"]),
        ("foretune export sglang --dtype fp8", ["fp8e4m3"]),
        ("foretune cache export --format f", ["foretune", "fla"]),
        ("foretune cache freeze scaled_gr", ["scaled_grouped_gemm_dw", "scaled_grouped_gemm_fwd"]),
    ],
)
def test_the_shell_completes_commands_families_datasets_and_devices(typed: str, offered: list[str]) -> None:
    asked = {"_FORETUNE_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    assert invoke([], env=asked, prog_name="foretune").stdout.split() == offered


def test_the_shell_asks_a_new_process() -> None:
    asked = {"_FORETUNE_COMPLETE": "complete_bash", "COMP_WORDS": "foretune ev", "COMP_CWORD": "1"}
    assert run(env=os.environ | asked).stdout.split() == ["evaluate"]


def test_completion_can_be_installed() -> None:
    assert "--install-completion" in call("--help").stdout


def test_every_command_has_a_line_here() -> None:
    assert set(LINES) == {*COMMANDS, *SUBCOMMANDS, "datasets"} - {"run"}
    assert json.loads(call("device h200 --json").stdout)["name"] == "NVIDIA H200"
