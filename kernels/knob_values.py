"""`KnobValues`: a space as a dictionary, {knob: values}, and what of a config is not in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, TypeAlias

from ..datasets import KernelConfig

#: A config, or knobs by name, which are quicker to make and to look up; of several configs, arrays of integers, where
#: what follows from them may be arrays as well.
Knobs: TypeAlias = KernelConfig | Mapping[str, Any]


class KnobValues:
    """The values that each knob of a family may have, all of them integers, launch options among them; `words` says
    which they are of knobs that have many.

    >>> knobs = KnobValues("row_softmax", {"BLOCK": [64, 128], "num_warps": [4], "num_stages": [3]})
    >>> [config["BLOCK"] for config in knobs.grid()]
    [64, 128]
    >>> knobs.wrong(KernelConfig.of(BLOCK=96).to_json())
    'BLOCK cannot be 96: 64, 128'
    """

    def __init__(
        self, family: str, values: Mapping[str, Sequence[int]], words: Mapping[str, str] | None = None
    ) -> None:
        self._family, self._values = family, values
        self._words = {knob: ", ".join(map(str, each)) for knob, each in values.items()} | dict(words or {})
        self._pairs = frozenset((knob, value) for knob, each in values.items() for value in each) | {("num_ctas", 1)}

    @classmethod
    def in_words(cls, family: str, valid: Mapping[str, tuple[str, Sequence[int]]]) -> KnobValues:
        """Knobs with (which values they may have in words, the values).

        >>> knobs = KnobValues.in_words("row_softmax", {"BLOCK": ("a multiple of 32", range(32, 4096, 32))})
        >>> knobs.wrong({"BLOCK": 48, "num_ctas": 1})
        'BLOCK cannot be 48: a multiple of 32'
        """
        words = {knob: said for knob, (said, _) in valid.items()}
        return cls(family, {knob: values for knob, (_, values) in valid.items()}, words)

    def grid(self, is_of_use: Callable[[Mapping[str, int]], bool] = lambda knobs: True) -> Iterator[KernelConfig]:
        """Every combination that is of use."""
        for values in product(*self._values.values()):
            knobs = dict(zip(self._values, values, strict=True))
            if is_of_use(knobs):
                yield KernelConfig.of(**knobs)

    def wrong(self, knobs: Mapping[str, Any]) -> str | None:
        """The reason why knobs, as `KernelConfig.to_json` has them, are none of these, or None; it names the knob and
        the values that would do.

        maxnreg and ir_override are refused like any other knob that is not the family's: maxnreg would compile (on
        CUDA), but no config that was measured has it and features do not show it, so a prediction would be that of
        another binary; ir_override names a file, which the next process may not have.
        """
        are_integers = set(map(type, knobs.values())) == {int}  # not True, which is 1, and not 64.0
        if are_integers and len(knobs) == len(self._values) + 1 and knobs.items() <= self._pairs:
            return None
        if type(ctas := knobs.get("num_ctas")) is not int or ctas != 1:
            return f"num_ctas cannot be {ctas!r}: 1"
        if unknown := sorted(knobs.keys() - self._values.keys() - {"num_ctas"}):
            return f"{unknown[0]} is no knob of {self._family}; it has {', '.join(self._values)}"
        for knob, values in self._values.items():
            if knob not in knobs:
                return f"{knob} is missing: {self._words[knob]}"
            if type(knobs[knob]) is not int or knobs[knob] not in values:
                return f"{knob} cannot be {knobs[knob]!r}: {self._words[knob]}"
        return None
