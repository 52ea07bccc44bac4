"""How a run shows where it stands: a bar on a terminal or in a notebook, else one line a problem, for logs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..datasets.console.tables import printable

if TYPE_CHECKING:
    from .run_state import Progress


@contextmanager
def showing_progress(shown: bool = True) -> Iterator[Callable[[Progress], None]]:
    """Yields an `on_progress` that shows a run's progress on stderr."""
    from rich import progress as rich
    from rich.console import Console

    console = Console(stderr=True, quiet=not shown)
    columns = (rich.TextColumn("{task.description}", markup=False), rich.BarColumn(), rich.MofNCompleteColumn())
    interactive = console.is_terminal or console.is_jupyter
    with rich.Progress(*columns, console=console, disable=not interactive) as bar:
        task = bar.add_task("starting", total=None)

        def show(now: Progress) -> None:
            eta = "?" if now.eta_s is None else f"{now.eta_s / 60:.0f} min"
            text = printable(f"{now.case.problem} · {now.rate_per_s:.0f} configs/s · {eta} left")
            bar.update(task, description=text, completed=now.done, total=now.total)
            if not interactive:
                console.print(f"{now.done}/{now.total} {text}", soft_wrap=True, markup=False, emoji=False)

        yield show
