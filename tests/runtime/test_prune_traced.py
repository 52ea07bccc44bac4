"""The prune callback where torch.compile traces it, as it does when a compiled function calls an autotuned kernel."""

from __future__ import annotations

import foretune
import pytest
import triton
from foretune.datasets import ForetuneWarning, Problem
from foretune.runtime import prune, use_stub_driver

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("own_cache")]

RESTORED = {"restore_value": ["out_ptr"]}
#: A pruner that takes each launch for one of another family, and so predicts nothing.
ANOTHER = {"problem": lambda arguments: Problem.of("another", rows=8)}
RESET = {"reset_to_zero": ["out_ptr"]}


class Compiled:
    """A kernel under Triton's own autotuner, in a function that is compiled, and the configs that each of its graphs
    has for it (as numbers of warps)."""

    def __init__(self, filler, bench, pruner=(), dynamic=False, fullgraph=True, **options):
        torch._dynamo.reset()
        self.bench, self.graphs, self.compiles = bench, [], 0
        pruner = foretune.prune(**{"family": filler.Filler(), "k": 3, "bundle": filler.FillerBundle(), **dict(pruner)})
        self.kernel = triton.autotune(
            filler.configs(),
            ["M", "N"],
            do_bench=bench,
            prune_configs_by={"early_config_prune": pruner},
            **options,
        )(triton.jit(filler.fill_kernel))
        self.function = torch.compile(self._call, backend=self._backend, fullgraph=fullgraph, dynamic=dynamic)

    def _call(self, x):
        out = torch.empty_like(x)
        m, n = x.shape
        self.kernel[lambda meta: (triton.cdiv(m * n, meta["BLOCK"]),)](out, m, n)
        return out

    def _backend(self, graph, inputs):
        from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

        self.compiles += 1
        for node in graph.graph.nodes:
            if "triton_kernel_wrapper" in str(node.target):
                kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
                self.graphs.append([config.num_warps for config in kernel.configs])
        return graph.forward

    def __call__(self, rows):
        return self.function(torch.zeros(rows, 8))


@pytest.fixture
def compiled(filler, monkeypatch):
    # Without a GPU, Dynamo knows no Triton kernel when it sees one.
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    with use_stub_driver(filler.H200) as driver:
        yield lambda **options: Compiled(filler, filler.Bench(driver), **options)


def test_static_shapes_are_traced_whole_with_the_shortlist(compiled):
    call = compiled()
    for rows in (64, 1, 64):
        call(rows)
    assert call.graphs == [[8, 4, 2], [1]]
    assert call.compiles == 2  # one a shape: asking again traces nothing anew


@pytest.mark.parametrize("options", [RESTORED, RESET])
def test_a_kernel_that_needs_its_tensors_restored_has_the_best_predicted_alone(compiled, options):
    call = compiled(**options)
    call(64)
    assert (call.graphs, call.bench.timed) == ([[8]], [])


@pytest.mark.parametrize("mode", ["off", "shortlist"])
def test_and_where_there_is_no_prediction_the_launch_is_tuned_outside_the_graph(compiled, monkeypatch, mode):
    monkeypatch.setenv("FORETUNE_MODE", mode)
    call = compiled(fullgraph=False, pruner={} if mode == "off" else ANOTHER, **RESTORED)
    call(64)
    assert (call.graphs, sorted(call.bench.timed)) == ([], [1, 2, 4, 8])
    assert call.kernel.best_config.num_warps == 1
    assert call.kernel.restore_value == ["out_ptr"]  # Triton's own autotuner has done it


def test_trouble_where_nothing_is_restored_stays_in_the_graph_with_all_configs(compiled):
    call = compiled(pruner=ANOTHER)
    with pytest.warns(ForetuneWarning, match=r"no prediction \(.*another.*\): all 4 configs"):
        call(64)
    assert call.graphs == [[1, 2, 4, 8]]


def test_dynamic_shapes_leave_the_graph_and_each_has_its_own_config(compiled):
    call = compiled(dynamic=True, fullgraph=False, **RESTORED)
    for rows in (64, 3, 64):
        call(rows)
    assert (call.graphs, call.bench.timed) == ([], [8, 4, 2, 2, 1])  # three rows are few for more warps
    assert [config.num_warps for config in call.kernel.cache.values()] == [2, 1]


def test_a_torch_that_cannot_hand_configs_over_breaks_the_graph_at_the_launch(compiled, monkeypatch):
    monkeypatch.setattr(prune, "torch_release", lambda: (2, 11))
    call = compiled(fullgraph=False, **RESTORED)
    call(64)
    assert (call.graphs, call.bench.timed) == ([], [8, 4, 2])
