"""Launchers of a product's plain and warp-specialized kernel, and the size of its grid. Needs triton."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, TypeAlias

from ..runtime.launching.launcher import Launcher

if TYPE_CHECKING:
    import torch

    from ..datasets import KernelConfig

#: A function that launches a kernel on the tensors of one call.
Launch: TypeAlias = "Callable[[Sequence[torch.Tensor | None]], None]"


class Launchers:
    """The launchers of a product: of its plain kernel, and of the warp-specialized one that configs with CONSUMERS run.

    A kernel is imported when it is first launched, because Triton takes 2 ms to read its source, and because
    warp-specialized ones need Gluon.

    Args:
        package: The package of the kernels' modules.
        plain: The module and the name of the plain kernel, ".module:kernel".
        specialized: The same of the warp-specialized kernel.
    """

    def __init__(self, package: str, plain: str, specialized: str) -> None:
        self._package, self._places = package, (plain, specialized)
        self.made: dict[str, Launcher] = {}  # by the module and the name of its kernel

    def of(self, config: KernelConfig) -> Launcher:
        """Return the launcher of the kernel that a config runs."""
        place = self._places[config["CONSUMERS"] > 0]
        found = self.made.get(place)
        if found is None:
            module, _, name = place.partition(":")
            found = self.made[place] = Launcher(getattr(import_module(module, self._package), name))
        return found


def programs_of(tiles: int, config: KernelConfig, sm_count: int) -> int:
    """Return the number of programs of a launch: PROGRAMS_PER_SM on each of `sm_count` SMs, or if 0 one per tile."""
    programs: int = sm_count * config["PROGRAMS_PER_SM"]
    return min(programs or tiles, tiles)
