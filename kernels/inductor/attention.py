"""Inductor's flex attention as `Measurable` families: forward, backward and decode.

torch and triton are imported when needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ...datasets import DeviceSpec, KernelConfig, Problem
from ..workloads import chosen
from .flex import (
    BATCHES,
    BLOCK,
    CACHED,
    DTYPES,
    LOG2_E,
    OPTIONS,
    FlexCall,
    contiguous,
    distinct,
    unchanged_gradients,
    unchanged_scores,
)
from .generated_family import Inputs
from .templates import (
    BLOCK_MASK,
    InductorFlexAttentionFamily,
    InductorFlexBackwardFamily,
    InductorFlexDecodingFamily,
)

if TYPE_CHECKING:
    import numpy as np
    import torch

    from .generated import Operand

#: Elements of the attention matrix that a reference computes at once.
_CHUNK = 1 << 28


class InductorFlexAttention(InductorFlexAttentionFamily, FlexCall):
    """The family of flex attention's forward pass, with all that `foretune collect` needs.

    >>> from foretune.kernels import find_family
    >>> len(find_family("inductor:flex_attention").cases(random=3, per_layer=1))
    42
    """

    def default(self, problem: Problem, device: DeviceSpec) -> KernelConfig:
        """Return the config that Inductor uses without autotuning on sm_90."""
        known = {64: (128, 128, 4), 128: (128, 64, 8), 256: (64, 32, 4)}
        block_m, block_n, warps = known.get(problem["head_qk"], (64, 64, 4))
        return self._default(problem, device, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=warps, num_stages=3)

    def usual(self, problem: Problem, device: DeviceSpec) -> Sequence[KernelConfig]:
        """Return the configs that Inductor's max-autotune tries, its default config first."""
        listed = (128, 64, 4, 3), (128, 128, 4, 3), (128, 128, 8, 2), (128, 128, 8, 1), (64, 128, 4, 3), (64, 64, 4, 3)
        knobs = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
        return distinct(self.default(problem, device), [dict(zip(knobs, values, strict=True)) for values in listed])

    def more_operands(self, problem: Problem, dtype: torch.dtype) -> dict[str, Operand]:
        """Return, as (shape, strides, dtype) by name, the tensors that only this pass has; "y" is its main output."""
        import torch

        heads, _, queries = self.heads(problem)
        lines = contiguous(torch.float32, 1, heads, queries)
        return {"LSE": lines, "MAX": lines, "y": contiguous(dtype, 1, heads, queries, problem["head_v"])}

    def reference(self, inputs: Inputs) -> torch.Tensor:
        """Return the attention output in float32, computed by PyTorch."""
        import torch

        return torch.cat([y for _, y, _ in _chunks(inputs, self)], dim=1)


class InductorFlexDecoding(InductorFlexDecodingFamily, FlexCall):
    """The family of flex attention for decoding, with all that `foretune collect` needs.

    The lengths of keys are multiples of 128 for each split, so that every config has the same splits.

    >>> from foretune.kernels import find_family
    >>> len(find_family("inductor:flex_decoding").cases(random=3, per_layer=1))
    25
    """

    outputs = ("y", "M", "L")
    lengths = CACHED
    is_decoding = True

    def problem(
        self, rng: np.random.Generator, heads: int, kv_heads: int, dim: int, length: int, flags: tuple[str, ...]
    ) -> Problem:
        """Draw a problem: a random number of sequences with about `length` cached keys, in a random dtype."""
        count = int(rng.choice(BATCHES))
        splits = max(132 // (count * kv_heads) * 2, 1)  # as Inductor, on the 132 SMs of an H100 or H200
        return Problem.of(
            self.name,
            dtype=chosen(DTYPES, rng),
            flags=flags,
            batch=count * kv_heads,
            groups=1,
            queries=heads // kv_heads,
            keys=max(length // (splits * BLOCK), 1) * splits * BLOCK,
            head_qk=dim,
            head_v=dim,
            splits=splits,
        )

    def default(self, problem: Problem, device: DeviceSpec) -> KernelConfig:
        """Return the config that Inductor uses without autotuning on sm_90."""
        rows = max(16, 1 << (problem["queries"] - 1).bit_length())
        return self._default(problem, device, BLOCK_M=rows, BLOCK_N=64, num_warps=2, num_stages=1)

    def usual(self, problem: Problem, device: DeviceSpec) -> Sequence[KernelConfig]:
        """Return the configs that Inductor's max-autotune tries, its default config first."""
        default = self.default(problem, device)
        known = {"BLOCK_M": default["BLOCK_M"], "num_warps": 2, "num_stages": 3}
        return distinct(default, [{**known, "BLOCK_N": block_n} for block_n in (64, 32, 128)])

    def heads(self, problem: Problem) -> tuple[int, int, int]:
        """Return (query heads, heads of keys and values, queries) of an equivalent call with a single sequence."""
        rows = problem["queries"]
        shared = rows if rows & (rows - 1) == 0 else 1  # Inductor only takes powers of two
        return problem["batch"] * shared, problem["batch"], rows // shared

    def options(self, problem: Problem) -> dict[str, Any]:
        """Return the `kernel_options` argument of the op, which here also sets the number of splits."""
        return {**OPTIONS, "SPLIT_KV": problem["splits"]}

    def more_operands(self, problem: Problem, dtype: torch.dtype) -> dict[str, Operand]:
        """Return, as (shape, strides, dtype) by name, the tensors that only this pass has; "y" is its main output."""
        import torch

        heads, _, queries = self.heads(problem)
        lines = contiguous(torch.float32, 1, problem["splits"], heads, queries)
        return {
            "M": lines,
            "L": lines,
            "y": contiguous(torch.float32, 1, problem["splits"], heads, queries, problem["head_v"]),
        }

    def reference(self, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        """Return the results of each part of the keys: (weighted sums of values, largest scores, sums of weights).

        Dimension 1 of each tensor is the part, from the last part of the keys to the first.
        """
        import torch

        problem, (heads, kv_heads, queries) = inputs.problem, self.heads(inputs.problem)
        splits = problem["splits"]
        q, k, v = (inputs.tensors[name][0] for name in "QKV")
        parts = []
        for head in range(kv_heads):
            rows = q.view(kv_heads, -1, problem["head_qk"])[head].float()
            scores = rows @ k[head].float().T * (problem["head_qk"] ** -0.5 * LOG2_E)
            scores = scores.view(len(rows), splits, -1).flip(1)  # (rows, splits, keys of a split)
            most = scores.amax(2)
            exponentials = torch.exp2(scores - most[..., None])
            values = v[head].float().view(splits, -1, problem["head_v"]).flip(0)
            sums = torch.einsum("rsk,skd->srd", exponentials, values)
            parts.append((sums, most.T, exponentials.sum(2).T))
        y, most, total = (torch.stack(part, dim=1).flatten(1, 2) for part in zip(*parts, strict=True))
        shape = 1, splits, heads, queries
        return y.view(*shape, -1), most.reshape(shape), total.reshape(shape)

    def templates(self) -> Iterable[Any]:
        """Return Inductor's templates that the kernels are generated from."""
        from torch._inductor.kernel.flex import flex_decoding

        return (flex_decoding.flex_decoding_template,)


class InductorFlexBackward(InductorFlexBackwardFamily, FlexCall):
    """The family of flex attention's backward pass, with all that `foretune collect` needs.

    >>> from foretune.kernels import find_family
    >>> len(find_family("inductor:flex_backward").cases(random=3, per_layer=1))
    42
    """

    outputs = ("y", "DQ", "DV")  # y is dK
    tolerances: ClassVar[Mapping[str, float]] = {"bf16": 2e-2, "fp16": 4e-3, "fp32": 1e-3}

    def default(self, problem: Problem, device: DeviceSpec) -> KernelConfig:
        """Return the config that Inductor uses without autotuning on sm_90."""
        dim = problem["head_qk"]
        keys, stages, warps = (128, 3, 8) if 64 <= dim <= 128 else (64, 3 if dim < 64 else 2, 4)
        blocks = {"BLOCK_M1": 64, "BLOCK_N1": keys, "BLOCK_M2": keys, "BLOCK_N2": 64}
        return self._default(problem, device, **blocks, num_warps=warps, num_stages=stages)

    def usual(self, problem: Problem, device: DeviceSpec) -> Sequence[KernelConfig]:
        """Return the configs that Inductor's max-autotune tries, its default config first."""
        listed = [
            {"BLOCK_M1": m, "BLOCK_N1": n, "BLOCK_M2": n, "BLOCK_N2": m, "num_warps": 4, "num_stages": stages}
            for m, n in ((32, 32), (32, 64), (64, 64))
            for stages in (1, 3, 4, 5)
        ]
        return distinct(self.default(problem, device), listed)

    def more_operands(self, problem: Problem, dtype: torch.dtype) -> dict[str, Operand]:
        """Return, as (shape, strides, dtype) by name, the tensors that only this pass has; "y" is its main output."""
        import torch

        (heads, kv_heads, queries), keys = self.heads(problem), problem["keys"]
        lines = contiguous(torch.float32, 1, heads, queries)
        return {
            "LSE": lines,
            "DELTA": lines,
            "OUT": contiguous(dtype, 1, heads, queries, problem["head_v"]),
            "DO": contiguous(dtype, 1, heads, queries, problem["head_v"]),
            "DQ": contiguous(dtype, 1, heads, queries, problem["head_qk"]),
            "DV": contiguous(dtype, 1, kv_heads, keys, problem["head_v"]),
            "y": contiguous(dtype, 1, kv_heads, keys, problem["head_qk"]),
        }

    def fill(self, tensors: Mapping[str, torch.Tensor], problem: Problem, generator: torch.Generator) -> None:
        """Fill the block mask, and the results of the forward pass that this pass reads: OUT, LSE and DELTA."""
        super().fill(tensors, problem, generator)
        for heads, y, lse in _chunks(Inputs(tensors, problem), self):
            tensors["OUT"][:, heads] = y.to(tensors["OUT"].dtype)
            tensors["LSE"][:, heads] = lse * LOG2_E
        out = tensors["OUT"].float() * tensors["DO"].float()
        tensors["DELTA"].copy_(out.sum(-1))

    def lower(self, problem: Problem, nodes: Mapping[str, Any]) -> Any:
        """Run the op's Inductor lowering on the operands' graph nodes, given by name."""
        import torch
        from torch._inductor.lowering import lowerings

        lower: Any = lowerings[torch.ops.higher_order.flex_attention_backward]
        of_forward = (nodes[name] for name in ("Q", "K", "V", "OUT", "LSE", "DO"))
        return lower(*of_forward, None, unchanged_scores(), unchanged_gradients(), *self.shared(problem, nodes))

    def reference(self, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        """Return dK, dQ and dV in float32."""
        import torch

        problem, tensors = inputs.problem, inputs.tensors
        made = {name: torch.zeros(tensors[name].shape, device=tensors["Q"].device) for name in self.outputs}
        shared = max(problem["groups"], 1)
        for head in range(problem["batch"]):
            kv = head // shared
            q, do = tensors["Q"][0, head].float(), tensors["DO"][0, head].float()
            k, v = tensors["K"][0, kv].float(), tensors["V"][0, kv].float()
            step = max(_CHUNK // len(k), 1)
            for start in range(0, len(q), step):
                rows = slice(start, start + step)
                p = torch.exp2(_scores(q[rows], k, start, problem) * LOG2_E - tensors["LSE"][0, head, rows, None])
                ds = p * (do[rows] @ v.T - tensors["DELTA"][0, head, rows, None]) * problem["head_qk"] ** -0.5
                made["DV"][0, kv] += p.T @ do[rows]
                made["DQ"][0, head, rows] = ds @ k
                made["y"][0, kv] += ds.T @ q[rows]
        return tuple(made[name] for name in self.outputs)

    def templates(self) -> Iterable[Any]:
        """Return Inductor's templates that the kernels are generated from."""
        from torch._inductor.kernel.flex import flex_attention

        return (flex_attention.flex_attention_backward_template,)


def _scores(q: torch.Tensor, k: torch.Tensor, start: int, problem: Problem) -> torch.Tensor:
    """Return the scaled scores of queries from position `start` on, in float32; -inf at later keys if causal."""
    import torch

    scores: torch.Tensor = q @ k.T * problem["head_qk"] ** -0.5
    if BLOCK_MASK in problem.flags:
        rows = torch.arange(start, start + len(q), device=q.device)
        scores.masked_fill_(rows[:, None] < torch.arange(len(k), device=q.device), float("-inf"))
    return scores


def _chunks(inputs: Inputs, family: FlexCall) -> Iterable[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Yield for each query head (a slice that selects it, its attention output, log-sum-exp of its scores)."""
    import torch

    problem, tensors = inputs.problem, inputs.tensors
    shared = max(problem["groups"], 1)
    for head in range(problem["batch"]):
        q = tensors["Q"][0, head].float()
        k, v = (tensors[name][0, head // shared].float() for name in "KV")
        step = max(_CHUNK // len(k), 1)
        parts = []
        for start in range(0, len(q), step):
            scores = _scores(q[start : start + step], k, start, problem)
            parts.append((torch.softmax(scores, dim=1) @ v, torch.logsumexp(scores, dim=1)))
        y, lse = (torch.cat(part)[None, None] for part in zip(*parts, strict=True))
        yield slice(head, head + 1), y, lse
