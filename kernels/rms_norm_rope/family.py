"""RMSNorm and rotary embedding as families: what predicting and pruning need. Imports neither torch nor triton."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ...datasets import BinaryFacts, DeviceSpec, Family, ForetuneError, KernelConfig, Problem, dtype_of_tensor
from ...datasets.feature_groups import FeatureGroup, joined, stacked
from ...model.configs_memo import remembered
from ...model.generic_features import GenericFeatures
from ..config_limits import MOST_PROGRAMS, MOST_THREADS, Knobs
from .features import TILE_FEATURES, tile_features
from .space import MOST_HEAD_DIM, SPACES, VALUES, backward_grid, forward_grid, full_space, wrong_tile

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DIMS = ("tokens", "q_heads", "kv_heads", "head_dim")
DTYPES = ("bf16", "fp16", "fp32")
#: Token numbers are 32 bits on the device, and so are programs, of which every token has one a head at most.
MOST_TOKENS, MOST_HEADS = 2**26, 4096
#: What a small copy kernel lasts at least on any card, launch to end.
_LEAST_US = 2.0


class RmsNormRopeFamily(Family):
    """What predicting needs, forward and backward.

    A problem is a call with q (tokens, q_heads, head_dim) and k (tokens, kv_heads, head_dim). Its flags: "interleaved",
    where neighbouring elements are pairs that rotate (GPT-J's layout) and not the halves of a head (NeoX's), and,
    forward, "unnormed": rotation alone.
    """

    dims = DIMS
    dtypes = DTYPES
    flags: ClassVar[tuple[str, ...]] = ("interleaved",)
    ragged: ClassVar[Mapping[str, str]] = {}
    largest: ClassVar[Mapping[str, int]] = {
        "tokens": MOST_TOKENS,
        "q_heads": MOST_HEADS,
        "kv_heads": MOST_HEADS,
        "head_dim": MOST_HEAD_DIM,
    }
    bucketed = ("tokens",)
    reads_binaries = True
    #: A kernel's argument of the problem's dtype, and how many elements it reads and writes for each of q and k.
    dtype_argument: ClassVar[str]
    moved: ClassVar[int]
    _generic: ClassVar[GenericFeatures]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not hasattr(cls, "name"):
            return
        cls.knobs = tuple(SPACES[cls.name])
        tiles = {"ROWS": "tokens", "HEADS": "q_heads"}
        cls._generic = GenericFeatures(DIMS, DTYPES, cls.flags, cls.knobs, tiles)
        cls.feature_names = cls._generic.names + TILE_FEATURES

    def space(self, device: DeviceSpec | None = None) -> tuple[KernelConfig, ...]:
        return full_space(self.name)

    def supports(self, config: KernelConfig, problem: Problem, device: DeviceSpec) -> str | None:
        if (wrong := VALUES[self.name].wrong(config.to_json())) is not None:
            return wrong
        if problem.dtype not in self.dtypes:
            return f"dtype {problem.dtype_name} is not one of {', '.join(self.dtypes)}"
        if unknown := [flag for flag in problem.flags if flag not in self.flags]:
            return f"flag {unknown[0]} is not one of {', '.join(self.flags)}"
        if (reason := wrong_heads(problem["q_heads"], problem["kv_heads"], problem["head_dim"])) is not None:
            return reason
        return wrong_tile(self.name, config, problem)

    def flops(self, problem: Problem) -> float:
        # Six a pair to rotate, eight to norm; and as much again, and half, backward.
        operations = 3.0 if "unnormed" in problem.flags else 7.0
        return operations * self.moved / 2 * _elements(problem)

    def bytes(self, problem: Problem) -> float:
        angles = problem["tokens"] * problem["head_dim"]  # of cos and sin, half a head each
        return float(problem.itemsize) * (self.moved * _elements(problem) + angles)

    def grid(self, problem: Problem, config: Knobs) -> Any:
        """Programs of a launch; of several configs' knobs, each an array, an array."""
        grid = forward_grid if "STEPS" not in self.knobs else backward_grid
        return grid(problem["tokens"], problem["q_heads"], problem["kv_heads"], config)

    def features(
        self,
        problem: Problem,
        device: DeviceSpec,
        configs: Sequence[KernelConfig],
        binaries: Mapping[KernelConfig, BinaryFacts] | None = None,
    ) -> NDArray[np.float32]:
        return joined(self._groups(problem, device, configs, binaries))

    def feature_groups(
        self,
        problems: Sequence[Problem],
        device: DeviceSpec,
        configs: Sequence[KernelConfig],
        binaries: Mapping[KernelConfig, BinaryFacts] | None = None,
    ) -> Sequence[FeatureGroup]:
        return stacked([self._groups(problem, device, configs, binaries) for problem in problems])

    def _groups(
        self,
        problem: Problem,
        device: DeviceSpec,
        configs: Sequence[KernelConfig],
        binaries: Mapping[KernelConfig, BinaryFacts] | None,
    ) -> Sequence[FeatureGroup]:
        import numpy as np

        programs, flops, touched = self._programs(problem, configs), self.flops(problem), self.bytes(problem)
        generic = self._generic.groups(problem, device, configs, programs, binaries, flops=flops, touched_bytes=touched)
        first, each = len(self._generic.names), np.arange(len(configs))
        of_tiles = tile_features(problem, device, _tiles(tuple(configs), self.knobs), programs)
        return (*generic, FeatureGroup(tuple(range(first, len(self.feature_names))), of_tiles[None], each))

    def estimate_us(self, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]) -> NDArray[np.float64]:
        """The time that the bytes take, times how much of a head's padding and of the last wave is idle."""
        import numpy as np

        if not len(configs):
            return np.empty(0)
        programs = np.maximum(self._programs(problem, configs), 1.0)
        warps = np.array([config.num_warps for config in configs], float)
        waves = programs / (device.sm_count * np.minimum(MOST_PROGRAMS, MOST_THREADS // (32 * warps)))
        tile = np.array([config["ROWS"] * config["HEADS"] for config in configs], float)
        asked = max(problem["tokens"], 1) * (problem["q_heads"] + problem["kv_heads"])
        steps = np.array([dict(config.meta).get("STEPS", 1) for config in configs], float)
        padding = programs * steps * tile / asked
        bytes_us = self.bytes(problem) / (device.copy_bandwidth_gbs * 1e3)
        estimate: NDArray[np.float64] = _LEAST_US + bytes_us * np.ceil(waves) / waves * np.sqrt(padding)
        return estimate

    def _programs(self, problem: Problem, configs: Sequence[KernelConfig]) -> NDArray[np.float64]:
        import numpy as np

        programs = self.grid(problem, _tiles(tuple(configs), self.knobs))
        return np.broadcast_to(np.asarray(programs, float), len(configs))

    def problem_from_call(self, arguments: Mapping[str, Any]) -> Problem:
        needed = (self.dtype_argument, "tokens", "q_heads", "k_heads", "HEAD_DIM", "INTERLEAVED")
        if missing := [name for name in needed if name not in arguments]:
            raise ForetuneError(f"the call has no argument {', '.join(missing)}: {self.name} needs {', '.join(needed)}")
        flags = [flag for flag in ("interleaved",) if arguments["INTERLEAVED"]]
        if "unnormed" in self.flags and arguments.get("q_weight_ptr") is None:
            flags.append("unnormed")
        return Problem.of(
            self.name,
            dtype=dtype_of_tensor(self.dtype_argument, arguments[self.dtype_argument]),
            flags=tuple(flags),
            tokens=int(arguments["tokens"]),
            q_heads=int(arguments["q_heads"]),
            kv_heads=int(arguments["k_heads"]),
            head_dim=int(arguments["HEAD_DIM"]),
        )


@remembered(maxsize=64)
def _tiles(configs: tuple[KernelConfig, ...], knobs: tuple[str, ...]) -> Mapping[str, NDArray[np.int64]]:
    """Each knob of all configs, (n_configs,)."""
    import numpy as np

    return {knob: np.array([config[knob] for config in configs], np.int64) for knob in knobs}


def wrong_heads(q_heads: int, kv_heads: int, head_dim: int) -> str | None:
    """The reason why the kernels do not take such heads, or None."""
    if min(q_heads, kv_heads) < 1:
        return f"q_heads and kv_heads must be >= 1 but are {q_heads} and {kv_heads}"
    if head_dim % 16 or not 16 <= head_dim <= MOST_HEAD_DIM:
        return f"head_dim must be a multiple of 16 between 16 and {MOST_HEAD_DIM} but is {head_dim}"
    return None


def _elements(problem: Problem) -> float:
    return float(problem["tokens"]) * (problem["q_heads"] + problem["kv_heads"]) * problem["head_dim"]
