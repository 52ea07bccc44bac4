"""`HowChosen`: how an op's calls choose their configs, as one option of its operator."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..datasets import ForetuneError
from ..datasets.errors import check_flag, shown
from ..runtime import Mode, resolve_mode
from ..runtime.same_bits import is_requested

_SEPARATOR = ";"


def how_chosen(mode: str | None, same_bits: bool | None, invariant: str | None) -> str | None:
    """Encode an op's options `mode`, `same_bits` and `invariant` as one text, the operator's option `mode`.

    This is plain Python that Dynamo can trace. Without `same_bits` and `invariant` the result is `mode` itself.

    >>> how_chosen("predict", None, None), how_chosen(None, True, "m")
    ('predict', ';1;m')
    """
    if same_bits is None and invariant is None:
        return mode
    bits = "" if same_bits is None else str(int(check_flag("same_bits", same_bits)))
    if invariant is not None and not isinstance(invariant, str):
        raise ForetuneError(f"invariant must be the name of a dimension but is {shown(invariant)}")
    return _SEPARATOR.join(("" if mode is None else mode, bits, invariant or ""))


class HowChosen(NamedTuple):
    """The options that decide the configs of an op's calls: the mode, and whether results must keep the same bits."""

    mode: Mode
    same_bits: bool | None = None
    invariant: str | None = None

    @classmethod
    def of(cls, option: Any) -> HowChosen:
        """Parse the text of `how_chosen`; a missing mode is that of FORETUNE_MODE, or else "predict".

        Raises:
            ForetuneError: The mode is unknown.

        >>> HowChosen.of(";;m")
        HowChosen(mode=<Mode.PREDICT: 'predict'>, same_bits=None, invariant='m')
        """
        if not isinstance(option, str) or _SEPARATOR not in option:
            return cls(resolve_mode(option, default=Mode.PREDICT))
        mode, bits, invariant = option.split(_SEPARATOR)
        same_bits = bits == "1" if bits else None
        return cls(resolve_mode(mode or None, default=Mode.PREDICT), same_bits, invariant or None)

    @property
    def is_free(self) -> bool:
        """True if a call may run a kernel that has no config, so that nothing is predicted, timed or pinned.

        False in mode "off", which runs the default config, and if results must have the bits of a certain config.
        """
        is_bound = self.invariant is not None or is_requested(self.same_bits)
        return self.mode is not Mode.OFF and not is_bound
