"""Ranks on GPUs of their own, with NCCL, run one config: `torchrun --nproc-per-node 2 tests/tuning/ranks_on_gpu.py`.

Set PYTHONPATH=tests. Prints a table last, and fails where two ranks differ or wait for longer than they may. Without
GPUs it goes through the same with gloo and made-up times, to be tried anywhere. Every rank takes part in every
collective, whatever it has seen, so that a difference prints NO.
"""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import foretune
import rich
import torch
from foretune import DeviceSpec, Problem
from foretune.datasets.console import table
from foretune.kernels import find_family
from foretune.runtime import Mode, choice
from foretune.runtime.tuning.refine import refinement
from foretune.runtime.tuning.refine.race import CALLS
from foretune.runtime.tuning.refine.refinement import _MEETINGS
from pinning import pinned_kernel, save
from torch import distributed

ON_GPU = torch.cuda.is_available()
GROUPS, N, K = 16, 1024, 512
FAMILIES = ("grouped_gemm_fwd", "grouped_gemm_dx", "grouped_gemm_dw")
#: What a rank that nobody joins may wait, and how late the late one is.
TIMEOUT_S, LATE_S = 8.0, 4.0
#: Steps after which ranks have decided on a refinement at the latest.
REFINED_CALLS = 1 + _MEETINGS * (CALLS + 1)


class Rank:
    """This process, and what was seen in it: rows of the table."""

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.place = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if ON_GPU else torch.device("cpu")
        self.rows: list[tuple[str, str, str]] = []
        self.timed: list[list[float | None]] = []
        if ON_GPU:
            torch.cuda.set_device(self.place)
            self.device = DeviceSpec.live(self.place.index)
        else:
            self.device = DeviceSpec.named("h200")
            choice._can_wait = lambda: True
            choice.timer_of = lambda index: SimpleNamespace(
                time=lambda launch: SimpleNamespace(time_us=10.0 + hash((self.rank, str(launch()))) % 10)
            )
            torch.cuda.current_device = lambda: 0
        measure = choice._times_us

        def noted(*arguments):
            self.timed.append(measure(*arguments))
            return self.timed[-1]

        choice._times_us = noted

    def calls(self, rows: int, mode: str = "shortlist") -> None:
        """Forward and backward of the op."""
        if not ON_GPU:
            self.chosen(rows, Mode(mode))
            return
        x = torch.randn(rows, K, device=self.place, dtype=torch.bfloat16, requires_grad=True)
        w = torch.randn(GROUPS, N, K, device=self.place, dtype=torch.bfloat16, requires_grad=True)
        sizes = torch.full((GROUPS,), rows // GROUPS, device=self.place, dtype=torch.int32)
        y = foretune.grouped_gemm(x, w, sizes, mode=mode)
        y.sum().backward()
        assert torch.isfinite(y).all()
        assert torch.isfinite(w.grad).all()

    def chosen(self, rows: int, mode: Mode = Mode.SHORTLIST) -> list[str]:
        """What the op runs of each kernel; what was agreed on is looked up."""
        configs = []
        for family in FAMILIES:
            problem = Problem.of(family, groups=GROUPS, rows=rows, n=N, k=K)
            config = choice.choose(find_family(family), problem, self.device, mode, lambda config: config)
            configs.append(str(config))
        return configs

    def runs_pinned(self, path: Path, rows: int) -> tuple[bool, list[object]]:
        """Whether the op runs what a file has, which is not what is predicted; and what must be alike on all ranks."""
        kernels, configs = [], []
        for name in FAMILIES:
            family, problem = find_family(name), Problem.of(name, groups=GROUPS, rows=rows, n=N, k=K)
            configs.append(family.default(problem, self.device))
            choices = {family.at_call_time(problem): configs[-1]}
            kernels.append(pinned_kernel(name, choices, family.source_hash(), self.device))
        save(path, *kernels)
        predicted = self.chosen(rows, Mode.PREDICT)
        with foretune.pinned(path):
            self.calls(rows)
            pinned = self.chosen(rows)
        return pinned == [*map(str, configs)] != predicted, [pinned, path.read_text()]

    def alike(self, value: object) -> bool:
        """Whether all ranks have it byte for byte. A collective: every rank must call it."""
        mine = torch.zeros(1 << 16, dtype=torch.uint8, device=self.place)
        text = json.dumps(value, sort_keys=True).encode()
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self.place)
        everyones = [torch.empty_like(mine) for _ in range(self.size)]
        distributed.all_gather(everyones, mine)
        return all(torch.equal(mine, other) for other in everyones)

    def saw(self, what: str, holds: bool, began: float, more: str = "", same: object = None) -> None:
        """Add a row: whether it holds on all ranks and `same` is alike there. A collective: every rank must call it."""
        is_alike = self.alike(same)
        everyones: list[bool | None] = [None] * self.size
        distributed.all_gather_object(everyones, holds and is_alike)
        self.rows.append((what, "yes" if all(everyones) else "NO", f"{time.monotonic() - began:.1f}", more))

    def is_timed(self, how_often: int) -> bool:
        count, self.timed = len(self.timed), []
        return count == how_often

    def meet(self) -> float:
        distributed.all_reduce(torch.ones(1, device=self.place))
        if ON_GPU:
            torch.cuda.synchronize()
        return time.monotonic()


def main() -> None:
    me = Rank()
    distributed.init_process_group("nccl" if ON_GPU else "gloo", timeout=timedelta(minutes=3))
    predicted = {
        rows: me.chosen(rows, Mode.PREDICT) for rows in sorted(range(64, 20_000, 400), key=lambda r: r * 37 % 101)
    }
    began = me.meet()
    me.saw(f"predict: {3 * len(predicted)} choices, byte for byte", True, began, same=predicted)

    began = me.meet()
    with TemporaryDirectory() as folder:  # of each rank: the file is the same
        holds, same = me.runs_pinned(Path(folder) / "foretune.lock", 3072)
    me.saw("a pin file: its configs, nothing timed", holds and me.is_timed(0), began, same=same)

    began = me.meet()
    if me.rank == 0:
        me.calls(2048)
    me.meet()
    me.saw("nobody tunes while another waits in a collective", me.is_timed(0), began)

    began = me.meet()
    with foretune.agree(timeout_s=120):
        me.calls(4096)
    own = [min((t, i) for i, t in enumerate(times) if t is not None)[1] for times in me.timed]
    same_alone = me.alike(own)
    more = "" if same_alone else "each alone would have differed"
    me.saw("shortlist: forward and backward, agreed", me.is_timed(3), began, more, me.chosen(4096))

    began = me.meet()
    me.calls(4096)
    me.saw("... and kept after the block, nothing timed", me.is_timed(0), began, same=me.chosen(4096))

    if ON_GPU:  # only there are calls timed with events
        began = me.meet()
        with foretune.agree(timeout_s=120):
            for _ in range(REFINED_CALLS):
                me.calls(5120, "refine")
        refined = {one.name: one for one in refinement._all.values()}
        more = f"{sum(one.final != one.candidates[0] for one in refined.values())} of 3 are not the predicted config"
        final = [str(refined[name].final) for name in FAMILIES]
        me.saw("refine: decided together", "None" not in final and me.is_timed(0), began, more, final)

    began = me.meet()
    with foretune.agree(timeout_s=120):
        if me.rank == me.size - 1:
            time.sleep(LATE_S)
        me.calls(6144)
    me.saw(f"one is {LATE_S:.0f} s late: agreed", me.is_timed(3), began, same=me.chosen(6144))

    began = me.meet()
    with foretune.agree(timeout_s=120):
        me.calls(8192 if me.rank % 2 else 12288)
        took_s = time.monotonic() - began
        me.meet()
        me.calls(12288 if me.rank % 2 else 8192)
        is_predicted = [me.chosen(rows) == me.chosen(rows, Mode.PREDICT) for rows in (8192, 12288)]
    more, same = f"{took_s:.1f} s until released", [me.chosen(8192), me.chosen(12288)]
    me.saw("others met another shape: the prediction, at once", all(is_predicted) and took_s < 60, began, more, same)

    me.timed.clear()
    began = me.meet()
    with foretune.agree(timeout_s=TIMEOUT_S):
        if me.rank == 0:
            me.calls(16384)  # the others are in the collective below
        took_s = time.monotonic() - began
        me.meet()
        me.calls(16384)
        holds = me.chosen(16384) == me.chosen(16384, Mode.PREDICT) and me.is_timed(3 if me.rank == 0 else 0)
    more = f"{took_s:.1f} s of waiting for {TIMEOUT_S:.0f} + {TIMEOUT_S / 2:.0f} + {TIMEOUT_S / 4:.0f} s"
    me.saw("others never come: the prediction, after the timeout", holds, began, more, me.chosen(16384))

    if me.rank == 0:
        rich.print(table(f"{me.size} ranks on {me.device.name}", ("", "holds", "seconds", "rank 0"), me.rows))
    assert all(row[1] == "yes" for row in me.rows)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
