"""A headless Chromium, spoken to over a pipe (its DevTools protocol): what a page looks like and complains about."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
#: The first three descriptors are a process's own; Chromium reads commands from the fourth, and answers on the fifth.
_COMMANDS, _ANSWERS = 3, 4


class Browser:
    """One page in a Chromium that runs."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, os.fdopen(answers, "rb")
        self._number, self._session, self._shown = 0, None, ""
        self.complaints: list[str] = []  # what the console had, and what the page asked the network for
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, path: Path, *, width: int, dark: bool = False) -> None:
        """Shows a file, and waits until it has loaded."""
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._shown = path.as_uri()
        self._call("Page.navigate", url=self._shown)
        while (message := self._next()).get("method") != "Page.loadEventFired":
            self._note(message)

    def value(self, script: str) -> Any:
        """What an expression of JavaScript is, as JSON."""
        result = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Writes the whole page as a PNG."""
        taken = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))

    def _call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        text = bytearray()
        while (char := self._answers.read(1)) != b"\0":
            assert char, "Chromium has ended"
            text += char
        return json.loads(text)

    def _note(self, message: dict[str, Any]) -> None:
        if message.get("method") in ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
            self.complaints.append(json.dumps(message["params"]))
        elif message.get("method") == "Network.requestWillBeSent":
            url = message["params"]["request"]["url"]
            if url != self._shown and not url.startswith("data:"):
                self.complaints.append(url)


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """A browser of its own, whose profile lies in this folder; it ends with the block."""
    ours_in, theirs_out = os.pipe()
    theirs_in, ours_out = os.pipe()
    # Neither may be where the other is to be.
    high_in, high_out = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (theirs_in, theirs_out))
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={profile}")
    actions = [
        (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
        (os.POSIX_SPAWN_DUP2, high_in, _COMMANDS),
        (os.POSIX_SPAWN_DUP2, high_out, _ANSWERS),
    ]
    process = os.posix_spawn(CHROMIUM, [CHROMIUM, *options], os.environ, file_actions=actions)
    for end in (theirs_in, theirs_out, high_in, high_out):
        os.close(end)
    try:
        yield Browser(ours_out, ours_in)
    finally:
        os.close(ours_out)  # which ends it
        os.waitpid(process, 0)
