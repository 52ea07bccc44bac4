"""What launches the dense GEMM: which of the two kernels a config means, and the sum of what SPLIT_K cut apart."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from ....runtime.launching.launcher import Launcher, launch_nothing, with_scratch
from .gemm import matmul_kernel
from .split_k import add_partials, compile_add_partials

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from ....datasets import KernelConfig

#: Bytes that TMA wants rows to begin at multiples of, and that one load of a thread has.
ALIGNMENT = 16


def launch_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    y: torch.Tensor,
    config: KernelConfig,
    sm_count: int,
    *,
    a_km: bool = False,
    b_kn: bool = False,
    bias: torch.Tensor | None = None,
    activation: str = "none",
) -> None:
    """Launches y = activation(a @ b + bias) with explicit arguments and does not wait for it.

    a (batch, M, K), or (batch, K, M) with `a_km`; b (batch, N, K), or (batch, K, N) with `b_kn`; y (batch, M, N); bias
    (N,). The last dimension of each is contiguous, and one matrix follows the other: only rows may be further apart
    than they are long. y is int32 for int8 operands, which take neither bias nor activation.
    """
    prepare_matmul(a, b, y, config, sm_count, a_km=a_km, b_kn=b_kn, activation=activation)((a, b, y, bias))


def prepare_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    y: torch.Tensor,
    config: KernelConfig,
    sm_count: int,
    *,
    a_km: bool = False,
    b_kn: bool = False,
    activation: str = "none",
) -> Callable[[Sequence[torch.Tensor | None]], None]:
    """What launches the kernel on any (a, b, y, bias) that are stored as these are, again and again. All as in
    `launch_matmul`, but for the dimensions, of which later tensors may have others."""
    if y.numel() == 0:
        return launch_nothing
    (batch, m, n), k = y.shape, a.shape[1] if a_km else a.shape[2]
    splits, aligned = config["SPLIT_K"], are_aligned(a, b, y)
    whole, launcher = splits == 1, _launcher(config["CONSUMERS"] > 0)
    pdl = not whole and launcher.has_dependent_launch
    launch: Callable[[Sequence[torch.Tensor | None]], None] = launcher.prepare(
        (grid_of(batch, m, n, config, sm_count), 1, 1),
        (batch, m, n, k, a.stride(-2), b.stride(-2), y.stride(-2) if whole else n),
        config,
        **_constants(config, a_km, b_kn, activation, aligned, pdl),
    )
    if config["TMA"]:
        launch = with_scratch(launch)
    if whole:
        return launch

    def launch_parts(tensors: Sequence[Any]) -> None:
        import torch

        a, b, y, bias = tensors
        wide = torch.int32 if a.dtype == torch.int8 else torch.float32
        partial = torch.empty((splits, batch, m, n), dtype=wide, device=y.device)
        launch((a, b, partial, None))
        add_partials(partial, y, bias, activation, aligned, pdl)

    return launch_parts


def are_aligned(a: torch.Tensor, b: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether rows of all three begin at multiples of 16 bytes and are whole numbers of 16 bytes of a's elements."""
    unit = ALIGNMENT // a.element_size()
    sizes = [size for tensor in (a, b, y) for size in (tensor.shape[-1], tensor.stride(-2))]
    return not any(size % unit for size in sizes)


def grid_of(batch: int, m: int, n: int, config: KernelConfig, sm_count: int) -> int:
    """Programs to launch: PROGRAMS_PER_SM on each SM, or one a tile where that is 0."""
    tiles: int = batch * config["SPLIT_K"] * -(-m // config["BLOCK_M"]) * -(-n // config["BLOCK_N"])
    programs: int = sm_count * config["PROGRAMS_PER_SM"]
    return min(programs or tiles, tiles)


def compile_matmul(
    element: torch.dtype,
    out: torch.dtype,
    config: KernelConfig,
    *,
    a_km: bool,
    b_kn: bool,
    bias: bool,
    activation: str,
    aligned: bool,
) -> Any:
    """Compiles what `launch_matmul` launches for the active driver's target, into Triton's cache; returns the binary of
    the product."""
    import torch

    whole, launcher = config["SPLIT_K"] == 1, _launcher(config["CONSUMERS"] > 0)
    pdl = not whole and launcher.has_dependent_launch
    if not whole:
        wide = torch.int32 if element == torch.int8 else torch.float32
        compile_add_partials(wide, out, bias, activation, aligned, pdl)
        out = wide
    return launcher.kernel.warmup(
        element,
        element,
        out,
        out if bias and whole else None,
        *(64,) * 7,
        grid=(1,),
        **_constants(config, a_km, b_kn, activation, aligned, pdl),
        **config.to_json(),
    )


def _constants(
    config: KernelConfig, a_km: bool, b_kn: bool, activation: str, aligned: bool, pdl: bool
) -> dict[str, Any]:
    """What the kernels need besides the knobs."""
    whole = config["SPLIT_K"] == 1
    own = {"STAGES": config.num_stages} if config["CONSUMERS"] else {"PDL": pdl}
    return {
        "A_KM": a_km,
        "B_KN": b_kn,
        "ACTIVATION": activation if whole else "none",
        "ALIGNED": aligned,
        "SPLIT": not whole,
        "PERSISTENT": config["PROGRAMS_PER_SM"] > 0,
        **own,
    }


@cache
def _launcher(specialized: bool) -> Launcher:
    if not specialized:
        return Launcher(matmul_kernel)
    from .specialized import specialized_matmul_kernel  # imports Gluon, which other configs do not need

    return Launcher(specialized_matmul_kernel)
