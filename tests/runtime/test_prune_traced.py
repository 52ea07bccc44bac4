"""The prune callback where torch.compile traces it, as it does when a compiled function calls an autotuned kernel."""

from __future__ import annotations

import pytest
from foretune.datasets import Problem
from foretune.runtime import Pruner

torch = pytest.importorskip("torch")


def _problem(arguments):
    return Problem.of("toy", rows=arguments["M"], n=arguments["N"], k=arguments["K"])


@pytest.fixture
def call(toy):
    torch._dynamo.reset()
    configs = toy.triton_configs()
    pruner = Pruner(toy.ToyFamily(), 2, problem=_problem, device=toy.H200, bundle=toy.ToyBundle())

    def call(x):
        pruned = pruner(configs, {"a_ptr": x, "M": x.shape[0], "N": 64}, K=64, grid=(1,))
        return x + pruned[0].kwargs["BLOCK_M"] + 1000 * len(pruned)

    return call


def test_is_traced_whole_for_static_shapes(call):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(call, backend=backend, fullgraph=True, dynamic=False)
    for rows in (64, 32, 64, 64):
        assert compiled(torch.zeros(rows, 1))[0] == call(torch.zeros(rows, 1))[0] == 2064
    assert len(graphs) == 2  # one a shape: asking again traces nothing anew


def test_leaves_the_graph_for_dynamic_shapes_and_goes_on(call):
    compiled = torch.compile(call, backend="eager", dynamic=True)
    for rows in (64, 33):
        assert compiled(torch.zeros(rows, 1))[0] == 2064
