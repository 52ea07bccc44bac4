"""The page: one HTML file that loads nothing and runs nothing, whatever the names in the data say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from ...datasets.console import percent, printable
from .calibration import calibration_figures
from .canvas import Figure, colour_rules
from .figures import accuracy_figures, curves
from .findings import Findings
from .knobs import knob_figures
from .shapes import shape_figures


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
    """The HTML. `facts` are name and value of what is said of the data and the ranker, at the top."""
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
