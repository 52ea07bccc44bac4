"""Test that logged kernels without a declared family do not prevent training on the other families of a log."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import FAMILY, LAYER, call, words
from foretune import ForetuneError, ForetuneWarning, KernelConfig, Problem
from foretune.datasets import Case, Measurement, Status, load
from foretune.datasets.store import Writer
from foretune.kernels.learning import families_in
from foretune.runtime.timing.flywheel import VARIABLE, log_row
from remembered import CONFIGS, H200, KERNEL, problem

SIZES = {name.removeprefix("--"): int(size) for name, size in zip(*[iter(LAYER.split())] * 2, strict=True)}


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "log"))
    for config in CONFIGS:
        log_row(KERNEL, problem(64), config, 3.5, H200, timed="autotuner")
    return tmp_path / "log"


def test_they_are_left_out_with_a_warning_where_there_are_others(log: Path) -> None:
    log_row(FAMILY, Problem.of(FAMILY, **SIZES), KernelConfig.of(BLOCK_M=64), 3.5, H200, timed="autotuner")
    dataset = load(log)
    assert dataset.families == (FAMILY, KERNEL)
    with pytest.warns(ForetuneWarning, match=f"log: the logged times of {KERNEL} are left out"):
        assert list(families_in(dataset)) == [FAMILY]
    with pytest.raises(ForetuneError, match=f"unknown kernel family '{KERNEL}'"):
        families_in(dataset, [FAMILY, KERNEL])  # it was asked for


def test_third_party_data_without_a_registered_family_names_the_option(tmp_path: Path) -> None:
    theirs, config = Problem.of("their_softmax", rows=8), KernelConfig.of(BLOCK=64)
    row = Measurement(theirs, H200.name, config, Status.OK, time_us=7.0)
    Writer(tmp_path / "theirs", "theirs", [H200], {}, run_id="r1").append(Case(theirs, ("random",)), [row])
    result = call(f"train --data {tmp_path / 'theirs'} --out {tmp_path / 'bundle'}")
    assert result.exit_code == 1
    assert "theirs has measurements of their_softmax, for which no family is registered" in words(result.stderr)
    assert "pass --family package.module:Class or path/to/file.py:Class (family= in Python)" in words(result.stderr)


def test_where_there_are_no_others_it_is_said_what_to_do(log: Path, tmp_path: Path) -> None:
    result = call(f"train --data {log} --out {tmp_path / 'bundle'}")
    assert result.exit_code == 1
    assert f"logged times of {KERNEL}, for which no family is registered" in words(result.stderr)
    assert "--family package.module:Class" in words(result.stderr)
