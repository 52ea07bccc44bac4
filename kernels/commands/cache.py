"""Commands on what tuning remembers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from ...datasets import ForetuneError
from ...datasets.errors import abridged
from ...datasets.progress import showing
from .. import families, find_measurable
from .app import cache, command
from .options import FAMILY, AsJson, Predictor, argument, count, device_names, family_names, option
from .printing import emit

OneKernel = Annotated[
    str | None,
    argument("[KERNEL]", "Only this kernel or function, as `cache show` calls it.", unset="all that are remembered"),
]


@command("show", "foretune cache show", into=cache)
def show_cache(kernel: OneKernel = None, as_json: AsJson = False) -> None:
    """Show what tuning remembers: of each kernel and function, or of one of them each problem."""
    from ...runtime.tuning.cache.cache_folder import cache_contents

    emit(cache_contents(kernel), as_json)


@command("clear", "foretune cache clear package.module.kernel", into=cache)
def clear(kernel: OneKernel = None, as_json: AsJson = False) -> None:
    """Forget everything, or one kernel or function.

    Only the cache's own files are removed, and nothing behind a symbolic link; it says what was left.
    """
    from ...runtime.tuning.cache.cache_folder import clear_cache

    emit(clear_cache(kernel), as_json)


@command("export", "foretune cache export --out choices.json", into=cache)
def export_cache(
    out: Annotated[
        Path, option("The file to write, new or an earlier export; of other projects' formats, the folder.")
    ],
    kernel: OneKernel = None,
    format: Annotated[
        str,
        option("foretune, for `cache import` elsewhere; or fla, what FLA's autotuner reads (FLA_CONFIG_DIR)."),
    ] = "foretune",
    as_json: AsJson = False,
) -> None:
    """Write what tuning remembers to a file, for another machine or another project's autotuner."""
    from ...runtime.tuning.cache.cache_folder import export_choices
    from ...runtime.tuning.cache.exports import export_fla_tables

    if format not in ("foretune", "fla"):
        raise ForetuneError(f"format must be foretune or fla but is {abridged(repr(format), 60)}")
    exported = export_choices(out, kernel) if format == "foretune" else export_fla_tables(out, kernel)
    emit(exported, as_json, out=out)


@command("import", "foretune cache import choices.json", into=cache)
def import_cache(
    file: Annotated[Path, argument("FILE", "What `foretune cache export` wrote.")],
    as_json: AsJson = False,
) -> None:
    """Add another machine's times and choices to what is remembered here; what both have stays as it is here.

    It counts what was kept, and says what was left out: malformed records, and what a cache's file has no room for.
    """
    from ...runtime.tuning.cache.cache_folder import import_choices

    emit(import_choices(file), as_json)


@command("freeze", f"foretune cache freeze {FAMILY} --device h200 --out heuristic.py", into=cache)
def freeze(
    kernel: Annotated[
        str,
        argument(
            "KERNEL",
            "As `cache show` calls it; with --device a kernel family, or package.module:attribute.",
            family_names,
        ),
    ],
    out: Annotated[Path, option("The Python file to write, new or an earlier frozen one.")],
    device: Annotated[
        str | None,
        option(
            "Freeze what is predicted for the family's workload on this device: a shipped one, or a spec's file.",
            "what the cache knows",
            device_names,
        ),
    ] = None,
    rules: Annotated[int, count("At most so many.", 1, 1000)] = 32,
    bundle: Predictor = None,
    as_json: AsJson = False,
) -> None:
    """Write a kernel's configs as one plain Python file that needs nothing: rules over dimensions and device.

    Kernel hubs, which allow no dependency, can ship it. It says what it loses against the best configs known.
    """
    from ...runtime.tuning.cache.exports import check_frozen_file, freeze_choices, freeze_predictions

    check_frozen_file(out)
    if device is not None:
        family = find_measurable(kernel)
        with showing(f"predicting for the workload of {family.name}"):
            frozen = freeze_predictions(family, device, bundle=bundle, most_rules=rules)
    else:
        frozen = freeze_choices(kernel, family=families().get(kernel), bundle=bundle, most_rules=rules)
    frozen.save(out)
    emit(frozen, as_json, out=out)
