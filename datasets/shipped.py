"""The datasets that are shipped with the package, and those in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import DatasetError, abridged, check_path
from .manifest import description_in

if TYPE_CHECKING:
    from .dataset import Dataset


def names() -> list[str]:
    """Names of the datasets that are shipped with the package.

    >>> names()[:2]
    ['h100', 'h100_kernels']
    """
    root = Path(__file__).parent
    return sorted(manifest.parent.name for manifest in root.glob("[!.]*/dataset.json"))


def load(name_or_path: str | Path) -> Dataset:
    """A shipped dataset by name, or the one in a directory.

    Raises `DatasetError` naming the file that is truncated, foreign, of another schema or filled with NaN,
    or listing the shipped names where nothing of that name exists.

    >>> load("h200").name
    'h200'
    """
    from .store import read

    return read(_folder(name_or_path))


def describe(name_or_path: str | Path) -> dict[str, Any]:
    """What a dataset has, in counts, and where it comes from: `load(name_or_path).describe()`, but for a sealed one
    from its manifest alone. Raises `DatasetError` as `load` does.

    >>> describe("h200")["device"].split(", ")[0]
    'NVIDIA H200'
    """
    folder = _folder(name_or_path)
    return description_in(folder) or load(folder).describe()


def _folder(name_or_path: str | Path) -> Path:
    check_path("a dataset", name_or_path)
    if str(name_or_path) in names():
        return Path(__file__).parent / str(name_or_path)
    if not _is_folder(name_or_path):
        raise DatasetError(
            f"{abridged(str(name_or_path))}: neither a directory nor a shipped dataset (shipped: {', '.join(names())})"
        )
    return Path(name_or_path)


def _is_folder(path: str | Path) -> bool:
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):  # too long, or with a NUL
        return False
