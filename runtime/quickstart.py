"""`foretune quickstart`: train on shipped measurements, evaluate the ranker, and tune one problem with it."""

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


@dataclass(frozen=True)
class Quickstart:
    """The results of `foretune quickstart`: evaluation, shortlist, prediction time, and first calls on a GPU."""

    family: str
    evaluation: Evaluation
    problem: Problem
    shortlist: Shortlist
    prediction_ms: float  # CPU milliseconds of one prediction over the full space
    first_calls: FirstCalls | None  # None without a GPU
    bundle: Path | None  # None if it could not be saved

    def to_json(self) -> dict[str, Any]:
        """Return JSON values, as `foretune quickstart --json` prints them."""
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
            f"One prediction over the full space takes {self.prediction_ms:.2f} ms on one core.",
            *([] if self.first_calls is None else [self.first_calls]),
            *([] if self.bundle is None else [Text(printable(f"The bundle is in {self.bundle}"))]),
        )


def _half_of_the_task(call: Callable[[], Any]) -> Any:
    """Call a function and return its result; let the progress that it reports fill one half of the progress bar."""
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
    """Train and evaluate a family's ranker, predict one problem, and tune it if there is a GPU.

    The ranker has trees only, without the network, which would double the time. For the evaluation, a ranker is trained
    without the layers of a fifth of the AI models, and tested on these. If the bundle cannot be saved, the function
    warns with a `ForetuneWarning`; `check_bundle_folder` can check this beforehand.

    Args:
        family: The family.
        problem: The problem to predict and to tune.
        dataset: The measurements.
        device: The device to predict for.
        out: The folder of the bundle.
        gpu: The GPU to tune on; None without one.
        autotuned: As for `compare_first_calls`.
        say: Called with a line about each step.
    """
    say("training on all problems, and again without some models, to rank those")
    ranker = partial(LightGBMRanker, epochs=0)
    halves = (
        partial(train_bundle, dataset, {family.name: family}, ranker),
        partial(cross_validate, dataset, family, ranker, tested=1),
    )
    # Training keeps one core busy, and sometimes a second one.
    bundle, judged = side_by_side([partial(_half_of_the_task, half) for half in halves], jobs=2)
    saved: Path | None = out
    try:
        bundle.save(out)
    except (ForetuneError, OSError) as error:
        saved = None
        warn(f"the bundle is not saved in {out}: {error}")
    chosen = make_shortlist(family, problem, device, k=4, bundle=bundle)
    say("timing one prediction over the full space")
    decision_ms, _ = prediction_ms(family, device, bundle, repeats=50)
    first_calls = None
    if gpu is not None and autotuned is not None:
        first_calls = compare_first_calls(family, problem, gpu, bundle, autotuned, on_start=say)
    return Quickstart(family.name, judged, problem, chosen, decision_ms, first_calls, saved)
