"""Families by name, by entry point, by place and as objects."""

from __future__ import annotations

import re
import sys
import warnings
from importlib.metadata import EntryPoint

import foretune
import pytest
from fakes import FakeFamily
from foretune.datasets import Family, ForetuneError, ForetuneWarning
from foretune.kernels import families, find_family, register, registry
from grouped import FAMILIES

OURS = [
    "fused_moe", "fused_moe_down", "gated_mlp", "grouped_gemm_dw", "grouped_gemm_dx", "grouped_gemm_fwd",
    "inductor_convolution", "inductor_flex_attention", "inductor_flex_backward", "inductor_flex_decoding",
    "inductor_grouped_mm", "inductor_mm", "inductor_persistent_reduction", "inductor_reduction", "matmul",
    "rms_norm_rope_bwd", "rms_norm_rope_fwd", "scaled_gemm",
    "scaled_grouped_gemm_dw", "scaled_grouped_gemm_fwd",
]  # fmt: skip
MODULE = """
from fakes import FakeFamily

class Theirs(FakeFamily):
    name = "theirs"

class Demanding(FakeFamily):
    def __init__(self, size): pass

class Home:
    inner = Theirs

made = Theirs()
"""


@pytest.fixture(autouse=True)
def no_entry_points(monkeypatch):
    """No entry points but the test's own."""
    monkeypatch.setattr(registry, "_entry_points", tuple)


@pytest.fixture
def module(monkeypatch, tmp_path):
    """The name of a module that lies in the working directory and on no path."""
    name = f"theirs_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    return name


@pytest.fixture
def entry_points(monkeypatch):
    def declare(**entries):
        points = tuple(EntryPoint(name, value, registry.GROUP) for name, value in entries.items())
        monkeypatch.setattr(registry, "_entry_points", lambda: points)

    return declare


def test_ours_are_known_by_name_and_are_the_same_objects_each_time():
    assert sorted(families()) == OURS
    assert all(find_family(family.name) is family is families()[family.name] for family in FAMILIES)
    assert find_family(type(FAMILIES[0])) is FAMILIES[0]


def test_an_unknown_name_says_which_there_are_and_how_to_add_one(entry_points):
    entry_points(theirs="nowhere:Theirs")
    with pytest.raises(ForetuneError) as caught:
        find_family("gemm")
    said = str(caught.value)
    assert f"unknown kernel family 'gemm'; known: {', '.join([*OURS, 'theirs'])}." in said
    for way in ("foretune.register(family)", '"foretune.families"', "package.module:attribute"):
        assert way in said


def test_a_registered_family_is_found_by_its_name_and_replaces_another_of_that_name():
    family = FakeFamily()
    assert register(family) is family is find_family("fake") is families()["fake"]
    assert register(FakeFamily) is find_family("fake") is not family


def test_a_family_is_found_as_it_is_and_a_class_is_made_once():
    family = FakeFamily()
    assert find_family(family) is family
    assert find_family(FakeFamily) is find_family(FakeFamily)


@pytest.mark.parametrize("value", [7, None, object, "".join, {"name": "fake"}])
def test_what_is_no_family_is_refused(value):
    for door in (find_family, register):
        with pytest.raises(ForetuneError, match=r"must be a Family, a class of one, or its name, but is "):
            door(value)


def test_a_class_that_cannot_be_made_is_named():
    class Half(Family):
        name = "half"

    with pytest.raises(ForetuneError, match=r"Half cannot be made without arguments: .*abstract"):
        find_family(Half)


@pytest.mark.parametrize("attribute", ["Theirs", "made", "Home.inner"])
def test_a_place_in_the_working_directory(module, attribute):
    family = find_family(f"{module}:{attribute}")
    assert family.name == "theirs"
    assert find_family(f"{module}:{attribute}") is family
    assert find_family("theirs") is family  # and by its name from now on


def test_a_place_does_not_take_a_name_that_has_an_owner(module):
    first = register(FakeFamily)
    first_theirs = find_family(f"{module}:made")
    assert find_family(f"{module}:Theirs") is not first_theirs
    assert find_family("theirs") is first_theirs
    assert find_family("fake") is first


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("nowhere.at_all:Softmax", "ModuleNotFoundError: No module named 'nowhere'"),
        ("{module}:Softmax", "it has no 'Softmax'; its families: Theirs, "),
        ("{module}:", "give the class or object in the file too"),
        (":Softmax", "ValueError"),
        ("{module}:MODULE", "it has no 'MODULE'"),
        ("os:path", "a kernel family must be a Family, a class of one, or its name, but is <module"),
        ("{module}:Demanding", r"Demanding cannot be made without arguments: .*size"),
    ],
)
def test_a_place_without_a_family_is_told_so(module, place, why):
    place = place.format(module=module)
    with pytest.raises(ForetuneError, match=f"no kernel family at '{place}': {why}"):
        find_family(place)


def test_a_module_that_fails_says_how(module, tmp_path):
    (tmp_path / "broken_one.py").write_text("1 / 0")
    with pytest.raises(ForetuneError, match="no kernel family at 'broken_one:X': ZeroDivisionError: division by zero"):
        find_family("broken_one:X")


def test_a_file_with_relative_imports_is_to_be_named_by_its_package(tmp_path, monkeypatch):
    inner = tmp_path / "home" / "inner_one"
    inner.mkdir(parents=True)
    for folder in (inner.parent, inner):
        (folder / "__init__.py").touch()
    (inner / "relative_one.py").write_text("from ..sizes import SIZES")
    monkeypatch.setattr(sys, "path", list(sys.path))
    why = f"name it as home.inner_one.relative_one:Softmax and run in {tmp_path}, or install the package"
    with pytest.raises(ForetuneError, match=f"relative_one.py has relative imports, .*: {re.escape(why)}"):
        find_family(f"{inner}/relative_one.py:Softmax")
    (inner / "failing_one.py").write_text("from nowhere_at_all import SIZES")
    with pytest.raises(ForetuneError, match="ModuleNotFoundError: No module named 'nowhere_at_all'"):
        find_family(f"{inner}/failing_one.py:Softmax")


def test_an_entry_point_is_loaded_when_it_is_asked_for(module, entry_points, tmp_path):
    entry_points(theirs=f"{module}:Theirs")
    sys.path.append(str(tmp_path))
    assert module not in sys.modules
    assert find_family("grouped_gemm_dw").name == "grouped_gemm_dw"
    assert module not in sys.modules
    family = find_family("theirs")
    assert family is find_family("theirs") is families()["theirs"] is find_family(f"{module}:Theirs")


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ("nowhere.at_all:Softmax", "cannot be loaded: ModuleNotFoundError: No module named 'nowhere'"),
        ("os:nothing", "cannot be loaded: AttributeError"),
        ("os:path", "cannot be loaded: a kernel family must be a Family"),
        ("fakes:FakeFamily", "leads to the family fake: the entry point must have its name"),
    ],
)
def test_a_broken_entry_point_stops_nobody_else(entry_points, entry, why):
    entry_points(broken=entry)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_family("grouped_gemm_dx").name == "grouped_gemm_dx"
    with pytest.raises(ForetuneError, match=f"the entry point broken = {entry} {why}"):
        find_family("broken")
    with pytest.warns(ForetuneWarning, match=f"broken is left out: the entry point .* {why}"):
        assert sorted(families()) == OURS


def test_the_face_takes_every_way_to_say_a_family(module):
    family = FakeFamily()
    for way in (family, FakeFamily, f"{module}:Theirs"):
        assert len(foretune.configs(way)) == len(family.space())
    with pytest.raises(ForetuneError, match="unknown kernel family 'gemm'"):
        foretune.configs("gemm")


@pytest.fixture
def exiting(monkeypatch, tmp_path):
    """The name of a module that ends the program when it is imported."""
    name = f"exiting_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text("raise SystemExit('not today')")
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_a_module_that_exits_is_left_out_and_ends_nothing(exiting, entry_points):
    entry_points(theirs=f"{exiting}:Theirs")
    with pytest.warns(ForetuneWarning, match=r"theirs is left out: .* cannot be loaded: SystemExit: not today"):
        assert sorted(families()) == OURS
    with pytest.raises(ForetuneError, match=r"no kernel family at '.*:Theirs': SystemExit: not today"):
        find_family(f"{exiting}:Theirs")


@pytest.mark.parametrize("error", [RuntimeError("no GPU"), SystemExit(3)])
def test_a_class_that_cannot_be_made_says_why(error):
    class Failing(FakeFamily):
        def __init__(self):
            raise error

    with pytest.raises(ForetuneError, match=f"Failing cannot be made without arguments: {type(error).__name__}"):
        register(Failing)


def test_an_entry_point_with_escape_codes_in_its_name_is_told_without_them(entry_points):
    entry_points(**{"\x1b[31mred\n": "nowhere:Theirs"})
    with pytest.warns(ForetuneWarning) as caught:
        assert sorted(families()) == OURS
    assert all(str(one.message).isprintable() for one in caught)
    with pytest.raises(ForetuneError) as refused:
        find_family("gemm")
    assert str(refused.value).isprintable()


def test_shipped_families_declare_what_is_asked_for():
    for family in families().values():
        registry.check_attributes(family)
