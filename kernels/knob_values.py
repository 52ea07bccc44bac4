"""`KnobValues`: a space as a dictionary, {knob: values}, and what of a config is not in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from ..datasets import KernelConfig


class KnobValues:
    """The values that each knob of a family may have, all of them integers, launch options among them.

    >>> knobs = KnobValues("row_softmax", {"BLOCK": [64, 128], "num_warps": [4], "num_stages": [3]})
    >>> [config["BLOCK"] for config in knobs.grid()]
    [64, 128]
    >>> knobs.wrong(KernelConfig.of(BLOCK=96))
    'BLOCK cannot be 96: 64, 128'
    """

    def __init__(self, family: str, values: Mapping[str, Sequence[int]]) -> None:
        self._family, self._values = family, {**values, "num_ctas": [1]}
        self._pairs = frozenset((knob, value) for knob, each in self._values.items() for value in each)

    def grid(self) -> Iterator[KernelConfig]:
        """Every combination."""
        for values in product(*self._values.values()):
            yield KernelConfig.of(**dict(zip(self._values, values, strict=True)))

    def wrong(self, config: KernelConfig) -> str | None:
        """The reason why a config is none of these, or None; it names the knob and the values that would do."""
        knobs = config.to_json()
        are_integers = set(map(type, knobs.values())) == {int}  # not True, which is 1, and not 64.0
        if are_integers and len(knobs) == len(self._values) and knobs.items() <= self._pairs:
            return None
        if unknown := sorted(knobs.keys() - self._values.keys()):
            return f"{unknown[0]} is no knob of {self._family}; it has {', '.join(self._values)}"
        for knob, values in self._values.items():
            words = ", ".join(map(str, values))
            if knob not in knobs:
                return f"{knob} is missing: {words}"
            if type(knobs[knob]) is not int or knobs[knob] not in values:
                return f"{knob} cannot be {knobs[knob]!r}: {words}"
        return None
