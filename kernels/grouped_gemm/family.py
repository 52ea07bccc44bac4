"""`GroupedGemmForward`: the forward grouped GEMM as a `Family`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...datasets import DeviceSpec, Family, ForetuneError, KernelConfig, Problem
from .features import FEATURE_NAMES, features, group_sizes_of
from .space import KNOBS, full_space, smem_bytes

if TYPE_CHECKING:
    import numpy as np
    import torch
    import triton
    from numpy.typing import NDArray

    from .tiles import TileMap

_TMA_ARCHS = ("sm_90", "sm_100", "sm_103", "sm_120")


@dataclass(frozen=True)
class Inputs:
    """The tensors of one forward call, on the device."""

    x: torch.Tensor  # (rows, K)
    w: torch.Tensor  # (groups, N, K)
    group_sizes: torch.Tensor  # (groups,) int32
    y: torch.Tensor  # (rows, N)
    tile_map: TileMap
    device: DeviceSpec


class GroupedGemmForward(Family):
    """y[rows of e] = x[rows of e] @ w[e].T, with x (rows, K) sorted by group, w (groups, N, K), y (rows, N).

    >>> from ...datasets import DeviceSpec
    >>> family, h200 = GroupedGemmForward(), DeviceSpec.named("h200")
    >>> len(family.space(h200)) >= 700
    True
    >>> problem = Problem.of(family.name, groups=64, rows=8192, n=2048, k=1024)
    >>> family.supports(family.default(problem, h200), problem, h200) is None
    True
    """

    name = "grouped_gemm_fwd"
    dims = ("groups", "rows", "n", "k")
    dtypes = ("bf16", "fp16")
    knobs = KNOBS
    feature_names = FEATURE_NAMES

    def space(self, device: DeviceSpec | None = None) -> tuple[KernelConfig, ...]:
        if device is None:
            return full_space()
        return tuple(c for c in full_space() if _device_limit(c, 2, device) is None)

    def default(self, problem: Problem, device: DeviceSpec) -> KernelConfig:
        rows_per_group = problem["rows"] / max(problem["groups"], 1)
        block_m = 16 if rows_per_group <= 16 else 64 if rows_per_group <= 64 else 128
        # 2-byte operands, 3 stages of (128 + 128) x 64: 96 KiB, which every card since sm_80 has.
        return KernelConfig.of(
            BLOCK_M=block_m,
            BLOCK_N=128,
            BLOCK_K=64,
            GROUP_M=8 if block_m >= 64 else 1,
            PROGRAMS_PER_SM=2,
            USE_TMA=int(device.arch in _TMA_ARCHS),
            num_warps=8 if block_m == 128 else 4,
            num_stages=3 if device.backend == "cuda" else 2,
        )

    def supports(self, config: KernelConfig, problem: Problem, device: DeviceSpec) -> str | None:
        if problem.dtype not in self.dtypes:
            return f"dtype {problem.dtype} is not one of {', '.join(self.dtypes)}"
        if min(problem["groups"], problem["n"], problem["k"]) < 1:
            return f"groups, N and K must be >= 1 but are {problem['groups']}, {problem['n']} and {problem['k']}"
        if problem["n"] % 8 or problem["k"] % 8:
            return f"N and K must be multiples of 8 but are {problem['n']} and {problem['k']}"
        if config["USE_TMA"] and problem["groups"] * problem["n"] >= 2**31:
            return f"TMA coordinates are 32 bits but there are {problem['groups'] * problem['n']} weight rows"
        return _device_limit(config, problem.itemsize, device)

    def features(self, problem: Problem, device: DeviceSpec, configs: Sequence[KernelConfig]) -> NDArray[np.float32]:
        return features(problem, device, configs)

    def problem_from_call(self, arguments: Mapping[str, Any]) -> Problem:
        needed = ("x_ptr", "rows", "groups", "N8", "K8")
        missing = [name for name in needed if name not in arguments]
        if missing:
            raise ForetuneError(
                f"the call has no argument {', '.join(missing)}: a kernel with other parameter names than "
                f"grouped_gemm_fwd_kernel's needs prune(..., problem=a function of the arguments)"
            )
        return Problem.of(
            self.name,
            dtype=_dtype_name(arguments["x_ptr"]),
            groups=int(arguments["groups"]),
            rows=int(arguments["rows"]),
            n=8 * int(arguments["N8"]),
            k=8 * int(arguments["K8"]),
        )

    def inputs(self, problem: Problem, device: DeviceSpec, *, seed: int = 0) -> Inputs:
        import torch

        from .tiles import TileMap

        where = "cpu" if device.backend == "cpu" else "cuda"
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[problem.dtype]
        rows, n, k, groups = (problem[dim] for dim in ("rows", "n", "k", "groups"))
        generator = torch.Generator(where).manual_seed(seed)
        x = torch.randn(rows, k, generator=generator, device=where, dtype=dtype)
        w = torch.randn(groups, n, k, generator=generator, device=where, dtype=dtype)
        sizes = torch.tensor(group_sizes_of(problem), dtype=torch.int32, device=where)
        y = torch.full((rows, n), float("nan"), dtype=dtype, device=where)
        return Inputs(x, w, sizes, y, TileMap.build(sizes, rows), device)

    def launch(self, inputs: Inputs, config: KernelConfig) -> torch.Tensor:
        from .forward import launch

        launch(inputs.x, inputs.w, inputs.y, inputs.tile_map, config, inputs.device.sm_count)
        return inputs.y

    def autotuner(self, configs: Sequence[triton.Config], early_config_prune: Callable[..., Any] | None = None) -> Any:
        import triton

        from .forward import KEY, UNSPECIALIZED, grouped_gemm_fwd_kernel

        pruned_by = {"early_config_prune": early_config_prune} if early_config_prune else None
        kernel = triton.jit(do_not_specialize=UNSPECIALIZED)(grouped_gemm_fwd_kernel.fn)
        return triton.autotune(configs=list(configs), key=KEY, prune_configs_by=pruned_by)(kernel)

    def launch_autotuned(self, autotuner: Any, inputs: Inputs) -> torch.Tensor:
        from .forward import arguments
        from .scratch import ensure_allocator

        ensure_allocator()
        sm_count = inputs.device.sm_count
        autotuner[lambda meta: (sm_count * meta["PROGRAMS_PER_SM"],)](
            *arguments(inputs.x, inputs.w, inputs.y, inputs.tile_map)
        )
        return inputs.y

    def reference(self, inputs: Inputs) -> torch.Tensor:
        import torch

        y = torch.full(inputs.y.shape, float("nan"), dtype=torch.float32, device=inputs.y.device)
        start = 0
        for group, size in enumerate(inputs.group_sizes.tolist()):
            y[start : start + size] = inputs.x[start : start + size].float() @ inputs.w[group].float().T
            start += size
        return y

    def tolerance(self, problem: Problem) -> float:
        # Rounding the float32 sum once: a relative error of about 2^-9 (bf16) or 2^-12 (fp16) at most, less on average.
        return {"bf16": 4e-3, "fp16": 5e-4}[problem.dtype]

    def check_problem(self, problem: Problem) -> Problem:
        # Off every block: N = 2 x 256 + 136, K = 256 + 72; groups of 0 and 1 row, one over every BLOCK_M.
        sizes = (37, 0, 1, 300, 0, 16, 129, 5)
        dims = {"groups": len(sizes), "rows": sum(sizes), "n": 648, "k": 328}
        return Problem.of(self.name, dtype=problem.dtype, flags=problem.flags, group_sizes=sizes, **dims)

    def compile(self, config: KernelConfig, problem: Problem) -> Any:
        import torch

        from .forward import grouped_gemm_fwd_kernel

        element = {"bf16": torch.bfloat16, "fp16": torch.float16}[problem.dtype]
        knobs = config.to_json()
        return grouped_gemm_fwd_kernel.warmup(
            element, element, element, torch.int32, 1024, 8, 128, 128, grid=(1,), **knobs
        )

    def binary_of(self, config: KernelConfig) -> KernelConfig:
        return KernelConfig.from_json(config.to_json() | {"GROUP_M": 1, "PROGRAMS_PER_SM": 1})

    def source_hash(self) -> str:
        from . import forward, tiles

        kernels = (forward.grouped_gemm_fwd_kernel, tiles.tile_map_kernel, tiles.load_tile, tiles.tile_position)
        return hashlib.sha256("\n".join(kernel.src for kernel in kernels).encode()).hexdigest()[:16]


def _device_limit(config: KernelConfig, itemsize: int, device: DeviceSpec) -> str | None:
    """The reason why the device cannot run the config for any problem, or None."""
    if config["USE_TMA"] and device.arch not in _TMA_ARCHS and device.backend != "cpu":
        return f"{device.arch} has no TMA"
    needed = smem_bytes(config, itemsize, device)
    if needed > device.smem_per_block_bytes:
        return f"needs {needed} bytes of shared memory but {device.name} has {device.smem_per_block_bytes} a block"
    return None


def _dtype_name(tensor: Any) -> str:
    """bf16, fp16 or fp32, from a tensor or a mock of one."""
    names = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}
    dtype = str(getattr(tensor, "dtype", None))
    if dtype not in names:
        raise ForetuneError(f"x_ptr must be a tensor of {', '.join(names)} but its dtype is {dtype}")
    return names[dtype]
