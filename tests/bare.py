"""Prunes a real `triton.autotune` on the stub driver, with nothing but what `pip install foretune` brings.

Run by test_packaging.py in an environment of its own: there are no torch, no LightGBM and no pandas.
"""

from __future__ import annotations

import importlib.util
import sys

import foretune
import triton
from foretune.kernels.grouped_gemm.triton_kernels.gemm import KEY, UNSPECIALIZED, grouped_gemm_kernel
from foretune.runtime import use_stub_driver


class Tensor:
    """What Triton asks of one."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    def data_ptr(self) -> int:
        return 0


missing = ("torch", "lightgbm", "pandas", "pyarrow", "sklearn", "joblib")
assert not [name for name in missing if importlib.util.find_spec(name)], sys.path
pruner = foretune.prune("grouped_gemm_fwd", k=3, device="h200")
kernel = triton.autotune(
    configs=foretune.configs("grouped_gemm_fwd"), key=KEY, prune_configs_by={"early_config_prune": pruner}
)(triton.jit(do_not_specialize=UNSPECIALIZED)(grouped_gemm_kernel.fn))
x, w, y = (Tensor("bf16") for _ in range(3))
tensors = (x, w, y, Tensor("i32"), *[None] * 6)
with use_stub_driver(foretune.DeviceSpec.named("h200")) as driver:
    kernel[(132,)](*tensors, 4096, 4096, 8, 256, 128, 1, TRANSPOSED=False, GATHER=False, SCATTER=False)
problem = foretune.Problem.of("grouped_gemm_fwd", groups=8, rows=4096, n=2048, k=1024)
chosen = foretune.shortlist("grouped_gemm_fwd", problem, "h200", k=3)
assert chosen.predicted
assert {foretune.KernelConfig.from_triton(config) for config in kernel.configs_timings} == set(chosen.configs)
sys.stdout.write(f"{len(kernel.configs)} declared, {len(kernel.configs_timings)} compiled and launched\n")
