"""RMSNorm with rotary embedding as two families, for predicting, pruning and measuring.

torch and triton are imported inside the functions that need them, because predicting needs neither.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ...datasets import BinaryFacts, Case, DeviceSpec, ForetuneError, KernelConfig, Problem, torch_dtype
from ...datasets.feature_groups import FeatureGroup, stacked
from ...model.configs_memo import remembered
from ...model.generic_features import GenericFeatures
from ..config_limits import MOST_PROGRAMS, MOST_THREADS, Knobs
from ..gemm_family import Binaries, Configs, DeclaredFamily, Groups, MeasuredFamily, seeded
from ..workloads import load_dense_models
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
#: The most tokens and heads: token and program indices are 32-bit integers on the device, and a token has at most one
#: program per head.
MOST_TOKENS, MOST_HEADS = 2**26, 4096
#: The least time of a small copy kernel on any GPU, from launch to end, in microseconds.
_LEAST_US = 2.0


#: The norm's epsilon in most models.
EPS = 1e-6


@dataclass(frozen=True)
class Inputs:
    """The tensors of one call, on the device.

    A launch writes only to `out`, which is filled with NaN before. `parts` are consecutive views of it: q and k, or in
    the backward pass the gradients of q, k and both weights.
    """

    q: torch.Tensor  # (tokens, q_heads, head_dim)
    k: torch.Tensor
    dq: torch.Tensor | None  # gradient of the rotated q; None in the forward family
    dk: torch.Tensor | None
    rotation: Rotation
    out: torch.Tensor
    parts: tuple[torch.Tensor, ...]
    problem: Problem


class RmsNormRope(DeclaredFamily, MeasuredFamily):
    """Common part of the forward and the backward family.

    A problem is a call with q (tokens, q_heads, head_dim) and k (tokens, kv_heads, head_dim). Flags: "interleaved", if
    neighboring elements form a pair that rotates (GPT-J's layout) instead of elements half a head apart (NeoX's); and
    in the forward family "unnormed", for rotation without a norm.
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
    dtype_argument = "q_ptr"
    dims_from: ClassVar[Mapping[str, tuple[str, int]]] = {
        "tokens": ("tokens", 1),
        "q_heads": ("q_heads", 1),
        "kv_heads": ("k_heads", 1),
        "head_dim": ("HEAD_DIM", 1),
    }
    also_needed = ("INTERLEAVED",)
    #: Tensors of q's shape that the kernel reads or writes for q, and as many for k.
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
        """Return all configs worth measuring; they are the same on every device."""
        return full_space(self.name)

    def wrong_knobs(self, knobs: Mapping[str, Any]) -> str | None:
        """Return why knob values are not a config of the kernel, or None."""
        return VALUES[self.name].wrong(knobs)

    def wrong_problem(self, problem: Problem) -> str | None:
        """Return why no config can run a problem, or None."""
        return wrong_heads(problem["q_heads"], problem["kv_heads"], problem["head_dim"])

    def wrong_pair(self, config: KernelConfig, problem: Problem) -> str | None:
        """Return why a config cannot run a problem on any device, or None."""
        return wrong_tile(self.name, config, problem)

    def flops(self, problem: Problem) -> float:
        # Per pair of elements 6 operations to rotate and 8 to normalize; 1.5 times as many backward.
        """Return the approximate number of arithmetic operations of a problem."""
        operations = 3.0 if "unnormed" in problem.flags else 7.0
        return operations * self.moved / 2 * _elements(problem)

    def bytes(self, problem: Problem) -> float:
        """Return the bytes that a problem reads and writes at least."""
        angles = problem["tokens"] * problem["head_dim"]  # cos and sin, half a head each
        return float(problem.itemsize) * (self.moved * _elements(problem) + angles)

    def grid(self, problem: Problem, config: Knobs) -> Any:
        """Return the grid size of a config; an array if `config` maps each knob to an array."""
        grid = forward_grid if "STEPS" not in self.knobs else backward_grid
        return grid(problem["tokens"], problem["q_heads"], problem["kv_heads"], config)

    def grouped_features(
        self, problems: Sequence[Problem], device: DeviceSpec, configs: Configs, binaries: Binaries | None
    ) -> Groups:
        """Return the features of problems and configs, in groups."""
        return stacked([self._groups(problem, device, configs, binaries) for problem in problems])

    def _groups(
        self,
        problem: Problem,
        device: DeviceSpec,
        configs: Sequence[KernelConfig],
        binaries: Mapping[KernelConfig, BinaryFacts] | None,
    ) -> Sequence[FeatureGroup]:
        """Return the features of one problem: generic ones, and those of the configs' tiles."""
        programs, flops, touched = self._programs(problem, configs), self.flops(problem), self.bytes(problem)
        generic = self._generic.groups(problem, device, configs, programs, binaries, flops=flops, touched_bytes=touched)
        first, each = len(self._generic.names), np.arange(len(configs))
        of_tiles = tile_features(problem, device, _tiles(tuple(configs), self.knobs), programs)
        return (*generic, FeatureGroup(tuple(range(first, len(self.feature_names))), of_tiles[None], each))

    def estimate_us(self, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]) -> NDArray[np.float64]:
        """Return an analytic estimate of the times in microseconds, (n_configs,).

        It is the memory time of the bytes, increased by the idle share of the last wave and of the padded tiles.
        """
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
        """Return the grid size of each config, (n_configs,)."""
        programs = self.grid(problem, _tiles(tuple(configs), self.knobs))
        return np.broadcast_to(np.asarray(programs, float), len(configs))

    def flags_of_call(self, arguments: Mapping[str, Any]) -> Sequence[str]:
        """Return the flags of the problem that a launch's arguments describe."""
        flags = ["interleaved"] * bool(arguments["INTERLEAVED"])
        return flags + ["unnormed"] * ("unnormed" in self.flags and arguments.get("q_weight_ptr") is None)

    def draw(self, models: Path | str | None, max_tflop: float | None, **drawn: Any) -> tuple[Case, ...]:
        """Draw problems of real models and random heads; see `workload.draw`."""
        most = float(workload.MOST_ELEMENTS)
        if max_tflop is not None:
            if not max_tflop > 0:
                raise ForetuneError(f"max_tflop must be more than 0 but is {max_tflop}")
            most = min(most, max_tflop * 1e12 / (3.5 * self.moved))
        return workload.draw(self.name, load_dense_models(models), most_elements=most, **drawn)

    def inputs(self, problem: Problem, device: DeviceSpec, *, seed: int = 0) -> Inputs:
        """Return random inputs on the device, and an output filled with NaN."""
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
        # q and k are views of one projection's output, as in models.
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
        """True for the backward family."""
        return "STEPS" in self.knobs

    def check_problem(self, config: KernelConfig, problem: Problem) -> Problem:
        # No block size divides 37 tokens, 5 and 3 heads.
        """Return a small problem that no block size divides, to check a config's results."""
        dims = {"tokens": 37, "q_heads": 5, "kv_heads": 3, "head_dim": problem["head_dim"]}
        return replace(problem, dims=tuple(dims.items()))

    def binary_key(self, config: KernelConfig, problem: Problem) -> Hashable:
        # Runtime numbers are not specialized, and STEPS is one of them.
        """Return what determines the compiled binary of a config and problem."""
        knobs = {knob: value for knob, value in config.to_json().items() if knob != "STEPS"}
        return tuple(knobs.items()), problem.signature, problem["head_dim"]

    @abstractmethod
    def kernel(self) -> Any:
        """Return the Triton kernel."""

    def source_hash(self) -> str:
        """Return the hash of the module that holds the kernels."""
        from ...runtime.launching.source_hash import hash_of_modules
        from . import triton_kernels

        return hash_of_modules(triton_kernels)

    def compile(self, config: KernelConfig, problem: Problem) -> Any:
        """Compile the kernel with a config for a problem, without launching it."""
        knobs = config.to_json() | block_constants(problem["head_dim"])
        return self.kernel().warmup(*self.arguments(problem), grid=(1,), **self.constants(problem), **knobs)

    @abstractmethod
    def arguments(self, problem: Problem) -> tuple[Any, ...]:
        """Return the kernel's positional arguments for compiling: dtypes for tensors, and example numbers."""

    def constants(self, problem: Problem) -> dict[str, bool]:
        """Return the kernel's constants other than the knobs and the head size."""
        return {"INTERLEAVED": "interleaved" in problem.flags}


class RmsNormRopeForward(RmsNormRope):
    """Normalize the heads of q and k (unless "unnormed") and rotate them, in one launch.

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
        # Eight heads of 128 elements are 8 elements per thread; larger heads need fewer per tile.
        """Return the config for calls without a prediction: 8 elements per thread."""
        heads = max(8 * 128 // (2 * block_constants(problem["head_dim"])["BLOCK"]), 1)
        return KernelConfig.of(ROWS=1, HEADS=min(heads, 32), num_warps=4, num_stages=3)

    def launch(self, inputs: Inputs, config: KernelConfig) -> torch.Tensor:
        """Launch the kernel once and return q and k, flat."""
        from .launches import launch_forward

        launch_forward(inputs.q, inputs.k, inputs.parts[0], inputs.parts[1], inputs.rotation, config)
        return inputs.out

    def reference(self, inputs: Inputs) -> torch.Tensor:
        """Compute in float32 with PyTorch what `launch` returns."""
        import torch

        both = rotated(inputs.q.float(), inputs.k.float(), inputs.rotation)
        return torch.cat([part.flatten() for part in both])

    def kernel(self) -> Any:
        """Return the forward kernel."""
        from .triton_kernels import rms_norm_rope_kernel

        return rms_norm_rope_kernel

    def arguments(self, problem: Problem) -> tuple[Any, ...]:
        """Return the kernel's positional arguments for compiling: dtypes for tensors, and example numbers."""
        element = torch_dtype(problem.dtype_name)
        weight = None if "unnormed" in problem.flags else element
        return *[element] * 6, weight, weight, 37, 8, 8, 1024, 1024, 37, 8, EPS, 0.0

    def constants(self, problem: Problem) -> dict[str, bool]:
        """Return the kernel's constants other than the knobs and the head size."""
        return super().constants(problem) | {"INVERSE": False}


class RmsNormRopeBackward(RmsNormRope):
    """Compute the gradients of q, k and both weights from those of the forward pass's outputs.

    >>> from foretune.datasets import DeviceSpec
    >>> family, h200 = RmsNormRopeBackward(), DeviceSpec.named("h200")
    >>> len(family.space(h200)) > 100
    True
    """

    name = "rms_norm_rope_bwd"
    moved = 3

    def default(self, problem: Problem, device: DeviceSpec) -> KernelConfig:
        """Return the config for calls without a prediction: 4 elements per thread."""
        heads = max(4 * 128 // (2 * block_constants(problem["head_dim"])["BLOCK"]), 1)
        return KernelConfig.of(ROWS=1, HEADS=min(heads, 16), STEPS=4, num_warps=4, num_stages=1)

    def launch(self, inputs: Inputs, config: KernelConfig) -> torch.Tensor:
        """Launch the kernels once and return the gradients of q, k and both weights, flat."""
        from .launches import launch_backward

        i = inputs
        assert i.dq is not None
        assert i.dk is not None
        launch_backward(i.dq, i.dk, i.q, i.k, i.parts, i.rotation, config)
        return i.out

    def reference(self, inputs: Inputs) -> torch.Tensor:
        """Compute in float32 with PyTorch what `launch` returns."""
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
        """Return the backward kernel."""
        from .triton_kernels import rms_norm_rope_backward_kernel

        return rms_norm_rope_backward_kernel

    def arguments(self, problem: Problem) -> tuple[Any, ...]:
        """Return the kernel's positional arguments for compiling: dtypes for tensors, and example numbers."""
        import torch

        element = torch_dtype(problem.dtype_name)
        tensors = (*[element] * 6, torch.float32, *[element] * 4)
        return *tensors, 37, 8, 8, 1024, 1024, 1024, 1024, 37, 8, EPS, 0.0


@remembered(maxsize=64)
def _tiles(configs: tuple[KernelConfig, ...], knobs: tuple[str, ...]) -> Mapping[str, NDArray[np.int64]]:
    """Return each knob's values over all configs, (n_configs,)."""
    return {knob: np.array([config[knob] for config in configs], np.int64) for knob in knobs}


def wrong_heads(q_heads: int, kv_heads: int, head_dim: int) -> str | None:
    """Return why the kernels cannot run these heads, or None."""
    if min(q_heads, kv_heads) < 1:
        return f"q_heads and kv_heads must be >= 1 but are {q_heads} and {kv_heads}"
    if head_dim % 16 or not 16 <= head_dim <= MOST_HEAD_DIM:
        return f"head_dim must be a multiple of 16 between 16 and {MOST_HEAD_DIM} but is {head_dim}"
    return None


def _elements(problem: Problem) -> float:
    """Return the number of elements of q and k together."""
    return float(problem["tokens"]) * (problem["q_heads"] + problem["kv_heads"]) * problem["head_dim"]


def rotated(q: torch.Tensor, k: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalize (if there are weights) and rotate q and k by head, with plain PyTorch, in their dtype.

    It is the reference of both families, and the eager contender. q is (tokens, q_heads, head_dim), and k has kv_heads.
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
