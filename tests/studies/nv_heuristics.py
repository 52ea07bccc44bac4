"""nvMatmulHeuristics' choice for the dense product that is most like a grouped GEMM, as a ranker, and what it scores
against ours without a GPU.

`python tests/studies/nv_heuristics.py grouped_gemm_fwd --data h100` prints the regret of the best of the first k. It
needs PyPI's nvidia-matmul-heuristics.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
from foretune.datasets import DeviceSpec, Family, ForetuneError, KernelConfig, Problem, load
from foretune.datasets.grid import Grid
from foretune.kernels.grouped_gemm.features import group_sizes_of
from foretune.kernels.grouped_gemm.space import DW, DX, VARIANTS
from foretune.model import Ranker, cross_validate
from foretune.model.baselines import Baseline, Rivals

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Self

MODULE, DISTRIBUTION = "nvMatmulHeuristics", "nvidia-matmul-heuristics"
#: How many configs it is asked for; it often has fewer.
_ASKED = 32
#: Its names for (inputs, accumulator, output).
_PRECISIONS = {"bf16": "TST", "fp16": "HSH", "fp32": "SSS"}
#: Its names for GPUs, by a part of ours, or else by arch; the first of all where neither is known.
_GPUS = {"H200": "H200_SXM", "H100": "H100_SXM", "GB200": "GB200_NVL", "B200": "B200", "A100": "A100_SXM_80GB"}
_GPU_OF_ARCH = {"sm_90": "H200_SXM", "sm_100": "B200", "sm_103": "GB300_NVL", "sm_120": "RTX_5090"}
_GPU_OF_ARCH |= {"sm_80": "A100_SXM_80GB", "sm_89": "L40S"}
#: What it decides on here. It also says the tile's depth, warps and stages, but of another kernel: with all of them its
#: first choice was 42 and 28 % off the best (weight gradients and forward, a third of a fold of h200 each, 2026-11),
#: with the depth alone 18 and 31 %, with neither 13 and 16 %: chosen on the data that judge it, in its favour.
#: Distances are in powers of two.
_SAID = ("BLOCK_M", "BLOCK_N")


class NvMatmulHeuristicsRanker(Ranker):
    """Its ranked configs, each mapped to the nearest config that the problem supports; the others follow by their mean.

    The dense product: one per group with rows, all of the average size, as a batch. Its CUTLASS3 target, which was the
    better one on measured problems (top-1 17 % off the best; TRITON 34 %). It says the output tile; of the rest, the
    mean slowdown over the training problems decides, in its favour. A tile that it advises again gets no second place:
    that was worse at the best of 2 and of 4.

    Source: PyPI nvidia-matmul-heuristics 0.1.0.27, whose prediction needs no GPU. Without it `predict` raises
    `ForetuneError`.
    """

    configs_: tuple[KernelConfig, ...]
    means_: NDArray[np.float64]

    def fit(self, grid: Grid, family: Family) -> Self:
        logs = np.log(grid.slowdowns)
        worst = np.nanmax(logs, axis=1, keepdims=True)  # what failed counts as the slowest
        self.means_ = np.where(np.isnan(logs), worst, logs).mean(axis=0)
        self.configs_ = grid.configs
        self._steps_ = np.log2([[config[knob] for knob in _SAID] for config in grid.configs])
        self._interfaces_: dict[str, Any] = {}
        return self

    def predict(
        self, family: Family, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]
    ) -> NDArray[np.float64]:
        """The place in the order, from 1; see `Ranker.predict`."""
        self._check_fitted("means_")
        place = {config: float(1 + at) for at, config in enumerate(self._choices(family, problem, device))}
        behind = dict(zip(self.configs_, _ASKED + 1 + self.means_, strict=True))
        last = _ASKED + 2 + float(self.means_.max())
        return np.array([place.get(config, behind.get(config, last)) for config in configs], np.float64)

    def _choices(self, family: Family, problem: Problem, device: DeviceSpec) -> list[KernelConfig]:
        """At most `_ASKED` configs, the best first."""
        chosen: dict[KernelConfig, None] = {}
        for steps in self._advised(family, problem, device):
            distance = np.abs(self._steps_ - steps).sum(axis=1)
            for column in np.lexsort((self.means_, distance)):
                config = self.configs_[column]
                if family.supports(config, problem, device) is None:
                    chosen[config] = None
                    break
        return list(chosen)

    def _advised(self, family: Family, problem: Problem, device: DeviceSpec) -> list[NDArray[np.float64]]:
        """What it says of `_SAID`, as logarithms to base two, the best first."""
        interface = self._interface(device)
        variant = VARIANTS[family.name]
        active = max(int((group_sizes_of(problem) > 0).sum()), 1)
        average = max(round(problem["rows"] / active), 1)
        m, n, k = (
            (problem["n"], problem["k"], average)
            if variant is DW
            else (average, problem[variant.columns], problem[variant.depth])
        )
        # (transposed left, transposed right): y = x @ w.T, dx = dy @ w, dw = dy.T @ x, all of them row-major.
        layouts = import_module(MODULE).NvMatmulHeuristicsMatmulLayout
        layout = layouts["TN_ROW_MAJOR" if variant is DW else "NN_ROW_MAJOR" if variant is DX else "NT_ROW_MAJOR"]
        dense = interface.makeNvMatmulHeuristicsProblem(m, n, k, layout, active)
        kernels = [one["kernel"] for one in interface.get(dense, _ASKED, _PRECISIONS[problem.dtype_name])]
        return [
            np.log2(
                [
                    kernel.cta_tile_m,
                    kernel.cta_tile_n,
                ]
            )
            for kernel in kernels
        ]

    def _interface(self, device: DeviceSpec) -> Any:
        try:
            heuristics = import_module(MODULE)
        except ImportError as error:
            raise ForetuneError(f"nvMatmulHeuristics is needed: pip install {DISTRIBUTION}") from error

        named = [gpu for part, gpu in _GPUS.items() if part in device.name]
        gpu = named[0] if named else _GPU_OF_ARCH.get(device.arch, "H200_SXM")
        if gpu not in self._interfaces_:
            self._interfaces_[gpu] = heuristics.NvMatmulHeuristicsInterfaceEx(
                backend=heuristics.NvMatmulHeuristicsTarget.CUTLASS3,
                flags=heuristics.NvMatmulHeuristicsFlags.PERF_MODEL_BASED_AUTO_TUNING,
                gpu=heuristics.NvMatmulHeuristicsNvidiaGpu[gpu],
            )
        return self._interfaces_[gpu]


def main() -> None:
    from foretune.kernels import find_family

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("family")
    parser.add_argument("--data", default="h200", help="a dataset")
    given = parser.parse_args()
    # Its cost is that of a fold of the weight gradients.
    baseline = Baseline((NvMatmulHeuristicsRanker,), cost=0.1, module=MODULE, distribution=DISTRIBUTION)
    if baseline.lacking is not None:
        sys.exit(baseline.lacking)
    rivals = Rivals({"nvmatmulheuristics": baseline}, {})
    found = cross_validate(load(given.data), find_family(given.family), rivals=rivals).to_json()
    for view in ("", "_sizes_unknown"):
        for name, by_k in {"foretune": found["regret" + view], **found["baselines" + view]}.items():
            figures = ", ".join(f"{k}: {100 * (one['geomean'] - 1):.1f} %" for k, one in by_k.items())
            sys.stdout.write(f"{name}{view.replace('_', ' ')}: {figures}\n")


if __name__ == "__main__":
    main()
