"""What a kernel's own pruning forbids for a launch is never launched, whatever was chosen for another one like it."""

from __future__ import annotations

import json

import foretune
import pytest
import triton
from foretune.runtime import use_stub_driver
from foretune.runtime.tuning import autotuner
from foretune.runtime.tuning.cache import kernel_cache
from foretune.runtime.tuning.cache.exports import export_fla_tables

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("own_cache")]
torch = pytest.importorskip("torch")


def divides(configs, named, **kwargs):
    """More warps than the rows are a multiple of write beyond the tensor, say."""
    rows = {**named, **kwargs}["M"]
    return [config for config in configs if rows % config.num_warps == 0]


@pytest.fixture
def bench(filler, monkeypatch, tmp_path):
    monkeypatch.setenv("FORETUNE_CACHE_DIR", str(tmp_path / "cache"))
    kernel_cache._shared.cache_clear()
    with use_stub_driver(filler.H200) as driver:
        bench = filler.Bench(driver)
        bench.ms = {count: 1.0 / count for count in filler.WARPS}  # the more the better
        yield bench


def tuned(filler, bench, **options):
    options = {"bucket": ["M"], "do_bench": bench, "workers": 1} | options
    return foretune.autotune(filler.configs(), ["M", "N"], **options)(triton.jit(filler.fill_kernel))


def launched(bench):
    """How many warps each launch since the last time had."""
    counts = [launch.metadata.num_warps for launch in bench.driver.launches]
    bench.driver.launches.clear()
    return counts


@pytest.mark.parametrize("family", [False, True])
def test_a_bucket_s_choice_is_not_launched_where_it_is_forbidden(filler, bench, family):
    of_family = {"family": filler.Filler(), "bundle": filler.FillerBundle(), "k": 4, "bucket": ()} if family else {}
    kernel = tuned(filler, bench, prune_configs_by={"early_config_prune": divides}, **of_family)
    for m, best in [(1000, 8), (1001, 1), (1002, 2), (1008, 8), (999, 1)]:
        filler.launch(kernel, m=m)
        counts = launched(bench)
        assert counts[-1] == best, m
        assert all(m % count == 0 for count in counts), m
    assert sorted(bench.timed) == [1, 2, 4, 8]  # what is known of the bucket is not timed again


def test_perf_model_and_top_k_count_for_every_key(filler, bench):
    def perf_model(M, num_warps, **_):
        return -num_warps if M % num_warps == 0 else num_warps

    kernel = tuned(filler, bench, prune_configs_by={"perf_model": perf_model, "top_k": 2})
    for m, best in [(1000, 8), (1001, 2), (1000, 8)]:
        filler.launch(kernel, m=m)
        assert launched(bench)[-1] == best


def test_so_it_is_in_another_epoch_and_another_process(filler, bench, monkeypatch):
    now = [0]
    monkeypatch.setattr(autotuner, "epoch", lambda: now[0])
    for _ in range(2):
        kernel = tuned(filler, bench, prune_configs_by={"early_config_prune": divides})
        for now[0], m in enumerate([1000, 1001, 1000, 1001]):
            filler.launch(kernel, m=m)
            assert launched(bench)[-1] == (8 if m == 1000 else 1)
    assert len(bench.timed) == 4


def test_dynamo_gets_none_that_is_forbidden(filler, bench):
    kernel = tuned(filler, bench, prune_configs_by={"early_config_prune": divides})
    filler.launch(kernel, m=1000)
    out = torch.zeros(1001, 64)
    pruned = kernel.early_config_prune(kernel.configs, {"out_ptr": out, "M": 1001, "N": 64})
    assert [config.num_warps for config in pruned] == [1]


def test_attached_kernels_launch_none_that_is_forbidden(filler, bench):
    kernel = triton.autotune(
        filler.configs(), ["M", "N"], do_bench=bench, prune_configs_by={"early_config_prune": divides}
    )(triton.jit(filler.fill_kernel))
    foretune.attach(kernel)
    for m in (*range(960, 1040, 8), 1001, 1002, 1000):
        filler.launch(kernel, m=m)
        assert all(m % count == 0 for count in launched(bench)), m


@pytest.mark.parametrize("is_attached", [False, True])
def test_exported_tables_have_each_launch_s_own_config(filler, bench, is_attached, tmp_path):
    prune = {"early_config_prune": divides}
    if is_attached:
        kernel = foretune.attach(
            triton.autotune(filler.configs(), ["M", "N"], do_bench=bench, prune_configs_by=prune)(
                triton.jit(filler.fill_kernel)
            )
        )
    else:
        kernel = tuned(filler, bench, prune_configs_by=prune)
    for m in (1002, 1000):  # the latter is the bucket's best from then on
        filler.launch(kernel, m=m)
    export_fla_tables(tmp_path / "tables")
    (path,) = (tmp_path / "tables").rglob("*.json")
    entries = json.loads(path.read_text())["autotune_entries"].values()
    assert {entry["autotune_key"][0]: entry["config"]["num_warps"] for entry in entries} == {1002: 2, 1000: 8}
