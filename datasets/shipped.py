"""Loading datasets: the ones shipped with the package by name, others by their folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import DatasetError, abridged, check_path, printable
from .manifest import description_in

if TYPE_CHECKING:
    from .dataset import Dataset


def names() -> list[str]:
    """Return the names of the datasets that are shipped with the package.

    >>> names()[:2]
    ['h100', 'h100_inductor_templates']
    """
    root = Path(__file__).parent
    return sorted(manifest.parent.name for manifest in root.glob("[!.]*/dataset.json"))


def load(name_or_path: str | Path) -> Dataset:
    """Load a shipped dataset by name, or the dataset in a folder.

    Args:
        name_or_path: A name of `names()`, or the folder of a dataset.

    Raises:
        DatasetError: There is no such dataset, or one of its files is damaged, has another format or another schema
            version. The message names the file.

    >>> load("h200").name
    'h200'
    """
    from .store import read

    folder = _folder(name_or_path)
    dataset = read(folder)
    if folder.resolve().name == dataset.name:
        return dataset
    return replace(dataset, given=printable(str(name_or_path)))


def describe(name_or_path: str | Path) -> dict[str, Any]:
    """Return a dataset's counts and provenance, as `load(name_or_path).describe()` does.

    A sealed dataset is described from its manifest alone, which is much faster. Raises `DatasetError` as `load` does.

    >>> describe("h200")["device"].split(", ")[0]
    'NVIDIA H200'
    """
    folder = _folder(name_or_path)
    return description_in(folder) or load(folder).describe()


def _folder(name_or_path: str | Path) -> Path:
    """Return the folder of a dataset that is given by name or by path; raise `DatasetError` if there is none."""
    check_path("a dataset", name_or_path)
    if str(name_or_path) in names():
        return Path(__file__).parent / str(name_or_path)
    if not _is_folder(name_or_path):
        raise DatasetError(
            f"{abridged(str(name_or_path))}: neither a folder nor a shipped dataset (shipped: {', '.join(names())})"
        )
    return Path(name_or_path)


def _is_folder(path: str | Path) -> bool:
    """Return whether a path is a folder; False for one that cannot be a path."""
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):  # too long, or with a NUL
        return False
