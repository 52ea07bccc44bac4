"""The prune callback by itself: what it does with the arguments and the configs of a launch."""

from __future__ import annotations

import copy

import pytest
from foretune.datasets import ForetuneError, Problem
from foretune.model import open_bundle
from foretune.runtime import ForetuneWarning, Pruner, make_explanation, resolve_mode

CALL = {"a_ptr": None, "M": 64, "N": 64, "K": 64}


def test_hands_back_the_same_objects_in_predicted_order(toy):
    configs = toy.triton_configs()
    before = copy.deepcopy([config.__dict__ for config in configs])
    pruned = Pruner(toy.ToyFamily(), 3, device=toy.H200, bundle=toy.ToyBundle())(configs, CALL, grid=(1,))
    assert [configs.index(config) for config in pruned] == [5, 4, 3]
    assert all(config is configs[i] for config, i in zip(pruned, (5, 4, 3), strict=True))
    assert [config.__dict__ for config in configs] == before


def test_merges_positional_and_keyword_arguments(toy):
    family = toy.ToyFamily()
    pruner = Pruner(family, device=toy.H200, bundle=toy.ToyBundle())
    pruner(toy.triton_configs(), {"a_ptr": None, "M": 64}, N=32, K=16, grid=(1,), warmup=False)
    assert {name: family.calls[0][name] for name in CALL} == {"a_ptr": None, "M": 64, "N": 32, "K": 16}


def test_takes_arguments_that_are_named_like_its_own_parameters(toy):
    pruner = Pruner(toy.ToyFamily(), 1, device=toy.H200, bundle=toy.ToyBundle())
    assert len(pruner(toy.triton_configs(), CALL, configs=1, named_args=2)) == 1


def test_takes_a_problem_of_the_users_own_making(toy):
    pruner = Pruner(
        toy.ToyFamily(),
        1,
        problem=lambda arguments: Problem.of("toy", rows=arguments["tokens"], n=64, k=64),
        device=toy.H200,
        bundle=(bundle := toy.ToyBundle()),
    )
    assert len(pruner(toy.triton_configs(), {"tokens": 32})) == 1
    assert bundle.predicted[0]["rows"] == 32


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"M": 1}, "no argument K, N, a_ptr"),
        (CALL | {"M": "x"}, "dimension rows must be an integer .* but got 'x'"),
        ({}, "no argument"),
    ],
)
def test_an_odd_launch_gets_every_config_and_one_warning(toy, arguments, why):
    configs = toy.triton_configs()
    pruner = Pruner(toy.ToyFamily(), 1, device=toy.H200, bundle=toy.ToyBundle())
    with pytest.warns(ForetuneWarning, match=why) as caught:
        assert [pruner(configs, arguments) for _ in range(2)] == [configs, configs]
    assert len([one for one in caught if one.category is ForetuneWarning]) == 1  # others are other tests' garbage


def test_without_a_gpu_or_a_named_device_every_config_goes_through(toy, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.warns(ForetuneWarning, match="no GPU is visible"):
        assert len(Pruner(toy.ToyFamily(), 1, bundle=toy.ToyBundle())(toy.triton_configs(), CALL)) == 6


def test_a_list_that_changes_is_read_anew(toy):
    configs, pruner = toy.triton_configs(), Pruner(toy.ToyFamily(), 1, device=toy.H200, bundle=toy.ToyBundle())
    assert pruner(configs, CALL) == [configs[5]]
    configs[5], configs[0] = configs[0], configs[5]
    assert pruner(configs, CALL)[0] is configs[5]
    configs.pop()
    assert pruner(configs, CALL)[0] is configs[4]


@pytest.mark.parametrize(("value", "positions"), [("off", [1, 3, 4, 5]), ("predict", [5]), ("SHORTLIST", [5, 4])])
def test_the_mode_decides_how_many(toy, monkeypatch, value, positions):
    monkeypatch.setenv("FORETUNE_MODE", value)
    family = toy.ToyFamily(lambda config, problem: "no" if config["BLOCK_M"] == 16 else None)
    configs = toy.triton_configs()
    pruned = Pruner(family, 2, device=toy.H200, bundle=toy.ToyBundle())(configs, CALL)
    assert pruned == [configs[i] for i in positions]


def test_a_mode_that_does_not_exist_is_refused_where_the_kernel_is_declared(toy, monkeypatch):
    pruner = Pruner(toy.ToyFamily(), 1, device=toy.H200, bundle=toy.ToyBundle())
    monkeypatch.setenv("FORETUNE_MODE", "fast")
    with pytest.raises(
        ForetuneError, match="FORETUNE_MODE must be one of off, shortlist, predict, refine but got 'fast'"
    ):
        resolve_mode()
    with pytest.raises(ForetuneError, match="FORETUNE_MODE"):
        Pruner(toy.ToyFamily())
    with pytest.raises(ForetuneError, match=r"mode must be .* but got 'predct' \(did you mean 'predict'\?\)"):
        resolve_mode("predct")
    with pytest.warns(ForetuneWarning, match="FORETUNE_MODE"):  # but a launch goes on
        assert len(pruner(toy.triton_configs(), CALL)) == 6


def test_k_must_be_positive(toy):
    with pytest.raises(ForetuneError, match="k must be an integer >= 1 but got 0"):
        Pruner(toy.ToyFamily(), 0)


def test_each_problem_is_logged_in_one_line_once(toy, caplog):
    """At INFO level, so invisible by default; a second launch of a problem adds nothing."""
    prune = Pruner(toy.ToyFamily(), k=2, device=toy.H200, bundle=toy.ToyBundle())
    configs = toy.triton_configs()
    with caplog.at_level("INFO", logger="foretune"):
        for rows in (64, 64, 128, 64):
            prune(configs, {"M": rows, "N": 16, "K": 32, "a_ptr": None})
    assert [record.getMessage() for record in caplog.records] == [
        "foretune: toy 64x16x32 fp16 on NVIDIA H200: 6 -> 2 configs",
        "foretune: toy 128x16x32 fp16 on NVIDIA H200: 6 -> 2 configs",
    ]
    assert {record.levelname for record in caplog.records} == {"INFO"}
    assert all(record.name.startswith("foretune") for record in caplog.records)


def test_the_log_and_an_explanation_count_configs_in_the_same_way(toy, caplog):
    family = toy.ToyFamily(lambda config, problem: "too small" if config["BLOCK_K"] == 16 else None)
    problem = Problem.of("toy", rows=64, n=16, k=32, dtype="fp16")
    with caplog.at_level("INFO", logger="foretune"):
        Pruner(family, k=2, device=toy.H200, bundle=toy.ToyBundle()).positions(problem, tuple(toy.triton_configs()))
    assert caplog.messages == ["foretune: toy 64x16x32 fp16 on NVIDIA H200: 6 configs, 4 usable -> 2"]
    explained = make_explanation(family, problem, toy.H200, k=2, bundle=toy.ToyBundle())
    assert "NVIDIA H200: 6 configs, 4 usable -> 2" in str(explained)


@pytest.mark.filterwarnings("ignore::foretune.ForetuneWarning")
def test_a_prune_without_a_prediction_is_logged_as_one(toy, caplog):
    prune = Pruner(toy.ToyFamily(), k=2, device=toy.H200, bundle=toy.ToyBundle([float("nan")] * 6))
    with caplog.at_level("INFO", logger="foretune"):
        prune(toy.triton_configs(), {"M": 64, "N": 16, "K": 32, "a_ptr": None})
    assert caplog.messages == ["foretune: toy 64x16x32 fp16 on NVIDIA H200: 6 -> 6 configs (no prediction)"]


@pytest.mark.filterwarnings("ignore::foretune.ForetuneWarning")
def test_a_launch_that_is_no_problem_is_logged_as_one_without_a_prediction(toy, caplog):
    prune = Pruner(toy.ToyFamily(), k=2, device=toy.H200, bundle=toy.ToyBundle())
    with caplog.at_level("INFO", logger="foretune"):
        for _ in range(2):
            prune(toy.triton_configs(), {"M": 64})
    assert caplog.messages == ["foretune: toy: 6 -> 6 configs (no prediction)"]


def test_that_foretune_is_off_is_logged_once(toy, caplog, monkeypatch):
    monkeypatch.setenv("FORETUNE_MODE", "off")
    prune = Pruner(toy.ToyFamily(), k=2, device=toy.H200, bundle=toy.ToyBundle())
    with caplog.at_level("INFO", logger="foretune"):
        for rows in (64, 128):
            prune(toy.triton_configs(), {"M": rows, "N": 16, "K": 32, "a_ptr": None})
    assert caplog.messages == ["foretune: toy: FORETUNE_MODE=off, so all supported configs go through"]


def test_a_bundle_without_the_family_is_refused_at_the_declaration(toy):
    with pytest.raises(ForetuneError, match="the bundle has no family 'toy'; it has "):
        Pruner(toy.ToyFamily(), bundle=open_bundle())
