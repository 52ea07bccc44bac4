"""Exports: T4 files follow the published schema, and all measurements are exported unchanged."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from foretune.datasets import Case, DeviceSpec, ForetuneError, KernelConfig, Measurement, Problem, Status
from foretune.datasets.dataset import Dataset
from foretune.datasets.store import Writer, read
from foretune.datasets.store.export import FORMATS, export_dataset

H200 = DeviceSpec.named("h200")
#: A config for each status.
CONFIGS = {status: KernelConfig.of(BLOCK=16 << place, num_warps=4) for place, status in enumerate(Status)}
OK = CONFIGS[Status.OK]
ERROR = 'no,\n"no"'
RAGGED = Problem.of("toy", segments=2, rows=8, n=64, ragged={"rows": (2, 6)})
OTHER = Problem.of("other", m=8, flags=("a", "b"))


def outcomes(problem: Problem) -> list[Measurement]:
    """Return a scan with each status once, and confirming passes of two configs, of which one fails."""
    rows = []
    for status, config in CONFIGS.items():
        time_us = 1234.5678 if status in (Status.OK, Status.EARLY_STOPPED) else None
        facts: dict[str, Any] = {"registers": 40, "spills": 0, "compile_ms": 500.0} if time_us else {"error": ERROR}
        rows.append(Measurement(problem, H200.name, config, status, time_us=time_us, samples=3, **facts))
    for timing_pass, time_us in ((2, 1000.0), (3, 1100.0)):
        rows.append(Measurement(problem, H200.name, OK, Status.OK, time_us=time_us, timing_pass=timing_pass))
    failing = Measurement(problem, H200.name, CONFIGS[Status.EARLY_STOPPED], Status.LAUNCH_FAILED, timing_pass=2)
    return [*rows, failing]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("mine")
    run = {"torch": "2.11.0", "triton": "3.6.0", "date": "2026-11-20T22:15:36+00:00"}
    writer = Writer(folder, "mine", [H200], run, run_id="r1")
    for problem in (RAGGED, OTHER):
        writer.append(Case(problem, ("A/w2", "B/w2"), "zipf"), outcomes(problem))
    return read(folder)


def check_t4_results(content: Any) -> None:
    """Check the T4 results schema 1.0.0: its types, its enum and its required fields."""
    assert isinstance(content, dict)
    assert re.fullmatch(r"\d+\.\d+\.\d+", content["schema_version"])
    assert isinstance(content["results"], list)
    for result in content["results"]:
        assert {"configuration", "times", "invalidity", "correctness"} <= result.keys()
        assert isinstance(result["configuration"], dict)
        assert result["invalidity"] in {"timeout", "compile", "runtime", "correctness", "constraints", "correct"}
        assert isinstance(result["correctness"], (int, float))
        assert isinstance(result.get("timestamp", ""), str)
        assert isinstance(result.get("objectives", []), list)
        assert isinstance(result["times"], dict)
        for name in ("compilation_time", "framework", "search_algorithm", "validation"):
            assert isinstance(result["times"].get(name, 0), (int, float))
        assert isinstance(result["times"].get("runtimes", []), list)
        for measurement in result.get("measurements", []):
            assert isinstance(measurement["name"], str)
            assert isinstance(measurement["value"], (int, float, str, list))
            assert isinstance(measurement["unit"], str)


def check_t4_metadata(content: Any) -> None:
    """Check the T4 metadata schema 1.0.0, which has no required fields."""
    metadata = content["metadata"]
    assert isinstance(metadata["hardware"]["hardware_description"], list)
    assert isinstance(metadata["environment"]["device_query"], dict)
    assert all(isinstance(one, str) for one in metadata["environment"]["requirements"])


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"invalidity": "ok"}, AssertionError),
        ({"correctness": "yes"}, AssertionError),
        ({"times": []}, AssertionError),
        ({"configuration": None}, AssertionError),
        ({"measurements": [{"name": "time"}]}, KeyError),
    ],
)
def test_the_check_of_the_schema_sees_what_it_must(change: dict[str, Any], wrong: type[Exception]) -> None:
    right = {"configuration": {}, "times": {}, "invalidity": "correct", "correctness": 1}
    check_t4_results({"schema_version": "1.0.0", "results": [right]})
    with pytest.raises(wrong):
        check_t4_results({"schema_version": "1.0.0", "results": [right | change]})
    for field in right:
        lacking = {name: value for name, value in right.items() if name != field}
        with pytest.raises(AssertionError):
            check_t4_results({"schema_version": "1.0.0", "results": [lacking]})


@pytest.fixture(scope="module")
def t4(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("t4") / "mine.json"
    assert export_dataset(dataset, path, "t4") == 2 * len(CONFIGS)
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_t4_keeps_to_the_published_schema(t4: dict[str, Any]) -> None:
    assert t4["schema_version"] == "1.0.0"
    check_t4_results(t4)
    check_t4_metadata(t4)
    assert t4["metadata"]["environment"]["requirements"] == ["torch==2.11.0", "triton==3.6.0"]


def test_t4_has_a_result_for_each_config_on_each_problem(t4: dict[str, Any]) -> None:
    configs = [KernelConfig.from_json(result["configuration"]) for result in t4["results"]]
    assert [configs[: len(CONFIGS)], configs[len(CONFIGS) :]] == [list(CONFIGS.values())] * 2
    assert [result["problem"] for result in t4["results"]] == [0] * len(CONFIGS) + [1] * len(CONFIGS)
    assert {name: t4["problems"]["0"][name] for name in ("family", "rows", "largest_rows")} == {
        "family": "toy", "rows": 8, "largest_rows": 6,
    }  # fmt: skip
    assert t4["problems"]["1"]["flags"] == "a b"
    assert {result["timestamp"] for result in t4["results"]} == {"2026-11-20T22:15:36+00:00"}


def test_t4_says_how_each_ended(t4: dict[str, Any]) -> None:
    ended = {}
    for status, result in zip(CONFIGS, t4["results"], strict=False):
        ended[status] = result["invalidity"]
        ran = result["invalidity"] == "correct"
        assert result["correctness"] == ran
        assert [m["name"] for m in result["measurements"] if m["name"] == "time"] == ["time"] * ran
    assert ended == {
        Status.OK: "correct", Status.INVALID: "constraints", Status.COMPILE_FAILED: "compile",
        Status.OUT_OF_RESOURCES: "runtime", Status.LAUNCH_FAILED: "runtime", Status.WRONG_RESULT: "correctness",
        Status.TIMEOUT: "timeout", Status.EARLY_STOPPED: "runtime",  # its confirming pass failed
    }  # fmt: skip


def test_t4_times_are_in_milliseconds_and_the_confirming_passes_decide(t4: dict[str, Any]) -> None:
    (result,) = [r for r in t4["results"][: len(CONFIGS)] if KernelConfig.from_json(r["configuration"]) == OK]
    assert result["times"] == {"compilation_time": 500.0, "runtimes": [pytest.approx(1.2345678), 1.0, 1.1]}
    facts = {measurement["name"]: (measurement["value"], measurement["unit"]) for measurement in result["measurements"]}
    assert facts == {"time": (pytest.approx(1.05), "ms"), "registers": (40, ""), "spills": (0, "")}
    assert result["objectives"] == ["time"]


def test_csv_has_every_measurement_and_every_fact(dataset: Dataset, tmp_path: Path) -> None:
    assert export_dataset(dataset, tmp_path / "mine.csv", "csv") == len(dataset.measurements)
    with (tmp_path / "mine.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(dataset.measurements) == 2 * (len(CONFIGS) + 3)
    assert [row["rows"] for row in rows] == ["8"] * (len(CONFIGS) + 3) + [""] * (len(CONFIGS) + 3)  # not a dimension
    first = rows[0]
    wanted = {"family": "toy", "n": "64", "largest_rows": "6", "sources": "A/w2 B/w2", "BLOCK": "16", "num_warps": "4",
              "status": "ok", "time_us": "1234.5677", "timing_pass": "1", "registers": "40", "run_id": "r1",
              "device": "NVIDIA H200", "error": ""}  # fmt: skip
    assert {name: first[name] for name in wanted} == wanted
    failed = [row for row in rows if row["status"] in ("timeout", "wrong_result")]
    assert [(row["time_us"], row["error"]) for row in failed] == [("", ERROR)] * 4


def test_a_dtype_for_each_operand_is_exported(tmp_path: Path) -> None:
    mixed = Problem.of("linear", m=8, dtype={"x": "bf16", "w": "int4", "y": "bf16"})
    Writer(tmp_path / "mixed", "mixed", [H200], {}, run_id="r1").append(Case(mixed, ("random",)), outcomes(mixed))
    dataset = read(tmp_path / "mixed")
    assert dataset.cases[0].problem == mixed
    export_dataset(dataset, tmp_path / "t4", "t4")
    assert json.loads((tmp_path / "t4").read_text())["problems"]["0"]["dtype"] == "w=int4,x=bf16,y=bf16"
    export_dataset(dataset, tmp_path / "csv", "csv")
    with (tmp_path / "csv").open(newline="") as file:
        assert {row["dtype"] for row in csv.DictReader(file)} == {"w=int4,x=bf16,y=bf16"}


@pytest.mark.parametrize("format", FORMATS)
def test_one_problem_or_one_family_alone(dataset: Dataset, tmp_path: Path, format: str) -> None:
    both = export_dataset(dataset, tmp_path / "both", format)
    for options in ({"problem": 1}, {"family": "other"}):
        assert 2 * export_dataset(dataset, tmp_path / "one", format, **options) == both  # type: ignore[arg-type]
        text = (tmp_path / "one").read_text()
        assert "other" in text
        assert "toy" not in text
    assert export_dataset(dataset, tmp_path / "none", format, family="toy", problem=1) == 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"format": "xml"}, "format must be one of t4, csv but is 'xml'"),
        ({"problem": 2}, "mine: problem must be 0 to 1 but is 2"),
        ({"problem": -1}, "mine: problem must be 0 to 1 but is -1"),
        ({"family": "gemm"}, "no measurements of 'gemm'; its families: other, toy"),
    ],
)
def test_what_there_is_not_is_refused_and_nothing_written(
    dataset: Dataset, tmp_path: Path, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ForetuneError, match=named):
        export_dataset(dataset, tmp_path / "out", **{"format": "csv", **options})
    assert not (tmp_path / "out").exists()


def test_facts_that_a_dataset_does_not_have_are_left_out(tmp_path: Path) -> None:
    """The dataset has no run id, no registers and no provenance."""
    from fakes import fake_cases, fake_dataset

    bare = fake_dataset(fake_cases(models=1, tokens=(64,), randoms=0))
    for format in FORMATS:
        export_dataset(bare, tmp_path / format, format)
    content = json.loads((tmp_path / "t4").read_text())
    check_t4_results(content)
    check_t4_metadata(content)
    assert not any("timestamp" in result for result in content["results"])


def test_a_line_break_in_an_error_stays_in_its_cell(dataset: Dataset, tmp_path: Path) -> None:
    broken = replace(dataset, measurements=dataset.measurements.assign(error="one\ntwo"))
    export_dataset(broken, tmp_path / "a.csv", "csv")
    with (tmp_path / "a.csv").open(newline="") as file:
        head, *rows = csv.reader(file)
    assert [row[head.index("error")] for row in rows] == ["one\ntwo"] * len(dataset.measurements)
