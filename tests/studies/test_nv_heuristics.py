"""nvMatmulHeuristics as a ranker: its configs become ours, whether it is installed here or played."""

from __future__ import annotations

import sys
from enum import IntEnum
from types import SimpleNamespace

import numpy as np
import pytest
from foretune.datasets import Case, DeviceSpec, ForetuneError, Problem
from foretune.datasets.grid import Grid
from foretune.kernels import find_family
from studies.nv_heuristics import MODULE, NvMatmulHeuristicsRanker

DEVICE = DeviceSpec.named("h200")
FORWARD = find_family("grouped_gemm_fwd")


def grid_of(family, slow_tma=False):
    """Two problems, all configs alike but for noise, or but for those with TMA."""
    configs = family.space(DEVICE)
    problems = [Problem.of(family.name, groups=8, rows=rows, n=2048, k=1024) for rows in (512, 8192)]
    times = np.random.default_rng(0).uniform(1.0, 1.01, (2, len(configs)))
    if slow_tma:
        times *= [1.0 + sum(value for knob, value in config.meta if knob.startswith("TMA")) for config in configs]
    cases = tuple(Case(problem, ("A/w1",), "balanced") for problem in problems)
    return Grid(family.name, cases, (DEVICE, DEVICE), configs, times, times)


class Played:
    """The part of nvMatmulHeuristics that is used; it advises two tiles, and writes down what it was asked."""

    def __init__(self, backend, flags, gpu):
        self.asked = []

    def makeNvMatmulHeuristicsProblem(self, *dense):  # noqa: N802 - its name
        return dense

    def get(self, dense, count, precision):
        self.asked.append((*dense, precision))
        tiles = ((128, 256), (64, 128), (128, 256))
        return [{"kernel": SimpleNamespace(cta_tile_m=m, cta_tile_n=n)} for m, n in tiles]


@pytest.fixture
def played(monkeypatch):
    module = SimpleNamespace(
        NvMatmulHeuristicsInterfaceEx=Played,
        NvMatmulHeuristicsTarget=SimpleNamespace(CUTLASS3=4),
        NvMatmulHeuristicsFlags=SimpleNamespace(PERF_MODEL_BASED_AUTO_TUNING=8),
        NvMatmulHeuristicsNvidiaGpu={"H200_SXM": 9003},
        NvMatmulHeuristicsMatmulLayout=IntEnum("Layout", "NN_ROW_MAJOR NT_ROW_MAJOR TN_ROW_MAJOR"),
    )
    monkeypatch.setitem(sys.modules, MODULE, module)


def ranked(ranker, family, problem, configs):
    scores = ranker.predict(family, problem, DEVICE, configs)
    return [configs[at] for at in np.argsort(scores, kind="stable")]


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("grouped_gemm_fwd", (64, 2048, 1024, "NT_ROW_MAJOR")),
        ("grouped_gemm_dx", (64, 1024, 2048, "NN_ROW_MAJOR")),
        ("grouped_gemm_dw", (2048, 1024, 64, "TN_ROW_MAJOR")),
    ],
)
def test_the_dense_product_is_the_average_group_as_a_batch(name, asked):
    family = find_family(name)
    ranker, configs = NvMatmulHeuristicsRanker().fit(grid_of(family), family), family.space(DEVICE)
    ranker.predict(family, Problem.of(name, groups=8, rows=512, n=2048, k=1024), DEVICE, configs)
    (interface,) = ranker._interfaces_.values()
    ((*dense, layout, batch, precision),) = interface.asked
    assert (*dense, layout.name) == asked
    assert (batch, precision) == (8, "TST")


@pytest.mark.usefixtures("played")
def test_its_first_config_comes_first_with_what_it_does_not_say_from_the_measurements():
    ranker = NvMatmulHeuristicsRanker().fit(grid_of(FORWARD, slow_tma=True), FORWARD)
    problem = Problem.of(FORWARD.name, groups=8, rows=8192, n=2048, k=1024)
    advised = ranked(ranker, FORWARD, problem, FORWARD.space(DEVICE))[:2]
    assert [(one["BLOCK_M"], one["BLOCK_N"]) for one in advised] == [(128, 256), (64, 128)]
    assert not any(one[knob] for one in advised for knob in FORWARD.variant.tma)
    assert all(FORWARD.supports(config, problem, DEVICE) is None for config in advised)
    others = [config for config in FORWARD.space(DEVICE) if config not in advised]
    scores = ranker.predict(FORWARD, problem, DEVICE, others)
    assert np.isfinite(scores).all()
    assert (scores > len(advised)).all()


@pytest.mark.usefixtures("played")
def test_a_score_does_not_depend_on_the_other_configs():
    ranker, configs = NvMatmulHeuristicsRanker().fit(grid_of(FORWARD), FORWARD), FORWARD.space(DEVICE)
    problem = Problem.of(FORWARD.name, groups=8, rows=512, n=2048, k=1024)
    scores = ranker.predict(FORWARD, problem, DEVICE, configs)
    assert (ranker.predict(FORWARD, problem, DEVICE, configs[::7]) == scores[::7]).all()
    assert ranker.predict(FORWARD, problem, DEVICE, ()).shape == (0,)


def test_the_real_one_ranks_without_a_gpu():
    pytest.importorskip(MODULE, reason="NVIDIA's library, which is optional")
    ranker = NvMatmulHeuristicsRanker().fit(grid_of(FORWARD), FORWARD)
    decode, training = (Problem.of(FORWARD.name, groups=8, rows=rows, n=4096, k=4096) for rows in (64, 65536))
    small, large = (ranked(ranker, FORWARD, problem, FORWARD.space(DEVICE))[0] for problem in (decode, training))
    assert small["BLOCK_M"] < large["BLOCK_M"]


def test_where_it_is_not_installed_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, MODULE, None)
    ranker = NvMatmulHeuristicsRanker().fit(grid_of(FORWARD), FORWARD)
    with pytest.raises(ForetuneError, match="pip install nvidia-matmul-heuristics"):
        ranker.predict(FORWARD, grid_of(FORWARD).cases[0].problem, DEVICE, FORWARD.space(DEVICE))
