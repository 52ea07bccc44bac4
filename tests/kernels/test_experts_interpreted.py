"""The experts implementation for transformers, in Triton's interpreter and without transformers: every layout of its
registry against a loop over experts; and torchtitan's seam against one matrix product an expert."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from experts import EXPERTS, HIDDEN, INNER, Experts, Fp8Experts, routed
from foretune import ForetuneError, ForetuneWarning
from foretune.kernels.integrations.experts import experts_forward, fp8_experts_forward, multiply
from foretune.runtime import arguments
from loops import error

pytestmark = pytest.mark.interpret

HERE, ELSEWHERE, UNSAID = "all here", "some elsewhere", "does not say"
LAYOUTS = {
    "gated": {},
    "without a gate": {"has_gate": False},
    "interleaved, transposed, bias": {"is_concatenated": False, "is_transposed": True, "has_bias": True},
    "bias": {"has_bias": True},
    "normed": {"has_norm": True},
}


@pytest.fixture(autouse=True)
def nothing_said_and_nothing_predicted(monkeypatch):
    monkeypatch.setattr(arguments, "_warned", set())
    monkeypatch.setenv("FORETUNE_MODE", "off")


@pytest.fixture
def poisoned():
    """All memory that is not written is NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def results(forward, experts, x, chosen, weights):
    """The output, and the gradient of everything that has one, by name."""
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    experts.zero_grad()
    y = forward(x, chosen, weights)
    (y.float() * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    grads = {name: parameter.grad for name, parameter in experts.named_parameters()}
    return {"y": y.detach(), "x": x.grad, "weights": weights.grad, **grads}


def assert_alike(found, expected, limit):
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert error(found[name], value) < limit, name


@pytest.mark.filterwarnings("ignore::foretune.runtime.ForetuneWarning")
@pytest.mark.parametrize(
    ("layout", "where"),
    [
        *((layout, HERE) for layout in LAYOUTS),
        ("interleaved, transposed, bias", ELSEWHERE),
        ("normed", ELSEWHERE),
        ("gated", UNSAID),
    ],
)
def test_every_layout_is_what_a_loop_over_experts_gives(layout, where, poisoned):
    experts = Experts(**LAYOUTS[layout])
    x, chosen, weights = routed()
    if where == ELSEWHERE:
        experts._is_expert_parallel = True
    if where == UNSAID:  # as in older versions, which may have either
        del experts._is_expert_parallel
    if where != HERE:
        chosen = chosen.masked_fill(chosen == 1, EXPERTS)  # as transformers marks what another rank has
        chosen[3] = EXPERTS
        weights = weights.masked_fill(chosen == EXPERTS, 0)
    assert not (chosen == 2).any()  # an expert without tokens
    found = results(lambda *given: experts_forward(experts, *given), experts, x, chosen, weights)
    assert_alike(found, results(experts.looped, experts, x, chosen, weights), 1e-5)


def test_weights_of_half_the_bits_take_activations_of_any(poisoned):
    experts, (x, chosen, weights) = Experts().half(), routed()
    found = results(lambda *given: experts_forward(experts, *given), experts, x, chosen, weights)
    assert (found["y"].dtype, found["gate_up_proj"].dtype) == (torch.float32, torch.float16)
    exact = Experts()
    exact.load_state_dict({name: value.float() for name, value in experts.state_dict().items()})
    expected = results(exact.looped, exact, x, chosen, weights)
    for name, value in expected.items():
        assert error(found[name], value) < 2e-3, name


def test_under_autocast_the_products_are_of_its_dtype():
    experts, (x, chosen, weights) = Experts(), routed()

    def autocast(*given):
        with torch.autocast("cpu", torch.float16):
            return experts_forward(experts, *given)

    found = results(autocast, experts, x, chosen, weights)
    expected = results(experts.looped, experts, x, chosen, weights)
    assert 1e-5 < error(found["y"], expected["y"]) < 2e-3
    assert_alike(found, expected, 2e-3)


@pytest.mark.parametrize(("has_gate", "where"), [(True, HERE), (True, ELSEWHERE), (True, UNSAID), (False, HERE)])
def test_experts_in_fp8_are_what_a_loop_over_them_gives(has_gate, where, poisoned, right_fp8):
    experts = Fp8Experts(has_gate=has_gate)
    x, chosen, weights = routed(hidden=Fp8Experts.HIDDEN)
    if where == ELSEWHERE:
        experts._is_expert_parallel = True
    if where == UNSAID:
        del experts._is_expert_parallel
    if where != HERE:
        chosen = chosen.masked_fill(chosen == 1, EXPERTS)
        chosen[3] = EXPERTS
        weights = weights.masked_fill(chosen == EXPERTS, 0)
    found = results(lambda *given: fp8_experts_forward(experts, *given), experts, x, chosen, weights)
    expected = results(experts.looped, experts, x, chosen, weights)
    assert found["y"].dtype == torch.float32
    for name, limit in (("y", 1e-5), ("weights", 1e-5), ("x", 3e-3)):  # the gradient of x is summed in bf16
        assert error(found[name], expected[name]) < limit, name
    experts.is_exact = True
    exact = results(experts.looped, experts, x, chosen, weights)
    for name in ("y", "x", "weights"):  # what fp8 costs: each value has 3 bits after the first
        assert 1e-2 < error(found[name], exact[name]) < 0.08, name
    assert found["gate_up_proj" if has_gate else "up_proj"] is None
    assert found["down_proj"] is None


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("activation_scheme", "static", "has activation_scheme static, but Foretune's fp8 experts need dynamic"),
        ("block_size", None, r"has block_size \(\), but Foretune's fp8 experts need \(128, 128\)"),
        ("has_bias", True, "has has_bias True"),
    ],
)
def test_experts_in_other_kinds_of_fp8_are_refused(attribute, value, message):
    experts = Fp8Experts()
    setattr(experts, attribute, value)
    with pytest.raises(ForetuneError, match=f"^Fp8Experts: .*{message}"):
        fp8_experts_forward(experts, *routed(hidden=Fp8Experts.HIDDEN))


def test_scales_of_powers_of_two_are_refused():
    experts = Fp8Experts()
    experts.down_proj_scale_inv = torch.nn.Parameter(experts.down_proj_scale_inv.to(torch.float8_e8m0fnu))
    with pytest.raises(ForetuneError, match=r"down_proj has scales torch\.float8_e8m0fnu, but .* need torch\.float32"):
        fp8_experts_forward(experts, *routed(hidden=Fp8Experts.HIDDEN))


def test_indices_may_be_of_32_bits():
    experts, (x, chosen, weights) = Experts(), routed()
    expected = experts_forward(experts, x, chosen, weights)
    assert torch.equal(experts_forward(experts, x, chosen.int(), weights), expected)


def test_no_tokens_give_no_rows():
    experts, (x, chosen, weights) = Experts(), routed()
    assert experts_forward(experts, x[:0], chosen[:0], weights[:0]).shape == (0, HIDDEN)


def test_odd_strides_are_taken():
    experts, (x, chosen, weights) = Experts(), routed()
    expected = experts_forward(experts, x, chosen, weights)
    strided = [torch.stack([tensor, tensor], -1)[..., 0] for tensor in (x, chosen, weights)]
    assert not any(tensor.is_contiguous() for tensor in strided)
    assert torch.equal(experts_forward(experts, *strided), expected)


def test_transposed_weights_are_copied_and_that_is_said_once():
    experts, given = Experts(is_transposed=True), routed()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        experts_forward(experts, *given)
        experts_forward(experts, *given)
    (one,) = [warning for warning in said if issubclass(warning.category, ForetuneWarning)]
    assert re.match(r"Experts: .*\(experts, K, N\) but .*each call copies them", str(one.message))


def test_a_width_that_cannot_be_multiplied_is_named():
    experts, (x, chosen, weights) = Experts(), routed()
    experts.gate_up_proj = torch.nn.Parameter(torch.zeros(EXPERTS, 2 * INNER, 12))
    with pytest.raises(ForetuneError, match="multiples of 8 but are 48 and 12"):
        experts_forward(experts, x[:, :12], chosen, weights)


@pytest.mark.filterwarnings("ignore::foretune.runtime.ForetuneWarning")
@pytest.mark.parametrize(("layout", "parallel"), [("gated", False), ("interleaved, transposed, bias", True)])
def test_it_is_traced_without_a_break_and_stays_right(layout, parallel):
    experts, given = Experts(**LAYOUTS[layout]), routed()
    experts._is_expert_parallel = parallel
    expected = results(lambda *given: experts_forward(experts, *given), experts, *given)
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    compiled = torch.compile(lambda *given: experts_forward(experts, *given), backend=counter, fullgraph=True)
    found = results(compiled, experts, *given)
    assert counter.frame_count == 1
    assert_alike(found, expected, 1e-6)


def multiplied(gemm, a, b_t, offs):
    a, b_t = a.clone().requires_grad_(), b_t.detach().requires_grad_()
    y = gemm(a, b_t, offs)
    (y.float() * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    return {"y": y.detach(), "a": a.grad, "b_t": b_t.grad}


def one_after_another(a, b_t, offs):
    starts = [0, *offs.tolist()]
    return torch.cat([a[s:e] @ b_t[i] for i, (s, e) in enumerate(zip(starts, offs.tolist(), strict=False))])


@pytest.mark.parametrize(("stored", "offs_dtype"), [("n_k", torch.int32), ("k_n", torch.int64)])
@pytest.mark.filterwarnings("ignore::foretune.runtime.ForetuneWarning")
def test_torchtitans_seam_multiplies_each_experts_rows(stored, offs_dtype):
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(11, 16, generator=generator).half()
    b_t = torch.randn(3, 24, 16, generator=generator).half().transpose(-2, -1)
    b_t = b_t if stored == "n_k" else b_t.contiguous()
    offs = torch.tensor([4, 4, 11], dtype=offs_dtype)
    found = multiplied(lambda a, b_t, offs: multiply(None, A=a, B_t=b_t, offs=offs), a, b_t, offs)
    expected = multiplied(one_after_another, a.float(), b_t.float(), offs)
    for name, value in expected.items():
        assert error(found[name], value) < 1e-3, name
