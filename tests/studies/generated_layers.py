"""The layers whose kernels generated_kernels_on_gpu.py measures: parts of real models between their matrix products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

BF16, FP32, INT = torch.bfloat16, torch.float32, torch.int64


class Layer(NamedTuple):
    """A function and the (shape, dtype) of its inputs; if it trains, its backward pass is compiled too."""

    name: str
    model: str
    function: Callable[..., Any]
    inputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    trains: bool = False
    bound: int = 1  # integers are below it


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    f = x.float()
    return w * (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def add_rms_norm(x: Tensor, r: Tensor, w: Tensor) -> Any:
    h = x + r
    return h, rms_norm(h, w)


def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b)


def add_layer_norm(x: Tensor, r: Tensor, c: Tensor, w: Tensor, b: Tensor) -> Any:
    h = x + c + r
    return h, layer_norm(h, w, b)


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x.float(), -1).to(x.dtype)


def masked_softmax(s: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(s.float() * 0.125 + mask, -1).to(s.dtype)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels)


def rotate(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    q = q.transpose(1, 2)
    left, right = q.chunk(2, -1)
    return q * cos + torch.cat([-right, left], -1) * sin


def norm_rotate(q: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotate(rms_norm(q, w), cos, sin)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def packed_swiglu(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up


def bias_gelu(x: Tensor, b: Tensor) -> Tensor:
    return F.gelu(x + b)


def tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def adaptive_norm(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:]) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def gated_residual(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    return x + gate.unsqueeze(1) * y


def group_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.silu(F.group_norm(x, 32, w, b))


def heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous()


def transpose_cast(x: Tensor) -> Tensor:
    return x.to(BF16).transpose(-1, -2).contiguous()


def channels_last(x: Tensor, b: Tensor) -> Tensor:
    return (x + b[:, None, None]).permute(0, 2, 3, 1).contiguous()


def column_sum(g: Tensor) -> Tensor:
    return g.float().sum(0).to(g.dtype)


def gelu_bias_grad(g: Tensor, x: Tensor) -> Any:
    d = torch.ops.aten.gelu_backward(g, x)
    return d, column_sum(d)


def embed(w: Tensor, ids: Tensor) -> Tensor:
    return F.embedding(ids, w)


def embed_norm(w: Tensor, ids: Tensor, places: Tensor, n: Tensor, b: Tensor) -> Tensor:
    return layer_norm(F.embedding(ids, w) + places, n, b)


def adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> Any:
    f = g.float()
    m.lerp_(f, 0.1)
    v.mul_(0.95).addcmul_(f, f, value=0.05)
    p.mul_(0.9999).addcdiv_(m, v.sqrt() + 1e-8, value=-1e-3)
    return p.to(BF16)


def cast(x: Tensor) -> Tensor:
    return x.to(BF16 if x.dtype == FP32 else FP32)


def accumulate(a: Tensor, g: Tensor) -> Tensor:
    return a + g.float()


def quantize(x: Tensor) -> Any:
    scale = x.abs().amax(-1, keepdim=True).float() / 448
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def swiglu_quantize(gate: Tensor, up: Tensor) -> Any:
    return quantize(swiglu(gate, up))


def square_sum(x: Tensor) -> Tensor:
    return x.float().square().sum()


def mse(x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(x.float(), y.float())


def combine(y: Tensor, weights: Tensor) -> Tensor:
    return (y * weights.unsqueeze(-1)).sum(1)


def route(logits: Tensor) -> Tensor:
    return torch.softmax(logits.float(), -1)


def soft_cap(x: Tensor) -> Tensor:
    return torch.tanh(x / 30) * 30


def normalize(x: Tensor) -> Tensor:
    return F.normalize(x.float(), dim=-1).to(x.dtype)


def repeat_heads(x: Tensor) -> Tensor:
    return x.unsqueeze(2).expand(-1, -1, 4, -1, -1).flatten(1, 2).contiguous()


def join(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([x, y], 1)


def upsample(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2.0, mode="nearest")


def logsumexp(x: Tensor) -> Tensor:
    return torch.logsumexp(x.float(), -1)


def mean_pool(x: Tensor) -> Tensor:
    return x.float().mean(1).to(x.dtype)


def batch_norm_stats(x: Tensor) -> Any:
    return torch.var_mean(x.float(), (0, 2, 3))


def _layers() -> list[Layer]:
    found: list[Layer] = []

    def add(model: str, function: Any, *shapes: Any, trains: bool = False, bound: int = 1) -> None:
        given = tuple(one if isinstance(one[0], tuple) else (one, BF16) for one in shapes)
        label = "x".join(map(str, given[0][0]))
        name = f"{model} {function.__name__} {label}{' training' if trains else ''}"
        found.append(Layer(name, model, function, given, trains, bound))

    llms = {
        "Qwen3-4B": (2560, 9728, 32, 8, 151936, (48, 2048)),
        "Llama-8B": (4096, 14336, 32, 8, 128256, (1, 8192)),
        "Llama-1B": (2048, 8192, 32, 8, 128256, (4096,)),
        "Llama-70B": (8192, 28672, 64, 8, 128256, (16, 4096)),
        "DeepSeek-V3": (7168, 18432, 128, 128, 129280, (128, 2048)),
        "Qwen3-0.6B": (1024, 3072, 16, 8, 151936, (256, 16384)),
    }
    for model, (hidden, inner, heads, _, vocab, tokens) in llms.items():
        for count in tokens:
            rows = (count, hidden)
            add(model, add_rms_norm, rows, rows, (hidden,))
            add(model, swiglu, (count, inner), (count, inner))
            if model.startswith(("Qwen3", "Llama")):
                table = (count, 128)
                add(model, norm_rotate, (1, count, heads, 128), (128,), table, table)
            if model in ("Qwen3-4B", "DeepSeek-V3"):
                add(model, swiglu_quantize, (count, inner), (count, inner))
                add(model, quantize, rows)
        add(model, logsumexp, (tokens[0], vocab))
    for model, count in {"Llama-1B": 8192, "Qwen3-0.6B": 16384, "Llama-8B": 4096, "Qwen3-4B": 2048}.items():
        hidden, inner, heads, kv, vocab, _ = llms[model]
        rows = (count, hidden)
        add(model, rms_norm, rows, (hidden,), trains=True)
        add(model, add_rms_norm, rows, rows, (hidden,), trains=True)
        add(
            model,
            packed_swiglu if "Q" in model else swiglu,
            *[(count, inner)] * (1 if "Q" in model else 2),
            trains=True,
        )
        table = (2048, 128)
        add(model, rotate, (count // 2048, 2048, kv, 128), table, table, trains=True)
        add(model, adamw, ((hidden, inner), FP32), (hidden, inner), ((hidden, inner), FP32), ((hidden, inner), FP32))
        add(model, cross_entropy, (count // 4, vocab), ((count // 4,), INT), trains=True, bound=vocab)
        add(model, repeat_heads, (count // 2048, kv, 2048, 128), trains=True)
        add(model, square_sum, (hidden, inner))
    add("Llama-1B", embed, (128256, 2048), ((8192,), INT), trains=True, bound=128256)
    add("Qwen3-0.6B", norm_rotate, (8, 2048, 16, 128), (128,), (2048, 128), (2048, 128), trains=True)
    add("Gemma-2B", soft_cap, (2048, 16384))
    add("Gemma-2B", masked_softmax, (1, 8, 2048, 2048), (1, 1, 2048, 2048), trains=True)
    encoders = {"BERT-large": (8192, 1024), "ViT-B": (12608, 768), "ViT-L": (6304, 1024), "BERT-base": (4096, 768)}
    for model, (count, hidden) in encoders.items():
        rows, wide = (count, hidden), (count, 4 * hidden)
        add(model, add_layer_norm, rows, rows, (hidden,), (hidden,), (hidden,), trains=True)
        add(model, bias_gelu, wide, (4 * hidden,))
        add(model, gelu_bias_grad, wide, wide)
        add(model, column_sum, wide)
        add(model, column_sum, rows)
        add(
            model,
            heads_first,
            (count // 197 if "V" in model else count // 512, 197 if "V" in model else 512, hidden // 64, 64),
        )
        add(model, transpose_cast, ((hidden, 4 * hidden), FP32))
    add(
        "BERT-large",
        embed_norm,
        (30522, 1024),
        ((16, 512), INT),
        (512, 1024),
        (1024,),
        (1024,),
        trains=True,
        bound=30522,
    )
    add("BERT-large", softmax, (16, 16, 512, 512), trains=True)
    add("BERT-base", masked_softmax, (8, 12, 384, 384), (8, 1, 1, 384))
    add("ViT-L", layer_norm, (32, 257, 1024), (1024,), (1024,))
    add("ViT-L", mean_pool, (32, 256, 1024), trains=True)
    add("CLIP", normalize, (4096, 768), trains=True)
    add("CLIP", cross_entropy, (4096, 4096), ((4096,), INT), trains=True, bound=4096)
    for batch, count in ((16, 256), (2, 4096)):
        rows = (batch, count, 1152)
        add("DiT-XL", adaptive_norm, rows, (batch, 1152), (batch, 1152), trains=batch == 16)
        add("DiT-XL", gated_residual, rows, rows, (batch, 1152), trains=batch == 16)
        add("DiT-XL", tanh_gelu, (batch, count, 4608), trains=batch == 16)
    add("DiT-XL", mse, (16, 4, 64, 64), (16, 4, 64, 64), trains=True)
    for channels, side, batch in ((320, 64, 4), (640, 32, 8), (1280, 16, 8), (512, 128, 1)):
        image = (batch, channels, side, side)
        add("SDXL", group_norm, image, (channels,), (channels,), trains=channels in (640, 1280))
        add("SDXL", channels_last, image, (channels,))
        add("SDXL", join, image, image)
        add("SDXL", upsample, image)
    add("ResNet-50", batch_norm_stats, (64, 256, 56, 56))
    add("ResNet-50", batch_norm_stats, (64, 2048, 7, 7))
    for model, experts, top, hidden, count in (
        ("Qwen3-30B", 128, 8, 2048, 1024),
        ("Mixtral", 8, 2, 4096, 4096),
        ("DeepSeek-V3", 256, 8, 7168, 512),
    ):
        add(model, combine, (count, top, hidden), (count, top), trains=model == "Mixtral")
        add(model, route, (count, experts), trains=True)
    for model, shape in (("Llama-1B", (2048, 8192)), ("Llama-8B", (4096, 4096)), ("Qwen3-0.6B", (151936, 1024))):
        add(model, cast, (shape, FP32))
        add(model, accumulate, (shape, FP32), shape)
        add(model, heads_first, (1, *shape))
    return found


LAYERS = _layers()
