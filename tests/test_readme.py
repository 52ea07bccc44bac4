"""What READMEs say of the Python face is there, and what the first one shows runs."""

from __future__ import annotations

import importlib
import re
import warnings
from pathlib import Path

import foretune
import pytest
from foretune.datasets import DeviceSpec

ROOT = Path(__file__).parents[1]
READMES = [ROOT / "README.md", *sorted(ROOT.glob("[!.]*/**/README.md"))]
#: What the example takes for granted: somebody's kernel, in words of its own.
KERNEL = """
import triton
import triton.language as tl


@triton.jit
def my_grouped_gemm(x_ptr, w_ptr, y_ptr, ends_ptr, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    group, n, end = tl.program_id(0), tl.program_id(1) * BN + tl.arange(0, BN), tl.load(ends_ptr + tl.program_id(0))
    m, total = end - BM + tl.arange(0, BM), tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        x = tl.load(x_ptr + m[:, None] * K + k[None, :], mask=m[:, None] >= 0, other=0.0)
        w = tl.load(w_ptr + (group * N + n[None, :]) * K + k[:, None], mask=n[None, :] < N, other=0.0)
        total = tl.dot(x, w, total)
    tl.store(y_ptr + m[:, None] * N + n[None, :], total.to(tl.bfloat16), mask=(m[:, None] >= 0) & (n[None, :] < N))
"""


@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_is_named_is_there(readme):
    for name in re.findall(r"\bforetune((?:\.[A-Za-z_]\w*)+)", readme.read_text()):
        found, place = foretune, "foretune"
        for part in name[1:].split("."):
            place = f"{place}.{part}"
            if part in ("py", "families") and place != "foretune.families":
                break  # a file, or the group of entry points
            found = getattr(found, part) if hasattr(found, part) else importlib.import_module(place)
        assert found is not None, place


def prose(readme: Path) -> str:
    return re.sub(r"```.*?```|`[^`]*`", "", readme.read_text(), flags=re.DOTALL)


def anchors(readme: Path) -> set[str]:
    """What a link can name of a page: its headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.*)$", readme.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(readme):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(readme)):
        path, _, anchor = target.partition("#")
        if "://" not in path:
            there = readme.parent / path if path else readme
            assert there.exists(), target
            assert not anchor or anchor in anchors(there), target


@pytest.mark.compile
@pytest.mark.usefixtures("own_cache")
def test_the_kernel_of_the_readme_is_pruned(monkeypatch, tmp_path):
    torch = pytest.importorskip("torch")
    example = next(
        code
        for code in re.findall(r"```python\n(.*?)```", READMES[0].read_text(), re.DOTALL)
        if "my_grouped_gemm" in code
    )
    (tmp_path / "my_kernels.py").write_text(KERNEL)
    (tmp_path / "my_example.py").write_text(
        f"import foretune\nimport triton\nfrom my_kernels import my_grouped_gemm\n{example}"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("foretune.runtime.launching.stub_driver.live", lambda index: DeviceSpec.named("h200"))
    tuned = importlib.import_module("my_example").tuned
    x, w = torch.zeros(64, 128, dtype=torch.bfloat16), torch.zeros(2, 64, 128, dtype=torch.bfloat16)
    ends = torch.tensor([32, 64], dtype=torch.int32)
    with foretune.runtime.use_stub_driver(DeviceSpec.named("h200")), warnings.catch_warnings():
        warnings.simplefilter("error", foretune.ForetuneWarning)
        tuned[lambda knobs: (2, -(-64 // knobs["BN"]))](x, w, torch.zeros(64, 64, dtype=torch.bfloat16), ends, 64, 128)
    assert (len(tuned.configs), len(tuned.configs_timings)) == (4, 2)
