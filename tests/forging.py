"""Bundles that nobody trained, and bundles that somebody tampered with and signed: checksums fit, so that what stands
behind them is tested."""

from __future__ import annotations

import hashlib
import json

import numpy as np
from fakes import DEVICE, FakeFamily
from foretune.datasets import BinaryFacts, Problem
from foretune.model import Bundle, Forest, LightGBMRanker, TrainedFamily, bundle_file
from foretune.model.calibration.conformal import Calibration
from foretune.model.calibration.training_domain import TrainingDomain

FILE, MANIFEST = "bundle.npz", "manifest.json"


def contents(directory):
    """The arrays and the manifest of a saved bundle."""
    arrays, texts = bundle_file.loads((directory / FILE).read_bytes())
    return arrays, json.loads(texts[MANIFEST])


def signed(manifest, arrays):
    """The manifest with checksums that fit."""
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.tobytes())
    content = {key: value for key, value in manifest.items() if key != "checksum"}
    if isinstance(content.get("arrays_sha256"), str):
        content["arrays_sha256"] = digest.hexdigest()
    text = json.dumps(content, sort_keys=True, ensure_ascii=False)
    return content | {"checksum": hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()}


def forge(directory, change_arrays=None, change_manifest=None):
    """Rewrites a bundle."""
    arrays, manifest = contents(directory)
    if change_arrays:
        arrays = change_arrays(arrays)
    if change_manifest:
        change_manifest(manifest)
    write(directory, arrays, signed(manifest, arrays))


def write(directory, arrays, manifest):
    (directory / FILE).write_bytes(bundle_file.dumps(arrays, {MANIFEST: json.dumps(manifest).encode()}))


def hand_made(trees=6, seed=0, name="fake", device=DEVICE):
    """A bundle of the fake family that nobody trained: predicts something, and is made in no time."""
    random = np.random.default_rng(seed)
    width = len(FakeFamily.feature_names)
    ranker = LightGBMRanker(trees=trees, epochs=0)
    ranker.feature_names_ = FakeFamily.feature_names
    ranker.network_ = None
    ranker.forest_ = Forest(
        n_features=np.array(width, np.int64),
        tree_leaves=np.full(trees, 3, np.uint8),
        split_feature=random.integers(0, width, 2 * trees).astype(np.uint16),
        split_threshold=random.choice([4.0, 16.0, 64.0, 512.0], 2 * trees).astype(np.float32),
        split_left=np.tile(np.array([2, 1], np.uint8), trees),
        leaf_value=random.normal(0, 0.3, 3 * trees),
    )
    problem = Problem.of(name, rows=8, n=8, k=8, groups=1)
    wrong, known = FakeFamily().space()[:2]
    ranker.binaries_ = {(problem.dtype, problem.flags): {known: BinaryFacts(40, 0, 1024)}}
    origin = {"dataset": "fake", "measurements_sha256": "0" * 64, "problems": 3, "configs": 96, "source_hash": None}
    wrong_results = {(problem.dtype, problem.flags): frozenset([wrong])}
    calibration = Calibration(problems=40, scores=(0.0,) * 38 + (2.0, 3.5), regret=(0.05,) * 3 + (0.0,) * 10)
    family = TrainedFamily(ranker, (device,), origin, TrainingDomain.of([problem]), wrong_results, calibration)
    return Bundle({name: family}, "4.7.0")
