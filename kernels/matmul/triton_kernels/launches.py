"""Launch the dense GEMM: choose the plain or the warp-specialized kernel, and add up the parts of SPLIT_K."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ....runtime.launching.launcher import launch_nothing
from ...boxes import stack
from ...launchers import Launchers, programs_of
from .split_k import add_partials, compile_add_partials

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from ....datasets import KernelConfig
    from ....runtime.launching.descriptors import Descriptor
    from ...launchers import Launch

LAUNCHERS = Launchers(__package__, ".gemm:matmul_kernel", ".specialized:specialized_matmul_kernel")
#: Rows must begin at multiples of this many bytes for TMA, and for 16-byte loads.
ALIGNMENT = 16


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
) -> Launch:
    """Return a function that launches y = activation(a @ b + bias), without waiting for it.

    It takes any (a, b, y, bias) with the shapes and strides of these, which may lack the batch dimension; bias is (N,),
    or None. The last dimension of each tensor is contiguous, and the matrices of a batch follow each other; only rows
    may have padding between them.

    Args:
        a: (batch, M, K); (batch, K, M) with `a_km`.
        b: (batch, N, K); (batch, K, N) with `b_kn`.
        y: (batch, M, N); int32 for int8 operands, which allow neither bias nor activation.
        config: The config.
        sm_count: The number of the GPU's SMs.
        a_km: The layout of a.
        b_kn: The layout of b.
        activation: "relu", "gelu", "silu" or "none".
    """
    if y.numel() == 0:
        return launch_nothing
    (batch, m, n), k = y.shape, a.shape[1] if a_km else a.shape[2]
    splits, aligned = config["SPLIT_K"], are_aligned(a, b, y)
    whole, launcher = splits == 1, LAUNCHERS.of(config)
    pdl = not whole and launcher.has_dependent_launch
    tiles: int = batch * splits * -(-m // config["BLOCK_M"]) * -(-n // config["BLOCK_N"])
    sizes = batch, m, n, k, a.stride(-2), b.stride(-2), y.stride(-2) if whole else n
    launch: Launch = launcher.prepare(
        (programs_of(tiles, config, sm_count), 1, 1),
        sizes,
        config,
        _descriptors(sizes, config, a_km, b_kn),
        **_constants(config, a_km, b_kn, activation, aligned, pdl),
    )
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
    """Return whether the row lengths and row strides of all three tensors are multiples of 16 bytes.

    Bytes are those of a's elements. The tensors' own addresses are not checked.
    """
    unit = ALIGNMENT // a.element_size()
    sizes = [size for tensor in (a, b, y) for size in (tensor.shape[-1], tensor.stride(-2))]
    return not any(size % unit for size in sizes)


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
    """Compile what `prepare_matmul` launches for such arguments and the active driver's target, into Triton's cache.

    `element` is the operands' dtype, and `out` that of y. `bias` is whether there is a bias, and
    `aligned` what `are_aligned` returns for the tensors.

    Returns:
        The binary of the product.
    """
    import torch

    whole, launcher = config["SPLIT_K"] == 1, LAUNCHERS.of(config)
    pdl = not whole and launcher.has_dependent_launch
    if not whole:
        wide = torch.int32 if element == torch.int8 else torch.float32
        compile_add_partials(wide, out, bias, activation, aligned, pdl)
        out = wide
    sizes = (64,) * 7
    return launcher.compile(
        (element, element, out, out if bias and whole else None),
        len(sizes),
        config,
        _descriptors(sizes, config, a_km, b_kn),
        **_constants(config, a_km, b_kn, activation, aligned, pdl),
    )


def _descriptors(sizes: tuple[int, ...], config: KernelConfig, a_km: bool, b_kn: bool) -> tuple[Descriptor | None, ...]:
    """Return the TMA descriptors of a config's kernel for (batch, M, N, K) and the row strides of a, b and y."""
    batch, m, n, k, lda, ldb, ldy = sizes
    rows, columns, step, consumers = (config[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "CONSUMERS"))
    bits = 16 if consumers else 0

    def a(rows: int) -> Descriptor:
        shape, box = ((k, m), (step, rows)) if a_km else ((m, k), (rows, step))
        return stack(0, batch, *shape, box, ld=lda, bits=bits)

    def b(columns: int) -> Descriptor:
        shape, box = ((k, n), (step, columns)) if b_kn else ((n, k), (columns, step))
        return stack(1, batch, *shape, box, ld=ldb, bits=bits)

    def y(rows: int, columns: int) -> Descriptor:
        return stack(2, batch, m, n, (rows, columns), ld=ldy, bits=bits)

    if not config["TMA"]:
        return None, None, None
    if not consumers:
        return a(rows), b(columns), y(rows, columns) if config["TMA"] == 2 else None
    from .specialized import STORED, WIDEST  # needs Gluon

    rows //= 1 if config["PINGPONG"] else consumers
    wide = columns if columns == 256 else int(WIDEST.value)
    rest, stored = columns - wide, int(STORED.value)
    return a(rows), b(wide), y(stored, min(rest or stored, stored)), b(rest) if rest else None


def _constants(
    config: KernelConfig, a_km: bool, b_kn: bool, activation: str, aligned: bool, pdl: bool
) -> dict[str, Any]:
    """Return the kernels' constexpr parameters that are not knobs."""
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
