"""Run command lines in this process, as a user types them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from foretune.__main__ import app
from typer import testing
from typer.main import get_command
from typer.testing import CliRunner, Result

COMMANDS = (
    "quickstart", "predict", "run", "cover", "collect", "train", "evaluate", "report", "adapt", "warmup", "pin",
    "export", "device", "replay",
)  # fmt: skip
SUBCOMMANDS = ("bench kernels", "bench runtime", "bench predictions")
SUBCOMMANDS += ("datasets show", "datasets merge", "datasets seal")
SUBCOMMANDS += ("cache show", "cache clear", "cache export", "cache import", "cache freeze")
FAMILY = "grouped_gemm_fwd"
LAYER = "--groups 64 --rows 8192 --n 2048 --k 1024"
#: A small dataset.
MEASURED = Path(__file__).parents[1] / "kernels" / "examples" / "measured_h200"
PREDICT = f"predict {FAMILY} --device h200 {LAYER}"


#: Builds all commands, once: typer's runner would build them for each call, 45 ms, which is most of a call's time.
built = testing._get_command = cache(get_command)  # type: ignore[attr-defined]


def invoke(words: Sequence[str], **options: Any) -> Result:
    """Run a command line in this process, with options of the runner."""
    return CliRunner().invoke(app, words, **options)


def call(line: str, *more: object, columns: int | None = 200) -> Result:
    """Run a command line, plus further words, at a terminal's width."""
    return invoke([*shlex.split(line), *map(str, more)], env={"COLUMNS": columns and str(columns)})


def words(text: str) -> str:
    """Return text without frames, line breaks and the backslashes that continue a line."""
    return " ".join(text.replace("│", " ").replace(" \\\n", " ").split())
