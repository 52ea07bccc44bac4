"""A bundle's folder takes no dataset, a dataset's no bundle, and what is neither no bundle."""

from __future__ import annotations

import pytest
from foretune.datasets import ForetuneError
from foretune.datasets.manifest import write_manifest
from foretune.datasets.store import check_target
from foretune.model.bundle_file import check_bundle_folder, check_plots_folder
from forging import hand_made


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
        (("manifest.json",), r"made holds files but no bundle \(manifest.json\): name a new or an empty folder"),
        (("d", "c", "b", "a"), r"made holds files but no bundle \(a, b, c, ...\)"),
    ],
)
def test_what_is_no_bundles_folder_is_refused_and_named(tmp_path, names, said):
    with pytest.raises(ForetuneError, match=said):
        check_bundle_folder(folder(tmp_path, *names))


@pytest.mark.parametrize("names", [(), (".git", ".writing")])
def test_a_dataset_may_begin_a_folder(tmp_path, names):
    check_target(folder(tmp_path, *names))
    check_target(tmp_path / "made" / "new")


def test_a_dataset_may_go_on_in_its_folder_beside_a_card(tmp_path):
    made = folder(tmp_path, "CARD.md")
    write_manifest(made, {"name": "mine", "devices": [], "provenance": {}, "sealed": {}})
    check_target(made)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (
            ("models.csv", "log"),
            r"made holds files that are not a dataset \(log, models.csv\): choose a new or an empty folder",
        ),
        (("dataset.json",), "dataset.json: cannot be read as JSON"),  # somebody else's, of the same name
    ],
)
def test_what_is_no_datasets_folder_is_refused_and_named(tmp_path, names, said):
    with pytest.raises(ForetuneError, match=said):
        check_target(folder(tmp_path, *names))


def test_a_bundles_folder_takes_no_dataset(tmp_path):
    with pytest.raises(ForetuneError, match="made is the folder of a bundle: name one for the dataset alone"):
        check_target(folder(tmp_path, "bundle.npz"))


def test_a_bundle_is_saved_in_no_folder_of_something_else(tmp_path):
    made = folder(tmp_path, "notes.txt")
    with pytest.raises(ForetuneError, match=r"made holds files but no bundle \(notes.txt\)"):
        hand_made().save(made)
    assert [path.name for path in made.iterdir()] == ["notes.txt"]


def test_figures_replace_figures_alone(tmp_path):
    check_plots_folder(folder(tmp_path, "f0-regret.svg"))
    (tmp_path / "made" / "notes.txt").write_text("")
    with pytest.raises(ForetuneError, match=r"made holds files that are not figures \(notes.txt\)"):
        check_plots_folder(tmp_path / "made")
