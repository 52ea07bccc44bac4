"""What the words of a command line stand for: problems, devices, families, datasets, bundles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer
from typer.core import TyperCommand

from ...datasets import DeviceSpec, Family, ForetuneError, Problem
from ...datasets.console import whole_number
from ...datasets.errors import abridged, warn
from ...datasets.log_part import LOGGED
from ...datasets.progress import share_of, showing
from .. import families, find_family
from .app import GIVEN
from .options import SHIPPED, given_as

if TYPE_CHECKING:
    from ...datasets.dataset import Dataset
    from ...model.bundle import Bundle

T = TypeVar("T")


def taken_by(family: Family) -> str:
    """Return what `predict` takes for a family."""
    needed = [f"--{dim} N" for dim in family.dims if dim not in family.default_dims]
    usual = [f"[--{dim} {size}]" for dim, size in family.default_dims.items()]
    flags = [f"[--{flag}]" for flag in family.flags]
    return f"{family.name} takes {' '.join(needed + usual + flags)} [--dtype {'|'.join(family.dtypes)}]"


def _dimensions(arguments: Sequence[str], family: Family) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return the numbers and flags of `--rows 8192 --n=2048 --permute_x`, if they are the family's, each once."""
    parts = [part for argument in arguments for part in argument.split("=", 1)]
    dims: dict[str, int] = {}
    flags: list[str] = []
    while parts:
        option = parts.pop(0)
        name = option.removeprefix("--")
        if name == option or name in dims or name in flags or name not in (*family.dims, *family.flags):
            raise typer.BadParameter(f"{abridged(option, 60)!r} is unknown or given twice; {taken_by(family)}")
        if name in family.flags:
            flags.append(name)
        else:
            dims[name] = given_as(option, whole_number, parts.pop(0) if parts else "")
    dims = {**family.default_dims, **dims}
    if missing := [f"--{dim}" for dim in family.dims if dim not in dims]:
        raise typer.BadParameter(f"{' '.join(missing)} missing; {taken_by(family)}")
    return dims, tuple(flags)


def problem_of(arguments: Sequence[str], family: Family, dtype: str | None) -> Problem:
    """Return the problem that these words name, of a dtype of the family."""
    dims, flags = _dimensions(arguments, family)
    dtype = dtype or family.dtypes[0]
    if dtype not in family.dtypes:
        raise typer.BadParameter(
            f"{abridged(dtype, 60)!r} is not one of {', '.join(family.dtypes)}", param_hint="--dtype"
        )
    return Problem(family.name, tuple(sorted(dims.items())), dtype, tuple(sorted(flags)))


def live_gpu() -> DeviceSpec | None:
    """Return this machine's GPU, or None."""
    try:
        return DeviceSpec.live()
    except ForetuneError:
        return None


def gpu_needed(what: str) -> DeviceSpec:
    """Return this machine's GPU. Raises `ForetuneError` that says what cannot be done without one."""
    if (gpu := live_gpu()) is None:
        raise ForetuneError(f"no GPU is visible here: there is nothing to {what} on")
    return gpu


def device_or_this_gpu(device: str | None) -> DeviceSpec:
    """Return the device that --device names, else this machine's GPU."""
    if device is not None:
        return DeviceSpec.find(device)
    try:
        return DeviceSpec.live()
    except ForetuneError as error:
        raise ForetuneError(
            f"{error}. Give one with --device, or the file that `foretune device --out FILE` writes where the GPU is"
        ) from None


def bundle_at(path: Path | None) -> Bundle | None:
    """Return the bundle that --bundle names, or None."""
    from ...model import load_bundle

    return None if path is None else load_bundle(path)


def load_all(data: Sequence[str] | None) -> Dataset:
    """Return one dataset, or several merged."""
    from ...datasets import load

    loaded = [load(one) for one in data or [SHIPPED]]
    if len(loaded) == 1:
        return loaded[0]
    from ...datasets.merge import merge_datasets

    return merge_datasets(loaded, name="+".join(one.name for one in loaded))


def families_of(dataset: Dataset, only: Iterable[str] | None = None) -> dict[str, Family]:
    """Return the families of a dataset by name, or only those that `only` names.

    Kernels that were only logged while they were tuned, and that no family declares, are left out with a warning if
    there are others.

    Raises:
        ForetuneError: A family is not registered. The message tells the user to pass `--family package.module:Class`.
    """
    names = list(only or dataset.families)
    undeclared = [] if only else [name for name in names if _is_undeclared(dataset, name)]
    if undeclared and len(undeclared) == len(names):
        raise ForetuneError(
            f"{dataset.name} has logged times of {_few(undeclared)}, for which no family is registered: pass --family "
            "package.module:Class. What an attached kernel without a family learned is in the choice cache"
        )
    if undeclared:
        warn(
            f"{dataset.name}: the logged times of {_few(undeclared)} are left out, because no family is registered for "
            "them"
        )
    unknown = [] if only else [name for name in names if name not in undeclared and name not in families()]
    if unknown:
        raise ForetuneError(
            f"{dataset.name} has measurements of {_few(unknown)}, for which no family is registered: pass --family "
            "package.module:Class (once for each family to use), or register the family with foretune.register or an "
            "entry point"
        )
    found = [find_family(name) for name in names if name not in undeclared]
    return {family.name: family for family in found}


def _is_undeclared(dataset: Dataset, name: str) -> bool:
    return name not in families() and dataset.plans(name) == {LOGGED}


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more


def judged_families(dataset: Dataset, only: Iterable[str] | None, bundle: Bundle | None) -> dict[str, Family]:
    """Return the families in a dataset that can be judged: with a bundle, those that it has."""
    families = families_of(dataset, only)
    kernels = {name: family for name, family in families.items() if bundle is None or name in bundle.families}
    if not kernels:
        raise ForetuneError(f"the bundle has none of the families in {dataset.name}: {', '.join(dataset.families)}")
    return kernels


def for_each_family(
    call: Callable[[Family], T], dataset: Dataset, families: Mapping[str, Family], what: str, row_s: float
) -> dict[str, T]:
    """Call a function for each family, and show the progress."""
    rows, found = rows_of(dataset, families), dict[str, T]()
    with showing(what, row_s * rows) as say:
        for name, family in families.items():
            say(f"{name}: {what}")
            with share_of(len(dataset.rows(name)) / rows):
                found[name] = call(family)
    return found


def rows_of(dataset: Dataset, families: Iterable[str]) -> int:
    return sum(len(dataset.rows(name)) for name in families)


class DimensionsCommand(TyperCommand):
    """A command that takes a family's dimensions. Its help, asked for with a family, says which these are."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        for word in ctx.meta[GIVEN]:
            if word != self.name and not word.startswith("-"):
                with suppress(ForetuneError):
                    typer.echo(f" {taken_by(find_family(word))}\n")


#: The settings of a command that takes a family's dimensions as options of their own.
TAKES_DIMENSIONS: dict[str, Any] = {
    "cls": DimensionsCommand,
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
}
