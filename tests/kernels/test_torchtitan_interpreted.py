"""The real torchtitan's experts on Foretune: the seam is where it is looked for, and all experts go through it.

Their forward multiplies in bfloat16, which the interpreter cannot: here through the seam alone, in float16.
Skipped where torchtitan (0.3 or later) is not installed.
"""

from __future__ import annotations

import pytest
import torch
from loops import error

moe = pytest.importorskip("torchtitan.models.common.moe", exc_type=ImportError)
import foretune  # noqa: E402

pytestmark = pytest.mark.interpret


def test_experts_multiply_through_foretune_also_those_that_were_built_before(monkeypatch):
    from foretune.kernels.integrations.experts import multiply

    experts = moe.GroupedExperts.Config(dim=16, hidden_dim=24, num_experts=3).build()
    sizes, generator = torch.tensor([5, 0, 3]), torch.Generator().manual_seed(0)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    x = torch.randn(8, 16, generator=generator)
    asked = []

    def recorded(self, *, A, B_t, offs):
        asked.append(A.dtype)
        return multiply(self, A=A.half(), B_t=B_t.half(), offs=offs).to(A.dtype)

    with foretune.use("torchtitan"):
        assert moe.GroupedExperts._grouped_mm is multiply
        monkeypatch.setenv(
            "FORETUNE_MODE", "off"
        )  # the default config; a use that begins in this mode replaces nothing
        monkeypatch.setattr(moe.GroupedExperts, "_grouped_mm", recorded)
        y = experts(x, sizes)
    assert asked == [torch.bfloat16] * 3
    expected = torch.cat([_swiglu(experts, rows, e) for e, rows in enumerate(x.split(sizes.tolist()))])
    assert error(y.detach(), expected.detach()) < 2e-2  # of bfloat16


def test_in_mode_off_nothing_is_replaced(monkeypatch):
    monkeypatch.setenv("FORETUNE_MODE", "off")
    before = moe.GroupedExperts._grouped_mm
    with foretune.use("torchtitan"):
        assert moe.GroupedExperts._grouped_mm is before
    assert moe.GroupedExperts._grouped_mm is before


def _swiglu(experts, x, expert):
    h = torch.nn.functional.silu(x @ experts.w1_EFD[expert].T) * (x @ experts.w3_EFD[expert].T)
    return h @ experts.w2_EDF[expert].T
