"""Winners from tuned files: which files and rows are read, and as what problems, cards and spaces."""

from __future__ import annotations

import json

import pytest
from foretune.datasets import DeviceSpec, ForetuneError
from foretune.kernels.fused_moe import EngineMissingError, FusedMoeDown, FusedMoeUp, installed, shipped_winners
from foretune.kernels.fused_moe.engines import ENGINES, SGLANG, VLLM
from foretune.kernels.fused_moe.launching import uses_tma
from foretune.kernels.learning import ranker_for
from foretune.model import LightGBMRanker

FAMILIES = {family.name: family for family in (FusedMoeUp(), FusedMoeDown())}
UP, DOWN = FAMILIES
ROW = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1, "num_warps": 4, "num_stages": 3}


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Read the winners of files that are given by engine and name, as rows by number of tokens."""

    def of(**files):
        for engine, named in files.items():
            for name, rows in named.items():
                file = tmp_path / engine / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(rows if isinstance(rows, str) else json.dumps(rows))
        return shipped_winners.winners_of(list(files))

    monkeypatch.setattr(shipped_winners, "shipped_folder", lambda engine: tmp_path / engine)
    return of


def test_a_row_is_a_winner_of_both_products(read):
    found = read(vllm={"E=128,N=384,device_name=NVIDIA_H200.json": {"16": ROW, "triton_version": "3.6.0"}})
    assert list(found) == [UP, DOWN]
    for name, (winner,) in found.items():
        assert str(winner.problem) == f"{name} experts=128 hidden=2048 inter=384 tokens=16 topk=8 bf16 vllm"
        assert winner.device == DeviceSpec.named("h200")
        assert {knob: winner.config[knob] for knob in ROW} == ROW
        assert not uses_tma(winner.config)
        assert winner.config in winner.space
        assert {FAMILIES[name].supports(one, winner.problem, winner.device) for one in winner.space} == {None}


def test_a_card_without_measurements_has_its_own_limits(read):
    found = read(vllm={f"E=8,N=3584,device_name={card}.json": {"16": ROW} for card in ("NVIDIA_L40S", "NVIDIA_B200")})
    spaces = {winner.device.arch: winner.space for winner in found[UP]}
    assert {name: len(space) for name, space in spaces.items()} == {"sm_100": 1296, "sm_89": 972}


def test_block_scaled_fp8_is_read_as_each_engine_launches_it(read):
    row = ROW | {"BLOCK_SIZE_K": 256}
    name = "E=256,N=256,device_name=NVIDIA_H20,dtype=fp8_w8a8,block_shape=[128,{}128].json"
    (winner,) = read(vllm={name.format(""): {"16": row}})[UP]
    assert (winner.config["BLOCK_SIZE_K"], winner.problem.dtype_name) == (128, "fp8e4m3")
    assert read(sglang={f"configs/triton_3_6_0/{name.format(' ')}": {"16": row}})[UP] == ()  # SGLang refuses it


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("E=8,N=3584,device_name=AMD_Instinct_MI300X.json", ROW),
        ("E=8,N=3584,device_name=NVIDIA_H200,dtype=int8_w8a16.json", ROW),
        ("E=8,N=3584,device_name=NVIDIA_H200,dtype=fp8_w8a8.json", ROW),
        ("E=8,N=3584,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[64,64].json", ROW),
        ("E=8,N=3584,device_name=NVIDIA_H200_down.json", ROW),
        ("E=8,N=3584,device_name=NVIDIA_H200.json", ROW | {"BLOCK_SIZE_M": 8}),
        ("E=8,N=3584,device_name=NVIDIA_H200.json", ROW | {"GROUP_SIZE_M": 8}),
        ("E=8,N=3584,device_name=NVIDIA_H200.json", ROW | {"waves_per_eu": 2}),
    ],
)
def test_what_the_families_or_the_space_lack_is_not_read(read, name, row):
    assert read(vllm={name: {"16": row}}) == {UP: (), DOWN: ()}


def test_copies_between_engines_are_read_once(read):
    name, other = "E=8,N=3584,device_name=NVIDIA_H200.json", "E=8,N=7168,device_name=NVIDIA_H200.json"
    found = read(
        vllm={name: {"16": ROW}}, sglang={f"configs/triton_3_2_0/{file}": {"16": ROW} for file in (name, other)}
    )
    assert [(one.problem["inter"], one.problem.flags) for one in found[UP]] == [(3584, (VLLM,)), (7168, ())]


def test_a_layer_of_no_known_model_gets_the_sizes_of_the_nearest(read):
    (winner,) = read(vllm={"E=127,N=380,device_name=NVIDIA_H200.json": {"16": ROW}})[UP]
    assert [winner.problem[dim] for dim in ("experts", "inter", "hidden", "topk")] == [127, 380, 2048, 8]


def test_errors_name_the_file_or_the_engine(read, monkeypatch):
    with pytest.raises(ForetuneError, match=r"NVIDIA_H200.json is not a tuned file of vllm"):
        read(vllm={"E=8,N=3584,device_name=NVIDIA_H200.json": "{"})
    with pytest.raises(ForetuneError, match="engine must be one of sglang, vllm but is 'trt'"):
        shipped_winners.winners_of(["trt"])
    monkeypatch.setattr(shipped_winners, "shipped_folder", lambda engine: None)
    with pytest.raises(EngineMissingError, match="sglang is not installed, but its tuned files are needed"):
        shipped_winners.winners_of([SGLANG])


def test_winners_are_for_families_that_are_trained(read):
    read(vllm={"E=8,N=3584,device_name=NVIDIA_H200.json": {"16": ROW}})
    assert ranker_for(["matmul"], ()) is LightGBMRanker
    assert len(ranker_for(["matmul", UP], [VLLM])().winners_[UP]) == 1
    with pytest.raises(ForetuneError, match=r"winners are of fused_moe and fused_moe_down, but .* are matmul"):
        ranker_for(["matmul"], VLLM)


def test_the_installed_engines_have_winners_for_many_cards():
    if installed() != ENGINES:
        pytest.skip("needs both engines: pip install --no-deps sglang vllm")
    found = shipped_winners.winners_of(ENGINES[::-1])
    assert len(found[UP]) == len(found[DOWN]) > 5000
    assert len({winner.device.name for winner in found[UP]}) > 15
    assert all(winner.config in winner.space for winner in found[DOWN][::50])
