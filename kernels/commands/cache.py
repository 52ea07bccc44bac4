"""Commands on the choice cache, the tuning results that are kept on disk, and on pin files, which fix configs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...datasets import ForetuneError
from ...datasets.errors import abridged
from ...datasets.progress import showing
from .. import families, find_family, find_measurable
from ..learning import datasets_merged
from .app import Printed, cache, command, emit
from .inputs import bundle_at, device_or_this_gpu, live_gpu, names_kernel
from .options import (
    FAMILY,
    FAMILY_FORMS,
    AsJson,
    Device,
    Predictor,
    argument,
    choice,
    count,
    data_option,
    device_names,
    family_names,
    option,
    remembered_names,
    switch,
)

if TYPE_CHECKING:
    from ...runtime.pin_file import PinFile

#: Formats of `cache export`, the default first.
EXPORTS = ("foretune", "fla")

#: Defines the rows and columns of the tables of `cache show`.
_ALL_CAPTION = (
    "Rows: a tuned kernel on a device, or a tuned function. Columns: the number of its tuned problems or keys, of "
    "timed and of failed configs, of choices, and of versions of its source."
)
#: Defines the rows and columns of the tables of `cache show KERNEL`.
_ONE_CAPTION = (
    "Rows: a tuned problem or key. Columns: the number of configs that were timed or failed, the fastest or "
    "chosen config, and its time in microseconds."
)


#: Defines the rows and columns of `cache show --refining`.
_REFINED_CAPTION = (
    "Rows: a config of a problem. Columns: the number of timed calls, the mean time of a call, the 95 % interval of "
    "its difference from the predicted config, and the microseconds that it saves in each call."
)


def kernel_names(incomplete: str) -> list[str]:
    """Return the tuned kernels and kernel families that start with `incomplete`, for shell completion."""
    return [*remembered_names(incomplete), *family_names(incomplete)]


OneKernel = Annotated[
    str | None,
    argument("[KERNEL]", "Only this kernel or function, by its name in `cache show`.", remembered_names, "all"),
]


Pin = Annotated[
    Path | None,
    option("Write the choices of this pin file (`foretune pin`).", "those in the cache", metavar="FILE"),
]


def _pins(path: Path | None) -> PinFile | None:
    """Return the content of the pin file that --pin names; None without --pin."""
    from ...runtime.pin_file import PinFile

    return None if path is None else PinFile.read(path)


@command("show", "foretune cache show", into=cache)
def show_cache(
    kernel: OneKernel = None,
    refining: Annotated[
        bool, option("What calls in mode `refine` took, by config, instead of the tuning results.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the tuned kernels and functions, or the tuned problems of one of them."""
    from ...runtime.tuning.cache.cache_folder import cache_contents, refined_contents

    if refining:
        emit(refined_contents(kernel), as_json, _REFINED_CAPTION)
        return
    emit(cache_contents(kernel), as_json, _ALL_CAPTION if kernel is None else _ONE_CAPTION)


@command("clear", "foretune cache clear package.module.kernel", into=cache)
def clear(kernel: OneKernel = None, as_json: AsJson = False) -> None:
    """Delete the tuning results of all kernels and functions, or of one.

    Only files that the cache has written are deleted, and no symbolic link is followed. The output names what was left.
    """
    from ...runtime.tuning.cache.cache_folder import clear_cache

    emit(clear_cache(kernel), as_json)


@command("export", "foretune cache export --out choices.json", into=cache)
def export_cache(
    out: Annotated[
        Path,
        option("File to write: a new one or an earlier export. With --format fla, the folder.", metavar="PATH"),
    ],
    kernel: OneKernel = None,
    format: Annotated[
        str,
        choice(
            "foretune: for `foretune cache import`; fla: for the autotuner of FLA (FLA_CONFIG_DIR).",
            lambda: EXPORTS,
            "|".join(EXPORTS),
        ),
    ] = "foretune",
    pin: Pin = None,
    as_json: AsJson = False,
) -> None:
    """Write tuning results to a file, for another machine or another project's autotuner."""
    from ...runtime.tuning.cache.cache_folder import export_choices
    from ...runtime.tuning.cache.exports import export_fla_tables

    if format == EXPORTS[0]:
        if pin is not None:
            raise typer.BadParameter(
                f"a pin file has no times to import: give --format {EXPORTS[1]}", param_hint="--pin"
            )
        emit(export_choices(out, kernel), as_json, out=out)
        return
    exported = export_fla_tables(out, kernel, _pins(pin))
    emit(exported, as_json, out=out)


@command("import", "foretune cache import choices.json", into=cache)
def import_cache(
    file: Annotated[Path, argument("FILE", "File that `foretune cache export` wrote.")],
    as_json: AsJson = False,
) -> None:
    """Add the tuning results of another machine to the cache. Results that are already here are kept.

    The output counts the added results, and names those left out: malformed ones, and those beyond the size limit of a
    cache file.
    """
    from ...runtime.tuning.cache.cache_folder import import_choices

    emit(import_choices(file), as_json)


@command("freeze", f"foretune cache freeze {FAMILY} --device h200 --out heuristic.py", into=cache)
def freeze(
    kernel: Annotated[
        str,
        argument(
            "KERNEL",
            f"Kernel, by its name in `cache show`. With --device, a kernel family: {FAMILY_FORMS}.",
            kernel_names,
        ),
    ],
    out: Annotated[Path, option("Python file to write: a new one, or one that this command wrote.", metavar="FILE")],
    device: Annotated[
        str | None,
        option(
            "Freeze predictions for the family's workload on this GPU (a shipped device or its JSON file) instead of "
            "tuning results.",
            "tuning results",
            device_names,
            metavar="DEVICE",
        ),
    ] = None,
    pin: Pin = None,
    rules: Annotated[int, count("Largest number of rules.", 1, 1000)] = 32,
    bundle: Predictor = None,
    as_json: AsJson = False,
) -> None:
    """Write a kernel's configs as a Python file without dependencies: rules over dimensions and device.

    For kernel hubs, which allow no dependencies. The file states how much slower its configs are than the best known.
    """
    from ...runtime.tuning.cache.exports import check_frozen_file, freeze_choices, freeze_predictions

    check_frozen_file(out)
    if device is not None and pin is not None:
        raise typer.BadParameter("does not apply with --device, which freezes predictions", param_hint="--pin")
    if device is not None:
        family = find_measurable(kernel)
        with showing(f"predicting for the workload of {family.name}"):
            frozen = freeze_predictions(family, device, bundle=bundle, most_rules=rules)
    else:
        family_of_kernel = families().get(kernel)
        frozen = freeze_choices(kernel, pins=_pins(pin), family=family_of_kernel, bundle=bundle, most_rules=rules)
    frozen.save(out)
    emit(frozen, as_json, out=out)


#: Defines the rows and columns of the table of `pin --check`.
_CHECK_CAPTION = (
    "Rows: differences. Columns: the kernel or function; what differs; what the file has; what this machine has, or "
    "why the file's config cannot run."
)


@command("pin", "foretune pin --out foretune.lock")
def pin(
    kernels: Annotated[
        list[str] | None,
        argument(
            "[KERNEL]...",
            "Only these kernels and functions, by their names in `cache show`. With --shapes or --data, one kernel "
            f"family ({FAMILY_FORMS}), or a kernel with foretune.prune, package.module.kernel. With --check, families "
            "that have no name.",
            kernel_names,
            "all",
        ),
    ] = None,
    out: Annotated[
        Path | None, option("Pin file to write: a new one, or one that this command wrote.", "none", metavar="FILE")
    ] = None,
    check: Annotated[
        Path | None,
        option("Compare this pin file with this machine; exit code 1 if they differ.", "none", metavar="FILE"),
    ] = None,
    add: Annotated[
        bool, switch("--add", "Keep what the file at --out has for other kernels, devices and problems.")
    ] = False,
    shapes: Annotated[
        Path | None,
        option(
            "Pin what a bundle predicts for these problems of the kernel's family: a CSV file with one problem a row "
            "and one column for each dimension, optionally dtype and flags (separated by spaces; without any, the "
            "problems have no flags).",
            "tuning results",
            metavar="FILE",
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        data_option(
            "Pin what a bundle predicts for the family's problems in this dataset, for example a FORETUNE_LOG folder. "
            "May be repeated.",
            "tuning results",
        ),
    ] = None,
    device: Device = None,
    bundle: Predictor = None,
    as_json: AsJson = False,
) -> None:
    """Write the configs of a run to a file that fixes them (FORETUNE_PIN), or compare such a file with this machine.

    Without --shapes and --data, the file has the newest tuning results in the choice cache (FORETUNE_CACHE_DIR). It is
    sorted JSON for review in git. Where it is in force nothing is tuned, and what it does not cover is an error.
    """
    if (out is None) == (check is None):
        raise typer.BadParameter("give one of --out and --check", param_hint="--out")
    predicts = shapes is not None or bool(data)
    for name, value, applies in (
        ("--device", device, predicts or check is not None),
        ("--bundle", bundle, predicts),
        ("--add", add or None, check is None),
        ("--shapes", shapes, check is None),
        ("--data", data or None, check is None),
    ):
        if value is not None and not applies:
            raise typer.BadParameter(
                "does not apply to --check" if check is not None else "needs --shapes or --data", param_hint=name
            )
    if check is not None:
        _check(check, kernels or [], device, as_json)
        return
    assert out is not None
    from ...runtime.pin_file import PinFile, PinnedFunction, PinnedKernel, check_pin_file
    from ...runtime.tuning.cache.pinning import pins_of_cache, pins_of_predictions, pins_of_pruned
    from ...runtime.tuning.warmup import problems_from_csv

    check_pin_file(out)
    if predicts:
        if not kernels or len(kernels) != 1:
            raise typer.BadParameter("name one kernel family or pruned kernel", param_hint="KERNEL")
        tuner = None
        if names_kernel(kernels[0]):
            tuner = _pruned_kernel(kernels[0])
            family = tuner.early_config_prune.family
        else:
            family = find_family(kernels[0])
        problems = [] if shapes is None else problems_from_csv(shapes, family)
        logged = [case.problem for case in datasets_merged(data).cases] if data else []
        problems += [one for one in logged if one.family == family.name]
        if not problems:
            raise typer.BadParameter(f"has no problem of {family.name}", param_hint="--shapes" if shapes else "--data")
        spec = device_or_this_gpu(device)
        with showing(f"predicting for {len(problems)} problems"):
            if tuner is None:
                pinned = pins_of_predictions(family, problems, spec, bundle=bundle_at(bundle))
            else:
                pinned = pins_of_pruned(tuner, problems, spec, bundle=bundle_at(bundle))
        pins = PinFile((pinned,))
    else:
        pins = pins_of_cache(kernels or ())
    if add and out.exists():
        pins = pins.with_those_of(PinFile.read(out))
    pins.save(out)
    entries: list[PinnedKernel | PinnedFunction] = [*pins.kernels, *pins.functions]
    counts = {"kernels": len(pins.kernels), "functions": len(pins.functions)}
    counts |= {"choices": sum(len(one.choices) for one in entries)}
    devices = ", ".join(dict.fromkeys(getattr(one.device, "name", str(one.device)) for one in entries))
    line = f"Pinned: {counts['choices']} choices of {len(entries)} kernels and functions on {abridged(devices)}."
    if predicts and family.flags and not any(problem.flags for problem in problems):
        line += f" No problem has a flag ({', '.join(family.flags)}): launches with flags are not covered."
    emit(Printed(counts, line), as_json, out=out)


def _pruned_kernel(name: str) -> Any:
    """Return the autotuner of the kernel package.module.kernel, which must use `foretune.prune`."""
    from ...runtime import Pruner
    from ...runtime.tuning.launches import LaunchFamily, autotuners_named

    def pruned(word: str) -> list[Any]:
        return [one for one in autotuners_named(word) if isinstance(one.early_config_prune, Pruner)]

    if len(found := pruned(name)) == 1:
        return found[0]
    able = found or pruned(name.rpartition(".")[0] or name)
    names = abridged(", ".join(sorted(LaunchFamily(one).name for one in able)) or "none", 300)
    raise ForetuneError(f"{abridged(name, 100)} must name a kernel with foretune.prune; known here: {names}")


def _check(file: Path, given: list[str], device: str | None, as_json: bool) -> None:
    """Compare a pin file with this machine, or with a named device; exit with 1 if they differ.

    `given` are families (as `find_family` takes them) of kernels in the file whose families are not registered.
    """
    from ...runtime.tuning.cache.pinning import check_pins

    known = {one.name: one for one in map(find_family, given)}
    spec = live_gpu() if device is None else device_or_this_gpu(device)
    result = check_pins(file, spec, (families() | known).get)
    emit(result, as_json, _CHECK_CAPTION if result.differences else "")
    if result.differences:
        raise typer.Exit(1)
