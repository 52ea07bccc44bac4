"""torchao (BSD-3-Clause): quantization to fp8, products of quantized matrices, and quantized inputs of attention."""

from importlib import import_module

from inputs import calls_of, integers, rand

PACKAGE = "torchao"
#: Rows, inner size and columns of products.
SHAPES = [(4096, 4096, 4096), (8192, 2048, 8192), (2048, 5120, 13824), (1024, 3584, 18944), (16384, 1024, 2816)]
SHAPES += [(4096, 7168, 2048), (512, 4096, 14336), (2048, 1536, 8960), (8192, 3072, 8192), (128, 8192, 4096)]
#: Batch, heads, length, size of a head.
HEADS = [(1, 32, 4096, 128), (2, 16, 8192, 64), (4, 12, 1024, 64), (1, 40, 2048, 128), (8, 8, 512, 128)]
HEADS += [(1, 24, 16384, 128), (2, 64, 1024, 128), (1, 8, 32768, 64), (4, 16, 2048, 256), (16, 16, 512, 64)]
#: Modules of torchao.prototype, and the functions in them.
NAMES = """blockwise_fp8_training.kernels: triton_fp8_blockwise_act_quant_lhs triton_fp8_blockwise_act_quant_rhs
triton_fp8_blockwise_act_quant_transposed_lhs triton_fp8_blockwise_weight_quant_rhs triton_fp8_gemm_1x128_128x128
triton_fp8_blockwise_weight_quant_transposed_rhs triton_fp8_gemm_1x128_128x1; quantized_training.int8_mm: scaled_int8_mm;
moe_training.kernels.float8_rowwise: triton_fp8_rowwise_3d_transpose_rhs triton_fp8_rowwise_2d_scale_and_cast
triton_fp8_rowwise_3d_transpose_rhs_fused_reduction triton_fp8_colwise_3d_scale_and_cast; hqq.mixed_mm: triton_mixed_mm;
moe_training.kernels.jagged_float8_scales: triton_fp8_per_group_rowwise_scales triton_fp8_per_group_colwise_scales;
common.triton.matmul: matmul; float8nocompile.kernels.fp8_dynamic_tensorwise: hp_to_fp8_row_major hp_to_fp8_row_major_t
hp_to_fp8_col_major hp_to_fp8_col_major_t hp_to_fp8_row_and_col_major hp_to_fp8_row_major_t_and_non_t"""
QKV = {f"{one}sdpa_quantize": f"triton_{one}qkv_quantization" for one in ("", "rope_", "hadamard_")}
OPS = {op: name for name, ops in (part.split(":") for part in NAMES.split(";")) for op in ops.split()}


def call(op, shape):
    import torch

    if op in QKV:
        q, table = [rand(*shape) for _ in range(3)], [rand(*shape[2:], dtype="float32") for _ in "cs" if "rope" in op]
        q = [one.transpose(1, 2).contiguous() for one in q] if table else q
        return getattr(import_module(f"torchao.prototype.attention.quantization.{QKV[op]}"), f"triton_fp8_{op}")(*q, *table)
    function, fp8 = getattr(import_module(f"torchao.prototype.{OPS[op].strip()}"), op), torch.float8_e4m3fn
    m, k, n, ends = *shape, torch.arange(1, 9, device="cuda", dtype=torch.int32) * (shape[0] // 8)
    scales = rand(m, k // 128, dtype="float32").t().contiguous().t(), rand(n // 128, k // 128, dtype="float32").t()
    x, w, int8 = rand(m, k), rand(n, k), [integers(127, *size, dtype="int8") for size in ((m, k), (n, k))]
    given = {"scaled_int8_mm": (int8[0], int8[1].t(), rand(m, 1), rand(1, n)), "matmul": (x, w.t())}
    given["triton_mixed_mm"] = x, integers(255, k // 2, n, dtype="uint8"), rand(k // 128, n), rand(k // 128, n), 128
    given["triton_fp8_gemm_1x128_128x128"] = x.to(fp8), w.to(fp8).t(), *scales
    given["triton_fp8_gemm_1x128_128x1"] = x.to(fp8), w.to(fp8).t(), scales[0], rand(k // 128, n, dtype="float32")
    defaults = {"3d": (rand(8, n, k).transpose(-2, -1), fp8), "per_": (x, ends, fp8), "2d": (x, fp8), "hp": (x, fp8, None)}
    return function(*given.get(op, next((value for part, value in defaults.items() if part in op), (x,))))


def calls():
    return calls_of(call, OPS, SHAPES) | calls_of(call, QKV, HEADS)
