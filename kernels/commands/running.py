"""The command that runs another program with Foretune attached to the kernels that it uses."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from ...datasets import ForetuneError
from ...datasets.errors import shown
from ...runtime.arguments import PIN_VARIABLE, Mode, resolve_mode
from ...runtime.arguments import VARIABLE as MODE
from ...runtime.tuning.packages import VARIABLE as ATTACH
from ...runtime.tuning.packages import Program, packages_of
from ..integrations import VARIABLE as USE
from ..integrations import length_of
from .app import command
from .options import argument, option, read_by, switch, words

MODES = tuple(mode.value for mode in Mode)
#: What `foretune run` has been given; `foretune.__main__` starts it after the command line has ended.
chosen: Program | None = None


def _project(text: str) -> str:
    """Return the value of --use if it is "inductor" or "inductor:K"; raise `ForetuneError` otherwise."""
    length_of(text)
    return text


def _file(text: str) -> str:
    """Return the absolute path of a file; raise `ForetuneError` if there is no such file."""
    if not os.path.isfile(text):
        raise ForetuneError(f"there is no file {shown(text)}")
    return os.path.abspath(text)


def _folder(text: str) -> str:
    """Return the absolute path of a folder that can be written; raise `ForetuneError` otherwise."""
    from ...datasets.files import check_folder

    if not text:
        raise ForetuneError("a folder must have a name but is ''")
    check_folder(text)
    return os.path.abspath(text)


@command(
    "run",
    "foretune run --attach fla,liger_kernel train.py --lr 1e-4",
    context_settings={"allow_interspersed_args": False},
)
def run(
    program: Annotated[str, argument("SCRIPT|MODULE", "The program to run.")],
    arguments: Annotated[
        list[str] | None, argument("ARGS", "The program's own options and arguments.", unset="none")
    ] = None,
    module: Annotated[bool, switch("-m", "The program is a module, as after `python -m`, not a script.")] = False,
    attach: Annotated[
        str | None,
        option(
            "Packages or modules, separated by commas, whose autotuned kernels get shortlists (FORETUNE_ATTACH).",
            "none",
            parser=read_by(lambda text: ",".join(packages_of(text))),
            metavar="PACKAGES",
        ),
    ] = None,
    use: Annotated[
        str | None,
        option(
            "Project that uses Foretune: torch.compile's matrix products are tuned from K predicted configs "
            "(FORETUNE_USE).",
            "none",
            words("inductor"),
            parser=read_by(_project),
            metavar="inductor[:K]",
        ),
    ] = None,
    mode: Annotated[
        str | None,
        option(
            "How predictions are used (FORETUNE_MODE); off: not at all.",
            "each function's own",
            words(*MODES),
            parser=read_by(lambda text: resolve_mode(text).value),
            metavar="|".join(MODES),
        ),
    ] = None,
    pin: Annotated[
        str | None,
        option(
            "Pin file (`foretune pin`) whose configs run; nothing is tuned (FORETUNE_PIN).",
            "none",
            parser=read_by(_file),
            metavar="FILE",
        ),
    ] = None,
    log: Annotated[
        str | None,
        option(
            "Folder of a dataset to which everything that is timed is added (FORETUNE_LOG).",
            "none",
            parser=read_by(_folder),
            metavar="DIR",
        ),
    ] = None,
) -> None:
    """Run a Python program unchanged, with Foretune attached to the kernels of packages that it uses.

    The program runs as `python` would run it, with its own exit code. Its child processes inherit the environment
    variables; those of multiprocessing also attach. For several ranks: `torchrun --no-python foretune run ...`.
    """
    global chosen
    if not module and not os.path.exists(program):
        raise typer.BadParameter(f"there is no {shown(program)}; for a module, give -m", param_hint="SCRIPT|MODULE")
    given = {ATTACH: attach, USE: use, MODE: mode, PIN_VARIABLE: pin, "FORETUNE_LOG": log}
    environment = {name: value for name, value in given.items() if value is not None}
    chosen = Program(program, tuple(arguments or ()), module, environment)
