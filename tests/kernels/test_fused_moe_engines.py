"""What is said of the engines: against file names that they ship, and against their own functions where they are
installed, which run out of the installed file without the packages that importing it would take."""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from foretune.datasets import DeviceSpec, ForetuneError, KernelConfig
from foretune.kernels.fused_moe import Layer, installed
from foretune.kernels.fused_moe import tuned_files as shipped_module
from foretune.kernels.fused_moe.engines import (
    BATCH_SIZES,
    ENGINES,
    SGLANG,
    VLLM,
    EngineMissingError,
    default_config,
    file_name,
    functions_of,
    shipped_folder,
    tuner_space,
)
from foretune.kernels.fused_moe.launching import file_entry, with_tma
from foretune.kernels.fused_moe.tuned_files import (
    DEFAULT,
    OURS,
    Pair,
    Row,
    TunedFiles,
    default_pair,
    row_for,
    table_in_force,
)
from foretune.kernels.fused_moe.tuning import tune_layer

H200, H100 = DeviceSpec.named("h200"), DeviceSpec.named("h100")
LAYER = Layer(experts=128, topk=8, hidden=2048, inter=384)
FP8 = Layer(experts=256, topk=8, hidden=7168, inter=256, dtype="fp8e4m3")
TRITON = "3.6.0"
SCALED = "E=256,N=256,device_name=NVIDIA_H200,dtype=fp8_w8a8"


def config(m=16, **changed):
    knobs = {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1}
    return KernelConfig.of(**knobs | {"num_warps": 4, "num_stages": 4} | changed)


def made(engine, pairs, *, layer=LAYER, pinned=()):
    rows = [
        Row(tokens, pair.entries, DEFAULT * (tokens in pinned), {OURS: 1.0, DEFAULT: 2.0})
        for tokens, pair in pairs.items()
    ]
    return TunedFiles(engine, layer, H200, TRITON, tuple(rows), measured=False, least=1.03, reason="")


@pytest.mark.parametrize(
    ("engine", "layer", "device", "down", "name"),
    [  # as they lie in SGLang 0.5.23 and vLLM 0.32
        (SGLANG, Layer(256, 8, 4096, 512), H200, False, "E=256,N=512,device_name=NVIDIA_H200.json"),
        (SGLANG, Layer(256, 8, 4096, 512, "fp16"), H200, True, "E=256,N=512,device_name=NVIDIA_H200_down.json"),
        (SGLANG, LAYER, H100, False, "E=128,N=384,device_name=NVIDIA_H100_80GB_HBM3.json"),
        (SGLANG, FP8, H200, False, "E=256,N=256,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128].json"),
        (
            SGLANG,
            FP8,
            H200,
            True,
            "E=256,N=256,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128]_down.json",
        ),
        (VLLM, FP8, H200, False, "E=256,N=256,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"),
        (VLLM, LAYER, H200, False, "E=128,N=384,device_name=NVIDIA_H200.json"),
    ],
)
def test_names_are_those_that_the_engines_look_up(engine, layer, device, down, name):
    assert file_name(engine, layer, device, down=down) == name


@pytest.mark.parametrize("card", ["../../x", "/abs/x", "..\\x", "*", "x" * 200, "\U0001f600" * 60])
@pytest.mark.parametrize("engine", [VLLM, SGLANG])
def test_a_file_lies_in_its_folder_whatever_the_card_is_called(engine, card):
    name = file_name(engine, LAYER, replace(H200, name=card))
    assert len(name.encode()) < 250
    assert re.fullmatch(r"E=\d+,N=\d+,device_name=[\w-]+\.json", name, re.ASCII)


@pytest.mark.parametrize(
    "card", ["NVIDIA H100 80GB HBM3", "AMD Instinct MI300X", "Intel(R) Data Center GPU Max 1550", "NVIDIA RTX A6000"]
)
def test_the_names_of_cards_that_there_are_stay(card):
    assert f",device_name={card.replace(' ', '_')}." in file_name(VLLM, LAYER, replace(H200, name=card))


def test_vllm_has_no_file_for_the_second_product():
    with pytest.raises(ForetuneError, match="one file for both products"):
        file_name(VLLM, LAYER, H200, down=True)


def test_the_spaces_are_those_of_the_engines_tuners():
    sizes = {(engine, dtype): len(tuner_space(engine, dtype)) for engine in ENGINES for dtype in ("bf16", "fp8e4m3")}
    assert sizes == {(SGLANG, "bf16"): 1920, (SGLANG, "fp8e4m3"): 1280, (VLLM, "bf16"): 1920, (VLLM, "fp8e4m3"): 640}
    assert len(BATCH_SIZES) == 18
    assert (BATCH_SIZES[0], BATCH_SIZES[-1]) == (1, 4096)


@pytest.mark.parametrize("engine", ENGINES)
def test_files_have_what_the_engine_reads(engine, tmp_path):
    pairs = {1: Pair.alike(config(16)), 64: Pair(config(32), with_tma(config(32, num_stages=2), int(engine == SGLANG)))}
    if engine == VLLM:
        pairs[64] = Pair.alike(config(32))
    paths = made(engine, pairs).save(tmp_path)
    read = {str(path.relative_to(tmp_path)): json.loads(path.read_text()) for path in paths}
    name = "E=128,N=384,device_name=NVIDIA_H200.json"
    if engine == VLLM:
        assert list(read) == [name]
        assert read[name].pop("triton_version") == TRITON
    else:
        assert list(read) == [f"configs/triton_3_6_0/{name}", f"configs/triton_3_6_0/{name[:-5]}_down.json"]
        assert [row["USE_TMA"] for row in read[f"configs/triton_3_6_0/{name[:-5]}_down.json"].values()] == [False, True]
        read = {name: read[f"configs/triton_3_6_0/{name}"]}
    assert [*read[name]] == ["1", "64"]
    assert read[name]["64"] == file_entry(config(32))
    assert [*read[name]["64"]] == [
        *("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages"),
    ]


def test_sglang_gets_no_second_file_where_the_first_says_the_same():
    assert len(made(SGLANG, {1: Pair.alike(config())}).tables()) == 1


def test_the_products_share_their_sorting():
    with pytest.raises(ForetuneError, match="BLOCK_SIZE_M must be the same but is 16 and 32"):
        Pair(config(16), with_tma(config(32), 0))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", ["bf16", "fp8e4m3"])
def test_a_row_pinned_to_the_default_gives_no_batch_another_default(engine, dtype):
    """A file's row is also that of the batches around it, whose default may be another one."""
    layer = Layer(200, 8, 2048, 384, dtype)
    pairs = {tokens: default_pair(engine, layer, tokens) for tokens in BATCH_SIZES}
    pairs[24] = Pair.alike(config(64))
    files = made(engine, pairs, layer=layer, pinned=[tokens for tokens in pairs if tokens != 24])
    (table,) = files.tables().values()
    rows = {int(tokens): row for tokens, row in table.items() if tokens != "triton_version"}
    for tokens in [*range(1, 600), *range(600, 9000, 37)]:
        was_pinned = row_for({row.tokens: row for row in files.rows}, tokens).pinned
        if was_pinned:
            assert row_for(rows, tokens) == file_entry(default_config(engine, dtype, tokens, 200)), tokens
    assert rows[24] == file_entry(config(64))


def test_an_engines_own_file_is_read_as_the_engine_reads_it(tmp_path, monkeypatch):
    name = "E=128,N=384,device_name=NVIDIA_H200"
    row = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1}  # Triton's warps and stages
    down = {"8": {**file_entry(config(64, num_stages=2)), "USE_TMA": True}}
    for version, table in (("3_2_0", {"1": file_entry(config(128))}), ("3_10_0", {"1": row, "8": row})):
        (folder := tmp_path / "configs" / f"triton_{version}").mkdir(parents=True)
        (folder / f"{name}.json").write_text(json.dumps(table))
    (tmp_path / "configs/triton_3_2_0" / f"{name}_down.json").write_text(json.dumps(down))
    monkeypatch.setattr(shipped_module, "shipped_folder", lambda engine: tmp_path)
    monkeypatch.delenv("SGLANG_MOE_CONFIG_DIR", raising=False)
    found = table_in_force(SGLANG, LAYER, H200, "3.6.0").rows  # neither is for it: the newest, 3.10
    assert [*found] == [1, 8]
    found = {tokens: row.pair for tokens, row in found.items()}
    assert found[1].up == config(16, BLOCK_SIZE_N=32, BLOCK_SIZE_K=64, num_stages=3)
    assert found[1].down == with_tma(config(16, num_stages=2), 1)  # the first one's BLOCK_SIZE_M
    assert table_in_force(SGLANG, LAYER, H200, "3.2.0").rows[1].pair.up == config(128)
    assert table_in_force(SGLANG, FP8, H200, "3.6.0").rows == {}
    (tmp_path / "configs/triton_3_10_0" / f"{name}.json").write_text("[1]")
    with pytest.raises(ForetuneError, match="is not a tuned file of sglang"):
        table_in_force(SGLANG, LAYER, H200, "3.6.0")


def test_a_file_without_the_function_is_of_another_version(tmp_path):
    file = tmp_path / "theirs.py"
    file.write_text(
        "STEP = 2\nimport nothing_that_is_there\n\ndef two(x):\n    return one(x) + STEP\n\ndef one(x): return x"
    )
    assert functions_of(file, ["two"], {})["two"](1) == 3
    with pytest.raises(EngineMissingError, match="has no three: Foretune does not know this version"):
        functions_of(file, ["three"], {})


# Against the engines themselves.


class _Silent:
    def __getattr__(self, name):
        return lambda *args, **options: None


def engine_functions(engine, monkeypatch):
    """The engine's own file_name, table and default functions, and one that looks a config up as a call does."""
    if engine not in installed():
        pytest.skip(f"{engine} is not installed: pip install --no-deps {engine}")
    folder = shipped_folder(engine)
    names = ["get_config_file_name", "get_moe_configs", "get_default_config", "try_get_optimal_moe_config"]
    given = {"functools": functools, "json": json, "os": os, "logger": _Silent()}
    quiet = SimpleNamespace(get_config=lambda: None)
    if engine == SGLANG:
        file = folder / "fused_moe_triton_config.py"
        plain = SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=False))
        given |= {"get_exec": lambda: plain, "get_device_name": lambda: "NVIDIA H200", "_is_hip": False}
        given |= {"triton": SimpleNamespace(__version__=TRITON)}
        monkeypatch.setitem(sys.modules, "sglang.srt.layers.moe.moe_runner.triton_utils", quiet)
    else:
        file = folder.parent / "fused_moe.py"
        card = SimpleNamespace(is_rocm=lambda: False)
        tuned = os.environ.get("VLLM_TUNED_CONFIG_FOLDER")
        given |= {"envs": SimpleNamespace(VLLM_BATCH_INVARIANT=False, VLLM_TUNED_CONFIG_FOLDER=tuned)}
        given |= {"current_platform": card, "get_device_name_as_file_name": lambda: "NVIDIA_H200"}
        monkeypatch.setitem(sys.modules, "vllm.model_executor.layers.fused_moe", quiet)
    return functions_of(file, names, given)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("layer", [LAYER, FP8], ids=["bf16", "fp8"])
def test_names_and_defaults_are_the_installed_engines(engine, layer, monkeypatch):
    theirs = engine_functions(engine, monkeypatch)
    scaled = layer.dtype == "fp8e4m3"
    dtype, block = ("fp8_w8a8", [128, 128]) if scaled else (None, None)
    name = theirs["get_config_file_name"](layer.experts, layer.inter, dtype, block)
    assert file_name(engine, layer, H200) == name
    if engine == SGLANG:
        name = theirs["get_config_file_name"](layer.experts, layer.inter, dtype, block, down_moe=True)
        assert file_name(engine, layer, H200, down=True) == name
    marlin = (False,) if engine == SGLANG else ()
    for tokens in (*range(1, 200), 256, 257, 512, 513, 4096, 129 * layer.experts):
        sizes = (tokens, layer.experts, layer.inter, layer.hidden, layer.topk, dtype, *marlin)
        row = theirs["get_default_config"](*sizes, block)
        row.pop("SPLIT_K", None)
        row = {"num_warps": 4, "num_stages": 3} | row  # Triton's, where the engine says none
        assert default_config(engine, layer.dtype, tokens, layer.experts).to_json() == {**row, "num_ctas": 1}, tokens


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("layer", [LAYER, FP8], ids=["bf16", "fp8"])
def test_the_installed_engine_finds_what_is_written(engine, layer, tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_MOE_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", str(tmp_path))
    theirs = engine_functions(engine, monkeypatch)
    pairs = {1: Pair.alike(config(16)), 96: Pair.alike(config(64)), 4096: Pair.alike(config(128))}
    if engine == SGLANG:
        pairs[96] = Pair(config(64), with_tma(config(64, num_stages=2), 1))
    files = made(engine, pairs, layer=layer)
    files.save(tmp_path)
    w13, w2 = (layer.experts, 2 * layer.inter, layer.hidden), (layer.experts, layer.hidden, layer.inter)
    scaled = layer.dtype == "fp8e4m3"
    more = {"block_shape": [128, 128] if scaled else None}
    more |= {"return_down_config": True} if engine == SGLANG else {}
    for tokens in (1, 48, 49, 2000, 2100, 9999):
        expected = row_for(pairs, tokens)
        found = theirs["try_get_optimal_moe_config"](
            w13, w2, layer.topk, "fp8_w8a8" if scaled else None, tokens, **more
        )
        if engine == SGLANG:
            found, (down, _) = found
            assert down == file_entry(expected.down)
        assert found == file_entry(expected.up)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_installed_engines_own_files_are_read(engine):
    if engine not in installed():
        pytest.skip(f"{engine} is not installed: pip install --no-deps {engine}")
    found = table_in_force(engine, Layer(128, 8, 2048, 768), H200, TRITON).rows
    assert len(found) == 18
    assert all(isinstance(row.pair, Pair) for row in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_no_row_that_the_engine_ships_for_an_h200_is_lost(engine, monkeypatch):
    """A row of ours takes the place of one that can be compared; all others say what the engine's own file says."""
    if engine not in installed():
        pytest.skip(f"{engine} is not installed: pip install --no-deps {engine}")
    monkeypatch.delenv("SGLANG_MOE_CONFIG_DIR", raising=False)
    monkeypatch.delenv("VLLM_TUNED_CONFIG_FOLDER", raising=False)
    scaled = r"(,dtype=fp8_w8a8,block_shape=\[128, ?128\])?"
    pattern = re.compile(rf"E=(\d+),N=(\d+),device_name=NVIDIA_H200{scaled}\.json")
    names = {match for file in shipped_folder(engine).rglob("E=*.json") if (match := pattern.fullmatch(file.name))}
    layers = {Layer(int(m[1]), 2, 4096, int(m[2]), "fp8e4m3" if m[3] else "bf16") for m in names}
    assert len(layers) > 20
    for layer in layers:
        if layer.dtype == "fp8e4m3" and layer.inter % 128:
            continue
        files = tune_layer(engine, layer, H200)
        now = files.now.rows
        assert now
        assert {row.pinned for row in files.rows} <= {"", "shipped"}
        assert all("shipped" in row.times_us for row in files.rows if not row.pinned)
        table = {int(tokens): row for tokens, row in next(iter(files.tables().values())).items() if tokens.isdigit()}
        ours = {row.tokens for row in files.rows if not row.pinned}
        for tokens in now.keys() - ours:
            assert table[tokens] == now[tokens].entries.up
