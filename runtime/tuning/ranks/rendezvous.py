"""`Rendezvous`: ranks that ask the same question get one answer, also when some of them are late, or never come.

No collective takes part: one hangs when a rank does not come, and pairs with the caller's when the ranks are at
different places. Everything goes through a key-value store that every rank reaches (`torch.distributed`'s). An answer
is one compare-and-set there: the rank that sets it first has set it for all, also for those that ask later. It is:

- what every rank posted, combined. The rank that posts last sets it.
- the reason why there is no such answer, which names the ranks that differ. A rank whose patience ends sets it, or one
  that sees that all ranks wait for different answers, or one that leaves (`leave`). Every rank then raises
  `RankMismatchError` with this reason.

So an answer contains what every rank posted, and no two ranks get different answers.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from ....datasets import ForetuneError
from ....datasets.errors import reason_of

#: Microseconds of each config, or None for one that failed.
Times: TypeAlias = Sequence[float | None]
#: Pauses between two looks at the store: from what no one notices to what a store takes from thousands of ranks.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.25


class RankMismatchError(ForetuneError):
    """The ranks of a group have no common answer. The message names the difference and is the same on each rank."""


class Store(Protocol):
    """What is needed of a `torch.distributed.Store`; each of these is one step."""

    def check(self, keys: list[str], /) -> bool: ...
    def get(self, key: str, /) -> bytes: ...
    def set(self, key: str, value: str, /) -> None: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


class Rendezvous:
    """One rank's side of it. A store that fails raises what it raises.

    `patience_s` is how long others are waited for. Each time that it was not enough halves it, unless `is_patient`:
    ranks that keep apart lose twice that time in all, however many answers they look for. `names` are the ranks as
    messages should name them, for a group whose ranks have other numbers in the job.

    >>> from torch.distributed import HashStore
    >>> store = HashStore()
    >>> early, late = Rendezvous(store, 0, 2, patience_s=0), Rendezvous(store, 1, 2, patience_s=60)
    >>> for rank in early, late:  # the second one comes too late
    ...     try:
    ...         rank.meet("which?", lambda: [3.0, 5.0])
    ...     except RankMismatchError as error:
    ...         print(error)
    rank 1 did not reach which? within 0 s
    rank 1 did not reach which? within 0 s
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        patience_s: float,
        is_patient: bool = False,
        names: Sequence[int] | None = None,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.patience_s, self.is_patient = patience_s, is_patient
        self.names = list(names or range(size))
        self.now, self.sleep = now, sleep

    def meet(
        self,
        question: str,
        mine: Callable[[], Any],
        combine: Callable[[list[Any]], Any] = list,
        *,
        about: str = "",
        aside: str = "",
    ) -> Any:
        """Return what `combine` makes of the values of all ranks, by rank; the same on each rank.

        Args:
            question: Everything that the answer depends on, the same text on each rank.
            mine: Gives this rank's value, as JSON has it. Called only where there is no answer yet. Others are waited
                for when it is done.
            combine: Called by one of the ranks.
            about: What an error calls the question, if not by its text.
            aside: What an error should add if this rank waits in vain.

        Raises:
            RankMismatchError: There is no such answer, on any rank.
        """
        if (answer := self._answer(question)) is None:
            try:
                posted = json.dumps(mine())
            except BaseException as error:  # Ctrl-C, say
                self.leave(question, f"{self.named([self.rank])} left {about or question}: {reason_of(error)}")
                raise
            answer = self._post(question, posted, combine) or self._wait(question, about or question, aside)
        value, reason = json.loads(answer)
        if reason:
            raise RankMismatchError(reason)
        return value

    def leave(self, question: str, reason: str) -> None:
        """Have all ranks that ask this question, now or later, raise this reason, unless they have an answer."""
        self._settle(question, None, reason)

    def is_over(self, question: str) -> bool:
        """Whether a question has an answer, or this rank's value from before it was started again."""
        return self.store.check([f"{question}/answer"]) or self.store.check([f"{question}/posts of {self.rank}"])

    def by_value(self, values: Sequence[object]) -> str:
        """Say which ranks have which value, given each rank's.

        >>> Rendezvous(None, 0, 3, patience_s=0).by_value(["a", "b", "a"])
        'ranks 0, 2: a; rank 1: b'
        """
        having: dict[object, list[int]] = {}
        for rank, value in enumerate(values):
            having.setdefault(value, []).append(rank)
        return "; ".join(f"{self.named(ranks)}: {value}" for value, ranks in having.items())

    def named(self, ranks: Sequence[int]) -> str:
        """Name ranks of the group, by their numbers in the job."""
        return f"rank{'s' * (len(ranks) > 1)} {', '.join(str(self.names[rank]) for rank in ranks)}"

    def _answer(self, question: str) -> bytes | None:
        key = f"{question}/answer"
        return self.store.get(key) if self.store.check([key]) else None

    def _settle(self, question: str, value: Any, reason: str = "") -> bytes:
        """Sets the answer unless there is one; gives the one that there is then."""
        return self.store.compare_set(f"{question}/answer", "", json.dumps([value, reason]))

    def _post(self, question: str, mine: str, combine: Callable[[list[Any]], Any]) -> bytes | None:
        """Posts this rank's value, and gives the answer where it was the last."""
        if self.store.add(f"{question}/posts of {self.rank}", 1) > 1:
            return None  # another thread has posted, or this rank before it was started again
        self.store.set(f"{question}/value of {self.rank}", mine)
        if self.store.add(f"{question}/posts", 1) < self.size:
            return None
        everyones = [json.loads(self.store.get(f"{question}/value of {rank}")) for rank in range(self.size)]
        return self._settle(question, combine(everyones))

    def _wait(self, question: str, about: str, aside: str) -> bytes:
        patience_s, pause_s = self.patience_s, FIRST_PAUSE_S
        until = self.now() + patience_s
        self.store.set(f"waits of {self.rank}", question)
        # Those who wait are at most so many: one who has its answer may not have noticed.
        if self.store.add("waiting", 1) >= self.size:
            self._release_all()
        try:
            while (answer := self._answer(question)) is None:
                if (left_s := until - self.now()) <= 0:
                    if not self.is_patient:
                        self.patience_s /= 2
                    reason = f"{self._missing(question)} {about} within {patience_s:g} s{aside}"
                    return self._settle(question, None, reason)
                self.sleep(min(pause_s, left_s))
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            return answer
        finally:
            self.store.add("waiting", -1)

    def _missing(self, question: str) -> str:
        missing = [rank for rank in range(self.size) if not self.store.check([f"{question}/value of {rank}"])]
        return f"{self.named(missing)} did not reach" if missing else "a rank ended before it had answered"

    def _release_all(self) -> None:
        """Where every rank waits for an answer, none can come to where the others are: each gets the reason.

        They all did wait at one moment: each had said what for before its answer was looked for, here, in vain. (One
        of several threads may have waited while another could have gone on. Then they are released too soon.)
        """
        keys = [f"waits of {rank}" for rank in range(self.size)]
        if not self.store.check(keys):
            return
        questions = [self.store.get(key).decode() for key in keys]
        if not any(self._answer(question) for question in set(questions)):
            for question in sorted(set(questions)):
                self._settle(question, None, f"the ranks wait for different answers: {self.by_value(questions)}")


def longest_of_ranks(times_us: Sequence[Times]) -> list[float | None]:
    """Return each config's longest time, given the times of each rank.

    >>> longest_of_ranks([[3.0, 5.0], [4.0, None]])
    [4.0, None]
    """
    return [longest(of_config) for of_config in zip(*times_us, strict=True)]


def longest(times_us: Times) -> float | None:
    """The longest of a config's times on all ranks; None where one of them failed.

    >>> longest([3.0, 5.0]), longest([3.0, None])
    (5.0, None)
    """
    known = [time_us for time_us in times_us if time_us is not None and math.isfinite(time_us)]
    return max(known) if len(known) == len(times_us) else None
