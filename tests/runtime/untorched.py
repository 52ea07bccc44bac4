"""A kernel under `triton.autotune` that is pruned where torch is not installed: what `pip install foretune` brings.

Run as a script, in a process of its own: `python untorched.py H200 | live`.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder


class Nowhere(MetaPathFinder):
    """Finds no torch. (`sys.modules["torch"] = None` is not the same: Triton takes what it finds there for torch.)"""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Nowhere())

import numpy as np  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from foretune.datasets import DeviceSpec, Family, KernelConfig, Problem, dtype_of_tensor  # noqa: E402
from foretune.model import Bundle, Ranker  # noqa: E402
from foretune.model.calibration.training_domain import Distance  # noqa: E402
from foretune.runtime import Pruner, use_stub_driver  # noqa: E402

H200 = DeviceSpec.named("h200")
BLOCKS = (32, 64, 128, 256, 512)


class Scale(Family):
    name, dims, dtypes, knobs, feature_names = "scale", ("n",), ("fp16",), ("BLOCK",), ("block",)

    def space(self, device=None):
        return tuple(KernelConfig.of(BLOCK=block) for block in BLOCKS)

    def supports(self, config, problem, device):
        return None if config["BLOCK"] < 512 else "BLOCK cannot be 512: at most 256"

    def features(self, problem, device, configs, binaries=None):
        return np.array([[config["BLOCK"]] for config in configs], np.float32)

    def problem_from_call(self, arguments):
        return Problem.of("scale", n=arguments["n"], dtype=dtype_of_tensor("x_ptr", arguments["x_ptr"]))


class LargeBlocks(Bundle):
    """Predicts that larger blocks are faster."""

    digest = "untorched"

    def calibration(self, family_name):
        return None

    def distance(self, family_name, problem, device):
        return Distance(0.0)

    def trained_on(self, family_name):
        return (H200,)

    fastest, trust_ = Ranker.fastest, Ranker.trust_

    def ranker(self, family_name):
        return self

    def wrong_results(self, family_name, problem):
        return ()

    def predict(self, family, problem, device, configs):
        return 1000 / family.features(problem, device, configs)[:, 0]


class Tensor:
    """As much of a tensor as Triton needs."""

    dtype = "fp16"

    def data_ptr(self):
        return 4096


def main(where: str) -> None:
    pruner = Pruner(Scale(), k=2, device=H200 if where == "H200" else None, bundle=LargeBlocks({}, "4.6"))

    @triton.autotune(
        configs=[config.to_triton() for config in Scale().space()],
        key=["n"],
        prune_configs_by={"early_config_prune": pruner},
    )
    @triton.jit
    def scale_kernel(x_ptr, n, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(x_ptr + at, 2 * tl.load(x_ptr + at, mask=at < n), mask=at < n)

    if where == "live":  # a stub driver would stand in for a device
        kept = pruner(scale_kernel.configs, {"x_ptr": Tensor(), "n": 1000})
        print([config.kwargs["BLOCK"] for config in kept])  # noqa: T201
        return
    with use_stub_driver(H200) as driver:
        scale_kernel[lambda meta: (triton.cdiv(1000, meta["BLOCK"]),)](Tensor(), 1000)
    print([config.kwargs["BLOCK"] for config in scale_kernel.configs_timings], driver.launches[-1].grid)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
