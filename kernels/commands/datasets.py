"""Commands that list, describe, merge, seal and export datasets, and write files for serving engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...datasets.errors import MOST, abridged
from ...datasets.progress import showing
from .. import families
from .app import Printed, command, datasets, emit, left_out_of
from .inputs import bundle_at, device_or_this_gpu, live_gpu, show_config
from .options import (
    AsJson,
    Experts,
    Hidden,
    Inter,
    LayerDtype,
    LayerModel,
    Predictor,
    TensorParallel,
    Topk,
    argument,
    choice,
    count,
    dataset_names,
    device_names,
    engine_names,
    family_names,
    option,
    switch,
    words,
)

if TYPE_CHECKING:
    from ...datasets.dataset import Dataset

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

        emit(_listed([describe(name) for name in names()]), as_json)


@command("show", "foretune datasets show measured --json", into=datasets)
def show_dataset(data: OneDataset, as_json: AsJson = False) -> None:
    """Describe a dataset: its devices, families and numbers of problems, configs and measurements."""
    from ...datasets import describe
    from ...model import check_sources

    described = describe(data)
    for name, known in families().items():
        if name in described["families"]:
            check_sources(described["name"], described["provenance"], known)
    emit(_listed([described]), as_json)


@command("merge", "foretune datasets merge mine theirs --out both", into=datasets)
def merge(
    data: Annotated[
        list[str],
        argument("DATA...", "Datasets: folders, or names of shipped ones.", dataset_names),
    ],
    out: Annotated[Path, option("Folder for the new dataset.", metavar="FOLDER")],
    name: NewName = None,
    other_sources: Annotated[
        bool, switch("--other-sources", "Also merge measurements of other versions of a kernel's source.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write the measurements of several datasets as one.

    Exact duplicates are dropped. Each run keeps its provenance.
    """
    from ...datasets import load
    from ...datasets.merge import merge_datasets
    from ...datasets.store import check_target, seal_dataset
    from ..registry import families

    check_target(out)
    with showing(f"merging into {out}"):
        loaded = [load(one) for one in data]
        merged = merge_datasets(
            loaded, name=name or out.name, allow_other_sources=other_sources, families=families().values()
        )
        seal_dataset(merged, out, name=merged.name)
    given = sum(len(one.measurements) for one in loaded)
    emit(_counted(merged, dropped=given - len(merged.measurements)), as_json, out=out)


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

    with showing(f"sealing into {out}"):
        left_out = seal_dataset(data if Path(data).is_dir() else load(data), out, name=name or out.name).left_out
        dataset = load(out)  # check that it can be read
    emit(_counted(replace(dataset, left_out=left_out)), as_json, out=out)


#: Seconds per measurement that a format takes on two cores of 2026, for the estimate printed at the start.
_EXPORTING_S = {"csv": 4e-5, "t4": 6e-5}


#: The source that is a matrix product on Hugging Face's kernel hub.
HUB = "hub"


def source_names(incomplete: str) -> list[str]:
    """Return the shipped datasets and other sources that start with `incomplete`, for shell completion."""
    return [*dataset_names(incomplete), *engine_names(incomplete), *words(HUB)(incomplete)]


@command("export", "foretune export sglang --model Qwen3-30B-A3B --tp 2 --device h200 --out tuned")
def export(
    data: Annotated[
        str,
        argument(
            "DATA|vllm|sglang|hub",
            "Dataset (a folder, or the name of a shipped one), a serving engine, or Hugging Face's kernel hub.",
            source_names,
        ),
    ],
    out: Annotated[Path, option("File to write; for an engine or the hub, the folder.", metavar="PATH")],
    format: Annotated[
        str | None,
        choice(
            "Format of a dataset. t4: the autotuning community's JSON (schema 1.0.0); csv: a table.",
            lambda: ("t4", "csv"),
            "t4|csv",
        ),
    ] = None,
    family: Annotated[
        str | None, option("Only this family of a dataset.", "all", family_names, metavar="FAMILY")
    ] = None,
    problem: Annotated[
        int | None, count("Only this problem of a dataset, by its number from 0. T4 tools expect one.", 0, MOST, "all")
    ] = None,
    model: LayerModel = None,
    experts: Experts = None,
    topk: Topk = None,
    hidden: Hidden = None,
    inter: Inter = None,
    tp: TensorParallel = 1,
    n: Annotated[int | None, count("For the hub: the columns of b (K, N).", 1, MOST)] = None,
    k: Annotated[int | None, count("For the hub: the rows of b (K, N).", 1, MOST)] = None,
    dtype: LayerDtype = "bf16",
    device: Annotated[
        str | None,
        option(
            "GPU that an engine's or the hub's files are for: the name of a shipped device, or its JSON file.",
            "this GPU",
            device_names,
            metavar="DEVICE",
        ),
    ] = None,
    measure: Annotated[
        bool | None,
        option("Time the predicted configs with the engine's own kernel.", "if the GPU and the engine are available"),
    ] = None,
    force: Annotated[bool | None, option("Replace existing files of the engine or the hub.", False)] = None,
    bundle: Predictor = None,
    as_json: AsJson = False,
) -> None:
    """Write measurements for other tools, or tuned config files for an engine's MoE layer or a kernel of the hub.

    An engine's new configs are compared with what it uses today: the layer's file in --out, in the folder that the
    engine's environment variable names, or in the engine's package, or its default config without such a file. A row
    that is no faster keeps today's config.
    """
    from ...collect.compiling import compile_ahead
    from ...datasets.files import check_folder
    from ..fused_moe import engines, installed, tuned_files, tuning, workload
    from ..matmul import hub_files

    of_dataset: dict[str, object] = {"--format": format, "--family": family, "--problem": problem}
    of_engine = {"--model": model, "--experts": experts, "--topk": topk, "--hidden": hidden, "--inter": inter}
    of_hub, of_device = {"--n": n, "--k": k}, {"--device": device, "--force": force}
    every: dict[str, object] = {**of_dataset, **of_engine, **of_hub, **of_device, "--measure": measure}
    if data in engines.ENGINES:
        what, able = "an engine", {*of_engine, *of_device, "--measure"}
    elif data == HUB:
        what, able = "for kernels of Hugging Face's hub", {*of_hub, *of_device}
    else:
        what, able = f"a dataset, not an engine ({', '.join(engines.ENGINES)}) or {HUB}", {*of_dataset}
    for name, value in every.items():
        if value is not None and name not in able:
            raise typer.BadParameter(f"does not apply: {abridged(data, 60)} is {what}", param_hint=name)
    if data == HUB:
        if n is None or k is None:
            raise typer.BadParameter("the hub's files are for weights of one shape: give --n and --k", param_hint="--n")
        file = hub_files.predict_hub_file(n, k, device_or_this_gpu(device), dtype=dtype, bundle=bundle_at(bundle))
        file.save(out, force=bool(force))
        emit(file, as_json, out=out)
        return
    if data not in engines.ENGINES:
        _export_dataset(data, out, format, family, problem, as_json)
        return
    layer = workload.requested_layer(model, experts=experts, topk=topk, hidden=hidden, inter=inter, tp=tp, dtype=dtype)
    show_config(model)
    gpu = live_gpu()
    spec = gpu if device is None and gpu is not None else device_or_this_gpu(device)
    is_here = gpu is not None and gpu.name == spec.name
    if measure and not is_here:
        raise typer.BadParameter(f"this machine has no {spec.name}", param_hint="--measure")
    check_folder(out)
    if not force:
        tuned_files.check_none_there(data, layer, spec, tuning.triton_version(), out)
    with showing(f"{data}: {len(engines.BATCH_SIZES)} batch sizes") as say:
        files = tuning.tune_layer(
            data,
            layer,
            spec,
            bundle=bundle_at(bundle),
            measure=is_here and data in installed() if measure is None else measure,
            compile_ahead=compile_ahead,
            out=out,
            on_row=lambda row: say(f"{data}: {row.tokens} tokens"),
        )
    files.save(out, force=bool(force))
    emit(files, as_json, out=out)


def _export_dataset(
    data: str, out: Path, format: str | None, family: str | None, problem: int | None, as_json: bool
) -> None:
    """Write a dataset, one of its families or one of its problems to the file `out`, as CSV or T4 (`format`)."""
    from ...datasets import load
    from ...datasets.files import check_file
    from ...datasets.store.export import export_dataset

    if format is None:
        raise typer.BadParameter("a dataset needs a format: t4 or csv", param_hint="--format")
    check_file(out)
    dataset = load(data)
    rows = len(dataset.measurements if family is None or problem is not None else dataset.rows(family))
    with showing(f"writing {out}", _EXPORTING_S.get(format, 0.0) * (rows if problem is None else 0)):
        results = export_dataset(dataset, out, format, family=family, problem=problem)
    result = {"format": format, "results": results} | left_out_of(dataset)
    emit(Printed(result, f"{results} results."), as_json, out=out)


def _listed(described: list[Mapping[str, Any]]) -> Printed:
    """Return descriptions of datasets as a result that prints one table."""
    from ...datasets.contents import contents_table

    return Printed(described, contents_table(described))


def _counted(dataset: Dataset, *, dropped: int = 0) -> Printed:
    """Return a result that counts the rows of a written dataset, those dropped, and those that could not be read."""
    rows = len(dataset.measurements)
    line = f"{dataset.name}: {rows} measurements."
    line += f" {dropped} more were left out: exact duplicates, or rows that a warning names." * bool(dropped)
    return Printed({"measurements": rows, "dropped": dropped} | left_out_of(dataset), line)
