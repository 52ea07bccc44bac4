"""What the tests of collections share."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from foretune.collect import cases, row_writer


@pytest.fixture
def out(tmp_path):
    """Where a dataset will lie."""
    return tmp_path / "measured"


@pytest.fixture
def triton(monkeypatch):
    """No torch and no nvidia-smi, only to say where measurements come from; a Triton of any version."""
    triton = SimpleNamespace(version="3.9")
    monkeypatch.setattr(cases, "triton_version", lambda: triton.version)
    monkeypatch.setattr(
        row_writer,
        "run_provenance",
        lambda family, device: {
            "family": family.name,
            "kernel_source": family.source_hash(),
            "triton": triton.version,
        },
    )
    return triton
