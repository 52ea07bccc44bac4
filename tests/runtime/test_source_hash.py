"""The hash of a kernel changes with all that its binary depends on, however the kernel names it, and with nothing else.

A hash of 16 digits is one that Foretune always recorded: data and caches that have it stay valid.
"""

from __future__ import annotations

import importlib.util
import sys
from itertools import count

import pytest
from foretune.datasets.contents import other_sources, same_source
from foretune.runtime.launching.source_hash import combined_hash, hash_of_kernel, hash_of_modules

HEAD = "import triton\nimport triton.language as tl\n"
BODY = """
@triton.jit
def kernel(x_ptr, BLOCK: tl.constexpr = 64):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, {expression})
"""
HELPER = "@triton.jit\ndef act(v):\n    return v * 2\n"
#: What Foretune recorded for `BODY` with `act(tl.load(x_ptr + at))` before it followed more than bare names.
RECORDED = "bb6f1a3d8553bc70"

_numbers = count()


@pytest.fixture
def module_of(tmp_path, monkeypatch):
    """Makes a module from its text; the same name for each, as after an edit."""

    def make(text, name="edited"):
        path = tmp_path / str(next(_numbers)) / f"{name}.py"
        path.parent.mkdir()
        path.write_text(HEAD + text)
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return make


@pytest.fixture
def hash_with(module_of):
    """The hash of a kernel whose body has this expression, in a module with this text, which may import `helpers`."""

    def make(expression, text="", helpers="", body=BODY):
        module_of(helpers, "helpers")
        return hash_of_kernel(module_of(text + body.format(expression=expression)).kernel)

    return make


FACTORY = """
{text}
def make({names}):
    @triton.jit
    def kernel(x_ptr):
        tl.store(x_ptr, {expression})
    return kernel
kernel = make({values})
"""


def factory(values, names="C", expression="C", text=""):
    return {"body": FACTORY.format(names=names, values=values, expression=expression, text=text)}


#: Two versions of a module, or of what it imports: they are compiled to different binaries.
EDITS = {
    "a function of a module": (
        {"text": "import helpers as U", "helpers": HELPER, "expression": "U.act(at)"},
        {"helpers": HELPER.replace("2", "3")},
    ),
    "a function of a module of a module": (
        {
            "text": "import helpers\nU = helpers",
            "helpers": "import helpers as inner\n" + HELPER,
            "expression": "U.inner.act(at)",
        },
        {"helpers": "import helpers as inner\n" + HELPER.replace("2", "3")},
    ),
    "a function of a class": (
        {
            "text": "import helpers as U",
            "helpers": f"{HELPER}class Acts:\n    relu = act\n",
            "expression": "U.Acts.relu(at)",
        },
        {"helpers": f"{HELPER.replace('2', '3')}class Acts:\n    relu = act\n"},
    ),
    "what a called function calls": (
        {
            "text": "import helpers as U",
            "helpers": f"{HELPER}@triton.jit\ndef outer(v):\n    return act(v)\n",
            "expression": "U.outer(at)",
        },
        {"helpers": f"{HELPER.replace('2', '3')}@triton.jit\ndef outer(v):\n    return act(v)\n"},
    ),
    "a constexpr": (
        {"text": "C = tl.constexpr(1)", "expression": "at + C"},
        {"text": "C = tl.constexpr(2)"},
    ),
    "an annotated constexpr": (
        {"text": "C: tl.constexpr = tl.constexpr(1)", "expression": "at + C"},
        {"text": "C: tl.constexpr = tl.constexpr(2)"},
    ),
    "an annotated number": (
        {"text": "C: tl.constexpr = 1", "expression": "at + C"},
        {"text": "C: tl.constexpr = 2"},
    ),
    "a constexpr of a called function": (
        {
            "text": "from helpers import act",
            "helpers": f"{HELPER.replace('2', 'C')}C = tl.constexpr(1)",
            "expression": "act(at)",
        },
        {"helpers": f"{HELPER.replace('2', 'C')}C = tl.constexpr(2)"},
    ),
    "a constexpr of a module": (
        {"text": "import helpers", "helpers": "C = tl.constexpr(1)", "expression": "at + helpers.C"},
        {"helpers": "C = tl.constexpr(2)"},
    ),
    "a global that is read before a local variable gets its name": (
        {"text": "C = tl.constexpr(1)", "expression": "at + C)\n    C = (at"},
        {"text": "C = tl.constexpr(2)"},
    ),
    "a tuple": (
        {"text": "C = (tl.constexpr(1), tl.constexpr(2))", "expression": "at + C[0]"},
        {"text": "C = (tl.constexpr(1), tl.constexpr(3))"},
    ),
    "a dtype": (
        {"text": "T = tl.float16", "expression": "at.to(T)"},
        {"text": "T = tl.float32"},
    ),
    "a captured number": (
        {"expression": "", **factory("tl.constexpr(1)")},
        factory("tl.constexpr(2)"),
    ),
    "a captured function": (
        {"expression": "", "text": HELPER, **factory("act", expression="C(1)")},
        {"text": HELPER.replace("2", "3")},
    ),
    "which function is captured": (
        {"expression": "", "text": HELPER + HELPER.replace("act", "other"), **factory("act", expression="C(1)")},
        factory("other", expression="C(1)"),
    ),
    "functions that change places": (
        {
            "text": "from helpers import act as f, other as g",
            "helpers": HELPER + HELPER.replace("act", "other").replace("2", "3"),
            "expression": "f(at) - g(at)",
        },
        {"text": "from helpers import act as g, other as f"},
    ),
    "two functions of one factory": (
        {
            "text": "from helpers import make\nf, g = make(tl.constexpr(1)), make(tl.constexpr(2))",
            "helpers": "def make(C):\n    @triton.jit\n    def inner(v):\n        return v + C\n    return inner\n",
            "expression": "f(at) - g(at)",
        },
        {"text": "from helpers import make\nf, g = make(tl.constexpr(1)), make(tl.constexpr(3))"},
    ),
    "a default": (
        {"text": "D = 64", "body": BODY.replace("= 64", "= D"), "expression": "at"},
        {"text": "D = 128"},
    ),
    "a default that is a function": (
        {"text": HELPER, "body": BODY.replace("= 64", "= 64, f: tl.constexpr = act"), "expression": "f(at)"},
        {"text": HELPER.replace("2", "3")},
    ),
    "whether a function is inlined": (
        {"text": "from helpers import act", "helpers": HELPER, "expression": "act(at)"},
        {"helpers": HELPER.replace("triton.jit", "triton.jit(noinline=True)")},
    ),
    "a function of constants": (
        {
            "text": "import helpers as U",
            "helpers": HELPER.replace("jit", "constexpr_function"),
            "expression": "at + U.act(4)",
        },
        {"helpers": HELPER.replace("jit", "constexpr_function").replace("2", "3")},
    ),
}


@pytest.mark.parametrize("edit", EDITS, ids=EDITS)
def test_every_edit_that_changes_the_binary_changes_the_hash(hash_with, edit):
    before, change = EDITS[edit]
    hashes = [hash_with(**before), hash_with(**before), hash_with(**{**before, **change})]
    assert hashes[0] == hashes[1] != hashes[2]


def test_what_changes_no_binary_changes_no_hash(hash_with):
    given = {"text": "import helpers as U\nC = tl.constexpr(1)", "helpers": HELPER, "expression": "U.act(at + C)"}
    before = hash_with(**given)
    assert hash_with(**{**given, "helpers": f"# {'moved' * 9}\n\nUNUSED = tl.constexpr(7)\n{HELPER}"}) == before
    assert hash_with(**{**given, "text": "at = 5\n" + given["text"]}) == before  # a local variable hides it
    assert hash_with(**{**given, "text": given["text"] + "\nx_ptr = tl.constexpr(3)"}) == before  # as a parameter does


def recorded(hash_with):
    return hash_with(text="from helpers import act", helpers=HELPER, expression="act(tl.load(x_ptr + at))")


def test_a_kernel_with_nothing_else_keeps_the_hash_that_was_recorded(hash_with):
    assert recorded(hash_with) == RECORDED


@pytest.mark.interpret
def test_an_interpreted_kernel_has_the_hash_of_the_compiled_one(hash_with, module_of):
    assert recorded(hash_with) == RECORDED
    module = module_of(HELPER)
    assert hash_of_modules(module) == hash_of_kernel(module.act) != hash_of_modules()


@pytest.mark.interpret
@pytest.mark.parametrize("edit", EDITS, ids=EDITS)
def test_every_edit_changes_the_hash_of_an_interpreted_kernel(hash_with, edit):
    test_every_edit_that_changes_the_binary_changes_the_hash(hash_with, edit)


def test_the_hash_of_modules_covers_what_their_kernels_use(module_of):
    def hash_now(text, helpers):
        module_of(helpers, "helpers")
        return hash_of_modules(module_of(text + BODY.format(expression="at + act(C)")))

    text, helpers = "from helpers import act\nC = tl.constexpr(1)", HELPER.replace("2", "C") + "C = tl.constexpr(2)"
    before = hash_now(text, helpers)
    assert before == hash_now(text, helpers)
    assert len({before, hash_now(text.replace("1", "2"), helpers), hash_now(text, helpers.replace("2", "3"))}) == 3


def test_a_hash_is_compared_with_one_of_the_same_parts():
    old, other = "037307fb8c7f56d3", "bf04212bb431c18c"
    assert same_source(old, f"{old}+{other}")
    assert same_source(f"{old}+{other}", old)
    assert not same_source(old, f"{other}+{old}")
    assert not same_source(f"{old}+{other}", f"{old}+{old}")
    assert not same_source("1.0", "1.0+more")  # a family's own version, not one of ours
    assert other_sources({old, other, f"{old}+{old}", "1"}, f"{old}+{other}") == {other, f"{old}+{old}", "1"}


def test_hashes_of_several_kernels_combine_in_parts():
    old, other = "037307fb8c7f56d3", "bf04212bb431c18c"
    both = combined_hash([old, f"{other}+{old}"])
    assert same_source(both, combined_hash([old, other]))
    assert both != combined_hash([old, f"{other}+{other}"])
    assert len(combined_hash([old, other])) == 16
