"""Ops in graphs whose number of tokens is left open: one graph serves them all."""

from __future__ import annotations

import pytest
import torch
from foretune import gated_mlp, matmul, rms_norm_rope

pytestmark = pytest.mark.interpret

W = torch.ones(48, 32, dtype=torch.float16)
COS = torch.ones(1, 16, dtype=torch.float16)
OPS = {
    "matmul": lambda x: matmul(x, W.T, mode="off"),
    "gated_mlp": lambda x: gated_mlp(x, W, mode="off"),
    "rms_norm_rope": lambda x: rms_norm_rope(x[:, None], x[:, None], COS, COS, mode="off")[0],
}


@pytest.mark.parametrize("op", OPS)
def test_one_graph_serves_every_number_of_tokens(op):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(OPS[op], backend=counter, fullgraph=True)
    for tokens in (3, 5, 9):
        x = torch.ones(tokens, 32, dtype=torch.float16)
        torch._dynamo.mark_dynamic(x, 0)
        assert torch.equal(compiled(x), OPS[op](x))
    assert counter.frame_count == 1
