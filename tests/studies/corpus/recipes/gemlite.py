"""gemlite (Apache-2.0): products with quantized weights, by one, few and many rows."""

from inputs import calls_of, rand

PACKAGE = "gemlite"
#: Rows, inner size and columns: the layers of Llama and Qwen.
SHAPES = [(1, 4096, 4096), (1, 4096, 14336), (1, 8192, 1024), (1, 3584, 18944), (4, 4096, 4096), (8, 4096, 14336)]
SHAPES += [
    (16, 8192, 1024),
    (32, 3584, 18944),
    (2, 2048, 8192),
    (64, 4096, 4096),
    (256, 4096, 14336),
    (1024, 8192, 1024),
]
SHAPES += [
    (2048, 3584, 18944),
    (512, 2048, 8192),
    (4096, 4096, 4096),
    (128, 5120, 13824),
    (1, 5120, 13824),
    (1, 2048, 8192),
]
LAYERS = ("A16W8_INT8", "A16W8_FP8", "A8W8_int8_dynamic", "A8W8_fp8_dynamic", "W4", "W2")


def call(op, shape):
    import torch
    from gemlite import helper

    rows, inner, columns = shape
    linear = torch.nn.Linear(inner, columns, bias=False, device="cuda", dtype=torch.float16)
    if op.startswith("A"):
        layer = getattr(helper, op)(device="cuda:0", dtype=torch.float16).from_linear(linear)
    else:
        import gemlite

        bits = int(op[1:])
        layer = gemlite.GemLiteLinear(bits, 128, inner, columns, gemlite.DType.FP16, gemlite.DType.FP16)
        codes = torch.randint(2**bits, (columns, inner), device="cuda", dtype=torch.uint8)
        layer.pack(codes, *(rand(columns * inner // 128, 1, dtype="float16") for _ in range(2)))
    layer(rand(rows, inner, dtype="float16"))


def calls():
    return calls_of(call, LAYERS, SHAPES)
