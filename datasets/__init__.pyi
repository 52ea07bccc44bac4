from .config import KernelConfig as KernelConfig
from .device import DeviceSpec as DeviceSpec
from .errors import (
    BundleError as BundleError,
    DatasetError as DatasetError,
    FamilyError as FamilyError,
    ForetuneError as ForetuneError,
    ForetuneWarning as ForetuneWarning,
)
from .family import Family as Family, Measurable as Measurable, roofline_us as roofline_us
from .family_checks import (
    check_attributes as check_attributes,
    check_problem_of as check_problem_of,
    not_empty as not_empty,
    wrong_knobs as wrong_knobs,
)
from .manifest import describe as describe, load as load, names as names
from .measurement import (
    BinaryFacts as BinaryFacts,
    Case as Case,
    Measurement as Measurement,
    Status as Status,
    TIMED as TIMED,
)
from .problem import (
    DTYPES as DTYPES,
    Dtype as Dtype,
    Problem as Problem,
    Ragged as Ragged,
    dtype_of_tensor as dtype_of_tensor,
    torch_dtype as torch_dtype,
)
