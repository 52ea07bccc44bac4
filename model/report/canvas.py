"""Draw figures with matplotlib as SVG for a web page. Text stays text, and colors follow the light or dark mode.

The same figure always has the same bytes: no date, no random ids, and none of the user's matplotlib settings.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

#: Colors by name, in light mode and in dark mode. Figures are drawn in the light ones, which CSS replaces.
COLOURS = {
    "ink": ("#1f2328", "#e6edf3"),
    "muted": ("#59636e", "#9198a1"),
    "rule": ("#d1d9e0", "#3d444d"),
    "blue": ("#0b62c4", "#6cb6ff"),
    "orange": ("#b35900", "#f0a04b"),
    "green": ("#1a7f37", "#57d364"),
    "violet": ("#8250df", "#c297ff"),
    "red": ("#a40e26", "#ff8b98"),
    "teal": ("#0a7d86", "#39c5cf"),
    "pink": ("#bf3989", "#ff80c8"),
    "ochre": ("#7d5a00", "#d4a72c"),
}
INK, MUTED, RULE, BLUE, ORANGE, GREEN = (COLOURS[name][0] for name in list(COLOURS)[:6])
#: Colors of the lines after the first, which is blue.
OTHERS = tuple(light for light, _ in list(COLOURS.values())[4:])
#: Size in inches of 72 SVG units. The page scales a figure to its column, to 0.9-2.1 pixels a unit.
WIDTH, HEIGHT = 4.6, 3.3
#: Settings of matplotlib.
_SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "foretune",
    "text.parse_math": False,  # names may contain dollar signs
    "axes.unicode_minus": False,
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans"],  # part of matplotlib; narrower fonts fit too
    "font.size": 8.5,
    "axes.labelsize": 8.5,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "legend.fontsize": 8.0,
    "legend.frameon": False,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


@dataclass(frozen=True)
class Figure:
    """A drawn figure. Screen readers read `title` and `description`; the page shows `title` and `caption`."""

    key: str  # letters, digits and hyphens; unique on a page
    title: str
    description: str
    caption: str
    drawn: str  # the content of the svg element
    width: float
    height: float

    def inline(self) -> str:
        """Return an svg element that fills its column, for a page that defines the colors."""
        return self._element(f'class="figure" viewBox="0 0 {self.width:g} {self.height:g}"', "")

    def file(self) -> str:
        """Return an SVG file that defines its own colors, for light and dark mode."""
        size = f'width="{1.5 * self.width:g}" height="{1.5 * self.height:g}"'
        style = f"<style>{colour_rules('svg')}</style>"
        return self._element(f'{size} viewBox="0 0 {self.width:g} {self.height:g}"', style) + "\n"

    def _element(self, attributes: str, style: str) -> str:
        title, described = f"{self.key}-title", f"{self.key}-described"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {attributes} '
            f'role="img" aria-labelledby="{title}" aria-describedby="{described}">{style}'
            f'<title id="{title}">{escape(self.title)}</title><desc id="{described}">{escape(self.description)}</desc>'
            f"{self.drawn}</svg>"
        )


def colour_rules(selector: str) -> str:
    """Return CSS that defines the colors in light and dark mode, for the elements of a selector.

    >>> colour_rules("svg")[:24]
    'svg{--ink:#1f2328;--mute'
    """
    light, dark = ("".join(f"--{name}:{pair[mode]};" for name, pair in COLOURS.items()) for mode in (0, 1))
    return f"{selector}{{{light}}}@media(prefers-color-scheme:dark){{{selector}{{{dark}}}}}"


def draw(
    key: str,
    title: str,
    paint: Callable[[Axes], None],
    *,
    description: str,
    caption: str = "",
    height: float = HEIGHT,
) -> Figure:
    """Draw a figure with one pair of axes.

    Args:
        key: The figure's key on the page: letters, digits and hyphens.
        title: The title above the figure.
        paint: A function that draws into the axes.
        description: A description for screen readers.
        caption: The text below the figure.
        height: The height in inches.
    """
    import matplotlib
    from matplotlib.figure import Figure as Drawing

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        drawing = Drawing(figsize=(WIDTH, height), layout="constrained")
        paint(drawing.subplots())
        file = io.StringIO()
        drawing.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return Figure(key, title, description, caption, _inline_svg(file.getvalue(), key), 72 * WIDTH, 72 * height)


def _inline_svg(svg: str, key: str) -> str:
    """Return the content of an svg element, with ids that are unique on the page and with named colors."""
    inside = svg[svg.index(">", svg.index("<svg")) + 1 : svg.rindex("</svg>")]
    inside = re.sub(r"<metadata>.*?</metadata>", "", inside, flags=re.DOTALL)
    inside = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{key}-", inside)
    for name, (light, _) in COLOURS.items():
        inside = re.sub(rf"(: ){light}\b", rf"\g<1>var(--{name}, {light})", inside)
    return re.sub(r"\n\s*", "\n", inside).strip()


def paint_cells(
    ax: Axes, values: NDArray[np.float64], texts: Sequence[Sequence[str]], limits: tuple[float, float], colours: str
) -> None:
    """Draw a heat map with a text in each cell, black or white, whichever is easier to read.

    Args:
        ax: The axes. Cell (i, j) covers the square from (j, i) to (j + 1, i + 1).
        values: The values, (n_down, n_across); NaN leaves a cell empty.
        texts: The text of each cell.
        limits: The values at the ends of the color map.
        colours: The name of a color map of matplotlib.
    """
    import matplotlib
    from matplotlib.colors import Normalize, to_rgb

    map_, norm = matplotlib.colormaps[colours], Normalize(*limits)
    down, across = values.shape
    ax.pcolormesh(np.arange(across + 1), np.arange(down + 1), values, cmap=map_, norm=norm)
    ax.grid(False)
    ax.tick_params(length=0)
    for row, column in np.argwhere(np.isfinite(values)):
        red, green, blue = to_rgb(map_(norm(values[row, column])))
        dark = 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.5
        ax.text(column + 0.5, row + 0.5, texts[row][column], ha="center", va="center", fontsize=7,
                linespacing=1.25, color="#ffffff" if dark else "#000000")  # fmt: skip
