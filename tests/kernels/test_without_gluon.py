"""Gluon is experimental: where a later Triton has moved it, ops run their plain kernels, and say so once."""

from __future__ import annotations

import sys
from importlib import import_module

import foretune
import pytest
import torch
from foretune import ForetuneWarning
from foretune.kernels import config_limits, find_measurable, op_calls, warp_jobs
from foretune.kernels.grouped_gemm.op import GRADIENT, OP
from foretune.kernels.grouped_gemm.triton_kernels import launches as grouped_launches
from foretune.kernels.matmul.op import OP as MATMUL
from foretune.kernels.matmul.triton_kernels import launches as matmul_launches
from foretune.kernels.scaled_gemm.op import PRODUCT
from foretune.kernels.scaled_gemm.triton_kernels import launches as scaled_launches
from foretune.runtime import make_shortlist, use_stub_driver
from grouped import DW
from grouped import problem as grouped_problem
from grouped import specialized as grouped_jobs
from products import H200, SPECIALIZED, problem
from products import specialized as dense_jobs
from scaled import problem as scaled_problem
from scaled import specialized as scaled_jobs

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("own_cache")]

M, N, K = 4096, 2048, 512
X, W = (torch.zeros(rows, K, dtype=torch.float8_e4m3fn) for rows in (M, N))
SCALES = {"scales": "rowwise", "x_scale": torch.ones(M, 1), "w_scale": torch.ones(N, 1)}
A, B = torch.zeros(2048, 8192, dtype=torch.bfloat16), torch.zeros(1280, 8192, dtype=torch.bfloat16)
SIZES = torch.full((8,), 2048, dtype=torch.int32)


def dw_of_a_layer(**options):
    """The gradient of a layer's weights alone."""
    x, w = (torch.zeros(*shape, dtype=torch.bfloat16) for shape in ((16384, 2048), (8, 2816, 2048)))
    y = foretune.grouped_gemm(x, w.requires_grad_(), SIZES, **options)
    y.backward(torch.zeros_like(y))


#: Of each op its problem, for which CONSUMERS are predicted, a call, the kernels that then run, and a config of theirs.
OPS = {
    "scaled_gemm": (
        scaled_problem(find_measurable("scaled_gemm"), "rowwise", m=M, n=N, k=K),
        lambda **options: foretune.scaled_gemm(X, W, **SCALES, **options),
        ["scaled_gemm_kernel"],
        scaled_jobs(2, 128, 4),
    ),
    "matmul": (
        problem("bf16", (), 1, *A.shape[:1], *B.shape),
        lambda **options: foretune.matmul(A, B.T, **options),
        ["matmul_kernel"],
        dense_jobs(*SPECIALIZED[5]),
    ),
    "grouped_gemm_dw": (
        grouped_problem(DW, groups=8, rows=16384, n=2816, k=2048),
        lambda config=None: dw_of_a_layer(config_dw=config),
        ["tile_map_kernel", "grouped_gemm_kernel", "dw_map_kernel", "grouped_gemm_dw_kernel", "sum_partials_kernel"],
        grouped_jobs(DW, 0, 128, 256, 4),
    ),
}


def forget():
    for launchers in (
        matmul_launches.LAUNCHERS,
        scaled_launches.LAUNCHERS,
        grouped_launches.OF_DW,
        grouped_launches.OVER_ROWS,
    ):
        launchers.made.clear()
    config_limits.why_no_gluon.cache_clear()


@pytest.fixture
def no_gluon(monkeypatch):
    forget()
    monkeypatch.setattr("foretune.runtime.arguments._warned", set())
    for op in (PRODUCT, MATMUL, OP, GRADIENT):
        monkeypatch.setattr(op, "calls", op_calls.Memo())
    for launches, name in (
        (matmul_launches, "specialized"),
        (scaled_launches, "specialized"),
        (grouped_launches, "specialized_dw"),
        (grouped_launches, "specialized_gemm"),
    ):
        monkeypatch.delitem(sys.modules, f"{launches.__package__}.{name}", raising=False)
    monkeypatch.delitem(sys.modules, warp_jobs.__name__)
    import_module("triton.experimental.gluon.language")  # which Triton itself does: only what is Hopper's is missing
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon.language.nvidia.hopper", None)
    yield
    forget()


@pytest.mark.parametrize("op", OPS)
def test_what_is_predicted_runs_all_the_same(op, no_gluon):
    asked, call, kernels, _ = OPS[op]
    assert make_shortlist(find_measurable(op), asked, H200, k=1).configs[0]["CONSUMERS"]  # or it would show nothing
    with use_stub_driver(H200) as driver:
        with pytest.warns(ForetuneWarning, match="CONSUMERS cannot run with this Triton .*default config is used"):
            call()
        assert [launch.kernel for launch in driver.launches] == kernels


@pytest.mark.parametrize("op", OPS)
def test_a_config_that_is_given_is_not_replaced(op, no_gluon):
    _, call, _, one = OPS[op]
    with use_stub_driver(H200), pytest.raises(ImportError):
        call(config=one)
