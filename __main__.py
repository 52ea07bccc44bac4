"""Entry point of the `foretune` script and of `python -m foretune`, with all commands."""

from __future__ import annotations

import os
import sys

from .kernels.commands import (  # noqa: F401
    cache,
    choosing,
    collecting,
    datasets,
    exporting,
    machine,
    pinning,
    training,
)
from .kernels.commands.app import INTERRUPTED, app, leave_to_stderr


def main() -> None:
    """Run the command line of this process."""
    try:
        app(prog_name="foretune")
    except SystemExit as ended:
        if ended.code == INTERRUPTED:  # exit at once, without waiting for threads that still work
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(INTERRUPTED)
        raise
    finally:
        if "--json" in sys.argv:
            leave_to_stderr()  # exit handlers of other modules may print


if __name__ == "__main__":
    main()
