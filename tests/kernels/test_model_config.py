"""Sizes of experts from a config.json: what each architecture calls them, what is refused, and the real models of
transformers, where it is installed."""

from __future__ import annotations

import json
import re

import pytest
from foretune.datasets import DatasetError, ForetuneError
from foretune.kernels import find_family
from foretune.kernels.model_config import read_moe_config
from foretune.kernels.workloads import find_model, load_dense_models, load_models


@pytest.fixture
def written(tmp_path):
    """A function that writes a config into a folder of a model, and returns the folder."""

    def write(config, folder="Some-Model-7B"):
        path = tmp_path / folder
        path.mkdir(parents=True)
        (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        return path

    return write


def sizes(model):
    return (model.num_experts, model.top_k, model.expert_hidden_size, model.moe_intermediate_size, model.is_gated)


QWEN = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "hidden_size": 2048}
DEEPSEEK = {
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "intermediate_size": 18432,
    "hidden_size": 7168,
}
MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 14336, "hidden_size": 4096}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (QWEN | {"intermediate_size": 6144}, (128, 8, 2048, 768, True)),
        (MIXTRAL, (8, 2, 4096, 14336, True)),
        (DEEPSEEK | {"n_shared_experts": 1, "kv_lora_rank": 512}, (256, 8, 7168, 2048, True)),
        (  # Kimi-K3's experts work in a latent width
            {
                "text_config": {
                    "num_experts": 896,
                    "num_experts_per_token": 16,
                    "hidden_size": 7168,
                    "moe_intermediate_size": 3072,
                    "intermediate_size": 33792,
                    "routed_expert_hidden_size": 3584,
                    "hidden_act": "situ",
                },
                "vision_config": {"num_experts": None, "hidden_size": 1024},
            },
            (896, 16, 3584, 3072, True),
        ),
        (  # Nemotron-3: the same, without a gate
            {
                "n_routed_experts": 512,
                "num_experts_per_tok": 22,
                "hidden_size": 4096,
                "moe_intermediate_size": 2688,
                "moe_latent_size": 1024,
                "mlp_hidden_act": "relu2",
            },
            (512, 22, 1024, 2688, False),
        ),
        (  # DBRX: the experts in a nested config, the hidden size outside
            {"d_model": 6144, "ffn_config": {"moe_num_experts": 16, "moe_top_k": 4, "ffn_hidden_size": 10752}},
            (16, 4, 6144, 10752, True),
        ),
        (  # LongCat
            {"n_routed_experts": 512, "moe_topk": 12, "hidden_size": 6144, "expert_ffn_hidden_size": 2048},
            (512, 12, 6144, 2048, True),
        ),
        (  # ERNIE VL: one value for text, one for images
            {"moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": [1536, 512], "hidden_size": 2560},
            (64, 6, 2560, 1536, True),
        ),
        ({"audio_config": MIXTRAL, "thinker_config": {"text_config": QWEN}}, (128, 8, 2048, 768, True)),
        ({"hidden_size": 64, "num_experts": None, "text_config": QWEN | {"num_experts": 16}}, (16, 8, 2048, 768, True)),
    ],
)
def test_each_naming_is_read(config, expected, written):
    assert sizes(find_model(str(written(config)))) == expected


def test_the_line_lists_the_fields_that_were_read(written):
    folder = written({"text_config": DEEPSEEK | {"n_shared_experts": 1, "hidden_act": "silu"}}, "DeepSeek-V3")
    assert read_moe_config(folder).line == (
        f"{folder / 'config.json'}, text_config: DeepSeek-V3: n_routed_experts=256, num_experts_per_tok=8, "
        "hidden_size=7168, moe_intermediate_size=2048, gated (silu), without n_shared_experts=1"
    )


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("Qwen3-30B-A3B", "Qwen3-30B-A3B"),
        ("models--Qwen--Qwen3-30B-A3B/snapshots/ad44e777bcd18fa416d9da3bd8f70d33ebb85d39", "Qwen3-30B-A3B"),
        ("1234", "qwen3_moe"),
    ],
)
def test_a_model_is_named_by_its_folder(folder, name, written):
    path = written(QWEN | {"model_type": "qwen3_moe"}, folder)
    assert load_models(path)[0].model == load_models(path / "config.json")[0].model == name


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"hidden_size": 8, "intermediate_size": 8},
            "a dense model, or its experts .* num_local_experts, n_routed_exp",
        ),
        ({"hidden_size": 8, "expert_count": 8}, "in the config and those nested in it. Set are expert_count$"),
        (QWEN | {"num_experts": 1}, "a dense model, or its experts have an unknown name"),
        ({"text_config": QWEN | {"enable_moe_block": False}}, "has no experts, because enable_moe_block is false"),
        (
            {"num_experts": 8, "hidden_size": 64, "d_ff": 128},
            "has num_experts=8, hidden_size=64, but not the number of experts per token .looked for "
            "num_experts_per_tok, .* nor the intermediate size of an expert .looked for moe_intermediate_size",
        ),
        (QWEN | {"num_experts": "8"}, "num_experts: must be an integer but is '8'"),
        (QWEN | {"n_routed_experts": 64}, "num_experts=128 but n_routed_experts=64"),
        (QWEN | {"moe_intermediate_size": 1407}, "moe_intermediate_size: must be a multiple of 8 but is 1407"),
        (MIXTRAL | {"model_type": "doge"}, "the experts of doge are not matrices"),
        ("[]", "must be a JSON object"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_what_is_no_moe_config_is_refused(config, message, written):
    folder = written(config)
    with pytest.raises(DatasetError, match=message) as error:
        load_models(folder)
    assert str(error.value).startswith(str(folder / "config.json"))


def test_a_missing_file_and_an_unknown_name_are_refused(tmp_path):
    with pytest.raises(DatasetError, match=r"config\.json: cannot be read as a model's config: No such file"):
        load_models(tmp_path)
    with pytest.raises(ForetuneError, match=r"unknown model 'Qwen/Qwen9'; known: Mixtral-8x7B.*pass its config\.json"):
        find_model("Qwen/Qwen9")


def test_dense_families_refuse_a_config(written):
    with pytest.raises(DatasetError, match=r"only families of MoE layers read a config\.json: use a CSV file with"):
        load_dense_models(written(QWEN))


def test_a_layer_gives_the_sizes_of_each_moe_family(written):
    model = find_model(str(written(QWEN))).on_rank(2)
    for name in ("grouped_gemm_fwd", "grouped_gemm_dx", "grouped_gemm_dw", "scaled_grouped_gemm_fwd"):
        assert model.dims_of(find_family(name)) == {
            "w13": {"groups": 128, "n": 768, "k": 2048},
            "w2": {"groups": 128, "n": 2048, "k": 384},
        }
    assert model.dims_of(find_family("fused_moe")) == {"": {"experts": 128, "topk": 8, "hidden": 2048, "inter": 384}}
    with pytest.raises(ForetuneError, match="matmul is not a family of MoE layers"):
        model.dims_of(find_family("matmul"))
    with pytest.raises(ForetuneError, match="tp must divide the intermediate size, 384, but is 5"):
        model.on_rank(5)
    with pytest.raises(ForetuneError, match="Nemotron-3-Nano-30B-A3B have no gate"):
        find_model("Nemotron-3-Nano-30B-A3B").dims_of(find_family("fused_moe"))


#: Per architecture of transformers: what its default config lacks, or what makes it small enough to build.
ARCHITECTURES = {
    "afmoe": {},
    "aria_text": {},
    "cohere2_moe": {},
    "deepseek_v2": {"num_experts_per_tok": 6, "moe_intermediate_size": 1408},
    "deepseek_v3": {},
    "ernie4_5_moe": {},
    "ernie4_5_vl_moe": {},
    "exaone_moe": {},
    "flex_olmo": {},
    "glm4_moe": {},
    "glm4v_moe": {},
    "gpt_oss": {},
    "granitemoehybrid": {},
    "jamba": {},
    "jetmoe": {},
    "kimi_linear": {},
    "llama4": {},
    "minimax_m2": {},
    "mixtral": {},
    "nemotron_h": {"moe_latent_size": 1024},
    "olmoe": {},
    "phimoe": {},
    "qwen2_moe": {},
    "qwen3_5_moe": {},
    "qwen3_moe": {},
    "qwen3_next": {},
    "qwen3_vl_moe": {},
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_sizes_are_those_of_the_parameters(name, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import moe_models  # noqa: F401  makes transformers importable from the repository's root
    import torch

    pytest.importorskip("transformers")
    from transformers import AutoModel
    from transformers.models.auto import configuration_auto as auto

    if name not in auto.CONFIG_MAPPING_NAMES:
        pytest.skip(f"this transformers has no {name}")
    config = auto.CONFIG_MAPPING[name](**ARCHITECTURES[name])
    text = config.get_text_config()
    text.num_hidden_layers = min(text.num_hidden_layers, 6)
    config.to_json_file(tmp_path / f"{name}.json", use_diff=False)
    model = load_models(tmp_path / f"{name}.json")[0]
    with torch.device("meta"):
        built = AutoModel.from_config(config)
    shapes = {
        tuple(parameter.shape)
        for where, parameter in built.named_parameters()
        if re.search(r"(?<!shared_)experts\.|\.mlp\.(in|out)put_linear", where)
        and not re.search("vision|self_attention|shared", where)
        and parameter.dim() == 3
    }
    expected = {(model.num_experts, *size) for size in model.projections().values()}
    assert {(shape[0], *sorted(shape[1:])) for shape in shapes} == {(e, *sorted(size)) for e, *size in expected}
    assert getattr(text, "num_experts_per_tok", getattr(text, "moe_topk", getattr(text, "moe_k", None))) in (
        None,
        model.top_k,
    )
