"""The house: imports point only down, and nothing lies at top level that is not part of it."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = ("datasets", "model", "runtime", "kernels", "collect")
#: Each may import itself and these.
BELOW = {
    "datasets": (),
    "model": ("datasets",),
    "runtime": ("datasets", "model"),
    "kernels": ("datasets", "model", "runtime"),
    "collect": ("datasets", "model", "runtime"),
}
#: In kernels/, these stand above every floor: the public functions that take a family by name, and the commands.
ABOVE = ("kernels/api.py", "kernels/learning.py", "kernels/commands/")
#: Which kernel they serve, these may not know.
GENERIC = ("datasets", "model", "runtime", "collect")
#: What only a grouped GEMM has: words anywhere in a file, and the names of its dimensions as text in code.
ITS_WORDS = re.compile(r"\b(grouped\w*|group_sizes|rout(ing|ed)|permute\w*|d[XW]|experts?|MoE)\b", re.IGNORECASE)
ITS_DIMENSIONS = {"groups", "n", "k"}
#: The parts of runtime/, lowest first: each may import itself and those before it. A module belongs to the part with
#: the longest name that its own begins with. (What lists and exports the cache folder is above what keeps in it.)
PARTS = (
    ("arguments", "node_copies"),
    ("launching",),
    ("facts",),
    ("timing",),
    ("pin_file", "pins"),
    ("how_many", "shortlist", "explanation", "prune", "triton_declaration", "triton_family", "by_source"),
    (
        *("how_many", "same_bits", "shortlist", "explanation", "prune"),
        *("triton_declaration", "triton_family", "by_source"),
    ),
    ("covering", "timing/compare"),
    ("tuning/ranks",),
    ("tuning/cache",),
    (
        "tuning",
        *(f"tuning/cache/{name}" for name in ("cache_folder", "known", "pinning", "exports")),
    ),
    ("choice", "bench", "quickstart", "testing", "__init__"),
)
#: About fifteen files in a folder and 400 lines in a file.
MOST_FILES, MOST_LINES = 22, 450
TOP_LEVEL = {*FLOORS, "__init__.py", "__init__.pyi", "__main__.py", "pyproject.toml", "README.md", "LICENSE", "tests"}
TOP_LEVEL |= {"py.typed"}  # says that the package has types, and is looked for beside its __init__.py alone (PEP 561)
SOURCES = [
    ROOT / "__init__.py",
    ROOT / "__main__.py",
    *(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py")),
]


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of each import anywhere in a file; modules of ours as paths below the root, with a dot."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            start = "." if node.level else ""
            if node.module:
                yield node.lineno, start + ".".join((*above, node.module))
            else:  # from .. import model
                yield from ((node.lineno, start + ".".join((*above, alias.name))) for alias in node.names)


def test_the_reader_of_imports_sees_what_it_must(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / "runtime" / "deep" / "file.py"
    path.parent.mkdir(parents=True)
    path.write_text("def f():\n from ...kernels import x\n from ... import collect\n from .y import z\nimport os.path")
    assert sorted(module for _, module in imports(path)) == [".collect", ".kernels", ".runtime.deep.y", "os.path"]


def test_imports_point_only_down() -> None:
    wrong = []
    for path in SOURCES:
        floor = path.relative_to(ROOT).parts[0]
        is_above = floor not in FLOORS or str(path.relative_to(ROOT)).startswith(ABOVE)
        allowed = (*FLOORS, "__version__") if is_above else (floor, *BELOW[floor])
        for line, module in imports(path):
            where = f"{path.relative_to(ROOT)}:{line}"
            if module.split(".")[0] == "foretune" and path.parent.name != "examples":  # written as users write
                wrong.append(f"{where}: import what is ours relatively")
            if module.startswith(".") and module.split(".")[1] not in allowed:
                wrong.append(f"{where}: {floor} must not import {module[1:]}")
            if not is_above and (module.replace(".", "/")[1:] + "/").startswith(
                ("kernels/api/", "kernels/learning/", ABOVE[2])
            ):
                wrong.append(f"{where}: nothing below may import {module[1:]}")
    assert not wrong, "\n".join(wrong)


def part_of(module: str) -> int:
    """Return the place in `PARTS` of a module of runtime/, such as `tuning/cache/shared_file`."""
    named = {name: place for place, part in enumerate(PARTS) for name in part}
    known = [name for name in named if f"{module}/".startswith(f"{name}/")]
    assert known, f"runtime/{module} belongs to no part: add it to PARTS"
    return named[max(known, key=len)]


def imports_that_point_up() -> list[str]:
    """Return the imports in runtime/ of a part above the importing one, anywhere in a file."""
    wrong = []
    for path in sorted((ROOT / "runtime").rglob("*.py")):
        own = path.relative_to(ROOT / "runtime").with_suffix("").as_posix()
        for line, module in imports(path):
            if f"{module}.".startswith(".runtime."):
                imported = module.removeprefix(".runtime").strip(".").replace(".", "/") or "__init__"
                if part_of(imported) > part_of(own):
                    wrong.append(
                        f"{path.relative_to(ROOT)}:{line}: {own} must not import {imported}, which is above it"
                    )
    return wrong


def test_imports_inside_runtime_point_only_down() -> None:
    wrong = imports_that_point_up()
    assert not wrong, "\n".join(wrong)


def test_an_import_that_points_up_inside_runtime_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    files = {
        "prune.py": "from .shortlist import a\nfrom .timing.timer import b\nfrom .tuning.ranks.agreement import c\n",
        "launching/kernel.py": "def f():\n from ..timing import timer\n from . import launcher\n",
        "timing/timer.py": "if TYPE_CHECKING:\n from ..tuning.session import d\nfrom ...datasets import e\n",
        "tuning/ranks/agreement.py": "from ...choice import g\nfrom ....runtime import h\nfrom .rendezvous import i\n",
        "tuning/session.py": "from .cache.shared_file import j\nfrom ..prune import k\n",
    }
    for name, text in files.items():
        path = tmp_path / "runtime" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert [one.split(": ", 1)[1].removesuffix(", which is above it") for one in imports_that_point_up()] == [
        "launching/kernel must not import timing",
        "prune must not import tuning/ranks/agreement",
        "timing/timer must not import tuning/session",
        "tuning/ranks/agreement must not import choice",
        "tuning/ranks/agreement must not import __init__",
    ]


def test_nothing_else_lies_at_top_level() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    present = {line.split("/")[0] for line in listed.splitlines()}
    assert {name for name in present if not name.startswith(".")} <= TOP_LEVEL


def test_the_floors_below_know_no_kernel_by_name() -> None:
    found = []
    for path in SOURCES:
        if path.relative_to(ROOT).parts[0] not in GENERIC or path.name == "tables.py":  # which reads files that did
            continue
        text = path.read_text()
        found += [
            f"{path.relative_to(ROOT)}:{number}: {match[0]}"
            for number, line in enumerate(text.splitlines(), 1)
            for match in [ITS_WORDS.search(line)]
            if match
        ]
        found += [
            f"{path.relative_to(ROOT)}:{node.lineno}: {node.value!r}"
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Constant) and node.value in ITS_DIMENSIONS
        ]
    assert not found, "\n".join(found)


def test_no_function_is_named_as_its_module() -> None:
    """`from .shortlist import shortlist` would hide the module."""
    wrong = []
    for path in SOURCES:
        body = ast.parse(path.read_text()).body
        names = {node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        # An op has the name of its family's folder, whose `__init__` hands it on.
        folder = set() if path.name == "op.py" else {path.parent.name}
        hiding = names & {path.stem.strip("_"), *folder} - {"main"}
        wrong += [f"{path.relative_to(ROOT)}: {name}" for name in hiding]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("floor", FLOORS)
def test_rooms_stay_small(floor: str) -> None:
    for folder in {path.parent for path in SOURCES if path.relative_to(ROOT).parts[0] == floor}:
        files = sorted(path.name for path in folder.iterdir() if path.suffix == ".py" and path.stem != "__init__")
        assert len(files) <= MOST_FILES, f"{folder.relative_to(ROOT)}: {', '.join(files)}"
    for path in SOURCES:
        assert len(path.read_text().splitlines()) <= MOST_LINES, path.relative_to(ROOT)
