"""Test that output fits terminals of 60 to 200 columns: nothing is cut off, and foreign text is shown literally."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from collecting import SUMMARY
from commands import COMMANDS, FAMILY, LAYER, MEASURED, PREDICT, SUBCOMMANDS, call, invoke, words
from fakes import DEVICE, FakeFamily, fake_cases, fake_dataset
from foretune.collect.replay import Replay
from foretune.collect.run_state import Progress
from foretune.datasets import DeviceSpec, KernelConfig
from foretune.model import RandomRanker, cross_validate
from foretune.model.evaluation import Evaluation
from foretune.runtime import bench
from foretune.runtime.bench import WHOLE_SPACE, FirstCall, FirstCalls, Predictions, PredictionTimes
from foretune.runtime.timing.compare import Compared, LaunchPath, Row, judge_least
from rich.console import Console

WIDTHS = (60, 80, 200)
#: Text that rich would read as markup or an emoji, or fail to parse.
ODD = "[/foo] [red]x[/red] :smile:"


@pytest.fixture(scope="module")
def evaluation() -> Evaluation:
    dataset = fake_dataset(fake_cases(models=3, tokens=(64,)))
    return cross_validate(dataset, FakeFamily(), RandomRanker)


@pytest.fixture(params=["evaluate", "replay", "collect", "bench kernels", "bench runtime", "bench predictions"])
def result(request: pytest.FixtureRequest, evaluation: Evaluation) -> Any:
    """Return a result of each command that takes long, as the command would print it."""
    part = replace(DEVICE, name="NVIDIA H100 80GB HBM3")
    devices = tuple(part if row % 2 else DEVICE for row in range(len(evaluation.cases)))
    judged = replace(evaluation, family="a_family_of_a_longer_name", devices=devices, seen_in_training=1.0)
    kernel_times = {"torch._grouped_mm": 123.4, "cuBLAS, one by one": 12345.6, "torch.compile": 9.9}
    problem = evaluation.cases[0].problem
    row = Row("decode, small experts", FAMILY, problem, 1.1, 2.2, kernel_times, 1.0, 2.0, KernelConfig.of(BLOCK=1))
    ways = tuple(
        FirstCall(label, 784, 8, 12.345, KernelConfig.of(BLOCK=1), 1234.5)
        for label in ("triton.autotune, k=8", "foretune.autotune, k=8", WHOLE_SPACE)
    )
    return {
        "bench runtime": FirstCalls(DEVICE, problem, ways),
        "bench predictions": Predictions(
            DEVICE.name,
            99.9,
            55.5,
            (PredictionTimes("a_family_of_a_longer_name", 1000, 34.5, (1.0, 12.34), (1.0, 2.0), (0.5, 0.6)),),
        ),
        "evaluate": judged,
        "replay": Replay(everything=judged, planned=judged, configs=0.1, measurements=0.2),
        "collect": replace(SUMMARY, skipped=("a problem " * 20,), drifted={"some problem " * 9: 1.04}),
        "bench kernels": Compared(
            DEVICE,
            (row, row),
            tuple(judge_least("over torch._grouped_mm", [row], [1.2], 1.0)),
            (LaunchPath("foretune.grouped_gemm", 6.0, 4.0),),
        ),
    }[request.param]


def check_whole(shown: str, width: int) -> None:
    assert shown
    assert "\u2026" not in shown
    assert "..." not in shown
    assert max(map(len, shown.splitlines())) <= width


@pytest.mark.parametrize("width", WIDTHS)
def test_what_takes_long_is_shown_whole(result: Any, width: int) -> None:
    console = Console(width=width)
    with console.capture() as shown:
        console.print(result)
    check_whole(shown.get(), width)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "line",
    [PREDICT, f"{PREDICT} --configs 1", f"{PREDICT} --configs 200", "device h200", f"datasets show {MEASURED}"],
)
def test_what_is_quick_is_shown_whole(line: str, width: int) -> None:
    shown = call(line, columns=width)
    assert shown.exit_code == 0
    check_whole(shown.stdout, width)


def test_a_shortlist_names_every_knob_once_and_has_every_config_at_any_width() -> None:
    ranked = json.loads(call(f"{PREDICT} --configs 8 --json").stdout)["shortlist"]
    knobs = [knob for knob in ranked[0]["config"] if knob != "num_ctas"]
    wide, narrow = (
        words(call(f"{PREDICT} --configs 8", columns=width).stdout.replace("┃", " ")) for width in (200, 60)
    )
    for knob in knobs:
        values = {entry["config"][knob] for entry in ranked}
        assert wide.count(f"{knob}=") == narrow.count(f"{knob}=") == (1 if len(values) == 1 else 8)
    slowdowns = [re.findall(r"\d\.\d{3}x", shown) for shown in (wide, narrow)]
    assert slowdowns[0] == slowdowns[1]
    assert len(slowdowns[0]) == 8


def test_a_pipe_has_no_edge_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    lines = call(f"{PREDICT} --configs 8", columns=None).stdout.splitlines()
    assert any(line.startswith("│ 8    │ ") and "BLOCK_K=" in line and "num_stages=" in line for line in lines)


@pytest.mark.parametrize("line", [PREDICT, f"{PREDICT} --configs 8", "datasets", "device h200"])
def test_the_layout_is_the_same_at_every_width_from_80(line: str) -> None:
    """Compare the column headings; only the lines within a cell may be longer."""
    shown = [call(line, columns=width).stdout for width in (80, 100, 120, 200)]
    assert len({re.sub(r"\s+", " ", one[one.index("┃") : one.index("┡")]) for one in shown}) == 1


def test_a_shortlist_has_ranks_and_says_what_its_columns_are() -> None:
    shown = call(f"{PREDICT} --configs 8", columns=80).stdout
    assert re.findall(r"│ (\d+) +│ \d\.\d{3}x", shown) == [str(rank) for rank in range(1, 9)]
    assert "slowdown: predicted time over that of rank 1" in words(shown)


@pytest.mark.parametrize("command", ["", *COMMANDS, *SUBCOMMANDS, "datasets", "bench", "cache"])
def test_help_has_the_same_words_at_every_width_and_no_line_ends_early(command: str) -> None:
    def shown(width: int) -> str:
        return invoke([*command.split(), "--help"], terminal_width=width).stdout

    for width in (58, 78):  # click leaves two columns of 60 and 80
        assert words(shown(width)) == words(shown(198))
        assert max(map(len, shown(width).splitlines())) <= width
        for paragraph in shown(width).split("\n\n"):
            lines = paragraph.splitlines()
            if all(re.match("  [^ -]", line) for line in lines) and "Example: " not in paragraph:  # prose
                pairs = itertools.pairwise(lines)
                assert all(len(line) + 1 + len(following.split()[0]) > width for line, following in pairs)


@pytest.fixture
def odd_device(tmp_path: Path) -> Path:
    path = tmp_path / "odd.json"
    path.write_text(json.dumps(DeviceSpec.named("h200").to_json() | {"name": ODD}))
    return path


@pytest.mark.parametrize("width", WIDTHS)
def test_a_device_of_an_odd_name_is_shown_by_it(odd_device: Path, width: int) -> None:
    for line in (f"predict {FAMILY} --device {odd_device} {LAYER}", f"device {odd_device}"):
        assert ODD in words(call(line, columns=width).stdout)
    refused = call(f"device {odd_device} --sms 1000")
    assert refused.stderr == f"Error: the number of SMs must be 1 to 132 for {ODD} but is 1000\n"


def test_a_dataset_of_an_odd_name_is_shown_by_it(tmp_path: Path) -> None:
    sealed = call(f"datasets seal {MEASURED} --name '{ODD}' --out", tmp_path / "[red]sealed[/red]")
    assert f"{ODD}: " in sealed.stdout
    assert "Written to " in sealed.stdout
    assert "[red]sealed[/red]" in sealed.stdout
    assert ODD in call("datasets show", tmp_path / "[red]sealed[/red]").stdout


def test_progress_shows_odd_texts_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    from foretune.datasets.progress import showing_steps

    case = fake_cases(models=1)[0]
    odd = replace(case, problem=replace(case.problem, family=ODD))
    with showing_steps() as show:
        show(Progress(1, 3, odd, 50, 12.5, 90.0))
    assert ODD in capsys.readouterr().err


@pytest.mark.parametrize("line", [f"{PREDICT} --configs 2", "datasets", "cache show"])
def test_a_caption_defines_the_columns_of_a_table_and_is_not_in_json(line: str) -> None:
    check_caption(line)


def test_times_of_predictions_have_a_caption_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_printed", cache(bench._printed))  # 3 processes instead of 22
    check_caption("bench predictions --family matmul")


def check_caption(line: str) -> None:
    assert re.search(r"^(rank: |Rows: |Columns: )", call(line).stdout, re.MULTILINE)
    assert "Columns: " not in call(line, "--json").stdout
