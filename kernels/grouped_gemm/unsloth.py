"""`unsloth_grouped_gemm`: the op with Unsloth's interface, so that an MoE layer switches by changing one import.

The names are Unsloth's. Its configs are translated to Foretune's; knobs that they lack get the default config's value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ...datasets import ForetuneError, KernelConfig
from ..op_calls import check_tensor
from .op import grouped_gemm


@dataclass
class _Config:
    """Base class of Unsloth's three configs; in each, M is the number of rows, and N and K are those of w.

    `flatten` has no effect: Foretune's kernels are always flattened. `fuse_mul_post` has none either, because the call
    decides.

    Raises:
        ForetuneError: Fields contradict each other.
    """

    #: The fields that turn on TMA: (field, Foretune's knob, the permutation that rules it out, because TMA cannot move
    #: permuted rows, or "").
    _tma: ClassVar[tuple[tuple[str, str, str], ...]]
    #: Unsloth's letters of the output's rows and columns, and of the contraction.
    _axes: ClassVar[str]

    BLOCK_SIZE_M: int = 32
    BLOCK_SIZE_N: int = 32
    BLOCK_SIZE_K: int = 32
    num_warps: int = 4
    num_stages: int = 2
    flatten: bool = True
    permute_x: bool = False
    permute_y: bool = False
    fuse_mul_post: bool = False
    use_tma_store: bool = False

    def __post_init__(self) -> None:
        self._check(self.permute_x, self.permute_y)

    def _check(self, permute_x: bool, permute_y: bool) -> None:
        """Raise `ForetuneError` if the config cannot run a call with these permutations."""
        if permute_x and permute_y:
            raise ForetuneError(
                "permute_x and permute_y cannot both be True: only one side of the product can be permuted"
            )
        permutation = "permute_x" if permute_x else "permute_y" if permute_y else None
        for name, _, against in self._tma:
            if against == permutation and getattr(self, name):
                raise ForetuneError(
                    f"{type(self).__name__}: {name} must be False with {permutation}=True, because TMA cannot move "
                    "permuted rows"
                )

    def ours(self) -> KernelConfig:
        """Return the corresponding config of Foretune's kernel; that of dX has dy as its x, and dx as its y."""
        blocks = {
            f"BLOCK_{axis}": getattr(self, f"BLOCK_SIZE_{of}") for axis, of in zip("MNK", self._axes, strict=True)
        }
        tma = {knob: int(getattr(self, name)) for name, knob, _ in self._tma}
        return KernelConfig.of(**blocks, **tma, num_warps=self.num_warps, num_stages=self.num_stages)


@dataclass
class KernelConfigForward(_Config):
    """Unsloth's config of the forward kernel, which computes y = x @ w.T.

    >>> KernelConfigForward(BLOCK_SIZE_M=64, BLOCK_SIZE_N=128, BLOCK_SIZE_K=64, use_tma_load_w=True).ours()["TMA_W"]
    1
    >>> KernelConfigForward(permute_x=True, use_tma_load_x=True)
    Traceback (most recent call last):
    foretune.datasets.errors.ForetuneError: KernelConfigForward: use_tma_load_x must be False with permute_x=True, ...
    """

    _tma = (
        ("use_tma_load_x", "TMA_X", "permute_x"),
        ("use_tma_load_w", "TMA_W", ""),
        ("use_tma_store", "TMA_Y", "permute_y"),
    )
    _axes = "MNK"

    use_tma_load_w: bool = False
    use_tma_load_x: bool = False


@dataclass
class KernelConfigBackward_dX(_Config):  # noqa: N801 - Unsloth's name
    """Unsloth's config of the kernel of dx = dy @ w: its columns run along K, and it contracts over N."""

    _tma = (
        ("use_tma_load_dy", "TMA_X", "permute_y"),
        ("use_tma_load_w", "TMA_W", ""),
        ("use_tma_store", "TMA_Y", "permute_x"),
    )
    _axes = "MKN"

    use_tma_load_dy: bool = False
    use_tma_load_w: bool = False


@dataclass
class KernelConfigBackward_dW(_Config):  # noqa: N801 - Unsloth's name
    """Unsloth's config of the kernel of dw = dy.T @ x: rows run along N, columns along K, and it contracts over M."""

    _tma = (
        ("use_tma_load_dy", "TMA_DY", "permute_y"),
        ("use_tma_load_x", "TMA_X", "permute_x"),
        ("use_tma_store", "TMA_DW", ""),
    )
    _axes = "NKM"

    use_tma_load_dy: bool = False
    use_tma_load_x: bool = False


def unsloth_grouped_gemm(
    X: torch.Tensor,
    W: torch.Tensor,
    m_sizes: torch.Tensor,
    topk: int,
    gather_indices: torch.Tensor | None = None,
    permute_x: bool = False,
    permute_y: bool = False,
    topk_weights: torch.Tensor | None = None,
    fuse_mul_post: bool = False,
    kernel_config_fwd: KernelConfigForward | None = None,
    kernel_config_bwd_dX: KernelConfigBackward_dX | None = None,
    kernel_config_bwd_dW: KernelConfigBackward_dW | None = None,
    autotune: bool = False,
    is_first_gemm: bool = True,
    dX_only: bool = False,
    dW_only: bool = False,
) -> torch.Tensor:
    """Run Unsloth's `grouped_gemm`: Y (tokens * topk, N) from X (..., K) and W (experts, N, K). Differentiable.

    N and K need not be multiples of the block sizes.

    Args:
        X: (..., K): one row per token with `permute_x`, else tokens * topk rows.
        W: (experts, N, K).
        m_sizes: (experts,), the number of rows of each expert.
        topk: The number of experts per token.
        gather_indices: (tokens * topk,), the stable argsort of the flattened top-k expert ids.
        permute_x: Gather the rows of X.
        permute_y: Scatter the rows of Y.
        topk_weights: The weights of the rows of Y; used only with `fuse_mul_post`. They receive a gradient, unlike in
            Unsloth's op.
        fuse_mul_post: Multiply Y by `topk_weights`.
        kernel_config_fwd: The config of the forward pass; predicted if omitted.
        kernel_config_bwd_dX: The same for the gradient of X.
        kernel_config_bwd_dW: The same for the gradient of W.
        autotune: Time the 8 configs predicted to be best once, and keep the fastest.
        is_first_gemm: Has no effect.
        dX_only: Compute the gradient of X only.
        dW_only: Compute the gradient of W only.

    Returns:
        Y.

    Raises:
        ForetuneError: An argument is invalid, or options contradict each other; see also `grouped_gemm`.

    >>> import torch
    >>> if torch.cuda.is_available():
    ...     X = torch.randn(4, 64, device="cuda", dtype=torch.bfloat16)
    ...     W = torch.randn(2, 32, 64, device="cuda", dtype=torch.bfloat16)
    ...     experts = torch.tensor([1, 0, 1, 1], device="cuda")
    ...     sizes, order = experts.bincount(minlength=2).int(), experts.argsort(stable=True)
    ...     Y = unsloth_grouped_gemm(X, W, sizes, topk=1, gather_indices=order, permute_x=True)
    ...     assert Y.shape == (4, 32)
    """
    configs = (kernel_config_fwd, kernel_config_bwd_dX, kernel_config_bwd_dW)
    wanted = (KernelConfigForward, KernelConfigBackward_dX, KernelConfigBackward_dW)
    for name, config, kind in zip(("fwd", "bwd_dX", "bwd_dW"), configs, wanted, strict=True):
        if config is not None and not isinstance(config, kind):
            raise ForetuneError(f"kernel_config_{name} must be a {kind.__name__} but is a {type(config).__name__}")
    for name, tensor in (("X", X), ("W", W)):
        check_tensor(name, tensor)
    if X.dim() == 0:
        raise ForetuneError("X must have at least one dimension, (..., K), but is a scalar")
    if autotune and any(config is not None for config in configs):
        raise ForetuneError("autotune=True chooses the configs: kernel_config_fwd, _bwd_dX and _bwd_dW must be None")
    if dX_only and dW_only:
        raise ForetuneError("dX_only and dW_only cannot both be True")
    if fuse_mul_post and topk_weights is None:
        raise ForetuneError("fuse_mul_post=True needs topk_weights, but topk_weights is None")
    for config in configs:
        if config is not None:
            config._check(permute_x, permute_y)
    return grouped_gemm(
        (X.detach() if dW_only else X).view(-1, X.shape[-1]),
        W.detach() if dX_only else W,
        m_sizes,
        gather_indices=gather_indices,
        topk=topk,
        permute_x=permute_x,
        permute_y=permute_y,
        topk_weights=topk_weights if fuse_mul_post else None,
        config=None if kernel_config_fwd is None else kernel_config_fwd.ours(),
        config_dx=None if kernel_config_bwd_dX is None else kernel_config_bwd_dX.ours(),
        config_dw=None if kernel_config_bwd_dW is None else kernel_config_bwd_dW.ours(),
        mode="shortlist" if autotune else None,
    )
