"""dW in fp8 on a GPU: every config of the space is right, and all give the same bits; also with groups in chunks.

`fp8_gradients_on_gpu.py` prints errors and times.
"""

from __future__ import annotations

import pytest
import torch
from foretune.collect.compiling import compile_ahead
from foretune.datasets import DeviceSpec, Problem
from foretune.kernels import find_family
from foretune.kernels.scaled_gemm.operators import BOTH_WAYS
from foretune.kernels.scaled_gemm.quantize import quantize_w, quantize_x
from foretune.kernels.scaled_gemm.triton_kernels.both_ways import quantize_weights_both_ways

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("own_cache")]

FAMILY = find_family("scaled_grouped_gemm_dw")
KINDS = {"blockwise": ("blockwise",), "rowwise": ()}
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def device(own_cache):
    device = DeviceSpec.live()
    for flags in KINDS.values():
        problem = Problem.of(FAMILY.name, dtype="fp8e4m3", flags=flags, groups=8, rows=64, n=64, k=64)
        pairs = [(config, problem) for config in FAMILY.space(device)]
        compile_ahead(FAMILY, [pair for pair in pairs if FAMILY.supports(*pair, device) is None], device)
    return device


@every_kind
@pytest.mark.parametrize("sizes", [(37, 0, 1, 300, 0, 16, 129, 5), (0, 20000, 128), (3,)], ids=str)
def test_every_config_is_right_and_gives_the_same_bits(kind, sizes, device):
    dims = {"groups": len(sizes), "rows": sum(sizes), "n": 400, "k": 656}
    problem = Problem.of(FAMILY.name, dtype="fp8e4m3", flags=KINDS[kind], ragged={"rows": sizes}, **dims)
    inputs, first = FAMILY.inputs(problem, device), None
    reference = FAMILY.reference(inputs)
    for config in FAMILY.space(device):
        if FAMILY.supports(config, problem, device) is None:
            inputs.out.fill_(float("nan"))
            out = FAMILY.launch(inputs, config)
            error = float((out.float() - reference).norm() / reference.norm())
            assert error < FAMILY.tolerance(problem), f"{error}: {config}"
            first = out.clone() if first is None else first
            assert torch.equal(out, first), config


@every_kind
def test_weights_are_quantized_as_by_torch(kind):
    # A product with the reciprocal of a scale may round to a neighbor of the quotient.
    w = torch.randn(3, 272, 400, device="cuda", dtype=torch.bfloat16)
    w8, scale, wt8, wt_scale = quantize_weights_both_ways(w, blockwise=kind == "blockwise")
    for matrix, fp8, found in ((w, w8, scale), (w.transpose(1, 2), wt8, wt_scale)):
        expected, expected_scale = quantize_w(matrix, kind)
        assert torch.allclose(found, expected_scale, rtol=1e-6)
        assert float((fp8.float() != expected.float()).float().mean()) < 1e-3


@every_kind
def test_rows_are_quantized_as_by_torch(kind):
    x = torch.randn(300, 400, device="cuda", dtype=torch.bfloat16)
    sizes = torch.tensor([100, 0, 200], dtype=torch.int32, device="cuda")
    x8, scale, _, _ = BOTH_WAYS.call(x, sizes, "e4m3", kind == "blockwise", True)
    expected, expected_scale = quantize_x(x, kind)
    assert torch.allclose(scale, expected_scale, rtol=1e-6)
    assert float((x8.float() != expected.float()).float().mean()) < 1e-3
