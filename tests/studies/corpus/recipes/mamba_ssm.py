"""mamba-ssm (Apache-2.0): the Triton files of Mamba 2 and 3, norms and SwiGLU. Its CUDA extension is not needed."""

import sys
from importlib.util import find_spec
from types import ModuleType

from inputs import backward, calls_of, rand

PACKAGE = "mamba-ssm"
#: Batch, length, heads, size of a head, state, groups, chunk: Mamba 2, Codestral, Zamba, Nemotron-H and smaller ones.
SHAPES = [(4, 2048, 24, 64, 128, 1, 256), (2, 4096, 64, 64, 128, 8, 256), (1, 8192, 128, 64, 128, 8, 256)]
SHAPES += [(2, 2048, 32, 64, 128, 1, 128), (2, 4096, 80, 64, 128, 1, 256), (1, 4096, 112, 64, 64, 2, 256)]
SHAPES += [(4, 1024, 48, 64, 64, 1, 64), (1, 4096, 128, 80, 128, 8, 128), (2, 2048, 16, 128, 64, 1, 128)]
#: Rows and columns.
ROWS = [(8192, 768), (4096, 2048), (16384, 1024), (2048, 4096), (4096, 2560), (1024, 8192), (32768, 512), (8192, 1536)]


def imported(name: str):
    """Import a module of the package without its __init__, which needs the extension."""
    if "mamba_ssm" not in sys.modules:
        module = ModuleType("mamba_ssm")
        module.__path__ = find_spec("mamba_ssm").submodule_search_locations
        sys.modules["mamba_ssm"] = module
    return __import__(f"mamba_ssm.ops.triton.{name}", fromlist=["x"])


def scan(op, shape):
    batch, length, heads, size, state, groups, chunk = shape
    v, gate = (rand(batch, length, heads, size, grad=True) for _ in range(2))
    keys = [rand(batch, length, groups, state, grad=True) for _ in range(2)]
    if op == "mamba2":
        dt, decay = rand(batch, length, heads, grad=True), (-rand(heads, dtype="float32").exp()).requires_grad_(True)
        function, given = imported("ssd_combined").mamba_chunk_scan_combined, {"D": rand(heads, grad=True)}
        return backward(function(v, dt, decay, *keys, chunk, z=gate, dt_softplus=True, **given))
    dt, bias = rand(batch, heads, length, dtype="float32").exp(), [rand(heads, state, grad=True) for _ in range(2)]
    rest = rand(batch, heads, length, grad=True).sigmoid(), *bias, rand(batch, length, heads, state // 4, grad=True)
    function = imported("mamba3.mamba3_siso_combined").mamba3_siso_combined
    backward(function(*keys, v, (-dt).requires_grad_(True), dt.requires_grad_(True), *rest, Z=gate))


def rows(op, shape):
    if op == "swiglu":
        return backward(imported("k_activations").swiglu(rand(shape[0], 2 * shape[1], grad=True)))
    x, weight, bias = (rand(*size, grad=True) for size in (shape, shape[1:], shape[1:]))
    backward(imported("layer_norm").layer_norm_fn(x, weight, bias))


def calls():
    return calls_of(scan, ["mamba2", "mamba3"], SHAPES) | calls_of(rows, ["norm", "swiglu"], ROWS)
