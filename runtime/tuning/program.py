"""`Program`: a Python program that runs in this process as `python` would run it, for `foretune run`."""

from __future__ import annotations

import builtins
import os
import runpy
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from pkgutil import get_importer
from types import ModuleType, TracebackType
from typing import Any

from ...datasets import ForetuneError
from ...datasets.errors import shown
from .packages import VARIABLE, attach_packages, is_installed, packages_of


@dataclass(frozen=True)
class Program:
    """A script or a module, and its command line.

    Attributes:
        target: The path of a script, or of a folder or archive with a `__main__.py`; or the name of a module.
        arguments: The words after it.
        is_module: Whether `target` is the name of a module, as after `python -m`.
        environment: Environment variables for the program and its child processes.
    """

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)

    def prepare(self) -> None:
        """Make this process the program's: set its environment, `sys.argv` and `sys.path`, and attach its packages.

        Exits with a message if a package is not installed or FORETUNE_MODE is not valid.
        """
        sys.argv = ["-m" if self.is_module else self.target, *self.arguments]
        if not getattr(sys.flags, "safe_path", sys.flags.isolated):  # with `python -P`, no entry is the program's
            sys.path[0] = self._folder()
        os.environ.update(self.environment)
        try:
            for name in packages_of(self.environment[VARIABLE]) if VARIABLE in self.environment else ():
                if not is_installed(name):
                    raise ForetuneError(f"{shown(name)} is not installed, so it cannot be attached")
            if names := os.environ.get(VARIABLE):
                attach_packages(packages_of(names), children=True)
        except ForetuneError as error:
            sys.exit(f"Error: {error}")

    def run(self) -> None:
        """Run the program as this process's `__main__`, which it stays afterwards.

        Exceptions and `SystemExit` are the program's. Tracebacks that Python prints begin in the program.
        """
        try:
            self._execute()
        except SystemExit:
            raise
        except BaseException:
            print_exception = sys.excepthook  # perhaps one that the program has set
            sys.excepthook = lambda kind, error, trace: print_exception(kind, *_in_program(error, trace))
            raise

    def _folder(self) -> str:
        """Return the first entry of the program's `sys.path`."""
        if self.is_module:
            return os.getcwd()
        return os.path.abspath(self.target) if self._has_main() else os.path.dirname(os.path.realpath(self.target))

    def _has_main(self) -> bool:
        """Return whether `target` is a folder or an archive, whose `__main__.py` is run."""
        return get_importer(self.target) is not None

    def _execute(self) -> None:
        main = sys.modules["__main__"] = ModuleType("__main__")
        names = vars(main)
        names["__builtins__"] = builtins
        if self.is_module:
            runpy._run_module_as_main(self.target)  # type: ignore[attr-defined]  # what `python -m` calls
        elif self._has_main():
            runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        else:
            path = os.path.abspath(self.target)
            loader = (SourcelessFileLoader if path.endswith(".pyc") else SourceFileLoader)("__main__", path)
            names.update(__file__=path, __cached__=None, __loader__=loader)
            if isinstance(loader, SourcelessFileLoader):
                code: Any = loader.get_code("__main__")
            else:  # the loader's own `get_code` would look for a .pyc file
                code = compile(loader.get_data(path), path, "exec", dont_inherit=True)
            exec(code, names)


def _in_program(error: BaseException, trace: TracebackType | None) -> tuple[BaseException, TracebackType | None]:
    """Return an exception and its traceback without the frames that started the program."""
    ours = Program._execute.__code__
    entry = trace
    while entry is not None and entry.tb_frame.f_code is not ours:
        entry = entry.tb_next
    trace = trace if entry is None else entry.tb_next
    return error.with_traceback(trace), trace
