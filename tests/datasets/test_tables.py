"""What a person sees of a dataset and of a device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fakes import fake_cases, fake_dataset
from foretune.datasets import DeviceSpec
from foretune.datasets.dataset import datasets_table


def printed(what: Any) -> str:
    """As on a wide terminal without colours."""
    rich = pytest.importorskip("rich.console")
    console = rich.Console(width=300, no_color=True)
    with console.capture() as captured:
        console.print(what)
    return str(captured.get())


def cells(what: Any) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in printed(what).splitlines() if "│" in line]


DATASET = fake_dataset(fake_cases(models=1, tokens=(64,), randoms=0))


def test_a_dataset_shows_its_counts_by_family_and_device() -> None:
    told = DATASET.describe()["families"]["fake"]
    runs = {"r1": {"family": "fake", "plan": "adaptive"}}
    assert cells(replace(DATASET, provenance={"runs": runs})) == [
        ["fake", "fake", "NVIDIA H200", "2", str(told["configs"]), str(told["measurements"]), "adaptive"]
    ]
    assert DATASET.to_json() == DATASET.describe()


def test_several_are_one_table() -> None:
    other = replace(DATASET, name="[other]", ignored=("r1-000001.parquet.tmp",))
    assert [row[0] for row in cells(datasets_table([DATASET, other]))] == ["fake", "[other]"]
    assert "ignored" not in printed(DATASET)
    assert "[other]: ignored half-written parts: r1-000001.parquet.tmp" in " ".join(printed(other).split())


def test_a_device_shows_every_field() -> None:
    spec = replace(DeviceSpec.named("h200"), matrix_tflops_by_dtype=(("bf16", 785.5), ("fp32", 50.0)))
    shown = dict(cells(spec))
    assert spec.name in printed(spec).splitlines()[0]
    assert shown["matrix_tflops, fp32"] == "50.0"
    expected = {
        name: str(value) for name, value in spec.to_json().items() if name not in ("name", "matrix_tflops_by_dtype")
    }
    assert {name: value for name, value in shown.items() if name in expected} == expected
