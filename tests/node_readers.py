"""`python node_readers.py PATH TIMES`: asks for the node's copy of a file, and tells what that holds and how often this
process has opened the file itself, as Python's own audit of every open sees it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

PATH, TIMES = sys.argv[1], int(sys.argv[2])
opened = []
sys.addaudithook(lambda event, about: event == "open" and str(about[0]) == PATH and opened.append(PATH))

from foretune.runtime.node_copies import near_copy  # noqa: E402 - counted from here on

texts = {near_copy(Path(PATH)).read_text() for _ in range(TIMES)}
sys.stdout.write(json.dumps({"texts": sorted(texts), "opened": len(opened)}))
