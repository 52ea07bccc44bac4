"""The plugins of vLLM and SGLang, in the engines' own modules where these are installed (see tests/README.md)."""

from __future__ import annotations

import importlib
import json
import logging
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
import triton
import triton.language as tl
from foretune.datasets import DeviceSpec, KernelConfig
from foretune.kernels.fused_moe import warming
from foretune.kernels.fused_moe.engines import ENGINES, SGLANG, VLLM, Layer, file_name, folder_name, installed
from foretune.kernels.fused_moe.launching import Product, wrong_for
from foretune.kernels.fused_moe.measurable import blocks_of
from foretune.kernels.fused_moe.tuned_files import row_for
from foretune.kernels.fused_moe.tuning import tune_layer
from foretune.kernels.integrations import engines as plugins
from foretune.kernels.scaled_gemm.quantize import dequantized_weight, quantize_w, quantize_x
from foretune.runtime import ForetuneWarning, arguments
from foretune.runtime.testing import use_stub_device
from foretune.runtime.tuning import packages
from foretune.runtime.tuning.triton_adapter import Attachment
from loops import error
from torch.nn.functional import silu

H200, LIVE = DeviceSpec.named("h200"), DeviceSpec.live
LAYER = Layer(72, 6, 4096, 1280)  # neither engine ships a file for it
PLUGS = {VLLM: plugins.plug_into_vllm, SGLANG: plugins.plug_into_sglang}
FP8 = replace(LAYER, dtype="fp8e4m3")


#: A module with an autotuned kernel.
MAMBA = {
    VLLM: "vllm.model_executor.layers.mamba.ops.ssd_bmm",
    SGLANG: "sglang.kernels.ops.mamba.triton_ops.ssd_bmm",
}


#: SGLang's own code from a layer's call to the launch of its kernel.
LAYER_CODE = (
    "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe",
    "sglang.kernels.ops.moe.fused_moe_triton_kernels",
)


def folder_of(engine):
    return find_spec(engine).submodule_search_locations[0]


class StandIns:
    """Finds an engine's modules except for the ones under test, and makes objects of their names."""

    def __init__(self, engine, values):
        self.engine, self.values = engine, values
        self.real, self.folder = (plugins._MODULES[engine], MAMBA[engine]), folder_of(engine)

    def find_spec(self, name, path=None, target=None):
        if name in self.real or f"{name}.".partition(".")[0] != self.engine:
            return None
        spec = ModuleSpec(name, self, is_package=True)
        spec.submodule_search_locations = ["/".join([self.folder, *name.split(".")[1:]])]
        return spec

    def create_module(self, spec):
        def stand_in(name):
            if name.startswith("__"):
                raise AttributeError(name)
            return self.values.get(name, MagicMock(name=name))

        module = ModuleType(spec.name)
        module.__getattr__ = stand_in
        return module

    def exec_module(self, module):
        pass


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    """Forget what the plugins found, and leave this process's imports and attached packages as they were."""
    for name in ("names", "wrapped", "begun", "follows"):
        monkeypatch.setattr(packages._State, name, getattr(packages._State, name))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(triton.runtime.Autotuner, "__init__", triton.runtime.Autotuner.__init__)
    monkeypatch.setattr(arguments, "_warned", set())
    monkeypatch.setattr(DeviceSpec, "live", lambda: H200)
    for variable in ("SGLANG_MOE_CONFIG_DIR", "VLLM_TUNED_CONFIG_FOLDER", "FORETUNE_MODE", "FORETUNE_SAME_BITS"):
        monkeypatch.delenv(variable, raising=False)
    for cached in (plugins._plug_into, plugins._tables):
        cached.cache_clear()
    yield
    for name in list(sys.modules):
        if name.partition(".")[0] in ENGINES:
            del sys.modules[name]


@pytest.fixture(params=ENGINES)
def engine(request, monkeypatch):
    """An engine's name, its own module with the plugin, and its switch for results that do not depend on the batch."""
    name = request.param
    if name not in installed():
        pytest.skip(f"{name} is not installed: pip install --no-deps {name}")
    mode = SimpleNamespace(enable_deterministic_inference=False)
    values = {"triton": triton, "tl": tl, "get_config": lambda: None, "is_hip": lambda: False}
    values |= {"get_exec": lambda: SimpleNamespace(deterministic=mode), "get_device_name": lambda: "NVIDIA H200"}
    values |= {"get_device_name_as_file_name": lambda: "NVIDIA_H200"}
    values |= {"enable_swap_ab": lambda rows, columns: rows < 64 <= columns, "resolve_moe_use_td": lambda: False}
    values |= {"VLLM_BATCH_INVARIANT": False, "VLLM_TUNED_CONFIG_FOLDER": None}  # of vllm.envs
    values |= {"current_platform": SimpleNamespace(is_rocm=lambda: False, is_cuda=lambda: True)}
    stand_ins = StandIns(name, values)
    sys.meta_path.insert(0, stand_ins)
    PLUGS[name]()
    assert plugins._MODULES[name] not in sys.modules
    module = importlib.import_module(plugins._MODULES[name])
    assert module.__file__.endswith(f"{module.__name__.replace('.', '/')}.py")
    return SimpleNamespace(name=name, module=module, envs=values, mode=mode, stand_ins=stand_ins)


def looked_up(engine, tokens, layer=LAYER, **more):
    """What the engine's own function answers for a call: the first product's config, and the second's (SGLang)."""
    w13, w2 = (layer.experts, 2 * layer.inter, layer.hidden), (layer.experts, layer.hidden, layer.inter)
    scaled = layer.dtype == "fp8e4m3"
    more = {"block_shape": [128, 128] if scaled else None} | more
    if engine.name == SGLANG:
        more["return_down_config"] = True
    dtype = more.pop("dtype", "fp8_w8a8" if scaled else None)
    found = engine.module.try_get_optimal_moe_config(w13, w2, layer.topk, dtype, tokens, **more)
    return (found[0], found[1][0]) if engine.name == SGLANG else (found, None)


def own_default(engine, tokens, layer=LAYER, **more):
    """What the engine runs without the plugin."""
    ours = engine.module.get_default_config
    dtype, block = ("fp8_w8a8", [128, 128]) if layer.dtype == "fp8e4m3" else (None, None)
    more = {"dtype": dtype, "block_shape": block} | ({"is_marlin": False} if engine.name == SGLANG else {}) | more
    return ours.__wrapped__(tokens, layer.experts, layer.inter, layer.hidden, layer.topk, **more)


@pytest.fixture
def tuned(monkeypatch):
    """The tables that the plugin makes, here with three rows instead of eighteen."""
    made = []

    def tune(*of):
        made.append(tune_layer(*of, batches=[1, 64, 4096]))
        return made[-1]

    monkeypatch.setattr(plugins, "tune_layer", tune)
    return made


@pytest.mark.parametrize("layer", [LAYER, FP8], ids=["bf16", "fp8"])
def test_the_engine_gets_what_export_would_write(engine, layer, tuned):
    for tokens in (1, 3, 40, 64, 1000, 4096, 100_000):
        first, second = looked_up(engine, tokens, layer)
        up, *down = (
            {int(batch): row for batch, row in table.items() if batch.isdigit()} for table in tuned[0].tables().values()
        )
        assert first == row_for(up, tokens)
        assert second == (row_for(down[0], tokens) if down else None)
        first.clear()  # an engine may change what it gets
    assert len(tuned) == 1
    if engine.name == SGLANG and layer is LAYER:  # vLLM's kernel is further from the measured data
        assert looked_up(engine, 4096)[0] != own_default(engine, 4096)
        assert down


def test_a_card_with_little_shared_memory_gets_configs_that_fit(engine, tuned, monkeypatch):
    card = replace(H200, name="NVIDIA L40S", arch="sm_89", smem_per_block_bytes=101_376, smem_per_sm_bytes=102_400)
    monkeypatch.setattr(DeviceSpec, "live", lambda: card)
    tables = plugins._tables(engine.name, LAYER.experts, LAYER.inter, LAYER.hidden, LAYER.topk, None, ())
    rows = [row for table in (tables.up, tables.down or {}) for row in table.values()]
    problem = LAYER.problem("fused_moe", engine.name, 64)
    assert rows
    for row in rows:
        knobs = {"num_warps": 4, "num_stages": 3} | {knob: value for knob, value in row.items() if knob != "SPLIT_K"}
        assert not knobs.pop("USE_TMA", False)
        assert wrong_for(KernelConfig.of(**knobs), problem, card) is None


def test_a_tuned_file_is_kept(engine, tmp_path, monkeypatch):
    row = {"BLOCK_SIZE_M": 32, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1, "num_warps": 4}
    file = tmp_path / folder_name(engine.name, triton.__version__) / file_name(engine.name, LAYER, H200)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"1": row}))
    monkeypatch.setenv("SGLANG_MOE_CONFIG_DIR", str(tmp_path))
    engine.envs["VLLM_TUNED_CONFIG_FOLDER"] = str(tmp_path)
    monkeypatch.setattr(plugins, "tune_layer", lambda *_: pytest.fail("predicted"))
    assert looked_up(engine, 4096) == (row, row if engine.name == SGLANG else None)


@pytest.mark.parametrize(
    "why", ["off", "invalid", "same bits", "batch invariant", "int8", "scales per tensor", "marlin"]
)
def test_the_engines_default_runs(why, engine, monkeypatch):
    monkeypatch.setattr(plugins, "tune_layer", lambda *_: pytest.fail("predicted"))
    more = {}
    if why in ("off", "invalid"):
        monkeypatch.setenv("FORETUNE_MODE", why)
    elif why == "same bits":
        monkeypatch.setenv("FORETUNE_SAME_BITS", "1")
    elif why == "batch invariant":
        engine.envs["VLLM_BATCH_INVARIANT"] = engine.mode.enable_deterministic_inference = True
    elif why == "marlin":
        if engine.name != SGLANG:
            pytest.skip("vLLM has no such parameter")
        more = {"is_marlin": True}
    else:
        more = {"dtype": "int8_w8a8" if why == "int8" else "fp8_w8a8"}
    if why == "invalid":
        with pytest.warns(ForetuneWarning, match="FORETUNE_MODE must be one of"):
            found = looked_up(engine, 4096)
    else:
        found = looked_up(engine, 4096, **more)
    assert found == (own_default(engine, 4096, **more), None)


@pytest.mark.compile
@pytest.mark.parametrize("layer", [Layer(8, 2, 256, 128), Layer(8, 2, 256, 128, "fp8e4m3")], ids=["bf16", "fp8"])
def test_vllm_launches_what_warmup_compiled(engine, layer, tmp_path, monkeypatch):
    """The kernel that vLLM's own function launches is in Triton's cache, whatever the number of tokens."""
    if engine.name != VLLM:
        pytest.skip("only vLLM is warmed up")
    row = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1, "num_warps": 4}
    (tmp_path / file_name(VLLM, layer, H200)).write_text(json.dumps({"1": row}))
    monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(warming, "BATCH_SIZES", (32,))

    def binaries():
        return len(list((tmp_path / "triton").rglob("fused_moe_kernel.cubin")))

    with use_stub_device("h200"):
        warmed = warming.warm_up_vllm(layer, H200)
        assert not warmed.failed
        assert 2 <= warmed.binaries == binaries() < 20
        for tokens in (1, 7, 8, 16, 31):
            for down in (False, True):
                launch(engine.module, layer, tokens, down, row)
        assert binaries() == warmed.binaries
        launch(engine.module, layer, 16, False, row | {"BLOCK_SIZE_M": 32})
        assert binaries() == warmed.binaries + 1


def launch(module, layer, tokens, down, config):
    """Launch one product by vLLM's own function, with the shapes that vLLM passes."""
    rows, scaled, block = tokens * layer.topk, layer.dtype == "fp8e4m3", config["BLOCK_SIZE_M"]
    n, k = (layer.hidden, layer.inter) if down else (2 * layer.inter, layer.hidden)
    element = torch.float8_e4m3fn if scaled else torch.bfloat16
    x, w = torch.zeros(rows if down else tokens, k, dtype=element), torch.zeros(layer.experts, n, k, dtype=element)
    y = torch.zeros(tokens, layer.topk, n, dtype=torch.bfloat16)
    scales = (torch.zeros(len(x), k // 128), torch.zeros(layer.experts, n // 128, k // 128)) if scaled else (None, None)
    length = rows + layer.experts * (block - 1)  # as moe_align_block_size makes them
    if rows < layer.experts:
        length = min(rows * block, length)
    ids, experts = torch.zeros(length, dtype=torch.int32), torch.zeros(-(-length // block), dtype=torch.int32)
    if rows * 4 <= layer.experts:  # as vLLM does for few rows of many experts
        ids, experts = None, torch.zeros(rows, dtype=torch.int32)
    padded, topk = torch.zeros(1, dtype=torch.int32), 1 if down else layer.topk
    weights = torch.zeros(tokens, layer.topk)
    module.invoke_fused_moe_triton_kernel(
        x, w, y, *scales, weights, ids, experts, padded, down, topk, config, tl.bfloat16, scaled, False, False, False,
        False, [128, 128] if scaled else None,
    )  # fmt: skip


def test_trouble_is_one_warning_and_the_engines_default(engine, monkeypatch):
    def fail():
        raise RuntimeError("no driver")

    monkeypatch.setattr(DeviceSpec, "live", fail)
    layer = replace(LAYER, hidden=5120)
    with pytest.warns(ForetuneWarning, match="no driver: the engine's default configs run") as caught:
        assert looked_up(engine, 64, layer) == looked_up(engine, 64, layer) == (own_default(engine, 64, layer), None)
    assert len(caught) == 1


def test_a_plugin_that_is_called_twice_changes_the_engine_once(engine):
    PLUGS[engine.name]()
    assert not hasattr(engine.module.get_default_config.__wrapped__, "__wrapped__")


def test_the_entry_points_are_the_plugins():
    pyproject = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for group, plug in (("vllm.general_plugins", PLUGS[VLLM]), ("sglang.srt.plugins", PLUGS[SGLANG])):
        assert f'[project.entry-points."{group}"]\nforetune = "{plug.__module__}:{plug.__name__}"\n' in pyproject


def test_an_autotuned_kernel_of_the_engine_is_attached(engine):
    if find_spec(MAMBA[engine.name]) is None:
        pytest.skip("only some of the engine's files are installed")
    assert Attachment.of(importlib.import_module(MAMBA[engine.name])._bmm_chunk_fwd_kernel) is not None


@pytest.mark.parametrize("engine", ENGINES)
def test_the_autotuned_packages_are_the_engines(engine):
    """Each of the packages has kernels under `triton.autotune`, and the LoRA kernels have none."""
    if engine not in installed():
        pytest.skip(f"{engine} is not installed: pip install --no-deps {engine}")
    folder = folder_of(engine)
    if not Path(folder, {VLLM: "plugins", SGLANG: "srt/plugins"}[engine]).exists():
        pytest.skip("only some of the engine's files are installed")
    for package in plugins._AUTOTUNED[engine]:
        files = Path(folder, *package.split(".")[1:]).rglob("*.py")
        assert any("@triton.autotune(" in file.read_text() for file in files), package
    lora = Path(folder, {VLLM: "lora/ops/triton_ops", SGLANG: "kernels/ops/lora"}[engine])
    assert list(lora.rglob("*.py"))
    assert not any("triton.autotune" in file.read_text() for file in lora.rglob("*.py"))


# On a card.


@pytest.fixture
def sglang(engine, monkeypatch):
    """SGLang with its own code for a layer of experts; what it takes from compiled packages is plain PyTorch here."""
    if engine.name != SGLANG:
        pytest.skip("vLLM's code for a layer needs its compiled operators")

    def aligned(chosen, block, experts):
        problem = replace(LAYER, experts=experts, topk=chosen.shape[1]).problem("fused_moe", SGLANG, len(chosen))
        blocks = blocks_of(Product(problem, False), chosen, block)
        return blocks.sorted_rows, blocks.experts, blocks.padded

    def gated(h, out, **_):
        gate, up = h.float().chunk(2, -1)
        out.copy_(silu(gate) * up)

    def quantized(x, group_size, **_):
        assert group_size == 128
        return quantize_x(x, "blockwise")

    def summed(y, out, factor):
        out.copy_(y.float().sum(1) * factor)

    own = [SimpleNamespace(enable_fused_moe_sum_all_reduce=False), engine.mode]
    engine.envs |= {"get_exec": lambda: SimpleNamespace(moe=own[0], deterministic=own[1])}
    engine.envs |= {"get_device_name": torch.cuda.get_device_name, "get_moe_padding_size": lambda _: 0}
    engine.envs |= {"is_cuda": lambda: True, "is_sm90_supported": lambda: True, "is_arch_support_pdl": lambda: True}
    engine.envs |= dict.fromkeys(("is_cpu", "is_xpu", "is_musa", "cpu_has_amx_support"), lambda: False)
    engine.envs |= {"is_batch_invariant_mode_enabled": lambda: False, "autotune_cache_kwargs": {}}
    engine.envs |= {"register_custom_op": lambda **_: lambda function: function}
    engine.envs |= {"moe_align_block_size": aligned, "silu_and_mul": gated}
    engine.envs |= {"sglang_per_token_group_quant_fp8": quantized, "per_token_group_quant": quantized}
    monkeypatch.setitem(sys.modules, "sgl_kernel", SimpleNamespace(moe_sum_reduce=summed))
    monkeypatch.setattr(logging.Logger, "warning_once", logging.Logger.warning, raising=False)
    monkeypatch.setattr(DeviceSpec, "live", LIVE)
    engine.stand_ins.real += (*LAYER_CODE, MAMBA[SGLANG].replace("ssd_bmm", "autotune"))
    sys.modules.pop(plugins._MODULES[SGLANG])  # which has its functions from the stand-ins of a machine without a card
    plugins._plug_into.cache_clear()
    plugins.plug_into_sglang()
    return engine


@pytest.mark.gpu
@pytest.mark.parametrize(("layer", "tokens"), [(LAYER, 3), (LAYER, 64), (LAYER, 2000), (FP8, 64), (FP8, 2000)])
def test_sglangs_own_layer_runs_what_the_plugin_answers(layer, tokens, sglang, tuned, monkeypatch):
    experts = importlib.import_module(LAYER_CODE[0])
    launched, launch = [], experts.invoke_fused_moe_kernel
    kernel_config = launch.__code__.co_varnames.index("config")

    def spied(*given, **named):
        launched.append(dict(given[kernel_config]))
        launch(*given, **named)

    monkeypatch.setattr(experts, "invoke_fused_moe_kernel", spied)
    torch.manual_seed(0)
    with torch.device("cuda"):
        x = torch.randn(tokens, layer.hidden, dtype=torch.bfloat16)
        chosen = torch.rand(tokens, layer.experts).topk(layer.topk).indices.to(torch.int32)
        factors = torch.rand(tokens, layer.topk)
        sizes = ((2 * layer.inter, layer.hidden), (layer.hidden, layer.inter))
        weights = [torch.randn(layer.experts, n, k, dtype=torch.bfloat16) / k**0.5 for n, k in sizes]
    how = {}
    if layer is FP8:
        (w13, how["w1_scale"]), (w2, how["w2_scale"]) = (quantize_w(w, "blockwise") for w in weights)
        weights = [w13, w2]
        how |= {"use_fp8_w8a8": True, "block_shape": [128, 128]}
    scales = [how.get("w1_scale"), how.get("w2_scale")]
    expected = torch.zeros(tokens, layer.hidden, device="cuda")
    for expert in chosen.unique().tolist():
        token, which = (chosen == expert).nonzero(as_tuple=True)
        w13, w2 = (
            w[expert].float() if scale is None else dequantized_weight(w[expert], scale[expert], "blockwise")
            for w, scale in zip(weights, scales, strict=True)
        )
        gate, up = (x[token].float() @ w13.T).chunk(2, -1)
        y = (silu(gate) * up) @ w2.T * factors[token, which][:, None]
        expected.index_add_(0, token, y)
    found = experts.fused_experts_impl(x, *weights, factors, chosen, **how)
    assert error(found, expected) < (6e-2 if layer is FP8 else 1e-2)  # activations are quantized twice
    up, *down = (
        {int(batch): row for batch, row in table.items() if batch.isdigit()} for table in tuned[0].tables().values()
    )
    first, second = row_for(up, tokens), row_for((down or [up])[0], tokens)
    without_tma = [{knob: value for knob, value in row.items() if knob != "USE_TMA"} for row in (first, second)]
    assert launched == without_tma


@pytest.mark.gpu
def test_an_attached_kernel_of_sglang_runs_on_the_card(sglang):
    module = importlib.import_module(MAMBA[SGLANG])
    assert Attachment.of(module._bmm_chunk_fwd_kernel) is not None
    a, b = torch.randn(2, 1, 1024, 4, 128, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):
        found = module._bmm_chunk_fwd(a, b, 256, output_dtype=torch.float32)
    expected = torch.einsum("bcigk,bcjgk->bcgij", *(one.float().unflatten(1, (4, 256)) for one in (a, b)))
    assert error(found, expected) < 1e-3


# With modules that stand in for an engine's.


def stand_in(monkeypatch, parameters, engine=VLLM):
    module = ModuleType(plugins._MODULES[engine])
    exec(f"def get_default_config({parameters}):\n    return 'default'\ndef get_moe_configs(): pass", module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_an_unknown_version_is_left_alone(monkeypatch):
    module = stand_in(monkeypatch, "M, E, N, topk")
    with pytest.warns(ForetuneWarning, match="does not know get_default_config of vllm"):
        plugins.plug_into_vllm()
    assert module.get_default_config(1, 2, 3, 4) == "default"


def test_a_version_without_a_switch_that_the_plugin_reads_runs_its_default(monkeypatch):
    module = stand_in(monkeypatch, "M, E, N, K, topk, dtype, block_shape")
    plugins.plug_into_vllm()
    with pytest.warns(ForetuneWarning, match="envs.*: vllm's default configs run"):
        assert module.get_default_config(64, 8, 256, 1024, 2, None, None) == "default"


def test_a_module_that_is_imported_already_is_changed(monkeypatch):
    module = stand_in(monkeypatch, "M, E, N, K, topk, dtype, block_shape")
    module.envs = SimpleNamespace(VLLM_BATCH_INVARIANT=False)
    monkeypatch.setattr(plugins, "_tables", lambda *of: plugins._Tables({1: {"of": of}}, None))
    plugins.plug_into_vllm()
    found = module.get_default_config(64, 8, 256, 1024, 2, None, None)
    assert found == {"of": (VLLM, 8, 256, 1024, 2, None, ())}


def test_kernels_are_attached_beside_those_that_the_user_named(monkeypatch):
    monkeypatch.setattr(packages._State, "names", ("json",))
    monkeypatch.setattr(plugins, "_AUTOTUNED", {SGLANG: ("unittest", "no_such_package")})
    plugins.plug_into_sglang()
    assert packages._State.names == ("json", "unittest")
    monkeypatch.setenv("FORETUNE_MODE", "off")
    plugins._plug_into.cache_clear()
    monkeypatch.setattr(plugins, "_AUTOTUNED", {SGLANG: ("logging",)})
    plugins.plug_into_sglang()
    assert "logging" not in packages._State.names
