"""flag-gems (Apache-2.0): operators of PyTorch, with its own tuner, by sizes of language models."""

import os
from tempfile import mkdtemp

from inputs import calls_of, rand

PACKAGE = "flag-gems"
#: Rows, columns and inner size.
SHAPES = [(4096, 4096, 4096), (2048, 11008, 4096), (1024, 2048, 8192), (512, 5120, 5120), (8192, 1024, 1024)]
SHAPES += [(256, 14336, 4096), (64, 4096, 14336), (128, 28672, 2048), (2000, 3000, 1000), (16, 8192, 3072)]
MATRIX = ("mm", "addmm", "bmm", "baddbmm", "mv", "kron")
ROWS = (
    "amax",
    "max_dim",
    "min_dim",
    "prod_dim",
    "any_dim",
    "all_dim",
    "triu",
    "layer_norm",
    "scaled_dot_product_attention",
)


def call(op, shape):
    os.environ.setdefault("FLAGGEMS_CACHE_DIR", mkdtemp())  # its tuner's database
    from flag_gems import ops

    m, n, k = shape
    x, row, a, b = rand(m, n), rand(n), rand(m, k), rand(k, n)
    batch = [rand(8, m // 4, k // 4), rand(8, k // 4, n // 4)]
    given = {
        "mm": (a, b),
        "addmm": (row, a, b),
        "bmm": batch,
        "baddbmm": (rand(8, m // 4, n // 4), *batch),
        "mv": (x, row),
    }
    given |= {"kron": (rand(m // 64, 64), rand(16, n // 64)), "layer_norm": (x, [n], row, row), "amax": (x, [-1])}
    given |= {"triu": (x,), "scaled_dot_product_attention": [rand(1, n // 128, m, 128) for _ in range(3)]}
    getattr(ops, op)(*given.get(op, (x, -1)))


def calls():
    return calls_of(call, (*MATRIX, *ROWS), SHAPES)
