"""The models that models_on_gpu.py compiles: sizes of real models with random weights and two layers each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_LLAMA_8B = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "num_hidden_layers": 2,
    "vocab_size": 1024,
}
_LLAMA_1B = _LLAMA_8B | {"hidden_size": 2048, "intermediate_size": 8192}
_QWEN_4B = _LLAMA_8B | {"hidden_size": 2560, "head_dim": 128, "intermediate_size": 9728}
_QWEN_1_7B = _QWEN_4B | {"hidden_size": 2048, "num_attention_heads": 16, "intermediate_size": 6144}
_QWEN_MOE = _QWEN_4B | {
    "hidden_size": 2048,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
_LARGE = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096, "num_hidden_layers": 2}
_BASE = _LARGE | {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}


@dataclass(frozen=True)
class Workload:
    """One model and what it computes.

    Attributes:
        kind: A model type of transformers, or a module of this file.
        sizes: The fields of its config.
        shapes: The shapes of its inputs. With several, the second dimension is dynamic.
        trains: Whether a step is forward and backward; otherwise it is inference.
        cached: Tokens in a static cache before the step, as in decoding; 0 without a cache.
    """

    kind: str
    sizes: dict[str, int]
    shapes: tuple[tuple[int, ...], ...]
    trains: bool = False
    cached: int = 0

    def tiny(self) -> Workload:
        """Return the same architecture with sizes for a CPU."""
        small = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
        small |= {"num_experts": 4, "num_experts_per_tok": 2, "channels": 32}
        sizes = {name: small.get(name, 64) for name in self.sizes}
        images = {"vit": (1, 3, 224, 224), "unet": (1, 32, 8, 8), "dit": (1, 8, 64)}
        usual = [(2, min(8 + 8 * place, shape[1])) for place, shape in enumerate(self.shapes)]
        shapes = tuple(images.get(self.kind, shape) for shape in usual)
        return Workload(self.kind, sizes, shapes, self.trains, min(self.cached, 4))

    def build(self, where: str, dtype: torch.dtype) -> tuple[Callable[[torch.Tensor], torch.Tensor], list[Any], Any]:
        """Return a function to compile, its inputs, and its parameters.

        The function returns the last hidden state, or a loss if the step trains.
        """
        torch.manual_seed(0)
        with torch.device(where):
            model = self._model(dtype)
            model.train(self.trains)
            given = [
                torch.randint(0, 64, shape) if len(shape) == 2 else torch.randn(shape, dtype=dtype)
                for shape in self.shapes
            ]
            cache = self._cache(model, dtype) if self.cached else None

        def forward(x: torch.Tensor) -> torch.Tensor:
            if cache is not None:
                for layer in cache.layers:
                    layer.cumulative_length.fill_(self.cached)
            out = model(x) if cache is None else model(x, past_key_values=cache, use_cache=True)
            state: torch.Tensor = out if isinstance(out, torch.Tensor) else out.last_hidden_state
            return state.float().square().mean() if self.trains else state

        return forward, given, [one for one in model.parameters() if one.requires_grad]

    def _model(self, dtype: torch.dtype) -> nn.Module:
        if self.kind in MODULES:
            return MODULES[self.kind](**self.sizes).to(dtype)
        from transformers import AutoConfig, AutoModel

        config = AutoConfig.for_model(self.kind, **self.sizes)
        config.use_cache = False
        for name in list(vars(config)):
            if name.endswith(("dropout", "dropout_prob", "_pdrop")):
                setattr(config, name, 0.0)
        model: nn.Module = AutoModel.from_config(config, dtype=dtype)
        return model

    def _cache(self, model: Any, dtype: torch.dtype) -> Any:
        from transformers import StaticCache

        sizes, ((batch, _),) = model.config, self.shapes
        cache = StaticCache(sizes, max_cache_len=2 * self.cached)
        heads = sizes.num_key_value_heads
        for layer in cache.layers:
            keys = torch.randn(batch, heads, 1, sizes.head_dim, dtype=dtype)
            layer.lazy_initialization(keys, keys)
            for kept in (layer.keys, layer.values):
                kept.normal_()
        return cache


class DiT(nn.Module):
    """Blocks of a diffusion transformer with adaptive norms (DiT-XL/2), on tokens of images."""

    def __init__(self, hidden_size: int, num_attention_heads: int, num_hidden_layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DiTBlock(hidden_size, num_attention_heads) for _ in range(num_hidden_layers))
        self.condition = nn.Parameter(torch.randn(1, hidden_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        condition = self.condition.expand(len(x), -1)
        for block in self.blocks:
            x = block(x, condition)
        return x


class DiTBlock(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden, elementwise_affine=False)
        self.modulation = nn.Linear(hidden, 6 * hidden)
        self.attention = Attention(hidden, hidden, heads)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        parts = self.modulation(nn.functional.silu(condition)).unsqueeze(1).chunk(6, dim=-1)
        shift, scale, gate, shift_2, scale_2, gate_2 = parts
        y = self.norm(x) * (1 + scale) + shift
        x = x + gate * self.attention(y, y)
        y = self.norm(x) * (1 + scale_2) + shift_2
        return x + gate_2 * self.down(nn.functional.gelu(self.up(y), approximate="tanh"))


class Attention(nn.Module):
    def __init__(self, hidden: int, context: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.kv = nn.Linear(hidden, hidden), nn.Linear(context, 2 * hidden)
        self.o = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in (self.q(x), *self.kv(context).chunk(2, -1))
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.o(attended.transpose(1, 2).flatten(2))


class UNetStage(nn.Module):
    """One stage of a diffusion UNet: residual blocks of convolutions, each followed by a transformer block."""

    def __init__(self, channels: int, num_attention_heads: int, num_hidden_layers: int) -> None:
        super().__init__()
        self.residual = nn.ModuleList(Residual(channels) for _ in range(num_hidden_layers))
        self.transformers = nn.ModuleList(DiTBlock(channels, num_attention_heads) for _ in range(num_hidden_layers))
        self.condition = nn.Parameter(torch.randn(1, channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        condition = self.condition.expand(len(x), -1)
        for residual, block in zip(self.residual, self.transformers, strict=True):
            x = residual(x)
            tokens = block(x.flatten(2).transpose(1, 2), condition)
            x = x + tokens.transpose(1, 2).unflatten(2, x.shape[2:])
        return x


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(32, channels) for _ in range(2))
        self.convolutions = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            y = convolution(nn.functional.silu(norm(y)))
        return x + y


MODULES: dict[str, type[nn.Module]] = {"dit": DiT, "unet": UNetStage}
_DIT = {"hidden_size": 1152, "num_attention_heads": 16, "num_hidden_layers": 2}
_UNET = {"channels": 640, "num_attention_heads": 10, "num_hidden_layers": 2}
#: The ten models. Those that say most about the modes come first, for runs that are cut off.
WORKLOADS = {
    "BERT-large, 16 x 512": Workload("bert", _LARGE, ((16, 512),)),
    "Qwen3-4B, decode of 48": Workload("qwen3", _QWEN_4B, ((48, 1),), cached=512),
    "Llama-3.2-1B, training, 4 x 1,024": Workload("llama", _LLAMA_1B, ((4, 1024),), trains=True),
    "ViT-L/16, 32 images": Workload("vit", _LARGE, ((32, 3, 224, 224),)),
    "Llama-3.1-8B, prefill of 2,048": Workload("llama", _LLAMA_8B, ((1, 2048),)),
    "DiT-XL/2, 16 images": Workload("dit", _DIT, ((16, 256, 1152),)),
    "Qwen3-1.7B, 384-1,536 tokens": Workload("qwen3", _QWEN_1_7B, ((1, 1024), (1, 384), (1, 1536))),
    "Qwen3-30B-A3B, 1,024 tokens": Workload("qwen3_moe", _QWEN_MOE, ((1, 1024),)),
    "UNet stage, 640 channels": Workload("unet", _UNET, ((4, 640, 64, 64),)),
    "ViT-B/16, training, 64 images": Workload("vit", _BASE, ((64, 3, 224, 224),), trains=True),
}
