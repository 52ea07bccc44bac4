"""Entry point of the `foretune` script and of `python -m foretune`, with all commands."""

from __future__ import annotations

import os
import sys

from .kernels.commands import (  # noqa: F401
    cache,
    choosing,
    collecting,
    datasets,
    machine,
    running,
    training,
)
from .kernels.commands.app import INTERRUPTED, app, leave_to_stderr
from .kernels.integrations import use_named


def main() -> None:
    """Run the `foretune` command in `sys.argv`; for `foretune run`, then run the program that it names."""
    print_exception = sys.excepthook  # typer replaces it
    try:
        app(prog_name="foretune")
    except SystemExit as ended:
        if ended.code == INTERRUPTED:  # exit at once, without waiting for threads that still work
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(INTERRUPTED)
        if running.chosen is None:
            raise
    finally:
        if "--json" in sys.argv and running.chosen is None:
            leave_to_stderr()  # exit handlers of other modules may print
    # Out here, the program's errors, warnings and words are its own.
    if running.chosen is not None:
        sys.excepthook = print_exception
        running.chosen.prepare()
        if "FORETUNE_USE" in running.chosen.environment:
            use_named()
        running.chosen.run()


if __name__ == "__main__":
    main()
