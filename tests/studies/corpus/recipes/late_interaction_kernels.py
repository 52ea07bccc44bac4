"""late-interaction-kernels (Apache-2.0): MaxSim of ColBERT, ColPali and PLAID, forward and backward."""

from importlib import import_module

from inputs import backward, calls_of, integers, rand

PACKAGE = "late-interaction-kernels"
#: Queries, their tokens, documents, their tokens, dimensions: ColBERT, answerai-colbert-small, ColPali, LateOn.
SHAPES = [(16, 32, 1024, 192, 128), (32, 32, 256, 300, 96), (8, 32, 512, 1024, 128), (16, 64, 256, 512, 128)]
SHAPES += [(1, 32, 8192, 256, 128), (64, 48, 64, 512, 64), (4, 1024, 32, 1024, 128), (8, 128, 128, 768, 256)]
SHAPES += [(8, 32, 1000, 180, 48), (4, 32, 512, 2048, 320), (16, 24, 256, 512, 768), (16, 256, 64, 512, 512)]


def call(op, shape):
    import torch

    nq, lq, nd, ld, d = shape
    package, grad, bits = import_module("late_interaction_kernels"), op != "ragged", 2 if lq % 48 else 4
    plaid = import_module("late_interaction_kernels.plaid")
    q, docs = rand(nq, lq, d, grad=grad), rand(nd, ld, d, grad=True)
    ends = [torch.arange(n + 1, dtype=torch.int32, device="cuda") * length for n, length in ((nq, lq), (nd, ld))]
    packed = q.flatten(0, 1), docs.flatten(0, 1), *ends
    table = integers(4096, nd, ld), integers(256, nd, ld, d * bits // 8, dtype="uint8")
    centers = rand(4096, d), rand(2**bits, dtype="float32"), bits
    if op in ("unified", "lowmem"):
        out = package.maxsim(q, docs, normalize=True, backward=op)
    elif op == "varlen":
        out = package.maxsim_varlen(*packed, lq, ld)
    elif op == "pairs":
        score, pairs = (
            import_module("late_interaction_kernels.score_pairs"),
            (integers(nq, 4 * nd), integers(nd, 4 * nd)),
        )
        out = score.score_pairs_packed(*packed, *pairs, max_seqlen_q=lq, max_seqlen_d=ld)
    elif op == "head":
        head = import_module("late_interaction_kernels.fused_head")
        out = head.maxsim_from_hidden(q, rand(nd, ld, 2 * d), rand(d, 2 * d))
    elif op == "dense":
        out = plaid.maxsim_residual(q, *table, torch.full((nd,), ld, device="cuda"), *centers)
    else:
        out = plaid.maxsim_residual_varlen(q, *(one.flatten(0, 1) for one in table), ends[1], *centers, max_seqlen_d=ld)
    backward(out)


def calls():
    return calls_of(call, ["unified", "lowmem", "varlen", "pairs", "head", "dense", "ragged"], SHAPES)
