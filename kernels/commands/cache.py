"""Commands on the choice cache: the tuning results that are kept on disk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...datasets.progress import showing
from .. import families, find_measurable
from .app import cache, command
from .options import (
    FAMILY,
    FAMILY_FORMS,
    AsJson,
    Predictor,
    argument,
    count,
    device_names,
    family_names,
    one_of,
    option,
    remembered_names,
    words,
)
from .printing import emit

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
        option(
            "foretune: for `foretune cache import`; fla: for the autotuner of FLA (FLA_CONFIG_DIR).",
            names=words(*EXPORTS),
            parser=one_of(lambda: EXPORTS),
            metavar="|".join(EXPORTS),
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
