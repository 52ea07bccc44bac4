"""Timing configs in a process of their own, which some of them end."""

from __future__ import annotations

import sys
from pathlib import Path

import foretune
import pytest
import triton
from foretune.datasets import ForetuneWarning
from foretune.runtime import use_stub_driver
from foretune.runtime.tuning.isolation import _MOST_BYTES, _packed, _Tensor, _unpacked

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("own_cache")]
torch = pytest.importorskip("torch")


@pytest.fixture
def crashing(monkeypatch, tmp_path):
    monkeypatch.setenv("FORETUNE_CACHE_DIR", str(tmp_path))
    monkeypatch.syspath_prepend(Path(__file__).parent)
    import crashing

    yield crashing
    for name in ("crashing", "filler"):
        sys.modules.pop(name)


@pytest.mark.slow  # starts three processes that import torch
def test_a_config_that_ends_its_process_is_one_less(filler, crashing):
    kernel = crashing.crashing_kernel
    with use_stub_driver(filler.H200) as driver:
        filler.launch(kernel, out=torch.ones(64, 64))
    assert kernel.configs_timings == {
        kernel.configs[3]: [4096 / 8],  # its values were there
        kernel.configs[2]: [4096 / 4],
        kernel.configs[1]: [float("inf")],
        kernel.configs[0]: [float("inf")],
    }
    assert kernel.best_config is kernel.configs[3]
    assert len(driver.launches) == 1  # nothing was timed here
    assert len(crashing.SEEN) == 1  # the reset after it
    outcomes = next(iter(kernel._known._here.values()))
    assert outcomes[kernel.configs[0]].error.startswith("CrashError: it ended the process")
    assert "exit code -11" in outcomes[kernel.configs[0]].error
    assert "RuntimeError: it fails" in outcomes[kernel.configs[1]].error


@pytest.mark.slow  # starts a process that imports torch
def test_a_kernel_that_no_process_finds_is_timed_here_and_that_is_said(filler, monkeypatch, tmp_path):
    monkeypatch.setenv("FORETUNE_CACHE_DIR", str(tmp_path))
    with use_stub_driver(filler.H200) as driver:
        bench = filler.Bench(driver)
        options = {"bundle": filler.FillerBundle(), "isolate": True, "do_bench": bench, "workers": 1, "k": 2}
        kernel = foretune.autotune(filler.configs(), ["M", "N"], filler.Filler(), **options)(
            triton.jit(filler.fill_kernel)
        )
        with pytest.warns(ForetuneWarning, match=r"No module named 'foretune_filler'.*timed in this process"):
            filler.launch(kernel)
    assert bench.timed == [8, 4]


def test_what_cannot_be_sent_is_timed_here_and_that_is_said(filler, crashing, monkeypatch):
    kernel = crashing.crashing_kernel
    with use_stub_driver(filler.H200) as driver:
        monkeypatch.setitem(kernel.__dict__, "do_bench", filler.Bench(driver))
        with pytest.warns(
            ForetuneWarning, match=r"in another process \(TypeError: not this one\).*timed in this process"
        ):
            kernel[(2,)](torch.ones(8, 8), _Odd(8), 8)


class _Odd(int):
    """A number that no pickle takes."""

    def __reduce__(self):
        raise TypeError("not this one")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int64", "uint8", "bool", "float8_e4m3fn", "complex64"])
def test_tensors_come_with_layout_and_values(dtype):
    tensor = torch.arange(48).to(getattr(torch, dtype)).reshape(6, 8)[1:5, ::2].t()
    again = _unpacked(_packed(tensor))
    assert (again.shape, again.stride(), again.storage_offset()) == ((4, 4), tensor.stride(), 8)
    assert again.dtype == tensor.dtype
    assert torch.equal(again.contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8))
    assert _unpacked(_packed(torch.empty(0, 3))).shape == (0, 3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2"])
def test_large_floats_come_without_values_and_large_integers_with_them(dtype):
    count = _MOST_BYTES + 1
    large = torch.zeros(count).to(getattr(torch, dtype))
    packed = _packed(large)
    assert isinstance(packed, _Tensor)
    assert packed.values is None
    assert packed.tensor().float().std() > 0.5
    whole = torch.arange(count)
    assert torch.equal(_unpacked(_packed(whole)), whole)
    assert _packed("text") == "text"
