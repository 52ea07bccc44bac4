"""FORETUNE_ATTACH and `foretune run --attach`: attach to the autotuners of packages as soon as they are created.

Triton's `Autotuner.__init__` is wrapped once Triton is imported. This covers all kernels: those that are decorated at
import, in a submodule that is imported late or again, or inside a function. No package is imported, and the way in
which packages are imported does not change. `Program` is the script or module that `foretune run` starts.
"""

from __future__ import annotations

import atexit
import builtins
import logging
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader, SourcelessFileLoader
from pkgutil import get_importer
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

from ...datasets import ForetuneError
from ...datasets.errors import reason_of, shown
from ..arguments import Mode, resolve_mode, warn_once

if TYPE_CHECKING:
    import triton

_log = logging.getLogger("foretune")
#: The environment variable with the packages' names, separated by commas.
VARIABLE = "FORETUNE_ATTACH"
#: The module of Triton that defines `Autotuner`.
_TRITONS = "triton.runtime.autotuner"


class _State:
    """The packages whose kernels this process attaches, and whether Triton and child processes are prepared for it."""

    names: tuple[str, ...] = ()
    used: ClassVar[set[str]] = set()  # packages with an attached autotuner
    wrapped: type | None = None  # Triton's `Autotuner`, once it is wrapped
    begun = False  # whether `_report` is registered and Triton is awaited
    follows = False  # whether child processes attach, too


def packages_of(text: str) -> tuple[str, ...]:
    """Return the names in a list of packages or modules.

    Args:
        text: The names, separated by commas.

    Raises:
        ForetuneError: One of them cannot be the name of a module, or there are none.

    >>> packages_of("fla, liger_kernel.ops")
    ('fla', 'liger_kernel.ops')
    """
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ForetuneError(f"packages must be names of modules, separated by commas, but one is {shown(name)}")
    return tuple(dict.fromkeys(names))


def is_installed(name: str) -> bool:
    """Return whether a module can be found. Neither it nor a package above it is imported.

    A module that can only be found by importing a package above it counts as installed.

    >>> is_installed("json.decoder"), is_installed("jsen"), is_installed("json.decodar")
    (True, False, False)
    """
    parts, path = name.split("."), None
    for end in range(1, len(parts) + 1):
        place = ".".join(parts[:end])
        if (module := sys.modules.get(place)) is not None:  # it may have changed its path
            path = getattr(module, "__path__", None)
        else:
            try:
                spec = _spec_of(place, path)
            except Exception:  # noqa: BLE001 - a KeyError of a namespace package in another, or of a foreign finder
                return True
            if spec is None:
                return False
            path = spec.submodule_search_locations
        if path is None:
            return end == len(parts)
    return True


def _spec_of(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
    """Return the spec that Python's finders, except `_Finder`, return for a module's name; None if it is not found.

    `path` has the folders of the parent package if it is a submodule.
    """
    finders = (one for one in list(sys.meta_path) if not isinstance(one, _Finder) and hasattr(one, "find_spec"))
    return next((spec for one in finders if (spec := one.find_spec(name, path, target)) is not None), None)


def attach_named() -> None:
    """Attach the packages that FORETUNE_ATTACH names. After an error none is attached, and one warning is given."""
    try:
        attach_packages(packages_of(os.environ[VARIABLE]))
    except Exception as error:  # noqa: BLE001 - importing Foretune must not fail
        warn_once(f"{VARIABLE}: {reason_of(error)}", ": nothing is attached")


def attach_packages(names: Sequence[str], children: bool = False) -> None:
    """Attach the autotuners of packages or modules: those that exist, and each that is created from now on.

    With FORETUNE_MODE=off nothing is done.

    Args:
        names: The packages or modules; they replace those of an earlier call.
        children: Whether processes that `multiprocessing` starts from this one by "spawn" or "forkserver" attach them,
            too, if FORETUNE_ATTACH is set. Forked ones do so anyway.

    Raises:
        ForetuneError: FORETUNE_MODE is not valid.
    """
    if resolve_mode() is Mode.OFF:
        return
    _State.names = tuple(names)
    if not _State.begun:
        _State.begun = True
        _call_after_import(_TRITONS, _wrap)
        atexit.register(_report)
    if children:
        follow_children()
    if hasattr(module := sys.modules.get(_TRITONS), "Autotuner"):
        from .launches import autotuners_among

        _wrap(module)
        named = [module for name, module in list(sys.modules.items()) if _package_of(name)]
        for tuner in autotuners_among(module for module in named if isinstance(module, ModuleType)):
            _attach(tuner)


def attach_more_packages(names: Sequence[str]) -> None:
    """Attach packages or modules in addition to those that are attached already; see `attach_packages`.

    Args:
        names: The packages or modules. Those that are not installed are left out.

    Raises:
        ForetuneError: FORETUNE_MODE is not valid.
    """
    attach_packages(tuple(dict.fromkeys((*_State.names, *filter(is_installed, names)))))


def when_imported(name: str, then: Callable[[Any], None]) -> None:
    """Call a function with a module: now if it is imported, and after each later import of it. Nothing is imported.

    Args:
        name: The module's full name.
        then: The function; it replaces that of an earlier call for this module.
    """
    _call_after_import(name, then)
    if (module := sys.modules.get(name)) is not None:
        then(module)


def _call_after_import(name: str, then: Callable[[Any], None]) -> None:
    """Call a function with a module after each import of it from now on."""
    sys.meta_path.insert(0, _Finder(name, then))


def follow_children() -> None:
    """Make child processes of `multiprocessing` do what FORETUNE_ATTACH and FORETUNE_USE say, as this process does.

    They unpickle a description of their parent process before they import its program. Unpickling `_Parent` imports
    Foretune, which reads the variables.
    """
    from multiprocessing import spawn

    if not _State.follows:
        _State.follows, describe = True, spawn.get_preparation_data
        spawn.get_preparation_data = wraps(describe)(lambda name: {**describe(name), "foretune": _Parent()})


class _Parent:
    """An object that is pickled for child processes: unpickling it calls `follow_children` there."""

    def __reduce__(self) -> Any:
        return follow_children, ()


def _report() -> None:
    """Log the packages none of whose kernels created an autotuner; called at the end of the process."""
    for name in _State.names:
        if name not in _State.used:
            _log.info("foretune: no autotuned kernel of %s was created in this process", name)


class _Finder(MetaPathFinder):
    """An import finder for one module name, which calls a function with the module each time it has been executed."""

    def __init__(self, name: str, then: Callable[[Any], None]) -> None:
        self._name, self._then = name, then

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the module's spec, with a loader that also calls the function; None for all other modules."""
        spec = _spec_of(name, path, target) if name == self._name else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_call(module: ModuleType) -> None:
                execute(module)
                self._then(module)

            spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec


def _wrap(module: Any) -> None:
    """Wrap `Autotuner.__init__` in Triton's module, so that new autotuners of the named packages are attached.

    It also warns of named packages that are not installed.
    """
    autotuner = module.Autotuner
    if autotuner is not _State.wrapped:
        _State.wrapped, create = autotuner, autotuner.__init__

        @wraps(create)  # Dynamo reads the signature
        def create_and_attach(tuner: triton.runtime.Autotuner, *args: Any, **kwargs: Any) -> None:
            create(tuner, *args, **kwargs)
            if not _is_created_by_torch():
                _attach(tuner)

        autotuner.__init__ = create_and_attach
    for name in _State.names:
        if not is_installed(name):
            warn_once(f"{VARIABLE} names {shown(name)}, which is not installed", ": no kernel of it is attached")


def _is_created_by_torch() -> bool:
    """Return whether torch (Dynamo, for a graph) is creating the autotuner now; such kernels are not attached."""
    frame = sys._getframe(2)
    while (module := str(frame.f_globals.get("__name__"))).startswith("triton.") and frame.f_back is not None:
        frame = frame.f_back
    return module.startswith("torch.")


def _package_of(module: str) -> str | None:
    """Return the first package to attach that the module named `module` belongs to; None if it belongs to none."""
    return next((name for name in _State.names if f"{module}.".startswith(f"{name}.")), None)


def _attach(tuner: triton.runtime.Autotuner) -> None:
    """Attach an autotuner if it is one of a named package and not attached. An error becomes one warning."""
    is_ours = type(tuner).__module__.partition(".")[0] == __name__.partition(".")[0]  # of `foretune.autotune`
    if (package := _package_of(tuner.base_fn.__module__)) is None or is_ours:
        return
    from .attach import attach_created

    try:
        if attach_created(tuner):
            _State.used.add(package)
            _log.info("foretune: attached %s.%s", tuner.base_fn.__module__, tuner.base_fn.__qualname__)
    except Exception as error:  # noqa: BLE001 - creating a kernel must not fail
        warn_once(f"{VARIABLE}: {tuner.base_fn.__qualname__}: {reason_of(error)}", ": it is not attached")


@dataclass(frozen=True)
class Program:
    """A script or a module that `foretune run` starts, and its command line.

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
        """Prepare this process to run the program: set environment, `sys.argv` and `sys.path`, and attach packages.

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
