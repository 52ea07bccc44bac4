from . import testing as testing
from .launching.stub_driver import gpu_target as gpu_target, stubbed as stubbed, use_stub_driver as use_stub_driver
from .arguments import (
    ForetuneWarning as ForetuneWarning,
    Mode as Mode,
    resolve_mode as resolve_mode,
    warn_once as warn_once,
)
from .explanation import Explanation as Explanation, make_explanation as make_explanation
from .prune import Pruner as Pruner
from .shortlist import Shortlist as Shortlist, make_shortlist as make_shortlist
from .timing.device_rates import sm_partition as sm_partition
from .timing.timer import Timer as Timer, Timing as Timing
from .triton_family import TritonFamily as TritonFamily
