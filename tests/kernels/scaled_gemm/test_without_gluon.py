"""Gluon is experimental: where a later Triton has moved it, the op runs its plain kernel, and says so once."""

from __future__ import annotations

import sys
from importlib import import_module

import foretune
import pytest
import torch
from foretune import ForetuneWarning
from foretune.kernels import op_calls
from foretune.kernels.scaled_gemm.op import fp8_product
from foretune.kernels.scaled_gemm.triton_kernels import launches
from foretune.runtime import make_shortlist, use_stub_driver
from scaled import DENSE, H200, problem, specialized

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("own_cache")]

M, N, K = 4096, 2048, 512
X, W = (torch.zeros(rows, K, dtype=torch.float8_e4m3fn) for rows in (M, N))
SCALES = {"scales": "rowwise", "x_scale": torch.ones(M, 1), "w_scale": torch.ones(N, 1)}


@pytest.fixture
def no_gluon(monkeypatch):
    for cached in (launches._launcher, launches.why_not_specialized):
        cached.cache_clear()
    monkeypatch.setattr(fp8_product, "_calls", op_calls.Memo())
    monkeypatch.delitem(sys.modules, f"{launches.__package__}.specialized", raising=False)
    import_module("triton.experimental.gluon.language")  # which Triton itself does: only what is Hopper's is missing
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon.language.nvidia.hopper", None)
    yield
    for cached in (launches._launcher, launches.why_not_specialized):
        cached.cache_clear()


def test_what_is_predicted_runs_all_the_same(no_gluon):
    asked = problem(DENSE, "rowwise", m=M, n=N, k=K)
    assert make_shortlist(DENSE, asked, H200, k=1).configs[0]["CONSUMERS"]  # or this test would show nothing
    with use_stub_driver(H200) as driver:
        with pytest.warns(ForetuneWarning, match="CONSUMERS cannot run with this Triton .*default config is taken"):
            foretune.scaled_gemm(X, W, **SCALES)
        assert [launch.kernel for launch in driver.launches] == ["scaled_gemm_kernel"]


def test_a_config_that_is_given_is_not_replaced(no_gluon):
    with use_stub_driver(H200), pytest.raises(ImportError):
        foretune.scaled_gemm(X, W, **SCALES, config=specialized(2, 128, 4))
