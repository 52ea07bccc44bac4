"""`paint_cells`: a table of coloured cells, drawn as shapes and text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray


def paint_cells(
    ax: Axes, values: NDArray[np.float64], texts: Sequence[Sequence[str]], limits: tuple[float, float], colours: str
) -> None:
    """Cells of (n_down, n_across) values, NaN ones left out, each with a text on it that can be read; `colours` is a
    colour map of matplotlib's, over `limits`. Cell (i, j) goes from (j, i) to (j + 1, i + 1)."""
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
                linespacing=1.05, color="#ffffff" if dark else "#000000")  # fmt: skip
