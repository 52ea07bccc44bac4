"""flashlib (Apache-2.0): matrix products of tall matrices, distances, and the kernels of its learning algorithms."""

from importlib import import_module

from inputs import calls_of, integers, rand

PACKAGE = "flashlib"
#: Points and features, as in the package's benchmarks of tall matrices.
TALL = [(262144, 64), (131072, 128), (65536, 256), (1000000, 32), (500000, 100), (32768, 512), (200000, 96), (16384, 1024)]
TALL += [(400000, 48), (100000, 200)]
#: Points and features where all pairs of points matter, and the sizes of square products.
PAIRS = [(4096, 64), (8192, 128), (2048, 512), (16384, 32), (10000, 100), (3000, 784), (1024, 2048), (6000, 256), (12288, 96)]
PAIRS += [(512, 8192)]
OPS = """linalg.gemm.triton.tall_skinny: triton_cov_gemm triton_ab_gemm triton_streaming_matmul; linalg.ab_gemm.triton.ab_gemm:
ab_gemm; linalg.cov_gemm.triton.cov_gemm: cov_gemm; primitives.pca.triton.fused_kernels: triton_cov_gemm_fused;
primitives.standard_scaler.triton.scaler: flash_standard_scaler_fit flash_standard_scaler_transform;
primitives.logistic_regression.triton.logistic_regression: triton_logreg_fwd_bwd _fused_logits_to_loss_resid;
primitives.multinomial_nb.triton.nb_core: nb_count_features; primitives.kmeans.triton.assign: euclid_assign_triton"""
SQUARE = """linalg.gemm.triton.tall_skinny: triton_gram_gemm; linalg.gram_gemm.triton.gram_gemm: gram_gemm;
linalg.gemm.triton.triton_mm: bf16_mm_fp32; linalg.gemm.triton.fused_kernels: fused_ozaki_matmul fused_tf32_matmul
fused_axpby fused_shift_sym fused_kl_poly; kernels.distance.triton.pairwise: pairwise_l2sq; kernels.distance.triton.mrd:
triton_pairwise_mrd; kernels.distance.triton.affinity: triton_affinity_with_degree; primitives.tsne.triton.grad:
triton_tsne_qsum triton_tsne_grad; primitives.pca.triton.fused_kernels: triton_gram_gemm_fused;
primitives.truncated_svd.triton.fused_kernels: fused_vproj_norm_to_vh"""
TALL_OPS, PAIR_OPS = ({op: name.strip() for name, ops in (part.split(":") for part in text.split(";")) for op in ops.split()}
                      for text in (OPS, SQUARE))


def call(op, shape):
    module = import_module(f"flashlib.{(TALL_OPS | PAIR_OPS)[op]}")
    n, d = shape
    x, square = rand(n, d, dtype="float32"), lambda: rand(n, n, dtype="float32")
    vector, features = rand(n, dtype="float32"), rand(d, dtype="float32")
    given = {"nb_count_features": lambda: (x.abs(), integers(16, n, dtype="int64"), 16), "triton_tsne_qsum": lambda: (x[:, :2],)}
    given |= {"euclid_assign_triton": lambda: (x[None].half(), rand(1, 1024, d, dtype="float16"), x.square().sum(1)[None])}
    given |= {"triton_streaming_matmul": lambda: (x, rand(d, 32, dtype="float32")), "triton_pairwise_mrd": lambda: (x, vector.abs())}
    given |= {"triton_logreg_fwd_bwd": lambda: (x, features, rand(1, dtype="float32"), (vector > 0).float())}
    given |= {"_fused_logits_to_loss_resid": lambda: (x.flatten(), (x.flatten() > 0).float()), "fused_shift_sym": lambda: (square(), 0.5)}
    given |= {"flash_standard_scaler_transform": lambda: (x, features, features.abs()), "fused_axpby": lambda: (square(), square(), 2.0, 3.0)}
    given |= {"fused_kl_poly": lambda: (square(), square()), "triton_affinity_with_degree": lambda: (x, 0.1)}
    given |= {"triton_tsne_grad": lambda: (x[:, :2], square(), vector[:1]), "fused_vproj_norm_to_vh": lambda: (x, rand(n, 16, dtype="float32"), rand(16, dtype="float32").abs())}
    given |= dict.fromkeys(["triton_ab_gemm", "ab_gemm"], lambda: (rand(n, 64, dtype="float32"), x))
    given |= dict.fromkeys(["fused_ozaki_matmul", "fused_tf32_matmul"], lambda: (x, x.t()))
    getattr(module, op)(*given.get(op, lambda: (x.bfloat16(), x.bfloat16().t()) if op == "bf16_mm_fp32" else (x,))())


def calls():
    return calls_of(call, TALL_OPS, TALL) | calls_of(call, PAIR_OPS, PAIRS)
