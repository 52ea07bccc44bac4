"""What the binaries said, as a bundle keeps it: a table of kinds by configs."""

from __future__ import annotations

import numpy as np
import pytest
from foretune.datasets import BinaryFacts, BundleError, KernelConfig
from foretune.model import load_bundle
from forging import forge, hand_made


@pytest.fixture
def saved(tmp_path):
    hand_made().save(tmp_path / "bundle")
    return tmp_path / "bundle"


def _with_a_binary(directory, facts, configs=(16,)):
    """Forges what a binary says: an array, beside configs in the manifest."""
    configs = [KernelConfig.of(BLOCK_M=size).to_json() for size in configs]
    said = {"kinds": [{"dtype": "bf16", "flags": []}], "configs": configs}
    forge(
        directory,
        change_arrays=lambda arrays: arrays | {"fake/binaries": facts},
        change_manifest=lambda manifest: manifest["families"]["fake"].update(binaries=said),
    )


def test_the_forged_binary_is_right_but_for_what_is_changed(saved):
    _with_a_binary(saved, np.array([40, 0, 512], np.int32))
    known = {KernelConfig.of(BLOCK_M=16): BinaryFacts(registers=40, spills=0, smem_bytes=512)}
    assert load_bundle(saved).ranker("fake").binaries_ == {("bf16", ()): known}


@pytest.mark.parametrize(
    ("facts", "configs"),
    [
        (np.array([40, 0, 512]), (16,)),
        (np.array([40, 0, 512], np.float32), (16,)),
        (np.array([40, 0], np.int32), (16,)),
        (np.array([40, 0, 512] * 2, np.int32), (16,)),
        (np.array([40, -1, 512], np.int32), (16,)),
        (np.array([40, 0, 512, -1, -1, -1], np.int32), (16, 32)),
        (np.array([40, 0, 512] * 2, np.int32), (16, 16)),
        (np.array([40, 0, 512] * 2, np.int32), (32, 16)),
        (np.array([], np.int32), (16,)),
    ],
)
def test_what_no_binary_says_is_refused(saved, facts, configs):
    _with_a_binary(saved, facts, configs)
    with pytest.raises(BundleError, match=r"bundle\.npz"):
        load_bundle(saved)
