"""Options and arguments that several commands share, and helpers that declare, parse and complete them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from ...datasets import DeviceSpec, ForetuneError, Problem
from ...datasets.console import duration_s, number, whole_number
from ...datasets.errors import MOST, abridged, did_you_mean, warn
from .. import families
from .app import GIVEN

T = TypeVar("T")

#: The family and the layer that examples use.
FAMILY = "grouped_gemm_fwd"
EXAMPLE = Problem.of(FAMILY, groups=64, rows=8192, n=2048, k=1024)
#: The dataset that quickstart, evaluate, report and replay read by default.
SHIPPED = "h200"
#: Name of the shipped bundle in `train --keep`, `evaluate --bundle` and `report --bundle`.
SHIPPED_BUNDLE = "shipped"
#: Upper bound for a number of SMs; no GPU has more.
MOST_SMS = 10_000


def given_as(option: str | None, read: Callable[..., T], text: str, *bounds: float) -> T:
    """Return `read(text, *bounds)` for an option's text; report its errors as wrong usage of the option, if named."""
    try:
        return read(text, *bounds)
    except ForetuneError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def read_by(read: Callable[..., T], *bounds: float) -> Callable[[Any], T]:
    """Return a parser that calls `read(text, *bounds)` for an option's text; typer names the option in its errors."""
    return lambda text: given_as(None, read, str(text), *bounds)  # typer also passes defaults, which are numbers


def renamed(old: str, old_value: T | None, new: str, new_value: T | None) -> T | None:
    """Return the value of an option that was renamed from `old` to `new`; warn if the user gave it as `old`."""
    if old_value is None:
        return new_value
    if new_value is not None:
        raise typer.BadParameter(f"is the old name of {new}: give only {new}", param_hint=old)
    warn(f"{old} is deprecated: use {new}")
    return old_value


def completes(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return a completion function for the values that `names` returns, which is called when the shell asks."""

    def complete(incomplete: str) -> list[str]:
        try:
            return [name for name in names() if name.startswith(incomplete)]
        except ForetuneError:  # completion has no place for an error
            return []

    return complete


def words(*values: str) -> Callable[[str], list[str]]:
    """Return a completion function for these values."""
    return completes(lambda: values)


@completes
def family_names() -> Iterable[str]:
    """Return the names of the kernel families, for shell completion."""
    return families()


@completes
def dataset_names() -> Iterable[str]:
    """Return the names of the shipped datasets, for shell completion."""
    from ...datasets import names

    return names()


@completes
def device_names() -> Iterable[str]:
    """Return the names of the shipped devices, for shell completion."""
    return DeviceSpec.names()


@completes
def model_names() -> Iterable[str]:
    """Return the names of the models whose MoE layers are known, for shell completion."""
    from ..workloads import load_models

    return [one.model for one in load_models()]


@completes
def engine_names() -> Iterable[str]:
    """Return the names of the serving engines, for shell completion."""
    from ..fused_moe.engines import ENGINES

    return ENGINES


@completes
def remembered_names() -> Iterable[str]:
    """Return the names of the kernels and functions in the choice cache, for shell completion."""
    from ...runtime.tuning.cache.cache_folder import cache_contents

    contents = cache_contents()
    return dict.fromkeys([*(one.kernel for one in contents.kernels), *(one.name for one in contents.functions)])


def dtype_names(context: typer.Context, incomplete: str) -> list[str]:
    """Return the element types of the family on the command line, or of all families, for shell completion."""
    return _of_families(context, incomplete, "dtypes")


def dimension_names(context: typer.Context, incomplete: str) -> list[str]:
    """Return the dimensions of the family on the command line, or of all families, for shell completion."""
    return _of_families(context, incomplete, "dims")


def _of_families(context: typer.Context, incomplete: str, attribute: str) -> list[str]:
    known = families()
    chosen = [known[word] for word in context.meta.get(GIVEN, ()) if word in known]
    values = dict.fromkeys(value for one in chosen or known.values() for value in getattr(one, attribute))
    return [value for value in values if value.startswith(incomplete)]


def option(
    help: str, unset: bool | str = True, names: Callable[..., list[str]] | None = None, *flags: str, **settings: Any
) -> Any:
    """Declare an option.

    Args:
        help: The help text.
        unset: What the help shows as the default; True for the default value itself.
        names: A completion function for the value.
        flags: The option's names, if they are not the parameter's name.
        settings: More settings of `typer.Option`.
    """
    return typer.Option(*flags, help=help, show_default=unset, autocompletion=names, **settings)


def argument(metavar: str, help: str, names: Callable[..., list[str]] | None = None, unset: bool | str = True) -> Any:
    """Declare an argument, with parameters as for `option`."""
    return typer.Argument(metavar=metavar, help=help, show_default=unset, autocompletion=names)


def choice(help: str, values: Callable[[], Iterable[str]], metavar: str) -> Any:
    """Declare an option that takes one of a fixed set of words, which `values` returns when they are needed."""

    def parse(text: Any) -> str:
        known = list(values())
        if text not in known:
            text = abridged(str(text), 60)
            raise typer.BadParameter(f"must be one of {', '.join(known)} but is {text!r}{did_you_mean(text, known)}")
        return str(text)

    return option(help, names=completes(values), parser=parse, metavar=metavar)


def data_option(help: str, unset: bool | str = True) -> Any:
    """Declare an option that takes a dataset, a folder or the name of a shipped one; see `option` for `unset`."""
    return option(help, unset, dataset_names, metavar="DATA")


def switch(flag: str, help: str) -> Any:
    """Declare an option that takes no value, and has no opposite."""
    return typer.Option(flag, help=help)


def count(help: str, low: int, high: int, unset: bool | str = True, *flags: str, metavar: str | None = None) -> Any:
    """Declare an option whose value is a whole number from `low` to `high`; see `option` for `unset` and `flags`."""
    shown = metavar or ("N" if high == MOST else f"{low}..{high}")
    return option(help, unset, None, *flags, parser=read_by(whole_number, low, high), metavar=shown)


def amount(help: str, low: float, high: float, unset: bool | str = True, metavar: str | None = None) -> Any:
    """Declare an option whose value is a number from `low` to `high`; see `option` for `unset`."""
    return option(help, unset, parser=read_by(number, low, high), metavar=metavar or f"{low:g}..{high:g}")


def shortlist_length(text: Any) -> Any:
    """Parse the length of a shortlist: "auto" or a whole number."""
    return "auto" if text == "auto" else read_by(whole_number, 1, MOST)(text)


def old_name(flag: str, parser: Callable[[Any], Any]) -> Any:
    """Declare the old name (`flag`) of a renamed option: it works, but `--help` does not show it."""
    return typer.Option(flag, hidden=True, parser=parser)


AsJson = Annotated[bool, switch("--json", "Print JSON to stdout instead of tables.")]
#: The forms that name a kernel family, for help texts.
FAMILY_FORMS = "its name, package.module:attribute, or path/to/file.py:attribute"
FamilyName = Annotated[str, argument("FAMILY", f"Kernel family: {FAMILY_FORMS}.", family_names)]
OnlyFamilies = Annotated[
    list[str] | None,
    option("Only this kernel family. May be repeated.", "all in the data", family_names, metavar="FAMILY"),
]
Data = Annotated[
    list[str] | None,
    data_option("Dataset: a folder, or the name of a shipped one. May be repeated.", SHIPPED),
]
Device = Annotated[
    str | None,
    option("GPU: the name of a shipped device, or its JSON file.", "this GPU", device_names, metavar="DEVICE"),
]
SameBits = Annotated[
    bool,
    switch(
        "--same-bits",
        "Choose only configs whose results have the same bits as those of one config that the family names: its "
        "default config in most families. Default: as FORETUNE_SAME_BITS says.",
    ),
]
Invariant = Annotated[
    str | None,
    option(
        "Choose only configs of one class of bits for all sizes of this dimension, so that the result of a row does "
        "not depend on the other rows. It is one that the family declares as independent; m: the first of these.",
        "none",
        dimension_names,
        metavar="DIM",
    ),
]
Dtype = Annotated[
    str | None, option("Element type, one that the family has.", "the family's first", dtype_names, metavar="DTYPE")
]
#: Tensor-parallel ranks, for a model's layer.
TensorParallel = Annotated[int, count("Number of tensor-parallel ranks that share each expert.", 1, 1024)]
Budget = Annotated[
    float | None,
    option("Stop after this time, for example 90s, 20m or 1h.", "none", parser=read_by(duration_s), metavar="DURATION"),
]
#: The bundle that predicts; `ToJudge` is one that is evaluated.
Predictor = Annotated[
    Path | None,
    option(
        "Folder of the bundle that predicts, from `foretune train`.",
        "the shipped bundle",
        None,
        "--bundle",
        metavar="FOLDER",
    ),
]
ToJudge = Annotated[
    Path | None,
    option(
        f"Evaluate the bundle in this folder, or {SHIPPED_BUNDLE!r}, instead of cross-validating.",
        "none",
        None,
        "--bundle",
        metavar=f"{SHIPPED_BUNDLE}|FOLDER",
    ),
]
#: How many configs a command lists, compiles or chooses: the k of `foretune.prune` and `foretune.shortlist`. The option
#: is not called --k, because most families have a dimension of that name.
CONFIGS = "--configs"
#: Element types of an MoE layer that the serving engines have tuned files for.
LAYER_DTYPES = ("bf16", "fp16", "fp8e4m3")


#: The layer of a serving engine: a model's, or one with these dimensions.
LayerModel = Annotated[
    str | None,
    option(
        "Model with the MoE layer of an engine: the name of a known one, or its config.json (the file or its folder).",
        names=model_names,
        metavar="MODEL",
    ),
]
Experts = Annotated[int | None, count("Number of experts, for a model that --model does not know.", 1, MOST)]
Topk = Annotated[int | None, count("Number of experts per token, for such a model.", 1, MOST)]
Hidden = Annotated[int | None, count("Hidden size, for such a model.", 1, MOST)]
Inter = Annotated[int | None, count("Intermediate size of an expert, for such a model.", 1, MOST)]
LayerDtype = Annotated[
    str,
    choice(
        "Element type of the layer or product; fp8e4m3 has scales of 128x128 blocks.",
        lambda: LAYER_DTYPES,
        "|".join(LAYER_DTYPES),
    ),
]
