"""The engines' MoE kernel as a family. What compiles or launches needs an engine's Python files:
`pip install --no-deps sglang`, and is skipped without."""

from __future__ import annotations

from dataclasses import replace

import pytest
from foretune.datasets import DeviceSpec, ForetuneError, KernelConfig, Problem
from foretune.kernels import find_measurable
from foretune.kernels.fused_moe import EngineMissingError, Layer, contenders, installed, workload
from foretune.kernels.fused_moe.engines import SGLANG, VLLM
from foretune.kernels.fused_moe.launching import Product, with_tma
from foretune.kernels.fused_moe.tuned_files import Pair, TunedRow, TunedTable
from foretune.kernels.registry import comparison_of
from foretune.kernels.testing import FamilyContract

H200 = DeviceSpec.named("h200")
HERE = replace(H200, backend="cpu", sm_count=4)
needs_engine = pytest.mark.skipif(not installed(), reason="no engine: pip install --no-deps sglang")


def small(family, engine, *, dtype="fp16", tokens=9, **dims):
    layer = Layer(**{"experts": 4, "topk": 2, "hidden": 64, "inter": 32, "dtype": dtype} | dims)
    return layer.problem(family, engine, tokens)


class _Contract(FamilyContract):
    compiled = 2
    launched = 4

    def problems(self):
        engine = installed()[0] if installed() else SGLANG
        layers = (Layer(64, 8, 2048, 512), Layer(128, 1, 1024, 72, "fp16"))
        found = [layer.problem(self.family.name, engine, tokens) for layer in layers for tokens in (1, 200)]
        # SGLang's fp8 kernel, transposed, compiles on the Triton that SGLang has but not on 3.9.
        return [*found, Layer(8, 2, 1024, 256, "fp8e4m3").problem(self.family.name, VLLM, 4096)]

    def small_problems(self):
        return [small(self.family.name, installed()[0])]

    def mutations(self):
        """Each knob, of one problem: a compile takes a second, and the problems do not differ in what is refused."""
        last = self.problems()[0]
        return (one for one in super().mutations() if one[1] == last)

    def test_cases_follow_their_seed_and_their_limits(self, monkeypatch):
        """Of a few models: what any config can run is asked of all of them."""
        few = workload.load_models(None)[::12]
        monkeypatch.setattr(workload, "load_models", lambda path: few)
        super().test_cases_follow_their_seed_and_their_limits()

    test_what_supports_passes_compiles = needs_engine(FamilyContract.test_what_supports_passes_compiles)
    test_the_source_hash_is_stable = needs_engine(FamilyContract.test_the_source_hash_is_stable)
    test_launches_in_the_interpreter = needs_engine(FamilyContract.test_launches_in_the_interpreter)
    test_launches_on_a_gpu = needs_engine(FamilyContract.test_launches_on_a_gpu)


class TestUp(_Contract):
    family = "fused_moe"


class TestDown(_Contract):
    family = "fused_moe_down"


@pytest.mark.interpret
@pytest.mark.parametrize("engine", [SGLANG, VLLM])
@pytest.mark.parametrize("name", ["fused_moe", "fused_moe_down"])
@pytest.mark.parametrize("dims", [{}, {"experts": 40, "tokens": 3, "hidden": 80, "inter": 48}], ids=("dense", "sparse"))
def test_each_engines_kernel_gives_what_the_reference_says(engine, name, dims):
    """Sparse: few rows of many experts, which vLLM does not sort, and sizes that are no multiple of the blocks."""
    if engine not in installed():
        pytest.skip(f"{engine} is not installed")
    family = find_measurable(name)
    problem = small(name, engine, **dims)
    inputs = family.inputs(problem, HERE)
    knobs = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 2}
    config = KernelConfig.of(**knobs, **({"USE_TMA": 0} if name == "fused_moe_down" else {}))
    out, expected = family.launch(inputs, config).float(), family.reference(inputs)
    assert float((out - expected).norm() / expected.norm()) <= family.tolerance(problem)


@pytest.mark.parametrize("engine", [SGLANG, VLLM])
@pytest.mark.parametrize("tokens", [1, 5, 300])
def test_sorted_rows_are_whole_blocks_of_one_expert(engine, tokens):
    import torch
    from foretune.kernels.fused_moe.measurable import blocks_of, chosen_experts

    product = Product(small("fused_moe", engine, experts=12, topk=3, tokens=tokens), down=False)
    chosen = chosen_experts(product, torch.Generator().manual_seed(0), "cpu")
    assert all(len(set(row)) == 3 for row in chosen.tolist())
    for block_m in (16, 64):
        blocks = blocks_of(product, chosen, block_m)
        if product.is_unsorted:
            assert blocks.sorted_rows is None
            assert blocks.experts.tolist() == chosen.flatten().tolist()
            continue
        length = int(blocks.padded)
        assert length % block_m == 0
        assert length <= product.sorted_length(block_m) == len(blocks.sorted_rows)
        rows = blocks.sorted_rows[:length].reshape(-1, block_m)
        flat = chosen.flatten()
        for expert, block in zip(blocks.experts.tolist(), rows, strict=False):
            real = block[block < product.rows].long()
            assert len(real)
            assert (flat[real] == expert).all()
        assert sorted(rows[rows < product.rows].tolist()) == list(range(product.rows))


def test_without_an_engine_it_is_said_what_to_install(monkeypatch):
    from foretune.kernels.fused_moe import engines

    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    engines.engine_kernel.cache_clear()
    assert engines.installed() == ()
    with pytest.raises(EngineMissingError, match="pip install --no-deps sglang"):
        engines.engine_kernel(SGLANG)
    with pytest.raises(ForetuneError, match="none of the engines is installed: pip install sglang or vllm"):
        find_measurable("fused_moe").source_hash()


@pytest.mark.parametrize(
    ("changed", "problem", "why"),
    [
        ({"BLOCK_SIZE_K": 256}, {"dtype": "fp8e4m3"}, "BLOCK_SIZE_K must divide 128"),
        ({"BLOCK_SIZE_M": 256, "BLOCK_SIZE_N": 256}, {}, "num_warps must be more than 4 for BLOCK_SIZE_M=256"),
        ({"BLOCK_SIZE_M": 8}, {}, "BLOCK_SIZE_M cannot be 8: 16, 32, 64, 128 or 256"),
        ({"BLOCK_SIZE_K": 256, "BLOCK_SIZE_M": 128, "num_stages": 5}, {}, "bytes of shared memory"),
        ({"USE_TMA": 1}, {"engine": VLLM}, "USE_TMA must be 0: vLLM's kernel"),
        ({"USE_TMA": 1}, {"inter": 36}, "USE_TMA must be 0: rows of 36 bf16"),
        ({}, {"topk": 5}, "topk must be at most experts, 4, but is 5"),
        ({}, {"tokens": 0}, "tokens must be >= 1"),
    ],
)
def test_what_is_refused(changed, problem, why):
    family = find_measurable("fused_moe_down")
    asked = small(family.name, **{"engine": SGLANG, "dtype": "bf16"} | problem)
    knobs = family.default(small(family.name, SGLANG, dtype="bf16"), H200).to_json()
    assert why in (family.supports(KernelConfig.of(**knobs | changed), asked, H200) or "")


@pytest.mark.parametrize("name", ["fused_moe", "fused_moe_down"])
def test_the_problem_of_a_call(name):
    """What SGLang passes says the layer; of vLLM's second product nothing says topk."""
    import torch

    family = find_measurable(name)
    problem = Layer(16, 4, 256, 96).problem(name, SGLANG, 40)
    product, config = Product(problem, family.down), family.default(problem, H200)
    tensors = {"a_ptr": torch.empty(0, dtype=torch.bfloat16), "b_ptr": torch.empty(16, product.n, product.k)}
    call = tensors | product.numbers(config)
    sglang = call | {"top_k": product.top_k, "ROUTER_TOPK": 4}
    assert family.problem_from_call(sglang) == problem
    vllm = call | {"top_k": product.top_k, "naive_block_assignment": False}
    if name == "fused_moe":
        assert family.problem_from_call(vllm).flags == (VLLM,)
    else:
        with pytest.raises(ForetuneError, match="no argument ROUTER_TOPK"):
            family.problem_from_call(vllm)


def test_the_estimate_knows_a_good_tile_from_a_bad_one():
    """Few rows an expert want few rows a block, many want many: what any table of the engines shows."""
    family = find_measurable("fused_moe")
    for tokens, wanted in ((1, {16}), (4096, {64, 128, 256})):
        problem = Layer(64, 8, 2048, 1024).problem(family.name, SGLANG, tokens)
        configs = [c for c in family.space(H200) if family.supports(c, problem, H200) is None]
        times = family.estimate_us(problem, H200, configs)
        assert configs[int(times.argmin())]["BLOCK_SIZE_M"] in wanted
        assert times.min() / (family.bytes(problem) / 4.3e6 if tokens == 1 else times.min()) >= 1.0


def test_a_check_problem_is_small_and_has_the_same_binary():
    family = find_measurable("fused_moe")
    problem = Problem.of(family.name, experts=256, topk=8, hidden=7168, inter=2048, tokens=4096)
    config = family.space(H200)[0]
    check = family.check_problem(config, problem)
    assert family.flops(check) < family.flops(problem) / 500
    assert family.binary_key(config, check) == family.binary_key(config, problem)


@pytest.mark.parametrize("family", ["fused_moe", "fused_moe_down"])
def test_it_is_compared_with_what_the_engine_runs(family, monkeypatch):
    kernel = find_measurable(family)
    comparison, down = comparison_of(kernel), family == "fused_moe_down"
    for case in comparison.suite(kernel).values():
        assert kernel.supports(kernel.default(case.problem, H200), case.problem, H200) is None
    problem = Layer(128, 8, 2048, 768).problem(family, SGLANG, 100)
    knobs = {"BLOCK_SIZE_M": 32, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1, "num_stages": 3}
    of_file = KernelConfig.of(**knobs)
    monkeypatch.setattr(type(kernel), "launch", lambda self, inputs, config: config)
    monkeypatch.setattr(contenders, "table_in_force", lambda *_: TunedTable())
    ways = comparison.contenders(kernel, problem, None, H200, {})
    assert {name: way() for name, way in ways.items()} == {"default": kernel.default(problem, H200)}
    pair = Pair.alike(of_file)
    table = TunedTable({64: TunedRow(pair.entries, pair), 4096: TunedRow(pair.entries, None)})
    monkeypatch.setattr(contenders, "table_in_force", lambda *_: table)
    ways = comparison.contenders(kernel, problem, None, H200, {})
    assert tuple(ways) == comparison.others
    assert ways["shipped"]() == (with_tma(of_file, 0) if down else of_file)
