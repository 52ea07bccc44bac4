"""Every function of the face takes a family as an object, a class, a name or a place; and names what it cannot take."""

from __future__ import annotations

import foretune
import pytest
from fakes import FakeFamily, fake_cases, fake_dataset
from foretune.collect import campaign
from foretune.kernels import find_family
from foretune.kernels.grouped_gemm import GroupedGemmForward

NAME = "grouped_gemm_fwd"
PLACE = "foretune.kernels.grouped_gemm:GroupedGemmForward"
PROBLEM = foretune.Problem.of(NAME, groups=8, rows=256, n=512, k=512)


@pytest.mark.parametrize("family", [NAME, PLACE, GroupedGemmForward, find_family(NAME)])
def test_a_family_may_be_an_object_a_class_a_name_or_a_place(family):
    assert len(foretune.configs(family)) == len(foretune.configs(NAME))
    assert repr(foretune.prune(family, k=2)) == f"<Pruner of {NAME}, k=2>"
    chosen = foretune.shortlist(family, PROBLEM, "h200", k=2)
    assert chosen.configs == foretune.shortlist(NAME, PROBLEM, "h200", k=2).configs


@pytest.mark.parametrize("call", [foretune.configs, foretune.prune, lambda f: foretune.shortlist(f, PROBLEM, "h200")])
@pytest.mark.parametrize(
    ("family", "named"),
    [
        ("gemm", r"'gemm'; known: .*grouped_gemm_fwd.*To add one: foretune\.register"),
        ("no_such_package.softmax:Softmax", "no kernel family at 'no_such_package.softmax:Softmax'"),
        ("foretune.kernels:nothing", "no kernel family at 'foretune.kernels:nothing'"),
        ("json:dumps", "must be a Family"),
        (3, "must be a Family, a class of one, or its name, but is 3"),
    ],
)
def test_what_is_no_family_is_named(call, family, named):
    with pytest.raises(foretune.ForetuneError, match=named):
        call(family)


def test_collecting_takes_families_of_any_kind_and_their_own_cases(monkeypatch, tmp_path):
    asked = []

    def collect(families, cases, out, **options):
        asked.append((families, cases, out, options))

    monkeypatch.setattr(campaign, "collect_on_gpus", collect)
    cases = fake_cases()[:2]
    foretune.collect_dataset(FakeFamily(), out=tmp_path, cases=cases, budget_s=5.0)
    foretune.collect_dataset([FakeFamily, NAME], out=tmp_path, progress=False)
    (first, given, where, options), (second, drawn, _, _) = asked
    assert ([family.name for family in first], given, where) == (["fake"], cases, tmp_path)
    assert (options["budget_s"], options["plan"], options["resume"]) == (5.0, "exhaustive", True)
    assert [family.name for family in second] == ["fake", NAME]
    assert {case.problem.family for case in drawn} == {"fake", NAME}


def test_what_a_dataset_lacks_is_collected_on_its_own_problems(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(
        campaign, "collect_on_gpus", lambda families, cases, out, **options: asked.append((cases, options))
    )
    known = fake_dataset(fake_cases()[:5])
    foretune.collect_dataset(FakeFamily(), out=tmp_path, plan="missing", known=known)
    (cases, options) = asked[0]
    assert set(cases) == set(known.cases)
    assert (options["plan"], options["known"]) == ("missing", known)
    with pytest.raises(
        foretune.ForetuneError, match=r"known must be a Dataset, as foretune\.datasets\.load returns, but is"
    ):
        foretune.collect_dataset(FakeFamily(), out=tmp_path, plan="missing", known="h200")


def test_a_family_that_only_predicts_is_not_collected(tmp_path):
    class Predicted(foretune.Family):
        name, dims, dtypes, knobs = "predicted", ("rows",), ("bf16",), ("BLOCK",)
        space = supports = features = problem_from_call = None

    with pytest.raises(foretune.ForetuneError, match="predicted can be predicted but not collected"):
        foretune.collect_dataset(Predicted(), out=tmp_path, cases=[])


def test_a_registered_family_is_found_by_its_name():
    family = FakeFamily()
    assert foretune.register(family) is family
    assert foretune.families()["fake"] is family
    assert len(foretune.configs("fake")) == len(family.space())


def test_the_names_that_programs_catch_and_call_are_on_the_face():
    assert issubclass(foretune.ForetuneError, ValueError)
    assert issubclass(foretune.ForetuneWarning, UserWarning)
    assert foretune.runtime.Pruner
