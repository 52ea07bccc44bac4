"""liger-kernel (BSD-2-Clause): fused MoE, SwiGLU MLP and dynamic tanh, forward and backward, with sizes of models."""

from inputs import backward, calls_of, integers, rand

PACKAGE = "liger-kernel"
#: Tokens, experts, experts of a token, hidden and intermediate size.
MOE = [(4096, 128, 8, 2048, 768), (8192, 64, 8, 2048, 1024), (4096, 8, 2, 4096, 1792), (2048, 64, 6, 2048, 1408)]
MOE += [(8192, 32, 4, 2880, 1440), (1024, 16, 2, 1024, 512), (8192, 60, 4, 1024, 704), (2048, 128, 8, 1280, 448)]
MOE += [(4096, 40, 8, 1536, 512), (8192, 16, 1, 2560, 1280), (512, 128, 8, 4096, 1536), (4096, 48, 4, 768, 384)]
#: Tokens, hidden and intermediate size.
DENSE = [(4096, 4096, 14336), (8192, 2048, 8192), (2048, 5120, 13824), (1024, 3584, 18944), (16384, 1024, 2816)]
DENSE += [(4096, 896, 4864), (512, 4096, 11008), (2048, 1536, 8960), (8192, 3072, 8192), (4096, 2304, 9216)]


def moe(op, shape):
    import torch
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    tokens, experts, top, hidden, inner = shape
    x, up = rand(tokens, hidden, grad=True), rand(experts, 2 * inner, hidden, grad=True)
    indices = torch.rand(tokens, experts, device="cuda").topk(top, dim=1).indices.to(torch.int32)
    backward(LigerFusedMoEFunction.apply(x, up, rand(experts, hidden, inner, grad=True), indices, rand(tokens, top)))


def dense(op, shape):
    from liger_kernel.ops import dyt, mlp
    from liger_kernel.ops.experimental import mm_int8int2 as int2

    tokens, hidden, inner = shape
    x = rand(1, tokens, hidden, grad=True)
    if op == "mlp":
        weights = [rand(*size, grad=True) for size in ((inner, hidden), (inner, hidden), (hidden, inner))]
        backward(mlp.LigerMLPFunction.apply(x, *weights))
    elif op == "dyt":
        backward(dyt.LigerDyTFunction.apply(x, *(rand(size, grad=True) for size in (1, hidden, hidden))))
    else:
        int2.matmul(integers(127, tokens, hidden, dtype="int8"), integers(255, hidden // 4, inner, dtype="uint8"))


def calls():
    return calls_of(moe, ["moe"], MOE) | calls_of(dense, ["mlp", "dyt", "int2"], DENSE)
