"""A launch goes on with all configs, and one warning, whatever the family of its kernel does."""

from __future__ import annotations

import warnings

import foretune
import pytest
import triton
from foretune.datasets import ForetuneWarning
from foretune.runtime import arguments, use_stub_driver

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("own_cache")]
torch = pytest.importorskip("torch")

FAULTS = {
    "raises": lambda: {}["rows"],
    "exits": lambda: (_ for _ in ()).throw(SystemExit(3)),
    "wrong": lambda: 7,
}
METHODS = ("supports", "problem_from_call", "at_call_time")


def autotuned(filler, family, bench):
    options = {"bundle": filler.FillerBundle(), "k": 2, "do_bench": bench, "workers": 1}
    return foretune.autotune(filler.configs(), ["M", "N"], family, **options)(triton.jit(filler.fill_kernel))


def attached(filler, family, bench):
    kernel = triton.autotune(filler.configs(), ["M", "N"], do_bench=bench)(triton.jit(filler.fill_kernel))
    return foretune.attach(kernel, family, k=2, bundle=filler.FillerBundle())


def pruned(filler, family, bench):
    prune = foretune.prune(family, k=2, bundle=filler.FillerBundle(), device=filler.H200)
    how = {"prune_configs_by": {"early_config_prune": prune}, "do_bench": bench}
    return triton.autotune(filler.configs(), ["M", "N"], **how)(triton.jit(filler.fill_kernel))


@pytest.mark.parametrize("declared", [autotuned, attached, pruned])
def test_all_configs_are_timed_with_one_warning(filler, declared, monkeypatch, tmp_path):
    """Of each method one fault: what the others do, tests/datasets/test_guard.py asks."""
    for number, (method, fault) in enumerate(zip(METHODS, FAULTS, strict=True)):
        monkeypatch.setenv("FORETUNE_CACHE_DIR", str(tmp_path / str(number)))
        monkeypatch.setattr(arguments, "_warned", set())
        answer = FAULTS[fault]
        family = type("Theirs", (filler.Filler,), {method: lambda self, *args, answer=answer: answer()})()
        with use_stub_driver(filler.H200) as driver, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            bench = filler.Bench(driver)
            kernel = declared(filler, family, bench)
            for _ in range(2):
                filler.launch(kernel)
            assert sorted(bench.timed) == [1, 2, 4, 8], (method, fault)
            assert kernel.best_config.num_warps == 1
        said = [str(one.message) for one in caught if one.category is ForetuneWarning]
        assert len(said) == 1, (method, fault, said)
        assert f"family filler: {method}()" in said[0], (method, fault, said)
