"""`foretune.use`: what it refuses, and how uses end. The projects are stand-ins, with the seams of the real ones."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import foretune
import pytest
from foretune import ForetuneError, kernels


@pytest.fixture
def registry(monkeypatch):
    """That of a stand-in for transformers."""
    for name in ("transformers", "transformers.modeling_utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    registry = sys.modules["transformers.modeling_utils"].ALL_EXPERTS_FUNCTIONS = {"grouped_mm": len}
    return registry


@pytest.fixture
def seam(monkeypatch):
    """The class that a stand-in for torchtitan multiplies in."""
    experts = type("GroupedExperts", (), {"_grouped_mm": lambda self, *, A, B_t, offs: "torch's"})
    for name in ("torchtitan", "torchtitan.models", "torchtitan.models.common", "torchtitan.models.common.moe"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["torchtitan.models.common.moe"].GroupedExperts = experts
    return experts


@pytest.mark.parametrize("project", ["keras", "", None, ["transformers"], 3])
def test_what_foretune_cannot_be_used_in_is_named_beside_what_it_can(project):
    with pytest.raises(ForetuneError, match="torchtitan or transformers but not in"):
        foretune.use(project)


@pytest.mark.parametrize(
    ("project", "needs"), [("transformers", "transformers >= 5.7"), ("torchtitan", "torchtitan >= 0.3")]
)
def test_a_project_that_is_absent_or_too_old_is_told_the_version(project, needs, monkeypatch):
    monkeypatch.setitem(sys.modules, project, None)  # importing it fails
    with pytest.raises(ForetuneError, match=needs):
        foretune.use(project)
    monkeypatch.setitem(sys.modules, project, ModuleType(project))  # an old one
    with pytest.raises(ForetuneError, match=needs):
        foretune.use(project)
    assert kernels.integrations._users.get(project, 0) == 0


def test_a_torchtitan_without_the_seam_is_told_the_version(seam):
    del seam._grouped_mm
    with pytest.raises(ForetuneError, match=r"torchtitan >= 0\.3"):
        foretune.use("torchtitan")


def test_a_use_ends_with_its_block_and_undone_twice_is_undone_once(registry):
    with foretune.use("transformers") as use:
        assert set(registry) == {"grouped_mm", "foretune"}
        assert repr(use) == "<Use of Foretune in transformers>"
    assert set(registry) == {"grouped_mm"}
    use.undo()
    assert repr(use) == "<Use of Foretune in transformers, undone>"
    with foretune.use("transformers"):
        use.undo()
        assert "foretune" in registry


@pytest.mark.parametrize("first", [0, 1])
def test_used_twice_it_stays_until_both_uses_end_in_either_order(registry, first):
    uses = [foretune.use("transformers"), foretune.use("transformers")]
    uses.pop(first).undo()
    assert "foretune" in registry
    uses.pop().undo()
    assert "foretune" not in registry


def test_the_experts_of_a_block_multiply_through_foretune(seam, monkeypatch):
    from foretune.kernels.integrations import experts

    before = seam._grouped_mm
    monkeypatch.setattr(experts, "grouped_gemm", lambda x, w, sizes: (tuple(w.shape), sizes.tolist()))
    import torch

    a, b_t, offs = torch.ones(6, 8), torch.ones(3, 16, 8).transpose(-2, -1), torch.tensor([4, 4, 6])
    with foretune.use("torchtitan"):
        assert seam()._grouped_mm(A=a, B_t=b_t, offs=offs) == ((3, 16, 8), [4, 0, 2])
    assert seam._grouped_mm is before


def test_what_somebody_put_into_the_seam_since_is_left_there(seam):
    use, theirs = foretune.use("torchtitan"), SimpleNamespace()
    seam._grouped_mm = theirs
    use.undo()
    assert seam._grouped_mm is theirs
