"""Models of the real transformers with the experts implementation "foretune", next to their own loop over experts:
logits, loss and every gradient. Small, of random weights; nothing is downloaded. Skipped where it is not installed."""

from __future__ import annotations

import pytest
import torch
from experts import EXPERTS, Fp8Experts, routed
from loops import error
from moe_models import MODELS, made

transformers = pytest.importorskip("transformers", minversion="5.7")
import foretune  # noqa: E402

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.filterwarnings("ignore::foretune.runtime.ForetuneWarning"),  # gpt-oss has its weights transposed
]


def step(model, implementation):
    """Logits and the gradients of all parameters after one step of training on fixed tokens."""
    model.set_experts_implementation(implementation)
    model.zero_grad()
    tokens = torch.arange(14).view(2, 7) * 5 % 64
    out = model(input_ids=tokens, labels=tokens)
    out.loss.backward()
    return {"logits": out.logits.detach()} | {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_what_its_own_experts_make_it(name, monkeypatch):
    monkeypatch.setenv("FORETUNE_MODE", "off")
    model = made(name)
    expected = step(model, "eager")
    with foretune.use("transformers"):
        found = step(model, "foretune")
        assert model.get_experts_implementation()[""] == "foretune"
    assert any("experts" in name for name in expected)
    for what, value in expected.items():
        assert value.abs().sum() > 0, what
        assert error(found[what], value) < 1e-5, what
    with pytest.raises(KeyError, match="not a valid experts implementation"):  # transformers' own words
        model(input_ids=torch.zeros(1, 2, dtype=torch.long))


def test_it_is_chosen_by_its_name_only_while_it_is_used():
    model = made("Mixtral")
    with pytest.raises(ValueError, match='experts_implementation="foretune"` is not supported'):
        model.set_experts_implementation("foretune")
    with foretune.use("transformers"):
        model.set_experts_implementation("foretune")


def test_its_experts_in_fp8_multiply_through_foretune(monkeypatch):
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    if not hasattr(fp8, "ALL_FP8_EXPERTS_FUNCTIONS"):
        pytest.skip("this transformers has no registry of experts in fp8")
    monkeypatch.setenv("FORETUNE_MODE", "off")
    ours, given = Fp8Experts(), routed(hidden=Fp8Experts.HIDDEN)
    sizes = {"hidden_size": Fp8Experts.HIDDEN, "moe_intermediate_size": Fp8Experts.INNER, "num_experts": EXPERTS}
    config = transformers.Qwen3MoeConfig(**sizes)
    declared = transformers.integrations.moe.use_experts_implementation(
        experts_class=fp8.FP8Experts, experts_interface=fp8.ALL_FP8_EXPERTS_FUNCTIONS
    )
    theirs = declared(config=config, block_size=(128, 128))
    theirs.load_state_dict(ours.state_dict())
    config._experts_implementation = "foretune"
    with foretune.use("transformers"), torch.no_grad():
        found = theirs(*given)
    assert error(found, ours.looped(*given).detach()) < 1e-5
    with pytest.raises(KeyError, match="not a valid experts implementation"):
        theirs(*given)
