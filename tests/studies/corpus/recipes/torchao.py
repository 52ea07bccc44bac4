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
triton_fp8_blockwise_weight_quant_transposed_rhs triton_fp8_gemm_1x128_128x1; quantized_training.int8_mm:
scaled_int8_mm; moe_training.kernels.float8_rowwise: triton_fp8_colwise_3d_scale_and_cast; hqq.mixed_mm:
triton_mixed_mm; moe_training.kernels.jagged_float8_scales: triton_fp8_per_group_rowwise_scales
triton_fp8_per_group_colwise_scales;
common.triton.matmul: matmul; float8nocompile.kernels.fp8_dynamic_tensorwise: hp_to_fp8_row_major hp_to_fp8_row_major_t
hp_to_fp8_col_major hp_to_fp8_row_and_col_major hp_to_fp8_row_major_t_and_non_t"""
QKV = {f"{one}sdpa_quantize": f"triton_{one}qkv_quantization" for one in ("", "rope_", "hadamard_")}
OPS = {op: name.strip() for name, ops in (part.split(":") for part in NAMES.split(";")) for op in ops.split()}


def call(op, shape):
    import torch

    if op in QKV:
        q, table = [rand(*shape) for _ in range(3)], [rand(*shape[2:], dtype="float32") for _ in "cs" if "rope" in op]
        q = [one.transpose(1, 2).contiguous() for one in q] if table else q
        module = import_module(f"torchao.prototype.attention.quantization.{QKV[op]}")
        return getattr(module, f"triton_fp8_{op}")(*q, *table)
    fp8, (m, k, n), low = torch.float8_e4m3fn, shape, lambda *size: integers(127, *size, dtype="int8")
    x, w, groups = rand(m, k), rand(n, k), torch.arange(1, 9, device="cuda", dtype=torch.int32) * (m // 8)
    scale, blocks = (rand(one // 128, size, dtype="float32") for one, size in ((k, m), (k, n)))
    given = {"int8": lambda: (low(m, k), low(n, k).t(), rand(m, 1), rand(1, n)), "mat": lambda: (x, w.t())}
    given["128x128"] = lambda: (x.to(fp8), w.to(fp8).t(), scale.t(), rand(n // 128, k // 128, dtype="float32").t())
    given |= {"128x1": lambda: (x.to(fp8), w.to(fp8).t(), scale.t(), blocks), "per_": lambda: (x, groups, fp8)}
    given["mixed"] = lambda: (x, integers(255, k // 2, n, dtype="uint8"), blocks.bfloat16(), blocks.bfloat16(), 128)
    given |= {"3d": lambda: (rand(8, n, k).transpose(-2, -1), fp8), "hp_": lambda: (x, fp8, None), "tri": lambda: (x,)}
    values = next(make for part, make in given.items() if part in op)()
    getattr(import_module(f"torchao.prototype.{OPS[op]}"), op)(*values)


def calls():
    return calls_of(call, OPS, SHAPES) | calls_of(call, QKV, HEADS)
