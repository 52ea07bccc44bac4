"""transformers' and torchtitan's own experts on the card, in bfloat16, next to Foretune's. Each half is skipped where
its project is not installed."""

from __future__ import annotations

import pytest
import torch
from experts import Experts, Fp8Experts, routed
from loops import error
from moe_models import MODELS, made

import foretune  # isort: skip - after moe_models, which mends the path
from foretune.kernels.integrations.experts import experts_forward, fp8_experts_forward, multiply

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::foretune.runtime.ForetuneWarning")]

SIZES = {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


def step(model, implementation):
    """Logits and the gradients of all parameters after one step of training on fixed tokens."""
    model.set_experts_implementation(implementation)
    model.zero_grad()
    tokens = torch.randint(0, 64, (2, 200), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    out = model(input_ids=tokens, labels=tokens)
    out.loss.backward()
    return {"logits": out.logits.detach()} | {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_what_its_own_experts_make_it(name):
    """One layer: the router sees the same hidden states, so that no token goes to another expert."""
    pytest.importorskip("transformers", minversion="5.7")
    model = made(name, **SIZES).to("cuda", torch.bfloat16)
    expected = step(model, "eager")
    with foretune.use("transformers"):
        found = step(model, "foretune")
    for what, value in expected.items():
        assert error(found[what], value) < 3e-2, what  # the router's gradient cancels, and both are of bfloat16


def on_card(**layout):
    experts = Experts(**layout).to("cuda", torch.bfloat16)
    x, chosen, weights = (tensor.cuda() for tensor in routed(tokens=500))
    return experts, (x.bfloat16().requires_grad_(), chosen, weights.bfloat16().requires_grad_())


@pytest.mark.parametrize("parallel", [False, True])
def test_the_host_waits_for_nothing_and_a_graph_of_it_is_replayed(parallel):
    experts, (x, chosen, weights) = on_card()
    experts._is_expert_parallel = parallel

    def train():
        y = experts_forward(experts, x, chosen, weights)
        return [y.detach(), *torch.autograd.grad(y.sum(), [x, weights, experts.gate_up_proj, experts.down_proj])]

    train()
    torch.cuda.set_sync_debug_mode("error")
    try:
        expected = train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = train()
    for result in captured:
        result.fill_(7)
    graph.replay()
    assert all(torch.equal(one, other) for one, other in zip(captured, expected, strict=True))


def test_compiled_whole_it_is_what_it_is_in_eager_mode():
    experts, given = on_card(has_bias=True)
    expected = experts_forward(experts, *given)
    found = torch.compile(lambda *given: experts_forward(experts, *given), fullgraph=True)(*given)
    assert error(found, expected) < 1e-2


@pytest.mark.parametrize("has_gate", [True, False])
def test_experts_in_fp8_are_what_a_loop_over_them_gives(has_gate):
    experts = Fp8Experts(has_gate=has_gate).cuda()
    x, chosen, weights = (tensor.cuda() for tensor in routed(tokens=500, hidden=Fp8Experts.HIDDEN))

    def results(forward):
        given = x.clone().requires_grad_(), chosen, weights.clone().requires_grad_()
        y = forward(*given)
        loss = (y * torch.linspace(-1, 1, y.numel(), device="cuda").view_as(y)).sum()
        return [y.detach(), *torch.autograd.grad(loss, [given[0], given[2]])]

    found = results(lambda *given: fp8_experts_forward(experts, *given))
    for one, other in zip(found, results(experts.looped), strict=True):
        assert error(one, other) < 1e-2
    experts.is_exact = True
    for one, other in zip(found, results(experts.looped), strict=True):
        assert 1e-2 < error(one, other) < 0.15  # what fp8 costs


def test_the_seam_is_what_torchs_own_grouped_product_is():
    a = torch.randn(700, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(5, 384, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    offs = torch.tensor([100, 100, 350, 351, 700], device="cuda", dtype=torch.int32)

    def run(gemm):
        y = gemm(A=a, B_t=w.transpose(-2, -1), offs=offs)
        return [y.detach(), *torch.autograd.grad(y.float().square().mean(), [a, w])]

    theirs = run(lambda A, B_t, offs: torch._grouped_mm(A, B_t, offs=offs))
    for one, other in zip(run(lambda **given: multiply(None, **given)), theirs, strict=True):
        assert error(one, other) < 1e-2


def test_torchtitans_experts_are_what_torch_makes_them():
    moe = pytest.importorskip("torchtitan.models.common.moe", exc_type=ImportError)
    experts = moe.GroupedExperts.Config(dim=256, hidden_dim=384, num_experts=4).build().cuda()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.06)
    x, sizes = torch.randn(600, 256, device="cuda"), torch.tensor([200, 0, 399, 1], device="cuda")

    def run():
        y = experts(x, sizes)
        return [y.detach(), *torch.autograd.grad(y.square().mean(), list(experts.parameters()))]

    theirs = run()
    with foretune.use("torchtitan"):
        ours = run()
    for one, other in zip(ours, theirs, strict=True):
        assert error(one, other) < 1e-2
