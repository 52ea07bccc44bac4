"""`foretune quickstart`: train on shipped measurements, see what the ranker is worth, and tune one problem with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..datasets import DeviceSpec, ForetuneError, Measurable, Problem
from ..datasets.console import printable
from ..datasets.errors import warn
from ..datasets.progress import share_of, side_by_side
from ..model.cross_validation import cross_validate
from ..model.evaluation import Evaluation
from ..model.gbdt import LightGBMRanker
from ..model.train import train_bundle
from .bench import Autotuned, FirstCalls, compare_first_calls, prediction_ms
from .shortlist import Shortlist, make_shortlist

if TYPE_CHECKING:
    from ..datasets.dataset import Dataset
    from ..model import Bundle


@dataclass(frozen=True)
class Quickstart:
    """What a quickstart found."""

    family: str
    evaluation: Evaluation
    problem: Problem
    shortlist: Shortlist
    prediction_ms: float  # of one prediction over the whole space, in CPU time
    first_calls: FirstCalls | None  # None without a GPU
    bundle: Path | None  # None where it could not be saved

    def to_json(self) -> dict[str, Any]:
        return {
            "evaluation": {"families": {self.family: self.evaluation.to_json()}},
            "prediction": {"problem": self.problem.to_json(), **self.shortlist.to_json()},
            "prediction_ms": round(self.prediction_ms, 2),
            "first_call": [] if self.first_calls is None else self.first_calls.to_json()["first_call"],
            "bundle": None if self.bundle is None else str(self.bundle),
        }

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        return Group(
            self.evaluation,
            Text(f"\nAn example: {self.problem}"),
            self.shortlist,
            f"One prediction over the whole space takes {self.prediction_ms:.2f} ms on one core.",
            *([] if self.first_calls is None else [self.first_calls]),
            *([] if self.bundle is None else [Text(printable(f"The bundle lies in {self.bundle}"))]),
        )


def _half_of_the_task(call: Callable[[], Any]) -> Any:
    with share_of(0.5):
        return call()


def run_quickstart(
    family: Measurable,
    problem: Problem,
    dataset: Dataset,
    device: DeviceSpec,
    out: Path,
    *,
    gpu: DeviceSpec | None = None,
    autotuned: Autotuned | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Quickstart:
    """Trains a bundle of the family, of trees alone, on the dataset into `out`, judges one such on a fifth of the
    models that it never saw, and predicts the problem on the device; where there is a `gpu`, tunes it there (see
    `compare_first_calls`).

    Where the bundle cannot be saved there is a `ForetuneWarning`, and the rest is shown (`check_bundle_folder` tells
    beforehand)."""
    say("training on all problems, and without some models' to rank those")
    ranker = partial(LightGBMRanker, epochs=0)  # the network would take as long again
    halves = (
        partial(train_bundle, dataset, {family.name: family}, ranker),
        partial(cross_validate, dataset, family, ranker, tested=1),
    )
    # A training keeps one core busy, and a second one at times.
    bundle, judged = side_by_side([partial(_half_of_the_task, half) for half in halves], jobs=2)
    is_saved = _saved(bundle, out)
    chosen = make_shortlist(family, problem, device, k=4, bundle=bundle)
    say("timing one prediction over the whole space")
    decision_ms, _ = prediction_ms(family, device, bundle, repeats=50)
    first_calls = None
    if gpu is not None and autotuned is not None:
        first_calls = compare_first_calls(family, problem, gpu, bundle, autotuned, on_start=say)
    return Quickstart(family.name, judged, problem, chosen, decision_ms, first_calls, out if is_saved else None)


def _saved(bundle: Bundle, out: Path) -> bool:
    """Whether a bundle lies in a folder now. What it is worth can be shown all the same."""
    try:
        bundle.save(out)
    except (ForetuneError, OSError) as error:
        warn(f"the bundle is not saved in {out}: {error}")
        return False
    return True
