"""The kernels for a few rows, and the routing, on the card: against float64, replayed in a CUDA graph, and in a
compiled function."""

from __future__ import annotations

import foretune
import pytest
import torch
from experts import Experts, routed
from foretune.kernels.grouped_gemm import few_rows_gemm, grouped_gemm, route
from foretune.kernels.integrations.experts import experts_forward
from loops import error

pytestmark = pytest.mark.gpu

TOLERANCES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
every_dtype = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(sum(shape)), device="cuda").to(dtype)


@every_dtype
@pytest.mark.parametrize("m", [1, 2, 3])
@pytest.mark.parametrize(("n", "k"), [(40, 72), (1024, 4096), (8, 14344)])
def test_a_few_rows_times_a_matrix(m, n, k, dtype):
    a, w, bias = random(m, k, dtype=dtype), random(n, k, dtype=dtype), random(n, dtype=dtype)
    exact = torch.nn.functional.silu(a.double() @ w.double().T + bias)
    found = [foretune.matmul(a, w.T, bias, "silu") for _ in range(3)]
    is_tf32 = dtype is torch.float32 and m > 2  # tiled
    assert error(found[0], exact) < (1e-3 if is_tf32 else 2 * TOLERANCES[dtype])
    assert all(torch.equal(one, found[0]) for one in found)


@every_dtype
@pytest.mark.parametrize("topk", [1, 3, 8])
def test_a_few_rows_of_experts(topk, dtype):
    tokens, groups, n, k = 3, 64, 88, 264
    x, w, back = random(tokens, k, dtype=dtype), random(groups, n, k, dtype=dtype), random(groups, k, n, dtype=dtype)
    chosen, weights = torch.randint(-1, groups + 1, (tokens * topk,), device="cuda"), random(tokens * topk)
    inside = ((chosen >= 0) & (chosen < groups))[:, None]
    group = chosen.clamp(0, groups - 1)
    rows = x.repeat_interleave(topk, 0).double()
    exact = torch.einsum("rk,rnk->rn", rows, w[group].double()) * inside
    h = few_rows_gemm(x, w, chosen, topk=topk)
    assert error(h, exact) < TOLERANCES[dtype]
    order, routing = route(chosen, groups)
    sorted_h = grouped_gemm(x, w, routing, gather_indices=order, topk=topk, permute_x=True)
    assert torch.equal(sorted_h, h[order.long()])
    exact = torch.einsum("rn,rkn->rk", h.double(), back[group].double()) * inside * weights[:, None]
    y = few_rows_gemm(h, back, chosen, topk=topk, weights=weights, sums=True)
    assert error(y, exact.view(tokens, topk, k).sum(1)) < 2 * TOLERANCES[dtype]


@pytest.mark.parametrize(
    ("rows", "groups"), [(8, 128), (512, 128), (5000, 4000), (65536, 64), (300_000, 200), (3000, 1)]
)
def test_routing_sorts_stably(rows, groups):
    chosen = torch.randint(-1, groups + 1, (rows,), device="cuda")
    order, routing = route(chosen, groups)
    nowhere = (chosen < 0) | (chosen >= groups)
    assert torch.equal(order.long(), chosen.masked_fill(nowhere, groups).sort(stable=True).indices)
    assert torch.equal(routing[-1].long(), torch.bincount(chosen[~nowhere], minlength=groups))


@pytest.mark.parametrize("tokens", [1, 12])
def test_experts_in_a_graph_and_compiled(tokens):
    experts = Experts().to("cuda", torch.float16)
    x, chosen, weights = (tensor.cuda() for tensor in routed(tokens=tokens))
    x = x.half()
    with torch.no_grad():
        expected = experts_forward(experts, x, chosen, weights)
        assert error(expected, experts.looped(x, chosen, weights)) < 3e-3
        compiled = torch.compile(experts_forward, fullgraph=True)
        assert error(compiled(experts, x, chosen, weights), expected) < 2e-3
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = experts_forward(experts, x, chosen, weights)
        chosen.copy_(chosen.flip(0))
        graph.replay()
        assert torch.equal(y, experts_forward(experts, x, chosen, weights))
