"""`agree`: let the ranks of a job tune together and run the same config.

Without it, nothing is timed in a job of several ranks, because a rank that tunes keeps the others waiting in their next
collective. They run the predicted config instead, which is the same on every rank by construction. `rendezvous.py` has
the protocol.
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
from ...arguments import begin_epoch, warn_once
from ...arguments import epoch as epoch  # a part of this module's interface
from ...node_copies import distributed_in_use
from .rendezvous import RankMismatchError, Rendezvous, Times, longest_of_ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

#: How long ranks wait by default, in seconds. Ranks that start together compile and time a shortlist within seconds of
#: each other; one that first reads a checkpoint is later. NCCL aborts a collective after ten minutes.
PATIENCE_S = 60.0
_LONGEST_PATIENCE_S = 86_400.0


class Agreement:
    """The result of `agree`: while it is in force, all ranks of a group tune together and run the same configs.

    `agree` puts it in force. It ends with the `with` block; without `with` it stays in force until the process ends.
    """

    def __init__(self, group: ProcessGroup | None, timeout_s: float) -> None:
        self.group, self.timeout_s = group, timeout_s
        self._rendezvous: WeakKeyDictionary[ProcessGroup, Rendezvous] = WeakKeyDictionary()
        self._is_lost = False

    def __enter__(self) -> Agreement:
        return self

    def __exit__(self, *error: object) -> None:
        if self in _in_force:
            _in_force.remove(self)
            begin_epoch()

    def times(self, kernel: str, question: str, times_us: Callable[[], Times]) -> list[float | None] | None:
        """Exchange times; return each config's longest time on all ranks, the same list on each; None if that fails.

        It fails, with a warning, if the ranks ask for different things or one does not come, and always after the store
        could not be reached. Every rank then runs the predicted config.

        Args:
            kernel: The kernel's name, for warnings.
            question: The same text on each rank for the same kernel, problem and configs.
            times_us: Measures this rank's times in microseconds; called only if needed.
        """
        if not self._is_lost and (group := _group(self)) is not None:
            try:
                times: list[float | None] = self._with(group).meet(question, lambda: list(times_us()), longest_of_ranks)
                return times
            except RankMismatchError as error:
                warn_once(f"{kernel}: the ranks do not agree on a config", f" ({error}): each runs its first config")
            except Exception as error:  # noqa: BLE001 - stores raise many types
                self._is_lost = True
                warn_once(
                    f"the ranks cannot agree on times, because their store cannot be reached "
                    f"({type(error).__name__}: {error})",
                    ": the predicted configs run",
                )
        return None

    def _with(self, group: ProcessGroup) -> Rendezvous:
        """Return the `Rendezvous` of a group, through which its ranks exchange values; create it at the first call."""
        if group not in self._rendezvous:
            self._rendezvous[group] = rendezvous_of(group, "agree", self.timeout_s)
        return self._rendezvous[group]


# For the process, not for a thread, because backward passes run in threads of their own. The last one in the list
# counts.
_in_force: list[Agreement] = []
#: The agreement that was created last, even if it has ended: its choices stay valid.
_last: Agreement | None = None
_numbers: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()
_next_number = itertools.count(1)


def agree(group: ProcessGroup | None = None, timeout_s: float = PATIENCE_S) -> Agreement:
    """Let the ranks of a group tune together, and all run the config that is fastest by the time of its slowest rank.

    It is in force from the call on, or for a `with` block. Each rank times the shortlist of a problem at its first
    call. A config's time is that on its slowest rank, and the fastest config runs on every rank for the rest of the
    process. If a rank does not take part, because it has other shapes or has died, the prediction runs on
    every rank, including those that come late, with a warning that names the ranks and the difference.

    Use it around a few steps in which all ranks of the group see the same shapes: warm-up steps, or a group of ranks
    that share a batch. Outside of it, a job of several ranks times nothing and runs what was agreed on, or else the
    prediction. It uses the group's key-value store, never collectives. A process without `torch.distributed` tunes as
    usual.

    Args:
        group: The ranks; all ranks if left out.
        timeout_s: How long a rank waits for the others, in seconds. Each wait in vain halves the next.

    Returns:
        A context manager that ends the agreement.

    Raises:
        ForetuneError: This process is not in the group, or the timeout is not between 0 and a day.

    >>> with agree(timeout_s=30):
    ...     pass  # a step or two
    """
    global _last
    check_between("timeout_s", timeout_s, 0, _LONGEST_PATIENCE_S)
    if group is not None and not _is_member(group):
        raise ForetuneError(f"group must be a process group that this process is in, or None, but is {shown(group)}")
    _last = Agreement(group, timeout_s)
    _in_force.append(_last)
    begin_epoch()
    return _last


def may_tune() -> bool:
    """Return whether configs may be timed now: in a process without other ranks, or while `agree` is in force.

    >>> may_tune()
    True
    """
    return bool(_in_force) or _group(None) is None


def choose_together() -> bool:
    """Return whether `agree` is in force and there are other ranks.

    >>> with agree():
    ...     choose_together()  # a process without other ranks
    False
    """
    return bool(_in_force) and scope() > 0


def agreed_choice(
    kernel: str,
    problem: Problem | str,
    configs: Sequence[KernelConfig | Mapping[str, Any]],
    times_us: Callable[[], Times],
) -> int:
    """Return the position of the config to run: the fastest, agreed on with the other ranks while `agree` is in force.

    It is 0 if nothing may be timed, the ranks do not agree, or no config could be timed; so the first config must be
    the one predicted to be best. A caller may remember the choice for this `scope()` only; in another scope it may
    differ from that of the other ranks.

    Args:
        kernel: The kernel's name.
        problem: The problem, or a text for it.
        configs: The configs, the same on each rank and in the same order.
        times_us: Returns the times of all configs in microseconds, None for a config that fails. Called only if needed.

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
    """Return each config's longest time on all ranks while `agree` is in force, the same list on each rank.

    All times are None if the ranks do not agree; then the first config must run. Without other ranks, these are this
    process's own times.

    Args:
        times_us: This rank's times in microseconds, or a function that measures them if needed.
        kernel: The kernel's name.
        problem: The problem, or a text for it.
        configs: The configs, the same on each rank and in the same order.

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
        except Exception as error:  # noqa: BLE001 - the other ranks wait for this result, and the launch must go on
            warn_once(
                f"{kernel}: its configs could not be timed ({type(error).__name__}: {error})", ": the first config runs"
            )
            return [None] * len(configs)

    agreement = _in_force[-1] if _in_force else None
    if agreement is None or _group(agreement) is None:
        return timed()
    return agreement.times(kernel, _question(kernel, problem, configs), timed) or [None] * len(configs)


def scope() -> int:
    """Return a number that identifies the group of ranks that now choose configs together; 0 for a process alone.

    Choices in memory are stored by this number, so that a choice made alone does not run in a job of several ranks.

    >>> scope()
    0
    """
    return number_of(_group(_in_force[-1] if _in_force else _last))


def number_of(group: ProcessGroup | None) -> int:
    """Return a number that identifies a process group for the life of this process; 0 for None.

    Its `id` would not, because Python reuses the `id` of a destroyed group.
    """
    return 0 if group is None else _numbers.setdefault(group, next(_next_number))


def rendezvous_of(group: ProcessGroup, purpose: str, patience_s: float, is_patient: bool = False) -> Rendezvous:
    """Return an object with which a group's ranks exchange values for one purpose, through the group's own store.

    Each rank makes its own; creating it waits for nobody.

    Args:
        group: The process group.
        purpose: A name; objects of other purposes do not see these values.
        patience_s: The seconds that a rank waits for an answer before all ranks get an error instead.
        is_patient: Keep this limit; otherwise it is halved each time that it runs out.
    """
    distributed = distributed_in_use()
    return Rendezvous(
        distributed.PrefixStore(f"foretune/{group.group_name}/{purpose}", group.get_group_store()),
        distributed.get_rank(group),
        distributed.get_world_size(group),
        patience_s=patience_s,
        is_patient=is_patient,
        names=distributed.get_process_group_ranks(group),
    )


def _question(kernel: str, problem: Problem | str, configs: Sequence[KernelConfig | Mapping[str, Any]]) -> str:
    """Return a readable text that is the same in every process for the same kernel, problem and configs."""
    values = [config.to_json() if isinstance(config, KernelConfig) else config for config in configs]
    about = problem.to_json() if isinstance(problem, Problem) else problem
    digest = hashlib.sha256(json.dumps([kernel, about, values], sort_keys=True).encode()).hexdigest()[:16]
    listed = abridged(", ".join(json.dumps(value, sort_keys=True) for value in values))
    return f"{kernel} for {abridged(str(problem))} with {len(configs)} configs ({listed}) #{digest}"


def _group(agreement: Agreement | None) -> ProcessGroup | None:
    """Return the process group of an agreement (by default all ranks); None for a process without other ranks."""
    distributed = distributed_in_use()
    if distributed is None:
        return None
    group: ProcessGroup | None = agreement.group if agreement else None
    if group is None or not _is_member(group):  # it may have been destroyed meanwhile
        group = distributed.group.WORLD
    return group if distributed.get_world_size(group) > 1 else None


def _is_member(group: Any) -> bool:
    """Return whether a value is a process group that this process is in."""
    try:
        return bool(distributed_in_use().get_rank(group) >= 0)
    except Exception:  # noqa: BLE001 - torch raises many types for a value that is not a group
        return False
