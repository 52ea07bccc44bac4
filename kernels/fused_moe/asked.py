"""The layer that somebody asks about, by a model's name or by its dimensions."""

from __future__ import annotations

from ...datasets import ForetuneError
from ...datasets.errors import check_integer, shown
from ..grouped_gemm.models import load_models
from .engines import SCALED_BLOCK, Layer
from .family import DTYPES, LARGEST


def layer_asked_for(
    model: str | None = None,
    *,
    experts: int | None = None,
    topk: int | None = None,
    hidden: int | None = None,
    inter: int | None = None,
    tp: int = 1,
    dtype: str = "bf16",
) -> Layer:
    """One of `tp` ranks' part of a model's MoE layer: of a model in the shipped table, by its name, or of the whole
    layer's dimensions, of which `inter` is the intermediate size of one expert, after the activation.

    Raises `ForetuneError` for a model that is not in the table or whose experts have no gate, dimensions that are
    missing or no whole numbers, and an `inter` that `tp` ranks cannot share.

    >>> layer_asked_for("Qwen3-30B-A3B", tp=2)
    Layer(experts=128, topk=8, hidden=2048, inter=384, dtype='bf16')
    """
    given = {"experts": experts, "topk": topk, "hidden": hidden, "inter": inter}
    if model is not None:
        if both := [name for name, value in given.items() if value is not None]:
            raise ForetuneError(f"{model} has its own {both[0]}: give a model, or dimensions without one")
        known = {one.model: one for one in load_models()}
        called = {name.partition("/")[0]: one for name, one in known.items()} | known  # "DeepSeek-V3/R1" by its first
        if model not in called:
            raise ForetuneError(f"unknown model {shown(model)}; known: {', '.join(known)}; others by their dimensions")
        one = called[model]
        if not one.is_gated:
            raise ForetuneError(f"the experts of {model} have no gate, and the engines' tuned files are for gated ones")
        sizes = (one.num_experts, one.top_k, one.expert_hidden_size, one.moe_intermediate_size)
        given = dict(zip(given, sizes, strict=True))
    if missing := [name for name, value in given.items() if value is None]:
        raise ForetuneError(
            f"{' and '.join(missing)} missing: a layer is a model's, or has experts, topk, hidden and inter (topk and "
            "hidden are in no file's name, but decide the times)"
        )
    whole = {name: check_integer(name, value, 1, LARGEST[name]) for name, value in given.items()}
    check_integer("tp", tp, 1, 1024)
    if dtype not in DTYPES:
        raise ForetuneError(f"dtype must be one of {', '.join(DTYPES)} but is {shown(dtype)}")
    if whole["topk"] > whole["experts"]:
        raise ForetuneError(f"topk must be at most experts, {whole['experts']}, but is {whole['topk']}")
    part, rest = divmod(whole["inter"], tp)
    if rest:
        raise ForetuneError(f"tp must divide inter, {whole['inter']}, but is {tp}")
    if dtype == "fp8e4m3" and part % SCALED_BLOCK:
        raise ForetuneError(
            f"a rank must have whole blocks of {SCALED_BLOCK} in fp8e4m3, but {whole['inter']} / {tp} is {part}: fewer "
            "ranks, or expert parallelism"
        )
    return Layer(**whole | {"inter": part}, dtype=dtype)
