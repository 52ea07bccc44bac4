"""What a long tuning says on stderr, told when to by the test."""

from __future__ import annotations

import io
import queue

import pytest
from foretune.runtime.tuning.session import ProgressLine


class Waiting:
    """The seconds that were to be waited, each until the test lets it end: True ends the whole."""

    def __init__(self):
        self.asked, self.answers = queue.Queue(), queue.Queue()

    def __call__(self, seconds):
        self.asked.put(seconds)
        return self.answers.get()

    def step(self):
        """Ends a wait, and returns when what follows is written."""
        self.answers.put(False)
        return self.asked.get()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def _told(out, *, waits=2):
    wait = Waiting()
    line = ProgressLine("softmax", 3, out=out, wait=wait)
    seen = []
    with line:
        first = wait.asked.get()
        line.advance(12.34)
        line.advance(None)
        for _ in range(waits):
            seen.append(wait.step())
            line.advance(9.0)
        wait.answers.put(True)
    return first, seen


def test_in_a_log_it_is_a_line_each_time():
    out = io.StringIO()
    assert _told(out) == (2.0, [30.0, 30.0])
    assert out.getvalue() == (
        "foretune: tuning softmax: 2 of 3 configs, best 12.3 us\n"
        "foretune: tuning softmax: 3 of 3 configs, best 9.0 us\n"
    )


def test_on_a_terminal_it_is_one_line_that_goes():
    out = Terminal()
    assert _told(out) == (2.0, [0.5, 0.5])
    assert "\n" not in out.getvalue()
    assert out.getvalue().split("\r\x1b[2K")[-2:] == ["foretune: tuning softmax: 3 of 3 configs, best 9.0 us", ""]


def test_what_is_over_soon_says_nothing(capsys):
    with ProgressLine("softmax", 3) as line:
        line.advance(None)
        assert str(line) == "foretune: tuning softmax: 1 of 3 configs"
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("broken", ["closed", "full"])
def test_a_broken_stderr_is_no_trouble(broken):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(28, "No space left on device")

    out = Full()
    if broken == "closed":
        out.close()
    wait = Waiting()
    with ProgressLine("softmax", 3, out=out, wait=wait):
        wait.asked.get()
        wait.answers.put(False)
