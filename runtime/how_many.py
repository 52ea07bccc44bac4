"""How many configs a shortlist has: a number that somebody says, as many as the calibration wants, or as many as pay
for themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ..datasets import DeviceSpec, Family, ForetuneError, KernelConfig, Problem
from ..datasets.errors import check_between, check_integer, shown

if TYPE_CHECKING:
    from ..model.calibration.conformal import Calibration
    from ..model.calibration.training_domain import Distance

#: A length, or what finds it.
Length: TypeAlias = int | Literal["auto"]

#: Seconds that trying one config costs by itself: Triton 3.6 to 3.9 compile one in 0.2 to 0.6 s on one thread, and
#: `triton.testing.do_bench` then takes 0.13 s.
TRIAL_S = 0.5


@dataclass(frozen=True)
class HowMany:
    """What decides on the length of shortlists: `k`, and for k="auto" perhaps how often a kernel is called, how long
    one call takes (left out, what the family estimates), and what trying a config costs."""

    k: Length = "auto"
    expected_calls: float | None = None
    call_us: float | None = None
    trial_s: float = TRIAL_S

    @classmethod
    def of(
        cls, family: Family, k: Any, expected_calls: Any = None, call_us: Any = None, trial_s: Any = TRIAL_S
    ) -> HowMany:
        """Checked. Raises `ForetuneError` naming what is no length, number of calls or time, or is not needed."""
        k = check_length(k)
        if expected_calls is None:
            if call_us is not None:
                raise ForetuneError("call_us says how long a call takes, but expected_calls not how many there are")
            return AUTO if k == "auto" else cls(k)
        if k != "auto":
            raise ForetuneError(f"expected_calls finds the length of a shortlist: k must be 'auto' but is {k}")
        check_between("expected_calls", expected_calls, 0, 1e18)
        check_between("trial_s", trial_s, 0, 1e6)
        if call_us is not None:
            check_between("call_us", call_us, 0, 1e12)
        elif type(family).estimate_us is Family.estimate_us:
            raise ForetuneError(f"{family.name} has no estimate of its time: say how long a call takes, with call_us")
        return cls("auto", float(expected_calls), None if call_us is None else float(call_us), float(trial_s))

    def times(self, factor: int, least: int, calibration: Calibration | None) -> HowMany:
        """So many times as many, and at least so many, where it is a number: a calibration grows by itself."""
        if self.k == "auto" and calibration is not None:
            return self
        from ..model.calibration.conformal import UNCALIBRATED

        return HowMany(max(factor * (UNCALIBRATED if self.k == "auto" else self.k), least))

    def longest(self, calibration: Calibration | None, distance: Distance) -> int:
        """How many configs have to be looked at to say how many are tried."""
        if self.k != "auto":
            return self.k
        from ..model.calibration.conformal import UNCALIBRATED, most_tried

        # One more, because the gap to the next config says how sure the choice among the first ones is.
        return UNCALIBRATED if calibration is None else most_tried(distance.growth) + 1

    def is_calibrated(self, calibration: Calibration | None) -> bool:
        """Return whether the calibration's level decides on the length."""
        return self.k == "auto" and calibration is not None and self.expected_calls is None

    def length(
        self, logs: Sequence[float], calibration: Calibration | None, distance: Distance, call_us: float
    ) -> tuple[int, str]:
        """The length, and why, from the logs of predicted slowdowns of the first `longest` configs, ascending;
        `call_us` is only looked at where this one has none."""
        if self.k != "auto":
            return min(self.k, len(logs)), ""
        if calibration is None:
            why = "what it learned last was too little for that, or an older Foretune made it"
            return len(logs), f"k={len(logs)}, because it is not calibrated ({why})"
        from ..model.calibration.conformal import COVERAGE, GOOD, most_tried

        most = min(most_tried(distance.growth), len(logs))
        if self.expected_calls is not None:
            call_us = call_us if self.call_us is None else self.call_us
            return self._that_pays(calibration.expected_regret(logs, growth=distance.growth)[:most].tolist(), call_us)
        wish = calibration.wanted(logs, growth=distance.growth)
        length = min(wish, most)
        wanted = f"a config within {100 * (GOOD - 1):.0f} % of the best in {100 * COVERAGE:.0f} % of cases"
        if length < wish:
            return length, f"k={length}, the most there is, for {wanted}"
        return length, f"k={length} for {wanted}"

    def _that_pays(self, regret: Sequence[float], call_us: float) -> tuple[int, str]:
        calls = self.expected_calls or 0.0
        costs = [(k * self.trial_s + calls * call_us * 1e-6 * float(lost), k) for k, lost in enumerate(regret, 1)]
        _, length = min(costs)
        lost = 100 * float(regret[length - 1])
        return length, (
            f"k={length} pays for itself over {calls:.4g} calls of {call_us:.3g} us ({self.trial_s:g} s a config, "
            f"{lost:.1f} % expected loss)"
        )

    def estimate_us(self, family: Family, problem: Problem, device: DeviceSpec, config: KernelConfig) -> float:
        """How long a call takes, if anybody needs to know."""
        if self.expected_calls is None or self.call_us is not None:
            return 0.0
        estimate = float(family.estimate_us(problem, device, (config,))[0])
        return estimate if math.isfinite(estimate) and estimate > 0 else 0.0


#: As many as the calibration wants.
AUTO = HowMany()


def check_length(k: Any) -> Length:
    """A shortlist's length. Raises `ForetuneError` for what is none."""
    if isinstance(k, str):
        if k != "auto":
            raise ForetuneError(f"the shortlist's length k must be auto or an integer >= 1 but got {shown(k)}")
        return "auto"
    return check_integer("the shortlist's length k", k, 1)
