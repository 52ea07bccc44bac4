"""`teller`: what a tuning says while it runs: a line for each config, on stderr or in a file for each rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ....datasets.console import printable
from .in_step import Ranks


def teller(is_verbose: bool, function: str, key: str, ranks: Ranks, logs: Path | None = None) -> Callable[[str], None]:
    """Takes what there is to say. With `logs`, it also goes to rank-N.log in that folder, whether verbose or not."""
    who = f"{function} {key}" if ranks.alone else f"rank {ranks.rank}: {function} {key}"

    def say(text: str) -> None:
        line = printable(f"{who}: {text}")
        if is_verbose:
            from rich.console import Console

            Console(stderr=True).print(line, soft_wrap=True, markup=False, emoji=False, highlight=False)
        if logs is not None:
            logs.mkdir(parents=True, exist_ok=True)
            with (logs / f"rank-{ranks.rank}.log").open("a") as file:
                file.write(line + "\n")

    return say
