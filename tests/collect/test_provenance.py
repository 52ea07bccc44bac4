"""Where measurements come from, with and without a tool that knows the driver."""

from __future__ import annotations

import stat

import pytest
from fakes import DEVICE, FakeFamily
from foretune.collect import row_writer as provenance


@pytest.fixture(autouse=True)
def _forgetful():
    provenance._first_gpu.cache_clear()
    yield
    provenance._first_gpu.cache_clear()


def tool(folder, monkeypatch, script):
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\necho asked >> {folder}/log\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def facts():
    told = provenance.run_provenance(FakeFamily(), DEVICE)
    return {name: told[name] for name in ("driver", "clocks_sm_mhz", "clocks_max_sm_mhz")}


def test_driver_and_clocks_of_the_first_gpu_are_asked_for_once(tmp_path, monkeypatch):
    tool(tmp_path, monkeypatch, "echo '580.65.06, 1980, 1980'; echo '580.65.06, 345, 1980'")
    assert facts() == {"driver": "580.65.06", "clocks_sm_mhz": "1980", "clocks_max_sm_mhz": "1980"}
    assert facts() == facts()
    assert (tmp_path / "log").read_text().count("asked") == 1


@pytest.mark.parametrize("script", ["exit 9", "true"])
def test_a_tool_that_knows_nothing_leaves_them_out(tmp_path, monkeypatch, script):
    tool(tmp_path, monkeypatch, script)
    assert facts() == dict.fromkeys(("driver", "clocks_sm_mhz", "clocks_max_sm_mhz"))


def test_so_does_no_tool(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    told = provenance.run_provenance(FakeFamily(), DEVICE)
    assert told["driver"] is None
    assert (told["family"], told["kernel_source"], told["device"]) == ("fake", "fake-source", DEVICE.name)
    assert told["triton"] == provenance.triton_version()
