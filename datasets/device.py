"""`DeviceSpec`: the limits and rates of a GPU."""

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
from .files import file_word, read_regular, replacing

#: The dtypes for which a spec may have a measured matrix rate, sorted.
MATRIX_DTYPES = ("bf16", "fp16", "fp32")
# Dense fp16/bf16 matrix FLOPs per SM and clock cycle, for cards that were not measured (vendor whitepapers:
# A100 312 TF / 108 SM / 1.41 GHz, H100 990 / 132 / 1.83, B200 2250 / 148 / 1.9, MI300X 1307 / 304 / 2.1).
_MATRIX_FLOPS_PER_SM_CLOCK = {
    "sm_80": 2048,
    "sm_86": 512,
    "sm_89": 512,
    "sm_90": 4096,
    "sm_100": 8192,
    "gfx942": 2048,
}
# The shares of the theoretical rates that a copy and a cuBLAS product reach on an H200 (4.3 of 4.8 TB/s, 785 of 1070
# TFLOP/s).
_COPY_SHARE, _MATRIX_SHARE = 0.9, 0.73
# The most that one SM copies, in GB/s. Parts of an H200 copied at 1525 GB/s with 16 SMs, 2905 with 32, 4308 with 64,
# 4263 with 96 and 4258 with all 132, those of an H100 at 1473, 2790, 3041, 3025 and 3022 (2026-11): the rule is within
# 7 % of each. They read at 1961, 3262, 4421, 4052 and 4510, and at 1850, 2735, 3098, 2903 and 3066, where the rule is
# 20 % low at 16 SMs. `pytest -m gpu -s tests/runtime/test_partition.py` prints these figures.
_GBS_OF_AN_SM = 93.0
#: Upper bound of every number of a spec. The largest real one, bytes of L2, is a millionth of it.
_MOST = 10**15

#: Dtypes that matrix units multiply twice as fast as bf16.
_TWICE_AS_FAST = frozenset({"fp8e4m3", "fp8e5m2", "fp8e4m3fnuz", "fp8e5m2fnuz", "int8"})
#: The largest file that is read as a spec. Real ones have a few hundred bytes.
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class DeviceSpec:
    """The limits and rates of a GPU. Predictions use this value and never query a device.

    Rates were either measured on a card of this kind (`rates_measured`) or estimated from its clocks. The fields that
    default to None or () are only known if `foretune device` measured them.

    Attributes:
        name: The name that the driver reports, e.g. "NVIDIA H200".
        backend: "cuda", "hip", "xpu" or "cpu".
        arch: The architecture: "sm_90", "gfx942", ...
        sm_count: The number of streaming multiprocessors (SMs).
        smem_per_block_bytes: The maximum shared memory of a block.
        smem_per_sm_bytes: The shared memory of an SM.
        registers_per_sm: The 32-bit registers of an SM.
        l2_bytes: The size of the L2 cache.
        warp_size: The threads of a warp.
        clock_mhz: The highest SM clock.
        copy_bandwidth_gbs: GB/s of a copy from memory to memory, counting bytes read plus bytes written.
        matrix_tflops: TFLOP/s of a dense bf16 matrix product of random data.
        rates_measured: Whether the rates were measured rather than estimated.
        read_bandwidth_gbs: GB/s of reading from memory.
        l2_seen_bytes: The largest working set that is re-read at the speed of the L2.
        matrix_tflops_by_dtype: (dtype, TFLOP/s) as for `matrix_tflops`, sorted by dtype.

    Raises:
        ForetuneError: A field has a value that no device can have. The message names it.

    >>> DeviceSpec.named("h200").sm_count
    132
    >>> DeviceSpec.find("nowhere.json")
    Traceback (most recent call last):
    foretune.datasets.errors.ForetuneError: nowhere.json: cannot be read: No such file or directory
    """

    name: str
    backend: str
    arch: str
    sm_count: int
    smem_per_block_bytes: int
    smem_per_sm_bytes: int
    registers_per_sm: int
    l2_bytes: int
    warp_size: int
    clock_mhz: float
    copy_bandwidth_gbs: float
    matrix_tflops: float
    rates_measured: bool = False
    read_bandwidth_gbs: float | None = None
    l2_seen_bytes: int | None = None
    matrix_tflops_by_dtype: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, _checked(field.name, str(field.type), getattr(self, field.name)))
        _check_rates(self.matrix_tflops_by_dtype)

    @cached_property
    def card(self) -> str:
        """The name of the whole card, also for a spec of some of its SMs (see `with_sms`).

        >>> DeviceSpec.named("h200").with_sms(33).card
        'NVIDIA H200'
        """
        return re.sub(r" \(\d+ SMs\)$", "", self.name)

    @property
    def card_word(self) -> str:
        """The card's name for names of files with tuned configs: torch's name with underscores instead of spaces.

        >>> DeviceSpec.named("h100").card_word
        'NVIDIA_H100_80GB_HBM3'
        """
        word = self.card.replace(" ", "_")
        if re.search(r"[^\w.,()+@-]", word) or len(word) > _LONGEST_CARD:
            return file_word(word)  # makes a valid file name, which nobody looks up
        return word

    @property
    def limits(self) -> dict[str, Any]:
        """The fields that must agree if two specs of one name describe the same hardware."""
        return {name: getattr(self, name) for name in _LIMITS}

    @classmethod
    def live(cls, index: int | None = None) -> DeviceSpec:
        """Return the spec of a GPU of this machine.

        If a shipped spec has the same name and number of SMs, it is returned, because its rates are measured.
        Otherwise limits are queried from torch, and rates are estimated from clocks and bus width.

        Args:
            index: The GPU's index; None selects the current one.

        Raises:
            ForetuneError: There is no such GPU, or torch is not installed.
        """
        if index is not None:
            check_integer("the device's index", index, 0)
        try:
            import torch
        except ImportError:
            raise ForetuneError(
                "the GPU of this machine cannot be queried, because torch is not installed. Devices that can be named "
                f"instead: {', '.join(cls.names())}"
            ) from None

        if not torch.cuda.is_available():
            raise ForetuneError(f"no GPU is visible here. Devices that can be named instead: {', '.join(cls.names())}")
        if index is not None and index >= (found := torch.cuda.device_count()):
            raise ForetuneError(f"the device's index must be below {found}, the number of GPUs, but is {index}")
        properties = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
        spec = _from_properties(properties, hip=torch.version.hip is not None)
        for known in (cls.named(name) for name in cls.names()):
            if (known.name, known.sm_count) == (spec.name, spec.sm_count):
                return known
        return spec

    def matrix_tflops_of(self, *dtypes: str) -> float:
        """Return an upper bound in TFLOP/s for products of operands in these dtypes.

        It is twice the bf16 rate if all operands have 8 bits (the data sheets of NVIDIA and AMD since H100 and MI300X),
        and the bf16 rate otherwise; products in float32 or TF32 are slower than that.

        >>> DeviceSpec.named("h200").matrix_tflops_of("fp8e4m3"), DeviceSpec.named("h200").matrix_tflops_of("fp32")
        (1570.0, 785.0)
        """
        return self.matrix_tflops * (2.0 if _TWICE_AS_FAST.issuperset(dtypes) else 1.0)

    def with_sms(self, sm_count: int) -> DeviceSpec:
        """Return the spec of a partition of the card with this many SMs (see `runtime.sm_partition`).

        The rates follow a rule and are not measured: matrix rates are proportional to the number of SMs; so are
        bandwidths, 93 GB/s for each SM, up to those of the card. Limits, clock and L2 do not change, because nothing
        else uses the L2 while a partition is measured.

        Raises:
            ForetuneError: `sm_count` is not between 1 and the number of SMs.

        >>> DeviceSpec.named("h200").with_sms(33).matrix_tflops
        196.2
        """
        if not isinstance(sm_count, Integral) or isinstance(sm_count, bool) or not 1 <= sm_count <= self.sm_count:
            raise ForetuneError(
                f"the number of SMs must be 1 to {self.sm_count} for {self.name} but is {shown(sm_count)}"
            )
        if sm_count == self.sm_count:
            return self
        share = sm_count / self.sm_count
        most_gbs = sm_count * _GBS_OF_AN_SM
        by_dtype = tuple((dtype, round(rate * share, 1)) for dtype, rate in self.matrix_tflops_by_dtype)
        return replace(
            self,
            name=f"{self.name} ({sm_count} SMs)",
            sm_count=sm_count,
            copy_bandwidth_gbs=min(self.copy_bandwidth_gbs, most_gbs),
            read_bandwidth_gbs=self.read_bandwidth_gbs and min(self.read_bandwidth_gbs, most_gbs),
            matrix_tflops=round(self.matrix_tflops * share, 1),
            matrix_tflops_by_dtype=by_dtype,
            rates_measured=False,
        )

    @classmethod
    def named(cls, name: str) -> DeviceSpec:
        """Return a shipped spec by its short name; raise `ForetuneError` that lists the names for an unknown one."""
        if not isinstance(name, str) or name not in _shipped():
            raise ForetuneError(f"unknown device {shown(name)}; known: {', '.join(_shipped())}")
        return _shipped()[name]

    @staticmethod
    def names() -> list[str]:
        """Return the short names of the shipped specs."""
        return sorted(_shipped())

    @classmethod
    def find(cls, device: DeviceSpec | Path | str) -> DeviceSpec:
        """Return the spec that is given as a `DeviceSpec`, as a shipped spec's short name or as a JSON file's path.

        Raises:
            ForetuneError: The name is unknown, or the file is not a spec.

        >>> DeviceSpec.find("h200").name
        'NVIDIA H200'
        """
        if isinstance(device, DeviceSpec):
            return device
        if isinstance(device, str) and device in _shipped():
            return _shipped()[device]
        is_file = isinstance(device, str) and (device.endswith(".json") or os.path.exists(device))
        if is_file or isinstance(device, Path):
            return cls.load(device)
        raise ForetuneError(
            f"unknown device {shown(device)}; known: {', '.join(_shipped())}, or the path of a spec's JSON file"
        )

    @classmethod
    def load(cls, path: Path | str) -> DeviceSpec:
        """Return the spec in a JSON file that `save` or `foretune device --out` wrote.

        Raises:
            ForetuneError: The file is not a spec. The message names the file and what is wrong.
        """
        path = check_path("a device's file", path)
        try:
            return cls.from_json(json.loads(read_regular(path, _MOST_BYTES, follow=True)))
        except OSError as error:
            raise ForetuneError(f"{abridged(str(path))}: cannot be read: {error.strerror}") from None
        except ForetuneError as error:
            raise ForetuneError(f"{abridged(str(path))}: {error}") from None
        except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or a number of 5,000 digits
            raise ForetuneError(f"{abridged(str(path))}: not JSON: {error}") from None

    def save(self, path: Path | str) -> None:
        """Write the spec atomically as a JSON file that `load` reads."""
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(self.to_json(), indent=1) + "\n")

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a dict for `json.dumps`.

        Optional rates that were not measured are left out, so that older specs are written unchanged.
        """
        value = asdict(self) | {"matrix_tflops_by_dtype": dict(self.matrix_tflops_by_dtype)}
        return {name: value[name] for name in value if name not in _ONLY_MEASURED or value[name]}

    def __rich__(self) -> Any:
        """Return a table with one field in each row, for `rich.print` and notebooks."""
        fields_shown = {name: value for name, value in self.to_json().items() if not isinstance(value, Mapping)}
        rates = {f"matrix_tflops, {dtype}": rate for dtype, rate in self.matrix_tflops_by_dtype}
        return table(self.name, ("", "value"), [row for row in (fields_shown | rates).items() if row[0] != "name"])

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> DeviceSpec:
        """Return the spec in a dict from `to_json`; raise `ForetuneError` for missing, unknown or wrong fields."""
        if not isinstance(value, Mapping):
            raise ForetuneError(f"not a device spec, which is a JSON object: {shown(value)}")
        known = {field.name for field in fields(cls)}
        required = {field.name for field in fields(cls) if field.default is MISSING}
        wrong = sorted(map(str, (required - value.keys()) | (value.keys() - known)))
        if wrong:
            raise ForetuneError(f"not a device spec: fields missing or unknown: {abridged(', '.join(wrong))}")
        by_dtype = value.get("matrix_tflops_by_dtype", {})
        if not isinstance(by_dtype, Mapping):
            raise ForetuneError(_NO_RATES.format(shown(by_dtype)))
        return cls(**{**value, "matrix_tflops_by_dtype": tuple(sorted(by_dtype.items(), key=str))})


#: Most characters of a card's name in a file name; longer than any real name.
_LONGEST_CARD = 60
#: Fields that are equal for all cards of one kind. Other fields are rates, or are not reported by some versions of
#: torch, so that one card may have two values.
_LIMITS = ("backend", "arch", "sm_count", "l2_bytes", "warp_size")
#: Fields that only `foretune device` fills.
_ONLY_MEASURED = ("read_bandwidth_gbs", "l2_seen_bytes", "matrix_tflops_by_dtype")


_NO_RATES = f"matrix_tflops_by_dtype must map dtypes ({', '.join(MATRIX_DTYPES)}) to rates but is {{}}"


def _checked(name: str, type_name: str, value: Any) -> Any:
    """Return a field's value in Python's own types; raise `ForetuneError` for one that no device can have."""
    if type_name == "str":
        return check_word(name, value)
    if type_name == "bool":
        return check_flag(name, value)
    if type_name.startswith("tuple") or (value is None and type_name.endswith("None")):
        return value
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not (is_number and 0 < value <= _MOST):
        raise ForetuneError(f"{name} must be a positive number but is {shown(value)}")
    if type_name.startswith("int") and value != int(value):
        raise ForetuneError(f"{name} must be a whole number but is {shown(value)}")
    return int(value) if type_name.startswith("int") or isinstance(value, Integral) else float(value)


def _check_rates(rates: Any) -> None:
    """Raise `ForetuneError` unless the value is pairs (dtype of `MATRIX_DTYPES`, positive rate), sorted by dtype."""
    pairs = isinstance(rates, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in rates)
    dtypes = [dtype for dtype, _ in rates] if pairs else []
    if not pairs or dtypes != [dtype for dtype in MATRIX_DTYPES if dtype in dtypes]:
        raise ForetuneError(_NO_RATES.format(shown(rates)))
    for dtype, rate in rates:
        _checked(dtype, "float", rate)


@cache
def _shipped() -> dict[str, DeviceSpec]:
    """Return the shipped specs by short name. Cached, so that naming a device in a call takes microseconds."""
    files = sorted((Path(__file__).parent / "devices").iterdir())
    return {file.name.removesuffix(".json"): DeviceSpec.from_json(json.loads(file.read_text())) for file in files}


def _from_properties(p: Any, *, hip: bool) -> DeviceSpec:
    """Return the spec for torch's device properties `p` (HIP's if `hip`), with rates estimated from clocks."""
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
