"""The console script and `python -m foretune`: all commands. Each parses, calls a floor and prints."""

from __future__ import annotations

import os
import sys

from .kernels.commands import cache, choosing, collecting, datasets, exporting, machine, training  # noqa: F401
from .kernels.commands.app import INTERRUPTED, app, leave_to_stderr


def main() -> None:
    """Run the command line of this process."""
    try:
        app(prog_name="foretune")
    except SystemExit as ended:
        if ended.code == INTERRUPTED:  # at once: a thread may be in the middle of what nobody waits for any more
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(INTERRUPTED)
        raise
    finally:
        if "--json" in sys.argv:
            leave_to_stderr()  # what a module prints when the program ends


if __name__ == "__main__":
    main()
