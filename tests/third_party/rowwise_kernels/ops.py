"""The kernels as people call them: tuned at the first call of a shape, over the configs that Foretune finds promising.

The predictions come from the bundle in the folder that ROWWISE_BUNDLE names, or in the one beside this file.
"""

import os
from pathlib import Path

import foretune
import torch
import triton

from .layer_norm import LayerNorm
from .layer_norm_kernel import layer_norm_kernel
from .softmax import RowSoftmax
from .softmax_kernel import softmax_kernel

_folder = Path(os.environ.get("ROWWISE_BUNDLE", Path(__file__).with_name("bundle")))
_bundle = foretune.load_bundle(_folder) if _folder.exists() else None

tuned_softmax = triton.autotune(
    configs=foretune.configs(RowSoftmax),
    key=["n_rows", "n_columns"],
    prune_configs_by={"early_config_prune": foretune.prune(RowSoftmax, k=4, bundle=_bundle)},
)(softmax_kernel)

tuned_layer_norm = triton.autotune(
    configs=foretune.configs(LayerNorm),
    key=["n_rows", "n_columns"],
    prune_configs_by={"early_config_prune": foretune.prune(LayerNorm, k=4, bundle=_bundle)},
)(layer_norm_kernel)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Of a matrix whose rows are contiguous, along its rows."""
    y = torch.empty_like(x)
    tuned_softmax[lambda meta: (triton.cdiv(x.shape[0], meta["ROWS"]),)](x, y, *x.shape, x.stride(0), y.stride(0))
    return y


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """Of a contiguous matrix, along its rows."""
    y = torch.empty_like(x)
    tuned_layer_norm[lambda meta: (triton.cdiv(x.shape[0], meta["ROWS"]),)](
        x, weight, bias, y, *x.shape, x.stride(0), eps
    )
    return y
