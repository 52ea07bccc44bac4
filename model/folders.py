"""Which folder may take a bundle, and which a dataset: asked before the work that makes them."""

from __future__ import annotations

from pathlib import Path

from ..datasets import ForetuneError
from ..datasets.disk.writable import check_folder
from ..datasets.manifest import MANIFEST
from .bundle import FILE


def check_bundle_folder(path: Path | str) -> None:
    """Raises `ForetuneError`, naming the path, unless a bundle can be saved there: in a folder that is new, empty, or a
    bundle's.

    >>> check_bundle_folder("/dev/null")
    Traceback (most recent call last):
    foretune.datasets.errors.ForetuneError: /dev/null is a file: name a folder
    """
    is_bundle, is_dataset = _kind(path := Path(path))
    if is_dataset:
        raise ForetuneError(f"{path} is the folder of a dataset: name one for the bundle alone")
    others = sorted(one.name for one in path.glob("[!.]*"))
    if others and not is_bundle:
        more = ", ..." if len(others) > 3 else ""
        raise ForetuneError(
            f"{path} holds what is no bundle ({', '.join(others[:3])}{more}): name a folder for the bundle alone"
        )


def check_dataset_folder(path: Path | str) -> None:
    """Raises `ForetuneError`, naming the path, unless a dataset can be written there: what is no folder, or the folder
    of a bundle.

    >>> check_dataset_folder("/dev/null")
    Traceback (most recent call last):
    foretune.datasets.errors.ForetuneError: /dev/null is a file: name a folder
    """
    is_bundle, is_dataset = _kind(path := Path(path))
    if is_bundle and not is_dataset:
        raise ForetuneError(f"{path} is the folder of a bundle: name one for the dataset alone")


def _kind(folder: Path) -> tuple[bool, bool]:
    """Whether it is the folder of a bundle, and whether of a dataset. Raises as `check_folder` does."""
    check_folder(folder)
    return (folder / FILE).is_file(), (folder / MANIFEST).is_file()
