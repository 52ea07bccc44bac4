from .grids import (
    Filtered as Filtered,
    default_config as default_config,
    filter_valid as filter_valid,
    generate as generate,
    ready_space as ready_space,
)
from .matmul import (
    LISTS as LISTS,
    fit_configs as fit_configs,
    gemm_limit as gemm_limit,
    matmul_configs as matmul_configs,
    matmul_grid as matmul_grid,
)
