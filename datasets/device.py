"""`DeviceSpec`: what a GPU is to a kernel."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import cache, cached_property
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from .console import table
from .errors import ForetuneError, abridged, check_flag, check_integer, check_path, check_word, shown
from .files import open_regular, replacing

#: The dtypes whose matrix rate a spec may have, sorted.
MATRIX_DTYPES = ("bf16", "fp16", "fp32")
# Dense fp16/bf16 matrix FLOPs per SM and clock, for cards nobody has measured yet (vendor whitepapers:
# A100 312 TF / 108 SM / 1.41 GHz, H100 990 / 132 / 1.83, B200 2250 / 148 / 1.9, MI300X 1307 / 304 / 2.1).
_MATRIX_FLOPS_PER_SM_CLOCK = {
    "sm_80": 2048,
    "sm_86": 512,
    "sm_89": 512,
    "sm_90": 4096,
    "sm_100": 8192,
    "gfx942": 2048,
}
# What a copy and a cuBLAS product reach of the theoretical figure on an H200 (4.3 of 4.8 TB/s, 785 of 1070 TFLOP/s).
_COPY_SHARE, _MATRIX_SHARE = 0.9, 0.73
# The share of the SMs that draws a card's whole bandwidth. Parts of an H200 copied at (GB/s, 2026-11) 1525 with 16 SMs,
# 2905 with 32, 4308 with 64, 4263 with 96, and all 132 at 4258: the rule is within 4 % of each. They read at 1961,
# 3262, 4421, 4052 and 4510: there it is 20 % low at 16. `pytest -m gpu -s tests/runtime/test_partition.py` prints them.
_SHARE_THAT_DRAWS_ALL = 0.35
#: No limit or rate of a GPU is near this, in whatever unit of `DeviceSpec`; the largest, bytes of L2, is a millionth.
_MOST = 10**15

#: What matrix units multiply twice as fast as bf16.
_TWICE_AS_FAST = frozenset({"fp8e4m3", "fp8e5m2", "fp8e4m3fnuz", "fp8e5m2fnuz", "int8"})
#: A spec takes some hundred bytes; reading its file stops here.
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class DeviceSpec:
    """A GPU's limits and rates. Heuristics take this and never query a device.

    `rates_measured` says whether the rates were measured on such a card or estimated from its clocks. Those without
    an estimate are only there where `foretune device` measured them.

    Raises `ForetuneError` naming a field that is not what a device can have.

    >>> DeviceSpec.named("h200").sm_count
    132
    >>> DeviceSpec.find("nowhere.json")
    Traceback (most recent call last):
    foretune.datasets.errors.ForetuneError: nowhere.json: cannot be read: No such file or directory
    """

    name: str
    backend: str  # cuda, hip, xpu or cpu
    arch: str  # sm_90, gfx942, ...
    sm_count: int
    smem_per_block_bytes: int
    smem_per_sm_bytes: int
    registers_per_sm: int
    l2_bytes: int
    warp_size: int
    clock_mhz: float
    copy_bandwidth_gbs: float  # device copy, bytes read + written
    matrix_tflops: float  # dense bf16 product on random data
    rates_measured: bool = False
    read_bandwidth_gbs: float | None = None  # reading alone, from memory
    l2_seen_bytes: int | None = None  # the largest set that is read again at the L2's speed
    matrix_tflops_by_dtype: tuple[tuple[str, float], ...] = ()  # (dtype, rate) as `matrix_tflops`, sorted by dtype

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, _checked(field.name, str(field.type), getattr(self, field.name)))
        _check_rates(self.matrix_tflops_by_dtype)

    @cached_property
    def card(self) -> str:
        """The name of the card that it is, or is a part of.

        >>> DeviceSpec.named("h200").with_sms(33).card
        'NVIDIA H200'
        """
        return re.sub(r" \(\d+ SMs\)$", "", self.name)

    @property
    def limits(self) -> dict[str, Any]:
        """Return what tells cards of one name apart, by field."""
        return {name: getattr(self, name) for name in _LIMITS}

    @classmethod
    def live(cls, index: int | None = None) -> DeviceSpec:
        """The spec of a live device (the current one unless `index` names another): queried limits, and the
        measured rates of a shipped spec of the same card where there is one.

        Raises `ForetuneError` where there is no device, or not so many, and where torch, which is asked for it, is
        not installed.
        """
        if index is not None:
            check_integer("the device's index", index, 0)
        try:
            import torch
        except ImportError:
            raise ForetuneError(
                "torch, which is asked for the GPU here, is not installed; devices that can be named instead: "
                f"{', '.join(cls.names())}"
            ) from None

        if not torch.cuda.is_available():
            raise ForetuneError(f"no GPU is visible here; devices that can be named instead: {', '.join(cls.names())}")
        if index is not None and index >= (found := torch.cuda.device_count()):
            raise ForetuneError(f"the device's index must be under {found}, as many as are here, but is {index}")
        properties = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
        spec = _from_properties(properties, hip=torch.version.hip is not None)
        for known in (cls.named(name) for name in cls.names()):
            if (known.name, known.sm_count) == (spec.name, spec.sm_count):
                return known
        return spec

    def matrix_tflops_of(self, *dtypes: str) -> float:
        """The rate that products of operands in these dtypes stay below: twice bf16's where all have 8 bits (NVIDIA's
        and AMD's data sheets since H100 and MI300X), else bf16's, which float32's is below in any precision.

        >>> DeviceSpec.named("h200").matrix_tflops_of("fp8e4m3"), DeviceSpec.named("h200").matrix_tflops_of("fp32")
        (1570.0, 785.0)
        """
        return self.matrix_tflops * (2.0 if _TWICE_AS_FAST.issuperset(dtypes) else 1.0)

    def with_sms(self, sm_count: int) -> DeviceSpec:
        """The spec of so many of its SMs (see `runtime.sm_partition`); itself where that is all of them.

        A rule, not a measurement: matrix rates in proportion to the SMs; bandwidths too, up to the whole card's, which
        about a third of the SMs draw. Limits, clock and L2 stay, because a partition has the L2 to itself.

        Raises `ForetuneError` for more SMs than there are.

        >>> DeviceSpec.named("h200").with_sms(33).matrix_tflops
        196.2
        """
        if not isinstance(sm_count, Integral) or isinstance(sm_count, bool) or not 1 <= sm_count <= self.sm_count:
            raise ForetuneError(f"{self.name} has 1 to {self.sm_count} SMs but {shown(sm_count)} were asked for")
        if sm_count == self.sm_count:
            return self
        share = sm_count / self.sm_count
        drawn = min(share / _SHARE_THAT_DRAWS_ALL, 1.0)
        by_dtype = tuple((dtype, round(rate * share, 1)) for dtype, rate in self.matrix_tflops_by_dtype)
        return replace(
            self,
            name=f"{self.name} ({sm_count} SMs)",
            sm_count=sm_count,
            copy_bandwidth_gbs=round(self.copy_bandwidth_gbs * drawn, 1),
            read_bandwidth_gbs=self.read_bandwidth_gbs and round(self.read_bandwidth_gbs * drawn, 1),
            matrix_tflops=round(self.matrix_tflops * share, 1),
            matrix_tflops_by_dtype=by_dtype,
            rates_measured=False,
        )

    @classmethod
    def named(cls, name: str) -> DeviceSpec:
        """A shipped spec, by its short name. Raises `ForetuneError` listing the names that exist."""
        if not isinstance(name, str) or name not in _shipped():
            raise ForetuneError(f"unknown device {shown(name)}; known: {', '.join(_shipped())}")
        return _shipped()[name]

    @staticmethod
    def names() -> list[str]:
        """Short names of the shipped specs."""
        return sorted(_shipped())

    @classmethod
    def find(cls, device: DeviceSpec | Path | str) -> DeviceSpec:
        """A spec as it is, a shipped one by its short name, or the one in a JSON file. Raises `ForetuneError` for what
        is none of these.

        >>> DeviceSpec.find("h200").name
        'NVIDIA H200'
        """
        if isinstance(device, DeviceSpec):
            return device
        if isinstance(device, str) and device in _shipped():
            return _shipped()[device]
        if isinstance(device, Path) or (isinstance(device, str) and (device.endswith(".json") or _is_there(device))):
            return cls.load(device)
        raise ForetuneError(
            f"unknown device {shown(device)}; known: {', '.join(_shipped())}, or the path of a spec's JSON file"
        )

    @classmethod
    def load(cls, path: Path | str) -> DeviceSpec:
        """The spec in a JSON file, as `save` or `foretune device --out` wrote it. Raises `ForetuneError` naming the
        file and what is wrong with it."""
        path = check_path("a device's file", path)
        try:
            return cls.from_json(json.loads(_content(path)))
        except OSError as error:
            raise ForetuneError(f"{abridged(str(path))}: cannot be read: {error.strerror}") from None
        except ForetuneError as error:
            raise ForetuneError(f"{abridged(str(path))}: {error}") from None
        except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, a number of 5,000 digits, a path with NUL
            raise ForetuneError(f"{abridged(str(path))}: not JSON: {error}") from None

    def save(self, path: Path | str) -> None:
        """Writes the spec as a JSON file that `load` reads: whole or not at all."""
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(self.to_json(), indent=1) + "\n")

    def to_json(self) -> dict[str, Any]:
        """All fields; those that were never measured are left out, so that specs of before they existed stay as
        they were."""
        value = asdict(self) | {"matrix_tflops_by_dtype": dict(self.matrix_tflops_by_dtype)}
        return {name: value[name] for name in value if name not in _ONLY_MEASURED or value[name]}

    def __rich__(self) -> Any:
        """What `rich.print` and a notebook show: a field a row."""
        fields_shown = {name: value for name, value in self.to_json().items() if not isinstance(value, Mapping)}
        rates = {f"matrix_tflops, {dtype}": rate for dtype, rate in self.matrix_tflops_by_dtype}
        return table(self.name, ("", "value"), [row for row in (fields_shown | rates).items() if row[0] != "name"])

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> DeviceSpec:
        """The inverse of `to_json`. Raises `ForetuneError` naming fields that are missing, unknown or wrong."""
        if not isinstance(value, Mapping):
            raise ForetuneError(f"not a device spec: {shown(value)}")
        known = {field.name for field in fields(cls)}
        required = {field.name for field in fields(cls) if field.default is MISSING}
        wrong = sorted(map(str, (required - value.keys()) | (value.keys() - known)))
        if wrong:
            raise ForetuneError(f"not a device spec: fields missing or unknown: {abridged(', '.join(wrong))}")
        by_dtype = value.get("matrix_tflops_by_dtype", {})
        if not isinstance(by_dtype, Mapping):
            raise ForetuneError(_NO_RATES.format(shown(by_dtype)))
        return cls(**{**value, "matrix_tflops_by_dtype": tuple(sorted(by_dtype.items(), key=str))})


#: Fields in which two cards of one name differ only if they are not alike. (Others are rates, or what some releases of
#: torch do not say, so that one card may have two values.)
_LIMITS = ("backend", "arch", "sm_count", "l2_bytes", "warp_size")
#: Fields that only `foretune device` fills.
_ONLY_MEASURED = ("read_bandwidth_gbs", "l2_seen_bytes", "matrix_tflops_by_dtype")


_NO_RATES = f"matrix_tflops_by_dtype must have rates of {', '.join(MATRIX_DTYPES)} but is {{}}"


def _checked(name: str, kind: str, value: Any) -> Any:
    """The value of a field of that type, in Python's own types. Raises `ForetuneError` for what no device can have."""
    if kind == "str":
        return check_word(name, value)
    if kind == "bool":
        return check_flag(name, value)
    if kind.startswith("tuple") or (value is None and kind.endswith("None")):
        return value
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not (is_number and 0 < value <= _MOST):
        raise ForetuneError(f"{name} must be a positive number but is {shown(value)}")
    if kind.startswith("int") and value != int(value):
        raise ForetuneError(f"{name} must be a whole number but is {shown(value)}")
    return int(value) if kind.startswith("int") or isinstance(value, Integral) else float(value)


def _check_rates(rates: Any) -> None:
    pairs = isinstance(rates, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in rates)
    dtypes = [dtype for dtype, _ in rates] if pairs else []
    if not pairs or dtypes != [dtype for dtype in MATRIX_DTYPES if dtype in dtypes]:
        raise ForetuneError(_NO_RATES.format(shown(rates)))
    for dtype, rate in rates:
        _checked(dtype, "float", rate)


@cache
def _shipped() -> dict[str, DeviceSpec]:
    """By short name. Read once: a call that names its device takes microseconds."""
    files = sorted((Path(__file__).parent / "devices").iterdir())
    return {file.name.removesuffix(".json"): DeviceSpec.from_json(json.loads(file.read_text())) for file in files}


def _is_there(path: str) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError):  # too long, or with a NUL
        return False


def _from_properties(p: Any, *, hip: bool) -> DeviceSpec:
    """A spec from `torch.cuda.get_device_properties`, with rates estimated from clocks and bus width."""
    arch = p.gcnArchName.split(":")[0] if hip else f"sm_{p.major}{p.minor}"
    clock_mhz = getattr(p, "clock_rate", 1_500_000) / 1000
    bus_gbs = 2 * getattr(p, "memory_clock_rate", 2_000_000) * 1e3 * getattr(p, "memory_bus_width", 4096) / 8 / 1e9
    flops = _MATRIX_FLOPS_PER_SM_CLOCK.get(arch, 1024)
    smem_per_block = getattr(p, "shared_memory_per_block_optin", 0) or p.shared_memory_per_block
    return DeviceSpec(
        name=p.name,
        backend="hip" if hip else "cuda",
        arch=arch,
        sm_count=p.multi_processor_count,
        smem_per_block_bytes=smem_per_block,
        smem_per_sm_bytes=getattr(p, "shared_memory_per_multiprocessor", smem_per_block),
        registers_per_sm=getattr(p, "regs_per_multiprocessor", 65536),
        l2_bytes=p.L2_cache_size,
        warp_size=p.warp_size,
        clock_mhz=clock_mhz,
        copy_bandwidth_gbs=round(_COPY_SHARE * bus_gbs, 1),
        matrix_tflops=round(_MATRIX_SHARE * p.multi_processor_count * clock_mhz * 1e6 * flops / 1e12, 1),
    )


def _content(path: Path) -> bytes:
    with os.fdopen(open_regular(path, follow=True), "rb") as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ForetuneError(f"larger than any device's spec ({_MOST_BYTES >> 20} MiB)")
    return content
