"""One pin file for every rank, restart and node: real processes with gloo run what one process has chosen."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace

import pytest
from foretune.kernels import find_family
from foretune.runtime import use_stub_driver
from foretune.runtime.pin_file import PinFile
from foretune.runtime.tuning.cache import kernel_cache
from foretune.runtime.tuning.cache.pinning import pins_of_cache
from pinned_kernels import FAMILY, H200, LAYER, SIZES, everything
from pinning import pinned_kernel
from rank_job import Job

pytestmark = pytest.mark.compile


@pytest.fixture
def first_run(tmp_path, monkeypatch):
    """What a first process has tuned, and the file with it."""
    monkeypatch.setenv("FORETUNE_CACHE_DIR", str(tmp_path / "first"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    kernel_cache._shared.cache_clear()
    lock, family = tmp_path / "foretune.lock", find_family(FAMILY)
    config = family.default(LAYER, H200)  # which is not the predicted one
    op = pinned_kernel(FAMILY, {family.at_call_time(LAYER): config}, source=family.source_hash())
    timer = SimpleNamespace(sample=lambda call, samples, undo: [1.0 / call()] * samples)  # more is faster
    with use_stub_driver(H200) as driver:

        def bench(run, quantiles):
            run()
            return [1.0 / driver.launches[-1].metadata.num_warps] * 3

        ran = everything(driver, bench, timer) | {"op": str(config)}
    pins_of_cache().with_those_of(PinFile((op,))).save(lock)
    return ran, lock


@pytest.mark.parametrize("size", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_ranks_of_two_nodes_run_what_a_first_run_has_chosen(size, first_run, tmp_path):
    ran, lock = first_run
    environment = {"FORETUNE_PIN": str(lock), "FORETUNE_CACHE_DIR": str(tmp_path / "nodes")}
    with closing(Job(size, tmp_path / "triton", "pinned_ranks", **environment)) as job:
        looks = job.looks()
    assert len(ran) == 3 * len(SIZES) + 1
    assert len(looks) == size
    for of_rank in looks:
        assert of_rank["alone"] == of_rank["agreed"] == ran
        assert of_rank["sum"] == size
        assert of_rank["copies"] == ["foretune.lock"]  # each node reads the file once
        assert of_rank["wrote"] == []
        assert "foretune.lock does not cover grouped_gemm_fwd" in of_rank["missing"]
    shared = {(*of_rank["predicted"], of_rank["warned"]) for of_rank in looks}
    ((predicted, config, warned),) = shared
    assert (config, warned) == (ran["op"], 1)
    assert predicted != config
