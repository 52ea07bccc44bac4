"""`python ranks_apart.py RANK SIZE PORT`: one rank of `tuning/test_ranks_apart.py`, whose ranks are not in step.

Prints for each look what this rank got, as JSON. After each of them the caller's own all-reduce must give the exact
sum: nothing of ours may pair with it. No GPU: a rank's times are made up. The last rank is the odd one out.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from datetime import timedelta
from types import SimpleNamespace

import foretune
import torch
import triton
from foretune import DeviceSpec
from foretune.runtime import use_stub_driver
from foretune.runtime.tuning.functions.in_step import Ranks
from foretune.runtime.tuning.ranks.agreement import agreed_choice
from gloo_ranks import fill
from torch import distributed

TILES = [16, 32, 64]
#: Longer than the test may take: what ends well has not waited for it.
PATIENT = timedelta(days=1)


class Watch:
    """A `CallTimer`: a call takes what it says that it takes."""

    us = 0.0

    def sample(self, call, samples, undo):
        times = []
        for _ in range(samples):
            if undo is not None:
                undo()
            call()
            times.append(self.us)
        return times


class Rank:
    """What one does: each method is looked at in the order of `LOOKS`, on all ranks."""

    def __init__(self, rank, size, store):
        self.rank, self.size, self.store, self.watch = rank, size, store, Watch()
        self.is_odd, self.is_first = rank == size - 1, rank == 0
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=PATIENT)
        self.group = distributed.group.WORLD
        os.environ["FORETUNE_CACHE_DIR"] = os.path.join(os.environ["FORETUNE_CACHE_DIR"], str(rank))

    # What the looks are made of

    def sums_are_right(self, group=None):
        """The caller's own collective."""
        ranks = distributed.get_process_group_ranks(group or self.group)
        mine = torch.tensor([1.0, 2.0]) * (self.rank + 1)
        distributed.all_reduce(mine, group=group)
        total = sum(rank + 1 for rank in ranks)
        return mine.tolist() == [total, 2.0 * total]

    def spend(self, tile, key=None):
        """Tiles cost something else on each rank: the last of them is the fastest on the slowest."""
        self.watch.us = {16: 1 + 9.0 * self.is_odd, 32: 10 - 9.0 * self.is_odd, 64: 5.0}[tile]
        return tile

    def tuned(self, function=None, space=None, name="work", **options):
        function = function or (lambda key, tile: self.spend(tile))
        function.__qualname__ = name
        options = {"n_warmup": 1, "n_repeat": 1, "cache": False, "timer": self.watch, **options}
        return foretune.tune(space or {"tile": TILES}, **options)(function)

    def contextual(self, function, name="layer"):
        function.__qualname__ = name
        return foretune.contextual_autotune(n_warmup=1, n_repeat=1, cache=False, timer=self.watch)(function)

    def hasten(self, group=None):
        """Has this rank wait for nobody any more: where it is known that nobody comes."""
        Ranks(group or self.group)._steps().rendezvous.patience_s = 0.0

    def calm(self):
        Ranks(self.group)._steps().rendezvous.patience_s = PATIENT.total_seconds()

    def outcome(self, call):
        """What a call returns, or raises."""
        try:
            return call()
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - it is printed
            return f"{type(error).__name__}: {error}"

    # The looks

    def a_key_is_new_on_one_rank(self):
        """The others know theirs, and go on to their own collective."""
        work = self.tuned()
        found = [work("known", autotune_pg=self.group)]
        if self.is_odd:
            self.hasten()
        found.append(self.outcome(lambda: work("new" if self.is_odd else "known", autotune_pg=self.group)))
        right = self.sums_are_right()
        self.calm()
        return [*found, right, work("new", autotune_pg=self.group)]

    def ranks_come_in_another_order(self):
        first, second = self.tuned(name="first"), self.tuned(name="second")
        calls = [second, first] if self.is_odd else [first, second]
        found = [self.outcome(lambda: calls[0]("a", autotune_pg=self.group))]
        right = self.sums_are_right()
        return [*found, right, first("a", autotune_pg=self.group), second("a", autotune_pg=self.group)]

    def ranks_have_other_shapes(self):
        work = self.tuned()
        return self.outcome(lambda: work([0] * (3 + self.is_odd), autotune_pg=self.group))

    def ranks_have_other_configs(self):
        work = self.tuned(space={"tile": TILES[: 2 + self.is_first]})
        return self.outcome(lambda: work(1, autotune_pg=self.group))

    def ranks_run_other_counts(self):
        work = self.tuned(n_repeat=2 + self.is_odd)
        return self.outcome(lambda: work(1, autotune_pg=self.group))

    def a_rank_has_no_configs(self):
        """One raises before anything is tuned; the others hear of it."""
        work = self.tuned(prune=lambda config, key: not self.is_odd)
        return self.outcome(lambda: work(1, autotune_pg=self.group))

    def a_rank_raises_between_runs(self):
        """`reset` of this rank does, which is no config's failure."""
        runs = []

        def reset(key):
            runs.append(key)
            if self.is_odd and len(runs) == 3:
                raise KeyboardInterrupt("Ctrl-C")

        work = self.tuned(reset=reset)
        return self.outcome(lambda: work(1, autotune_pg=self.group))

    def a_config_fails_on_one_rank(self):
        """One config less, everywhere."""

        def function(key, tile):
            if self.is_odd and tile == 64:
                raise RuntimeError("too large")
            return self.spend(tile)

        result = self.tuned(function).tune(1, autotune_pg=self.group)
        return [result.best_config["tile"], [trial.error for trial in result.trials]]

    def a_trial_raises_before_its_collective(self):
        """The others are in the function's all-reduce then, which this rank's caller completes."""
        sums = []

        def function(key, tile):
            if self.is_odd and tile == 32:
                self.hasten()  # nobody comes
                raise RuntimeError("boom")
            sums.append(self.sums_are_right())
            return self.spend(tile)

        work = self.tuned(function)
        found = self.outcome(lambda: work(1, autotune_pg=self.group))
        if self.is_odd:
            sums.append(self.sums_are_right())
        self.calm()
        return [found, sums]

    def a_context_raises_before_its_collective(self):
        """As above, of a function that is tuned as a whole: in its first run, then in a trial."""
        return [self._context_raises_in_run(run) for run in (1, 2)]

    def _context_raises_in_run(self, number):
        inner, runs, sums = self.tuned(), [], []

        def function(key):
            runs.append(key)
            tile = inner(key)
            if self.is_odd and len(runs) == number:
                self.hasten()
                raise RuntimeError("boom")
            sums.append(self.sums_are_right())
            return tile

        layer = self.contextual(function)
        found = self.outcome(lambda: layer(number, autotune_pg=self.group))
        if self.is_odd:
            sums.append(self.sums_are_right())
        self.calm()
        return [found, sums]

    def contexts_meet_other_kernels(self):
        inner = self.tuned(space={"tile": TILES[: 2 + self.is_odd]})

        def function(key):
            inner(key)
            return self.sums_are_right()

        return self.outcome(lambda: self.contextual(function)(1, autotune_pg=self.group))

    def a_context_that_all_tune(self):
        inner, sums = self.tuned(), []

        def function(key):
            tile = inner(key)
            sums.append(self.sums_are_right())
            return tile

        layer = self.contextual(function)
        return [[layer(1, autotune_pg=self.group) for _ in range(2)], all(sums), len(sums)]

    def time_is_over_on_one_rank(self):
        clock = SimpleNamespace(seconds=0.0)

        def function(key, tile):
            clock.seconds += 10.0 * self.is_odd
            return self.spend(tile)

        work = self.tuned(function, budget_s=5.0)
        work._clock = lambda: clock.seconds
        result = work.tune(1, autotune_pg=self.group)
        return [len(result.trials), result.best_config["tile"], result.reason]

    def each_rank_has_a_model_of_its_own(self):
        """Ranks follow one advice."""
        positions = [2, 1] if self.is_odd else [1, 0, 2]
        advice = SimpleNamespace(positions=positions, sure=True, reason=f"of rank {self.rank}")
        model = SimpleNamespace(learn=lambda *about: None, advise=lambda *about: advice)
        result = self.tuned(search=model).tune(1, autotune_pg=self.group)
        return [len(result.trials), result.best_config["tile"], result.reason]

    def one_of_them_is_nested(self):
        """A config that is on trial calls another function that all ranks tune: both are in step."""
        inner = self.tuned(name="inner")

        def function(key, tile):
            inner(tile, autotune_pg=self.group)
            return self.spend(tile)

        return self.tuned(function, name="outer")(1, autotune_pg=self.group)

    def a_group_of_some(self):
        """The first and the last rank. An error names them as the job does."""
        ranks = [0, self.size - 1]
        group = distributed.new_group(ranks, timeout=timedelta(hours=3))
        if self.rank not in ranks:
            return None
        work = self.tuned()
        found = [work("a", autotune_pg=group), Ranks(group)._steps().rendezvous.patience_s]
        if self.is_odd:
            self.hasten(group)
            found.append(self.outcome(lambda: work("b", autotune_pg=group)))
        else:
            found.append(None)
        return [*found, self.sums_are_right(group)]

    def a_group_of_another_world(self):
        """What was chosen in a world that ended is asked for again in the next one."""
        work, runs = self.tuned(), []
        work("a", autotune_pg=self.group)
        before = Ranks(self.group).number
        distributed.destroy_process_group()
        self.group = None
        distributed.init_process_group(
            "gloo",
            store=distributed.PrefixStore("again", self.store),
            rank=self.rank,
            world_size=self.size,
            timeout=PATIENT,
        )
        self.group = distributed.group.WORLD
        choice = self.tuned(lambda key, tile: (runs.append(tile), self.spend(tile))[1])("a", autotune_pg=self.group)
        return [choice, work("a", autotune_pg=self.group), len(runs) > 1, Ranks(self.group).number != before]

    def agrees_on_other_configs(self):
        """Without collectives in what is tuned it is no error: each runs its first config, and says so."""
        with foretune.agree(timeout_s=PATIENT.total_seconds()), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            choice = agreed_choice("toy", "odd", [{"tile": 16}, {"tile": 32 + self.is_odd}], lambda: [2.0, 1.0])
        return [choice, [str(one.message) for one in caught]]

    def launched(self, sizes, driver, cost, budget_s=None, tuned=None):
        """A kernel's choices, in warps, and the kernel. `cost` is what a number of warps takes, in microseconds."""

        def bench(run, quantiles):
            run()
            return [cost[driver.launches[-1].metadata.num_warps] / 1e3] * 3

        configs = [triton.Config({}, num_warps=count) for count in cost]
        tuned = tuned or foretune.autotune(configs, ["n"], do_bench=bench, budget_s=budget_s)(fill)
        warps = []
        for size in sizes:
            tuned[(1,)](torch.zeros(16), size)
            warps.append(tuned.best_config.num_warps)
        return warps, tuned

    def time_is_over_before_a_rank_has_measured(self):
        """Then it says so, and the others do not wait for it."""
        with use_stub_driver(DeviceSpec.named("h200")) as driver, foretune.agree(timeout_s=PATIENT.total_seconds()):
            return self.launched([16], driver, {1: 3.0, 2: 1.0, 4: 2.0}, budget_s=0.0 if self.is_odd else None)[0]

    def a_rank_is_in_another_mode(self):
        """As long as it has the same list it takes part; where it has not, each runs its first and says so."""
        if self.is_odd:
            os.environ["FORETUNE_MODE"] = "off"
        with use_stub_driver(DeviceSpec.named("h200")) as driver, foretune.agree(timeout_s=PATIENT.total_seconds()):
            found = self.launched([32], driver, {1: 3.0 - 2 * self.is_odd, 2: 2.0, 4: 1.0 + 2 * self.is_odd})[0]
        os.environ.pop("FORETUNE_MODE", None)
        return found

    def ranks_have_tuned_alone(self):
        """What each has learned from its own times does not shorten the list that they time together, and what they run
        without having agreed is the same."""
        cost = {1: 3.0, 2: 1.0, 4: 2.0} if self.is_odd else {1: 1.0, 2: 4.0, 4: 2.0}
        with use_stub_driver(DeviceSpec.named("h200")) as driver, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ranks = [distributed.new_group([rank]) for rank in range(self.size)]
            with foretune.agree(ranks[self.rank]):
                alone, tuned = self.launched([16 * at for at in range(3, 13)], driver, cost)
            with foretune.agree(timeout_s=PATIENT.total_seconds()):
                together = self.launched([168], driver, cost, tuned=tuned)[0]
            after = self.launched([168, 136], driver, cost, tuned=tuned)[0]
        said = [str(one.message) for one in caught if isinstance(one.message, foretune.ForetuneWarning)]
        return [alone[-1], together, after, said]  # the first follow what was best for the sizes of earlier cases

    def attached_with_other_configs(self):
        """A kernel of somebody else's: with other configs on one rank; with other shapes; and where no config can be
        timed on one rank."""
        odd = self.is_odd
        cases = [((1, 4 if odd else 2), 16, False), ((1, 2), 48 if odd else 32, False), ((1, 2), 16, odd)]
        with use_stub_driver(DeviceSpec.named("h200")) as driver, foretune.agree(timeout_s=PATIENT.total_seconds()):
            return [self._attached(driver, *case) for case in cases]

    def _attached(self, driver, counts, size, fails):
        def bench(run, quantiles):
            run()
            if fails:
                raise ZeroDivisionError
            return [1.0 / driver.launches[-1].metadata.num_warps] * 3

        configs = [triton.Config({}, num_warps=count) for count in counts]
        kernel = triton.autotune(configs, ["n"], do_bench=bench)(fill)
        with foretune.attached([kernel]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kernel[(1,)](torch.zeros(16), size)
        return kernel.best_config.num_warps

    def a_rank_is_killed(self):
        """No rank uses a collective from here on."""

        def function(key, tile):
            if tile == 32:
                if self.is_odd:
                    os._exit(0)
                self.hasten()
            return self.spend(tile)

        work = self.tuned(function)
        return self.outcome(lambda: work(1, autotune_pg=self.group))


def main(rank, size, port):
    player = Rank(rank, size, distributed.TCPStore("127.0.0.1", port, is_master=False))
    for name in LOOKS:
        found = getattr(player, name)()
        right = name == LOOKS[-1] or player.sums_are_right()
        sys.stdout.write(f"{json.dumps({name: [found, right]})}\n")
        sys.stdout.flush()
    os._exit(0)  # the group has a dead member


LOOKS = [
    "a_key_is_new_on_one_rank",
    "ranks_come_in_another_order",
    "ranks_have_other_shapes",
    "ranks_have_other_configs",
    "ranks_run_other_counts",
    "a_rank_has_no_configs",
    "a_rank_raises_between_runs",
    "a_config_fails_on_one_rank",
    "a_trial_raises_before_its_collective",
    "a_context_raises_before_its_collective",
    "contexts_meet_other_kernels",
    "a_context_that_all_tune",
    "time_is_over_on_one_rank",
    "each_rank_has_a_model_of_its_own",
    "one_of_them_is_nested",
    "a_group_of_some",
    "a_group_of_another_world",
    "agrees_on_other_configs",
    "time_is_over_before_a_rank_has_measured",
    "a_rank_is_in_another_mode",
    "ranks_have_tuned_alone",
    "attached_with_other_configs",
    "a_rank_is_killed",
]

if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
