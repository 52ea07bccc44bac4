"""Write an HTML report on how good the shortlists for a dataset's families are.

The report is one file without scripts that loads nothing, whatever the names in the data contain. It needs
`foretune[report]`: matplotlib for the figures, jinja2 for the page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from importlib import import_module, resources
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...datasets import Family, ForetuneError
from ...datasets.console import percent, printable, table
from ...datasets.files import replacing
from ...datasets.progress import share_of
from ..bundle_file import check_plots_folder
from ..evaluation import CAN_RISE
from ..gbdt import LightGBMRanker
from .canvas import Figure, colour_rules
from .figures import accuracy_figures, calibration_figures, curves
from .findings import TIMING_MS, Findings, find
from .maps import knob_figures, shape_figures

if TYPE_CHECKING:
    from ...datasets.dataset import Dataset
    from ..bundle import Bundle

__all__ = ["Report", "check_installed", "make_report"]

#: Definitions of the baselines, for the page.
_BASELINES = {
    "random": "configs in random order",
    "static": "one list of configs for all problems",
    "regimes": "a list for each of three ranges of arithmetic intensity",
    "nearest": "the configs that were fastest on the nearest measured problem",
    "estimate": "the family's analytic model",
}


@dataclass(frozen=True)
class Report:
    """The results for each family, and the page that shows them. Made by `make_report`."""

    facts: Mapping[str, str]  # shown at the top: the data, what was evaluated, version, date and command
    families: Mapping[str, Findings]

    def __repr__(self) -> str:
        """Return one line with the data and the families."""
        return f"<Report on {self.facts.get('data', 'no data')}: {', '.join(self.families)}>"

    @cached_property
    def sections(self) -> dict[str, Section]:
        """The sections of the page with their figures, by family."""
        return {name: Section(one, f"f{number}") for number, (name, one) in enumerate(self.families.items())}

    @cached_property
    def html(self) -> str:
        """The page as HTML. The same findings and the same values at its top (`facts`) give the same bytes."""
        return render(self.sections, self.facts)

    def save(self, path: Path | str) -> None:
        """Write the page to a file, as a whole or not at all.

        Raises:
            OSError: The file cannot be written.
        """
        with replacing(path) as temporary:
            temporary.write_text(self.html, encoding="utf-8")

    def save_plots(self, folder: Path | str) -> list[Path]:
        """Write each figure as an SVG file, and return the paths.

        A file is named by the family's number and the figure: f0-regret.svg.

        Args:
            folder: The folder. It is created if it does not exist.

        Raises:
            ForetuneError: The folder holds other files.
            OSError: A file cannot be written.
        """
        folder = Path(folder)
        check_plots_folder(folder)
        folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for one in self.sections.values():
            for figure in one.figures:
                paths.append(folder / f"{figure.key}.svg")
                with replacing(paths[-1]) as temporary:
                    temporary.write_text(figure.file(), encoding="utf-8")
        return paths

    def to_json(self) -> dict[str, Any]:
        """Return all results of the page, as `foretune report --json` prints them."""
        return dict(self.facts) | {"families": {name: one.to_json() for name, one in self.families.items()}}

    def __rich__(self) -> Any:
        """Return a table with a row of regrets for each family, and each family's headline below it."""
        rows = []
        for name, one in self.families.items():
            regret = one.summary["regret"]
            shown = [percent(regret[k]["geomean"]) if k in regret else "" for k in ("1", "8")]
            rows.append([name, one.summary["problems"], *shown, percent(one.summary["noise_floor"])])
        return table(
            "% slower than the best config",
            ("family", "problems", "first choice", "best of 8", "noise"),
            rows,
            below=[
                *(f"{name}: {one.headline}." for name, one in self.families.items()),
                "Geometric means. noise: the regret of measuring every config, which is timing noise alone.",
                CAN_RISE,
            ],
        )


def make_report(
    dataset: Dataset,
    families: Mapping[str, Family],
    bundle: Bundle | None = None,
    *,
    ranker: Callable[[], LightGBMRanker] = LightGBMRanker,
    quick: bool = False,
    command: str | None = None,
) -> Report:
    """Evaluate a bundle on families of a dataset, or rankers by cross-validation, and return a report.

    Args:
        dataset: The measurements.
        families: The families by name.
        bundle: The bundle to evaluate; cross-validate if None.
        ranker: A factory of unfitted rankers.
        quick: Leave out the learning curve, which takes a few more trainings.
        command: The command line to show in the report.

    Returns:
        The report, which `save` writes.

    Raises:
        ForetuneError: `foretune[report]` is not installed, or as for `cross_validate` and `evaluate_bundle`.

    >>> make_report(load("h200"), families).save("report.html")  # doctest: +SKIP
    """
    check_installed()
    rows = {name: len(dataset.rows(name)) for name in families}
    found = {}
    for name, family in families.items():
        with share_of(rows[name] / sum(rows.values())):
            found[name] = find(dataset, family, bundle, ranker=ranker, quick=quick)
    if bundle is None:
        judged = "by cross-validation: rankers were not trained on the models on which they are evaluated"
    else:
        judged = f"the bundle {bundle.digest[:12]}"
    return Report(
        facts={
            "data": printable(dataset.label),
            "measurements": str(sum(rows.values())),
            "devices": ", ".join(printable(device.name) for device in dataset.devices),
            "judged": judged,
            "version": f"foretune {_version()}",
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            **({} if command is None else {"command": printable(command)}),
        },
        families=found,
    )


def check_installed() -> None:
    """Check that the packages of `foretune[report]` are installed.

    Raises:
        ForetuneError: One of them is missing.
    """
    if missing := [name for name in ("matplotlib", "jinja2") if find_spec(name) is None]:
        raise ForetuneError(
            f"a report needs {' and '.join(missing)}: pip install {' '.join(missing)} (Foretune's extra 'report')"
        )


def _version() -> str:
    """Return Foretune's version, of the installed package or of a source folder."""
    return str(import_module(__package__.rpartition(".model.")[0]).__version__)


class Section:
    """A family's section of the page, with its figures. Its `key` is unique on the page and is its anchor."""

    def __init__(self, found: Findings, key: str) -> None:
        self.key, self.name, self.found = key, found.evaluation.family, found
        self.accuracy, self.calibration = (*accuracy_figures(found, key),), (*calibration_figures(found, key),)
        self.shapes, self.knobs = (*shape_figures(found, key),), (*knob_figures(found, key),)

    @property
    def figures(self) -> Iterator[Figure]:
        """All figures, in the order of the page."""
        for some in (self.accuracy, self.calibration, self.shapes, self.knobs):
            yield from some

    @property
    def rows(self) -> list[tuple[str, list[dict[str, str]]]]:
        """The table of regrets: each ranker's or baseline's name, and "mean", "low" and "high" in percent by k."""
        return [
            (name, [{"mean": percent(one["geomean"]), "low": percent(one["ci95"][0]),
                     "high": percent(one["ci95"][1])} for k, one in by_k.items()])
            for name, by_k in curves(self.found).items()
        ]  # fmt: skip


def render(sections: Mapping[str, Section], facts: Mapping[str, Any]) -> str:
    """Return the page as HTML, with names and values (`facts`) shown at the top."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "percent": percent,
        "printable": printable,
        "us": lambda time: "-" if time is None else f"{time:.4g}",
        "inline": lambda figure: Markup(figure.inline()),  # `Figure` escapes its texts
    }
    source = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    template = environment.from_string(source)
    compared = {name for one in sections.values() for name in one.found.evaluation.baselines}
    page = template.render(
        sections=list(sections.values()),
        facts=facts,
        labels={"judged": "evaluated"},
        baselines={name: what for name, what in _BASELINES.items() if name in compared},
        timing_ms=TIMING_MS,
        colours=Markup(colour_rules(":root")),
    )
    return f"{page}\n"
