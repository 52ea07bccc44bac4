"""Turn the words of a command line into problems, devices, families, datasets and bundles."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from ...datasets import DeviceSpec, Family, ForetuneError, Problem
from ...datasets.console import whole_number
from ...datasets.errors import MOST, abridged, did_you_mean, printable
from ...datasets.files import find_modules_here
from ...datasets.problem import similar_dtype
from ...datasets.progress import share_of, showing
from .. import families, find_family
from ..model_config import is_config, read_moe_config
from .app import GIVEN, Command
from .options import SHIPPED_BUNDLE, given_as

if TYPE_CHECKING:
    from ...datasets.dataset import Dataset
    from ...model.bundle import Bundle
    from ..workloads import Model

T = TypeVar("T")


def taken_by(family: Family) -> str:
    """Return one line that lists the options of `predict` for a family."""
    needed = [f"--{dim} N" for dim in family.dims if dim not in family.default_dims]
    usual = [f"[--{dim} {size}]" for dim, size in family.default_dims.items()]
    flags = [f"[--{flag}]" for flag in family.flags]
    return f"{family.name} takes {' '.join(needed + usual + flags)} [--dtype {'|'.join(family.dtypes)}]"


def _dimensions(
    arguments: Sequence[str], family: Family, options: Iterable[str]
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Parse words such as `--rows 8192 --n=2048 --permute_x` into sizes and flags of the family, each given once.

    Names may have dashes instead of underscores, as the other options do: `--permute-x`.
    `options` are the names of the command's own options, without dashes, which an error may suggest.
    """
    parts = [part for argument in arguments for part in argument.split("=", 1)]
    dims: dict[str, int] = {}
    flags: list[str] = []
    while parts:
        option = parts.pop(0)
        name = option.removeprefix("--").replace("-", "_")
        if not option.startswith("--") or name not in (*family.dims, *family.flags):
            hint = did_you_mean(name, (*family.dims, *family.flags, *options), prefix="--")
            raise typer.BadParameter(f"{abridged(option, 60)!r} is not an option{hint}; {taken_by(family)}")
        if name in dims or name in flags:
            raise typer.BadParameter(f"{option!r} is given twice; {taken_by(family)}")
        if name in family.flags:
            flags.append(name)
        else:
            bounds = family.smallest.get(name, 1), min(family.largest.get(name, MOST), MOST)
            dims[name] = given_as(option, whole_number, parts.pop(0) if parts else "", *bounds)
    dims = {**family.default_dims, **dims}
    if missing := [f"--{dim}" for dim in family.dims if dim not in dims]:
        raise typer.BadParameter(f"{' '.join(missing)} missing; {taken_by(family)}")
    return dims, tuple(flags)


def problem_of(context: typer.Context, family: Family, dtype: str | None, *more: str) -> Problem:
    """Return the problem that a command line's options, and the further words in `more` ("--rows=64"), describe.

    Raises:
        typer.BadParameter: A dimension is missing, unknown or given twice, or the family lacks the dtype.
    """
    shown = (one for one in context.command.params if not getattr(one, "hidden", False))
    options = [name.removeprefix("--") for one in shown for name in one.opts if name.startswith("--")]
    dims, flags = _dimensions([*context.args, *more], family, options)
    dtype = dtype or family.dtypes[0]
    check_dtype(dtype, family.dtypes)
    return Problem(family.name, tuple(sorted(dims.items())), dtype, tuple(sorted(flags)))


def check_dtype(dtype: str, known: Collection[str]) -> None:
    """Raise `typer.BadParameter` unless the value of --dtype is one of `known`, which the message lists."""
    if dtype not in known:
        raise typer.BadParameter(
            f"{abridged(dtype, 60)!r} is not one of {', '.join(known)}{similar_dtype(dtype, known)}",
            param_hint="--dtype",
        )


def model_named(word: str) -> Model:
    """Return the MoE model that --model names, and print what was read if it is a config.json."""
    from ..workloads import find_model

    model = find_model(word)
    show_config(word)
    return model


def show_config(path: Path | str | None) -> None:
    """Print the layer sizes that the model config at `path` gives; do nothing if `path` is not a config.json."""
    if path is not None and is_config(path):
        typer.echo(printable(read_moe_config(path).line), err=True)


def names_kernel(name: str) -> bool:
    """Return whether a word names a kernel, package.module.kernel, or a package of kernels, and not a family."""
    if name in families() or ":" in name:
        return False
    find_modules_here()
    try:
        return "." in name or find_spec(name) is not None
    except ValueError:  # not a valid module name
        return False


def live_gpu() -> DeviceSpec | None:
    """Return this machine's GPU, or None if there is none."""
    try:
        return DeviceSpec.live()
    except ForetuneError:
        return None


def gpu_needed(what: str) -> DeviceSpec:
    """Return this machine's GPU.

    Raises:
        ForetuneError: There is none; the message says that `what` needs one.
    """
    if (gpu := live_gpu()) is None:
        raise ForetuneError(f"no GPU is visible here, and {what} needs one")
    return gpu


def device_or_this_gpu(device: str | None) -> DeviceSpec:
    """Return the device that --device names, or this machine's GPU without --device."""
    if device is not None:
        return DeviceSpec.find(device)
    try:
        return DeviceSpec.live()
    except ForetuneError as error:
        raise ForetuneError(
            f"{error}. Name a device with --device, or give the file that `foretune device --out FILE` writes where "
            "the GPU is"
        ) from None


def bundle_at(path: Path | None) -> Bundle | None:
    """Return the bundle that --bundle names, or None without --bundle.

    "shipped" names the shipped bundle, unless there is a folder of this name.
    """
    from ...model import load_bundle

    if path is None:
        return None
    return load_bundle(None if str(path) == SHIPPED_BUNDLE and not path.exists() else path)


def bundle_for(path: Path | None, family: Family) -> Bundle | None:
    """Return the bundle that --bundle names, or None without it; warn if it was trained for another kernel source.

    Raises:
        BundleError: It cannot be read, or lacks the family.
    """
    from ...model import check_trained_source

    bundle = bundle_at(path)
    if bundle is not None:
        bundle.trained_on(family.name)  # refuses a bundle without the family
        check_trained_source(bundle.trained[family.name].origin, family)
    return bundle


def for_each_family(
    call: Callable[[Family], T], dataset: Dataset, families: Mapping[str, Family], what: str, row_s: float
) -> dict[str, T]:
    """Return what a function returns for each family, and show the progress.

    Args:
        call: The function.
        dataset: The dataset; each family's share of the progress is its share of the rows.
        families: The families, by name.
        what: What is done, for the progress line.
        row_s: Expected seconds per measurement.
    """
    rows, found = rows_of(dataset, families), dict[str, T]()
    with showing(what, row_s * rows) as say:
        for name, family in families.items():
            say(f"{name}: {what}")
            with share_of(len(dataset.rows(name)) / rows):
                found[name] = call(family)
    return found


def rows_of(dataset: Dataset, families: Iterable[str]) -> int:
    """Return the number of measurements of these families in a dataset."""
    return sum(len(dataset.rows(name)) for name in families)


class DimensionsCommand(Command):
    """A command that takes a family's dimensions as options; its help for a family begins with these options."""

    def write_dimensions(self, ctx: Any, formatter: Any) -> None:
        """Write the options of the family that the command line names, if any."""
        if (family := self._family(ctx)) is not None:
            formatter.write_paragraph()
            with formatter.indentation():
                formatter.write_text(taken_by(family))

    def example(self, ctx: Any) -> str | None:
        """Return the example, unless the command line names another family than the example's."""
        family = self._family(ctx)
        return self.epilog if family is None or family.name in str(self.epilog).split() else None

    def _family(self, ctx: Any) -> Family | None:
        """Return the family that the command line names, or None."""
        word = next((word for word in ctx.meta[GIVEN] if word != self.name and not word.startswith("-")), None)
        with suppress(ForetuneError):
            return None if word is None else find_family(word)
        return None


#: Settings of a command that takes a family's dimensions as further options.
TAKES_DIMENSIONS: dict[str, Any] = {
    "cls": DimensionsCommand,
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
}
