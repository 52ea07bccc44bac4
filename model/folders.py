"""Which folder may take a bundle, and which a dataset: asked before the work that makes them."""

from __future__ import annotations

from pathlib import Path

from ..datasets import ForetuneError
from ..datasets.files import check_folder, few, visible_in
from ..datasets.manifest import MANIFEST, check_ours

#: The file that a bundle is.
FILE = "bundle.npz"


def check_bundle_folder(path: Path | str) -> None:
    """Raises `ForetuneError`, naming the path, unless a bundle can be saved there: in a folder that is new, empty, or a
    bundle's.

    >>> check_bundle_folder("/dev/null")
    Traceback (most recent call last):
    foretune.datasets.errors.ForetuneError: /dev/null is a file: name a folder
    """
    check_folder(path := Path(path))
    check_only_bundle(path)


def check_only_bundle(path: Path) -> None:
    """Refuse a folder that holds something other than a bundle. Hidden files do not count.

    Raises:
        ForetuneError: The folder has a dataset, or files but no bundle.
    """
    is_bundle, is_dataset = _kind(path)
    if is_dataset:
        raise ForetuneError(f"{path} is the folder of a dataset: name one for the bundle alone")
    others = visible_in(path)
    if others and not is_bundle:
        raise ForetuneError(f"{path} holds what is no bundle ({few(others)}): name a folder for the bundle alone")


def check_dataset_folder(path: Path | str) -> None:
    """Raises `ForetuneError`, naming the path, unless a dataset can be written there: in a folder that is new, empty,
    or a dataset's.

    >>> check_dataset_folder("/dev/null")
    Traceback (most recent call last):
    foretune.datasets.errors.ForetuneError: /dev/null is a file: name a folder
    """
    check_folder(path := Path(path))
    is_bundle, is_dataset = _kind(path)
    if is_bundle and not is_dataset:
        raise ForetuneError(f"{path} is the folder of a bundle: name one for the dataset alone")
    check_ours(path)


def check_plots_folder(path: Path | str) -> None:
    """Refuse a folder for figures that holds something other than figures.

    Raises:
        ForetuneError: The path cannot be a folder, or it has files whose names do not end in `.svg`.
    """
    check_folder(path := Path(path))
    if others := [name for name in visible_in(path) if not name.endswith(".svg")]:
        raise ForetuneError(f"{path} holds files that are no figures ({few(others)}): name a folder for them alone")


def _kind(folder: Path) -> tuple[bool, bool]:
    """Whether it is the folder of a bundle, and whether of a dataset."""
    return (folder / FILE).is_file(), (folder / MANIFEST).is_file()
