"""Contenders for a serving engine's MoE kernel: the same kernel with other configs.

They are the config that the engine runs if it finds no tuned file, and the config of the file that it ships.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...datasets import Case, DeviceSpec, KernelConfig, Measurable, Problem
from ...runtime.timing.compare import BestConfigs, Goal, LaunchPath, Row
from ..registry import judge_predicted
from .engines import SGLANG, Layer, engine_of, installed
from .measurable import Inputs
from .tuned_files import row_for, table_in_force
from .workload import requested_layer

#: Layers: model and tensor-parallel degree. Both engines ship a file for the first and the third on an H200.
LAYERS = (("Qwen3-30B-A3B", 1), ("OLMoE-1B-7B", 1), ("Mixtral-8x7B", 4), ("DeepSeek-V2", 4), ("GLM-5", 8))
#: Tokens per call.
TOKENS = (8, 128, 2048)


class FusedMoeComparison:
    """The comparison of both products' configs with the engine's own: problems, contenders and goals.

    It implements `runtime.timing.compare.Comparison`; `compare_kernels` times the contenders.
    """

    others = ("default", "shipped")

    def suite(self, family: Measurable) -> Mapping[str, Case]:
        """Return layers of five models for each installed engine, or for SGLang if none is installed."""
        cases = {}
        for engine in installed() or (SGLANG,):
            for model, degree in LAYERS:
                layer = requested_layer(model, tp=degree)
                for tokens in TOKENS:
                    case = Case(layer.problem(family.name, engine, tokens), (f"{model}/experts",))
                    cases[f"{engine} {model} tp{degree} {tokens}"] = case
        return cases

    def contenders(
        self, family: Measurable, problem: Problem, inputs: Inputs, device: DeviceSpec, best: BestConfigs
    ) -> dict[str, Callable[[], Any]]:
        """Return functions by name that launch the kernel once, each with a different config.

        "default" runs the config that the engine uses without a file. "shipped" runs the config of the file that the
        engine reads; it is missing if there is no such file for the layer and device.
        """
        configs = {"default": family.default(problem, device), "shipped": shipped_config(family, problem, device)}
        return {
            name: (lambda config=config: family.launch(inputs, config))  # type: ignore[misc]
            for name, config in configs.items()
            if config is not None
        }

    def launch_path(self, device: DeviceSpec) -> LaunchPath | None:
        """Return None: the engine launches its kernel itself, so there is no op of ours to time."""
        return None

    def goals(self, rows: Sequence[Row]) -> list[Goal]:
        """Return the goals: faster than the default, and within 2 % of the config that the engine's tuner found."""
        over = {"default": (0.95, 1.0), "shipped": (0.95, 0.98)}
        return judge_predicted(rows, over, "predicted config, over the engine's {} one")


#: `kernels.registry.comparison_of` looks up this name.
COMPARISON = FusedMoeComparison()


def shipped_config(family: Measurable, problem: Problem, device: DeviceSpec) -> KernelConfig | None:
    """Return the config of this product in the tuned file that the engine reads now.

    Returns:
        The config; None if the engine reads no file for the layer, if the row cannot be expressed as a config, or if
        the device cannot run it.
    """
    import triton

    sizes = {dim: problem[dim] for dim in ("experts", "topk", "hidden", "inter")}
    layer = Layer(**sizes, dtype=problem.dtype_name)
    rows = table_in_force(engine_of(problem), layer, device, triton.__version__).rows
    pair = row_for(rows, problem["tokens"]).pair if rows else None
    if pair is None:
        return None
    config: KernelConfig = pair.down if "USE_TMA" in family.knobs else pair.up
    return config if family.supports(config, problem, device) is None else None
