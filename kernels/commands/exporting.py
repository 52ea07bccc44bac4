"""The command that writes what other tools and serving engines read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...datasets.errors import MOST, abridged
from ...datasets.progress import showing
from .app import command
from .inputs import bundle_at, device_or_this_gpu, live_gpu
from .options import AsJson, Predictor, argument, count, dataset_names, device_names, family_names, option
from .printing import Printed, emit, left_out_of

#: Seconds that a format takes for each measurement, on two cores of 2026: what is printed beforehand.
_EXPORTING_S = {"csv": 4e-6, "t4": 6e-5}


@command("export", "foretune export sglang --model Qwen3-30B-A3B --tp 2 --device h200 --out tuned")
def export(
    data: Annotated[
        str,
        argument(
            "DATA|vllm|sglang", "Dataset folder, or the name of a shipped one; or a serving engine.", dataset_names
        ),
    ],
    out: Annotated[Path, option("The file to write; an engine's files, the folder.")],
    format: Annotated[
        str | None, option("Of a dataset: t4, the autotuning community's JSON (schema 1.0.0), or csv.")
    ] = None,
    family: Annotated[str | None, option("Of a dataset only this family.", "all", family_names)] = None,
    problem: Annotated[
        int | None, count("Of a dataset only this one, counted from 0. T4 tools expect one.", 0, MOST, "all")
    ] = None,
    model: Annotated[str | None, option("The model, of our table, whose MoE layer an engine's files are for.")] = None,
    experts: Annotated[int | None, count("Of another model: its experts.", 1, MOST)] = None,
    topk: Annotated[int | None, count("... the experts that each token chooses.", 1, MOST)] = None,
    hidden: Annotated[int | None, count("... its hidden size.", 1, MOST)] = None,
    inter: Annotated[int | None, count("... the intermediate size of an expert.", 1, MOST)] = None,
    tp: Annotated[int, count("Ranks that share each expert.", 1, 1024)] = 1,
    dtype: Annotated[str, option("bf16, fp16, or fp8e4m3 with scales of 128x128 blocks.")] = "bf16",
    device: Annotated[
        str | None,
        option(
            "The GPU that an engine's files are for: a shipped device, or a spec's JSON file.", "this GPU", device_names
        ),
    ] = None,
    measure: Annotated[
        bool | None,
        option("Time the best of what is predicted, with the engine's own kernel.", "where GPU and engine are here"),
    ] = None,
    force: Annotated[bool | None, option("Replace the engine's files there.", False)] = None,
    bundle: Predictor = None,
    as_json: AsJson = False,
) -> None:
    """Write measurements in a format that other tools read, or a serving engine's tuned files of a MoE layer.

    An engine's files are compared with what the engine runs now: the layer's file in the folder, in the one that its
    environment variable names, or in the engine; else its default. Rows that gain nothing say what runs anyway.
    """
    from ...collect.compiling import compile_ahead
    from ...datasets.files import check_folder
    from ..fused_moe import engines, installed, tuned_files, tuning, workload

    of_dataset = {"--format": format, "--family": family, "--problem": problem}
    of_engine = {"--model": model, "--experts": experts, "--topk": topk, "--hidden": hidden, "--inter": inter}
    of_engine_only: dict[str, object] = {**of_engine, "--device": device, "--measure": measure, "--force": force}
    is_engine = data in engines.ENGINES
    for name, value in (of_dataset if is_engine else of_engine_only).items():
        if value is not None:
            what = "an engine" if is_engine else f"no engine, which are {' and '.join(engines.ENGINES)}"
            raise typer.BadParameter(f"not taken: {abridged(data, 60)} is {what}", param_hint=name)
    if not is_engine:
        _export_dataset(data, out, format, family, problem, as_json)
        return
    layer = workload.requested_layer(model, experts=experts, topk=topk, hidden=hidden, inter=inter, tp=tp, dtype=dtype)
    gpu = live_gpu()
    spec = gpu if device is None and gpu is not None else device_or_this_gpu(device)
    is_here = gpu is not None and gpu.name == spec.name
    if measure and not is_here:
        raise typer.BadParameter(f"{spec.name} is not here to be measured on", param_hint="--measure")
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
    from ...datasets import load
    from ...datasets.files import check_file
    from ...datasets.store.export import export_dataset

    if format is None:
        raise typer.BadParameter("of a dataset it must be given: t4 or csv", param_hint="--format")
    check_file(out)
    dataset = load(data)
    rows = len(dataset.measurements if family is None or problem is not None else dataset.rows(family))
    with showing(f"writing {out}", _EXPORTING_S.get(format, 0.0) * (rows if problem is None else 0)):
        results = export_dataset(dataset, out, format, family=family, problem=problem)
    result = {"format": format, "results": results} | left_out_of(dataset)
    emit(Printed(result, f"{results} results."), as_json, out=out)
