"""Base class of the families of flex attention: problems of real models, operands, masks, and the op's lowering.

The heads of language models are in `kernels/dense_llms.csv`; they are causal, with a block mask. Those of encoders are
below, from the models' papers: Dosovitskiy et al. 2020 (ViT), Zhai et al. 2023 (SigLIP), Peebles and Xie 2022 (DiT),
Podell et al. 2023 (SDXL), Radford et al. 2022 (Whisper), Devlin et al. 2018 (BERT). torch and triton are imported when
needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ...datasets import Case, DeviceSpec, KernelConfig, Problem, torch_dtype
from ..workloads import chosen, load_dense_models
from .generated_family import GeneratedFamily, draw_cases
from .templates import BLOCK_MASK

if TYPE_CHECKING:
    import numpy as np
    import torch

    from .generated import GeneratedKernel, Operand

#: Attention without a mask: heads, head dimension, and tokens of one sequence.
ENCODERS = {
    "ViT-B": (12, 64, 197),
    "ViT-L": (16, 64, 577),
    "ViT-H": (16, 80, 257),
    "SigLIP-So400m": (16, 72, 729),
    "DiT-XL": (16, 72, 1024),
    "SDXL": (10, 64, 4096),
    "Whisper-large": (20, 64, 1500),
    "BERT-large": (16, 64, 512),
    "FLUX": (24, 128, 4608),
}
#: Tokens of a sequence, and cached tokens of one that is being decoded, of language models.
SEQUENCES = (256, 512, 1024, 2048, 4096, 8192, 16384)
CACHED = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
#: Sequences of one call.
BATCHES = (1, 2, 4, 8, 16, 32, 64)
#: Tensor-parallel ranks, which share the heads.
RANKS = (1, 2, 4, 8)
DTYPES = {"bf16": 0.8, "fp16": 0.2}
#: The side of the blocks of a mask (torch.nn.attention.flex_attention), and what stands for no mask.
BLOCK, _NO_BLOCK = 128, 1 << 30
LOG2_E = 1.4426950408889634
#: What torch passes to the templates unless a user asks for something else.
OPTIONS = {
    "PRESCALE_QK": False,
    "ROWS_GUARANTEED_SAFE": False,
    "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True,
    "OUTPUT_LOGSUMEXP": True,
    "OUTPUT_MAX": False,
}


class FlexCall(GeneratedFamily):
    """Base class of the three measurable families of flex attention: forward, backward and decode.

    Inductor's default configs and max-autotune lists are those of template_heuristics/triton.py in torch 2.11.
    """

    tolerances: ClassVar[Mapping[str, float]] = {"bf16": 1e-2, "fp16": 2e-3, "fp32": 1e-4}
    #: The lengths of sequences, and whether only language models have problems.
    lengths: ClassVar[Sequence[int]] = SEQUENCES
    is_decoding: ClassVar[bool] = False

    def draw(
        self, models: Path | str | None, max_tflop: float | None, *, tokens: Sequence[int] | None = None, **drawn: Any
    ) -> tuple[Case, ...]:
        """Return the cases that `cases` draws; `tokens` are the lengths of sequences of language models."""
        lengths = tuple(tokens or self.lengths)
        layers = {}
        for model in load_dense_models(models):
            shared = model.num_heads // model.num_kv_heads
            if self.is_decoding and shared & (shared - 1):
                continue  # Inductor decodes with this template only if a power of two of heads share keys
            heads = model.num_heads, model.num_kv_heads, model.head_dim
            layers[f"{model.model}/attention"] = partial(self._causal, *heads, lengths)
        for name, (count, dim, length) in {} if models or self.is_decoding else ENCODERS.items():
            layers[f"{name}/attention"] = partial(self._full, count, dim, length)
        return draw_cases(self, layers, partial(self._of_chance, lengths), max_tflop=max_tflop, **drawn)

    def _causal(self, heads: int, kv_heads: int, dim: int, lengths: Sequence[int], rng: np.random.Generator) -> Problem:
        rank = int(rng.choice([count for count in RANKS if heads % count == 0 and kv_heads % count == 0]))
        return self.problem(rng, heads // rank, kv_heads // rank, dim, int(rng.choice(lengths)), (BLOCK_MASK,))

    def _full(self, heads: int, dim: int, length: int, rng: np.random.Generator) -> Problem:
        return self.problem(rng, heads, heads, dim, length, ())

    def _of_chance(self, lengths: Sequence[int], rng: np.random.Generator) -> Problem:
        kv_heads, groups = int(rng.choice((1, 2, 4, 8, 16))), int(rng.choice((1, 2, 4, 8)))
        dim, length = int(rng.choice((32, 64, 96, 128, 192, 256))), int(rng.choice(lengths))
        flags = (BLOCK_MASK,) if self.is_decoding or rng.uniform() < 0.5 else ()
        return self.problem(rng, kv_heads * groups, kv_heads, dim, length, flags)

    def problem(
        self, rng: np.random.Generator, heads: int, kv_heads: int, dim: int, length: int, flags: tuple[str, ...]
    ) -> Problem:
        """Draw a problem: a random number of sequences of this length, in a random dtype."""
        count = int(rng.choice(BATCHES))
        return Problem.of(
            self.name,
            dtype=chosen(DTYPES, rng),
            flags=flags,
            batch=count * heads,
            groups=heads // kv_heads,
            queries=length,
            keys=length,
            head_qk=dim,
            head_v=dim,
        )

    def heads(self, problem: Problem) -> tuple[int, int, int]:
        """Return (query heads, heads of keys and values, queries) of an equivalent call with a single sequence."""
        return problem["batch"], problem["batch"] // max(problem["groups"], 1), problem["queries"]

    def operands(self, problem: Problem) -> dict[str, Operand]:
        """Return (shape, strides, dtype) of each of the kernel's tensors by name; its main output is "y"."""
        import torch

        (heads, kv_heads, queries), keys = self.heads(problem), problem["keys"]
        dtype = torch_dtype(problem.dtype_name)
        operands = {
            "Q": contiguous(dtype, 1, heads, queries, problem["head_qk"]),
            "K": contiguous(dtype, 1, kv_heads, keys, problem["head_qk"]),
            "V": contiguous(dtype, 1, kv_heads, keys, problem["head_v"]),
        }
        rows, columns = (-(-length // BLOCK) for length in (queries, keys))
        if BLOCK_MASK not in problem.flags:
            rows = columns = 1
        for side, count, others in (("KV", rows, columns), ("Q", columns, rows)):
            for kind in ("", "FULL_"):
                operands[f"{kind}{side}_NUM_BLKS"] = contiguous(torch.int32, 1, 1, count)
                operands[f"{kind}{side}_IDX"] = contiguous(torch.int32, 1, 1, count, others)
        return {**operands, **self.more_operands(problem, dtype)}

    def more_operands(self, problem: Problem, dtype: torch.dtype) -> dict[str, Operand]:
        """Return, as (shape, strides, dtype) by name, the tensors that only this pass has; "y" is its main output."""
        raise NotImplementedError

    def fill(self, tensors: Mapping[str, torch.Tensor], problem: Problem, generator: torch.Generator) -> None:
        """Fill the block mask's tensors.

        The mask is causal; in decoding no block is masked; without the flag "block_mask" there is a single block.
        """
        import torch

        blocks = {name: tensor for name, tensor in tensors.items() if name.endswith(("_BLKS", "_IDX"))}
        for tensor in blocks.values():
            tensor.zero_()
        if BLOCK_MASK not in problem.flags:
            blocks["KV_NUM_BLKS"].fill_(1)
            blocks["Q_NUM_BLKS"].fill_(1)
            return
        queries, keys = (torch.arange(tensors[name].shape[-1]) for name in ("KV_NUM_BLKS", "Q_NUM_BLKS"))
        if self.is_decoding:
            full, partial_ = torch.ones(len(queries), len(keys)), torch.zeros(len(queries), len(keys))
        else:
            full, partial_ = (queries[:, None] > keys).float(), (queries[:, None] == keys).float()
        for kind, mask in (("FULL_", full), ("", partial_)):
            for side, of_side in (("KV", mask), ("Q", mask.T)):
                blocks[f"{kind}{side}_NUM_BLKS"][0, 0] = of_side.sum(1).int()
                # The blocks that count come first, in order.
                blocks[f"{kind}{side}_IDX"][0, 0] = torch.argsort(-of_side, dim=1, stable=True).int()

    def generate(self, problem: Problem, config: KernelConfig) -> GeneratedKernel:
        """Generate Inductor's kernel for a problem and a config."""
        from .generated import lowered_kernel

        operands = self.operands(problem)
        if BLOCK_MASK not in problem.flags:  # torch leaves them out, and Inductor makes empty ones
            operands = {name: operand for name, operand in operands.items() if not name.startswith("FULL_")}
        return lowered_kernel(operands, partial(self.lower, problem), config)

    def lower(self, problem: Problem, nodes: Mapping[str, Any]) -> Any:
        """Run the op's Inductor lowering on the operands' graph nodes, given by name."""
        import torch
        from torch._inductor.lowering import lowerings

        lower: Any = lowerings[torch.ops.higher_order.flex_attention]
        return lower(*(nodes[name] for name in "QKV"), unchanged_scores(), *self.shared(problem, nodes))

    def shared(self, problem: Problem, nodes: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the last arguments of the op's lowering: block mask, scale and options, as for every pass."""
        import inspect

        from torch.nn.attention.flex_attention import BlockMask

        has_blocks = BLOCK_MASK in problem.flags
        names = [
            f"{kind}{side}_{what}" for side in ("KV", "Q") for kind in ("", "FULL_") for what in ("NUM_BLKS", "IDX")
        ]
        # torch 2.13 has four more fields, for other backends.
        more = 4 if "dq_write_order" in inspect.signature(BlockMask.__init__).parameters else 0
        size = BLOCK if has_blocks else _NO_BLOCK
        lengths = self.heads(problem)[2], problem["keys"]
        mask = causal_mask() if has_blocks and not self.is_decoding else no_mask()
        block_mask = (*lengths, *map(nodes.get, names), *[None] * more, size, size, mask)
        return block_mask, problem["head_qk"] ** -0.5, self.options(problem), (), ()

    def options(self, problem: Problem) -> dict[str, Any]:
        """Return the `kernel_options` argument of the op."""
        return dict(OPTIONS)

    def templates(self) -> Iterable[Any]:
        """Return Inductor's templates that the kernels are generated from."""
        from torch._inductor.kernel.flex import flex_attention

        return (flex_attention.flex_attention_template,)

    def _default(self, problem: Problem, device: DeviceSpec, **knobs: int) -> KernelConfig:
        """Return the config with these knobs if it can run the problem, else the first config of the space that can."""
        config = KernelConfig.of(**knobs)
        return config if self.supports(config, problem, device) is None else super().default(problem, device)


def distinct(default: KernelConfig, listed: Sequence[Mapping[str, int]]) -> Sequence[KernelConfig]:
    """Return the default config, then the configs with the knob values in `listed`, without repeats."""
    return tuple(dict.fromkeys([default, *(KernelConfig.of(**knobs) for knobs in listed)]))


def contiguous(dtype: torch.dtype, *shape: int) -> Operand:
    """Return a contiguous operand."""
    import torch

    return shape, torch.empty(shape, device="meta").stride(), dtype


def _subgraph(inputs: Sequence[str], output: Any) -> Any:
    """Build a graph with these inputs for a lowering; its output is what `output(graph, *input nodes)` returns."""
    import torch
    from torch._inductor import ir

    graph = torch.fx.Graph()
    graph.output(output(graph, *[graph.placeholder(name) for name in inputs]))
    return ir.Subgraph(name="foretune", graph_module=torch.fx.GraphModule({}, graph))


_INDICES = ("b", "h", "m", "n")


def unchanged_scores() -> Any:
    """Return the graph of a score_mod that changes nothing."""
    return _subgraph(("score", *_INDICES), lambda graph, score, *_: score)


def unchanged_gradients() -> Any:
    """Return the graph of the gradient of a score_mod that changes nothing."""
    return _subgraph(("score", *_INDICES, "grad"), lambda graph, *nodes: [nodes[-1], None, None, None, None])


def causal_mask() -> Any:
    """Return the graph of a causal mask."""
    import torch

    at_least = torch.ops.aten.ge.Tensor
    return _subgraph(_INDICES, lambda graph, b, h, m, n: graph.call_function(at_least, (m, n)))


def no_mask() -> Any:
    """Return the graph of a mask that masks nothing."""
    import torch

    options = {"dtype": torch.bool, "device": torch.device("cuda", 0), "pin_memory": False}
    full = torch.ops.aten.full.default
    return _subgraph(_INDICES, lambda graph, *_: graph.call_function(full, ([], True), options))
