"""The grouped GEMMs as `Family` objects: what all three share is here once, what tells them apart in each class."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ...datasets import DTYPES, DeviceSpec, Family, ForetuneError, KernelConfig, Problem, torch_dtype
from ...datasets.problem import TORCH_NAMES
from .chunks import chunk_rows
from .features import FEATURE_NAMES, features, group_sizes_of
from .fingerprint import structure
from .operation import DW, DX, FORWARD, PERMUTATIONS, Operation
from .space import BLOCKS_M, Ranges, full_space, knobs_of, smem_bytes, wrong_value

if TYPE_CHECKING:
    import numpy as np
    import torch
    import triton
    from numpy.typing import NDArray

    from .tiles import TileMap

_TMA_ARCHS = ("sm_90", "sm_100", "sm_103", "sm_120")
#: float32 products run without tensor cores, and a larger tile takes the compiler minutes or spills.
MOST_FP32_TILE = 64 * 64


@dataclass(frozen=True)
class Inputs:
    """The tensors of one call, on the device."""

    left: torch.Tensor  # x or dy; (tokens, K) where it is gathered with topk rows a token
    right: torch.Tensor  # w, or x for dW
    out: torch.Tensor  # poisoned with NaN
    group_sizes: torch.Tensor  # (groups,) int32
    tile_map: TileMap
    indices: torch.Tensor | None  # (rows,) int32: the permuted row of each sorted row
    topk: int  # a gathered x has rows / topk rows
    problem: Problem
    device: DeviceSpec


class GroupedGemm(Family):
    """What the three families share. Problems have the LAYER's dimensions: w is (groups, n, k) in all three.

    Flags of a problem: "permute_x" (the layer gathers the rows of x while loading) or "permute_y" (it scatters the rows
    of y while storing); see `Operation` for what each means in the backward pass.
    """

    operation: ClassVar[Operation]
    dims = ("groups", "rows", "n", "k")
    dtypes = DTYPES
    feature_names = FEATURE_NAMES

    def __init__(self) -> None:
        self.name = self.operation.name  # type: ignore[misc]
        self.knobs = knobs_of(self.operation)  # type: ignore[misc]

    def space(self, device: DeviceSpec | None = None, **ranges: Sequence[int]) -> tuple[KernelConfig, ...]:
        """Every config worth declaring; with a device, those that some problem on it supports.

        `ranges` replace the values of a knob: block_m, block_n, block_k, num_warps, num_stages, tma (0 and 1).

        >>> from foretune.kernels import family
        >>> len(family("grouped_gemm_fwd").space(DeviceSpec.named("h200"), block_m=[64], tma=[1])) > 10
        True
        """
        space = full_space(self.operation, Ranges.of(self.operation, **ranges))
        if device is None:
            return space
        return tuple(c for c in space if self._device_limit(c, 2, device) is None)

    def default(self, problem: Problem, device: DeviceSpec) -> KernelConfig:
        tma = dict.fromkeys(self.operation.tma, int(device.arch in _TMA_ARCHS))
        tma |= {knob: 0 for flag, knob in self.operation.permuted_by if flag in problem.flags}
        if problem.dtype == "fp32":
            block_m, block_n, block_k = 32, 64, 32
        else:
            block_m, block_n, block_k = self._default_block_m(problem), 128, 64
        knobs = tma | {
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "BLOCK_K": block_k,
            "GROUP_M": 8 if block_m >= 64 else 1,
            "PROGRAMS_PER_SM": 1 if block_m >= 64 else 2,
            "num_warps": 4,
            # 2-byte operands, 3 stages of (128 + 128) x 64 and an output tile: 128 KiB; less where there is less.
            "num_stages": 3 if device.smem_per_block_bytes >= 160 * 1024 else 2,
        }
        return KernelConfig.of(**{knob: knobs.get(knob, 1) for knob in self.knobs})

    @abstractmethod
    def _default_block_m(self, problem: Problem) -> int: ...

    def supports(self, config: KernelConfig, problem: Problem, device: DeviceSpec) -> str | None:
        if problem.dtype not in self.dtypes:
            return f"dtype {problem.dtype} is not one of {', '.join(self.dtypes)}"
        unknown = [flag for flag in problem.flags if flag not in PERMUTATIONS]
        if unknown:
            return f"flag {unknown[0]} is not one of {', '.join(PERMUTATIONS)}"
        if len(problem.flags) > 1:
            return "permute_x and permute_y cannot both be fused into one GEMM"
        if min(problem["groups"], problem["n"], problem["k"]) < 1:
            return f"groups, N and K must be >= 1 but are {problem['groups']}, {problem['n']} and {problem['k']}"
        if problem["n"] % 8 or problem["k"] % 8:
            return f"N and K must be multiples of 8 but are {problem['n']} and {problem['k']}"
        for flag, knob in self.operation.permuted_by:
            if flag in problem.flags and config[knob]:
                return f"{knob}=1 with {flag}: TMA moves boxes of neighbouring rows, and these are permuted"
        block_m = config["BLOCK_M"]
        if block_m not in BLOCKS_M:  # a map has no tiles of that size, and would be read where it holds other things
            return wrong_value("block_m", block_m)
        tile = block_m * config["BLOCK_N"]
        if problem.dtype == "fp32" and tile > MOST_FP32_TILE:
            return f"fp32 tiles have at most {MOST_FP32_TILE} elements but BLOCK_M x BLOCK_N is {tile}"
        return self._device_limit(config, problem.itemsize, device)

    def _device_limit(self, config: KernelConfig, itemsize: int, device: DeviceSpec) -> str | None:
        """The reason why the device cannot run the config for any problem, or None."""
        has_tma = device.arch in _TMA_ARCHS or device.backend == "cpu"  # the interpreter has
        if not has_tma and any(config[knob] for knob in self.operation.tma):
            return f"{device.arch} has no TMA"
        needed = smem_bytes(self.operation, config, itemsize, device)
        if needed > device.smem_per_block_bytes:
            return f"needs {needed} bytes of shared memory but {device.name} has {device.smem_per_block_bytes} a block"
        return None

    def features(self, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]) -> NDArray[np.float32]:
        return features(self.operation, problem, device, configs)

    def problem_from_call(self, arguments: Mapping[str, Any]) -> Problem:
        needed = (self._tensor, "rows", "groups", "N8", "K8")
        missing = [name for name in needed if name not in arguments]
        if missing:
            raise ForetuneError(
                f"the call has no argument {', '.join(missing)}: a kernel with other parameter names than "
                f"{self.name}'s needs prune(..., problem=a function of the arguments)"
            )
        n, k = self._layer_dims(8 * int(arguments["N8"]), 8 * int(arguments["K8"]))
        return Problem.of(
            self.name,
            dtype=_dtype_name(self._tensor, arguments[self._tensor]),
            flags=tuple(flag for flag, argument in self._permuting.items() if arguments.get(argument)),
            groups=int(arguments["groups"]),
            rows=int(arguments["rows"]),
            n=n,
            k=k,
        )

    _tensor: ClassVar[str]  # the kernel's parameter that says the dtype
    _permuting: ClassVar[dict[str, str]]  # the kernel's parameter that says each flag

    def _layer_dims(self, n: int, k: int) -> tuple[int, int]:
        """The layer's N and K from the kernel's."""
        return n, k

    def inputs(self, problem: Problem, device: DeviceSpec, *, seed: int = 0) -> Inputs:
        import torch

        from .tiles import TileMap

        where = "cpu" if device.backend == "cpu" else "cuda"
        dtype = torch_dtype(problem.dtype)
        rows, n, k, groups = (problem[dim] for dim in ("rows", "n", "k", "groups"))
        generator = torch.Generator(where).manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=where, dtype=dtype)

        topk = next(t for t in (8, 6, 4, 3, 2, 1) if rows % t == 0) if "permute_x" in problem.flags else 1
        shapes = {"x": (rows // topk, k), "w": (groups, n, k), "dy": (rows, n), "y": (rows, n), "dx": (rows, k)}
        if self.operation is DX:
            topk = 1  # dx has a row for each sorted row, whatever x had
        shapes["dw"] = shapes["w"]
        left, right, out = self._operands
        sizes = torch.tensor(group_sizes_of(problem), dtype=torch.int32, device=where)
        indices = None
        if problem.flags:
            indices = torch.randperm(rows, generator=generator, device=where).to(torch.int32)
        return Inputs(
            left=random(*shapes[left]),
            right=random(*shapes[right]),
            out=torch.full(shapes[out], float("nan"), dtype=dtype, device=where),
            group_sizes=sizes,
            tile_map=TileMap.build(sizes, rows, self._chunk_rows(problem, device)),
            indices=indices,
            topk=topk,
            problem=problem,
            device=device,
        )

    _operands: ClassVar[tuple[str, str, str]]

    def _chunk_rows(self, problem: Problem, device: DeviceSpec) -> int | None:
        return None

    def autotuner(self, configs: Sequence[triton.Config], early_config_prune: Callable[..., Any] | None = None) -> Any:
        import triton

        kernel, unspecialized, key = self._kernel()
        pruned_by = {"early_config_prune": early_config_prune} if early_config_prune else None
        fresh = triton.jit(do_not_specialize=unspecialized)(kernel.fn)
        return triton.autotune(configs=list(configs), key=key, prune_configs_by=pruned_by)(fresh)

    @abstractmethod
    def _kernel(self) -> tuple[Any, list[str], list[str]]:
        """The kernel, its unspecialised parameters, and the key of an autotuner."""

    def launch_autotuned(self, autotuner: Any, inputs: Inputs) -> torch.Tensor:
        from .scratch import ensure_allocator

        ensure_allocator()
        sm_count = inputs.device.sm_count
        arguments = self._arguments(inputs)
        autotuner[lambda meta: (sm_count * meta["PROGRAMS_PER_SM"],)](*arguments, **self._flags(inputs.problem))
        self._finish(inputs, arguments)
        return inputs.out

    def _finish(self, inputs: Inputs, arguments: tuple[Any, ...]) -> None:
        """What a launch of the kernel leaves to do."""

    @abstractmethod
    def _arguments(self, inputs: Inputs) -> tuple[Any, ...]:
        """The kernel's positional arguments."""

    @abstractmethod
    def _flags(self, problem: Problem) -> dict[str, bool]:
        """The kernel's constants beside the knobs."""

    def reference(self, inputs: Inputs) -> torch.Tensor:
        import torch

        out = torch.full(inputs.out.shape, float("nan"), dtype=torch.float32, device=inputs.out.device)
        start = 0
        for group, size in enumerate(inputs.group_sizes.tolist()):
            rows = torch.arange(start, start + size, device=out.device)
            permuted = rows if inputs.indices is None else inputs.indices[start : start + size].long()
            self._reference_of(inputs, out, group, rows, permuted)
            start += size
        return out

    @abstractmethod
    def _reference_of(
        self, inputs: Inputs, out: torch.Tensor, group: int, rows: torch.Tensor, permuted: torch.Tensor
    ) -> None:
        """One group of the reference: its sorted rows, and which rows of the permuted side they are, (size,)."""

    def tolerance(self, problem: Problem) -> float:
        # Rounding the float32 sum once: a relative error of about 2^-9 (bf16) or 2^-12 (fp16) at most, less on average.
        # float32 differs by the order of the sum: sqrt(depth) roundings of 2^-24.
        return {"bf16": 4e-3, "fp16": 5e-4, "fp32": 1e-5}[problem.dtype]

    def check_problem(self, problem: Problem) -> Problem:
        # Off every block: N = 2 x 256 + 136, K = 256 + 72; groups of 0 and 1 row, one over every BLOCK_M.
        sizes = (37, 0, 1, 300, 0, 16, 129, 5)
        dims = {"groups": len(sizes), "rows": sum(sizes), "n": 648, "k": 328}
        return Problem.of(self.name, dtype=problem.dtype, flags=problem.flags, group_sizes=sizes, **dims)

    def compile(self, config: KernelConfig, problem: Problem) -> Any:
        import torch

        kernel, _, _ = self._kernel()
        element = torch_dtype(problem.dtype)
        indices = torch.int32 if problem.flags else None
        return kernel.warmup(
            *self._warmup_arguments(element, indices), grid=(1,), **self._flags(problem), **config.to_json()
        )

    @abstractmethod
    def _warmup_arguments(self, element: Any, indices: Any) -> tuple[Any, ...]:
        """Arguments of the types that `_arguments` gives: dtypes for tensors, any numbers for numbers."""

    def binary_of(self, config: KernelConfig) -> KernelConfig:
        return KernelConfig.from_json(config.to_json() | {"GROUP_M": 1, "PROGRAMS_PER_SM": 1})

    def source_hash(self) -> str:
        from triton.runtime.jit import JITFunction

        from . import dw, gemm, ragged, sorting, tiles

        modules = (tiles, ragged, *((dw, sorting) if self.operation is DW else (gemm,)))
        kernels = {
            (module.__name__, name): structure(value.src)
            for module in modules
            for name, value in vars(module).items()
            if isinstance(value, JITFunction)
        }
        return hashlib.sha256("\n".join(kernels[key] for key in sorted(kernels)).encode()).hexdigest()[:16]


class _OverRows(GroupedGemm):
    """Forward and dX: one kernel, whose output has a row for each row."""

    _tensor = "x_ptr"

    def _default_block_m(self, problem: Problem) -> int:
        rows_per_group = problem["rows"] / max(problem["groups"], 1)
        return 16 if rows_per_group <= 16 else 64 if rows_per_group <= 64 else 128

    def launch(self, inputs: Inputs, config: KernelConfig) -> torch.Tensor:
        from .gemm import launch_gemm

        flags = self._flags(inputs.problem)
        launch_gemm(
            inputs.left,
            inputs.right,
            inputs.out,
            inputs.tile_map,
            config,
            inputs.device.sm_count,
            transposed=flags["TRANSPOSED"],
            gather=inputs.indices if flags["GATHER"] else None,
            divisor=inputs.topk,
            scatter=inputs.indices if flags["SCATTER"] else None,
        )
        return inputs.out

    def _kernel(self) -> tuple[Any, list[str], list[str]]:
        from .gemm import KEY, UNSPECIALIZED, grouped_gemm_kernel

        return grouped_gemm_kernel, UNSPECIALIZED, KEY

    def _arguments(self, inputs: Inputs) -> tuple[Any, ...]:
        from .gemm import arguments

        i = inputs
        return arguments(i.left, i.right, i.out, i.tile_map, i.indices, divisor=i.topk)

    def _flags(self, problem: Problem) -> dict[str, bool]:
        flags = {name: flag in problem.flags for flag, name in self._permuting.items()}
        return {"TRANSPOSED": self.operation is DX} | flags

    def _warmup_arguments(self, element: Any, indices: Any) -> tuple[Any, ...]:
        import torch

        return element, element, element, torch.int32, indices, None, None, 1024, 1024, 8, 128, 128, 1


class GroupedGemmForward(_OverRows):
    """y[rows of e] = x[rows of e] @ w[e].T, with x (rows, K) sorted by group, w (groups, N, K), y (rows, N).

    >>> from foretune.datasets import DeviceSpec
    >>> family, h200 = GroupedGemmForward(), DeviceSpec.named("h200")
    >>> len(family.space(h200)) >= 700
    True
    >>> problem = Problem.of(family.name, groups=64, rows=8192, n=2048, k=1024)
    >>> family.supports(family.default(problem, h200), problem, h200) is None
    True
    """

    operation = FORWARD
    _operands = ("x", "w", "y")
    _permuting: ClassVar = {"permute_x": "GATHER", "permute_y": "SCATTER"}

    def _reference_of(
        self, inputs: Inputs, out: torch.Tensor, group: int, rows: torch.Tensor, permuted: torch.Tensor
    ) -> None:
        gathers, scatters = "permute_x" in inputs.problem.flags, "permute_y" in inputs.problem.flags
        x = inputs.left[permuted // inputs.topk if gathers else rows]
        out[permuted if scatters else rows] = x.float() @ inputs.right[group].float().T


class GroupedGemmDX(_OverRows):
    """dx[rows of e] = dy[rows of e] @ w[e], with dy (rows, N), w (groups, N, K), dx (rows, K).

    Of a layer with permute_x dx is scattered to (rows, K) in the permuted order; of one with permute_y dy is gathered.
    """

    operation = DX
    _operands = ("dy", "w", "dx")
    _permuting: ClassVar = {"permute_x": "SCATTER", "permute_y": "GATHER"}

    def _layer_dims(self, n: int, k: int) -> tuple[int, int]:
        return k, n

    def _reference_of(
        self, inputs: Inputs, out: torch.Tensor, group: int, rows: torch.Tensor, permuted: torch.Tensor
    ) -> None:
        gathers, scatters = "permute_y" in inputs.problem.flags, "permute_x" in inputs.problem.flags
        dy = inputs.left[permuted if gathers else rows]
        out[permuted if scatters else rows] = dy.float() @ inputs.right[group].float()


class GroupedGemmDW(GroupedGemm):
    """dw[e] = dy[rows of e].T @ x[rows of e], with dy (rows, N), x (rows, K), dw (groups, N, K), zero for empty groups.

    Of a layer with permute_x the rows of x are sorted first, of one with permute_y those of dy: a launch includes that,
    the kernel itself takes sorted rows only.
    """

    operation = DW
    _tensor = "dy_ptr"
    _operands = ("dy", "x", "dw")
    _permuting: ClassVar = {}

    def _default_block_m(self, problem: Problem) -> int:
        return 64 if problem["n"] <= 64 else 128

    def _chunk_rows(self, problem: Problem, device: DeviceSpec) -> int:
        return chunk_rows(problem["rows"], problem["n"], problem["k"], device.sm_count)

    def launch(self, inputs: Inputs, config: KernelConfig) -> torch.Tensor:
        from .dw import launch_dw

        launch_dw(*self._sorted(inputs), inputs.out, inputs.tile_map, config, inputs.device.sm_count)
        return inputs.out

    def _sorted(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """dy and x, sorted by group."""
        from .sorting import sorted_rows

        dy, x, indices = inputs.left, inputs.right, inputs.indices
        if indices is None:
            return dy, x
        if "permute_x" in inputs.problem.flags:
            return dy, sorted_rows(x, indices, inputs.topk)
        return sorted_rows(dy, indices), x

    def _kernel(self) -> tuple[Any, list[str], list[str]]:
        from .dw import KEY, UNSPECIALIZED, grouped_gemm_dw_kernel

        return grouped_gemm_dw_kernel, UNSPECIALIZED, KEY

    def _arguments(self, inputs: Inputs) -> tuple[Any, ...]:
        from .dw import arguments, partial_sums

        i = inputs
        return arguments(*self._sorted(i), i.out, partial_sums(i.out, i.tile_map), i.tile_map)

    def _finish(self, inputs: Inputs, arguments: tuple[Any, ...]) -> None:
        from .dw import add_partials

        add_partials(arguments[3], inputs.out, inputs.tile_map)

    def _flags(self, problem: Problem) -> dict[str, bool]:
        return {}

    def _warmup_arguments(self, element: Any, indices: Any) -> tuple[Any, ...]:
        import torch

        return element, element, element, element, torch.int32, 1024, 8, 1, 128, 128

    def _reference_of(
        self, inputs: Inputs, out: torch.Tensor, group: int, rows: torch.Tensor, permuted: torch.Tensor
    ) -> None:
        dy = inputs.left[permuted if "permute_y" in inputs.problem.flags else rows]
        x = inputs.right[permuted // inputs.topk if "permute_x" in inputs.problem.flags else rows]
        out[group] = dy.float().T @ x.float()


def _dtype_name(argument: str, tensor: Any) -> str:
    """bf16, fp16 or fp32, from a tensor or a mock of one."""
    names = {f"torch.{torch_name}": name for name, torch_name in TORCH_NAMES.items()}
    dtype = str(getattr(tensor, "dtype", None))
    if dtype not in names:
        raise ForetuneError(f"{argument} must be a tensor of {', '.join(names)} but its dtype is {dtype}")
    return names[dtype]
