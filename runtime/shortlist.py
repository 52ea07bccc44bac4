"""`Shortlist`: the configs worth trying on a problem, best first.

A prediction never makes a kernel fail. Without one (no bundle, a device it does not know, an odd problem) every
supported config goes through, in its order, with one warning that says why.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ..datasets import DeviceSpec, Family, ForetuneError, KernelConfig, Problem, check_problem_of
from ..datasets.console import table
from ..datasets.errors import check_path, reason_of, shown
from .arguments import configs_of, family_of, warn_once
from .how_many import TRIAL_S, HowMany, Length

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from ..model import Bundle, Ranker

    #: Positions of the first configs, fastest first, (n,), and their predicted slowdowns, (n,).
    Ranking: TypeAlias = tuple[NDArray[np.intp], NDArray[np.float64]]

#: The shortest ranking that is asked for, and how many times as many where too few of its configs can run the problem.
_LEAST_RANKED, _MORE = 8, 4
#: Entries of each memo. A full one is emptied: predicting again costs milliseconds and changes no answer.
_MEMO_SIZE = 4096
#: On an arch without a measurement the shortlist is so many times as long, and has so many configs at least. What that
#: is worth, with a known card held out, `pytest -m slow tests/runtime/test_unmeasured.py` tells.
_GROWTH, _LEAST_UNMEASURED = 4, 32
#: Defines the columns of a shortlist's table.
_CAPTION = (
    "rank: the order in which to try the configs. slowdown: predicted time over that of rank 1. The list is diversified, "
    "because similar configs share prediction errors, so it need not be sorted by slowdown."
)
#: Choosers that are remembered, each with its configs and answers: more than a program has kernels.
_MOST_CHOOSERS = 256


@dataclass(frozen=True)
class Shortlist:
    """Configs in the order in which to try them; never empty. The first is the one that is predicted fastest; the
    others need not be in the order of their slowdowns, see `make_shortlist`.

    Where nothing was predicted, `predicted` is False, `reason` says why, the configs are all that are supported,
    in the order given, and each slowdown is 1.0: none is known to be slower than another. Where it was, `reason` names
    the bundle, says how far the problem is from what that learned, and why there are so many configs.
    """

    configs: tuple[KernelConfig, ...]  # (n,)
    predicted_slowdown: tuple[float, ...]  # (n,) time over that of the first: 1.0 = as fast
    positions: tuple[int, ...]  # (n,) where each stands in the configs that were given
    reason: str
    predicted: bool = True
    device: str = ""  # the name of the one that it is for

    def to_json(self) -> dict[str, Any]:
        """As `foretune predict --json` prints it."""
        ranked = zip(self.configs, self.predicted_slowdown, strict=True)
        return {
            "shortlist": [
                {"config": config.to_json(), "predicted_slowdown": round(slowdown, 4)} for config, slowdown in ranked
            ],
            "device": self.device,
            "predicted": self.predicted,
            "reason": self.reason,
        }

    def __rich__(self) -> Any:
        listed = [config.to_json() for config in self.configs]
        knobs = [knob for knob in dict.fromkeys(knob for config in listed for knob in config) if knob != "num_ctas"]
        rows = [
            [rank, f"{slowdown:.3f}x", *(config.get(knob, "") for knob in knobs)]
            for rank, (slowdown, config) in enumerate(zip(self.predicted_slowdown, listed, strict=True), 1)
        ]
        what = "Predicted fastest" if self.predicted else "All that are supported"
        return table(
            f"{what} on {self.device}",
            ("rank", "slowdown", *knobs),
            rows,
            below=[*([_CAPTION] if self.predicted else []), *([self.reason] if self.reason else [])],
            once=knobs,
            lead=2,
            rest="config",
        )


def make_shortlist(
    family: Family,
    problem: Problem,
    device: DeviceSpec | Path | str,
    *,
    k: Length = "auto",
    expected_calls: float | None = None,
    call_us: float | None = None,
    trial_s: float = TRIAL_S,
    configs: Sequence[KernelConfig] | None = None,
    bundle: Bundle | Path | str | None = None,
) -> Shortlist:
    """The `k` configs to try, of those that the family supports, and that computed a right result with the problem's
    dtype and flags when the bundle's data were measured: first the one with the lowest predicted time, then others with
    low ones; of a k that is a number, such as are not all alike, since like configs are misjudged alike.

    With k="auto" there are as many as hold one within 1 % of the best in 95 % of cases, by the bundle's calibration:
    few where the ranker is sure, more outside of what it learned, at most 64 within that, and 8 where the bundle has
    none.
    With `expected_calls` there are instead as many as pay for themselves: the k with the least `trial_s` seconds for
    each (to compile and to time it) plus `expected_calls` times what a call of `call_us` microseconds is expected to
    lose (left out: what the family estimates).

    `device` is a spec, the name of a shipped one, or a spec's JSON file. `configs` are the ones to choose from (the
    family's whole space if left out) and `bundle` what predicts, or its folder (the shipped one if left out). The
    answer is that of `Family.at_call_time`: it depends on what the host knows then, and not on which of the problems
    near it was asked about first; the sizes of ragged work are unknown. Ties go to the config that
    was given first: the answer is the same in every process.

    An answer is remembered for the problem if the configs are left out or are a tuple that the caller keeps: then
    asking again takes a few microseconds. The `reason` of one for a card that nothing was learned on says so. On an
    arch without a measurement the list is longer than `k`, as its `reason` says, and no less the analytic model's.

    Raises `ForetuneError` for `k` < 1, `expected_calls` with a k or where nobody knows how long a call takes, no
    configs, a config or a problem that is not the family's, and for what is no device or bundle. Where there is no
    prediction for other reasons, it warns and has all configs.

    >>> import numpy as np
    >>> from foretune.model import Bundle, Ranker
    >>> from foretune.model.calibration.training_domain import Distance
    >>> class Toy(Family):
    ...     name, dims, dtypes, knobs = "toy", ("rows",), ("bf16",), ("BLOCK", "num_warps", "num_stages")
    ...     features = problem_from_call = None
    ...     def space(self, device=None): return (KernelConfig.of(BLOCK=64), KernelConfig.of(BLOCK=128))
    ...     def supports(self, config, problem, device): return None
    >>> class Learned(Bundle):
    ...     digest = "d1"
    ...     def trained_on(self, family): return (DeviceSpec.named("h200"),)
    ...     def wrong_results(self, family, problem): return ()
    ...     def calibration(self, family): return None
    ...     def distance(self, family, problem, device): return Distance(0.0)
    ...     def ranker(self, family): return self
    ...     def predict(self, family, problem, device, configs): return np.array([3.0, 1.5])
    ...     fastest = Ranker.fastest
    >>> best = make_shortlist(Toy(), Problem.of("toy", rows=8), "h200", k=2, bundle=Learned({}, ""))
    >>> best.positions, best.predicted_slowdown, str(best.configs[0])
    ((1, 0), (1.0, 2.0), 'BLOCK=128 num_warps=4 num_stages=3')
    """
    many = HowMany.of(family, k, expected_calls, call_us, trial_s)
    return chooser_of(family, device, configs, bundle).choose_or_warn(problem, many)


class Chooser:
    """One family's configs on one device, ranked by one bundle, and the answers given: what `make_shortlist` keeps."""

    def __init__(
        self, family: Family, device: DeviceSpec, configs: Sequence[KernelConfig] | None, bundle: Bundle | None
    ) -> None:
        self.family, self.device, self.bundle = family_of(family), device, bundle
        self.given = configs  # kept alive, because the memo knows it by its id
        self.configs = configs_of(family, device, configs)
        # A known problem takes 0.6 us by the first memo and 0.3-0.4 ms by the second, which serves all problems of a
        # bucket at call time; a new one 2-3 ms (k=8).
        self._answers: dict[tuple[Problem, HowMany], Shortlist] = {}
        self._rankings: dict[Problem, Ranking] = {}

    def choose_or_warn(self, problem: Problem, k: HowMany) -> Shortlist:
        """Return what `choose` does, with a warning, once for each reason, where nothing was predicted."""
        answer = self.choose(problem, k)
        if not answer.predicted:
            which = "" if len(answer.configs) == len(self.configs) else "supported "
            warn_once(answer.reason, f": all {len(answer.configs)} {which}configs go through")
        return answer

    def choose(self, problem: Problem, k: HowMany) -> Shortlist:
        """Return the first supported configs of the ranking, or without one all that are supported, and why.

        The sizes of ragged work count as unknown. Raises `ForetuneError` for a problem that is not the family's.
        """
        if isinstance(problem, Problem):
            if problem.ragged is not None:  # else the answer may be remembered of one that is the family's
                check_problem_of(self.family, problem)
            problem = problem.without_sizes()
            answer = self._answers.get((problem, k))
            if answer is not None:
                return answer
        check_problem_of(self.family, problem)
        try:
            answer = self._predicted(problem, k)
        except Exception as error:  # noqa: BLE001 - no trouble of ours stops a launch
            answer = self._not_predicted(problem, error)
        _remember(self._answers, (problem, k), answer, _MEMO_SIZE)
        return answer

    def _predicted(self, problem: Problem, k: HowMany) -> Shortlist:
        """Return the shortlist by the bundle. Raises whatever the bundle or the family does."""
        import numpy as np  # takes as long to import as the rest of Foretune: not before it is needed

        from ..model.calibration.diversify import AMONG, diversified_order, knob_table

        bundle, name = bundle_in_force(self.bundle), self.family.name
        calibration, distance = bundle.calibration(name), bundle.distance(name, problem, self.device)
        learned_on = bundle.trained_on(name)
        archs = sorted({spec.arch for spec in learned_on})
        if self.device.arch not in archs:
            k = k.times(_GROWTH, _LEAST_UNMEASURED, calibration)
        longest = min(k.longest(calibration, distance), len(self.configs))
        # By its level, a list has all configs up to there. Of any other, more are looked at, and not all alike taken.
        is_diverse = longest > 1 and not k.is_by_level(calibration)
        among = min(max(longest, AMONG), len(self.configs)) if is_diverse else longest
        positions, slowdowns = self._first_able(problem, among)
        chosen = slowdowns / slowdowns[0]
        logs = np.log(chosen)
        call_us = k.estimate_us(self.family, problem, self.device, self.configs[positions[0]])
        length, length_why = k.length(logs[:longest].tolist(), calibration, distance, call_us)
        tried = (
            diversified_order(logs, knob_table(self.configs)[positions]) if is_diverse else np.arange(len(positions))
        )
        positions, chosen = positions[tried[:length]], chosen[tried[:length]]
        why = f"predicted by bundle {bundle.digest[:12]}"
        if self.device.arch not in archs:
            why = (
                f"no measurement of {self.device.arch}: from the analytic model and what bundle {bundle.digest[:12]} "
                f"learned on {', '.join(archs)}, k grown to {length}; `foretune collect {name} --plan adaptive "
                "--budget 5m --out small` on it, then `foretune adapt --data small --out my-bundle`, makes one that "
                "knows it"
            )
        elif all(spec.card != self.device.card for spec in learned_on):
            cards = sorted({spec.card for spec in learned_on})
            why += f", which learned on {', '.join(cards)} only"
        return Shortlist(
            configs=tuple(self.configs[position] for position in positions.tolist()),
            predicted_slowdown=tuple(chosen.tolist()),
            positions=tuple(positions.tolist()),
            reason="; ".join(part for part in (why, distance.reason, length_why) if part),
            device=self.device.name,
        )

    def _first_able(self, problem: Problem, most: int) -> Ranking:
        """Return the first `most` configs that can run the problem, fastest first.

        `Family.supports` is asked about the problem itself, and only until enough configs can run it. Raises
        `ForetuneError` where each of them computed a wrong result.
        """
        wrong, count = self._wrong(problem), max(most, _LEAST_RANKED)
        while True:
            order, slowdowns = self._ranking(problem, count)
            places: list[int] = []
            for place, position in enumerate(order.tolist()):
                config = self.configs[position]
                is_right = not wrong or config not in wrong  # to hash a config takes a while
                if is_right and self.family.supports(config, problem, self.device) is None:
                    places.append(place)
                    if len(places) == most:
                        break
            if len(places) == most or len(order) < count or count >= len(self.configs):
                if not places:
                    raise ForetuneError("of the configs that can run this problem none computed a right result")
                return order[places], slowdowns[places]
            count *= _MORE

    def _ranking(self, problem: Problem, count: int) -> Ranking:
        """Return at least `count` configs, fastest first, as predicted for what stands for the problem at call time:
        of all configs, or where these cannot be predicted, of the supported ones."""
        import numpy as np

        near, count = self.family.at_call_time(problem), min(count, len(self.configs))
        ranking = self._rankings.get(near)
        if ranking is not None and len(ranking[0]) >= count:
            return ranking
        ranker = _ranker_of(self.family, self.device, self.bundle)
        with np.errstate(all="ignore"):  # what is not finite is refused
            try:
                ranking = ranker.fastest(self.family, near, self.device, self.configs, count)
            except Exception as error:
                able = supported(self.family, problem, self.device, self.configs)
                some = tuple(self.configs[position] for position in able)
                if len(some) == len(self.configs):
                    raise
                try:  # a config that no kernel takes may have no features
                    order, slowdowns = ranker.fastest(self.family, near, self.device, some, min(count, len(some)))
                except Exception:  # noqa: BLE001
                    raise error from None
                ranking = np.array(able)[order], slowdowns
        _remember(self._rankings, near, ranking, _MEMO_SIZE)
        return ranking

    def _not_predicted(self, problem: Problem, error: Exception) -> Shortlist:
        """Return all supported configs, and why: what went wrong, or that no config can run the problem."""
        why = reason_of(error)
        with suppress(Exception):  # the judgement is then the error's
            reasons = [self.family.supports(config, problem, self.device) for config in self.configs]
            if None not in reasons:
                why = f"none of the configs can run this problem: {reasons[0]}"
        positions, wrong = supported(self.family, problem, self.device, self.configs), self._wrong(problem)
        positions = tuple(position for position in positions if self.configs[position] not in wrong) or positions
        return Shortlist(
            configs=tuple(self.configs[position] for position in positions),
            predicted_slowdown=(1.0,) * len(positions),
            positions=positions,
            reason=f"{self.family.name}: no prediction ({why})",
            predicted=False,
            device=self.device.name,
        )

    def _wrong(self, problem: Problem) -> Collection[KernelConfig]:
        """Return what computed a wrong result when the bundle's data were measured; nothing without such a bundle."""
        try:
            return bundle_in_force(self.bundle).wrong_results(self.family.name, problem)
        except Exception:  # noqa: BLE001 - a prediction that the caller wanted has already told why there is none
            return ()


def supported(family: Family, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]) -> tuple[int, ...]:
    """Positions of the configs that the family supports; of all where it supports none or cannot tell."""
    everything = tuple(range(len(configs)))
    try:
        return tuple(i for i in everything if family.supports(configs[i], problem, device) is None) or everything
    except Exception:  # noqa: BLE001 - the judgement is then left to the launch
        return everything


def _remember(memo: dict, key: object, value: object, most: int) -> None:  # type: ignore[type-arg]
    if len(memo) >= most:
        memo.clear()
    memo[key] = value


#: Keeps the memos of choosers from call to call; and where a space is laid out anew each time, 2.3 ms.
_choosers: dict[tuple[object, ...], Chooser] = {}


def chooser_of(
    family: Family,
    device: DeviceSpec | Path | str,
    configs: Sequence[KernelConfig] | None = None,
    bundle: Bundle | Path | str | None = None,
) -> Chooser:
    """The one that answers for these, made if need be. Raises `ForetuneError` for what they cannot be."""
    device, bundle = DeviceSpec.find(device), bundle_of(bundle)
    # By identity: hashing a thousand configs would take longer than the prediction. A list can change behind its
    # id, so only tuples are remembered; the chooser keeps them alive, so that no id is used twice.
    key = (id(family), device, id(configs), None if bundle is None else bundle.digest)
    chooser = _choosers.get(key)
    if chooser is None:
        chooser = Chooser(family, device, configs, bundle)
        if configs is None or isinstance(configs, tuple):
            _remember(_choosers, key, chooser, _MOST_CHOOSERS)
    return chooser


def predicted_slowdowns(
    family: Family, problem: Problem, device: DeviceSpec, configs: tuple[KernelConfig, ...], bundle: Bundle | None
) -> NDArray[np.float64]:
    """What the bundle predicts for each config, (n_configs,), which compares within this problem. Raises
    `ForetuneError` where it has nothing to say, or nothing that can be."""
    import numpy as np

    from ..model.ranker import checked_slowdowns

    with np.errstate(all="ignore"):  # what is not finite is refused
        predicted = _ranker_of(family, device, bundle).predict(family, problem, device, configs)
    return checked_slowdowns(predicted, len(configs))


def _ranker_of(family: Family, device: DeviceSpec, bundle: Bundle | None) -> Ranker:
    """What ranks a family's configs on a device."""
    from ..model import ranker_on

    bundle = bundle_in_force(bundle)
    return ranker_on(device, bundle.ranker(family.name), bundle.trained_on(family.name))


def bundle_of(bundle: Bundle | Path | str | None) -> Bundle | None:
    """A bundle as it is, or the one in a folder; None stands for the shipped one. Raises `ForetuneError` for what is
    none of these, and `BundleError` as `load_bundle` does."""
    if bundle is None:
        return None
    from ..model import Bundle, load_bundle
    from ..model.bundle_file import FILE
    from .node_copies import near_copy

    if isinstance(bundle, (str, Path)):
        file = near_copy(check_path("bundle", bundle) / FILE)
        return load_bundle(file.parent if file.is_file() else bundle)
    if not isinstance(bundle, Bundle):
        raise ForetuneError(f"bundle must be a Bundle, or the path of one's folder, but is {shown(bundle)}")
    return bundle


def bundle_in_force(bundle: Bundle | None) -> Bundle:
    """The bundle that was given, or else the shipped one. Raises `BundleError` where that cannot be read."""
    return _shipped() if bundle is None else bundle


@lru_cache(maxsize=1)
def _shipped() -> Bundle:
    from ..model import open_bundle

    return open_bundle()
