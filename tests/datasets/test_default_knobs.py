"""Data that is older than a knob is read with the knob's default."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from foretune.datasets import KernelConfig, load
from foretune.datasets.merge import merge_datasets
from foretune.kernels import find_family
from foretune.model import TrainingSet

MATMUL = find_family("matmul")


@pytest.fixture(scope="module")
def today():
    """Shipped data, with the times of today's kernels."""
    return load("h100_kernels").of_family(MATMUL).of_family(find_family("gated_mlp"))


def without(config, names):
    """Return a config without these knobs."""
    return KernelConfig.of(**{knob: value for knob, value in config.to_json().items() if knob not in names})


def aged(dataset, names):
    """Return the dataset with these knobs removed from matmul's configs that have the defaults."""
    used = set(dataset.rows("matmul")["config"])
    configs = [
        without(config, names)
        if number in used and all(config[name] == MATMUL.default_knobs[name] for name in names)
        else config
        for number, config in enumerate(dataset.configs)
    ]
    assert len(set(configs)) == len(configs)
    return replace(dataset, configs=tuple(configs))


def cells(grid):
    """Return the times of both passes by problem and config."""
    return {
        (case.problem, config): (first, second)
        for case, firsts, seconds in zip(grid.cases, grid.first_us, grid.second_us, strict=True)
        for config, first, second in zip(grid.configs, firsts, seconds, strict=True)
        if np.isfinite(first)
    }


def test_what_names_all_knobs_is_returned_as_it_is(today):
    assert today.of_family(MATMUL) is today
    assert today.of_family(find_family("gated_mlp")) is today  # which has no such knobs
    assert today.of_family(find_family("grouped_gemm_dw")) is today  # which is not in it


@pytest.mark.parametrize("names", [("CONSUMERS", "PINGPONG"), ("PINGPONG",)], ids="-".join)
def test_older_data_are_learned_from_as_if_measured_today(today, names):
    older = aged(today, names)
    found = older.of_family(MATMUL)
    assert cells(TrainingSet.of(found, MATMUL).grid) == cells(TrainingSet.of(today, MATMUL).grid)
    assert found.wrong_results("matmul") == today.wrong_results("matmul")
    assert found.of_family(MATMUL) is found
    for other in ("gated_mlp", "scaled_gemm"):
        assert cells(found.grid(other)) == cells(today.grid(other))


def test_of_older_and_newer_times_of_one_config_the_latest_count(today):
    """A merged dataset has the config with and without the knob."""
    rows = today.rows("matmul")
    later = rows.assign(time_us=rows["time_us"] * 2, run_id="99991231-000000-0000").astype({"run_id": "category"})
    newer = replace(
        today,
        measurements=later.reset_index(drop=True),
        provenance=today.provenance | {"runs": {"99991231-000000-0000": {"family": "matmul"}}},
    )
    both = merge_datasets([aged(today, ("CONSUMERS", "PINGPONG")), newer], name="both", allow_other_sources=True)
    found = cells(both.grid(MATMUL))
    expected = cells(newer.grid("matmul"))
    assert found.keys() == expected.keys()
    assert np.allclose([found[cell] for cell in expected], list(expected.values()))
