"""`foretune.use`: make projects that train or compile models use Foretune; so does the variable FORETUNE_USE.

The module for a project is imported by the call that needs it, and only then imports the project. Its install function
returns a function that removes Foretune again, or raises `ForetuneError` with the project's required version.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from inspect import signature
from threading import Lock
from typing import Any

from ...datasets import ForetuneError
from ...datasets.errors import reason_of, shown
from ...runtime.arguments import Mode, resolve_mode, warn_once
from ...runtime.how_many import Length, check_length
from ...runtime.tuning.packages import follow_children, when_imported

__all__ = ["VARIABLE", "Use", "length_of", "use", "use_named"]

#: The environment variable with the project's name, as `length_of` reads it.
VARIABLE = "FORETUNE_USE"
#: The module that `torch.compile` imports before it compiles anything with Inductor.
_COMPILER = "torch._inductor.compile_fx"

#: Per project: the module of this package, its install function, and the options that this function takes.
_PROJECTS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "inductor": (".inductor", "install", ("k", "bundle")),
    "torchtitan": (".experts", "install_torchtitan", ()),
    "transformers": (".experts", "install_transformers", ()),
}
_lock = Lock()
_users: dict[str, int] = {}  # per project, how many uses are active
_options: dict[str, dict[str, Any]] = {}  # per project, the options of the active uses
_removers: dict[str, Callable[[], None]] = {}


def use(project: str, **options: Any) -> Use:
    """Make a project use Foretune until `undo()`, or for a `with` block.

    - "inductor" (torch 2.11 to 2.13): under max_autotune or max_autotune_gemm, `torch.compile` generates, compiles and
      times only ATen's choices and the `k` predicted fastest of the configured search space, for each mm, addmm, bmm,
      scaled_mm, grouped_mm, convolution and flex attention. An op that the bundle has not learned gets 2k choices,
      ranked by an analytic model. With k="auto" there are as many as are expected to pay, at most 8, and none of a
      product for which ATen is expected to be faster. With k=1 each op has one choice left, ATen's or the one predicted
      fastest, and nothing is timed, except on an arch that the bundle does not know. In every mode of `torch.compile`,
      generated reductions get at most 3 predicted configs and the best of Inductor's own, or one with k=1. Meanwhile
      Inductor's GPU benchmarks use `foretune.runtime.Timer`. Inductor's caches keep these graphs apart from others. If
      this torch has other internals, or nothing can be predicted, Inductor chooses alone, with one warning.
    - "transformers" (5.7 or later): registers the experts implementation "foretune", for
      `model.set_experts_implementation("foretune")` and `from_pretrained(..., experts_implementation="foretune")`;
      also for experts in block-scaled fp8, if this version has a registry for them.
    - "torchtitan" (0.3 or later): replaces `GroupedExperts._grouped_mm`, also for models that are already built.

    A project that is used several times keeps Foretune until all uses are undone.

    Args:
        project: "inductor", "torchtitan" or "transformers".
        options: Only for "inductor": `k`, the number of choices (8 by default) or "auto", and `bundle`, the bundle that
            predicts or its folder (the shipped one by default).

    Returns:
        The use, with a method `undo`; also a context manager.

    Raises:
        ForetuneError: The project is unknown, or not installed in the required version; it does not take an option; or
            it is already in use with other options.

    >>> use("keras")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    foretune.datasets.errors.ForetuneError: Foretune can be used in inductor, torchtitan or ... not in 'keras'
    """
    if not isinstance(project, str) or project not in _PROJECTS:
        *others, last = _PROJECTS
        raise ForetuneError(f"Foretune can be used in {', '.join(others)} or {last} but not in {shown(project)}")
    module, function, able = _PROJECTS[project]
    if unknown := [name for name in options if name not in able]:
        known = ", ".join(able) or "no options"
        raise ForetuneError(f"foretune.use({project!r}) takes {known}, but not {unknown[0]}")
    with _lock:
        install = getattr(import_module(module, __name__), function)
        options = {name: one.default for name, one in signature(install).parameters.items()} | options
        if not _users.get(project):
            _removers[project] = install(**options)
            _options[project] = options
        elif options != _options[project]:
            given = ", ".join(f"{name}={shown(value)}" for name, value in _options[project].items()) or "no options"
            raise ForetuneError(
                f"{project} already uses Foretune with {given}: undo that use before choosing other options"
            )
        _users[project] = _users.get(project, 0) + 1
    return Use(project)


class Use:
    """One use of Foretune in a project, returned by `use`; as a context manager it ends with the block."""

    def __init__(self, project: str) -> None:
        self.project, self.undone = project, False

    def undo(self) -> None:
        """End this use; a second call does nothing. Ending a project's last use restores its original state."""
        with _lock:
            if self.undone:
                return
            self.undone = True
            _users[self.project] -= 1
            if not _users[self.project]:
                _removers.pop(self.project)()

    def __enter__(self) -> Use:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"<Use of Foretune in {self.project}{', undone' if self.undone else ''}>"


def length_of(text: str) -> Length | None:
    """Return the k of "inductor:K"; None for "inductor", which has the default k.

    Raises:
        ForetuneError: The text is neither.

    >>> length_of("inductor:4"), length_of("inductor:auto"), length_of("inductor")
    (4, 'auto', None)
    """
    project, colon, k = text.partition(":")
    if project != "inductor":
        raise ForetuneError(f"the project must be inductor or inductor:K but is {shown(text)}")
    return check_length(int(k) if k.isdecimal() else k) if colon else None


def use_named() -> None:
    """Make this process, and its children, use Foretune in Inductor when they import it, with the k of FORETUNE_USE.

    Then all matrix products are tuned as with the options max_autotune_gemm and
    max_autotune_gemm_search_space="EXHAUSTIVE". With FORETUNE_MODE=off nothing is done. After an error nothing is done
    either, with one warning.
    """
    try:
        if resolve_mode() is Mode.OFF:
            return
        k = length_of(os.environ[VARIABLE])
        follow_children()
        when_imported(_COMPILER, lambda _: _use_in_inductor(k))
    except Exception as error:  # noqa: BLE001 - importing Foretune must not fail
        warn_once(f"{VARIABLE}: {reason_of(error)}", ": it is not used")


def _use_in_inductor(k: Length | None) -> None:
    """Enable `use("inductor", k=k)` and Inductor's tuning of matrix products; an error becomes one warning.

    `k` is the number of choices that Inductor tries; None for the default.
    """
    try:
        from torch._inductor import config

        settings: Any = config
        before = settings.inductor_choices_class
        use("inductor", **({} if k is None else {"k": k}))
        if settings.inductor_choices_class is not before:  # otherwise nothing would limit the exhaustive list
            settings.max_autotune_gemm, settings.max_autotune_gemm_search_space = True, "EXHAUSTIVE"
    except Exception as error:  # noqa: BLE001 - the program's import must not fail
        warn_once(f"{VARIABLE}: {reason_of(error)}", ": Inductor does not use Foretune")
