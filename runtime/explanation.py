"""`Explanation`: why each config is on a shortlist, and how far the problem is from the training domain."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..datasets import DeviceSpec, Family, ForetuneError, KernelConfig, Problem
from ..datasets.console import InNotebooks, table
from .how_many import HowMany, Length, narrowing
from .launching.stub_driver import device_here
from .shortlist import bundle_in_force, chooser_of, predicted_slowdowns

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from ..model import Bundle
    from .by_source import SourcePrediction
    from .shortlist import Chooser

#: The features of a config that a table shows, and the contributions that are kept.
_SHOWN, _KEPT = 3, 10
#: Contributions that change the predicted time by less than this factor minus 1 are left out.
_LEAST_EFFECT = 1e-3
#: How the contributions of a `LightGBMRanker` are computed.
METHOD = (
    "path-dependent TreeSHAP of the trees, with all candidates of the problem as the background; the network as a whole"
)
#: How those of the prior are computed, for a family without data.
SOURCE_METHOD = (
    "path-dependent TreeSHAP of the prior's trees, with all candidates of the problem as the background; each fact "
    "together with its difference from the mean candidate"
)


@dataclass(frozen=True)
class Contribution:
    """One feature's effect on a config's predicted time, compared with the average candidate."""

    feature: str  # a feature of the family, "network" or "analytic estimate"
    value: float | None  # of the feature; None for the network and the estimate
    factor: float  # multiplies the predicted time: 0.9 = 10 % faster than the average candidate

    def __str__(self) -> str:
        value = "" if self.value is None else f"={self.value:.0f}" if self.value % 1 == 0 else f"={self.value:.3g}"
        return f"{self.feature}{value} {100 * (self.factor - 1):+.1f} %"


@dataclass(frozen=True)
class ExplainedConfig:
    """One config of a shortlist, with its predicted time and the reasons for its place."""

    config: KernelConfig
    rank: int  # its place on the shortlist: 1 is tried first
    predicted_rank: int  # its place among all candidates by predicted time: 1 is the fastest
    predicted_slowdown: float  # predicted time over that of the first config
    over_average: float  # predicted time over the geometric mean of all candidates
    contributions: tuple[Contribution, ...]  # the largest effects first; () for a custom ranker
    why: str  # one sentence on its place in the list
    unmeasured: tuple[str, ...]  # knob values that were not measured, such as "BLOCK_M=1024 was never measured"

    @property
    def main(self) -> list[Contribution]:
        """The contributions to show: the largest ones of features, then the network's and the analytic estimate's."""
        features = [one for one in self.contributions if one.value is not None][:_SHOWN]
        return [*features, *(one for one in self.contributions if one.value is None)]

    @property
    def main_contributions(self) -> str:
        """The contributions in `main`, as text."""
        return ", ".join(map(str, self.main))

    def to_json(self) -> dict[str, Any]:
        """Return the config, its ranks, predicted times and contributions as a dict for `json.dumps`."""
        return {
            "rank": self.rank,
            "config": self.config.to_json(),
            "predicted_rank": self.predicted_rank,
            "predicted_slowdown": round(self.predicted_slowdown, 4),
            "over_average": round(self.over_average, 4),
            "why": self.why,
            "contributions": [
                {
                    "feature": one.feature,
                    "value": None if one.value is None else float(f"{one.value:.6g}"),
                    "factor": round(one.factor, 4),
                }
                for one in self.contributions
            ],
            "unmeasured": list(self.unmeasured),
        }


@dataclass(frozen=True, repr=False)
class Explanation(InNotebooks):
    """A shortlist with the reasons for each of its configs. Made by `foretune.explain`."""

    problem: Problem
    device: str
    given: int  # the configs to choose from
    candidates: int  # those that may be on the shortlist: supported, and right when measured
    #: How far the problem is outside the training domain, in factors of two; 0.0 = within, None = there is no such
    #: domain, because nothing of the family was measured.
    octaves: float | None
    outside: str  # what is outside the training domain, or if there is none, the declared ranges; "" = nothing
    configs: tuple[ExplainedConfig, ...]  # (n,) in the order in which to try them
    reason: str  # of the shortlist: which bundle predicted, and how the length was chosen
    method: str  # how the contributions were computed; "" without contributions
    legend: Mapping[str, str]  # one line on each feature that contributes, as far as the family has one

    def __repr__(self) -> str:
        return f"<Explanation of {self.problem} on {self.device}: {self._narrowed}>"

    def __str__(self) -> str:
        lines = [f"{self.problem} on {self.device}: {self._narrowed}"]
        for one in self.configs:
            lines.append(f"{one.rank}. {one.config}: {one.why}")
            if one.contributions:
                lines.append(f"   {one.main_contributions}")
            lines += [f"   {text}" for text in one.unmeasured]
        return "\n".join([*lines, *self._below, *self._legend_lines])

    @property
    def _narrowed(self) -> str:
        return narrowing(self.given, self.candidates, len(self.configs))

    @property
    def domain(self) -> str:
        """One sentence that says how far the problem is from the bundle's training data."""
        if self.octaves is None:
            return (
                f"Nothing was measured of {self.problem.family}: the order comes from the prior, which learned from "
                "other kernels and reads facts of this kernel's source"
            )
        if not self.octaves:
            return "The problem is within the training domain"
        return f"The problem is outside the training domain: {self.outside}"

    @property
    def _below(self) -> list[str]:
        lines = [self.domain, self.reason]
        if self.method:
            lines.append(f"Contributions to the predicted time, against the average candidate: {self.method}")
        return lines

    @property
    def _legend_lines(self) -> list[str]:
        """The lines of the legend: one for each feature that is named in the configs' main contributions."""
        shown = {one.feature for config in self.configs for one in config.main}
        return [f"  {name}: {text}" for name, text in self.legend.items() if name in shown]

    def to_json(self) -> dict[str, Any]:
        """Return JSON values, as `foretune predict --explain --json` prints them."""
        return {
            "problem": self.problem.to_json(),
            "device": self.device,
            "given": self.given,
            "candidates": self.candidates,
            "training_domain": {
                "octaves": None if self.octaves is None else round(self.octaves, 4),
                "outside": self.outside,
            },
            "configs": [one.to_json() for one in self.configs],
            "reason": self.reason,
            "method": self.method,
            "legend": dict(self.legend),
        }

    def __rich__(self) -> Any:
        listed = [one.config.to_json() for one in self.configs]
        knobs = [knob for knob in dict.fromkeys(knob for config in listed for knob in config) if knob != "num_ctas"]
        rows = [
            (
                one.rank,
                f"{one.predicted_slowdown:.3f}x",
                one.predicted_rank,
                *(config.get(knob, "") for knob in knobs),
            )
            for one, config in zip(self.configs, listed, strict=True)
        ]
        return table(
            f"{self.problem} on {self.device}: {self._narrowed}",
            ("rank", "slowdown", "place", *knobs),
            rows,
            below=[
                "rank: the order in which to try them; place: by predicted time alone",
                *(f"Config {one.rank}: {text}" for one in self.configs for text in one.unmeasured),
                *self._below,
                *(f"  {one.rank}: {one.main_contributions}" for one in self.configs if one.main),
                *self._legend_lines,
            ],
            once=knobs,
            lead=3,
            rest="config",
        )


def make_explanation(
    family: Family,
    problem: Problem,
    device: DeviceSpec | Path | str | None = None,
    *,
    k: Length = "auto",
    expected_calls: float | None = None,
    call_us: float | None = None,
    configs: Sequence[KernelConfig] | None = None,
    bundle: Bundle | Path | str | None = None,
) -> Explanation:
    """Return a problem's shortlist with the reasons for each config.

    `foretune.explain` is this function for a family that may also be given by name. It takes a second or more, so it is
    not for launches.

    Args:
        family: The kernel's family.
        problem: The problem, of that family.
        device: A spec, the name of a shipped one, or a spec's JSON file; the current device if None.
        k: The number of configs, as for `make_shortlist`.
        expected_calls: How often the kernel will be called, as for `make_shortlist`.
        call_us: The duration of one call in microseconds, as for `make_shortlist`.
        configs: The configs to choose from; the family's space on the device if None.
        bundle: The bundle that predicts, or its folder; the shipped one if None.

    Raises:
        ForetuneError: As `make_shortlist` does; also if nothing can be predicted.
    """
    import numpy as np

    from .by_source import predict_by_source

    spec = device_here() if device is None else DeviceSpec.find(device)
    chooser = chooser_of(family, spec, configs, bundle)
    chosen = chooser.choose(problem, HowMany.of(family, k, expected_calls, call_us))
    if not chosen.predicted:
        raise ForetuneError(f"there is no shortlist to explain: {chosen.reason}")
    problem, known = problem.without_sizes(), bundle_in_force(chooser.bundle)
    by_source = predict_by_source(chooser, problem, known)
    positions = chooser.candidates(problem) if by_source is None else by_source.positions
    places = [positions.index(position) for position in chosen.positions]
    if by_source is None:
        reasons = _reasons_of_bundle(family, problem, spec, chooser, positions, places)
    else:
        reasons = _reasons_of_source(by_source, places)
    slowdowns, parts = reasons.slowdowns, reasons.parts
    ranks = [1 + int((slowdowns < slowdowns[place]).sum()) for place in places]
    is_diverse = any(rank > place for place, rank in enumerate(ranks, 1))
    average = math.exp(float(np.log(slowdowns).mean()))
    unmeasured = _unmeasured(family, chosen.configs, reasons.missing)
    named = {one.feature for some in parts for one in some}
    return Explanation(
        problem=problem,
        device=spec.name,
        given=len(chooser.configs),
        candidates=len(positions),
        octaves=reasons.octaves,
        outside=reasons.outside,
        configs=tuple(
            ExplainedConfig(
                config=config,
                rank=row + 1,
                predicted_rank=ranks[row],
                predicted_slowdown=chosen.predicted_slowdown[row],
                over_average=float(slowdowns[place]) / average,
                contributions=parts[row] if parts else (),
                why=_why(row + 1, ranks[row], chosen.predicted_slowdown[row], is_diverse),
                unmeasured=unmeasured[row],
            )
            for row, (config, place) in enumerate(zip(chosen.configs, places, strict=True))
        ),
        reason=chosen.reason,
        method=reasons.method if parts else "",
        legend={name: text for name, text in reasons.texts.items() if name in named and text},
    )


@dataclass(frozen=True)
class _Reasons:
    """The predicted slowdowns of a problem's candidates, and what explains them, from a bundle or from the prior."""

    slowdowns: NDArray[np.float64]  # (n_candidates,)
    parts: list[tuple[Contribution, ...]]  # (n,) of each config on the shortlist; empty if there are none
    missing: Sequence[Sequence[str]]  # (n,) the knobs of each whose values were never measured, as far as recorded
    octaves: float | None  # as in `Explanation`, and so are the next two
    outside: str
    method: str
    texts: Mapping[str, str]  # one line on each feature, by name


def _reasons_of_bundle(
    family: Family,
    problem: Problem,
    device: DeviceSpec,
    chooser: Chooser,
    positions: Sequence[int],
    places: Sequence[int],
) -> _Reasons:
    """Return the bundle's predictions for the candidates, with each feature's contribution and unmeasured knob values.

    Args:
        family: The kernel's family.
        problem: The problem.
        device: The device.
        chooser: Has the bundle and the list of configs to choose from.
        positions: The candidates' positions in that list.
        places: The positions of the shortlist's configs among the candidates.
    """
    from ..model.contributions import feature_contributions, unmeasured_knobs
    from ..model.gbdt import LightGBMRanker

    near, known = family.at_call_time(problem), bundle_in_force(chooser.bundle)
    candidates = tuple(chooser.configs[position] for position in positions)
    slowdowns = predicted_slowdowns(family, near, device, candidates, chooser.bundle)
    parts: list[tuple[Contribution, ...]] = []
    missing: Sequence[Sequence[str]] = [()] * len(places)
    texts: Mapping[str, str] = {}
    if isinstance(ranker := known.ranker(family.name), LightGBMRanker):
        unseen = all(one.card != device.card for one in known.trained_on(family.name))
        found = feature_contributions(ranker, family, near, device, candidates, places, unseen_card=unseen)
        parts, texts = _largest(found.names, found.values, found.logs), _texts_of(family)
        recorded = known.trained[family.name].measured
        missing = unmeasured_knobs(ranker, family, near, device, candidates, places, recorded)
    distance = known.distance(family.name, problem, device)
    return _Reasons(slowdowns, parts, missing, distance.octaves, distance.reason, METHOD, texts)


def _reasons_of_source(found: SourcePrediction, places: Sequence[int]) -> _Reasons:
    """Return what the prior predicts from the kernel's source, with each feature's contribution.

    `places` are the positions of the shortlist's configs among the candidates.
    """
    import numpy as np

    from .facts.prior import NAMES, TEXTS, Prior, launch_features

    parts = _largest(NAMES, *Prior.shipped().contributions(launch_features(*found.launch), places))
    missing: list[tuple[str, ...]] = [()] * len(places)  # no value was measured, which `domain` says once
    slowdowns = np.exp(found.logs - found.logs.min())
    return _Reasons(slowdowns, parts, missing, None, found.outside, SOURCE_METHOD, TEXTS)


def _why(rank: int, predicted_rank: int, slowdown: float, is_diverse: bool) -> str:
    """Return one sentence that explains a config's position in a list (`rank`).

    Args:
        rank: Its position in the list, from 1.
        predicted_rank: Its position by predicted time, from 1.
        slowdown: Its predicted slowdown.
        is_diverse: Whether the list is diversified, so that the two positions may differ.
    """
    if predicted_rank == 1:
        return "predicted fastest"
    text = f"predicted {100 * (slowdown - 1):.1f} % slower than the first"
    if not is_diverse or predicted_rank == rank:
        return text
    if predicted_rank < rank:
        return f"{text}; moved down from place {predicted_rank} because it resembles configs above it"
    return f"{text}; moved up from place {predicted_rank} because it differs from the configs above it"


def _largest(
    names: Sequence[str], values: NDArray[np.float64], logs: NDArray[np.float64]
) -> list[tuple[Contribution, ...]]:
    """Return the largest contributions to each config's prediction.

    Args:
        names: The names of the parts, (n_parts,), features first.
        values: The features of each config, (n, n_features).
        logs: What each part adds to the log of the config's predicted time, (n, n_parts).
    """
    result = []
    for row, of_features in zip(logs.tolist(), values.tolist(), strict=True):
        order = sorted(range(len(row)), key=lambda part: -abs(row[part]))
        kept = [part for part in order if abs(math.expm1(row[part])) >= _LEAST_EFFECT][:_KEPT]
        named = ((part, of_features[part] if part < len(of_features) else None) for part in kept)
        result.append(tuple(Contribution(names[part], value, math.exp(row[part])) for part, value in named))
    return result


def _texts_of(family: Family) -> dict[str, str]:
    """Return a one-line description of each part of a bundle's prediction, by name, the family's features first."""
    from ..model.contributions import ESTIMATE, NETWORK
    from ..model.generic_features import feature_text

    texts = {name: feature_text(family, name) for name in family.feature_names}
    return texts | {
        NETWORK: "the neural network, whose part is not divided",
        ESTIMATE: "the family's estimate of the time",
    }


def _unmeasured(
    family: Family, configs: Sequence[KernelConfig], missing: Sequence[Sequence[str]]
) -> list[tuple[str, ...]]:
    """Return sentences for each config: one for each knob value that was never measured or is not in the space.

    `missing` has the knobs of each config whose values were never measured.
    """
    space = [config.to_json() for config in family.space()]
    in_space = {knob: {str(one.get(knob)) for one in space} for knob in family.knobs}
    result = []
    for config, never in zip((one.to_json() for one in configs), missing, strict=True):
        texts = [f"{knob}={config.get(knob)} was never measured" for knob in never]
        texts += [
            f"{knob}={config[knob]} is not in the space of {family.name}"
            for knob in family.knobs
            if knob in config and knob not in never and str(config[knob]) not in in_space[knob]
        ]
        result.append(tuple(texts))
    return result
