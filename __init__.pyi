__version__: str

from . import datasets as datasets, runtime as runtime
from .datasets import (
    Case as Case,
    DeviceSpec as DeviceSpec,
    Family as Family,
    ForetuneError as ForetuneError,
    ForetuneWarning as ForetuneWarning,
    KernelConfig as KernelConfig,
    Measurable as Measurable,
    Measurement as Measurement,
    Problem as Problem,
)
from .kernels import families as families, register as register, spaces as spaces
from .kernels.api import (
    attach as attach,
    autotune as autotune,
    configs as configs,
    cover as cover,
    explain as explain,
    prune as prune,
    shortlist as shortlist,
    tune as tune,
)
from .kernels.gated_mlp import gated_mlp as gated_mlp
from .kernels.grouped_gemm import grouped_gemm as grouped_gemm
from .kernels.integrations import use as use
from .kernels.learning import (
    adapt as adapt,
    collect_dataset as collect_dataset,
    evaluate as evaluate,
    report as report,
    train as train,
)
from .kernels.matmul import matmul as matmul
from .kernels.rms_norm_rope import rms_norm_rope as rms_norm_rope
from .kernels.scaled_gemm import scaled_gemm as scaled_gemm, scaled_grouped_gemm as scaled_grouped_gemm
from .model import load_bundle as load_bundle
from .runtime import TritonFamily as TritonFamily, testing as testing
from .runtime.pins import pinned as pinned
from .runtime.tuning.attach import attached as attached, detach as detach
from .runtime.tuning.functions import (
    ConfigCache as ConfigCache,
    TunedFunction as TunedFunction,
    TuningFailed as TuningFailed,
    contextual_autotune as contextual_autotune,
    elementwise_work as elementwise_work,
    gemm_work as gemm_work,
)
from .runtime.tuning.ranks.agreement import agree as agree
from .runtime.tuning.refine.refinement import refining as refining
