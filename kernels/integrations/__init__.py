"""`use`: Foretune inside projects that people train and compile models with.

A module is imported by the call that needs it, and imports its project only then. What installs Foretune in a project
returns the function that takes it out again, or raises `ForetuneError` that names the version it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from threading import Lock
from typing import Any

from ...datasets import ForetuneError
from ...datasets.errors import shown

__all__ = ["Use", "use"]

#: Each with what installs Foretune in it, a function of a module of this package, and the options that it takes.
_PROJECTS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "inductor": (".inductor", "install", ("k", "bundle")),
    "torchtitan": (".experts", "install_torchtitan", ()),
    "transformers": (".experts", "install_transformers", ()),
}
_lock = Lock()
_users: dict[str, int] = {}  # the uses of each project that are not undone
_options: dict[str, dict[str, Any]] = {}  # with which they were asked for
_removers: dict[str, Callable[[], None]] = {}


def use(project: str, **options: Any) -> Use:
    """Puts Foretune into a project: for good, until `undo()`, or for a `with` block.

    "inductor" (torch 2.11 to 2.13): `torch.compile` under max_autotune generates, compiles and times the `k` (8 if left
    out) choices of mm, addmm, bmm, scaled_mm, grouped_mm, convolution and flex attention that are predicted to be
    fastest, of whatever search space it is told, and ATen's as ever; 2k while nothing is learned of an op. `bundle` is
    what predicts, or its folder (the shipped one if left out). What Inductor times on a GPU meanwhile is timed by
    `foretune.runtime.Timer`. Graphs that Inductor has in its caches count as others. Where this torch has no such
    seams, or there is no prediction, Inductor chooses as ever, with one warning.

    "transformers" (5.7 or later): an experts implementation of the name "foretune", for
    `model.set_experts_implementation("foretune")` and `from_pretrained(..., experts_implementation="foretune")`.

    "torchtitan" (0.3 or later): `GroupedExperts._grouped_mm`, so all experts that multiply through it, also those of
    models that are already built.

    Used twice, a project keeps Foretune until both are undone. Raises `ForetuneError` listing the projects where there
    is none of that name, naming the version that is needed where the installed one is too old, or none is there, and
    for options that the project does not take, or that differ from those that it is used with already.

    >>> use("keras")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    foretune.datasets.errors.ForetuneError: Foretune can be used in inductor, torchtitan or ... not in 'keras'
    """
    if not isinstance(project, str) or project not in _PROJECTS:
        *others, last = _PROJECTS
        raise ForetuneError(f"Foretune can be used in {', '.join(others)} or {last} but not in {shown(project)}")
    module, install, able = _PROJECTS[project]
    if unknown := [name for name in options if name not in able]:
        known = ", ".join(able) or "no options"
        raise ForetuneError(f"foretune.use({project!r}) takes {known}, and not {unknown[0]}")
    with _lock:
        if not _users.get(project):
            _removers[project] = getattr(import_module(module, __name__), install)(**options)
            _options[project] = options
        elif options != _options[project]:
            given = ", ".join(f"{name}={shown(value)}" for name, value in _options[project].items()) or "no options"
            raise ForetuneError(f"{project} uses Foretune already, with {given}: undo that before it has others")
        _users[project] = _users.get(project, 0) + 1
    return Use(project)


class Use:
    """One use of Foretune in a project; `use` makes it."""

    def __init__(self, project: str) -> None:
        self.project, self.undone = project, False

    def undo(self) -> None:
        """Ends it. The last use of a project that ends restores what was there before. Twice is the same as once."""
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
