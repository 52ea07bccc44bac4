"""`OwnKnobs`: the configs of a kernel whose knobs have other names than its family's."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..datasets import Family, ForetuneError, KernelConfig, wrong_knobs
from ..datasets.errors import check_word, shown
from ..datasets.family import with_defaults

if TYPE_CHECKING:
    import triton

_REMEDY = (
    "a kernel with other knobs than the family's needs prune(..., knobs={its own name: the family's}, "
    "fixed={what it lacks: the value that it has there})"
)


class OwnKnobs:
    """Turns a kernel's configs into its family's: `names` says what the family calls the kernel's knobs, and `fixed`
    which value stands for a knob that the kernel lacks. (For those in `Family.default_knobs` the family knows.)

    Raises `ForetuneError` for a knob that the family has not, and for one that is said twice.
    """

    def __init__(self, family: Family, names: Mapping[str, str] | None, fixed: Mapping[str, Any] | None) -> None:
        self._family, self._names, self._fixed = family, _mapping("knobs", names), _mapping("fixed", fixed)
        for theirs in self._names.values():
            check_word("each of knobs", theirs)
        said = [*self._names.values(), *self._fixed]
        for knob in said:
            if knob not in family.knobs:
                raise ForetuneError(f"{shown(knob)} is no knob of {family.name}; it has {', '.join(family.knobs)}")
            if said.count(knob) > 1:
                raise ForetuneError(f"{knob} is said more than once by knobs and fixed")
        KernelConfig.of(**self._fixed)

    def config(self, config: triton.Config) -> KernelConfig:
        """A config in the family's words. Raises `ForetuneError` where that is none of the family's."""
        found = KernelConfig.from_triton(config)
        if self._names or self._fixed:
            own = found.to_json()
            taken = [self._names.get(knob, knob) for knob in own] + [*self._fixed]
            if twice := [knob for knob in taken if taken.count(knob) > 1]:
                raise ForetuneError(f"{twice[0]} is said more than once by the config {found}, knobs and fixed")
            found = KernelConfig.of(**dict(zip(taken, [*own.values(), *self._fixed.values()], strict=True)))
        found = with_defaults(self._family, found)
        if (wrong := wrong_knobs(self._family, found)) is not None:
            raise ForetuneError(f"{wrong}; {_REMEDY}")
        return found

    def check(self, configs: Sequence[triton.Config]) -> None:
        """Raises `ForetuneError` for configs of which one is none of the family's, and for none at all."""
        if not isinstance(configs, Collection) or isinstance(configs, (str, bytes)) or not len(configs):
            raise ForetuneError(f"configs must be a list of triton.Configs, at least one, but is {shown(configs)}")
        for config in configs:
            self.config(config)

    def usable(self, configs: Sequence[triton.Config]) -> tuple[tuple[int, ...], tuple[KernelConfig, ...]]:
        """The positions of those that are the family's, and what they are. Raises `ForetuneError` where none is."""
        found: dict[int, KernelConfig] = {}
        trouble = ForetuneError("the launch has no configs")
        for position, config in enumerate(configs):
            try:
                found[position] = self.config(config)
            except ForetuneError as error:  # noqa: PERF203 - as what `supports` refuses: the others are ranked without it
                trouble = error
        if not found:
            raise trouble
        return tuple(found), tuple(found.values())


def _mapping(name: str, value: Any) -> dict[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise ForetuneError(f"{name} must map knobs' names but is {shown(value)}")
    return {check_word(f"each name in {name}", key): one for key, one in (value or {}).items()}
