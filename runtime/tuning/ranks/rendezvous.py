"""`Rendezvous`: exchange values between ranks so that all get the same result, even if some are late or never come.

A question is a text that identifies one exchange, and its answer is the result that all ranks get. No collective takes
part: a collective hangs if a rank does not come, and pairs with one of the caller's if ranks are at different points of
the program. Everything goes through a key-value store that every rank reaches (that of `torch.distributed`). An answer
is set by one compare-and-set in the store; the first rank to set it decides for all, including those that come later.
It is one of:

- The combination of the values that every rank posted. The rank that posts last sets it.
- The reason why there is no such answer, which names the ranks that differ. It is set by a rank whose patience ends, by
  one that sees that all ranks wait for different answers, or by one that leaves (`leave`). Every rank then raises
  `RankMismatchError` with this reason.

So an answer contains the values of all ranks, and no two ranks get different answers.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from ....datasets import ForetuneError
from ....datasets.errors import reason_of

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

#: The time of each config in microseconds; None for one that failed.
Times: TypeAlias = Sequence[float | None]
#: The shortest and the longest pause between two reads of the store, in seconds: too short to be noticed, and long
#: enough for a store that serves thousands of ranks.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.25


class RankMismatchError(ForetuneError):
    """An exchange between ranks failed; the message names how they differ, and is the same on each rank."""


class Rendezvous:
    """Exchanges one rank's values with the other ranks' through a key-value store; all ranks get the same answers.

    Exceptions of the store are passed on.

    Args:
        store: The key-value store, each of whose methods is atomic.
        rank: This process's rank in the group.
        size: The number of ranks.
        patience_s: How long to wait for other ranks, in seconds. Each wait that ends without them halves it, so that
            ranks that have diverged lose at most twice this time in total.
        is_patient: Leave `patience_s` unchanged after such waits.
        names: The ranks' numbers for messages, if those in the job differ from those in the group.
        now: Returns the time in seconds.
        sleep: Waits for some seconds.

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
        """Exchange values with all ranks; return what `combine` makes of their list, by rank: the same on each rank.

        Args:
            question: A text that identifies this exchange, the same on each rank.
            mine: Returns this rank's value, which must be valid JSON. Called only if there is no answer yet, and before
                waiting for the others.
            combine: Combines the values; one of the ranks calls it.
            about: The name of the question in errors, if not its text.
            aside: A text to add to the error if the other ranks do not come in time.

        Raises:
            RankMismatchError: The values of all ranks did not come together; every rank raises it.
        """
        if (answer := self._answer(question)) is None:
            try:
                posted = json.dumps(mine())
            except BaseException as error:  # including KeyboardInterrupt
                self.leave(question, f"{self.named([self.rank])} left {about or question}: {reason_of(error)}")
                raise
            answer = self._post(question, posted, combine) or self._wait(question, about or question, aside)
        value, reason = json.loads(answer)
        if reason:
            raise RankMismatchError(reason)
        return value

    def leave(self, question: str, reason: str) -> None:
        """End an exchange (a question) with an error: all ranks that take part, now or later, raise this reason.

        Does nothing if the exchange has an answer.
        """
        self._settle(question, None, reason)

    def is_over(self, question: str) -> bool:
        """Return whether the exchange `question` has a result, or this rank has posted its value for it.

        A rank that was restarted may have posted the value before.
        """
        return self.store.check([f"{question}/answer"]) or self.store.check([f"{question}/posts of {self.rank}"])

    def by_value(self, values: Sequence[object]) -> str:
        """Return a text that lists which ranks have which value, given each rank's value.

        >>> Rendezvous(None, 0, 3, patience_s=0).by_value(["a", "b", "a"])
        'ranks 0, 2: a; rank 1: b'
        """
        having: dict[object, list[int]] = {}
        for rank, value in enumerate(values):
            having.setdefault(value, []).append(rank)
        return "; ".join(f"{self.named(ranks)}: {value}" for value, ranks in having.items())

    def named(self, ranks: Sequence[int]) -> str:
        """Return a text that names ranks of the group by their numbers in the job."""
        return f"rank{'s' * (len(ranks) > 1)} {', '.join(str(self.names[rank]) for rank in ranks)}"

    def _answer(self, question: str) -> bytes | None:
        """Return the stored bytes of the result of the exchange `question`; None if there is none yet."""
        key = f"{question}/answer"
        return self.store.get(key) if self.store.check([key]) else None

    def _settle(self, question: str, value: Any, reason: str = "") -> bytes:
        """Store the result of the exchange `question`, or the reason for an error, unless one is stored.

        Returns the stored bytes.
        """
        return self.store.compare_set(f"{question}/answer", "", json.dumps([value, reason]))

    def _post(self, question: str, mine: str, combine: Callable[[list[Any]], Any]) -> bytes | None:
        """Post this rank's value (JSON) for the exchange `question`.

        The last rank to post combines all values, stores the result and returns it; other ranks get None.
        """
        if self.store.add(f"{question}/posts of {self.rank}", 1) > 1:
            return None  # another thread has posted, or this rank before it was restarted
        self.store.set(f"{question}/value of {self.rank}", mine)
        if self.store.add(f"{question}/posts", 1) < self.size:
            return None
        everyones = [json.loads(self.store.get(f"{question}/value of {rank}")) for rank in range(self.size)]
        return self._settle(question, combine(everyones))

    def _wait(self, question: str, about: str, aside: str) -> bytes:
        """Wait until the result of the exchange `question` is in the store, and return the stored bytes.

        After `patience_s`, store an error for all ranks, unless another rank has stored a result by then, and return
        the stored bytes.

        Args:
            question: The text that identifies the exchange.
            about: A short description of the exchange, for the error.
            aside: The end of the error's text.
        """
        patience_s, pause_s = self.patience_s, FIRST_PAUSE_S
        until = self.now() + patience_s
        self.store.set(f"waits of {self.rank}", question)
        # The counter may be too high: a rank whose answer has arrived may not have noticed it yet.
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
        """Return a text that names the ranks that have not posted a value for the exchange `question`."""
        missing = [rank for rank in range(self.size) if not self.store.check([f"{question}/value of {rank}"])]
        return f"{self.named(missing)} did not reach" if missing else "a rank ended before it had answered"

    def _release_all(self) -> None:
        """If all ranks wait for the results of different exchanges, end each wait with an error that says so.

        All of them did wait at one moment: each had stored the name of its exchange before this method looked for the
        result, and there was none. (With several threads per rank, one may have waited while another could have gone
        on; then the ranks are released too early.)
        """
        keys = [f"waits of {rank}" for rank in range(self.size)]
        if not self.store.check(keys):
            return
        questions = [self.store.get(key).decode() for key in keys]
        if not any(self._answer(question) for question in set(questions)):
            for question in sorted(set(questions)):
                self._settle(question, None, f"the ranks wait for different answers: {self.by_value(questions)}")


def longest_of_ranks(times_us: Sequence[Times]) -> list[float | None]:
    """Return each config's longest time in microseconds, given the times of each rank; None if it failed on one.

    >>> longest_of_ranks([[3.0, 5.0], [4.0, None]])
    [4.0, None]
    """
    return [longest(of_config) for of_config in zip(*times_us, strict=True)]


def longest(times_us: Times) -> float | None:
    """Return the longest of a config's times on all ranks, in microseconds; None if it failed on one of them.

    >>> longest([3.0, 5.0]), longest([3.0, None])
    (5.0, None)
    """
    known = [time_us for time_us in times_us if time_us is not None and math.isfinite(time_us)]
    return max(known) if len(known) == len(times_us) else None
