"""RMSNorm and rotary embedding as families: prediction, pruning and measurement.

torch and triton are imported when they are needed; prediction needs neither.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ...datasets import BinaryFacts, Case, DeviceSpec, ForetuneError, KernelConfig, Problem, torch_dtype
from ...datasets.config import remembered
from ...datasets.feature_groups import FeatureGroup, stacked
from ...model.generic_features import GenericFeatures
from ..config_limits import MOST_PROGRAMS, MOST_THREADS, Knobs
from ..gemm_family import Binaries, Configs, DeclaredFamily, Groups, MeasuredFamily, seeded
from ..workloads import Draws, load_dense_models
from . import workload
from .space import (
    MOST_HEAD_DIM,
    SPACES,
    TILE_FEATURES,
    VALUES,
    backward_grid,
    block_constants,
    forward_grid,
    full_space,
    tile_features,
    wrong_tile,
)

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from .launches import Rotation

DIMS = ("tokens", "q_heads", "kv_heads", "head_dim")
DTYPES = ("bf16", "fp16", "fp32")
#: The most tokens and heads: token numbers have 32 bits on the device, and so has the number of programs, at most one
#: per head of each token.
MOST_TOKENS, MOST_HEADS = 2**26, 4096
#: Microseconds that a small copy kernel takes at least, on any GPU.
_LEAST_US = 2.0


#: The eps of the norm for measurements, that of nearly all models.
EPS = 1e-6


@dataclass(frozen=True)
class Inputs:
    """The tensors of one forward or backward launch, on the device.

    A launch writes only to `out`, which is filled with NaN and holds the outputs one after another: q's, k's, and in
    the backward pass the gradients of both weights.
    """

    q: torch.Tensor  # (tokens, q_heads, head_dim)
    k: torch.Tensor
    dq: torch.Tensor | None  # gradients of the forward pass's outputs; None forward
    dk: torch.Tensor | None
    rotation: Rotation
    out: torch.Tensor
    parts: tuple[torch.Tensor, ...]
    problem: Problem


class RmsNormRope(DeclaredFamily, MeasuredFamily):
    """Base class of the forward and the backward family.

    A problem is a call with q (tokens, q_heads, head_dim) and k (tokens, kv_heads, head_dim). Flags: "interleaved", if
    adjacent elements rotate as a pair (GPT-J's layout) instead of the halves of a head (NeoX's); and, forward only,
    "unnormed": rotation without norm.
    """

    dims = DIMS
    dtypes = DTYPES
    flags: ClassVar[tuple[str, ...]] = ("interleaved",)
    largest: ClassVar[Mapping[str, int]] = {
        "tokens": MOST_TOKENS,
        "q_heads": MOST_HEADS,
        "kv_heads": MOST_HEADS,
        "head_dim": MOST_HEAD_DIM,
    }
    bucketed = ("tokens",)
    independent = ("tokens",)
    reads_binaries = True
    kernel_modules = ("rms_norm_rope.triton_kernels",)
    dtype_argument = "q_ptr"
    dims_from: ClassVar[Mapping[str, tuple[str, int]]] = {
        "tokens": ("tokens", 1),
        "q_heads": ("q_heads", 1),
        "kv_heads": ("k_heads", 1),
        "head_dim": ("HEAD_DIM", 1),
    }
    also_needed = ("INTERLEAVED",)
    #: Accesses per element of q and k: how often the kernel reads or writes it or its gradients.
    moved: ClassVar[int]
    _generic: ClassVar[GenericFeatures]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not hasattr(cls, "name"):
            return
        cls.knobs, cls.values = tuple(SPACES[cls.name]), VALUES[cls.name]
        tiles = {"ROWS": "tokens", "HEADS": "q_heads"}
        cls._generic = GenericFeatures(DIMS, DTYPES, cls.flags, cls.knobs, tiles)
        cls.feature_names = cls._generic.names + TILE_FEATURES

    def space(self, device: DeviceSpec | None = None) -> tuple[KernelConfig, ...]:
        """Return every config worth measuring; the same for all devices."""
        return full_space(self.name)

    def wrong_problem(self, problem: Problem) -> str | None:
        """Return why no config can run a problem, or None."""
        return wrong_heads(problem["q_heads"], problem["kv_heads"], problem["head_dim"])

    def wrong_pair(self, config: KernelConfig, problem: Problem) -> str | None:
        """Return why a config cannot run a problem on any device, or None."""
        return wrong_tile(self.name, config, problem)

    def flops(self, problem: Problem) -> float:
        """Return the number of floating-point operations of a problem."""
        # Per pair, 6 to rotate and 8 to normalize; the backward pass takes 1.5 times as many.
        operations = 3.0 if "unnormed" in problem.flags else 7.0
        return operations * self.moved / 2 * _elements(problem)

    def bytes(self, problem: Problem) -> float:
        """Return the minimum number of bytes that a problem must read and write."""
        angles = problem["tokens"] * problem["head_dim"]  # of cos and sin, half a head each
        return float(problem.itemsize) * (self.moved * _elements(problem) + angles)

    def grid(self, problem: Problem, config: Knobs) -> Any:
        """Return the number of programs of a launch; an array, if the knobs are arrays of several configs' values."""
        grid = forward_grid if "STEPS" not in self.knobs else backward_grid
        return grid(problem["tokens"], problem["q_heads"], problem["kv_heads"], config)

    def grouped_features(
        self, problems: Sequence[Problem], device: DeviceSpec, configs: Configs, binaries: Binaries | None
    ) -> Groups:
        """Return the features of problems with the same dtype and flags, grouped by what the columns depend on."""
        return stacked([self._groups(problem, device, configs, binaries) for problem in problems])

    def _groups(
        self,
        problem: Problem,
        device: DeviceSpec,
        configs: Sequence[KernelConfig],
        binaries: Mapping[KernelConfig, BinaryFacts] | None,
    ) -> Sequence[FeatureGroup]:
        """Return the feature groups of one problem: the generic features of any kernel, and `tile_features`."""
        programs, flops, touched = self._programs(problem, configs), self.flops(problem), self.bytes(problem)
        generic = self._generic.groups(problem, device, configs, programs, binaries, flops=flops, touched_bytes=touched)
        first, each = len(self._generic.names), np.arange(len(configs))
        of_tiles = tile_features(problem, device, _tiles(tuple(configs), self.knobs), programs)
        return (*generic, FeatureGroup(tuple(range(first, len(self.feature_names))), of_tiles[None], each))

    def estimate_us(self, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]) -> NDArray[np.float64]:
        """Return estimated times in microseconds: to move the bytes, more for padded heads and a partial last wave."""
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
        """Return the number of programs of each config, (n_configs,)."""
        programs = self.grid(problem, _tiles(tuple(configs), self.knobs))
        return np.broadcast_to(np.asarray(programs, float), len(configs))

    def flags_of_call(self, arguments: Mapping[str, Any]) -> Sequence[str]:
        """Return the flags of the problem that a launch's arguments describe."""
        flags = ["interleaved"] * bool(arguments["INTERLEAVED"])
        return flags + ["unnormed"] * ("unnormed" in self.flags and arguments.get("q_weight_ptr") is None)

    def draw(self, models: Path | str | None, max_tflop: float | None, **drawn: Any) -> tuple[Case, ...]:
        """Draw the problems that `cases` returns for these arguments: layers of models, and random shapes."""
        most = float(workload.MOST_ELEMENTS)
        if max_tflop is not None:
            if not max_tflop > 0:
                raise ForetuneError(f"max_tflop must be more than 0 but is {max_tflop}")
            most = min(most, max_tflop * 1e12 / (3.5 * self.moved))
        return workload.draw(self.name, load_dense_models(models), Draws(**drawn), most_elements=most)

    def inputs(self, problem: Problem, device: DeviceSpec, *, seed: int = 0) -> Inputs:
        """Return random tensors of a problem on a device, with the output filled with NaN."""
        import torch

        from .launches import Rotation

        where, generator = seeded(device, seed)
        dtype = torch_dtype(problem.dtype_name)
        tokens, q_heads, kv_heads, head_dim = (problem[dim] for dim in self.dims)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=where, dtype=dtype)

        shapes = [(tokens, q_heads, head_dim), (tokens, kv_heads, head_dim), *[(head_dim,)] * 2 * self._has_gradients]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        out = torch.full((sum(sizes),), float("nan"), device=where, dtype=dtype)
        parts = tuple(part.view(shape) for part, shape in zip(torch.split(out, sizes), shapes, strict=True))
        # As in models, q and k are adjacent in the output of one projection.
        q, k = torch.split(random(tokens, q_heads + kv_heads, head_dim), [q_heads, kv_heads], 1)
        dq, dk = (random(*shapes[0]), random(*shapes[1])) if self._has_gradients else (None, None)
        angles = torch.arange(tokens, device=where)[:, None] * 1e4 ** -torch.linspace(0, 1, head_dim // 2, device=where)
        weights = None if "unnormed" in problem.flags else (1 + random(head_dim) / 8, 1 + random(head_dim) / 8)
        rotation = Rotation(
            cos=angles.cos().to(dtype),
            sin=angles.sin().to(dtype),
            q_weight=weights and weights[0],
            k_weight=weights and weights[1],
            eps=EPS,
            weight_offset=0.0,
            interleaved="interleaved" in problem.flags,
        )
        return Inputs(q, k, dq, dk, rotation, out, parts, problem)

    @property
    def _has_gradients(self) -> bool:
        """Whether a launch computes gradients."""
        return "STEPS" in self.knobs

    def check_problem(self, config: KernelConfig, problem: Problem) -> Problem:
        """Return a small problem, with no size a multiple of a block size, to check a config's results on."""
        # Multiples of no block: 37 tokens, 5 and 3 heads.
        dims = {"tokens": 37, "q_heads": 5, "kv_heads": 3, "head_dim": problem["head_dim"]}
        return replace(problem, dims=tuple(dims.items()))

    def binary_key(self, config: KernelConfig, problem: Problem) -> Hashable:
        """Return a key that is equal for two configs and problems if they run the same compiled binary."""
        # No runtime number is specialized, and STEPS is one of them.
        knobs = {knob: value for knob, value in config.to_json().items() if knob != "STEPS"}
        return tuple(knobs.items()), problem.signature, problem["head_dim"]

    @abstractmethod
    def kernel(self) -> Any:
        """Return the `triton.jit` function that a launch runs."""

    def compile(self, config: KernelConfig, problem: Problem) -> Any:
        """Compile the kernel of a config, and return its binary."""
        knobs = config.to_json() | block_constants(problem["head_dim"])
        return self.kernel().warmup(*self.arguments(problem), grid=(1,), **self.constants(problem), **knobs)

    @abstractmethod
    def arguments(self, problem: Problem) -> tuple[Any, ...]:
        """Return stand-ins for the kernel's positional arguments, to compile it: dtypes for tensors, and numbers."""

    def constants(self, problem: Problem) -> dict[str, bool]:
        """Return the kernel's constexpr parameters, except the knobs and those of the head's size."""
        return {"INTERLEAVED": "interleaved" in problem.flags}


class RmsNormRopeForward(RmsNormRope):
    """The family of the forward pass, which normalizes q and k per head (unless "unnormed") and rotates them.

    >>> from foretune.datasets import DeviceSpec
    >>> family, h200 = RmsNormRopeForward(), DeviceSpec.named("h200")
    >>> problem = Problem.of(family.name, tokens=4096, q_heads=32, kv_heads=8, head_dim=128)
    >>> family.supports(family.default(problem, h200), problem, h200) is None
    True
    """

    name = "rms_norm_rope_fwd"
    flags = ("interleaved", "unnormed")
    moved = 2

    def default(self, problem: Problem, device: DeviceSpec) -> KernelConfig:
        """Return the config to run when nothing was measured or predicted."""
        # Eight heads of 128 elements give 8 elements per thread; larger heads need fewer per tile.
        heads = max(8 * 128 // (2 * block_constants(problem["head_dim"])["BLOCK"]), 1)
        return KernelConfig.of(ROWS=1, HEADS=min(heads, 32), num_warps=4, num_stages=3)

    def same_bits_config(self, problem: Problem, device: DeviceSpec) -> KernelConfig:
        """Return the only config that runs with `same_bits`: on the shipped data the best with one token per tile.

        No other config counts as equal in bits: on an H200, configs that share a head among threads in the same way
        gave other bits. With one token per tile, all tokens are computed by the same instructions.
        """
        return replace(self.default(problem, device), num_warps=2)

    def launch(self, inputs: Inputs, config: KernelConfig) -> torch.Tensor:
        """Launch the kernel with a config, and return the output without waiting for it."""
        from .launches import prepare_forward

        i = inputs
        prepare_forward(i.q, i.k, i.rotation, config)((i.q, i.k, *i.parts, *i.rotation[:4]))
        return i.out

    def reference(self, inputs: Inputs) -> torch.Tensor:
        """Return the correct output in float32, computed by PyTorch."""
        import torch

        both = rotated(inputs.q.float(), inputs.k.float(), inputs.rotation)
        return torch.cat([part.flatten() for part in both])

    def kernel(self) -> Any:
        """Return the `triton.jit` function that a launch runs."""
        from .triton_kernels import rms_norm_rope_kernel

        return rms_norm_rope_kernel

    def arguments(self, problem: Problem) -> tuple[Any, ...]:
        """Return stand-ins for the kernel's positional arguments, to compile it: dtypes for tensors, and numbers."""
        element = torch_dtype(problem.dtype_name)
        weight = None if "unnormed" in problem.flags else element
        return *[element] * 6, weight, weight, 37, 8, 8, 1024, 1024, 37, 8, EPS, 0.0

    def constants(self, problem: Problem) -> dict[str, bool]:
        """Return the kernel's constexpr parameters that are not knobs."""
        return super().constants(problem) | {"INVERSE": False}


class RmsNormRopeBackward(RmsNormRope):
    """The family of the backward pass: the gradients of q, k and both weights, from those of the rotated q and k.

    >>> from foretune.datasets import DeviceSpec
    >>> family, h200 = RmsNormRopeBackward(), DeviceSpec.named("h200")
    >>> len(family.space(h200)) > 100
    True
    """

    name = "rms_norm_rope_bwd"
    moved = 3

    def default(self, problem: Problem, device: DeviceSpec) -> KernelConfig:
        """Return the config to run when nothing was measured or predicted."""
        heads = max(4 * 128 // (2 * block_constants(problem["head_dim"])["BLOCK"]), 1)
        return KernelConfig.of(ROWS=1, HEADS=min(heads, 16), STEPS=4, num_warps=4, num_stages=1)

    def same_bits_config(self, problem: Problem, device: DeviceSpec) -> KernelConfig:
        """Return the only config that runs with `same_bits`, which is among the best on the shipped data.

        No other config counts as equal in bits: a tile's tokens and heads, and STEPS, decide the order of the sum of
        the weights' gradients, and num_stages how threads share a head (tests/kernels/test_numerics_compiled.py).
        """
        block = block_constants(problem["head_dim"])["BLOCK"]
        heads, warps = (16, 4) if block <= 64 else (2, 1) if block <= 128 else (1, 1)
        return KernelConfig.of(ROWS=1, HEADS=heads, STEPS=4, num_warps=warps, num_stages=3)

    def launch(self, inputs: Inputs, config: KernelConfig) -> torch.Tensor:
        """Launch the kernel with a config, and return the output without waiting for it."""
        from .launches import prepare_backward

        i = inputs
        assert i.dq is not None
        assert i.dk is not None
        heads = i.dq, i.dk, i.q, i.k
        prepare_backward(*heads, i.rotation, config)((*heads, *i.parts, *i.rotation[:4]))
        return i.out

    def reference(self, inputs: Inputs) -> torch.Tensor:
        """Return the correct output in float32, computed by PyTorch."""
        import torch

        rotation = inputs.rotation
        assert rotation.q_weight is not None
        assert rotation.k_weight is not None
        given = (inputs.q, inputs.k, rotation.q_weight, rotation.k_weight)
        leaves = [tensor.detach().float().requires_grad_() for tensor in given]
        with torch.enable_grad():
            both = rotated(leaves[0], leaves[1], rotation._replace(q_weight=leaves[2], k_weight=leaves[3]))
            grads = torch.autograd.grad(both, leaves, [inputs.dq.float(), inputs.dk.float()])  # type: ignore[union-attr]
        return torch.cat([grad.flatten() for grad in grads])

    def kernel(self) -> Any:
        """Return the `triton.jit` function that a launch runs."""
        from .triton_kernels import rms_norm_rope_backward_kernel

        return rms_norm_rope_backward_kernel

    def arguments(self, problem: Problem) -> tuple[Any, ...]:
        """Return stand-ins for the kernel's positional arguments, to compile it: dtypes for tensors, and numbers."""
        import torch

        element = torch_dtype(problem.dtype_name)
        tensors = (*[element] * 6, torch.float32, *[element] * 4)
        return *tensors, 37, 8, 8, 1024, 1024, 1024, 1024, 37, 8, EPS, 0.0


@remembered(maxsize=64)
def _tiles(configs: tuple[KernelConfig, ...], knobs: tuple[str, ...]) -> Mapping[str, NDArray[np.int64]]:
    """Return by knob its value in each config, (n_configs,)."""
    return {knob: np.array([config[knob] for config in configs], np.int64) for knob in knobs}


def wrong_heads(q_heads: int, kv_heads: int, head_dim: int) -> str | None:
    """Return why the kernels do not support such heads, or None."""
    if min(q_heads, kv_heads) < 1:
        return f"q_heads and kv_heads must be >= 1 but are {q_heads} and {kv_heads}"
    if head_dim % 16 or not 16 <= head_dim <= MOST_HEAD_DIM:
        return f"head_dim must be a multiple of 16 between 16 and {MOST_HEAD_DIM} but is {head_dim}"
    return None


def _elements(problem: Problem) -> float:
    """Return the number of elements of q and k."""
    return float(problem["tokens"]) * (problem["q_heads"] + problem["kv_heads"]) * problem["head_dim"]


def rotated(q: torch.Tensor, k: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q (tokens, q_heads, head_dim) and k, normalized per head if there are weights, and rotated.

    They have the inputs' dtype. This is plain PyTorch: the reference, and what users run without the op.
    """
    import torch

    half = q.shape[-1] // 2
    rows = torch.arange(len(q), device=q.device) % len(rotation.cos)
    cos, sin = (table[rows, None, :half].to(q.dtype) for table in (rotation.cos, rotation.sin))

    def one(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is not None:
            scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + rotation.eps)
            x = (x.float() * scale * (weight.float() + rotation.weight_offset)).to(x.dtype)
        first, second = (x[..., 0::2], x[..., 1::2]) if rotation.interleaved else x.chunk(2, -1)
        pair = first * cos - second * sin, second * cos + first * sin
        return torch.stack(pair, -1).flatten(-2) if rotation.interleaved else torch.cat(pair, -1)

    return one(q, rotation.q_weight), one(k, rotation.k_weight)
