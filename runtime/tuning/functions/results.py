"""`TuneResult`: the result of tuning one key, with the trial of each config; and errors for configs that fail."""

from __future__ import annotations

import csv
import inspect
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....datasets import Problem, Status
from ....datasets.console import InNotebooks, table
from ....datasets.errors import ForetuneError, abridged, printable
from ....datasets.files import replacing
from ..session import TuningFailed
from .config_space import Candidate
from .plain_values import plain

if TYPE_CHECKING:
    import pandas

#: Numbers of failures that an error lists and of rows that a printed table shows.
_MOST_LISTED, _MOST_SHOWN = 20, 30
#: Tuples and lists of at most this length are searched for futures; checking longer ones would take too long.
_MOST_RESULTS = 16
#: Methods that identify types whose work continues after the call: futures of `concurrent`, `asyncio`, dask and torch,
#: results of thread pools, torch's asynchronous collectives, subprocesses, threads, and dask's lazy collections.
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
    """The measurement of one config.

    `time_us`, the median of `samples` calls in microseconds, is None unless the status is OK. `metrics` are rates
    computed from the time (see `Work.metrics`), by name.
    """

    config: Mapping[str, Any]
    status: Status
    time_us: float | None = None
    spread: float | None = None  # interquartile range over median
    samples: int = 0
    error: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """Return the trial as one flat row: its knobs, status, time and metrics by column name."""
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


@dataclass(frozen=True, repr=False)
class TuneResult(InNotebooks):
    """The result of tuning one function or kernel for one key.

    Printed with rich, it is a table of the trials, fastest first.

    Attributes:
        function: The name of the function or kernel.
        key: The key of the call, as JSON text.
        problem: The key as a `Problem`, if it has numbers.
        device: The name of the GPU or CPU.
        software: The versions of driver, torch, Triton and Python that measured.
        best_config: The knobs of the fastest config.
        best_time_us: Its time in microseconds; None if no measurement was needed.
        trials: Every config that was measured or refused, in the order of the space.
        untried: The number of configs that a budget or a model left out.
        tuned_s: The duration of tuning in seconds; 0.0 if all times were known.
        reason: Why these configs were measured.

    >>> trials = (Trial({"tile": 8}, Status.OK, 20.0, 0.0, 3), Trial({"tile": 16}, Status.OK, 10.0, 0.0, 3))
    >>> result = TuneResult("scale", "[64]", None, "cpu", {}, {"tile": 16}, 10.0, trials, 0, 1.5, "the whole space")
    >>> result
    <TuneResult of scale [64] on cpu: 2 trials, best tile=16 (10 us)>
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
    best_time_us: float | None
    trials: tuple[Trial, ...]
    untried: int
    tuned_s: float
    reason: str

    def __repr__(self) -> str:
        count = f"{len(self.trials)} trial{'s' * (len(self.trials) != 1)}"
        time = "" if self.best_time_us is None else f" ({self.best_time_us:.4g} us)"
        key, best = (abridged(printable(str(one)), 60) for one in (self.key, Candidate(self.best_config, "")))
        return f"<TuneResult of {self.function} {key} on {self.device}: {count}, best {best}{time}>"

    @property
    def best(self) -> Trial | None:
        """The trial of the fastest config."""
        return next((one for one in self.trials if dict(one.config) == dict(self.best_config)), None)

    def to_json(self) -> dict[str, Any]:
        """Return the result as a JSON object, with a row for each trial."""
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
        """Return the trials as CSV text, one row each; with a path, also write that file atomically."""
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
        """Return the trials as a data frame, one row each. Raises `ForetuneError` if pandas is not installed."""
        try:
            import pandas
        except ImportError:
            raise ForetuneError(
                "to_dataframe needs pandas, which is not installed; to_csv and to_json do not"
            ) from None
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
    """Return the error for a function none of whose configs works; it lists the failures and has all `trials`."""
    lines = [f"  {Candidate(one.config, '')}: {one.status.value}: {one.error}" for one in trials]
    more = [f"  and {len(lines) - _MOST_LISTED} more"] * (len(lines) > _MOST_LISTED)
    error = TuningFailed(
        "\n".join([f"none of the {len(lines)} configs of {function} works:", *lines[:_MOST_LISTED], *more])
    )
    error.trials = tuple(trials)
    return error


def check_finished(function: str, result: Any) -> None:
    """Raise `ForetuneError` for a result whose work continues after the call, as it cannot be timed."""
    several = result if isinstance(result, (tuple, list)) and len(result) <= _MOST_RESULTS else ()
    for one in (result, *several):
        if (what := _unfinished(one)) is not None:
            if inspect.iscoroutine(one):
                one.close()  # it will not be awaited
            raise ForetuneError(
                f"{function} returned {what}, whose work is done after the call, so that its configs cannot be timed: "
                "tune the function that does the work, or wait for the work before returning"
            )


def _unfinished(result: Any) -> str | None:
    """Return a text that names the kind of a result whose work continues after the call; None for other results.

    The methods of its type are checked, not those of the object, since a mock has every attribute.
    """
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
    """Return the columns of all rows, knobs first and the error last; rows may lack metrics or knobs."""
    names = dict.fromkeys(name for row in rows for name in row)
    last = ["error"] if "error" in names else []
    return [name for name in names if name != "error"] + last


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
