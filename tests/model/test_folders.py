"""A bundle's folder takes no dataset, a dataset's no bundle, and what is neither no bundle."""

from __future__ import annotations

import pytest
from foretune.datasets import ForetuneError
from foretune.model.folders import check_bundle_folder, check_dataset_folder


def folder(tmp_path, *names):
    made = tmp_path / "made"
    made.mkdir()
    for name in names:
        (made / name).write_text("")
    return made


@pytest.mark.parametrize(
    "names",
    [(), ("bundle.npz",), ("bundle.npz", "README.md"), (".bundle.npz.0a.tmp", ".git")],
)
def test_a_bundle_may_replace_one_or_begin_a_folder(tmp_path, names):
    check_bundle_folder(folder(tmp_path, *names))
    check_bundle_folder(tmp_path / "made" / "new")


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("dataset.json",), "made is the folder of a dataset: name one for the bundle alone"),
        (("dataset.json", "bundle.npz"), "made is the folder of a dataset"),
        (("manifest.json",), r"made holds what is no bundle \(manifest.json\): name a folder for the bundle alone"),
        (("d", "c", "b", "a"), r"made holds what is no bundle \(a, b, c, ...\)"),
    ],
)
def test_what_is_no_bundles_folder_is_refused_and_named(tmp_path, names, said):
    with pytest.raises(ForetuneError, match=said):
        check_bundle_folder(folder(tmp_path, *names))


@pytest.mark.parametrize("names", [(), ("dataset.json",), ("dataset.json", "CARD.md"), ("models.csv", "log")])
def test_a_dataset_may_lie_beside_other_files(tmp_path, names):
    check_dataset_folder(folder(tmp_path, *names))


def test_a_bundles_folder_takes_no_dataset(tmp_path):
    with pytest.raises(ForetuneError, match="made is the folder of a bundle: name one for the dataset alone"):
        check_dataset_folder(folder(tmp_path, "bundle.npz"))
