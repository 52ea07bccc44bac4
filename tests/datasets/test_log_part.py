"""Log lines that cannot be read are left out, with one warning: how many, why, in which file and on which line."""

from __future__ import annotations

import json
import os
import signal
import socket
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from commands import call, words
from fakes import FakeFamily
from foretune.datasets import DatasetError, DeviceSpec, ForetuneWarning, KernelConfig, Problem, load
from foretune.datasets.log_part import read_log_part, row_line, run_line
from foretune.datasets.manifest import write_manifest
from foretune.datasets.merge import merge_datasets
from foretune.datasets.store import Writer, read
from foretune.model import check_measured
from writers import append

H200 = DeviceSpec.named("h200")
PROBLEM, CONFIG = Problem.of("toy", rows=64), KernelConfig.of(BLOCK=64)
ROW = json.loads(row_line(PROBLEM, CONFIG, 2.5))
FACTS = {"family": "toy", "plan": "production", "timed": "cold"}


def text(**changed: Any) -> bytes:
    return json.dumps(ROW | changed).encode()


def problem(**changed: Any) -> bytes:
    return text(problem=ROW["problem"] | changed)


#: Lines that cannot be read, and the reasons.
DAMAGED: dict[str, tuple[bytes, str]] = {
    "torn": (text()[:50], "not JSON"),
    "binary": (b"\x00\xff\x80PAR1", "not JSON"),
    "half a UTF-8 character": (text().replace(b"toy", b"to\xc3"), "not JSON"),
    "deep": (b"[" * 100_000, "not JSON"),
    "5000 digits": (text(time_us=1.5).replace(b"1.5", b"9" * 5000), "not JSON"),
    "null": (b"null", "not an object with config, problem, status, time_us"),
    "a list": (b"[1]", "not an object with config, problem, status, time_us"),
    "no time": (
        json.dumps({k: v for k, v in ROW.items() if k != "time_us"}).encode(),
        "not an object with config, problem",
    ),
    "a key twice": (text()[:-1] + b', "time_us": 9.0}', "with a key that is given twice"),
    "a size twice": (text().replace(b'"rows": 64', b'"rows": 64, "rows": 65'), "with a key that is given twice"),
    "NaN": (text(time_us=float("nan")), "with a time"),
    "infinite": (text(time_us=float("inf")), "with a time"),
    "too large for a float": (text(time_us=1.5).replace(b"1.5", b"1e999"), "with a time"),
    "400 digits": (text(time_us=10**400), "with a time"),
    "negative": (text(time_us=-2.5), "with a time"),
    "zero": (text(time_us=0), "with a time"),
    "a text": (text(time_us="2.5"), "with a time"),
    "true": (text(time_us=True), "with a time"),
    "ok without a time": (text(time_us=None), "with a time"),
    "failed with a time": (text(status="launch_failed"), "with a time"),
    "an unknown status": (text(status="fine"), "of an unknown status"),
    "no status": (text(status=["ok"]), "of an unknown status"),
    "an empty problem": (text(problem={}), "with an invalid problem"),
    "a number": (text(problem=3), "with an invalid problem"),
    "a size of 400 digits": (problem(dims={"rows": 10**400}), "with an invalid problem"),
    "half a character": (problem(family="to\ud800"), "with an invalid problem"),
    "another family": (problem(family="other"), "of another family than its run"),
    "another version's problem": (problem(layout="blocked"), "with an invalid problem"),
    "no config": (text(config=[]), "with an invalid config"),
    "five warps": (text(config={"BLOCK": 64, "num_warps": 5}), "with an invalid config"),
    "NaN in a config": (text(config={"BLOCK": float("nan")}), "with an invalid config"),
}


def write_log(
    folder: Path, lines: list[bytes], device: DeviceSpec = H200, run: str = "r1", changed: Any = None
) -> Path:
    (folder / "parts").mkdir(parents=True, exist_ok=True)
    if not (folder / "dataset.json").exists():
        write_manifest(folder, {"name": folder.name, "devices": [], "provenance": {}, "sealed": {}})
    path = folder / "parts" / f"{run}.jsonl"
    first = json.dumps(json.loads(run_line(run, FACTS, device)) | (changed or {})).encode()
    path.write_bytes(b"".join(b"\n" + line for line in [first, *lines]))
    return path


class Toy(FakeFamily):
    """The family of these rows, with one knob."""

    name = "toy"
    dims = ("rows",)
    knobs = ("BLOCK", "num_warps", "num_stages")
    default_knobs: ClassVar[dict[str, Any]] = {}

    def space(self, device: DeviceSpec | None = None) -> tuple[KernelConfig, ...]:
        return (KernelConfig.of(BLOCK=16), KernelConfig.of(BLOCK=32))


def test_a_row_with_an_unknown_knob_is_refused_with_its_file_and_line(tmp_path: Path) -> None:
    odd = row_line(PROBLEM, KernelConfig.of(BLOCK=16, TILE=8), 2.5).strip()
    path = write_log(tmp_path, [good(16), b"", good(32), odd, odd])
    dataset = load(tmp_path)
    other = write_log(tmp_path / "other", [good(16)], run="r2")
    for data, said in (
        (dataset, rf"^{path}, line 7: the knobs of toy are .* but a config has TILE$"),  # of two, the last counts
        (merge_datasets([load(other.parent.parent), dataset], name="both"), rf"^{path}, line 7: "),
    ):
        with pytest.raises(DatasetError, match=said):
            check_measured(data, Toy())
    check_measured(merge_datasets([dataset, load(other.parent.parent)], name="both").without_runs(["r1"]), Toy())


def test_a_row_whose_knobs_were_completed_is_refused_with_its_file_and_line(tmp_path: Path) -> None:
    class Later(Toy):
        default_knobs: ClassVar[dict[str, Any]] = {"BLOCK": 16}

    path = write_log(tmp_path, [good(16), row_line(PROBLEM, KernelConfig.of(TILE=8), 2.5).strip()])
    with pytest.raises(DatasetError, match=rf"^{path}, line 4: .* has TILE$"):
        check_measured(load(tmp_path).of_family(Later()), Later())


def good(block: int) -> bytes:
    return row_line(PROBLEM, KernelConfig.of(BLOCK=block), 2.5).strip()


@pytest.fixture
def ends() -> Iterator[None]:
    """Fail a test that blocks for a minute."""

    def stuck(*_: object) -> None:
        raise TimeoutError("it waits for ever")

    before = signal.signal(signal.SIGALRM, stuck)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_row_is_reported_with_its_line_and_costs_no_other(kind: str, tmp_path: Path) -> None:
    line, why = DAMAGED[kind]
    path = write_log(tmp_path, [good(16), line, b"", line, good(32)])
    content = path.read_bytes()
    said = rf"^{tmp_path}: 2 rows are left out: {why}.*\(2 rows: parts/r1\.jsonl line 4, 6\)$"
    with pytest.warns(ForetuneWarning, match=said) as caught:
        dataset = load(tmp_path)
    assert len(caught) == 1
    assert (len(dataset.measurements), dataset.ignored) == (2, ("r1.jsonl",))
    (left_out,) = dataset.left_out
    assert left_out.why.startswith(why)
    assert (left_out.file, left_out.rows, left_out.lines) == ("parts/r1.jsonl", 2, (4, 6))
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"schema_version": 9}, "of schema_version 9, but this Foretune reads 1"),
        ({"run_id": 7}, "not valid: run_id must be a non-empty string of printable characters but is 7"),
        ({"device": {"name": "NVIDIA H200"}}, "not valid: not a device spec"),
        ({"facts": FACTS | {"timed": "quickly"}}, "not valid: timed must be one of"),
        ({"facts": FACTS | {"family": ["toy"]}}, r"not valid: family must be a string but is \['toy'\]"),
        ({"facts": FACTS | {"kernel_source": {}}}, "not valid: kernel_source must be a string but is {}"),
    ],
)
def test_a_run_that_cannot_be_read_is_reported_with_all_of_its_rows(changed: Any, why: str, tmp_path: Path) -> None:
    path = write_log(tmp_path, [good(16), good(32)], changed=changed)
    content = path.read_bytes()
    with pytest.warns(ForetuneWarning, match=f"2 rows are left out: its first line is {why}"):
        assert len(load(tmp_path).measurements) == 0
    assert path.read_bytes() == content


def test_a_line_without_end_is_one_row_that_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretune.datasets.log_part._LONGEST_LINE", 4096)
    path = write_log(tmp_path, [good(16), b"x" * 10_000, good(32)])
    log, left_out = read_log_part(path)
    assert log is not None
    assert len(log.rows) == 2
    assert [(one.rows, one.lines) for one in left_out] == [(1, (4,))]


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        here = Path.cwd()
        os.chdir(path.parent)  # a socket's path may have 108 bytes
        one.bind(path.name)
        os.chdir(here)


@pytest.mark.usefixtures("ends")
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (os.mkfifo, "a pipe"),
        (lambda path: path.symlink_to("/dev/zero"), "a device"),
        (Path.mkdir, "a folder"),
        (a_socket, "a socket"),
    ],
    ids=["pipe", "device", "folder", "socket"],
)
def test_what_is_no_file_is_neither_read_nor_waited_for(
    suffix: str, make: Callable[[Path], object], kind: str, tmp_path: Path
) -> None:
    write_log(tmp_path, [good(16)])
    make(tmp_path / "parts" / f"odd.{suffix}")
    said = rf"1 file is left out: it is {kind}, not a regular file \(parts/odd\.{suffix}\)$"
    with pytest.warns(ForetuneWarning, match=said):
        dataset = load(tmp_path)
    assert (len(dataset.measurements), dataset.ignored) == (1, (f"odd.{suffix}",))


@pytest.mark.usefixtures("ends")
def test_a_manifest_that_is_a_pipe_is_no_manifest(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "dataset.json")
    with pytest.raises(DatasetError, match=r"dataset\.json: cannot be read.*it is a pipe, not a regular file"):
        load(tmp_path)


def test_every_command_reports_what_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_log(tmp_path / "log", [good(16), b"torn", good(32)])
    (tmp_path / "log" / "parts" / "torn.parquet").write_text("")
    why = "1 row and 1 file are left out: truncated or not a Parquet file"
    told = [
        {"file": "parts/torn.parquet", "rows": None, "lines": []},
        {"file": "parts/r1.jsonl", "why": "not JSON", "rows": 1, "lines": [4]},
    ]
    for command in (
        "datasets show log",
        "datasets merge log --out merged",
        "datasets seal log --out sealed",
        "export log --format csv --out log.csv",
        "train --data log --out bundle",
    ):
        result = call(f"{command} --json")
        assert words(result.stderr).count(why) == 1, command
        assert "not JSON (1 row: parts/r1.jsonl line 4)" in words(result.stderr)
        if command.startswith("train"):
            continue  # it ends with an error: no family is registered
        assert result.exit_code == 0, result.stderr
        content = json.loads(result.stdout)
        found = (content[0] if isinstance(content, list) else content)["left_out"]
        assert [{key: one[key] for key in mine} for one, mine in zip(found, told, strict=True)] == told, command


def test_merge_says_how_many_rows_it_drops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_log(tmp_path / "log", [good(16), good(32)])
    result = call("datasets merge log log --out merged --json")
    assert (result.exit_code, json.loads(result.stdout)["dropped"]) == (0, 2)
    said = "again: 2 measurements. 2 more were left out: exact duplicates, or rows that a warning names."
    assert said in words(call("datasets merge log log --out again").stdout)


def test_a_log_in_a_collected_dataset_is_read_with_it(tmp_path: Path) -> None:
    folder = append(tmp_path / "mine", "mine")
    before = len(read(folder).measurements)
    write_log(folder, [good(16), good(32)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dataset = read(folder)
    assert len(dataset.measurements) == before + 2
    assert {run.get("plan") for run in dataset.provenance["runs"].values()} >= {"production"}


def test_cards_of_one_name_that_differ_are_kept_apart(tmp_path: Path) -> None:
    part = replace(H200, sm_count=66, l2_bytes=H200.l2_bytes // 2)
    estimated = replace(H200, clock_mhz=1000.0, rates_measured=False)  # as another torch says of the same card
    for number, device in enumerate((H200, part, estimated)):
        write_log(tmp_path, [good(16)], device, run=f"r{number}")
    dataset = load(tmp_path)
    other = replace(part, name=f"NVIDIA H200 (sm_count 66, l2_bytes {part.l2_bytes})")
    assert dataset.devices == (H200, other)
    by_run = dict(zip(dataset.measurements["run_id"], dataset.measurements["device"], strict=True))
    assert by_run == {"r0": H200.name, "r1": other.name, "r2": H200.name}
    assert len(dataset.grid("toy")) == 2


def test_a_collection_on_another_card_of_the_same_name_is_refused(tmp_path: Path) -> None:
    Writer(tmp_path, "mine", [H200], {}, run_id="r1")
    Writer(tmp_path, "mine", [replace(H200, clock_mhz=1000.0)], {}, run_id="r2")
    with pytest.raises(DatasetError, match="another NVIDIA H200, whose sm_count is 132 and not 66: choose another"):
        Writer(tmp_path, "mine", [replace(H200, sm_count=66)], {}, run_id="r3")


@pytest.mark.parametrize("name", ["family", "kernel_source", "plan", "timed"])
def test_a_manifest_whose_facts_are_no_texts_is_an_error(name: str, tmp_path: Path) -> None:
    facts = {"runs": {"r1": FACTS | {name: []}}}
    write_manifest(tmp_path, {"name": "mine", "devices": [], "provenance": facts, "sealed": {}})
    with pytest.raises(
        DatasetError, match=rf"dataset\.json: provenance\.runs\.r1: {name} must be a string but is \[\]"
    ):
        load(tmp_path)
