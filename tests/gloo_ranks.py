"""`python gloo_ranks.py RANK SIZE PORT`: one rank of `tuning/test_gloo_ranks.py`, which hosts the store at that port.

Tells what it got for each thing that is looked at, in JSON. No GPU: a rank's times are made up, other ones on each.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import warnings
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import foretune
import torch
import triton
import triton.language as tl
from foretune import DeviceSpec, ForetuneError, Problem
from foretune.kernels import find_family
from foretune.runtime import Mode, choice, use_stub_driver
from foretune.runtime.tuning.ranks.agreement import agreed, agreed_choice
from torch import distributed
from waiting import until

H200 = DeviceSpec.named("h200")
FAMILIES = ("grouped_gemm_fwd", "grouped_gemm_dx", "grouped_gemm_dw")
WARPS = (1, 2, 4)
CONFIGS = [{"BLOCK": block} for block in (16, 32, 64, 128)]
#: Longer than the test may take: what ends well has not waited for it.
ENDLESS_S = 86_400.0


@triton.jit
def fill(x_ptr, n):
    at = tl.arange(0, 16)
    tl.store(x_ptr + at, 1.0, mask=at < n)


def problem(family: str, rows: int, n: int = 1024) -> Problem:
    return Problem.of(family, groups=16, rows=rows, n=n, k=512)


def time_of(rank, config):
    """What a config takes on a rank: between 10 and 20 us."""
    return 10 + hashlib.sha256(f"{rank} {config}".encode()).digest()[0] / 25.6


def tell(value):
    sys.stdout.write(f"{json.dumps(value)}\n")
    sys.stdout.flush()


class Rank:
    """What one does: each method is looked at in the order in which they stand here, on all ranks."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.launched = rank, size, 0
        choice._can_wait = lambda: True
        choice.timer_of = lambda index: self
        torch.cuda.current_device = lambda: 0

    def time(self, launch):
        return SimpleNamespace(time_us=time_of(self.rank, launch()))

    def launch(self, config):
        self.launched += 1
        return config

    def chosen(self, family, rows, mode=Mode.SHORTLIST):
        return str(choice.choose(find_family(family), problem(family, rows), H200, mode, self.launch))

    def times_us(self):
        return [time_of(self.rank, config) for config in CONFIGS]

    def never(self):
        raise AssertionError("nothing is to be timed")

    def posts(self, how_many, question):
        """Waits until so many ranks have posted what they know of a question."""
        store = foretune.runtime.tuning.ranks.agreement._in_force[-1]._with(distributed.group.WORLD).store
        question = foretune.runtime.tuning.ranks.agreement._question("toy", question, CONFIGS)
        until(lambda: store.add(f"{question}/posts", 0) >= how_many)

    def store_is_gone(self):
        try:
            distributed.group.WORLD.get_group_store().check(["anything"])
        except distributed.DistError:
            return True
        return False

    def predicts(self):
        """Choices, shortlists and what a pruner lets through: asked in an order of this rank's own."""
        os.environ["FORETUNE_MODE"] = "predict"
        asked = [(family, rows, n) for family in FAMILIES for rows in (7, 300, 4096, 100_000) for n in (64, 1024, 7168)]
        random.Random(self.rank).shuffle(asked)
        configs = {family: foretune.configs(family) for family in FAMILIES}
        answers = {}
        for family, rows, n in asked:
            case = problem(family, rows, n)
            shortlist = foretune.shortlist(family, case, "h200", k=8)
            pruned = foretune.prune(family, problem=lambda call, case=case: case, device="h200")(configs[family], {})
            predicted = choice.choose(find_family(family), case, H200, Mode.PREDICT, self.launch)
            answers[str(case)] = [shortlist.to_json(), str(predicted), [str(config) for config in pruned]]
        del os.environ["FORETUNE_MODE"]
        assert self.launched == 0
        mine = torch.frombuffer(bytearray(json.dumps(answers, sort_keys=True).encode()), dtype=torch.uint8)
        everyones = [torch.empty_like(mine) for _ in range(self.size)]
        distributed.all_gather(everyones, mine)
        assert all(torch.equal(mine, other) for other in everyones)
        return [len(answers), hashlib.sha256(mine.numpy().tobytes()).hexdigest()]

    def tunes_not_while_others_wait_in_a_collective(self):
        if self.rank == 0:
            self.chosen(FAMILIES[0], 512)
        distributed.all_reduce(torch.ones(1))
        assert self.launched == 0
        return self.chosen(FAMILIES[0], 512)

    def tunes_where_it_was_asked_to(self):
        with foretune.agree(timeout_s=ENDLESS_S):
            within = [self.chosen(family, 512) for family in FAMILIES]
        timed = self.launched
        assert timed > 0
        assert [self.chosen(family, 512) for family in FAMILIES] == within
        assert self.launched == timed
        return within

    def gets_the_longest_times(self):
        with foretune.agree(timeout_s=ENDLESS_S):
            return agreed(self.times_us(), "toy", "longest", CONFIGS)

    def is_warm(self):
        """One rank comes with times of another run, and one with none that it could take."""
        times = {0: lambda: [1.0, 2.0, 3.0, 0.5], 1: lambda: [None] + [9.0] * 3}.get(self.rank, self.times_us)
        with foretune.agree(timeout_s=ENDLESS_S):
            return agreed_choice("toy", "warm", CONFIGS, times)

    def is_late(self):
        with foretune.agree(timeout_s=ENDLESS_S):
            if self.rank == self.size - 1:
                self.posts(self.size - 1, "late")
            return agreed_choice("toy", "late", CONFIGS, self.times_us)

    def comes_when_others_have_given_up(self):
        with foretune.agree(timeout_s=0):
            if self.rank != 0:
                position = agreed_choice("toy", "given up", CONFIGS, self.times_us)
            distributed.barrier()
            return position if self.rank else agreed_choice("toy", "given up", CONFIGS, self.never)

    def has_another_shape(self):
        """Half of the ranks meet one, half another; later all meet both."""
        shapes = ["even", "odd"] if self.rank % 2 == 0 else ["odd", "even"]
        with foretune.agree(timeout_s=ENDLESS_S):
            first = agreed_choice("toy", shapes[0], CONFIGS, self.times_us)
            distributed.barrier()
            return [first, agreed_choice("toy", shapes[1], CONFIGS, self.never)]

    def agrees_in_halves(self):
        """Each half of the ranks in a group of its own; a group that this rank is not in is refused."""
        halves = [distributed.new_group([rank for rank in range(self.size) if rank % 2 == half]) for half in (0, 1)]
        mine, others = halves[self.rank % 2], halves[1 - self.rank % 2]
        try:
            foretune.agree(others)
            raise AssertionError("a group of others was taken")
        except ForetuneError:
            pass
        with foretune.agree(mine, timeout_s=ENDLESS_S):
            return agreed(self.times_us(), "toy", "halves", CONFIGS)

    def attaches(self):
        """To a kernel of somebody else's, which each rank has tuned alone for one size: then for that and another one
        together, and once more afterwards. What each of the launches ran, in warps, and how many were timed by then."""
        timed, seen = [], []

        def bench(run, quantiles):
            run()
            timed.append(driver.launches[-1].metadata.num_warps)
            return [time_of(self.rank, timed[-1]) / 1e3] * 3

        kernel = triton.autotune([triton.Config({}, num_warps=count) for count in WARPS], ["n"], do_bench=bench)(fill)

        def launch(n):
            kernel[(1,)](torch.zeros(16), n)
            seen.append([kernel.best_config.num_warps, len(timed)])

        with TemporaryDirectory() as folder, use_stub_driver(H200) as driver:
            os.environ["FORETUNE_CACHE_DIR"] = folder
            foretune.attach(kernel)
            launch(16)
            with foretune.agree(timeout_s=ENDLESS_S):
                launch(16)
                launch(32)
            launch(16)
            launch(32)
            foretune.detach(kernel)
        return seen

    def searches(self):
        """A kernel of 24 configs, in several steps; alone, each rank would take others. What was chosen and timed."""
        timed, configs = [], [triton.Config({}, num_warps=w, num_stages=s) for w in (1, 2, 4, 8) for s in range(1, 7)]

        def bench(run, quantiles):
            run()
            found = driver.launches[-1].metadata
            timed.append([found.num_warps, found.num_stages])
            off = abs(found.num_warps - 4) + (found.num_stages - 2 - self.rank % 2) ** 2
            return [1.0 + 0.1 * off] * 3

        kernel = triton.autotune(configs, ["n"], do_bench=bench)(fill)
        with TemporaryDirectory() as folder, use_stub_driver(H200) as driver:
            os.environ["FORETUNE_CACHE_DIR"] = folder
            foretune.attach(kernel)
            with foretune.agree(timeout_s=ENDLESS_S):
                kernel[(1,)](torch.zeros(16), 16)
            foretune.detach(kernel)
        return [str(kernel.best_config), timed]

    def dies_after_posting(self):
        """The last rank does, and the first comes when it is dead. No rank uses a collective from here on."""
        with foretune.agree(timeout_s=ENDLESS_S) as agreement:
            rendezvous = agreement._with(distributed.group.WORLD)
            if self.rank == self.size - 1:
                rendezvous.sleep = lambda seconds: (rendezvous.store.set("dead", "1"), os._exit(0))
            if self.rank == 0:
                until(lambda: rendezvous.store.check(["dead"]))
            return agreed_choice("toy", "dies", CONFIGS, self.times_us)

    def loses_the_store(self):
        """Its host closes it when all have printed this."""
        tell("close the store")
        until(self.store_is_gone)
        with foretune.agree(timeout_s=ENDLESS_S), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            positions = [agreed_choice("toy", f"lost {number}", CONFIGS, self.times_us) for number in range(3)]
        return [positions, len(caught)]


def main(rank: int, size: int, port: int) -> None:
    torch.set_num_threads(1 + rank % 3)
    store = distributed.TCPStore("127.0.0.1", port, is_master=False)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    player = Rank(rank, size)
    for name in LOOKS:
        tell({name: getattr(player, name)()})
    os._exit(0)  # the group has a dead member


LOOKS = (
    "predicts",
    "tunes_not_while_others_wait_in_a_collective",
    "tunes_where_it_was_asked_to",
    "gets_the_longest_times",
    "is_warm",
    "is_late",
    "comes_when_others_have_given_up",
    "has_another_shape",
    "agrees_in_halves",
    "attaches",
    "searches",
    "dies_after_posting",
    "loses_the_store",
)

if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
