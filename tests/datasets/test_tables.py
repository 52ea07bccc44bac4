"""Tables of datasets and devices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fakes import fake_cases, fake_dataset
from foretune.datasets import DatasetError, DeviceSpec, describe, load, names
from foretune.datasets.console import table
from foretune.datasets.contents import contents_table
from foretune.datasets.store import seal_dataset
from foretune.datasets.tables import write_table
from stores import edit_manifest, write

#: Text that rich would interpret as markup or an emoji, or fail at.
ODD = "[/foo] [red]hot[/red] :smile: \\ [link=x]"


def printed(what: Any, width: int = 300) -> str:
    """Return the output on a wide terminal without colors."""
    rich = pytest.importorskip("rich.console")
    console = rich.Console(width=width, no_color=True)
    with console.capture() as captured:
        console.print(what)
    return str(captured.get())


def cells(what: Any) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in printed(what).splitlines() if "│" in line]


DATASET = fake_dataset(fake_cases(models=1, tokens=(64,), randoms=0))


def test_a_dataset_shows_its_counts_by_family_and_device() -> None:
    told = DATASET.describe()["families"]["fake"]
    runs = {"r1": {"family": "fake", "plan": "adaptive"}}
    planned = replace(DATASET, provenance={"runs": runs})
    assert "All with plan=adaptive" in printed(planned)
    assert cells(planned) == [["fake", "fake", "NVIDIA H200", "2", str(told["configs"]), str(told["measurements"])]]
    assert DATASET.to_json() == DATASET.describe()


def test_several_are_one_table() -> None:
    other = replace(DATASET, name="[other]", ignored=("r1-000001.parquet.tmp",))
    assert [row[0] for row in cells(contents_table([DATASET.describe(), other.describe()]))] == ["fake", "[other]"]
    assert "ignored" not in printed(DATASET)
    assert "[other]: ignored parts: r1-000001.parquet.tmp" in " ".join(printed(other).split())


def test_a_device_shows_every_field() -> None:
    spec = replace(DeviceSpec.named("h200"), matrix_tflops_by_dtype=(("bf16", 785.5), ("fp32", 50.0)))
    shown = dict(cells(spec))
    assert spec.name in printed(spec).splitlines()[0]
    assert shown["matrix_tflops, fp32"] == "50.0"
    expected = {
        name: str(value) for name, value in spec.to_json().items() if name not in ("name", "matrix_tflops_by_dtype")
    }
    assert {name: value for name, value in shown.items() if name in expected} == expected


@pytest.mark.parametrize("width", [20, 60, 80, 200])
def test_a_table_cuts_nothing_off_at_any_width(width: int) -> None:
    words = [f"{word}{number}" for word in ("slowdown", "BLOCK_M", "num_stages") for number in range(3)]
    shown = printed(table("A title of some words", words, [[f"value{at}" for at in range(9)]] * 2), width)
    assert "\u2026" not in shown
    assert max(map(len, shown.splitlines())) <= width
    assert all(shown.count(f"value{at}") == 2 for at in range(9))
    assert ("\u2502" in shown) is (width >= 80)  # folded into a column of name=value


def test_cells_are_narrowed_between_words_while_that_is_enough() -> None:
    rows = [["h100", "NVIDIA H100 80GB HBM3", 3]]
    assert cells_of_width(rows, 30) == [["h100", "NVIDIA H100", "3"], ["", "80GB HBM3", ""]]
    assert cells_of_width(rows, 60) == [["h100", "NVIDIA H100 80GB HBM3", "3"]]


def cells_of_width(rows: list[list[Any]], width: int) -> list[list[str]]:
    lines = printed(table("Cards", ("name", "device", "rows"), rows), width).splitlines()
    return [[cell.strip() for cell in line.strip("\u2502").split("\u2502")] for line in lines if "\u2502" in line]


@pytest.mark.parametrize("width", [200, 40])
def test_what_comes_from_outside_is_shown_as_it_is(width: int) -> None:
    shown = printed(table(ODD, ("", ODD), [["a", ODD]], below=ODD), width)
    assert " ".join(shown.replace("\u2502", " ").replace("\u2503", " ").split()).count(ODD) >= 3
    assert "\x1b" not in printed(table("\x1b[2J", ("\x1b[31m", "b"), [["\x1b]0;x\x07", 2]], below="\x9b1m"), width)


def test_a_device_of_an_odd_name_is_shown_and_listed() -> None:
    odd = replace(DATASET, name=ODD)
    assert ODD in printed(replace(DeviceSpec.named("h200"), name=ODD))
    assert ODD in printed(odd)


@pytest.mark.parametrize("name", names())
def test_a_shipped_manifest_says_what_the_rows_say(name):
    assert describe(name) == load(name).describe()


def test_what_was_sealed_is_described_without_its_rows(tmp_path):
    seal_dataset(write(tmp_path / "mine"), tmp_path / "sealed", name="shipped")
    rows = tmp_path / "sealed" / "measurements.parquet"
    whole = describe(tmp_path / "sealed")
    assert whole == load(tmp_path / "sealed").describe()
    rows.write_bytes(b"torn")
    assert describe(tmp_path / "sealed") == whole
    with pytest.raises(DatasetError, match="altered"):
        load(tmp_path / "sealed")


def test_a_run_that_goes_on_in_a_sealed_folder_is_counted(tmp_path):
    seal_dataset(write(tmp_path / "mine"), tmp_path / "sealed", name="shipped")
    before = describe(tmp_path / "sealed")["families"]["toy"]["measurements"]
    write(tmp_path / "sealed", run_id="r2")
    assert describe(tmp_path / "sealed")["families"]["toy"]["measurements"] == 2 * before


@pytest.mark.parametrize(
    "contents", [None, 5, {}, {"families": {"toy": {}}, "drifted": {}}, {"families": [], "drifted": {}}]
)
def test_contents_that_say_nothing_are_not_believed(tmp_path, contents):
    seal_dataset(write(tmp_path / "mine"), tmp_path / "sealed", name="shipped")
    edit_manifest(tmp_path / "sealed", contents=contents)
    assert describe(tmp_path / "sealed") == load(tmp_path / "sealed").describe()


def test_floats_are_split_into_streams_of_bytes_and_read_again(tmp_path: Path) -> None:
    rows = pa.table({"us": pa.array([1.5, None, 3.25], pa.float32()), "n": [1, 2, 3], "text": ["a", "b", "a"]})
    write_table(rows, tmp_path / "some.parquet")
    columns = pq.ParquetFile(tmp_path / "some.parquet").metadata.row_group(0)
    split = {name: "BYTE_STREAM_SPLIT" in columns.column(i).encodings for i, name in enumerate(rows.column_names)}
    assert split == {"us": True, "n": False, "text": False}
    assert pq.read_table(tmp_path / "some.parquet").equals(rows)
