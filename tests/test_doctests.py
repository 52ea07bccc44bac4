"""The examples in docstrings, run; and every public thing of the face has one."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import foretune
import pytest

MODULES = ["foretune", *(module.name for module in pkgutil.walk_packages(foretune.__path__, "foretune."))]
# Left out: tests and build folders of a checkout, which an editable install sees as namespace packages.
MODULES = [name for name in MODULES if name.split(".")[1:2] not in (["tests"], ["build"], ["__main__"])]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert failed == 0, "see the captured output"


FACE = (
    "adapt",
    "agree",
    "collect_dataset",
    "configs",
    "contextual_autotune",
    "cover",
    "elementwise_work",
    "evaluate",
    "explain",
    "families",
    "gated_mlp",
    "gemm_work",
    "grouped_gemm",
    "load_bundle",
    "matmul",
    "pinned",
    "prune",
    "register",
    "report",
    "rms_norm_rope",
    "shortlist",
    "train",
    "tune",
    "use",
)


@pytest.mark.parametrize("name", FACE)
def test_the_face_has_an_example_of_each_function(name: str) -> None:
    assert ">>>" in (getattr(foretune, name).__doc__ or "")
