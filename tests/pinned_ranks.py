"""`python pinned_ranks.py RANK SIZE PORT`: one rank of `tuning/test_pinned_ranks.py`.

Prints what it ran as JSON. The first half of the ranks is one node, the second half another, each with a folder and an
empty cache of its own. No rank may time anything, and what a rank would predict or find the fastest is its own.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import foretune
import torch
from foretune import ForetuneWarning, Problem
from foretune.kernels import find_family
from foretune.runtime import Mode, choice, use_stub_driver
from gloo_ranks import tell
from pinned_kernels import FAMILY, H200, LAYER, everything
from torch import distributed


def refuse(*about, **more):
    raise AssertionError("something was timed or predicted")


def main(rank, size, port):
    store = distributed.TCPStore("127.0.0.1", port, is_master=False)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    node = Path(os.environ["FORETUNE_CACHE_DIR"]) / f"node{rank * 2 // size}"
    os.environ["FORETUNE_NODE_DIR"] = str(node)
    os.environ["FORETUNE_CACHE_DIR"] = str(node / str(rank))
    predict = choice.chooser_of
    choice.chooser_of = choice.timer_of = refuse
    choice._can_wait = lambda: True
    timer = SimpleNamespace(sample=refuse)
    with use_stub_driver(H200) as driver:
        tell({"alone": everything(driver, refuse, timer)})
        total = torch.ones(1)
        distributed.all_reduce(total)
        with foretune.agree(timeout_s=0):  # nobody waits, since there is nothing to agree on
            tell({"agreed": everything(driver, refuse, timer)})
        tell({"sum": total.item(), "copies": sorted(path.name for path in node.rglob("foretune.lock"))})
        tell({"wrote": sorted(path.name for path in node.rglob("*.json"))})
        other = Problem.of(FAMILY, groups=16, rows=70_000 + rank, n=64, k=512)
        try:
            choice.choose(find_family(FAMILY), other, H200, Mode.SHORTLIST, refuse)
        except foretune.ForetuneError as error:
            tell({"missing": str(error)})
        choice.chooser_of = predict
        with warnings.catch_warnings(record=True) as caught, foretune.pinned(os.environ["FORETUNE_PIN"], "predict"):
            warnings.simplefilter("always")
            found = [choice.choose(find_family(FAMILY), one, H200, Mode.SHORTLIST, refuse) for one in (other, LAYER)]
        warned = sum(issubclass(one.category, ForetuneWarning) for one in caught)
        tell({"predicted": [str(config) for config in found], "warned": warned})
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
