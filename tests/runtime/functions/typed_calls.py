"""Calls of tuned functions as type checkers see them: `.ci/types` runs mypy --strict on this file; nothing executes it.

An error that mypy does not find here is reported too, as an ignore comment that is not used.
"""

from __future__ import annotations

from collections.abc import Callable

import foretune
from foretune.runtime.tuning.functions import TuneResult
from typing_extensions import assert_type


@foretune.tune({"chunk": [16, 64, 256]}, key=["rows"], cache=False)
def total(rows: int, chunk: int = 16) -> int:
    return sum(sum(range(at, min(at + chunk, rows))) for at in range(0, rows, chunk))


@foretune.contextual_autotune(cache=False)
def totals(counts: list[int]) -> list[int]:
    return [total(rows) for rows in counts]


class Scale:
    @foretune.tune({"tile": [1, 2]}, cache=False)
    def scaled(self, value: float, tile: int = 1) -> list[float]:
        return [value] * tile


@foretune.tune({"tile": [1, 2]}, cache=False)
def untyped(values, tile):  # type: ignore[no-untyped-def]
    return values


def takes_a_function(function: Callable[[int], int]) -> int:
    return function(3)


# The result has the function's type, in a plain call and with each option of a call.
assert_type(total(1000), int)
assert_type(total(rows=1000, chunk=64), int)
assert_type(total(1000, autotune=False, autotune_verbose=True), int)
assert_type(total(1000, autotune_verbose=True), int)
assert_type(total(1000, autotune_pg=None), int)
assert_type(total.tune(1000), TuneResult)
assert_type(totals([3, 4]), list[int])
assert_type(totals([3, 4], autotune=False), list[int])
assert_type(totals.tune([3, 4]), tuple[TuneResult, ...])
assert_type(Scale().scaled(1.0), list[float])
assert_type(Scale().scaled(1.0, autotune=False), list[float])
assert_type(takes_a_function(total), int)
untyped([1, 2], 1)

# Wrong arguments are errors.
total("1000")  # type: ignore[call-overload]
total()  # type: ignore[call-overload]
total(1000, chunks=16)  # type: ignore[call-overload]
totals(3)  # type: ignore[call-overload]
Scale().scaled("1.0")  # type: ignore[call-overload]
untyped([1, 2])  # type: ignore[call-overload] # a knob without a default
