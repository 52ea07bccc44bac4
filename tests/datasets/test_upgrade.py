"""Datasets of schema version 1 can be read, continued, and upgraded without changing a measurement."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import foretune.datasets
import pandas as pd
import pyarrow.parquet as pq
import pytest
from foretune.collect.cases import earlier
from foretune.datasets import DatasetError, DeviceSpec, KernelConfig, Measurement, Problem, Ragged, Status, load
from foretune.datasets.dataset import Dataset
from foretune.datasets.manifest import SCHEMA_VERSION
from foretune.datasets.store import Writer, read, seal_dataset, upgrade_dataset

VERSION1 = Path(__file__).parent / "version1"
H200 = DeviceSpec.named("h200")
SHIPPED = Path(foretune.datasets.__file__).parent / "h200"
#: Of tables of the shipped h200, as its manifest of version 1 had them.
KEPT = {
    "measurements.parquet": "5d6ca43caf55978ba7f0e15153886127dde3a72ff2c280486fc1f2def2746fcd",
    "drift.parquet": "6c2c2df369053e22c87d2bd0ed7da66006b1c3cfc7331ce70f8aee5fd2d4fc41",
}
#: SHA-256 of the shipped problems as JSON lines of version 1: see `in_version_1`.
OLD_PROBLEMS = "5f1b4f21915eaffd8e7efbe52d067a5fd601ee38453c261073709effbb78069f"
#: And of its configs, as they were before they had CONSUMERS and PINGPONG, which are 0 in all of them.
OLD_CONFIGS = "9bf2c44cacd857554dab6939a92a9cdef852a0a94c670a891ebcb5f246d8f3d2"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return Path(shutil.copytree(VERSION1, tmp_path / "old", ignore=shutil.ignore_patterns("*.py", "__pycache__")))


def contents(dataset: Dataset) -> dict[str, Any]:
    """Return a dataset's content without its schema version."""
    return {
        "name": dataset.name,
        "devices": dataset.devices,
        "provenance": dataset.provenance,
        "cases": dataset.cases,
        "configs": dataset.configs,
        "measurements": dataset.measurements.to_csv(),
        "drift": dataset.drift.to_csv(),
        "ignored": dataset.ignored,
    }


def files(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_version_1_is_read_in_todays_words(old: Path) -> None:
    dataset = read(old)
    assert dataset.schema_version == 1
    assert [(case.problem, case.sources, case.scenario) for case in dataset.cases] == [
        (Problem.of("toy", groups=2, rows=8, n=64, ragged={"rows": (2, 6)}), ("A-1B/w2", "B-7B/w2"), "zipf"),
        (
            Problem.of("toy", groups=3, rows=9, n=64, dtype="fp16", flags=("permute_x",), ragged={"rows": (3, 3, 3)}),
            ("random",),
            "balanced",
        ),
        (Problem.of("toy", groups=2, rows=8, n=64), ("A-1B/w13",), "uniform"),
        (Problem.of("other", m=4, n=5), ("random",), ""),
    ]
    assert dataset.devices == (H200, H200.with_sms(64))
    assert list(dataset.provenance["runs"]) == ["20261121-044037-aaaa", "20261121-054037-bbbb"]
    rows = dataset.measurements
    assert rows.groupby(["device", "problem"]).size().to_dict() == {
        (H200.name, 0): 6, (H200.name, 1): 6, (H200.name, 2): 6,
        ("NVIDIA H200 (64 SMs)", 1): 6, ("NVIDIA H200 (64 SMs)", 2): 6, ("NVIDIA H200 (64 SMs)", 3): 6,
    }  # fmt: skip
    assert len(dataset.drift) == 12
    assert dataset.drift["problem"].tolist() == [0, 0, 1, 1, 2, 2, 1, 1, 2, 2, 3, 3]
    assert dataset.wrong_results("toy") == {
        ("bf16", ()): {dataset.configs[3]},
        ("fp16", ("permute_x",)): {dataset.configs[3]},
    }


def test_an_upgraded_dataset_says_the_same_cell_by_cell(old: Path) -> None:
    before, was = contents(read(old)), files(old)
    parts = [f"parts/{path.name}" for path in sorted((old / "parts").iterdir())]
    drift = [f"drift/{path.name}" for path in sorted((old / "drift").iterdir())]
    assert upgrade_dataset(old) == [*parts, *drift[:1], "problems.parquet", "dataset.json"]
    after = read(old)
    assert after.schema_version == SCHEMA_VERSION == 2
    assert contents(after) == before
    now = files(old)
    assert now.keys() == was.keys()
    untouched = ("configs.parquet", "measurements.parquet", "drift.parquet")
    assert {name for name in now if now[name] == was[name]} == set(untouched)
    manifest = json.loads((old / "dataset.json").read_text())
    assert manifest["sealed"] == {name: now[name] for name in (*untouched, "problems.parquet")}
    assert pq.read_schema(old / parts[0]).names[:3] == ["problem", "sources", "scenario"]


def test_upgrading_twice_changes_nothing(old: Path) -> None:
    upgrade_dataset(old)
    once = files(old)
    assert upgrade_dataset(old) == []
    assert files(old) == once


def test_a_dataset_of_today_is_left_alone(old: Path, tmp_path: Path) -> None:
    seal_dataset(old, tmp_path / "new", name="new")
    was = files(tmp_path / "new")
    assert upgrade_dataset(tmp_path / "new") == []
    assert files(tmp_path / "new") == was


def test_a_damaged_dataset_is_not_vouched_for_anew(old: Path) -> None:
    problems = old / "problems.parquet"
    problems.write_bytes(problems.read_bytes()[:-1] + b"x")
    was = files(old)
    with pytest.raises(DatasetError, match=r"problems\.parquet: truncated or altered"):
        upgrade_dataset(old)
    assert files(old) == was


def test_an_upgrade_that_is_cut_short_leaves_a_dataset_that_is_read(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(read(old))

    def cut(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("foretune.datasets.store.writer.write_manifest", cut)
        with pytest.raises(KeyboardInterrupt):
            upgrade_dataset(old)
    assert contents(read(old)) == before
    assert [path.name for path in old.parent.iterdir()] == ["old"]
    assert upgrade_dataset(old) == ["problems.parquet", "dataset.json"]


@pytest.mark.parametrize("version", [SCHEMA_VERSION + 1, 0, "1", None])
def test_an_unknown_version_is_not_upgraded(old: Path, version: object) -> None:
    manifest = json.loads((old / "dataset.json").read_text())
    (old / "dataset.json").write_text(json.dumps(manifest | {"schema_version": version}))
    with pytest.raises(
        DatasetError, match=rf"dataset\.json: schema_version is {version!r} but this Foretune reads 2 and"
    ):
        upgrade_dataset(old)


class _Toy:
    """The attributes of a family that `earlier` needs."""

    name = "toy"

    def source_hash(self) -> str:
        return "toy-1"


def resume(folder: Path) -> Iterator[tuple[Problem, KernelConfig, float]]:
    """Append a run of the current version: a problem of the old runs again, and one more."""
    old, config = read(folder), KernelConfig.of(BLOCK_M=16, num_warps=4)
    origin = {"family": "toy", "kernel_source": "toy-1", "triton": "3.6.0", "plan": "exhaustive"}
    writer = Writer(folder, "mine", [H200], origin, run_id="20261122-044037-cccc")
    more = replace(old.cases[0], problem=replace(old.cases[0].problem, ragged=Ragged("rows", (4, 4))))
    for case, time_us in ((old.cases[0], 7.0), (more, 8.0)):
        writer.append(case, [Measurement(case.problem, H200.name, config, Status.OK, time_us=time_us)])
        yield case.problem, config, time_us


def test_a_run_of_today_goes_on_in_a_folder_of_version_1(old: Path, tmp_path: Path) -> None:
    before, upgraded = read(old), Path(shutil.copytree(old, tmp_path / "upgraded"))
    upgrade_dataset(upgraded)
    added = list(resume(old))
    assert list(resume(upgraded)) == added
    dataset = read(old)
    assert contents(dataset) == contents(read(upgraded))
    assert dataset.schema_version == SCHEMA_VERSION
    assert dataset.cases[: len(before.cases)] == before.cases
    assert len(dataset.cases) == len(before.cases) + 1  # a problem in old words and in new ones is one problem
    assert len(dataset.measurements) == len(before.measurements) + len(added)
    assert list(dataset.provenance["runs"]) == [*before.provenance["runs"], "20261122-044037-cccc"]
    pd.testing.assert_frame_equal(dataset.drift, before.drift)


def test_what_earlier_runs_measured_is_known_whatever_their_version(old: Path) -> None:
    added = list(resume(old))
    dataset, known = read(old), earlier(old, {"toy": _Toy()})  # type: ignore[dict-item]
    ok, slow, failing, wrong = dataset.configs[:4]
    (_, _, again_us), (more, _, more_us) = added
    first = known.states[H200.name, dataset.cases[0].problem]
    assert first.scanned_us == {ok: again_us, slow: 95.0, failing: None, wrong: None}
    assert first.confirmed == {ok}
    assert known.states[H200.name, more].scanned_us == {ok: more_us}
    assert known.states[H200.with_sms(64).name, dataset.cases[1].problem].scanned_us[ok] == 20.0
    upgrade_dataset(old)
    assert earlier(old, {"toy": _Toy()}) == known  # type: ignore[dict-item]


def in_version_1(path: Path) -> Iterator[str]:
    """Return the rows of a table of problems as JSON of version 1."""
    for row in pq.read_table(path).to_pylist():
        problem = json.loads(row["problem"])
        ragged = problem.pop("ragged")
        problem["group_sizes"] = None if ragged is None else ragged["sizes"]
        assert ragged is None or ragged["dim"] == "rows"
        yield json.dumps([problem, json.loads(row["sources"]), row["scenario"]], sort_keys=True)


def test_the_shipped_dataset_is_migrated_and_its_measurements_are_not_touched() -> None:
    assert {name: sha256((SHIPPED / name).read_bytes()).hexdigest() for name in KEPT} == KEPT
    manifest = json.loads((SHIPPED / "dataset.json").read_text())
    assert manifest["schema_version"] == SCHEMA_VERSION
    assert {name: manifest["sealed"][name] for name in KEPT} == KEPT


def test_the_shipped_problems_are_the_same_position_by_position() -> None:
    lines = "\n".join(in_version_1(SHIPPED / "problems.parquet"))
    assert sha256(lines.encode()).hexdigest() == OLD_PROBLEMS
    assert load("h200").schema_version == SCHEMA_VERSION


def test_the_shipped_configs_are_the_same_but_for_knobs_that_came_later() -> None:
    lines = []
    for row in pq.read_table(SHIPPED / "configs.parquet").to_pylist():
        knobs = json.loads(row["config"])
        assert {knobs.pop("CONSUMERS"), knobs.pop("PINGPONG")} == {0}
        lines.append(json.dumps(knobs, sort_keys=True))
    assert sha256("\n".join(lines).encode()).hexdigest() == OLD_CONFIGS
