"""Ground floor: the vocabulary that every floor speaks, and the store that keeps measurements.

Imports nothing of ours above it. The store (pandas, pyarrow) is only imported when a dataset is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import KernelConfig
from .device import DeviceSpec
from .errors import BundleError, DatasetError, FamilyError, ForetuneError, ForetuneWarning, abridged, check_path
from .family import Family, Measurable, check_attributes, check_problem_of, not_empty, roofline_us, wrong_knobs
from .measurement import TIMED, BinaryFacts, Case, Measurement, Status
from .problem import DTYPES, Dtype, Problem, Ragged, dtype_of_tensor, torch_dtype

if TYPE_CHECKING:
    from .dataset import Dataset

__all__ = [
    "DTYPES",
    "TIMED",
    "BinaryFacts",
    "BundleError",
    "Case",
    "DatasetError",
    "DeviceSpec",
    "Dtype",
    "Family",
    "FamilyError",
    "ForetuneError",
    "ForetuneWarning",
    "KernelConfig",
    "Measurable",
    "Measurement",
    "Problem",
    "Ragged",
    "Status",
    "check_attributes",
    "check_problem_of",
    "describe",
    "dtype_of_tensor",
    "load",
    "names",
    "not_empty",
    "roofline_us",
    "torch_dtype",
    "wrong_knobs",
]


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
    from .manifest import description_in

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
