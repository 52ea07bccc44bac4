"""Pin files that somebody changed, with a checksum that fits or not, and every reader of them."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from contextlib import chdir, suppress
from pathlib import Path
from typing import Any, NamedTuple

import foretune
from foretune.kernels import families
from foretune.runtime.pin_file import PinFile, PinnedFunction, Versions, _checksum
from foretune.runtime.tuning.cache.exports import export_fla_tables, freeze_choices
from foretune.runtime.tuning.cache.pinning import check_pins
from fuzz.caches import _snapshot
from fuzz.judging import REFUSED, same, within
from fuzz.oddities import Change, changed, changes, text_of
from hypothesis import strategies as st
from pinning import H100, pinned_kernel
from remembered import CONFIGS, H200, KERNEL, problem

_LAUNCHES = ({"names": ["rows"], "key": [64, 0.5, True, None, "bf16"], "config": CONFIGS[1].to_json()},)
_KERNEL = pinned_kernel(KERNEL, {problem(rows): CONFIGS[0] for rows in (64, 1024)}).to_json()
_KERNEL["choices"][0]["launches"] = list(_LAUNCHES)
FILE: dict[str, Any] = PinFile(
    (), (PinnedFunction("a.scale", "a CPU", "d", Versions("2", "3", "on"), {"[8]": {"": "{}"}}),)
).to_json()
FILE["kernels"] = [_KERNEL, pinned_kernel("other", {}, device=H100).to_json()]


class Changed(NamedTuple):
    changes: tuple[Change, ...]
    is_sealed: bool


inputs = st.builds(
    Changed, st.lists(changes(FILE), min_size=1, max_size=2).map(tuple), st.sampled_from([True] * 7 + [False])
)


def check(given: Changed, folder: Path) -> str:
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    (run / "outside").mkdir(parents=True)
    value = json.loads(json.dumps(FILE))
    for change in given.changes:
        value = changed(value, change)
    if given.is_sealed and isinstance(value, dict):
        with suppress(ValueError, RecursionError):  # of more digits or lists than Python reads
            content = json.loads(text_of({name: one for name, one in value.items() if name != "checksum"}))
            value["checksum"] = _checksum(content)
    path = run / "foretune.lock"
    path.write_text(text_of(value), errors="surrogatepass")
    os.environ["FORETUNE_CACHE_DIR"] = str(run / "cache")
    with chdir(run), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        read = within(lambda: PinFile.read(path))
        if read is REFUSED:
            within(lambda: foretune.pinned(path).__exit__())
            return "refused"
        same("its own text", read.text(), PinFile.from_json(json.loads(read.text())).text())
        within(lambda: foretune.pinned(path).__exit__())
        within(lambda: check_pins(path, H200, families().get).to_json())
        for kernel in {one.kernel for one in read.kernels}:
            within(lambda kernel=kernel: freeze_choices(kernel, pins=read))
        within(lambda: export_fla_tables(run / "out", pins=read))
    same("what lies outside", {}, _snapshot(run / "outside"))
    same("what lies beside", {"foretune.lock", "outside"}, {one.name for one in run.iterdir()} - {"out", "cache"})
    return "answered"
