"""Calls of the face, with arguments that are right, odd, or each right and wrong together."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import foretune
import numpy as np
from fakes import DEVICE, FakeFamily, fake_cases
from foretune.datasets import Ragged, Status
from foretune.runtime import make_shortlist
from forging import hand_made
from fuzz.judging import REFUSED, TroubleError, within
from fuzz.oddities import VALUES
from hypothesis import strategies as st

FAMILY, CASES, BUNDLE = FakeFamily(), fake_cases(models=1), hand_made()
CONFIGS = FAMILY.space()
TRITON_CONFIGS = [config.to_triton() for config in CONFIGS[:6]]
PROBLEM = CASES[0].problem
OTHER = foretune.Problem.of("grouped_gemm_fwd", groups=8, rows=256, n=512, k=512)
ROOT = Path(foretune.__file__).parent
MEASURED = ROOT / "kernels" / "examples" / "measured_h200"
#: By what an argument is for; odd values may stand for any of them.
RIGHT: dict[str, list[Any]] = {
    "family": ["grouped_gemm_fwd", FAMILY, FakeFamily, "fakes:FakeFamily"],
    "problem": [PROBLEM, OTHER, PROBLEM.without_sizes()],
    "device": ["h200", DEVICE],
    "k": [1, 3, 1000, np.int64(2)],
    "configs": [CONFIGS[:5], list(CONFIGS[:5]), None],
    "bundle": [BUNDLE, None],
    "text": ["fake", "rows", "bf16"],
    "dataset": [MEASURED, str(MEASURED)],
    "bundle folder": [ROOT / "model" / "shipped", None],
    "knobs": [None, {"BM": "BLOCK_M"}, {"BLOCK_M": "BLOCK_M"}],
    "fixed": [None, {"BLOCK_M": 16}, {}],
    "triton configs": [TRITON_CONFIGS, TRITON_CONFIGS[:1]],
    "triton config": TRITON_CONFIGS,
    "triton's own": [TRITON_CONFIGS, TRITON_CONFIGS[:1]],
    "launch": [{"x": 1}, {}],
    "cover sizes": [[8, 16, 16], [12]],
    "space": [{"BLOCK_M": [16, 32], "num_warps": (4, 8)}, {"BLOCK": range(3)}],
    "list": ["default", "scaled"],
    "shape": [None, (1, 4096, 512)],
    "sizes": [(8, 8), (0, 16), [1, 2]],
    "cases": [CASES[:2], None, []],
    "plan": ["exhaustive", "adaptive"],
    "seconds": [None, 1.5, 60],
    "yes or no": [True, False],
    "size": [1, 64, 4096],
    "dtype": ["bf16", {"x": "bf16", "w": "fp16"}],
    "ragged": [None, {"rows": (8, 8)}, Ragged("rows", (16,))],
    "flags": [(), ("permute_x",)],
    "config": [CONFIGS[0], CONFIGS[7]],
    "status": list(Status),
    "time": [None, 10.0, 3],
    "json": [PROBLEM.to_json(), CONFIGS[0].to_json(), DEVICE.to_json()],
}
_OBJECTS: list[Any] = [
    object(), b"x", (), set(), float, Path("nowhere"), np.array([1, 2]), np.nan, lambda *_, **__: None, PROBLEM, DEVICE,
    CONFIGS[0], BUNDLE, FAMILY, Status.OK, {"x": object()}, [[[]]] * 3, range(3), 10**4000, "\ud800",
]  # fmt: skip
ODD = [value for value in VALUES if value not in ("h100", "h200")] + _OBJECTS
#: What is called, and what its arguments are for.
CALLS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "configs": (foretune.configs, ("family",)),
    "prune": (foretune.prune, ("family", "k")),
    "prune of all": (lambda f, k, d, b: foretune.prune(f, k, device=d, bundle=b), ("family", "k", "device", "bundle")),
    "shortlist": (
        lambda f, p, d, k, c, b: foretune.shortlist(f, p, d, k, configs=c, bundle=b),
        ("family", "problem", "device", "k", "configs", "bundle"),
    ),
    "make_shortlist": (
        lambda p, k, c, b: make_shortlist(FAMILY, p, DEVICE, k=k, configs=c, bundle=b),
        ("problem", "k", "configs", "bundle"),
    ),
    "cover": (
        lambda f, p, d, n, s, b: foretune.cover(f, p, "rows", (8, 16), n, device=d, sizes=s, bundle=b),
        ("family", "problem", "device", "k", "cover sizes", "bundle"),
    ),
    "cover of a range": (
        lambda dynamic, low, high: foretune.cover(
            FAMILY, PROBLEM, dynamic, (low, high), 2, device=DEVICE, bundle=BUNDLE
        ),
        ("text", "size", "size"),
    ),
    "generate": (foretune.spaces.generate, ("space",)),
    "ready_space": (foretune.spaces.ready_space, ("family", "device")),
    "filter_valid": (foretune.spaces.filter_valid, ("configs", "problem", "device")),
    "matmul_configs": (
        lambda d, w, s, t: foretune.spaces.matmul_configs(d, w, shape=s, dtype=t, TMA=[0, 1]),
        ("device", "list", "shape", "dtype"),
    ),
    "prune of own words": (
        lambda k, n, f, c: foretune.prune(FAMILY, k, knobs=n, fixed=f, configs=c),
        ("k", "knobs", "fixed", "triton configs"),
    ),
    "a launch": (
        lambda p, c, a: foretune.prune(FAMILY, 2, problem=lambda _: p, device=DEVICE, bundle=BUNDLE)(c, a),
        ("problem", "triton's own", "launch"),
    ),
    "load_bundle": (foretune.load_bundle, ("bundle folder",)),
    "load": (foretune.datasets.load, ("dataset",)),
    "describe": (foretune.datasets.describe, ("dataset",)),
    "Ragged": (Ragged, ("text", "sizes")),
    "KernelConfig.from_triton": (foretune.KernelConfig.from_triton, ("triton config",)),
    "collect_dataset": (
        lambda f, c, p, b, g, r: foretune.collect_dataset(
            f, out="/dev/null/none", cases=c, plan=p, budget_s=b, gpus=g, resume=r, progress=False
        ),
        ("family", "cases", "plan", "seconds", "k", "yes or no"),
    ),
    "Problem.of": (
        lambda f, d, g, r, rows, n: foretune.Problem.of(f, dtype=d, flags=g, ragged=r, rows=rows, n=n),
        ("text", "dtype", "flags", "ragged", "size", "size"),
    ),
    "Problem.from_json": (foretune.Problem.from_json, ("json",)),
    "KernelConfig.of": (
        lambda b, w, s: foretune.KernelConfig.of(BLOCK_M=b, num_warps=w, num_stages=s),
        ("size", "size", "size"),
    ),
    "KernelConfig.from_json": (foretune.KernelConfig.from_json, ("json",)),
    "DeviceSpec.from_json": (foretune.DeviceSpec.from_json, ("json",)),
    "DeviceSpec.named": (foretune.DeviceSpec.named, ("device",)),
    "DeviceSpec.find": (foretune.DeviceSpec.find, ("device",)),
    "with_sms": (DEVICE.with_sms, ("size",)),
    "Case": (foretune.Case, ("problem", "flags", "text")),
    "Measurement": (
        lambda p, d, c, s, t: foretune.Measurement(p, d, c, s, time_us=t),
        ("problem", "text", "config", "status", "time"),
    ),
}


class Call(NamedTuple):
    name: str
    arguments: tuple[Any, ...]


def _argument(purpose: str) -> st.SearchStrategy[Any]:
    odd, right = st.sampled_from(ODD), st.sampled_from(RIGHT[purpose])
    if purpose == "triton's own":  # what Triton hands over is what was declared
        return right
    return st.integers(0, 3).flatmap(lambda drawn: odd if drawn == 3 else right)


inputs = st.sampled_from(sorted(CALLS)).flatmap(
    lambda name: st.tuples(*map(_argument, CALLS[name][1])).map(lambda arguments: Call(name, arguments))
)


def check(call: Call, folder: Path) -> str:
    function, _ = CALLS[call.name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            answer = within(lambda: function(*call.arguments))
        except TroubleError as trouble:
            raise TroubleError(trouble.kind, f"{call.name}: {trouble.where}", trouble.text) from None
        if answer is REFUSED:
            return "refused"
        _check_answer(call, answer)
    return "answered"


def _check_answer(call: Call, answer: Any) -> None:
    """What is taken can be said: it has a text, equals itself, and its JSON comes back."""
    try:
        repr(answer), str(answer)
        if call.name.startswith(("Problem", "KernelConfig", "DeviceSpec", "with_sms")):
            hash(answer)
            value = json.loads(json.dumps(answer.to_json(), allow_nan=False))
            if type(answer).from_json(value) != answer:
                raise TroubleError("silent change", f"{call.name}: its JSON comes back as another")
        if "shortlist" in call.name:
            k = call.arguments[CALLS[call.name][1].index("k")]
            if not answer.configs or (answer.predicted and len(answer.configs) > k):
                raise TroubleError("silent change", f"{call.name}: another number of configs", f"k={k!r}")
            json.dumps(answer.to_json(), allow_nan=False)
        if call.name == "a launch":
            _, given, _ = call.arguments
            if not answer or {*map(id, answer)} - {*map(id, given)} or len(answer) > len(given):
                raise TroubleError("silent change", "a launch: none of its configs, or others")
        if call.name.startswith("prune"):
            k = call.arguments[CALLS[call.name][1].index("k")]
            if isinstance(k, bool) or int(k) != k or type(k) not in (int, np.int64):
                raise TroubleError("silent change", f"{call.name}: a k that is none is taken", repr(k))
    except TroubleError:
        raise
    except Exception as error:
        where = f"{call.name}: taken, but {type(error).__name__} afterwards"
        raise TroubleError("silent change", where, str(error)[:120]) from error
