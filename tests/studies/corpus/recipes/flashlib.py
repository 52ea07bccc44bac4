"""flashlib (Apache-2.0): products of tall matrices, distances, and the kernels of its learning algorithms."""

from importlib import import_module

from inputs import calls_of, integers, rand

PACKAGE = "flashlib"
#: Points and features, as in the package's benchmarks of tall matrices; then where all pairs of points matter.
TALL = [(262144, 64), (131072, 128), (65536, 256), (1000000, 32), (500000, 100), (32768, 512), (200000, 96)]
TALL += [(16384, 1024), (400000, 48), (100000, 200)]
PAIRS = [(4096, 64), (8192, 128), (2048, 512), (16384, 32), (10000, 100), (3000, 784), (1024, 2048), (6000, 256)]
#: Modules, their functions, and a letter for each argument (see `call`).
TALL_OPS = """linalg.gemm.triton.tall_skinny: triton_cov_gemm=x triton_ab_gemm=px triton_streaming_matmul=xw;
linalg.ab_gemm.triton.ab_gemm: ab_gemm=px; linalg.cov_gemm.triton.cov_gemm: cov_gemm=x;
primitives.pca.triton.fused_kernels: triton_cov_gemm_fused=x; primitives.standard_scaler.triton.scaler:
flash_standard_scaler_fit=x flash_standard_scaler_transform=xff; primitives.multinomial_nb.triton.nb_core:
nb_count_features=xn6; primitives.logistic_regression.triton.logistic_regression: triton_logreg_fwd_bwd=xf1y
_fused_logits_to_loss_resid=ly"""
PAIR_OPS = """linalg.gemm.triton.tall_skinny: triton_gram_gemm=x; linalg.gram_gemm.triton.gram_gemm: gram_gemm=x;
linalg.gemm.triton.triton_mm: bf16_mm_fp32=bB; linalg.gemm.triton.fused_kernels: fused_ozaki_matmul=xX
fused_tf32_matmul=xX fused_axpby=sshh fused_shift_sym=sh fused_kl_poly=ss; kernels.distance.triton.pairwise:
pairwise_l2sq=x; kernels.distance.triton.mrd: triton_pairwise_mrd=xv; kernels.distance.triton.affinity:
triton_affinity_with_degree=xh; primitives.tsne.triton.grad: triton_tsne_qsum=2 triton_tsne_grad=2s1;
primitives.pca.triton.fused_kernels: triton_gram_gemm_fused=x; primitives.truncated_svd.triton.fused_kernels:
fused_vproj_norm_to_vh=xue"""
PARTS = [part.split(":") for part in f"{TALL_OPS};{PAIR_OPS}".split(";")]


def call(op, shape):
    (module, function, letters), (n, d) = op, shape
    sizes = {"x": (n, d), "p": (n, 64), "w": (d, 32), "f": (d,), "1": (1,), "l": (n * d,), "s": (n, n), "v": (n,)}
    sizes |= {"u": (n, 16), "e": (16,), "X": (d, n), "2": (n, 2)}
    labels = n * d if "l" in letters else n
    other = {
        "b": lambda: rand(n, d),
        "B": lambda: rand(d, n),
        "y": lambda: integers(2, labels).float(),
        "h": lambda: 0.5,
    }
    other |= {"n": lambda: integers(16, n, dtype="int64"), "6": lambda: 16}
    values = [rand(*sizes[one], dtype="float32").abs() if one in sizes else other[one]() for one in letters]
    getattr(import_module(f"flashlib.{module}"), function)(*values)


def calls():
    ops = [(module.strip(), *op.split("=")) for module, found in PARTS for op in found.split()]
    return {op[1]: calls_of(call, [op], TALL if f"{op[1]}=" in TALL_OPS else PAIRS)[op] for op in ops}
