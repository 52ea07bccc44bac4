"""Fixtures: a dataset on the disk, as parts and sealed."""

from __future__ import annotations

from pathlib import Path

import pytest
from foretune.datasets.store import seal_dataset
from stores import write


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    return write(tmp_path / "mine")


@pytest.fixture
def sealed(parts: Path, tmp_path: Path) -> Path:
    seal_dataset(parts, tmp_path / "sealed", name="shipped")
    return tmp_path / "sealed"
