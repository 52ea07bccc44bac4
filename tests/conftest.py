"""Which tests run in this process: those in Triton's interpreter, or all others (see README.md beside this file);
and the fixtures of more than one folder."""

from __future__ import annotations

import os

import pytest

# Triton decides when it is imported whether it interprets, so a process can do one or the other.
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = [item for item in items if (item.get_closest_marker("interpret") is not None) == INTERPRETING]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no GPU here")


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory):
    """An empty Triton cache on disk, so that every compile is a real one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield
