"""What READMEs say of the Python face is there, and what the first one shows runs."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import foretune
import pytest

ROOT = Path(__file__).parents[1]
READMES = [ROOT / "README.md", *sorted(ROOT.glob("[!.]*/**/README.md"))]


@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_is_named_is_there(readme):
    for name in re.findall(r"\bforetune((?:\.[A-Za-z_]\w*)+)", readme.read_text()):
        found, place = foretune, "foretune"
        for part in name[1:].split("."):
            place = f"{place}.{part}"
            if part in ("py", "lock", "families") and place != "foretune.families":
                break  # a file, or the group of entry points
            found = getattr(found, part) if hasattr(found, part) else importlib.import_module(place)
        assert found is not None, place


def prose(readme: Path) -> str:
    return re.sub(r"```.*?```|`[^`]*`", "", readme.read_text(), flags=re.DOTALL)


def anchors(readme: Path) -> set[str]:
    """What a link can name of a page: its headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.*)$", readme.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(readme):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(readme)):
        path, _, anchor = target.partition("#")
        if "://" not in path:
            there = readme.parent / path if path else readme
            assert there.exists(), target
            assert not anchor or anchor in anchors(there), target


def test_the_code_of_the_front_page_is_that_of_the_example():
    """`tests/test_examples.py` runs the example."""
    shown = next(
        code for code in re.findall(r"```python\n(.*?)```", READMES[0].read_text(), re.DOTALL) if "prune(" in code
    )
    example = (ROOT / "kernels" / "examples" / "prune_matmul.py").read_text()
    calls = [
        next(
            ast.unparse(node.value)
            for node in ast.parse(code).body
            if getattr(node, "targets", None) and node.targets[0].id == "pruner"
        )
        for code in (shown, example)
    ]
    assert calls[0] == calls[1]
