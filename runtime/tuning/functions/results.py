"""`TuneResult`: what a tuning session returns, with every trial; and what is reported of configs that fail."""

from __future__ import annotations

import csv
import inspect
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....datasets import Problem, Status
from ....datasets.console import table
from ....datasets.errors import ForetuneError
from ....datasets.files import replacing
from ..session import TuningFailed
from .config_space import Candidate
from .plain_values import plain

if TYPE_CHECKING:
    import pandas

#: So many of the failures are listed in an error, and so many rows shown of a table.
_MOST_SAID, _MOST_SHOWN = 20, 30
#: A result may be a tuple with a future in it; of a long list the items are not looked at.
_MOST_RESULTS = 16
#: Methods of types whose work goes on after the call: futures of `concurrent`, `asyncio`, dask and torch, results of
#: thread pools, torch's asynchronous collectives, subprocesses, threads, and dask's lazy collections.
_UNFINISHED = (
    ("result", "done"),
    ("wait", "done"),
    ("wait", "ready"),
    ("wait", "is_completed"),
    ("wait", "poll"),
    ("join", "is_alive"),
    ("__dask_graph__",),
)


@dataclass(frozen=True)
class Trial:
    """A config that was timed. `time_us`, the median of `samples` calls, is None unless the status is OK."""

    config: Mapping[str, Any]
    status: Status
    time_us: float | None = None
    spread: float | None = None  # interquartile range over median
    samples: int = 0
    error: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """Flat and plain, as tables and files have it."""
        knobs = [(name, plain(value, str)) for name, value in self.config.items()]
        return {
            **{
                name: value if isinstance(value, (int, float, str, type(None))) else str(value) for name, value in knobs
            },
            "status": self.status.value,
            "time_us": self.time_us,
            "spread": self.spread,
            "samples": self.samples,
            **self.metrics,
            "error": self.error,
        }


@dataclass(frozen=True)
class TuneResult:
    """What a tuning session found for one key.

    `trials` has every config that was tried or refused, in the space's order; `untried` counts those that a budget or a
    model left out; `tuned_s` is how long it took, in seconds, 0.0 where all was known.

    >>> trials = (Trial({"tile": 8}, Status.OK, 20.0, 0.0, 3), Trial({"tile": 16}, Status.OK, 10.0, 0.0, 3))
    >>> result = TuneResult("scale", "[64]", None, "cpu", {}, {"tile": 16}, 10.0, trials, 0, 1.5, "the whole space")
    >>> result.best_config, result.to_json()["trials"][0]["time_us"]
    ({'tile': 16}, 20.0)
    >>> print(result.to_csv().splitlines()[1])
    8,ok,20.0,0.0,3,
    """

    function: str
    key: str
    problem: Problem | None
    device: str
    software: Mapping[str, str]
    best_config: Mapping[str, Any]
    best_time_us: float | None  # None where nothing needed measuring
    trials: tuple[Trial, ...]
    untried: int
    tuned_s: float
    reason: str  # which configs were tried, and why no more

    @property
    def best(self) -> Trial | None:
        """The fastest config's trial."""
        return next((one for one in self.trials if dict(one.config) == dict(self.best_config)), None)

    def to_json(self) -> dict[str, Any]:
        return {
            "function": self.function,
            "key": self.key,
            "problem": None if self.problem is None else self.problem.to_json(),
            "device": self.device,
            "software": dict(self.software),
            "best_config": {name: plain(value, str) for name, value in self.best_config.items()},
            "best_time_us": self.best_time_us,
            "untried": self.untried,
            "tuned_s": self.tuned_s,
            "reason": self.reason,
            "trials": [trial.row() for trial in self.trials],
        }

    def to_csv(self, path: Path | str | None = None) -> str:
        """A row a trial, as a text, and in a file where a path is given: whole or not at all."""
        rows = [trial.row() for trial in self.trials]
        text = io.StringIO()
        writer = csv.DictWriter(text, _columns(rows), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        if path is not None:
            with replacing(path) as temporary:
                temporary.write_text(text.getvalue())
        return text.getvalue()

    def to_dataframe(self) -> pandas.DataFrame:
        """A row a trial. Raises `ForetuneError` where pandas is not installed."""
        try:
            import pandas
        except ImportError:
            raise ForetuneError("a DataFrame needs pandas, which is not installed; to_csv and to_json do not") from None
        rows = [trial.row() for trial in self.trials]
        frame: pandas.DataFrame = pandas.DataFrame(rows, columns=_columns(rows))
        return frame

    def __rich__(self) -> Any:
        fastest = sorted(self.trials, key=lambda one: (one.time_us is None, one.time_us or 0.0))
        rows = [{name: value for name, value in one.row().items() if name != "samples"} for one in fastest]
        columns = [name for name in _columns(rows) if any(row.get(name) is not None for row in rows)]
        shown = [[_cell(row.get(name)) for name in columns] for row in rows[:_MOST_SHOWN]]
        left = len(rows) - len(shown)
        below = [f"On {self.device}, {self.reason}."] + [f"{left} more are in to_csv()."] * (left > 0)
        return table(f"{self.function} {self.key}", columns, shown, below=below)


def all_failed(function: str, trials: Sequence[Trial]) -> TuningFailed:
    """Return the error for a function of which no config works, with each one's reason and its `trials`."""
    lines = [f"  {Candidate(one.config, '')}: {one.status.value}: {one.error}" for one in trials]
    more = [f"  and {len(lines) - _MOST_SAID} more"] * (len(lines) > _MOST_SAID)
    error = TuningFailed(
        "\n".join([f"none of the {len(lines)} configs of {function} works:", *lines[:_MOST_SAID], *more])
    )
    error.trials = tuple(trials)
    return error


def check_finished(function: str, result: Any) -> None:
    """Raise `ForetuneError` for a result whose work is done after the call, which a timer of calls cannot see."""
    several = result if isinstance(result, (tuple, list)) and len(result) <= _MOST_RESULTS else ()
    for one in (result, *several):
        if (what := _unfinished(one)) is not None:
            if inspect.iscoroutine(one):
                one.close()  # nobody will await it
            raise ForetuneError(
                f"{function} returned {what}, whose work is done after the call, so that its configs cannot be timed: "
                "tune the function that does the work, or wait for the work before returning"
            )


def _unfinished(result: Any) -> str | None:
    """What a result is, where its work is done after the call. Types count, since a mock has every attribute."""
    for names in _UNFINISHED:
        if all(callable(getattr(type(result), name, None)) for name in names):
            return f"an object of type {type(result).__qualname__}"
    for is_such, what in (
        (inspect.iscoroutine, "a coroutine"),
        (inspect.isasyncgen, "an asynchronous generator"),
        (inspect.isgenerator, "a generator"),
        (inspect.isawaitable, "an awaitable"),
        (lambda one: isinstance(one, (map, filter)), "a lazy iterator"),
    ):
        if is_such(result):
            return what
    return None


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of all rows, knobs first: a failure has no metrics, and a config may lack a knob."""
    names = dict.fromkeys(name for row in rows for name in row)
    last = ["error"] if "error" in names else []
    return [name for name in names if name != "error"] + last


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
