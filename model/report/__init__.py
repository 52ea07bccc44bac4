"""A report that people look at: one HTML file on how good the shortlists of a dataset's families are.

It loads nothing and runs nothing, whatever the names in the data say. Needs `foretune[report]`: matplotlib draws,
jinja2 fills the page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...datasets import Family, ForetuneError
from ...datasets.console import percent, printable, table
from ...datasets.files import replacing
from ...datasets.progress import share_of
from ..bundle_file import check_plots_folder
from ..gbdt import LightGBMRanker
from .canvas import Figure, colour_rules
from .figures import accuracy_figures, calibration_figures, curves
from .findings import Findings, find
from .maps import knob_figures, shape_figures

if TYPE_CHECKING:
    from ...datasets.dataset import Dataset
    from ..bundle import Bundle

__all__ = ["Report", "check_installed", "make_report"]


@dataclass(frozen=True)
class Report:
    """What was found of each family, and the page of it. Made by `make_report`."""

    facts: Mapping[str, str]  # what is said at the top: of the data, and of who was judged
    families: Mapping[str, Findings]

    @cached_property
    def sections(self) -> dict[str, Section]:
        """The figures of each family, drawn."""
        return {name: section(one, f"f{number}") for number, (name, one) in enumerate(self.families.items())}

    @cached_property
    def html(self) -> str:
        """The page, one file that loads nothing. The same findings give the same bytes."""
        return render(self.sections, self.facts)

    def save(self, path: Path | str) -> None:
        """Writes the page, whole or not at all. Raises `OSError` naming what could not be written."""
        with replacing(path) as temporary:
            temporary.write_text(self.html, encoding="utf-8")

    def save_plots(self, folder: Path | str) -> list[Path]:
        """Writes each figure as an SVG file into a folder, which is made where there is none; returns their paths.
        A file is called by the family's number and the figure: f0-regret.svg. Raises as `save`, and `ForetuneError` for
        a folder that holds something else."""
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
        """What `foretune report --json` prints: all figures of the page."""
        return dict(self.facts) | {"families": {name: one.to_json() for name, one in self.families.items()}}

    def __rich__(self) -> Any:
        """What a terminal shows: a line for each family."""
        rows = []
        for name, one in self.families.items():
            regret = one.told["regret"]
            shown = [percent(regret[k]["geomean"]) if k in regret else "" for k in ("1", "8")]
            rows.append([name, one.told["problems"], *shown, percent(one.told["noise_floor"])])
        return table(
            "% slower than the best config", ("family", "problems", "first choice", "best of 8", "noise"), rows
        )


def make_report(
    dataset: Dataset,
    families: Mapping[str, Family],
    bundle: Bundle | None = None,
    *,
    ranker: Callable[[], LightGBMRanker] = LightGBMRanker,
    quick: bool = False,
) -> Report:
    """Judges families of a dataset, by cross-validation or a bundle as it is, and reports it.

    `ranker` makes the unfitted rankers; `quick` leaves out the learning curve, for which a few more are trained. Raises
    `ForetuneError` where `foretune[report]` is not installed, and as `cross_validate` and `evaluate_bundle`.

    >>> make_report(load("h200"), families).save("report.html")  # doctest: +SKIP
    """
    check_installed()
    rows = {name: len(dataset.rows(name)) for name in families}
    found = {}
    for name, family in families.items():
        with share_of(rows[name] / sum(rows.values())):
            found[name] = find(dataset, family, bundle, ranker=ranker, quick=quick)
    if bundle is None:
        judged = "rankers that never saw the models they are judged on (cross-validation)"
    else:
        judged = f"the bundle {bundle.digest[:12]}, as it is"
    return Report(
        facts={
            "data": printable(dataset.name),
            "measurements": str(sum(rows.values())),
            "devices": ", ".join(printable(device.name) for device in dataset.devices),
            "judged": judged,
        },
        families=found,
    )


def check_installed() -> None:
    """Raises `ForetuneError` where what draws a report is missing: asked before the work."""
    if missing := [name for name in ("matplotlib", "jinja2") if find_spec(name) is None]:
        raise ForetuneError(f"a report needs {' and '.join(missing)}: pip install 'foretune[report]'")


@dataclass(frozen=True)
class Section:
    """One family on the page."""

    key: str  # its anchor
    name: str
    found: Findings
    accuracy: tuple[Figure, ...]
    calibration: tuple[Figure, ...]
    shapes: tuple[Figure, ...]
    knobs: tuple[Figure, ...]

    @property
    def figures(self) -> Iterator[Figure]:
        for some in (self.accuracy, self.calibration, self.shapes, self.knobs):
            yield from some

    @property
    def rows(self) -> list[tuple[str, list[dict[str, str]]]]:
        """The table of regrets: what is compared, and for each k the mean and its interval."""
        return [
            (name, [{"mean": percent(one["geomean"]), "low": percent(one["ci95"][0]),
                     "high": percent(one["ci95"][1])} for k, one in by_k.items()])
            for name, by_k in curves(self.found).items()
        ]  # fmt: skip


def section(found: Findings, key: str) -> Section:
    """Draws all figures of one family; no two keys of a page are the same."""
    return Section(
        key=key,
        name=found.evaluation.family,
        found=found,
        accuracy=tuple(accuracy_figures(found, key)),
        calibration=tuple(calibration_figures(found, key)),
        shapes=tuple(shape_figures(found, key)),
        knobs=tuple(knob_figures(found, key)),
    )


def render(sections: Mapping[str, Section], facts: Mapping[str, Any]) -> str:
    """Return the HTML. `facts` are names and values of the data and the ranker, shown at the top."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "percent": percent,
        "printable": printable,
        "us": lambda time: "-" if time is None else f"{time:.4g}",
        "inline": lambda figure: Markup(figure.inline()),  # its texts are escaped where it is made
    }
    source = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    template = environment.from_string(source)
    return template.render(sections=list(sections.values()), facts=facts, colours=Markup(colour_rules(":root"))) + "\n"
