"""`HowMany`: the rule for a shortlist's length: fixed, as the calibration requires, or with the least total cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ..datasets import DeviceSpec, Family, ForetuneError, KernelConfig, Problem
from ..datasets.errors import check_between, check_integer, shown

if TYPE_CHECKING:
    from ..model.calibration.conformal import Calibration
    from ..model.calibration.training_domain import Distance

#: The length of a shortlist; "auto" derives it from the calibration or from `expected_calls`.
Length: TypeAlias = int | Literal["auto"]

#: Seconds that it takes to try one config: Triton 3.6 to 3.9 compile one in 0.2 to 0.6 s on one thread, and
#: `triton.testing.do_bench` takes 0.13 s.
TRIAL_S = 0.5


@dataclass(frozen=True)
class HowMany:
    """The rule for the length of shortlists: fixed, calibrated, or with the least cost. Made by `HowMany.of`."""

    k: Length = "auto"
    expected_calls: float | None = None  # how often the kernel is called; None = use the calibration
    call_us: float | None = None  # microseconds of one call; None = the family's estimate
    trial_s: float = TRIAL_S  # seconds to compile and time one config

    @classmethod
    def of(
        cls, family: Family, k: Any, expected_calls: Any = None, call_us: Any = None, trial_s: Any = TRIAL_S
    ) -> HowMany:
        """Check the arguments and return the rule for the length that they define.

        Raises `ForetuneError` for an invalid length, number of calls or time, for `call_us` without `expected_calls`,
        and for `expected_calls` together with an integer `k`, or without a known duration of a call.
        """
        k = check_length(k)
        if expected_calls is None:
            if call_us is not None:
                raise ForetuneError("call_us needs expected_calls, the number of calls")
            return AUTO if k == "auto" else cls(k)
        if k != "auto":
            raise ForetuneError(f"expected_calls sets the length of the shortlist, so k must be 'auto' but is {k}")
        check_between("expected_calls", expected_calls, 0, 1e18)
        check_between("trial_s", trial_s, 0, 1e6)
        if call_us is not None:
            check_between("call_us", call_us, 0, 1e12)
        elif type(family).estimate_us is Family.estimate_us:
            raise ForetuneError(f"{family.name} has no estimate of its time: pass the duration of a call as call_us")
        return cls("auto", float(expected_calls), None if call_us is None else float(call_us), float(trial_s))

    def times(self, factor: int, least: int, calibration: Calibration | None) -> HowMany:
        """Return the rule for a list `factor` times as long, of at least `least` configs.

        A calibrated length does not change, because the calibration already extends it far from the training data.
        """
        if self.k == "auto" and calibration is not None:
            return self
        from ..model.calibration.conformal import UNCALIBRATED

        return HowMany(max(factor * (UNCALIBRATED if self.k == "auto" else self.k), least))

    def longest(self, calibration: Calibration | None, distance: Distance) -> int:
        """Return the largest number of configs, fastest first, whose predictions `length` may need."""
        if self.k != "auto":
            return self.k
        from ..model.calibration.conformal import UNCALIBRATED, most_tried

        # One more than can be on the list: the gap to the next config shows how certain the choice is.
        return UNCALIBRATED if calibration is None else most_tried(distance.growth) + 1

    def is_calibrated(self, calibration: Calibration | None) -> bool:
        """Return whether the calibration sets the length."""
        return self.k == "auto" and calibration is not None and self.expected_calls is None

    def length(
        self, logs: Sequence[float], calibration: Calibration | None, distance: Distance, call_us: float
    ) -> tuple[int, str]:
        """Return the length of a list and the reason for it; the reason is "" for an integer `k`.

        Args:
            logs: The logarithms of the predicted slowdowns of the fastest `longest(...)` configs, ascending.
            calibration: The calibration of the family's ranker; None if the bundle has none.
            distance: The problem's distance from the training domain.
            call_us: The estimated microseconds of a call, used if the rule has no `call_us` of its own.
        """
        if self.k != "auto":
            return min(self.k, len(logs)), ""
        if calibration is None:
            why = "its data were too few, or an older Foretune made it"
            return len(logs), f"k={len(logs)}, because the bundle is not calibrated ({why})"
        from ..model.calibration.conformal import COVERAGE, GOOD, most_tried

        most = min(most_tried(distance.growth), len(logs))
        if self.expected_calls is not None:
            call_us = call_us if self.call_us is None else self.call_us
            return self._that_pays(calibration.expected_regret(logs, growth=distance.growth)[:most].tolist(), call_us)
        wish = calibration.wanted(logs, growth=distance.growth)
        length = min(wish, most)
        wanted = f"a config within {100 * (GOOD - 1):.0f} % of the best in {100 * COVERAGE:.0f} % of cases"
        if length < wish:
            return length, f"k={length}, the maximum, for {wanted}"
        return length, f"k={length} for {wanted}"

    def _that_pays(self, regret: Sequence[float], call_us: float) -> tuple[int, str]:
        """Return the length with the least total cost of tuning and calls, and the reason for it as text.

        `regret` is the expected regret at each length from 1 on, and `call_us` the microseconds of a call.
        """
        calls = self.expected_calls or 0.0
        costs = [(k * self.trial_s + calls * call_us * 1e-6 * float(lost), k) for k, lost in enumerate(regret, 1)]
        _, length = min(costs)
        lost = 100 * float(regret[length - 1])
        return length, (
            f"k={length} pays for itself over {calls:.4g} calls of {call_us:.3g} us ({self.trial_s:g} s a config, "
            f"{lost:.1f} % expected loss)"
        )

    def estimate_us(self, family: Family, problem: Problem, device: DeviceSpec, config: KernelConfig) -> float:
        """Return the family's estimate of a call's duration in microseconds; 0.0 if this rule does not depend on it."""
        if self.expected_calls is None or self.call_us is not None:
            return 0.0
        return predicted_us(family, problem, device, config, 0.0)


#: As many configs as the calibration requires.
AUTO = HowMany()


def check_length(k: Any) -> Length:
    """Return `k` if it is "auto" or an integer from 1, a valid length of a shortlist; else raise `ForetuneError`."""
    if isinstance(k, str):
        if k != "auto":
            raise ForetuneError(f"the shortlist's length k must be 'auto' or an integer >= 1 but got {shown(k)}")
        return "auto"
    return check_integer("the shortlist's length k", k, 1)


def predicted_us(
    family: Family, problem: Problem, device: DeviceSpec, config: KernelConfig, otherwise: float = 1.0
) -> float:
    """Return the family's estimate of the microseconds that a config's launch takes.

    Returns `otherwise` if the family raises, or its estimate is not a positive finite number.
    """
    with suppress(Exception):  # a failed estimate never makes a call fail
        estimate = float(family.estimate_us(problem, device, (config,))[0])
        if 0 < estimate < math.inf:
            return estimate
    return otherwise


def narrowing(given: int, usable: int, kept: int) -> str:
    """Return a text for logs and explanations: the numbers of configs before and after a shortlist was chosen.

    Args:
        given: The number of configs to choose from.
        usable: How many of them may be on the shortlist: see `Chooser.candidates` in shortlist.py.
        kept: The length of the shortlist.

    >>> narrowing(52, 37, 4), narrowing(52, 52, 4)
    ('52 configs, 37 usable -> 4', '52 -> 4 configs')
    """
    return f"{given} -> {kept} configs" if given == usable else f"{given} configs, {usable} usable -> {kept}"
