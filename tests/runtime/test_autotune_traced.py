"""`foretune.autotune` inside a function under torch.compile, where Dynamo makes an autotuner of its own of it."""

from __future__ import annotations

import foretune
import pytest
import triton
from foretune.runtime import use_stub_driver
from foretune.runtime.tuning import shortlisters

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("own_cache")]
torch = pytest.importorskip("torch")


@pytest.fixture
def compiled(filler, monkeypatch, tmp_path):
    """A kernel, a compiled function that launches it, and the configs that each of its graphs has for it."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    monkeypatch.setenv("FORETUNE_CACHE_DIR", str(tmp_path))
    # Without a GPU, Dynamo knows no Triton kernel when it sees one.
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    graphs = []

    def backend(graph, inputs):
        for node in graph.graph.nodes:
            if "triton_kernel_wrapper" in str(node.target):
                kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
                graphs.append([config.num_warps for config in kernel.configs])
        return graph.forward

    def declare(family=True, fullgraph=True, dynamic=False, declared=None, **options):
        torch._dynamo.reset()
        if family:
            options = {"family": filler.Filler(), "bundle": filler.FillerBundle(), "k": 3} | options
        kernel = declared or foretune.autotune(filler.configs(), ["M", "N"], **options)(triton.jit(filler.fill_kernel))

        def function(x):
            out = torch.empty_like(x)
            m, n = x.shape
            kernel[lambda meta: (triton.cdiv(m * n, meta["BLOCK"]),)](out, m, n)
            return out

        return kernel, torch.compile(function, backend=backend, fullgraph=fullgraph, dynamic=dynamic), graphs

    with use_stub_driver(filler.H200) as driver:
        declare.bench = filler.Bench(driver)
        yield declare


def test_static_shapes_are_traced_whole_with_the_shortlist(compiled):
    _, function, graphs = compiled()
    for m in (64, 1, 64):
        function(torch.zeros(m, 8))
    assert graphs == [[8, 4, 2], [1]]


def test_a_torch_that_cannot_hand_configs_over_breaks_the_graph_at_the_launch(filler, compiled, monkeypatch):
    monkeypatch.setattr(shortlisters, "torch_release", lambda: (2, 11))
    kernel, function, graphs = compiled(fullgraph=False, do_bench=compiled.bench)
    function(torch.zeros(64, 8))
    assert (graphs, len(kernel.cache)) == ([], 1)  # the launch has chosen, outside


def test_what_is_known_is_alone_in_the_graph(filler, compiled):
    kernel, function, graphs = compiled(do_bench=compiled.bench)
    filler.launch(kernel, m=64, n=8)
    function(torch.zeros(64, 8))
    assert graphs == [[2]]
    _, function, graphs = compiled(do_bench=compiled.bench)  # in another process
    function(torch.zeros(64, 8))
    assert graphs == [[2], [2]]


def test_in_mode_predict_it_is_the_best_predicted(compiled, monkeypatch):
    monkeypatch.setenv("FORETUNE_MODE", "predict")
    _, function, graphs = compiled()
    function(torch.zeros(64, 8))
    assert graphs == [[8]]


def test_a_kernel_that_needs_its_tensors_restored_has_one_config_in_the_graph(compiled):
    """What Dynamo makes of pruned configs has lost `restore_value` (torch 2.13), so it must not tune."""
    _, function, graphs = compiled(restore_value=["out_ptr"])
    function(torch.zeros(64, 8))
    assert graphs == [[8]]


def test_and_where_nothing_is_known_of_it_the_graph_breaks(filler, compiled):
    kernel, function, graphs = compiled(
        family=False, fullgraph=False, reset_to_zero=["out_ptr"], do_bench=compiled.bench
    )
    function(torch.zeros(64, 8))
    assert graphs == []
    assert sorted(compiled.bench.timed) == [1, 2, 4, 8]
    assert kernel.best_config.num_warps == 1


def test_dynamic_shapes_break_the_graph_and_each_has_its_own_config(compiled):
    kernel, function, graphs = compiled(fullgraph=False, dynamic=True, do_bench=compiled.bench)
    function(torch.zeros(64, 8))
    assert kernel.best_config.num_warps == 2
    function(torch.zeros(1000, 8))
    assert len(compiled.bench.timed) == 6
    assert len(kernel.cache) == 2
    assert graphs == []


def test_without_a_family_all_configs_go_through_until_something_is_known(filler, compiled):
    _, function, graphs = compiled(family=False, do_bench=compiled.bench)
    function(torch.zeros(64, 8))
    assert graphs == [[1, 2, 4, 8]]


def test_what_dynamo_makes_of_a_pruned_kernel_has_no_key_and_restores_nothing(filler, compiled):
    """What the two above are for. Where a later torch keeps them, this says so."""
    from torch._higher_order_ops import triton_kernel_wrap

    stock = triton.autotune(
        filler.configs(),
        ["M", "N"],
        restore_value=["out_ptr"],
        prune_configs_by={"early_config_prune": lambda configs, named, **kwargs: configs[:2]},
    )(triton.jit(filler.fill_kernel))
    _, function, graphs = compiled(declared=stock)
    function(torch.zeros(64, 8))
    made = triton_kernel_wrap.kernel_side_table.id_to_kernel
    (remade,) = [one for one in made.values() if getattr(one, "configs", None) == stock.configs[:2]]
    assert (remade.keys, remade.restore_value) == ([], [])
    assert graphs == [[1, 2]]
