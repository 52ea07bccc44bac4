"""`agree`: where the ranks of a job may tune, and that all of them then run the same config.

Without it nothing is timed in a job of several ranks: one that tunes keeps the others waiting in their next collective.
They run the prediction then, which is the same on every rank by construction. `rendezvous.py` has the protocol.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ....datasets import ForetuneError, KernelConfig, Problem
from ....datasets.errors import abridged, check_between, shown
from ...arguments import warn_once
from ...node_copies import distributed_in_use
from .rendezvous import RankMismatchError, Rendezvous, Times, longest_of_ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: Ranks that start together compile and time a shortlist within seconds of each other; one that reads a checkpoint
#: first is later. Short of the ten minutes after which NCCL gives a collective up.
PATIENCE_S = 60.0
_LONGEST_PATIENCE_S = 86_400.0


class Agreement:
    """What `agree` gives: in force from then on, or until the end of its block."""

    def __init__(self, group: ProcessGroup | None, timeout_s: float) -> None:
        self.group, self.timeout_s = group, timeout_s
        self._rendezvous: WeakKeyDictionary[ProcessGroup, Rendezvous] = WeakKeyDictionary()
        self._is_lost = False

    def __enter__(self) -> Agreement:
        return self

    def __exit__(self, *error: object) -> None:
        global _epoch
        if self in _in_force:
            _in_force.remove(self)
            _epoch += 1

    def times(self, kernel: str, question: str, times_us: Callable[[], Times]) -> list[float | None] | None:
        """Return the longest times of all ranks, the same list on each; None, with a warning, for the prediction.

        None where the ranks have no common answer; and once the store cannot be reached, always.
        """
        if not self._is_lost and (group := _group(self)) is not None:
            try:
                times: list[float | None] = self._with(group).meet(question, lambda: list(times_us()), longest_of_ranks)
                return times
            except RankMismatchError as error:
                warn_once(f"{kernel}: the ranks do not agree on a config", f" ({error}): each runs its first")
            except Exception as error:  # noqa: BLE001 - whatever a store raises
                self._is_lost = True
                warn_once(
                    f"the ranks cannot agree on times, because their store cannot be reached "
                    f"({type(error).__name__}: {error})",
                    ": the predicted configs run",
                )
        return None

    def _with(self, group: ProcessGroup) -> Rendezvous:
        if group not in self._rendezvous:
            self._rendezvous[group] = rendezvous_of(group, "agree", self.timeout_s)
        return self._rendezvous[group]


# For the process, not for a thread: backward passes run in threads of their own. The last one in force counts.
_in_force: list[Agreement] = []
#: The one that was entered last, whether or not it has ended: what was agreed on in it stays.
_last: Agreement | None = None
_epoch = 0
_numbers: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()
_next_number = itertools.count(1)


def agree(group: ProcessGroup | None = None, timeout_s: float = PATIENCE_S) -> Agreement:
    """Let the ranks of a group tune, and have all of them run the config that is fastest on the slowest of them.

    It is in force from the call on, or for a `with` block. Each rank times the shortlist of a problem that it meets for
    the first time; each config counts as slow as on its slowest rank, and the fastest one runs on every rank, as long
    as the process lives. If a rank does not come, because it met other shapes or has died, the prediction runs on every
    rank, also on those that come late, with a warning that names the ranks and the difference.

    Use it around a few steps in which all ranks of the group see the same shapes: warm-up steps, or a group of ranks
    that share a batch. Outside of it, a job of several ranks times nothing and runs what was agreed on, or predicted.
    It uses the group's key-value store, never collectives. A process without `torch.distributed` tunes as usual.

    Args:
        group: The ranks; all ranks if left out.
        timeout_s: How long a rank waits for the others, in seconds. Each wait in vain halves the next.

    Raises:
        ForetuneError: This process is in no such group, or the timeout is not between 0 and a day.

    >>> with agree(timeout_s=30):
    ...     pass  # a step or two
    """
    global _last, _epoch
    check_between("timeout_s", timeout_s, 0, _LONGEST_PATIENCE_S)
    if group is not None and not _is_ours(group):
        raise ForetuneError(f"group must be a process group that this process is in, or None, but is {shown(group)}")
    _last = Agreement(group, timeout_s)
    _in_force.append(_last)
    _epoch += 1
    return _last


def may_tune() -> bool:
    """Whether anything may be timed now: in a process without other ranks, and where `agree` is in force.

    >>> may_tune()
    True
    """
    return bool(_in_force) or _group(None) is None


def choose_together() -> bool:
    """Whether `agree` is in force, and there are other ranks to choose with.

    >>> with agree():
    ...     choose_together()  # a process of its own
    False
    """
    return bool(_in_force) and scope() > 0


def agreed_choice(
    kernel: str,
    problem: Problem | str,
    configs: Sequence[KernelConfig | Mapping[str, Any]],
    times_us: Callable[[], Times],
) -> int:
    """Return the position of the config to run: the fastest, agreed on as `agree` says.

    It is the first, which must be the best predicted one, where nothing may be timed, nothing is agreed on, or none
    could be timed. A choice may be remembered for this `scope()`; one from elsewhere may differ from the other ranks'.

    Args:
        kernel: Its name.
        problem: The problem, or a text for it.
        configs: The same on each rank, in the same order.
        times_us: Returns the times of all configs (microseconds, None for one that fails). Called only if needed.

    >>> configs = [{"BLOCK": 64}, {"BLOCK": 128}, {"BLOCK": 256}]
    >>> agreed_choice("softmax", "rows=8", configs, lambda: [3.0, 2.0, None])
    1
    """
    if not may_tune():
        return 0
    times = agreed(times_us, kernel, problem, configs)
    known = [position for position, time_us in enumerate(times) if time_us is not None]
    return min(known, key=lambda position: (times[position], position), default=0)


def agreed(
    times_us: Times | Callable[[], Times],
    kernel: str,
    problem: Problem | str,
    configs: Sequence[KernelConfig | Mapping[str, Any]],
) -> list[float | None]:
    """Return the times of all ranks where `agree` is in force: of each config the longest, the same list on each rank.

    All None where there is no agreement: then the first config must run.

    Args:
        times_us: The times that this rank has measured, or a function that measures them if that is needed.
        kernel: Its name.
        problem: The problem, or a text for it.
        configs: The same on each rank, in the same order.

    >>> agreed([3.0, float("inf")], "softmax", "rows=8", [{"BLOCK": 64}, {"BLOCK": 128}])
    [3.0, None]
    """

    def timed() -> list[float | None]:
        try:
            measured = times_us() if callable(times_us) else times_us
            times = [time_us if time_us is not None and math.isfinite(time_us) else None for time_us in measured]
            if len(times) != len(configs):
                raise ForetuneError(f"{len(times)} times for {len(configs)} configs")
            return times
        except Exception as error:  # noqa: BLE001 - the other ranks wait for what becomes of it, and the launch goes on
            warn_once(f"{kernel}: its configs could not be timed ({type(error).__name__}: {error})", ": the first runs")
            return [None] * len(configs)

    agreement = _in_force[-1] if _in_force else None
    if agreement is None or _group(agreement) is None:
        return timed()
    return agreement.times(kernel, _question(kernel, problem, configs), timed) or [None] * len(configs)


def scope() -> int:
    """Return a number for the ranks that choices are made with: 0 for a process alone, else one for each group.

    Choices in memory are kept by it, so that none made alone runs among others.

    >>> scope()
    0
    """
    return number_of(_group(_in_force[-1] if _in_force else _last))


def number_of(group: ProcessGroup | None) -> int:
    """Return a number that no other process group of this process has had, or will have; 0 for None.

    Its `id` is no such number: a group that is destroyed leaves it to the next one.
    """
    return 0 if group is None else _numbers.setdefault(group, next(_next_number))


def rendezvous_of(group: ProcessGroup, purpose: str, patience_s: float, is_patient: bool = False) -> Rendezvous:
    """Return where the ranks of a group meet for one purpose, in the group's own store."""
    distributed = distributed_in_use()
    return Rendezvous(
        distributed.PrefixStore(f"foretune/{group.group_name}/{purpose}", group.get_group_store()),
        distributed.get_rank(group),
        distributed.get_world_size(group),
        patience_s=patience_s,
        is_patient=is_patient,
        names=distributed.get_process_group_ranks(group),
    )


def epoch() -> int:
    """Return a number that changes when `agree` comes in force or ends: choices of another epoch must be made again.

    >>> before = epoch()
    >>> with agree():
    ...     epoch() == before
    False
    """
    return _epoch


def _question(kernel: str, problem: Problem | str, configs: Sequence[KernelConfig | Mapping[str, Any]]) -> str:
    """Return the same text in every process for the same question, and another one for another; to be read, too."""
    values = [config.to_json() if isinstance(config, KernelConfig) else config for config in configs]
    about = problem.to_json() if isinstance(problem, Problem) else problem
    digest = hashlib.sha256(json.dumps([kernel, about, values], sort_keys=True).encode()).hexdigest()[:16]
    listed = abridged(", ".join(json.dumps(value, sort_keys=True) for value in values))
    return f"{kernel} for {abridged(str(problem))} with {len(configs)} configs ({listed}) #{digest}"


def _group(agreement: Agreement | None) -> ProcessGroup | None:
    """Return the group of an agreement; None for a process without other ranks."""
    distributed = distributed_in_use()
    if distributed is None:
        return None
    group: ProcessGroup | None = agreement.group if agreement else None
    if group is None or not _is_ours(group):  # the latter where it was destroyed since
        group = distributed.group.WORLD
    return group if distributed.get_world_size(group) > 1 else None


def _is_ours(group: Any) -> bool:
    try:
        return bool(distributed_in_use().get_rank(group) >= 0)
    except Exception:  # noqa: BLE001 - torch says in many ways that something is no group
        return False
