"""What an input may come to: an answer, or a refusal in words. All else is trouble."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foretune
from foretune.datasets import ForetuneError

ROOT = Path(foretune.__file__).parent
#: What `within` gives for a refusal.
REFUSED = object()


class TroubleError(AssertionError):
    """An input that was neither answered nor refused: a "traceback", a "silent change", a "hang" or "over memory".
    `where` is what it has in common with others of the same cause."""

    def __init__(self, kind: str, where: str, text: str = "") -> None:
        super().__init__(": ".join(filter(None, (kind, where, text))))
        self.kind, self.where, self.text = kind, where, text


def within(work: Callable[[], Any]) -> Any:
    """What the work returns, or REFUSED where it raises a `ForetuneError` that says why."""
    try:
        return work()
    except ForetuneError as error:
        if not str(error):
            raise TroubleError("traceback", f"{place(error)} refuses without a word") from None
        return REFUSED
    except TroubleError:
        raise
    except Exception as error:
        raise traced(error) from error


def traced(error: BaseException) -> TroubleError:
    return TroubleError("traceback", f"{type(error).__name__} in {place(error)}", str(error)[:200])


def place(error: BaseException) -> str:
    """Where in our sources an exception comes from."""
    ours = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_relative_to(ROOT) and not Path(frame.filename).is_relative_to(ROOT / "tests")
    ]
    return f"{Path(ours[-1].filename).relative_to(ROOT)} {ours[-1].name}" if ours else "the test"


def same(what: str, given: Any, found: Any) -> None:
    """Raises `TroubleError` where what was given is not what is there."""
    if given != found:
        raise TroubleError("silent change", what, f"given {str(given)[:200]}, found {str(found)[:200]}")
