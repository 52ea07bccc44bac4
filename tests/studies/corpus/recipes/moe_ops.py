"""moe-ops (MIT): routing, permutation and grouped GEMM of MoE layers, forward and backward."""

from inputs import backward, calls_of, integers, rand

PACKAGE = "moe-ops"
#: Tokens, experts, experts of a token, hidden and intermediate size: of Qwen3, OLMoE, Mixtral, DeepSeek and others.
SHAPES = [(4096, 128, 8, 2048, 768), (8192, 64, 8, 2048, 1024), (4096, 8, 2, 4096, 1792), (2048, 64, 6, 2048, 1408)]
SHAPES += [(8192, 32, 4, 2880, 1440), (1024, 16, 2, 1024, 512), (16384, 60, 4, 1024, 704), (2048, 128, 8, 1280, 448)]
SHAPES += [(4096, 40, 8, 1536, 512), (8192, 16, 1, 2560, 1280), (512, 128, 8, 4096, 1536), (4096, 48, 4, 768, 384)]


def grouped(op, shape):
    import moe_ops

    tokens, experts, top, hidden, inner = shape
    rows = tokens * top
    x, w = rand(rows, hidden, grad=True), (rand(experts, inner, hidden) / hidden**0.5).requires_grad_(True)
    sizes = integers(rows, experts - 1).sort().values
    offsets = sizes.new_zeros(experts + 1)
    offsets[1:experts], offsets[experts:] = sizes, rows
    if op == "plain":
        from moe_ops.grouped_gemm_ops import gmm_try_fn

        gmm_try_fn(x, w, offsets)
    else:
        backward(moe_ops.grouped_gemm(x, w, offsets))


def routing(op, shape):
    import moe_ops

    tokens, experts, top, hidden, _ = shape
    weights, _ = moe_ops.fused_topk_softmax(rand(tokens, experts, grad=True), top)
    permuted, rows, *_ = moe_ops.permute(rand(tokens, hidden, grad=True), integers(experts, tokens, top), 0, experts)
    backward(moe_ops.unpermute(permuted, rows, weights, tokens, top))


def calls():
    return calls_of(grouped, ["gemm", "plain"], SHAPES) | calls_of(routing, ["routing"], SHAPES)
