"""`Shortlist`: the configs worth trying on a problem, best first.

A prediction never makes a kernel fail. Where nothing can be predicted (no bundle, a device that the bundle does not
know, an invalid problem), every supported config goes through in the given order, with one warning that says why.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ..datasets import DeviceSpec, Family, ForetuneError, KernelConfig, Problem, check_problem_of
from ..datasets.console import InNotebooks, table
from ..datasets.errors import check_path, reason_of, shown
from .arguments import configs_of, family_of, warn_once
from .how_many import TRIAL_S, HowMany, Length
from .same_bits import why_none_kept

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..model import Bundle, Ranker

    #: Positions of the configs predicted to be fastest, fastest first, (n,), and their predicted slowdowns, (n,).
    Ranking: TypeAlias = tuple[NDArray[np.intp], NDArray[np.float64]]

#: The shortest ranking requested from a ranker, and the factor by which the next one is longer if too few of its
#: configs can run the problem.
_LEAST_RANKED, _MORE = 8, 4
#: The most entries of each memo. A full memo is emptied: predicting again costs milliseconds and changes no answer.
_MEMO_SIZE = 4096
#: On an arch without measurements, a shortlist is this many times as long, and has at least this many configs.
#: `pytest -m slow tests/runtime/test_unmeasured.py` measures the benefit with a known card held out.
_GROWTH, _LEAST_UNMEASURED = 4, 32
#: Defines the columns of a shortlist's table.
_CAPTION = (
    "rank: the order in which to try the configs. slowdown: predicted time over that of rank 1. A list of a given k "
    "may be diversified, because similar configs share prediction errors, and need not be sorted by slowdown then."
)
#: The most choosers kept, each with its configs and answers. Programs have fewer kernels than this.
_MOST_CHOOSERS = 256


@dataclass(frozen=True, repr=False)
class Shortlist(InNotebooks):
    """The configs to try on a problem, in that order. It is never empty.

    The first config has the lowest predicted time. A list of a given k is diversified, so the others need not be in the
    order of their predicted slowdowns (see `make_shortlist`).

    With a prediction, `reason` names the bundle, how far the problem is from the training domain, and how the length
    was chosen. Without one, `predicted` is False, `reason` says why, and the list has all supported configs in the
    given order, each with a slowdown of 1.0.
    """

    configs: tuple[KernelConfig, ...]  # (n,)
    predicted_slowdown: tuple[float, ...]  # (n,) predicted time over that of the first config: 1.0 = equally fast
    positions: tuple[int, ...]  # (n,) the index of each config in the list to choose from
    reason: str
    predicted: bool = True
    device: str = ""  # the name of the device that the list is for

    def __repr__(self) -> str:
        count = f"{len(self.configs)} config{'s' if len(self.configs) > 1 else ''}"
        first = f"first {self.configs[0]}" if self.predicted else "not predicted"
        return f"<Shortlist of {count} for {self.device or 'an unnamed device'}, {first}>"

    def to_json(self) -> dict[str, Any]:
        """Return JSON values, as `foretune predict --json` prints them."""
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
        what = "Predicted fastest" if self.predicted else "All supported configs"
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
    """Return the `k` configs to try on a problem, best first.

    `foretune.shortlist` is this function for a family that may also be given by name.

    Only configs that the family supports are listed, and only those whose results were right when the bundle's data
    were measured with the problem's dtype and flags. The first config has the lowest predicted time. For an integer
    `k`, the list is diversified: similar configs share prediction errors, so a config that resembles those before it
    moves down. Ties go to the config that was given first, so the answer is the same in every process.

    The prediction is made for `Family.at_call_time(problem)`, which uses only what the host knows when a kernel is
    launched: the sizes of ragged work count as unknown, and all problems of a bucket get the same answer.

    An answer is remembered if `configs` is None or a tuple that the caller keeps; asking again takes microseconds.

    Args:
        family: The kernel's family.
        problem: The problem, of that family.
        device: A spec, the name of a shipped one, or a spec's JSON file.
        k: The number of configs. "auto": as many as needed to hold one within 1 % of the best in 95 % of cases, by the
            bundle's calibration; at most 64 within the training domain, more outside of it, and 8 if the bundle has no
            calibration. On an arch without measurements the list is longer than `k`, which its `reason` says.
        expected_calls: Instead of `k`: how often the kernel will be called. The list then has the length with the least
            total cost, which is `trial_s` seconds for each config plus, for each call, the expected loss against the
            best config.
        call_us: The duration of one call in microseconds, for `expected_calls`; the family's estimate if None.
        trial_s: The seconds it takes to compile and time one config, for `expected_calls`.
        configs: The configs to choose from; the family's space on the device if None.
        bundle: The bundle that predicts, or its folder; the shipped one if None.

    Raises:
        ForetuneError: `k` < 1, `expected_calls` together with an integer `k` or without a known duration of a call, an
            empty `configs`, a config or a problem of another family, or an invalid device or bundle. If nothing can be
            predicted for any other reason, the function warns and returns all supported configs.

    >>> import numpy as np
    >>> from foretune.model import Bundle, Ranker
    >>> from foretune.model.calibration.training_domain import Distance
    >>> class Toy(Family):
    ...     name, dims, dtypes, knobs = "toy", ("rows",), ("bf16",), ("BLOCK", "num_warps", "num_stages")
    ...     features = problem_from_call = None
    ...     def space(self, device=None): return (KernelConfig.of(BLOCK=64), KernelConfig.of(BLOCK=128))
    ...     def supports(self, config, problem, device): return None
    >>> class Learned(Bundle):
    ...     digest, fastest = "d1", Ranker.fastest
    ...     def trained_on(self, family): return (DeviceSpec.named("h200"),)
    ...     def wrong_results(self, family, problem): return ()
    ...     def calibration(self, family): return None
    ...     def distance(self, family, problem, device): return Distance(0.0)
    ...     def ranker(self, family): return self
    ...     def predict(self, family, problem, device, configs): return np.array([3.0, 1.5])
    >>> best = make_shortlist(Toy(), Problem.of("toy", rows=8), "h200", k=2, bundle=Learned({}, ""))
    >>> best.positions, best.predicted_slowdown, str(best.configs[0])
    ((1, 0), (1.0, 2.0), 'BLOCK=128 num_warps=4 num_stages=3')
    """
    many = HowMany.of(family, k, expected_calls, call_us, trial_s)
    return chooser_of(family, device, configs, bundle).choose_or_warn(problem, many)


class Chooser:
    """Makes shortlists for one family on one device from one bundle's predictions, and remembers them by problem."""

    def __init__(
        self, family: Family, device: DeviceSpec, configs: Sequence[KernelConfig] | None, bundle: Bundle | None
    ) -> None:
        self.family, self.device, self.bundle = family_of(family), device, bundle
        self.given = configs  # kept alive, because `chooser_of` knows the list by its id
        self.configs = configs_of(family, device, configs)
        # A known problem takes 0.6 us by the first memo, and 0.3-0.4 ms by the second, which serves all problems of a
        # bucket at call time. A new problem takes 2-3 ms (k=8).
        self._answers: dict[tuple[Problem, HowMany], Shortlist] = {}
        self._rankings: dict[Problem, Ranking] = {}

    def choose_or_warn(self, problem: Problem, k: HowMany) -> Shortlist:
        """Return the shortlist of a problem, as `choose` does; warn, once for each reason, if nothing was predicted."""
        answer = self.choose(problem, k)
        if not answer.predicted:
            which = "" if len(answer.configs) == len(self.configs) else "supported "
            warn_once(answer.reason, f": all {len(answer.configs)} {which}configs go through")
        return answer

    def choose(self, problem: Problem, k: HowMany) -> Shortlist:
        """Return the shortlist of a problem; without a prediction, all supported configs and the reason.

        The sizes of ragged work count as unknown. Raises `ForetuneError` for a problem of another family, and if
        `keeping` (same bits) rules out all configs that could run otherwise.
        """
        if isinstance(problem, Problem):
            if problem.ragged is not None:  # check before the sizes are dropped: a remembered answer skips the check
                check_problem_of(self.family, problem)
            problem = problem.without_sizes()
            answer = self._answers.get((problem, k))
            if answer is not None:
                return answer
        check_problem_of(self.family, problem)
        if (reason := why_none_kept(self.family, problem, self.device, self.configs)) is not None:
            raise ForetuneError(reason)
        try:
            answer = self._predicted(problem, k)
        except Exception as error:  # noqa: BLE001 - a failed prediction never stops a launch
            answer = self._not_predicted(problem, error)
        _remember(self._answers, (problem, k), answer, _MEMO_SIZE)
        return answer

    def candidates(self, problem: Problem) -> tuple[int, ...]:
        """Return the positions of the configs that may be on a problem's shortlist, in the given order.

        These are the supported configs without those that computed a wrong result when they were measured. If each
        supported config did, all of them are returned.
        """
        positions, wrong = supported(self.family, problem, self.device, self.configs), self._wrong(problem)
        return tuple(position for position in positions if self.configs[position] not in wrong) or positions

    def _predicted(self, problem: Problem, k: HowMany) -> Shortlist:
        """Return the shortlist that the bundle predicts. Raises whatever the bundle or the family raises."""
        import numpy as np  # imported late, because it takes as long as the rest of Foretune

        from ..model.calibration.conformal import AMONG, diversified_order, knob_table
        from .by_source import expected

        bundle, name = bundle_in_force(self.bundle), self.family.name
        if (shortlist := expected(self, problem, k, bundle)) is not None:
            return shortlist
        calibration, distance = bundle.calibration(name), bundle.distance(name, problem, self.device)
        learned_on = bundle.trained_on(name)
        archs = sorted({spec.arch for spec in learned_on})
        if self.device.arch not in archs:
            k = k.times(_GROWTH, _LEAST_UNMEASURED, calibration)
        longest = min(k.longest(calibration, distance), len(self.configs))
        # A calibrated length counts configs in the ranking's order. Other lists are diversified, from more configs.
        is_diverse = longest > 1 and not k.is_calibrated(calibration)
        among = min(max(longest, AMONG), len(self.configs)) if is_diverse else longest
        positions, slowdowns = self._first_supported(problem, among)
        logs = np.log(chosen := slowdowns / slowdowns[0])
        call_us = k.estimate_us(self.family, problem, self.device, self.configs[positions[0]])
        length, length_why = k.length(logs[:longest].tolist(), calibration, distance, call_us)
        tried = (
            diversified_order(logs, knob_table(self.configs)[positions]) if is_diverse else np.arange(len(positions))
        )
        positions, chosen = positions[tried[:length]], chosen[tried[:length]]
        why = f"predicted by bundle {bundle.digest[:12]}"
        if self.device.arch not in archs:
            why = (
                f"no measurement of {self.device.arch}: predicted from the analytic model and what bundle "
                f"{bundle.digest[:12]} learned on {', '.join(archs)}, k grown to {length}; `foretune collect {name} "
                "--plan adaptive --budget 5m --out small` on it, then `foretune adapt --data small --out my-bundle`, "
                "makes a bundle that knows it"
            )
        elif all(spec.card != self.device.card for spec in learned_on):
            why += f", which learned on {', '.join(sorted({spec.card for spec in learned_on}))} only"
        return Shortlist(
            configs=tuple(self.configs[position] for position in positions.tolist()),
            predicted_slowdown=tuple(chosen.tolist()),
            positions=tuple(positions.tolist()),
            reason="; ".join(part for part in (why, distance.reason, length_why) if part),
            device=self.device.name,
        )

    def _first_supported(self, problem: Problem, most: int) -> Ranking:
        """Return the first `most` configs that can run the problem, fastest first.

        `Family.supports` is called with the problem itself, not with rounded sizes, and only until enough configs are
        found. Raises `ForetuneError` if each supported config computed a wrong result.
        """
        wrong, count = self._wrong(problem), max(most, _LEAST_RANKED)
        while True:
            order, slowdowns = self._ranking(problem, count)
            places: list[int] = []
            for place, position in enumerate(order.tolist()):
                config = self.configs[position]
                is_right = not wrong or config not in wrong  # hashing a config is slow
                if is_right and self.family.supports(config, problem, self.device) is None:
                    places.append(place)
                    if len(places) == most:
                        break
            if len(places) == most or len(order) < count or count >= len(self.configs):
                if not places:
                    raise ForetuneError("of the configs that can run this problem, none computed a right result")
                return order[places], slowdowns[places]
            count *= _MORE

    def _ranking(self, problem: Problem, count: int) -> Ranking:
        """Return at least `count` configs, fastest first, as predicted for the problem with rounded sizes.

        All configs are ranked, or only the supported ones if the prediction fails for the full list.
        """
        import numpy as np

        near, count = self.family.at_call_time(problem), min(count, len(self.configs))
        ranking = self._rankings.get(near)
        if ranking is not None and len(ranking[0]) >= count:
            return ranking
        ranker = _ranker_of(self.family, self.device, self.bundle)
        with np.errstate(all="ignore"):  # values that are not finite are refused later
            try:
                ranking = ranker.fastest(self.family, near, self.device, self.configs, count)
            except Exception as error:
                able = supported(self.family, problem, self.device, self.configs)
                some = tuple(self.configs[position] for position in able)
                if len(some) == len(self.configs):
                    raise
                try:  # an unsupported config may have no features
                    order, slowdowns = ranker.fastest(self.family, near, self.device, some, min(count, len(some)))
                except Exception:  # noqa: BLE001
                    raise error from None
                ranking = np.array(able)[order], slowdowns
        _remember(self._rankings, near, ranking, _MEMO_SIZE)
        return ranking

    def _not_predicted(self, problem: Problem, error: Exception) -> Shortlist:
        """Return a shortlist of all supported configs; its reason is the error, or why no config can run."""
        why = reason_of(error)
        with suppress(Exception):  # if `supports` fails too, `error` is the reason
            reasons = [self.family.supports(config, problem, self.device) for config in self.configs]
            if None not in reasons:
                why = f"none of the configs can run this problem: {reasons[0]}"
        positions = self.candidates(problem)
        return Shortlist(
            configs=tuple(self.configs[position] for position in positions),
            predicted_slowdown=(1.0,) * len(positions),
            positions=positions,
            reason=f"{self.family.name}: no prediction ({why})",
            predicted=False,
            device=self.device.name,
        )

    def _wrong(self, problem: Problem) -> Collection[KernelConfig]:
        """Return the configs that computed a wrong result when the bundle's data were measured; () without a bundle."""
        try:
            return bundle_in_force(self.bundle).wrong_results(self.family.name, problem)
        except Exception:  # noqa: BLE001 - the prediction itself has already reported why there is no bundle
            return ()


def supported(family: Family, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]) -> tuple[int, ...]:
    """Return the positions of the configs that the family supports.

    If it supports none, or if `supports` raises, all positions are returned, so that the launch itself shows the error.
    """
    everything = tuple(range(len(configs)))
    try:
        return tuple(i for i in everything if family.supports(configs[i], problem, device) is None) or everything
    except Exception:  # noqa: BLE001 - the launch then reports what is wrong
        return everything


def _remember(memo: dict, key: object, value: object, most: int) -> None:  # type: ignore[type-arg]
    """Add an entry to a memo, which is emptied first if it has `most` entries."""
    if len(memo) >= most:
        memo.clear()
    memo[key] = value


#: The choosers by family, device, configs and bundle. They keep their memos from call to call, and save the 2.3 ms that
#: laying out a family's space takes.
_choosers: dict[tuple[object, ...], Chooser] = {}


def chooser_of(
    family: Family,
    device: DeviceSpec | Path | str,
    configs: Sequence[KernelConfig] | None = None,
    bundle: Bundle | Path | str | None = None,
) -> Chooser:
    """Return the chooser of these arguments, which is created by the first call and kept.

    Raises `ForetuneError` for arguments that `make_shortlist` refuses as well.
    """
    device, bundle = DeviceSpec.find(device), bundle_of(bundle)
    # The key has the list's id: hashing a thousand configs would take longer than the prediction. A list can change
    # under its id, so only tuples are remembered; the chooser keeps them alive, so that no id is used twice.
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
    """Return the predicted slowdown of each config, (n_configs,), which compare within this problem only.

    Raises `ForetuneError` if the bundle cannot predict, or predicts anything but positive finite numbers.
    """
    import numpy as np

    from ..model.ranker import checked_slowdowns

    with np.errstate(all="ignore"):  # values that are not finite are refused
        predicted = _ranker_of(family, device, bundle).predict(family, problem, device, configs)
    return checked_slowdowns(predicted, len(configs))


def _ranker_of(family: Family, device: DeviceSpec, bundle: Bundle | None) -> Ranker:
    """Return the ranker of a family in `bundle` (None: the shipped one). Raises `BundleError` if it cannot predict."""
    from ..model import ranker_on

    bundle = bundle_in_force(bundle)
    return ranker_on(device, bundle.ranker(family.name), bundle.trained_on(family.name))


def bundle_of(bundle: Bundle | Path | str | None) -> Bundle | None:
    """Return a given bundle, or load it from a folder; None, which means the shipped bundle, stays None.

    Raises `ForetuneError` for anything else, and `BundleError` as `load_bundle` does.
    """
    if bundle is None:
        return None
    from ..model import Bundle, load_bundle
    from ..model.bundle_file import FILE
    from .node_copies import near_copy

    if isinstance(bundle, (str, Path)):
        file = near_copy(check_path("bundle", bundle) / FILE)
        return load_bundle(file.parent if file.is_file() else bundle)
    if not isinstance(bundle, Bundle):
        raise ForetuneError(f"bundle must be a Bundle or the path of its folder, but is {shown(bundle)}")
    return bundle


def bundle_in_force(bundle: Bundle | None) -> Bundle:
    """Return the given bundle, or the shipped one for None. Raises `BundleError` if that cannot be read."""
    return _shipped() if bundle is None else bundle


@lru_cache(maxsize=1)
def _shipped() -> Bundle:
    """Return the shipped bundle, which is read once."""
    from ..model import open_bundle

    return open_bundle()
