"""Commands that list, describe, merge and seal datasets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ...datasets.progress import showing
from .. import families
from .app import command, datasets
from .options import AsJson, argument, dataset_names, option
from .printing import counted, emit, listed

OneDataset = Annotated[
    str,
    argument("DATA", "Dataset: a folder, or the name of a shipped one.", dataset_names),
]
NewName = Annotated[str | None, option("Name of the new dataset.", "the folder's name", metavar="NAME")]


@datasets.callback(epilog="Example: foretune datasets --json")
def list_datasets(context: typer.Context, as_json: AsJson = False) -> None:
    """List the shipped datasets.

    `foretune datasets show DATA` describes one dataset.
    """
    if context.invoked_subcommand is None:
        from ...datasets import describe, names

        emit(listed([describe(name) for name in names()]), as_json)


@command("show", "foretune datasets show measured --json", into=datasets)
def show_dataset(data: OneDataset, as_json: AsJson = False) -> None:
    """Describe a dataset: its devices, families and numbers of problems, configs and measurements."""
    from ...datasets import describe
    from ...model import check_sources

    described = describe(data)
    for name, known in families().items():
        if name in described["families"]:
            check_sources(described["name"], described["provenance"], known)
    emit(listed([described]), as_json)


@command("merge", "foretune datasets merge mine theirs --out both", into=datasets)
def merge(
    data: Annotated[
        list[str],
        argument("DATA...", "Datasets: folders, or names of shipped ones.", dataset_names),
    ],
    out: Annotated[Path, option("Folder for the new dataset.", metavar="FOLDER")],
    name: NewName = None,
    other_sources: Annotated[
        bool, typer.Option("--other-sources", help="Also merge measurements of other versions of a kernel's source.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write the measurements of several datasets as one.

    Exact duplicates are dropped. Each run keeps its provenance.
    """
    from ...datasets import load
    from ...datasets.merge import merge_datasets
    from ...datasets.store import check_target, seal_dataset
    from ...model.bundle_file import check_dataset_folder

    check_dataset_folder(out)
    check_target(out)
    with showing(f"merging into {out}"):
        loaded = [load(one) for one in data]
        merged = merge_datasets(loaded, name=name or out.name, allow_other_sources=other_sources)
        seal_dataset(merged, out, name=merged.name)
    given = sum(len(one.measurements) for one in loaded)
    emit(counted(merged, dropped=given - len(merged.measurements)), as_json, out=out)


@command("seal", "foretune datasets seal measured --out shipped", into=datasets)
def seal(
    data: Annotated[str, argument("DATA", "Dataset: a folder, or the name of a shipped one.", dataset_names)],
    out: Annotated[Path, option("Folder for the sealed dataset.", metavar="FOLDER")],
    name: NewName = None,
    as_json: AsJson = False,
) -> None:
    """Write a dataset as a few small tables with checksums, for distribution."""
    from ...datasets import load
    from ...datasets.store import seal_dataset
    from ...model.bundle_file import check_dataset_folder

    check_dataset_folder(out)
    with showing(f"sealing into {out}"):
        left_out = seal_dataset(data if Path(data).is_dir() else load(data), out, name=name or out.name).left_out
        dataset = load(out)  # check that it can be read
    emit(counted(replace(dataset, left_out=left_out)), as_json, out=out)
