"""`grouped_gemm(layer=...)`: what its calls choose, on a device that is not there; the kernels are not launched."""

from __future__ import annotations

import foretune
import pytest
import torch
from foretune import KernelConfig
from foretune.kernels.grouped_gemm.op import calls
from foretune.kernels.grouped_gemm.op.calls import Call, Options, call_of
from foretune.kernels.grouped_gemm.op.checks import Shape
from foretune.runtime import use_stub_driver
from foretune.runtime.choice import choose
from foretune.runtime.mode import Mode
from foretune.runtime.tuning.skew import choice_by_skew, earlier_sizes
from foretune.runtime.tuning.skew.earlier_sizes import COPIES
from foretune.runtime.tuning.skew.skew import Skew
from grouped import FAMILIES, H200

ROWS, GROUPS, N, K = 8192, 64, 1536, 2048
SHAPE = Shape(ROWS, GROUPS, N, K)
#: One group with half of the rows, as the sizes that a layer has come to know.
HOT = torch.tensor([ROWS // 2 + 64, *[64] * (GROUPS - 2), 0])
NAMES = [family.name for family in FAMILIES]


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    for name in ("_calls", "_layers"):
        monkeypatch.setattr(calls, name, calls.Memo())
    monkeypatch.setattr(earlier_sizes, "_in_use", [])
    monkeypatch.setattr(choice_by_skew, "GAIN", 0.0)
    with use_stub_driver(H200) as stub:
        yield stub


def made(stub, **options):
    return Call(SHAPE, torch.bfloat16, stub.index, Options(**options))


def know_hot(call):
    for _ in range(8 * COPIES):
        call.layer.earlier.note(HOT)
    assert call.layer.earlier.skew == Skew.of("rows", COPIES * HOT)


def configs(call):
    return [call.config(name, None) for name in NAMES]


def unknown(call, skew=None):
    return [choose(f, call.problem(f.name), H200, Mode.PREDICT, None, skew) for f in FAMILIES]


def test_without_a_layer_nothing_is_known_and_nothing_noted(fresh):
    call = made(fresh)
    assert call.layer is None
    assert configs(call) == unknown(call)
    assert calls._layers == {}


def test_a_layer_that_knows_nothing_yet_chooses_as_without_one(fresh):
    call = made(fresh, layer="a")
    assert configs(call) == unknown(call)


def test_all_three_operations_go_by_the_sizes_of_the_layers_earlier_calls(fresh, monkeypatch):
    asked = []
    predict = choice_by_skew.choose
    monkeypatch.setattr(
        choice_by_skew, "choose", lambda *given: asked.append((given[0].name, given[-1])) or predict(*given)
    )
    call = made(fresh, layer="a")
    configs(call)
    know_hot(call)
    assert configs(call) == configs(call) == unknown(call, call.layer.earlier.skew)
    assert asked == [(name, skew) for skew in (None, Skew.of("rows", COPIES * HOT)) for name in NAMES]


def test_calls_of_one_name_know_the_same_and_of_another_nothing(fresh):
    know_hot(made(fresh, layer="a"))
    assert made(fresh, layer="a", topk=2).layer.earlier.skew is not None
    assert made(fresh, layer="b").layer.earlier.skew is None
    for other in (SHAPE._replace(groups=8), SHAPE._replace(rows=ROWS // 2), SHAPE._replace(rows=16)):
        assert Call(other, torch.bfloat16, fresh.index, Options(layer="a")).layer.earlier.skew is None
    assert Call(SHAPE._replace(rows=ROWS + 9), torch.bfloat16, fresh.index, Options(layer="a")).layer.earlier.skew


def test_a_config_that_is_given_stays(fresh):
    given = KernelConfig.of(BLOCK_M=64, BLOCK_N=64, BLOCK_K=64)
    call = made(fresh, layer="a", config=given, config_dx=given, config_dw=given)
    before = configs(call)
    know_hot(call)
    assert configs(call) == before
    assert before[0]["BLOCK_M"] == 64


@pytest.mark.parametrize("mode", ["shortlist", "off"])
def test_other_modes_do_not_ask_what_a_layer_knows(fresh, mode):
    assert made(fresh, layer="a", mode=mode).layer is None


def test_layers_are_remembered_within_bounds(fresh, monkeypatch):
    monkeypatch.setattr(calls._layers, "most", 4)
    for number in range(9):
        made(fresh, layer=f"layer {number}")
    assert len(calls._layers) <= 4


@pytest.mark.parametrize("mode", ["predict", "off"])
@pytest.mark.parametrize("layer", ["", 3, "a\n"])
def test_what_is_no_name_is_refused(fresh, layer, mode):
    x, w, sizes = torch.ones(4, 16).half(), torch.ones(1, 8, 16).half(), torch.tensor([4])
    with pytest.raises(foretune.ForetuneError, match="layer must be a word but is"):
        call_of(Options(layer=layer, mode=mode), (x, w, sizes, None, None, None))
