"""Several writers and readers of one dataset at the same time: nothing is lost, and it is always readable."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import ExitStack

import pytest
import writers
from foretune.datasets import load
from foretune.datasets.manifest import read_manifest, write_manifest
from foretune.datasets.store import Writer, read, reader
from writers import DEVICE, PROBLEMS, append, devices_of, row


def answer(process):
    return process.stdout.readline()


@pytest.mark.parametrize("rounds", [3, pytest.param(200, marks=pytest.mark.slow)])
def test_writers_at_once_lose_nothing_and_whoever_reads_meanwhile_can(tmp_path, rounds):
    names = {*devices_of("a"), *devices_of("b")}
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, writers.__file__, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            )
            for name in "ab"
        ]
        assert [answer(process) for process in processes] == ["ready\n"] * 2
        for number in range(rounds):
            folder = tmp_path / str(number)
            for process in processes:
                process.stdin.write(f"{folder}\n")
                process.stdin.flush()
            said = []
            waiting = threading.Thread(target=lambda said=said: said.extend(map(answer, processes)))
            waiting.start()
            while waiting.is_alive():
                if (folder / "dataset.json").exists():
                    load(folder)
            assert said == ["done\n"] * 2
            dataset = read(folder)
            assert {spec.name for spec in dataset.devices} == names
            assert dataset.provenance["runs"] == {f"run-{name}": {"by": name} for name in names}
            assert (len(dataset.measurements), len(dataset.drift)) == (2 * len(names), 2 * len(names))
            assert dataset.ignored == ()
            assert {path.name for path in folder.iterdir()} == {"dataset.json", "parts", "drift"}
        for process in processes:
            process.communicate()


def test_writers_of_one_run_at_once_lose_nothing_either(tmp_path):
    one, other = (Writer(tmp_path, "mine", [DEVICE], {}, run_id="r1") for _ in range(2))
    for writer in (one, other, other, one):
        writer.append(*row(PROBLEMS[0]))
    assert len(read(tmp_path).measurements) == 4


@pytest.mark.parametrize("is_read_before", [True, False])
def test_a_run_that_begins_while_a_dataset_is_read_is_no_error(tmp_path, monkeypatch, is_read_before):
    """The run has a new device, which is missing in a manifest that was read earlier."""
    begun = ["old"]
    append(tmp_path, "old")

    def read_beside(directory):
        manifest = read_manifest(directory) if is_read_before else None
        begun.append(f"new{len(begun)}")
        append(tmp_path, begun[-1])
        return manifest or read_manifest(directory)

    monkeypatch.setattr(reader, "read_manifest", read_beside)
    dataset = read(tmp_path)
    measured = set(dataset.measurements["device"])
    assert {"old", "new1"} <= measured
    assert measured <= {spec.name for spec in dataset.devices} <= set(begun)


def test_what_a_manifest_says_besides_stays(tmp_path):
    append(tmp_path, "old")
    manifest = read_manifest(tmp_path)
    write_manifest(tmp_path, manifest | {"provenance": manifest["provenance"] | {"licence": "CC0"}, "note": "mine"})
    append(tmp_path, "new")
    after = read_manifest(tmp_path)
    assert (after["note"], after["provenance"]["licence"]) == ("mine", "CC0")
    assert set(after["provenance"]["runs"]) == {"run-old", "run-new"}
